"""The threads of a step: the one that calls, and others that are parked between steps.

They run machine code that does not hold the GIL and that waits for the other threads at barriers. A thread that ends,
for whatever reason, aborts the step, so that nobody waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from threading import Thread
from typing import Final

from ferrule_server.kernels.cpu.sync import SyncBlock

_log = logging.getLogger(__name__)

_NICENESS: Final = 5


class StepAborted(Exception):
    """A thread of the step ended. What the step has written is not to be used, and these threads run no more steps."""


class Workers:
    """The threads that run steps together.

    Invariant: between two steps all threads but the caller's are parked or on their way there.

    Args:
        run: Called with the number of a thread. Thread 0 runs one step and returns whether it was completed; any other
            returns when the block is aborted.
        num_threads: Threads of a step, the caller's included.
        sync: The sync block at which they meet.
    """

    def __init__(self, run: Callable[[int], int], num_threads: int, sync: SyncBlock) -> None:
        self._run = run
        self._sync = sync
        self._threads = [
            Thread(target=self._help, args=(number,), name=f"step-{number}", daemon=True)
            for number in range(1, num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run_step(self) -> float:
        """Run the step that the records describe; return for which share of it threads waited long for another.

        The sync block knows whether it was aborted. The threads do not: one that has aborted it is alive for a while.

        Raises:
            StepAborted: A thread has ended.
        """
        if SyncBlock.is_aborted_at(self._sync.address):
            raise StepAborted("a thread of an earlier step has ended")
        is_complete = 0
        try:
            is_complete = self._run(0)
        finally:
            if not is_complete:  # an exception too: the others wait for this thread in the middle of a step
                self._abort()
        if not is_complete:
            raise StepAborted("a thread ended during the step")
        return self._sync.take_waited_share()

    def close(self) -> None:
        """End the threads; none of them runs afterwards."""
        self._abort()
        for thread in self._threads:
            thread.join()

    def _help(self, number: int) -> None:
        try:
            _be_nice()
            self._run(number)
        except BaseException:  # noqa: BLE001 - the other threads must not wait for this one, whatever ended it
            _log.exception("event=step_thread_failed thread=%d", number)
        finally:
            self._abort()

    def _abort(self) -> None:
        self._sync.abort(len(self._threads) + 1)


def _be_nice() -> None:
    """Let other threads take the core of this one sooner: short work, such as that of the event loop, waits less.

    On Linux a thread has a niceness of its own; elsewhere this would be that of the process. The scheduler compares it
    only with threads of the same control group (or of the same session, with autogroups). Where a sandbox refuses the
    call, nothing changes.
    """
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            os.nice(_NICENESS)
