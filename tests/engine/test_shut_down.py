"""Shutting down: whatever breaks meanwhile, everybody who waits is answered and the executor is closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import pytest

from ferrule_server.engine.jobs import WarmupJob
from tests.engine.harness import Harness, Pending, append
from tests.engine.streams import SteppedExecutor, Stream, generate, start


def _broken(*_: Any, **__: Any) -> Any:
    raise ValueError("broken on purpose")


def _is_answered(caller: Pending | Stream) -> bool:
    return caller.is_done if isinstance(caller, Pending) else caller.is_over


def _crowd(harness: Harness) -> tuple[list[Pending], list[Stream]]:
    """Leave appends in flight and waiting, loops with branches, and a warm-up; the next step is held."""
    executor = harness.executor
    assert isinstance(executor, SteppedExecutor)
    loops = [start(harness, generate(None, 1, 2, num_branches=count, max_tokens=30)) for count in (3, 1)]
    executor.arrive()
    executor.step(2)
    pending = harness.submit_all(*(append(None, number, request_id=f"r{number % 3}") for number in range(6)))
    executor.step(2)
    handle = pending[0].result().handle
    pending += harness.submit_all(*(append(handle, number) for number in (7, 7, 8)), WarmupJob("me"))
    executor.step()
    return pending, loops


@pytest.mark.parametrize(
    "part",
    [
        "_store.reservations.abort",
        "_store.release",
        "_lanes.creations.abandon",
        "_lanes._leave",
        "_lanes.end_all",
        "_drivers.end_all",
        "_drivers.release",
        "_parts.warmup.end_all",
        "_store.next_expiry",
        "_store.resolve",
        "_setup.executor.close",
    ],
)
def test_everybody_is_answered_whatever_breaks(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the engine that raises costs what it was to do, and nothing else."""
    executor = SteppedExecutor()
    harness = Harness(executor)
    harness.engine.start()
    pending, loops = _crowd(harness)
    path, _, method = part.rpartition(".")
    owner = attrgetter(path)(harness.engine)
    monkeypatch.setattr(type(owner) if method in vars(type(owner)) else owner, method, _broken)
    closer = threading.Thread(target=harness.engine.close, daemon=True)
    closer.start()
    executor.run_freely()
    closer.join(10)
    assert not closer.is_alive()
    waiting: dict[str, Sequence[Pending | Stream]] = {"lanes": pending[:-1], "drivers": loops, "warmup": pending[-1:]}
    for name, callers in waiting.items():
        if part.removeprefix("_parts.").strip("_") != f"{name}.end_all":  # which answers them
            assert all(_is_answered(each) for each in callers)
    assert executor.is_closed or part == "_setup.executor.close"
    late = harness.submit(append(None, 5))
    assert late.error().REASON == "DRAINING"
