"""Form one mixed step of the running appends: choose the rows of each, then build the arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from ferrule_server.engine.appends.running import DECODE_ROWS, RunningAppend
from ferrule_server.engine.steps.costs import Chunk, Costs
from ferrule_server.engine.steps.debts import Debts
from ferrule_server.engine.steps.pace import Pace
from ferrule_server.executor.base import NO_SLOT, NULL_BLOCK, Int32Array, OutputSpec, StepBatch
from ferrule_server.fairness.queue import FairQueue
from ferrule_server.kv.reservation import Reservation

__all__ = ["DECODE_ROWS", "PREFILL_SHARE", "Batcher", "Chunk", "build_batch", "build_next"]

PREFILL_SHARE = 8
"""While a prefill waits, one row in this many is kept for it, however many decodes there are."""

_DECODING_S = 1.0
"""A sequence that was decoded within this time counts as being decoded."""

_CHUNK_ROWS = 8
"""Room for prefills is not cut into smaller parts than this; principals take turns instead."""


class Batcher:
    """Chooses the rows of each step: decodes first, then prefill chunks; neither can starve the other.

    Principals share rows equally: those for decodes if not all decodes fit, those for prefills always. Rows that one
    principal does not need go to the others. Decodes of one principal run in order of arrival. Its oldest prefill gets
    at least half of its room, so that it ends. The rest goes to the shortest, so that a short prompt does not wait for
    a long one. While another sequence is decoded, :class:`Pace` limits the room of all prefills. A sequence that is
    alone is never paced, so its steps do not depend on the clock.

    While several principals are active, :class:`Costs` limits the time that the rows of each add to a step, and
    :class:`Debts` says how long a principal whose rows made a step long waits afterwards. Principals are active if
    another one has decoded within the last second.

    Else a cohort runs whole, in one step if its rows fit into one and otherwise in as few as they need, and before all
    other rows. What a step with a cohort leaves out goes into the next step, which has no cohort. Cohorts that fit
    together share a step; otherwise principals take turns.

    Args:
        max_rows: Most rows in a step, at least 2.
        max_step_time_s: Longest step that prefill rows may make; None: twice a decode step.
        clock: Monotonic nanoseconds, the clock of ``submitted_ns``.

    Attributes:
        hold_s: How long all appends of the last plan have to wait because others go first; 0.0: they do not.
        has_debts: A principal that has taken a long step may still be ahead of others.
    """

    def __init__(
        self, max_rows: int, max_step_time_s: float | None = None, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._max_rows = max_rows
        self._clock = clock
        self._pace = Pace(max_step_time_s)
        self.hold_s = 0.0
        self.has_debts = False
        self._costs = Costs(max_step_time_s)
        self._debts = Debts(self._costs.longest_s)
        self._has_left_out = False
        self._decoders: dict[str, float] = {}  # when each principal has decoded, those of the last second
        self._waiting: set[str] = set()  # principals with rows left
        self._is_shared = False
        self._decoded: dict[str, tuple[float, str]] = {}  # when and for whom, by handle_id, the latest last
        self._decode_turns = _Turns(1)
        self._prefill_turns = _Turns(_CHUNK_ROWS)
        self._cohort_turns = _Turns(max_rows)

    def plan(self, running: Collection[RunningAppend]) -> list[Chunk]:
        """Choose the rows of the next step.

        Args:
            running: Appends with rows left, oldest first.

        Returns:
            Chunks with at least one row each, one per append; their sum is at most ``max_rows``. Empty if all appends
            have to wait for ``hold_s``.
        """
        now_ns = self._clock()
        decodes: list[RunningAppend] = []
        prefills: list[RunningAppend] = []
        scheduled: list[RunningAppend] = []
        self.hold_s = 0.0
        self._waiting = {run.job.principal for run in running}
        may_be_shared = len(self._waiting) > 1 or bool(self._decoders.keys() - self._waiting)
        self._is_shared = may_be_shared and self._are_several(now_ns * 1e-9)
        self.has_debts &= self._is_shared
        for run in self._free(running, now_ns * 1e-9) if self._is_shared else running:
            is_whole = run.job.cohort and not self._has_neighbour(run.job.principal)
            is_decode = run.reservation.sequence is not None and (len(run.token_ids) == 1 or run.is_decode)
            (scheduled if is_whole else decodes if is_decode else prefills).append(run)
        if scheduled and not (self._has_left_out and (decodes or prefills)):
            chunks = self._plan_cohorts(scheduled, decodes)
            self._has_left_out = sum(not chunk.run.job.cohort for chunk in chunks) < len(decodes) or bool(prefills)
        else:
            kept = min(max(1, self._max_rows // PREFILL_SHARE), sum(run.remaining for run in prefills))
            chunks = self._plan_decodes(decodes, self._max_rows - kept)
            self._has_left_out = False
        if prefills:
            chunks += self._plan_prefills(prefills, chunks, now_ns)
        if not self._is_shared:
            return chunks
        chunks.sort(key=lambda chunk: self._debts.seconds_of(chunk.run.job.principal))
        return self._costs.fit(chunks, exempt=None if len(self._decoders) > 1 else next(iter(self._decoders)))

    def learn(self, chunks: Sequence[Chunk], elapsed_ns: int) -> None:
        """Learn from a step of these chunks, which took ``elapsed_ns``."""
        decode_rows = prefill_rows = 0
        now, step_s, decoded = self._clock() * 1e-9, elapsed_ns * 1e-9, self._decoded
        first = chunks[0].run.job.principal if chunks else ""
        for chunk in chunks:
            run = chunk.run
            sequence, principal = run.reservation.sequence, run.job.principal
            self._is_shared |= principal != first
            if sequence is not None and (len(run.token_ids) == 1 or run.is_decode):
                decode_rows += chunk.num_rows
                decoded.pop(sequence.handle_id, None)
                decoded[sequence.handle_id] = now, principal
                self._decoders[principal] = now
            else:
                prefill_rows += chunk.num_rows
        self._pace.learn(decode_rows, prefill_rows, step_s)
        if not 0.0 < self._costs.base_s <= step_s:
            self._costs.base_s = step_s
        if self._is_shared:
            self._debts.charge(self._costs.learn(chunks, step_s), now - step_s, self._costs.base_s)
            self.has_debts = self._debts.is_anyone_long

    def forget(self, handle_id: str) -> None:
        """Forget a sequence that has ended."""
        self._decoded.pop(handle_id, None)

    # ---- who may run ------------------------------------------------------------------------------------------------

    def _has_neighbour(self, principal: str) -> bool:
        """Return whether another principal has decoded within the last second."""
        return len(self._decoders) > (principal in self._decoders)

    def _are_several(self, now: float) -> bool:
        """Return whether there is somebody besides a principal that has decoded lately."""
        self._decoders = {name: at for name, at in self._decoders.items() if at > now - _DECODING_S}
        return bool(self._decoders) and len(self._waiting | self._decoders.keys()) > 1

    def _free(self, running: Collection[RunningAppend], now: float) -> Collection[RunningAppend]:
        """Leave out the appends of principals that let others go first; set ``hold_s``."""
        self._costs.forget(self._debts.forget(now, {*self._waiting, *self._decoders}))
        held = self._debts.held(now, self._waiting, self._decoders, self._costs.base_s)
        free = [run for run in running if run.job.principal not in held] if held else running
        if not free:
            self.hold_s = min(held.values(), default=0.0)
        return free

    def _is_another_decoding(self, runs: list[RunningAppend], now: float) -> bool:
        """Return whether a live sequence was decoded lately that has no part in these runs."""
        own = {it.handle_id for run in runs if (it := run.reservation.sequence) is not None}
        latest = next((at for name, (at, _) in reversed(self._decoded.items()) if name not in own), -_DECODING_S)
        return now < latest + _DECODING_S

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _plan_cohorts(self, scheduled: list[RunningAppend], decodes: list[RunningAppend]) -> list[Chunk]:
        """Choose the cohort whose turn it is, then decodes, then other cohorts that fit as a whole."""
        first, *others = self._cohorts_in_turn(scheduled)
        chunks, room = _fill(first, self._max_rows)
        chunks += self._plan_decodes(decodes, room)
        for cohort in others:
            if sum(run.remaining for run in cohort) <= self._max_rows - _num_rows(chunks):
                chunks += [Chunk(run, run.remaining) for run in cohort]
        return chunks

    def _cohorts_in_turn(self, scheduled: list[RunningAppend]) -> list[list[RunningAppend]]:
        """Return the cohorts, first the oldest of the principal whose turn it is, the others in order of arrival."""
        cohorts: dict[int, list[RunningAppend]] = {}
        oldest: dict[str, list[RunningAppend]] = {}
        for run in scheduled:
            cohort = cohorts.setdefault(run.job.cohort, [])
            cohort.append(run)
            oldest.setdefault(run.job.principal, cohort)
        ((first, _),) = self._cohort_turns.share(chain.from_iterable(oldest.values()), self._max_rows)
        return sorted(cohorts.values(), key=lambda cohort: cohort[0] is not first[0])

    def _plan_decodes(self, decodes: list[RunningAppend], room: int) -> list[Chunk]:
        if sum(run.remaining for run in decodes) <= room:
            return [Chunk(run, run.remaining) for run in decodes]
        chunks: list[Chunk] = []
        for runs, share in self._decode_turns.share(decodes, room):
            chunks += _fill(runs, share)[0]
        return chunks

    def _plan_prefills(self, prefills: list[RunningAppend], chosen: list[Chunk], now_ns: int) -> list[Chunk]:
        """Share the room that the rows chosen so far leave to prefills."""
        decodes = [chunk for chunk in chosen if chunk.run.is_decode]
        num_rows, num_decodes = _num_rows(chosen), _num_rows(decodes)
        room = self._max_rows - num_rows
        if decodes or self._is_another_decoding(prefills, now_ns * 1e-9):
            paced = self._pace.prefill_rows(num_decodes, _waited_s(decodes, now_ns))
            room = min(room, paced - (num_rows - num_decodes))
        chunks: list[Chunk] = []
        for runs, share in self._prefill_turns.share(prefills, room) if room > 0 else ():
            chunks += _oldest_and_shortest(runs, share)
        return chunks


class _Turns:
    """Shares room between principals equally, over several steps if one step has too little for all.

    Then they take turns by the rows that they have been given (:class:`~ferrule_server.fairness.queue.FairQueue`). So
    two that come and go are not always ahead of one that stays.

    Args:
        min_rows: The room is not cut into smaller shares than this.
    """

    def __init__(self, min_rows: int) -> None:
        self._min_rows = min_rows
        self._queue: FairQueue[list[RunningAppend]] = FairQueue()

    def share(self, runs: Iterable[RunningAppend], room: int) -> list[tuple[list[RunningAppend], int]]:
        """Return the appends of each principal whose turn it is, and its rows, at least one and at most all it has."""
        by_principal: dict[str, list[RunningAppend]] = {}
        for run in runs:
            by_principal.setdefault(run.job.principal, []).append(run)
        if len(by_principal) == 1:
            (principal,) = by_principal
            self._queue.charge(principal, room)  # no other waits, so earlier rows are forgotten
            return [(by_principal[principal], room)]
        for name, own in by_principal.items():
            self._queue.add(name, own)
        turns = (self._queue.take() for _ in range(max(1, room // self._min_rows)))
        chosen = dict(each for each in turns if each is not None)
        shares = _equal_shares({name: sum(run.remaining for run in own) for name, own in chosen.items()}, room)
        for name, share in shares.items():
            self._queue.charge(name, share)  # if none is left waiting, earlier rows are forgotten
        self._queue.drain()
        return [(chosen[name], share) for name, share in shares.items()]


def _equal_shares(wanted: Mapping[str, int], room: int) -> dict[str, int]:
    """Split the room equally; rows that one does not need go to the others. Every share is at least 1."""
    shares: dict[str, int] = {}
    num_left = len(wanted)
    for name in sorted(wanted, key=wanted.__getitem__):
        shares[name] = min(wanted[name], -(-room // num_left))
        room -= shares[name]
        num_left -= 1
    return shares


def _num_rows(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.num_rows for chunk in chunks)


def _waited_s(chunks: Iterable[Chunk], now_ns: int) -> float:
    """Return the longest time that one of these appends has waited."""
    return (now_ns - min((chunk.run.job.submitted_ns for chunk in chunks), default=now_ns)) * 1e-9


def _oldest_and_shortest(prefills: list[RunningAppend], room: int) -> list[Chunk]:
    """Share the room: half of it, or all that is left over, to the oldest, the rest to the shortest first.

    Rows that the oldest does not need of its half go to prompts that fit whole. To cut the next long one for them costs
    more than the rows are worth (bundled model, prompts of 1000 tokens: 12 % of the rate).
    """
    if sum(run.remaining for run in prefills) <= room:
        return [Chunk(run, run.remaining) for run in prefills]
    oldest, others = prefills[0], sorted(prefills[1:], key=lambda run: run.remaining)
    chunks, room_left = _fill(others, room // 2)
    kept = min(oldest.remaining, room - room // 2 + room_left)
    room_left += room - room // 2 - kept
    for run in others[len(chunks) :]:
        if run.remaining > room_left:
            break
        chunks.append(Chunk(run, run.remaining))
        room_left -= run.remaining
    return [Chunk(oldest, kept), *chunks]


def _fill(runs: Iterable[RunningAppend], room: int) -> tuple[list[Chunk], int]:
    """Give each append in turn as many rows as it has left and the room allows; return the room left over, too."""
    chunks: list[Chunk] = []
    for run in runs:
        if room <= 0:
            break
        num_rows = min(run.remaining, room)
        chunks.append(Chunk(run, num_rows))
        room -= num_rows
    return chunks, room


def build_batch(chunks: Sequence[Chunk], block_size: int) -> StepBatch:
    """Turn chunks into the arrays of one step.

    Args:
        chunks: The chunks that :meth:`Batcher.plan` chose, at least one.
        block_size: Slots per block of the pool.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    output_rows: list[int] = []
    output_specs: list[OutputSpec] = []
    cu_seqlens_q = [0]
    kv_lens: list[int] = []
    is_shaped = False
    for chunk in chunks:
        run, first, base = chunk.run, chunk.run.cursor, len(token_ids)
        held = run.reservation
        end = held.start + first + chunk.num_rows
        if chunk.num_rows == 1:  # most rows of most steps: without the lists that a longer chunk is worth
            token_ids.append(run.token_ids[first])
            positions.append(end - 1)
            slots.append(_slot(held, end - 1, block_size))
        else:
            chunk_positions = range(held.start + first, end)
            token_ids += run.token_ids[first : first + chunk.num_rows]
            positions += chunk_positions
            slots += _slots(held, chunk_positions, block_size)
        for row, spec in _output_specs(run, first, chunk.num_rows):
            output_rows.append(base + row - first)
            output_specs.append(spec)
            if spec.shaping is not None:
                is_shaped = True
        cu_seqlens_q.append(len(token_ids))
        kv_lens.append(end)
    return StepBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int32),
        cu_seqlens_q=np.array(cu_seqlens_q, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        block_tables=_block_tables(chunks, kv_lens, block_size),
        output_rows=np.array(output_rows, np.int32),
        output_specs=tuple(output_specs),
        histories=_histories(chunks) if is_shaped else (),
    )


def build_next(batch: StepBatch, rows: Sequence[int], block_ids: Sequence[int], block_size: int) -> StepBatch:
    """Return a step with one more token after some rows of a step that has one row per sequence, each an output.

    Args:
        batch: The step, submitted just before.
        rows: Rows of that step; it chooses the tokens of the new one.
        block_ids: Block of each new token.
        block_size: Slots per block of the pool.
    """
    kept = np.array(rows, np.int32)
    positions = batch.positions[kept] + np.int32(1)
    index, offset = np.divmod(positions, np.int32(block_size))
    last_ids = np.array(block_ids, np.int32)
    tables = np.full((len(kept), int(index.max()) + 1), NULL_BLOCK, np.int32)
    width = min(tables.shape[1], batch.block_tables.shape[1])
    tables[:, :width] = batch.block_tables[kept, :width]
    tables[np.arange(len(kept)), index] = last_ids
    return StepBatch(
        token_ids=np.zeros(len(kept), np.int32),
        positions=positions,
        slot_mapping=last_ids * np.int32(block_size) + offset,
        cu_seqlens_q=np.arange(len(kept) + 1, dtype=np.int32),
        kv_lens=positions + np.int32(1),
        block_tables=tables,
        output_rows=np.arange(len(kept), dtype=np.int32),
        output_specs=tuple(batch.output_specs[row] for row in rows),
        feedback=kept,
    )


def _histories(chunks: Iterable[Chunk]) -> tuple[Int32Array | None, ...]:
    """Return the tokens that the penalties of each output row count; rows of one append share memory."""
    histories: list[Int32Array | None] = []
    for chunk in chunks:
        run, tokens, start = chunk.run, None, -1
        for row, spec in _output_specs(run, run.cursor, chunk.num_rows):
            if spec.shaping is None or not spec.shaping.has_penalties:
                histories.append(None)
                continue
            if tokens is None or spec.shaping.penalty_start != start:
                start = spec.shaping.penalty_start
                tokens = run.tokens_from(start, run.cursor + chunk.num_rows)
            histories.append(tokens[: max(0, run.reservation.start + row + 1 - start)])
    return tuple(histories) if any(each is not None for each in histories) else ()


def _slot(held: Reservation, position: int, block_size: int) -> int:
    """Return the slot of a position, NO_SLOT for a row that only reads."""
    if held.num_cached and held.num_cached == held.num_tokens:
        return NO_SLOT
    return held.block_ids[position // block_size] * block_size + position % block_size


def _slots(held: Reservation, positions: Sequence[int], block_size: int) -> list[int]:
    """Return the slots of positions, NO_SLOT for rows that only read."""
    if held.num_cached and held.num_cached == held.num_tokens:
        return [NO_SLOT] * len(positions)
    table = held.block_ids
    return [table[position // block_size] * block_size + position % block_size for position in positions]


def _output_specs(run: RunningAppend, first: int, num_rows: int) -> Iterable[tuple[int, OutputSpec]]:
    """Return (row of the append, spec) of the rows in this chunk that return something, ascending."""
    if num_rows == len(run.token_ids):
        return run.specs.items()
    return [(row, run.specs[row]) for row in range(first, first + num_rows) if row in run.specs]


def _block_tables(chunks: Sequence[Chunk], kv_lens: Sequence[int], block_size: int) -> Int32Array:
    """Return int32 [num_seqs, max_blocks]: the blocks of the first ``kv_len`` tokens, NULL_BLOCK beyond."""
    counts = [-(-kv_len // block_size) for kv_len in kv_lens]
    tables = np.full((len(chunks), max(counts)), NULL_BLOCK, np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        tables[row, :count] = chunk.run.reservation.block_ids[:count]
    return tables
