"""Counters of the engine, written by the engine thread; GetStatus reads them without a lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ferrule_server.engine.metrics.timings import EngineTimings
from ferrule_server.kv.metrics import KvCounters
from ferrule_server.kv.per_principal import PerPrincipal


@dataclass(slots=True)
class OwnCounters:
    """Counters of one principal; :class:`EngineCounters` describes the attributes."""

    prefills: int = 0
    prefill_tokens: int = 0
    prefill_ns: int = 0
    decodes: int = 0
    decode_ns: int = 0
    verifies: int = 0
    verify_ns: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    verify_tokens: int = 0
    queue_ns: int = 0
    replays: int = 0
    generates: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def decode_tokens(self) -> int:
        """Tokens appended by decodes and verifies."""
        return self.decodes + self.verify_tokens


@dataclass(slots=True)
class EngineCounters(OwnCounters):
    """Totals since start. Written by the engine thread alone; a reader may be one step behind.

    Attributes:
        steps: Executor runs whose rows were used. step_ns: sum of their durations, where overlaps count once.
        queued_steps: Steps put into the device's queue before their first tokens were known; discarded_rows: rows of
            these steps that were not used.
        prefills: Finished appends with more than one token or a new prompt; prefill_tokens: their tokens, without those
            from the prefix cache; prefill_ns: sum of their ``run_ns``.
        decodes: Finished appends of one token, in branches too; decode_ns: sum of their ``run_ns``.
        verifies: Finished verifies; verify_ns: sum of their ``run_ns``; draft_tokens: their drafts; accepted_tokens:
            drafts accepted by a rule; verify_tokens: tokens appended by verifies.
        queue_ns: Sum of the times that these appends waited for their first steps.
        queries: Rows run again without an append.
        replays: Appends and forks answered from what was committed before.
        recomputed: Replays whose rows had to be run again.
        joined: Jobs answered together with an equal one that was in flight.
        refused: Jobs refused by the engine thread, by reason (HANDLE_STALE among them).
        generates: Generates begun. finished: their branches that have ended, by how (``jobs.Finish``, or ``cancelled``
            if the caller has gone).
        restored_tokens: Tokens of restored sequences that had to be computed again.
        expired: Sequences freed because their lease ended. released: Sequences freed on request.
        last_step_seqs: Sequences of the newest step. last_step_unix_ns: when it ended, by the wall clock; 0 before the
            first. max_step_rows: the most rows in any step.
        timings: Histograms of durations.
        own: The counters of each recently active principal.
    """

    steps: int = 0
    step_ns: int = 0
    queries: int = 0
    recomputed: int = 0
    joined: int = 0
    restored_tokens: int = 0
    expired: int = 0
    released: int = 0
    last_step_seqs: int = 0
    last_step_unix_ns: int = 0
    max_step_rows: int = 0
    queued_steps: int = 0
    discarded_rows: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    timings: EngineTimings = field(default_factory=EngineTimings)
    own: PerPrincipal[OwnCounters] = field(default_factory=lambda: PerPrincipal(OwnCounters))

    def copy(self) -> EngineCounters:
        """Return a copy that no longer changes, without the counters of principals; from any thread."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values.update(refused=self.refused.copy(), finished=self.finished.copy(), timings=self.timings.copy())
        del values["own"]
        return EngineCounters(**values)

    def refuse(self, principal: str, reason: str) -> None:
        """Count one refused job of a principal."""
        for refused in (self.refused, self.own.of(principal).refused):
            refused[reason] += 1

    def replay(self, principal: str) -> None:
        """Count one append or fork of a principal that is answered from committed data."""
        self.replays += 1
        self.own.of(principal).replays += 1

    def generate(self, principal: str) -> None:
        """Count one Generate of a principal that has begun."""
        self.generates += 1
        self.own.of(principal).generates += 1


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """A copy of the engine's state at one moment. Of figures that one step changes, some may be older than the step.

    Attributes:
        counters: A copy.
        num_running: Appends with rows in the next step. num_waiting: jobs that wait for another on their sequence.
        num_sequences: Live sequences. num_durable: those of them that survive the process.
        total_blocks, free_blocks: Of the pool, without the null block.
        is_failed: True after a device was lost; nothing runs any more.
        refused_at_gate: Jobs refused before they reached the engine thread, by reason.
        num_streams: Generates and Forwards in progress. num_parked: those of them that wait for their readers.
        num_arrived: Requests and stream frames that the engine thread has not taken yet.
    """

    counters: EngineCounters
    num_running: int
    num_waiting: int
    num_sequences: int
    total_blocks: int
    free_blocks: int
    is_failed: bool
    refused_at_gate: Mapping[str, int] = field(default_factory=dict)
    num_streams: int = 0
    num_parked: int = 0
    num_arrived: int = 0
    num_durable: int = 0

    @property
    def refused(self) -> dict[str, int]:
        """Jobs refused, by reason, at the gate and on the engine thread."""
        return dict(Counter(self.counters.refused) + Counter(self.refused_at_gate))


@dataclass(frozen=True, slots=True)
class OwnFigures:
    """The figures of the engine for a principal that may not see those of others.

    Attributes:
        num_sequences: Its live sequences.
        counters: The engine's counters for it.
        kv: The counters of its sequences.
        refused_at_gate: Its jobs refused before they reached the engine thread, by reason.
    """

    num_sequences: int
    counters: OwnCounters
    kv: KvCounters
    refused_at_gate: Mapping[str, int]

    @property
    def refused(self) -> dict[str, int]:
        """Its jobs refused, by reason, at the gate and on the engine thread."""
        return dict(Counter(self.counters.refused) + Counter(self.refused_at_gate))
