"""Limits and tuning parameters of the engine, fixed at start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the engine forms steps, and which jobs it refuses.

    Attributes:
        max_step_rows: Most rows (tokens) in one step, at least 2: one for decodes and one for prefills. Longer inputs
            are run in chunks.
        max_step_time_s: Longest step that prompts may make while others decode, in seconds; None: twice a decode step.
            A cohort may make a longer one, while no other principal decodes up to ``max_step_rows``.
        max_waiting_jobs: Most appends, forks and truncates accepted and not finished; beyond that QUEUE_FULL.
        gather_gap_s: The gather window closes if no row has come back for this long, in seconds.
        gather_share: Longest gather window, as a share of the last step's run time.
        retained_bytes: Most bytes of logits kept for replay; beyond that the oldest are dropped and recomputed.
        restore_wait_tokens: Jobs wait while at most so many tokens of a restored sequence are computed again; for more
            they are answered with RESTORING.
        debug_top_tokens: Log the position and the five best tokens of every output row.
    """

    max_step_rows: int = 512
    max_step_time_s: float | None = None
    max_waiting_jobs: int = 4096
    gather_gap_s: float = 0.001
    gather_share: float = 0.1
    retained_bytes: int = 64 << 20
    restore_wait_tokens: int = 8192
    debug_top_tokens: bool = False
