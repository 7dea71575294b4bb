"""Quotas: what one principal may use at most. A leaf: the config sets them, every ring may read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """What one principal may use at most; None means no limit of its own.

    Attributes:
        handles: Live sequences.
        kv_tokens: Slots of the blocks in use, in tokens: whole blocks, each physical block counted once however many
            of the principal's sequences share it, reserved ones included.
        queued_rows: Rows of appends accepted and not finished.
        prefill_tokens_per_s: Prompt tokens per second on average.
        retained_bytes: Bytes of outputs kept for replay; beyond it the principal's oldest are dropped, nothing is
            refused.
        mask_bytes: Bytes of registered token masks, their packed bits; beyond it the principal's least recently used
            are dropped.
    """

    handles: int | None = None
    kv_tokens: int | None = None
    queued_rows: int | None = None
    prefill_tokens_per_s: int | None = None
    retained_bytes: int | None = None
    mask_bytes: int | None = None


UNLIMITED: Final = QuotaLimits()

LimitsOf = Callable[[str], QuotaLimits]
"""Returns the limits of a principal by its name; called from any thread, must not block."""


def unlimited(principal: str) -> QuotaLimits:  # noqa: ARG001  (the same for everybody)
    """Return no limits, whoever asks."""
    return UNLIMITED
