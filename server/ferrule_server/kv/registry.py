"""The registry: which sequence a cache_id names, and which error answers a cache_id that names none."""

from __future__ import annotations

import base64
import heapq
import re
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType

from ferrule_server.errors import EpochChanged, HandleExpired, HandleUnknown, WrongInstance
from ferrule_server.kv.handle import handle_id_of
from ferrule_server.kv.sequence import Sequence

TOMBSTONE_S = 600.0
"""For how long the owner of an expired sequence gets HANDLE_EXPIRED rather than HANDLE_UNKNOWN."""

MAX_TOMBSTONES = 100_000
"""Most tombstones; beyond it the principal with most of them loses its oldest, so no other principal notices."""

SECRET_BYTES = 16
"""Random bytes in a cache_id."""

_HANDLE_ID = attrgetter("handle_id")
_EXPIRES_AT = attrgetter("expires_at")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECRET = re.compile(r"[A-Za-z0-9_-]{22}")


class Registry:
    """Sequences by cache_id, and tombstones of those that expired.

    Invariant: a registered sequence is not released, is listed under its own cache_id and among those of its
    principal, in order of handle_id (a principal without sequences has no list), and has no tombstone; the tombstones
    of each principal are in order of their ends, and there are at most MAX_TOMBSTONES in all.

    Args:
        instance: Name of this server. epoch: name of this run of it. Both 1 to 64 of ``A-Z a-z 0-9 _ -``.
        new_secret: Returns 16 unguessable bytes.
        durable_epoch: The epoch in the cache_ids of durable sequences, the same in all runs; None: there are none.

    Attributes:
        sequences: The live sequences by cache_id, a read-only view.
        num_tombstones: Expired sequences still remembered.

    Raises:
        ValueError: A name has other characters or another length.
    """

    def __init__(
        self, instance: str, epoch: str, new_secret: Callable[[], bytes], durable_epoch: str | None = None
    ) -> None:
        for name, value in (("instance", instance), ("epoch", epoch), ("durable_epoch", durable_epoch or epoch)):
            if not _NAME.fullmatch(value):
                raise ValueError(f"{name} must be 1 to 64 of A-Z a-z 0-9 _ -, got {value!r}")
        self._instance = instance
        self._epoch = epoch
        self._durable_epoch = durable_epoch or epoch
        self._has_durable = durable_epoch is not None
        self._durable_prefix = f"{instance}.{self._durable_epoch}."
        self._new_secret = new_secret
        self._sequences: dict[str, Sequence] = {}
        self.sequences: Mapping[str, Sequence] = MappingProxyType(self._sequences)
        self._own: dict[str, list[Sequence]] = {}
        # principal -> cache_id -> end on the store's clock
        self._tombstones: dict[str, OrderedDict[str, float]] = {}
        self.num_tombstones = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def new_cache_id(self, *, is_durable: bool = False) -> str:
        """Return a new, unique cache_id."""
        secret = self._new_secret()
        assert len(secret) == SECRET_BYTES, f"a secret has {len(secret)} bytes, not {SECRET_BYTES}"
        return self._cache_id(self._durable_epoch if is_durable else self._epoch, secret)

    def durable_cache_id(self, secret: bytes) -> str:
        """Return the cache_id of a durable sequence with this secret."""
        return self._cache_id(self._durable_epoch, secret)

    def add(self, sequence: Sequence) -> None:
        """Register the sequence under its cache_id."""
        assert sequence.cache_id not in self._sequences, "a secret came twice"
        self._sequences[sequence.cache_id] = sequence
        insort(self._own.setdefault(sequence.principal, []), sequence, key=_HANDLE_ID)

    def restore(self, sequences: Iterable[Sequence]) -> None:
        """Register many sequences; faster than one by one."""
        touched: set[str] = set()
        for sequence in sequences:
            assert sequence.cache_id not in self._sequences, "a secret came twice"
            self._sequences[sequence.cache_id] = sequence
            self._own.setdefault(sequence.principal, []).append(sequence)
            touched.add(sequence.principal)
        for principal in touched:
            self._own[principal].sort(key=_HANDLE_ID)

    def is_durable(self, cache_id: str) -> bool:
        """Return whether the name is, or was, that of a durable sequence."""
        return self._has_durable and cache_id.startswith(self._durable_prefix)

    def tombstones(self) -> list[tuple[str, str]]:
        """Return the principals and cache_ids of the expired sequences that are remembered, the oldest first."""
        ends = ((end, principal, name) for principal, own in self._tombstones.items() for name, end in own.items())
        return [(principal, cache_id) for _, principal, cache_id in sorted(ends)]

    def get(self, cache_id: str, principal: str) -> Sequence | None:
        """Return the principal's own live sequence of that name, or None."""
        sequence = self._sequences.get(cache_id)
        return sequence if sequence is not None and sequence.principal == principal else None

    def remove(self, sequence: Sequence) -> None:
        """Forget the sequence; its handles become unknown."""
        del self._sequences[sequence.cache_id]
        own = self._own[sequence.principal]
        index = bisect_left(own, sequence.handle_id, key=_HANDLE_ID)
        while own[index] is not sequence:
            index += 1
        del own[index]
        if not own:
            del self._own[sequence.principal]

    def bury(self, sequence: Sequence, now: float) -> None:
        """Forget the sequence, and answer its owner for TOMBSTONE_S that it expired."""
        self.remove(sequence)
        self.restore_tombstone(sequence.principal, sequence.cache_id, now)

    def restore_tombstone(self, principal: str, cache_id: str, now: float) -> None:
        """Answer the owner of a sequence that is not here for TOMBSTONE_S that it expired."""
        own = self._tombstones.setdefault(principal, OrderedDict())
        own[cache_id] = now + TOMBSTONE_S
        self.num_tombstones += 1
        while next(iter(own.values())) <= now:
            self._drop_tombstone(principal)
        if self.num_tombstones > MAX_TOMBSTONES:
            self._drop_tombstone(self._dispensable(now))

    def why_missing(self, cache_id: str, principal: str, now: float) -> HandleUnknown | WrongInstance:
        """Return the error for a cache_id that :meth:`get` does not find.

        The answer is the same whether it was never issued, was released, or belongs to another principal.
        """
        handle_id = handle_id_of(cache_id)
        elsewhere = self._why_elsewhere(cache_id, handle_id)
        if elsewhere is not None:
            return elsewhere
        own = self._tombstones.get(principal)
        if own is not None and now < own.get(cache_id, now):
            return HandleExpired(handle_id)
        return HandleUnknown(handle_id)

    def count(self, principal: str) -> int:
        """Return how many live sequences the principal owns."""
        return len(self._own.get(principal, ()))

    def page(self, principal: str, after_handle_id: str = "", limit: int = 100) -> list[Sequence]:
        """Return up to ``limit`` of the principal's sequences after that handle_id, in order of handle_id."""
        own = self._own.get(principal, [])
        start = bisect_right(own, after_handle_id, key=_HANDLE_ID)
        return own[start : start + limit]

    def soonest(self, limit: int) -> list[Sequence]:
        """Return the ``limit`` sequences of all principals whose leases end soonest, in that order."""
        return heapq.nsmallest(limit, self._sequences.values(), key=_EXPIRES_AT)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        for cache_id, sequence in self._sequences.items():
            assert sequence.cache_id == cache_id, "a sequence is listed under another name"
            assert sequence.handle_id == handle_id_of(cache_id), "a handle_id is not that of its cache_id"
            assert not sequence.is_released, f"{sequence.handle_id} is released and still known"
            has_tombstone = any(cache_id in own for own in self._tombstones.values())
            assert not has_tombstone, f"{sequence.handle_id} lives and has a tombstone"
        for principal, own in self._own.items():
            expected = sorted((each for each in self if each.principal == principal), key=_HANDLE_ID)
            assert own == expected != [], f"the sequences of {principal!r} are not listed as they should be"
        assert sum(map(len, self._own.values())) == len(self), "a sequence is not listed under its principal"
        for principal, tombstones in self._tombstones.items():
            ends = list(tombstones.values())
            assert ends == sorted(ends) != [], f"the tombstones of {principal!r} are out of order"
        num_tombstones = sum(map(len, self._tombstones.values()))
        assert num_tombstones == self.num_tombstones <= MAX_TOMBSTONES, f"{num_tombstones} tombstones"

    def _why_elsewhere(self, cache_id: str, handle_id: str) -> EpochChanged | WrongInstance | None:
        """Return the error for a well-formed cache_id of another server or of another run, else None."""
        instance, _, rest = cache_id.partition(".")
        epoch, _, secret = rest.partition(".")
        if not (_NAME.fullmatch(instance) and _NAME.fullmatch(epoch) and _SECRET.fullmatch(secret)):
            return None
        if instance != self._instance:
            return WrongInstance(handle_id, instance)
        return EpochChanged(handle_id) if epoch not in (self._epoch, self._durable_epoch) else None

    def _cache_id(self, epoch: str, secret: bytes) -> str:
        return f"{self._instance}.{epoch}.{base64.urlsafe_b64encode(secret).rstrip(b'=').decode()}"

    def _dispensable(self, now: float) -> str:
        """Return the principal whose oldest tombstone is dropped: one that is over, else the one with most."""
        for principal, own in self._tombstones.items():
            if next(iter(own.values())) <= now:
                return principal
        return max(self._tombstones, key=lambda name: len(self._tombstones[name]))

    def _drop_tombstone(self, principal: str) -> None:
        """Drop the principal's oldest tombstone."""
        own = self._tombstones[principal]
        own.popitem(last=False)
        self.num_tombstones -= 1
        if not own:
            del self._tombstones[principal]
