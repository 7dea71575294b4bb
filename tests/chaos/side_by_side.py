"""Clients that run side by side, each in a thread with a count of its own of what broke."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tests.chaos.raw_clients import Breaks

Work = Callable[[Breaks], None]
"""What one client does from beginning to end; it notes what broke."""


def run_side_by_side(clients: Sequence[Work], kind: type[Breaks] = Breaks) -> Breaks:
    """Run all to their end and return what broke, added up; the first failure of any is raised then."""
    met = [kind() for _ in clients]
    failures: list[BaseException] = []

    def run(work: Work, breaks: Breaks) -> None:
        try:
            work(breaks)
        except BaseException as failure:  # noqa: BLE001 - raised again below, where the test sees it
            failures.append(failure)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(clients, met, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    total = Breaks()
    for breaks in met:
        total.add(breaks)
    return total
