"""Delivery: what is finished goes to the event loop, once per step, and there to its sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ferrule_server.engine.gate import Finished, Gate
from ferrule_server.engine.jobs import Sink

_LOOP_SLICE: Final = 256
"""Outcomes delivered before others get their turn on the event loop: a few milliseconds."""


class Delivery:
    """Collects outcomes on the engine thread and delivers them on that of the event loop, in order.

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
        self._post(lambda: self._arrive_slice(refused))

    def _arrive(self, finished: list[Finished]) -> None:
        self._gate.done(finished)
        self._arrive_slice(finished)

    def _arrive_slice(self, finished: list[Finished], start: int = 0, touched: dict[int, Sink] | None = None) -> None:
        """Runs on the event loop: each sink gets its outcomes, and after the last of all one flush.

        Others have their turn on the loop in between: a frame of thousands of items that are all refused makes as many
        error messages.
        """
        touched = {} if touched is None else touched
        stop = start + _LOOP_SLICE
        for job, sink, outcome in finished[start:stop]:
            sink.deliver(job, outcome)
            touched[id(sink)] = sink
        if stop < len(finished):
            self._post(lambda: self._arrive_slice(finished, stop, touched))
            return
        for sink in touched.values():
            sink.flush()
