"""Delivery: finished jobs cross to the event loop, and there go to their sinks.

Most cross as soon as their step is done, with one call on the loop::

    engine thread   finished -- hand_over --> crossing -- post --> arrive --> sinks    event loop
                                                                     |          ^
                                        frames of Generate          held --> end of the pause

Waking the event loop and writing a message cost about as much as a step of a small model, whatever the message holds.
So a pause follows each delivery of frames of Generate. Frames that come during the pause are delivered together at its
end, and those of one call become one message. The pause is short unless frames of several steps were delivered at its
end, so those of a large model hardly wait. The first and the last frame of a call do not wait, nor does a frame that
fills the window of its reader, nor any other outcome.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from ferrule_server.engine.bridge.gate import Finished, Gate
from ferrule_server.engine.jobs import GenerateFrame, GenerateJob, Sink

_LOOP_SLICE: Final = 64
"""Outcomes delivered before other work gets its turn on the event loop: a millisecond or two."""
_CALLS_AT_ONCE: Final = 2
_BETWEEN_CALLS_S: Final = 0.001
"""So many calls of Generate get their frames together, and the next ones so much later: short requests of others do not
wait until messages are written to all of them. With many calls the groups are larger: half a pause serves them."""
_SHORTEST_PAUSE_S: Final = 0.004
_LONGEST_PAUSE_S: Final = 0.032
_PAUSE_SHARE: Final = 16.0
"""A pause lasts this many times as long as the event loop's thread worked since the last one began, within these
limits; it is the shortest if no call had frames of several steps."""

Later = Callable[[float, Callable[[], None]], object]
"""Runs a callable on the event loop's thread after some seconds; called on that thread only."""


class _Chain(deque[list[Finished]]):
    """Lists that are delivered one after the other, with a pause in between or only turns of other work."""

    pause_s = 0.0


class Delivery:
    """Collects outcomes on the engine thread and delivers them on the event loop's thread.

    Many outcomes at once are delivered slice by slice, and other work gets its turn between slices. New outcomes for
    the same sinks meanwhile form a chain after them; otherwise frames of a stream would overtake each other. Outcomes
    for other sinks do not wait.

    Invariant: each sink gets the outcomes of a kind of job in the order in which they were handed over; ``_chain_of``
    has the sinks, by id, of each chain that is not fully delivered; while ``_crossing`` or ``_held`` is not empty,
    there is a pause or a posted call that will take it.

    Args:
        post: Runs a callable on the event loop's thread.
        gate: Notified of each outcome of a job that it admitted.
        later: Ends pauses; None: there are none, and everything crosses at once.
    """

    def __init__(self, post: Callable[[Callable[[], None]], object], gate: Gate, later: Later | None = None) -> None:
        self._post = post
        self._gate = gate
        self._later = later
        self._crossing: deque[list[Finished]] = deque()
        self._held: list[Finished] = []
        self._chain_of: dict[int, _Chain] = {}
        self._is_pausing = False
        self._worked_s = 0.0
        self._last_pause_s = _SHORTEST_PAUSE_S

    def hand_over(self, finished: list[Finished]) -> None:
        """Deliver outcomes of admitted jobs with one call on the event loop, or after a pause; any thread.

        The outcomes are added before ``_is_pausing`` is read. At the end of a pause it is cleared before ``_crossing``
        is read. So at least one of the two threads sees the change of the other.
        """
        frames = [each for each in finished if isinstance(each[0], GenerateJob)]
        others = [each for each in finished if not isinstance(each[0], GenerateJob)] if frames else finished
        if others:
            self._post(partial(self._arrive_at_once, others))
        if frames:
            self._crossing.append(frames)
            if not (self._is_pausing and all(map(_can_wait, frames))):
                self._post(self._arrive)

    def refuse(self, refused: list[Finished]) -> None:
        """Deliver the errors of jobs that the gate refused; any thread."""
        self._post(partial(self._line_up, refused))

    # ---- on the event loop ------------------------------------------------------------------------------------------

    def _arrive_at_once(self, finished: list[Finished]) -> None:
        self._gate.finish(finished)
        self._line_up(finished)

    def _arrive(self) -> None:
        """Deliver the frames of Generate that have crossed; in a pause they are held unless their call cannot wait."""
        frames: list[Finished] = []
        while self._crossing:
            frames += self._crossing.popleft()
        self._held += frames
        urgent = self._take_urgent(frames)
        if self._is_pausing or not (self._held or urgent):
            return
        frames, self._held = self._held, []
        self._gate.finish(frames)
        num_calls = self._line_up_by_call(frames)
        if self._later is not None and any(map(_can_wait, urgent + frames)):
            self._is_pausing = True
            self._last_pause_s = self._pause_s(has_merged=len(frames) >= 2 * num_calls > 0)
            self._later(self._last_pause_s, self._end_pause)

    def _take_urgent(self, frames: list[Finished]) -> list[Finished]:
        """Deliver and return the held frames of calls that cannot wait, which is judged by the new ones."""
        sinks = {id(each[1]) for each in frames if not _can_wait(each)}
        if not sinks:
            return []
        urgent = [each for each in self._held if id(each[1]) in sinks]
        self._held = [each for each in self._held if id(each[1]) not in sinks]
        self._arrive_at_once(urgent)
        return urgent

    def _pause_s(self, *, has_merged: bool) -> float:
        """Return how long the next pause lasts: by the work of this thread since the last one if that merged frames."""
        worked_s = time.thread_time()
        used_s, self._worked_s = worked_s - self._worked_s, worked_s
        return min(max(_SHORTEST_PAUSE_S, _PAUSE_SHARE * used_s), _LONGEST_PAUSE_S) if has_merged else _SHORTEST_PAUSE_S

    def _end_pause(self) -> None:
        self._is_pausing = False
        self._arrive()

    def _line_up_by_call(self, frames: list[Finished]) -> int:
        """Deliver frames some calls at a time, each of which then writes a message; return the number of calls."""
        of_sink: dict[int, list[Finished]] = {}
        for each in self._extend_chains(frames) if self._chain_of else frames:
            of_sink.setdefault(id(each[1]), []).append(each)
        most_groups = max(1, round(0.5 * self._last_pause_s / _BETWEEN_CALLS_S))
        num_at_once = max(_CALLS_AT_ONCE, -(-len(of_sink) // most_groups))
        calls = iter(of_sink.values())
        groups = [[*itertools.chain(call, *itertools.islice(calls, num_at_once - 1))] for call in calls]
        if groups:
            chain = _Chain(groups)
            chain.pause_s = _BETWEEN_CALLS_S
            self._chain_of.update((sink_id, chain) for sink_id in of_sink)
            self._next_slice(chain, 0, {})
        return len(of_sink)

    def _line_up(self, finished: list[Finished]) -> None:
        """Deliver outcomes at once, except those of sinks that still wait for earlier ones: these come after them."""
        if self._chain_of:
            finished = self._extend_chains(finished)
        if len(finished) <= _LOOP_SLICE:
            self._deliver_slice(finished, 0, {})
            return
        chain = _Chain([finished])
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
        delivered = chain.popleft()
        if chain and chain.pause_s and self._later is not None:
            following = {id(sink) for finished in chain for _, sink, _ in finished}
            for sink_id in {id(sink) for _, sink, _ in delivered} - following:
                self._chain_of.pop(sink_id, None)  # what comes next for it need not wait for others
            self._later(chain.pause_s, lambda: self._next_slice(chain, 0, {}))
        elif chain:
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


def _can_wait(finished: Finished) -> bool:
    """Return whether an outcome can cross a little later: its reader has the first frame, and the engine continues."""
    job, _, outcome = finished
    if type(outcome) is not GenerateFrame or outcome.is_last:
        return False
    assert isinstance(job, GenerateJob)
    return job.has_begun and job.window.is_open
