"""Delivery: what is finished goes to the event loop, once per step, and there to its sinks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from ferrule_server.engine.gate import Finished, Gate
from ferrule_server.engine.jobs import Sink

_LOOP_SLICE: Final = 256
"""Outcomes delivered before others get their turn on the event loop: a few milliseconds."""


class Delivery:
    """Collects outcomes on the engine thread and delivers them on that of the event loop.

    Invariant: outcomes are given to their sinks in the order in which they were handed over; ``_sliced`` has those that
    are being delivered slice by slice, and what came behind them.

    Args:
        post: Runs a callable on the event loop's thread.
        gate: Told of each outcome of a job that it let in.

    Attributes:
        finished: Outcomes for the next :meth:`hand_over`; appended to by the engine thread only.
    """

    def __init__(self, post: Callable[[Callable[[], None]], object], gate: Gate) -> None:
        self._post = post
        self._gate = gate
        self.finished: list[Finished] = []
        self._sliced: deque[list[Finished]] = deque()

    def hand_over(self) -> None:
        """Deliver everything finished, with one call on the event loop; engine thread only."""
        if self.finished:
            finished, self.finished = self.finished, []
            self.deliver(finished)

    def deliver(self, finished: list[Finished]) -> None:
        """Deliver outcomes of jobs that the gate let in; any thread."""
        self._post(lambda: self._arrive(finished))

    def refuse(self, refused: list[Finished]) -> None:
        """Deliver the errors of jobs that the gate did not let in; any thread."""
        self._post(lambda: self._line_up(refused))

    # ---- on the event loop ------------------------------------------------------------------------------------------

    def _arrive(self, finished: list[Finished]) -> None:
        self._gate.done(finished)
        self._line_up(finished)

    def _line_up(self, finished: list[Finished]) -> None:
        """Deliver outcomes at once, or behind those that are being delivered slice by slice.

        Frames of one job would else overtake each other.
        """
        if not self._sliced and len(finished) <= _LOOP_SLICE:
            self._deliver_slice(finished, 0, {})
            return
        self._sliced.append(finished)
        if len(self._sliced) == 1:
            self._next_slice(0, {})

    def _next_slice(self, start: int, touched: dict[int, Sink]) -> None:
        """Deliver a slice of the first in line; others have their turn on the loop before the next one.

        A frame of thousands of items that are all refused makes as many error messages.
        """
        finished, stop = self._sliced[0], start + _LOOP_SLICE
        try:
            self._deliver_slice(finished, start, touched)
        finally:  # whatever a sink does: those behind it must hear something
            if stop < len(finished):
                self._post(lambda: self._next_slice(stop, touched))
            else:
                self._sliced.popleft()
                if self._sliced:
                    self._post(lambda: self._next_slice(0, {}))

    @staticmethod
    def _deliver_slice(finished: list[Finished], start: int, touched: dict[int, Sink]) -> None:
        """Give each sink its outcomes, and after the last of all one flush."""
        stop = start + _LOOP_SLICE
        for job, sink, outcome in finished[start:stop]:
            sink.deliver(job, outcome)
            touched[id(sink)] = sink
        if stop >= len(finished):
            for sink in touched.values():
                sink.flush()
