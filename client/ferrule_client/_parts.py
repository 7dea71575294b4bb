"""Lists of handles, cut into parts that a server accepts in one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ferrule.v1 import types_pb2
from ferrule_client import _convert
from ferrule_client._route import by_instance, instance_of_handle
from ferrule_client.errors import FerruleError, InvalidRequestError, MessageTooLargeError, RequestTooLargeError
from ferrule_client.types import Handle

_ASSUMED = 512
"""Default of ``max_handles_per_request``; a list of this length is sent without asking for the server's own limit."""

_LISTS = ("kv_caches", "release")
"""Fields that hold a list of handles which may be sent in several requests."""


class HandleLimit:
    """How many handles a request may hold, as far as this client knows: ``most``, at least 1.

    The limit that a server advertises is asked for only before a list that is longer than the assumed limit. A server
    with a smaller limit, also one that was restarted with it, refuses a list, and the refusal lowers the limit.
    ``is_asked`` is True after a server has said its limit, or could not be asked.
    """

    def __init__(self) -> None:
        self.most = _ASSUMED
        self.is_asked = False

    def advertise(self, most: int) -> None:
        """Adopt the limit that a server advertises; 0 means that it advertises none."""
        self.is_asked = True
        self.most = most or self.most

    def shrink(self, error: FerruleError, num_handles: int) -> bool:
        """Lower the limit if a list was refused for its length; return if it may be sent again in shorter lists."""
        allowed = _allowed(error, num_handles)
        if not 1 <= allowed < num_handles:
            return False
        self.most = min(self.most, allowed)
        self.is_asked = self.is_asked or "limit" in error.metadata
        return True


class Parts:
    """The handles of a list by instance, in parts that fit one request.

    Iterate over it to get each part once; there is at least one, which is empty if the list is. If a part is refused
    for its length, ``shrink`` returns it to the list, so that it is yielded again in shorter parts. ``is_alone`` is
    True if all handles are of one instance.
    """

    def __init__(self, handles: Sequence[Handle], limit: HandleLimit) -> None:
        groups = by_instance(handles, checked_instance) or {"": []}
        self.is_alone = len(groups) == 1
        self._handles = handles
        self._limit = limit
        self._waiting = deque(groups.items())
        self._last: tuple[str, list[int]] = ("", [])

    def __iter__(self) -> Iterator[tuple[str, list[int], list[types_pb2.KvCacheHandle]]]:
        """Yield the instance of each part, the places of its handles in the list, and the handles."""
        while self._waiting:
            instance, places = self._waiting.popleft()
            part, rest = places[: self._limit.most], places[self._limit.most :]
            if rest:
                self._waiting.appendleft((instance, rest))
            self._last = instance, part
            yield instance, part, [_convert.handle_to_message(self._handles[place]) for place in part]

    def shrink(self, error: FerruleError) -> bool:
        """Return the part yielded last to the list if it was refused for its length; report whether it was."""
        if not self._limit.shrink(error, len(self._last[1])):
            return False
        self._waiting.appendleft(self._last)
        return True


def checked_instance(handle: Handle) -> str:
    """Return the instance that a handle names, or an empty text; raise TypeError if it is not a handle."""
    _convert.check_handle(handle)
    return instance_of_handle(handle)


def _allowed(error: FerruleError, num_handles: int) -> int:
    """Return the length of list that a refusal leaves, half if it names no limit; 0: it is not about the length."""
    if isinstance(error, (RequestTooLargeError, MessageTooLargeError)):
        return num_handles // 2
    if not isinstance(error, InvalidRequestError) or error.field not in _LISTS:
        return 0
    named = error.metadata.get("limit", "")
    return int(named) if named.isdecimal() else num_handles // 2
