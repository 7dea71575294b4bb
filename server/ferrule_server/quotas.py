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
        mask_bytes: Bytes of registered token masks, their packed bits and 1 KiB each; beyond it the principal's least
            recently used are dropped.
        calls_per_s: Calls per second on average.
        request_bytes_per_s: Bytes of requests per second on average, those of frames of streams included.
        text_bytes_per_s: Bytes of text per second on average that are turned into tokens or rendered; a token that is
            turned into text counts as TEXT_BYTES_PER_TOKEN.
    """

    handles: int | None = None
    kv_tokens: int | None = None
    queued_rows: int | None = None
    prefill_tokens_per_s: int | None = None
    retained_bytes: int | None = None
    mask_bytes: int | None = None
    calls_per_s: int | None = None
    request_bytes_per_s: int | None = None
    text_bytes_per_s: int | None = None


UNLIMITED: Final = QuotaLimits()

TEXT_BYTES_PER_TOKEN: Final = 4
"""What one token id counts in ``text_bytes_per_s`` when it is turned into text: about the length of its text."""

LimitsOf = Callable[[str], QuotaLimits]
"""Returns the limits of a principal by its name; called from any thread, must not block."""


def unlimited(principal: str) -> QuotaLimits:  # noqa: ARG001  (the same for everybody)
    """Return no limits, whoever asks."""
    return UNLIMITED
