"""The names, help texts and sources of the metrics without labels, and of the histograms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from ferrule.v1 import info_pb2
from ferrule_server.api.rpc.state import ServerState, Serving
from ferrule_server.engine.metrics.counters import EngineCounters, EngineSnapshot
from ferrule_server.engine.metrics.durability import DurabilityFigures
from ferrule_server.kv.metrics import KvMetrics

_Seen = TypeVar("_Seen")

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
    """

    state: ServerState
    serving: Serving
    status: info_pb2.ExecutorStatus
    snapshot: EngineSnapshot
    kv: KvMetrics

    @property
    def counters(self) -> EngineCounters:
        """The counters of the engine."""
        return self.snapshot.counters

    @property
    def refused(self) -> dict[str, int]:
        """Jobs and items refused, by reason, in the engine and before it."""
        total = dict.fromkeys(_ALWAYS_SHOWN, 0) | self.snapshot.refused()
        for reason, count in self.state.calls.refused_items().items():
            total[reason] = total.get(reason, 0) + count
        return total

    @property
    def num_left_out(self) -> int:
        """Appends in flight that had no room in the newest step."""
        return min(self.counters.timings.num_left_out, self.snapshot.num_running)


class Figure(NamedTuple, Generic[_Seen]):
    """A metric without labels: its name after ``ferrule_``, its help text, and the function that reads it."""

    name: str
    help: str
    read: Callable[[_Seen], float]


GAUGES: Final[tuple[Figure[Look], ...]] = (
    Figure("sequences", "Live sequences.", lambda look: look.snapshot.num_sequences),
    Figure(
        "jobs_running",
        "Appends in flight with a row in the newest step or the next.",
        lambda look: look.snapshot.num_running - look.num_left_out,
    ),
    Figure(
        "jobs_waiting",
        "Jobs that wait for another one on their sequence, for room in a step, or to be accepted.",
        lambda look: look.snapshot.num_waiting + look.num_left_out + look.snapshot.num_arrived,
    ),
    Figure("streams_active", "Generates and Forwards under way.", lambda look: look.snapshot.num_streams),
    Figure(
        "streams_parked", "Generates and Forwards that wait for their readers.", lambda look: look.snapshot.num_parked
    ),
    Figure("kv_blocks_shared", "Used blocks with two owners or more.", lambda look: look.kv.shared_blocks),
    Figure("kv_blocks_capacity", "Blocks that sequences can use.", lambda look: look.kv.total_blocks),
    Figure("kv_block_size_tokens", "Tokens in one block.", lambda look: look.kv.block_size),
    Figure(
        "kv_usage_ratio",
        "Used blocks as a share of all; cached ones are free.",
        lambda look: look.kv.used_blocks / max(1, look.kv.total_blocks),
    ),
    Figure("tombstones", "Expired sequences still remembered.", lambda look: look.kv.tombstones),
    Figure("token_masks", "Token masks registered.", lambda look: look.serving.inputs.masks.num_masks),
    Figure("token_mask_bytes", "Memory of registered token masks.", lambda look: look.serving.inputs.masks.num_bytes),
    Figure(
        "last_step_timestamp_seconds",
        "End of the newest step, in Unix time; 0 before the first.",
        lambda look: look.counters.last_step_unix_ns * 1e-9,
    ),
)

COUNTERS: Final[tuple[Figure[Look], ...]] = (
    Figure(
        "prompt_tokens",
        "Tokens appended by prefills, without those found in the prefix cache.",
        lambda look: look.counters.prefill_tokens,
    ),
    Figure(
        "generated_tokens",
        "Tokens appended one by one and by verifies, whether drawn or chosen by the client.",
        lambda look: look.counters.decode_tokens,
    ),
    Figure("draft_tokens", "Drafts that verifies brought.", lambda look: look.counters.draft_tokens),
    Figure("accepted_tokens", "Drafts that a rule accepted.", lambda look: look.counters.accepted_tokens),
    Figure(
        "prefills",
        "Finished appends of more than one token, or that created a sequence.",
        lambda look: look.counters.prefills,
    ),
    Figure(
        "decodes", "Finished appends of one token, including those of Generates.", lambda look: look.counters.decodes
    ),
    Figure("verifies", "Verifies finished.", lambda look: look.counters.verifies),
    Figure("generates", "Generates begun.", lambda look: look.counters.generates),
    Figure("sequences_created", "Sequences created, including forks.", lambda look: look.kv.num_created),
    Figure("forks", "Sequences created by forks.", lambda look: look.kv.num_forks),
    Figure("truncates", "Truncates and rewinds that dropped tokens.", lambda look: look.kv.num_truncates),
    Figure("released", "Sequences released by their owners.", lambda look: look.kv.num_released),
    Figure("expired", "Sequences freed because their lease ran out.", lambda look: look.kv.num_expired),
    Figure(
        "block_copies",
        "Blocks copied because a shared one would have been written.",
        lambda look: look.kv.num_block_copies,
    ),
    Figure(
        "prefix_lookup_tokens",
        "Tokens of prompts looked up in the prefix cache.",
        lambda look: look.kv.num_prefix_lookup_tokens,
    ),
    Figure("prefix_hit_tokens", "Of these, tokens found.", lambda look: look.kv.num_prefix_hit_tokens),
    Figure("prefix_evictions", "Cached blocks handed out to others.", lambda look: look.kv.num_prefix_evictions),
    Figure("kv_blocks_given_back", "Blocks given back outside windows.", lambda look: look.kv.num_given_back),
    Figure("kv_exhausted", "Requests refused because too few blocks were free.", lambda look: look.kv.num_exhausted),
    Figure("replays", "Appends and forks answered from an earlier commit.", lambda look: look.counters.replays),
    Figure("recomputed", "Replays whose rows had to be run again.", lambda look: look.counters.recomputed),
    Figure("joined", "Jobs answered together with an equal one in flight.", lambda look: look.counters.joined),
    Figure(
        "conflicts",
        "Jobs refused with HANDLE_STALE: another append was first.",
        lambda look: look.refused.get("HANDLE_STALE", 0),
    ),
    Figure(
        "faults",
        "Calls that ended with INTERNAL or UNKNOWN: errors of the server, not of its callers.",
        lambda look: look.state.calls.ended_with("INTERNAL", "UNKNOWN"),
    ),
    Figure(
        "slow_consumers",
        "Streams ended with SLOW_CONSUMER because their readers fell behind.",
        lambda look: look.state.calls.ended_for("SLOW_CONSUMER"),
    ),
    Figure(
        "queued_steps",
        "Steps put into the device's queue before their tokens were known.",
        lambda look: look.counters.queued_steps,
    ),
    Figure("discarded_rows", "Rows of queued steps that were not used.", lambda look: look.counters.discarded_rows),
)

DURABLE_GAUGES: Final[tuple[Figure[DurabilityFigures], ...]] = (
    Figure("durable_healthy", "1 while records reach the disk.", lambda seen: seen.is_healthy),
    Figure("durable_sequences", "Durable sequences that are alive.", lambda seen: seen.num_sequences),
    Figure("durable_cold_sequences", "Of these, sequences without KV.", lambda seen: seen.num_cold),
    Figure("durable_tokens_to_recompute", "Tokens of these.", lambda seen: seen.tokens_to_recompute),
    Figure("durable_directory_bytes", "Size of the journal on the disk.", lambda seen: seen.directory_bytes),
)
DURABLE_COUNTERS: Final[tuple[Figure[DurabilityFigures], ...]] = (
    Figure("durable_restored", "Sequences read from the journal at the start.", lambda seen: seen.num_restored),
    Figure(
        "durable_recomputed_tokens",
        "Tokens of restored sequences whose KV was computed again.",
        lambda seen: seen.num_recomputed_tokens,
    ),
    Figure("durable_groups", "Group commits: the records of a step or more.", lambda seen: seen.counters.num_groups),
    Figure("durable_syncs", "Syncs of the journal to the disk.", lambda seen: seen.counters.num_syncs),
    Figure("durable_written_bytes", "Bytes written to the journal.", lambda seen: seen.counters.num_bytes),
    Figure("durable_failures", "Writes and syncs that failed.", lambda seen: seen.counters.num_failures),
    Figure("durable_snapshots", "Complete snapshots written.", lambda seen: seen.num_snapshots),
)
"""Metrics of a server with a journal; any other server has none of them."""

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
