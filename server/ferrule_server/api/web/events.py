"""The messages of the page: one per second for all watchers, made only while there are any."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

from google.protobuf import json_format

from ferrule.v1 import admin_pb2
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.errors import FerruleError

_LOG = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
"""Time between two messages."""
MAX_WATCHERS: Final = 16
"""Most watchers at a time."""
VIEW_REQUEST: Final = admin_pb2.GetServerViewRequest(max_cells=2048, max_sequences=1024, max_principals=32)
"""What the page has room for."""

_NOT_SHOWN: Final = "The server's view could not be read; the log says why"


class TooManyWatchers(Exception):
    """There is no room for another watcher."""


class Events:
    """Makes one message per interval and gives it to all watchers. Used on one event loop.

    Invariant: ``make`` runs at most once per interval, however many watch, and never while none does. A watcher that
    falls behind misses messages and delays no other.

    Args:
        make: Returns the current message; must not raise.
    """

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._changed = asyncio.Condition()
        self._num_watchers = 0
        self._is_closed = False
        self._message = b""
        self._number = 0
        self._made_at = -INTERVAL_S

    async def run(self) -> None:
        """Make messages until cancelled, which ends every :meth:`watch`."""
        try:
            while True:
                await self._make_next()
        finally:
            async with self._changed:
                self._is_closed = True
                self._changed.notify_all()

    async def _make_next(self) -> None:
        """Make a message as soon as there is a watcher, and wait for the rest of the interval."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_watchers > 0)
        began = time.monotonic()
        message = await self._make()
        async with self._changed:
            self._message, self._number, self._made_at = message, self._number + 1, time.monotonic()
            self._changed.notify_all()
        await asyncio.sleep(INTERVAL_S - (time.monotonic() - began))

    @contextlib.contextmanager
    def watch(self) -> Iterator[AsyncIterator[bytes]]:
        """Give an iterator over the messages from now on, beginning with the newest one if it is fresh.

        Raises:
            TooManyWatchers: There is no room for another one.
        """
        if self._num_watchers >= MAX_WATCHERS:
            raise TooManyWatchers
        self._num_watchers += 1
        is_fresh = time.monotonic() - self._made_at < INTERVAL_S
        try:
            yield self._messages(self._number - 1 if is_fresh else self._number)
        finally:
            self._num_watchers -= 1

    async def _messages(self, seen: int) -> AsyncIterator[bytes]:
        while True:
            async with self._changed:
                self._changed.notify_all()  # the first watcher starts the next message
                while not self._is_closed and self._number <= seen:
                    await self._changed.wait()
                if self._is_closed:
                    return
                seen, message = self._number, self._message
            yield message


class PageMessage:
    """Makes the messages of the page.

    Args:
        state: The server.
        read_view: Returns the view once the model is loaded. It may raise TimeoutError if the server is too busy, or an
            error of the contract if there is no view.
    """

    def __init__(self, state: ServerState, read_view: Callable[[], Awaitable[admin_pb2.ServerView]]) -> None:
        self._state = state
        self._read_view = read_view
        self._has_failed = False

    async def __call__(self) -> bytes:
        """Return one server-sent event in JSON: the phase of the server and the ``ServerView`` of the contract.

        The view also has the ``model_id`` and the ``block_size``.
        """
        state = self._state
        message: dict[str, Any] = {
            "run": str(state.start_ns),
            "instance": state.instance,
            "version": state.version,
            "phase": state.phase.value,
        }
        if state.serving is None:
            message["load"] = {"stage": state.load_stage, "share": round(state.load_progress, 3)}
        else:
            message |= await self._view()
        return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"

    async def _view(self) -> dict[str, Any]:
        try:
            view = json_format.MessageToDict(await self._read_view(), preserving_proto_field_name=True)
            if (serving := self._state.serving) is not None:
                info = serving.engine.info
                view |= {"model_id": info.model.model_id, "block_size": info.block_size}
        except TimeoutError:
            return {"problem": "The server is too busy to answer"}
        except FerruleError as error:
            return {"problem": error.message}
        except Exception:  # noqa: BLE001  (the page says so, the log why; the metrics stay available)
            if not self._has_failed:
                _LOG.exception("no view for the page")
            self._has_failed = True
            return {"problem": _NOT_SHOWN}
        self._has_failed = False
        return {"view": view}
