"""Touches a channel on which a call waits long, in case gRPC has forgotten the call or its connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

FIRST_NUDGE_S = 0.25
"""A call that waits so long is worth a look at its channel, then twice as long again, and so on."""

LONGEST_NUDGE_S = 15.0
"""Longest time between two looks."""

NUDGE_TIMEOUT_S = 1.0
"""Limit of one look."""

# The thread outlives the last call for a while, so that not each one starts a thread.
_IDLE_ROUNDS = 20


class _Waiting:
    """One call that waits, since when and until when it is left alone."""

    __slots__ = ("due", "since")

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.due = self.since + FIRST_NUDGE_S


class Nudger:
    """Sends something small over a channel, and again at growing intervals, while a call on it gets no answer.

    In grpcio 1.75.1 a call may stay queued on a channel that calls itself ready, or idle, though its connection is
    gone: about one in some hundred cuts, where several channels of a process are busy. Nothing happens on it until
    something else is sent; then the break is found at once, or the call goes out. (Not seen in 1.85.1.) Nothing is
    cancelled, so a call that is only long, such as a prefill of minutes, does not notice.

    Entered by a thread for as long as it waits. Invariant: a thread runs while calls wait, and a few seconds longer.

    ``nudge`` sends something and waits for the answer for a moment; it must not raise.
    """

    def __init__(self, nudge: Callable[[], None]) -> None:
        self._nudge = nudge
        self._waiting: dict[int, _Waiting] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def __enter__(self) -> None:
        self._waiting[threading.get_ident()] = _Waiting()
        if self._thread is None and not self._closing.is_set():
            self._start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._waiting.pop(threading.get_ident(), None)

    def close(self) -> None:
        """Nudge no longer and let the thread end. Closing twice changes nothing."""
        self._closing.set()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ferrule-nudge", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        num_idle = 0
        while not self._closing.wait(FIRST_NUDGE_S):
            num_idle = 0 if self._waiting else num_idle + 1
            if num_idle == _IDLE_ROUNDS:
                self._thread = None  # before the last look: a call that comes now is seen, or starts another thread
                if self._waiting:
                    self._start()
                return
            if self._is_due():
                self._nudge()

    def _is_due(self) -> bool:
        """Return whether a call has waited long enough, and put off its next turn."""
        now = time.monotonic()
        due = [call for call in list(self._waiting.values()) if call.due <= now]
        for call in due:
            call.due = now + min(now - call.since, LONGEST_NUDGE_S)
        return bool(due)
