"""Quotas: the limits of one principal. The config sets them; every package may import this module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """The limits of one principal; None means no limit.

    Attributes:
        handles: Live sequences.
        kv_tokens: Slots of the blocks in use, in tokens: whole blocks, each physical block counted once however many
            of the principal's sequences share it, reserved ones included.
        queued_rows: Rows of appends that are accepted and not finished.
        prefill_tokens_per_s: Prompt tokens per second on average.
        retained_bytes: Bytes of outputs kept for replay; beyond it the principal's oldest are dropped, and no request
            is refused.
        mask_bytes: Bytes of registered token masks, their packed bits and 1 KiB each; beyond it the principal's least
            recently used masks are dropped.
        calls_per_s: Calls per second on average.
        request_bytes_per_s: Bytes of requests per second on average, stream frames included.
        text_bytes_per_s: Bytes of text per second on average that are tokenized or rendered; a token that is decoded to
            text counts as TEXT_BYTES_PER_TOKEN.
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
"""Bytes that one decoded token id counts in ``text_bytes_per_s``: about the length of its text."""

LimitsOf = Callable[[str], QuotaLimits]
"""Return the limits of a principal by its name; called from any thread, must not block."""


def unlimited(principal: str) -> QuotaLimits:  # noqa: ARG001  (the same for everybody)
    """Return no limits for any principal."""
    return UNLIMITED
