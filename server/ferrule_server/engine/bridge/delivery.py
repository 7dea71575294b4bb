"""Delivery: finished jobs cross to the event loop once per step, and there go to their sinks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from ferrule_server.engine.bridge.gate import Finished, Gate
from ferrule_server.engine.jobs import Sink

_LOOP_SLICE: Final = 64
"""Outcomes delivered before other work gets its turn on the event loop: a millisecond or two."""

_Chain = deque[list[Finished]]


class Delivery:
    """Collects outcomes on the engine thread and delivers them on the event loop's thread.

    Many outcomes at once are delivered slice by slice, and other work gets its turn between slices. New outcomes for
    the same sinks meanwhile form a chain after them; otherwise frames of a stream would overtake each other. Outcomes
    for other sinks do not wait.

    Invariant: each sink gets its outcomes in the order in which they were handed over; ``_chain_of`` has the sinks, by
    id, of each chain that is not fully delivered.

    Args:
        post: Runs a callable on the event loop's thread.
        gate: Notified of each outcome of a job that it admitted.

    Attributes:
        finished: Outcomes for the next :meth:`hand_over`; appended to by the engine thread only.
    """

    def __init__(self, post: Callable[[Callable[[], None]], object], gate: Gate) -> None:
        self._post = post
        self._gate = gate
        self.finished: list[Finished] = []
        self._chain_of: dict[int, _Chain] = {}

    def hand_over(self) -> None:
        """Deliver all finished jobs with one call on the event loop; engine thread only."""
        finished, self.finished = self.finished, []
        self._post(partial(self._arrive, finished))

    def deliver(self, finished: list[Finished]) -> None:
        """Deliver outcomes of jobs that the gate admitted; any thread."""
        self._post(partial(self._arrive, finished))

    def refuse(self, refused: list[Finished]) -> None:
        """Deliver the errors of jobs that the gate refused; any thread."""
        self._post(partial(self._line_up, refused))

    # ---- on the event loop ------------------------------------------------------------------------------------------

    def _arrive(self, finished: list[Finished]) -> None:
        self._gate.finish(finished)
        self._line_up(finished)

    def _line_up(self, finished: list[Finished]) -> None:
        """Deliver outcomes at once, except those of sinks that still wait for earlier ones: these come after them."""
        if self._chain_of:
            finished = self._extend_chains(finished)
        if len(finished) <= _LOOP_SLICE:
            self._deliver_slice(finished, 0, {})
            return
        chain: _Chain = deque([finished])
        self._chain_of.update((id(sink), chain) for _, sink, _ in finished)
        self._next_slice(chain, 0, {})

    def _extend_chains(self, finished: list[Finished]) -> list[Finished]:
        """Add outcomes to the chains of their sinks; return those whose sinks are in no chain."""
        free: list[Finished] = []
        late: dict[int, list[Finished]] = {}
        for each in finished:
            chain = self._chain_of.get(id(each[1]))
            if chain is None:
                free.append(each)
            elif id(chain) in late:
                late[id(chain)].append(each)
            else:
                late[id(chain)] = [each]
                chain.append(late[id(chain)])
        return free

    def _next_slice(self, chain: _Chain, start: int, touched: dict[int, Sink]) -> None:
        """Deliver a slice of the first list in a chain; other work gets its turn on the loop before the next slice.

        If a frame of thousands of items is refused, each item makes an error message.
        """
        finished, stop = chain[0], start + _LOOP_SLICE
        try:
            self._deliver_slice(finished, start, touched)
        finally:  # even if a sink raises, the outcomes after it must be delivered
            if stop < len(finished):
                self._post(lambda: self._next_slice(chain, stop, touched))
            else:
                self._end_first(chain)

    def _end_first(self, chain: _Chain) -> None:
        chain.popleft()
        if chain:
            self._post(lambda: self._next_slice(chain, 0, {}))
        else:
            self._chain_of = {sink_id: each for sink_id, each in self._chain_of.items() if each is not chain}

    @staticmethod
    def _deliver_slice(finished: list[Finished], start: int, touched: dict[int, Sink]) -> None:
        """Give each sink its outcomes, and flush each once after the last slice."""
        stop = start + _LOOP_SLICE
        for job, sink, outcome in finished[start:stop]:
            sink.deliver(job, outcome)
            touched[id(sink)] = sink
        if stop >= len(finished):
            for sink in touched.values():
                sink.flush()
