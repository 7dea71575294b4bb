"""Runs a test's coroutine as strictly as asyncio can: debug mode, no task left behind, no error on the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.client.fake_server import FakeServer

__all__ = ["Hold", "run", "until"]

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of its own and return its result; it must leave no task and no error behind."""
    return asyncio.run(_watched(main), debug=True)


async def _watched(main: Coroutine[Any, Any, T]) -> T:
    loop, this, heard = asyncio.get_running_loop(), asyncio.current_task(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: heard.append(context))
    result = await main
    left = asyncio.all_tasks() - {this}
    await asyncio.sleep(0)  # what gRPC's own tasks of ended calls need; they must need no more
    left &= asyncio.all_tasks()
    assert not left, left
    # grpc.aio has one poller for all loops of a process; where servers of other tests have one, both wake up for it.
    assert not [context for context in heard if not isinstance(context.get("exception"), BlockingIOError)], heard
    return result


async def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Return when the condition holds; fail when it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


class Hold:
    """Lets a fake server run appends but keep their answers back, until ``let_go``.

    Attributes:
        is_reached: Set as soon as an append has run.
    """

    def __init__(self, fake: FakeServer) -> None:
        self.is_reached = threading.Event()
        self._gate = threading.Event()
        self._fake = fake
        self._decode = fake._decode
        fake._decode = self._held  # type: ignore[method-assign]

    def let_go(self) -> None:
        """Answer what waits, and everything else from now on."""
        self._fake._decode = self._decode  # type: ignore[method-assign]
        self._gate.set()

    def _held(self, item: Any) -> Any:  # Any: an input of the fake, and its answer
        result = self._decode(item)
        self.is_reached.set()
        self._gate.wait(10)
        return result
