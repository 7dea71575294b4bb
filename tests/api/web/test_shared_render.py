"""One rendering serves all who asked before it began, and takes little of the time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ferrule_server.api.web.shared_render import SharedRender


def test_a_rendering_is_never_older_than_the_question() -> None:
    """What was counted before the question is in the answer, one after another and many at once."""
    counter = 0
    lock = threading.Lock()

    def count_and_read(_: int) -> bool:
        nonlocal counter
        with lock:
            counter += 1
            mine = counter
        return render.get() >= mine

    def read() -> int:
        value = counter
        time.sleep(0.002)
        return value

    render = SharedRender(read)
    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(count_and_read, range(200)))


def test_many_who_ask_at_once_cost_two_renderings() -> None:
    """The one that runs already, which is too old for them, and one for all of them; never two at a time."""
    running, most, begun = 0, 0, 0
    gate = threading.Event()

    def read() -> int:
        nonlocal running, most, begun
        running += 1
        begun += 1
        most = max(most, running)
        gate.wait(5)
        running -= 1
        return begun

    render = SharedRender(read)
    with ThreadPoolExecutor(20) as threads:
        first = threads.submit(render.get)
        while begun == 0:
            time.sleep(0.001)
        others = [threads.submit(render.get) for _ in range(19)]
        time.sleep(0.05)
        gate.set()
        assert first.result() == 1
        assert {each.result() for each in others} == {2}
    assert most == 1


def test_rendering_takes_a_tenth_of_the_time_at_most() -> None:
    """Who asks without a pause waits between two renderings."""
    render = SharedRender(lambda: time.sleep(0.01))
    began = time.monotonic()
    for _ in range(4):
        render.get()
    assert time.monotonic() - began > 3 * 0.09


def test_a_rendering_that_fails_fails_alone() -> None:
    """The next one is tried again, also by those who waited."""
    outcomes = iter([ValueError("no"), None])

    def read() -> str:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome
        return "yes"

    render = SharedRender(read)
    with pytest.raises(ValueError, match="no"):
        render.get()
    assert render.get() == "yes"
