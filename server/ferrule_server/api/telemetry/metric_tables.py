"""The names, help texts and sources of the metrics without labels, and of the histograms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from ferrule.v1 import info_pb2
from ferrule_server.api.rpc.state import ServerState, Serving
from ferrule_server.engine.metrics.counters import EngineCounters, EngineSnapshot
from ferrule_server.engine.metrics.durability import DurabilityFigures
from ferrule_server.kv.metrics import KvMetrics

_ALWAYS_SHOWN: Final = (
    *("CANCELLED", "ENGINE_FAULT", "HANDLE_LOST", "HANDLE_STALE"),
    *("KV_BLOCKS_EXHAUSTED", "NON_FINITE_LOGITS", "QUEUE_FULL"),
)
"""Reasons that are shown even as 0: an increase is seen only if there was a value before."""


@dataclass(frozen=True, slots=True)
class Look:
    """The server at one moment.

    Attributes:
        status: The answer of GetStatus.
        journal: None: there is none, nor a metric of it.
    """

    state: ServerState
    serving: Serving
    status: info_pb2.ExecutorStatus
    snapshot: EngineSnapshot
    kv: KvMetrics
    journal: DurabilityFigures | None

    @property
    def counters(self) -> EngineCounters:
        """The counters of the engine."""
        return self.snapshot.counters

    @property
    def refused(self) -> dict[str, int]:
        """Jobs and items refused, by reason, in the engine and before it."""
        total = dict.fromkeys(_ALWAYS_SHOWN, 0) | self.snapshot.refused
        for reason, count in self.state.calls.refused_items().items():
            total[reason] = total.get(reason, 0) + count
        return total

    @property
    def num_running(self) -> int:
        """Appends in flight without those that had no room in the newest step."""
        return max(0, self.snapshot.num_running - self.counters.timings.num_left_out)

    @property
    def num_waiting(self) -> int:
        """Jobs that are not accepted or have no row, of those in flight too."""
        snapshot = self.snapshot
        return snapshot.num_waiting + snapshot.num_running - self.num_running + snapshot.num_arrived

    @property
    def kv_usage(self) -> float:
        """The share of blocks that are used."""
        return self.kv.used_blocks / max(1, self.kv.total_blocks)

    @property
    def last_step_s(self) -> float:
        """When the newest step ended, in Unix time."""
        return self.counters.last_step_unix_ns * 1e-9

    @property
    def num_conflicts(self) -> int:
        """Jobs refused because another append was first."""
        return self.refused["HANDLE_STALE"]

    @property
    def num_faults(self) -> int:
        """Calls that ended with an error of the server."""
        return self.state.calls.ended_with("INTERNAL", "UNKNOWN")

    @property
    def num_slow_consumers(self) -> int:
        """Streams that ended because their readers fell behind."""
        return self.state.calls.ended_for("SLOW_CONSUMER")


class Figure(NamedTuple):
    """A metric without labels: its name after ``ferrule_``, where a :class:`Look` has it, and its help text."""

    name: str
    path: str
    help: str


GAUGES: Final[tuple[Figure, ...]] = (
    Figure("sequences", "snapshot.num_sequences", "Live sequences."),
    Figure("jobs_running", "num_running", "Appends in flight with a row in the newest step or the next."),
    Figure(
        "jobs_waiting",
        "num_waiting",
        "Jobs that wait for another one on their sequence, for room in a step, or to be accepted.",
    ),
    Figure("streams_active", "snapshot.num_streams", "Generates and Forwards under way."),
    Figure("streams_parked", "snapshot.num_parked", "Generates and Forwards that wait for their readers."),
    Figure("kv_blocks_shared", "kv.shared_blocks", "Used blocks with two owners or more."),
    Figure("kv_blocks_capacity", "kv.total_blocks", "Blocks that sequences can use."),
    Figure("kv_block_size_tokens", "kv.block_size", "Tokens in one block."),
    Figure("kv_usage_ratio", "kv_usage", "Used blocks as a share of all; cached ones are free."),
    Figure("tombstones", "kv.tombstones", "Expired sequences still remembered."),
    Figure("token_masks", "serving.inputs.masks.num_masks", "Token masks registered."),
    Figure("token_mask_bytes", "serving.inputs.masks.memory.num_held", "Memory of registered token masks."),
    Figure("last_step_timestamp_seconds", "last_step_s", "End of the newest step, in Unix time; 0 before the first."),
    Figure("durable_healthy", "journal.is_healthy", "1 while records reach the disk."),
    Figure("durable_sequences", "journal.num_sequences", "Durable sequences that are alive."),
    Figure("durable_cold_sequences", "journal.num_cold", "Of these, sequences without KV."),
    Figure("durable_tokens_to_recompute", "journal.tokens_to_recompute", "Tokens of these."),
    Figure("durable_directory_bytes", "journal.directory_bytes", "Size of the journal on the disk."),
)
COUNTERS: Final[tuple[Figure, ...]] = (
    Figure(
        "prompt_tokens",
        "counters.prefill_tokens",
        "Tokens appended by prefills, without those found in the prefix cache.",
    ),
    Figure(
        "generated_tokens",
        "counters.decode_tokens",
        "Tokens appended one by one and by verifies, whether drawn or chosen by the client.",
    ),
    Figure("draft_tokens", "counters.draft_tokens", "Drafts that verifies brought."),
    Figure("accepted_tokens", "counters.accepted_tokens", "Drafts that a rule accepted."),
    Figure("prefills", "counters.prefills", "Finished appends of more than one token, or that created a sequence."),
    Figure("decodes", "counters.decodes", "Finished appends of one token, including those of Generates."),
    Figure("verifies", "counters.verifies", "Verifies finished."),
    Figure("generates", "counters.generates", "Generates begun."),
    Figure("sequences_created", "kv.num_created", "Sequences created, including forks."),
    Figure("forks", "kv.num_forks", "Sequences created by forks."),
    Figure("truncates", "kv.num_truncates", "Truncates and rewinds that dropped tokens."),
    Figure("released", "kv.num_released", "Sequences released by their owners."),
    Figure("expired", "kv.num_expired", "Sequences freed because their lease ran out."),
    Figure("block_copies", "kv.num_block_copies", "Blocks copied because a shared one would have been written."),
    Figure("prefix_lookup_tokens", "kv.num_prefix_lookup_tokens", "Tokens of prompts looked up in the prefix cache."),
    Figure("prefix_hit_tokens", "kv.num_prefix_hit_tokens", "Of these, tokens found."),
    Figure("prefix_evictions", "kv.num_prefix_evictions", "Cached blocks handed out to others."),
    Figure("kv_blocks_given_back", "kv.num_given_back", "Blocks given back outside windows."),
    Figure("kv_exhausted", "kv.num_exhausted", "Requests refused because too few blocks were free."),
    Figure("replays", "counters.replays", "Appends and forks answered from an earlier commit."),
    Figure("recomputed", "counters.recomputed", "Replays whose rows had to be run again."),
    Figure("joined", "counters.joined", "Jobs answered together with an equal one in flight."),
    Figure("conflicts", "num_conflicts", "Jobs refused with HANDLE_STALE: another append was first."),
    Figure(
        "faults", "num_faults", "Calls that ended with INTERNAL or UNKNOWN: errors of the server, not of its callers."
    ),
    Figure(
        "slow_consumers", "num_slow_consumers", "Streams ended with SLOW_CONSUMER because their readers fell behind."
    ),
    Figure(
        "queued_steps", "counters.queued_steps", "Steps put into the device's queue before their tokens were known."
    ),
    Figure("discarded_rows", "counters.discarded_rows", "Rows of queued steps that were not used."),
    Figure("durable_restored", "journal.num_restored", "Sequences read from the journal at the start."),
    Figure(
        "durable_recomputed_tokens",
        "journal.num_recomputed_tokens",
        "Tokens of restored sequences whose KV was computed again.",
    ),
    Figure("durable_groups", "journal.counters.num_groups", "Group commits: the records of a step or more."),
    Figure("durable_syncs", "journal.counters.num_syncs", "Syncs of the journal to the disk."),
    Figure("durable_written_bytes", "journal.counters.num_bytes", "Bytes written to the journal."),
    Figure("durable_failures", "journal.counters.num_failures", "Writes and syncs that failed."),
    Figure("durable_snapshots", "journal.num_snapshots", "Complete snapshots written."),
)

DURABLE_SYNC: Final = ("durable_sync_seconds", "Time of a write of the journal and its sync to the disk.")

HISTOGRAMS: Final = {
    "step": ("step_seconds", "Time of a step on the executor; the overlap of two steps counts once."),
    "step_rows": ("step_rows", "Rows (tokens) of a step."),
    "step_sequences": ("step_sequences", "Sequences of a step."),
    "queue": ("queue_seconds", "From submission to the start of the first step, for the appends of clients."),
    "first_token": ("time_to_first_token_seconds", "From submission to the first token or output after a prompt."),
    "inter_token": ("inter_token_seconds", "Between two tokens of a branch of a Generate."),
    "decode": ("decode_seconds", "From submission to the end of the step, of one-token appends and verifies."),
}
"""Histograms of the engine, by their names in ``EngineTimings``: the metric's name and its meaning."""
