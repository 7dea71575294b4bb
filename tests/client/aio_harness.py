"""Runs a test's coroutine as strictly as asyncio can: debug mode, no task left behind, no error on the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import CoroutineType
from typing import Any, TypeVar

import grpc.aio

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
    await asyncio.sleep(0)
    left &= asyncio.all_tasks()
    if left and all(map(_is_of_grpc, left)):  # ended calls, whose status comes by a thread that may be slow
        _, left = await asyncio.wait(left, timeout=5)
    assert not left, left
    assert all(map(_is_of_poller, heard)), heard
    return result


def _is_of_grpc(task: asyncio.Task[Any]) -> bool:  # Any: whatever it returns
    """Tell whether a task runs code of gRPC: either Cython's, or of its package."""
    coroutine = task.get_coro()
    if not isinstance(coroutine, CoroutineType):
        return True
    return str(Path(grpc.aio.__file__).parent) in coroutine.cr_code.co_filename


def _is_of_poller(context: dict[str, Any]) -> bool:
    """Tell whether an error is of grpc.aio's poller, of which a process has one for all its loops.

    Where servers of other tests have one, both wake up for it; and what comes late for a loop that is closed by now is
    told to the loop that runs.
    """
    error = context.get("exception")
    is_late = "PollerCompletionQueue" in context["message"] and str(error) == "Event loop is closed"
    return isinstance(error, BlockingIOError) or is_late


async def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
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
