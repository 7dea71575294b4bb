"""Quotas: the limits of one principal. The config sets them; every package may import this module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ferrule_server.settings import POSITIVE, POSITIVE_SIZE, SIZE, Group, Kind, parse_size

MIN_TTL_S: Final = 5.0
"""Shortest lease."""

_DEFAULT_MASKS: Final = "64MiB"
_QUOTA: Final = Group("quotas of each principal (default: none but for masks)")


def _size_or_none(text: str) -> int | None:
    return None if text.strip().lower() == "none" else parse_size(text)


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

    handles: int | None = _QUOTA.optional("--quota-handles", POSITIVE)
    """live sequences"""
    kv_tokens: int | None = _QUOTA.optional("--quota-kv-tokens", POSITIVE)
    """tokens in the KV pool, shared blocks counted once"""
    queued_rows: int | None = _QUOTA.optional("--quota-queued-rows", POSITIVE)
    """tokens waiting to be run"""
    prefill_tokens_per_s: int | None = _QUOTA.optional("--quota-prefill-rate", POSITIVE)
    """prompt tokens per second"""
    retained_bytes: int | None = _QUOTA.optional("--quota-retained", SIZE)
    """outputs kept for replay: 16MiB"""
    mask_bytes: int | None = _QUOTA.optional(
        "--quota-mask-bytes", Kind("SIZE|none", _size_or_none), f"{_DEFAULT_MASKS}; 256MiB for all together"
    )
    """registered token masks, a bit for each token of the vocabulary and 1 KiB each; the least recently used are
    dropped
    """
    calls_per_s: int | None = _QUOTA.optional("--quota-call-rate", POSITIVE)
    """calls per second"""
    request_bytes_per_s: int | None = _QUOTA.optional("--quota-request-bytes", POSITIVE_SIZE)
    """bytes of requests per second: 16MiB"""
    text_bytes_per_s: int | None = _QUOTA.optional("--quota-text-rate", POSITIVE_SIZE)
    """bytes of text per second that are turned into tokens or rendered, a token turned into text counted as four: 1MiB
    """


DEFAULT_QUOTAS: Final = QuotaLimits(mask_bytes=parse_size(_DEFAULT_MASKS))
"""The limits of every principal unless something else is set."""

UNLIMITED: Final = QuotaLimits()

TEXT_BYTES_PER_TOKEN: Final = 4
"""Bytes that one decoded token id counts in ``text_bytes_per_s``: about the length of its text."""

LimitsOf = Callable[[str], QuotaLimits]
"""Return the limits of a principal by its name; called from any thread, must not block."""


def unlimited(principal: str) -> QuotaLimits:  # noqa: ARG001  (the same for everybody)
    """Return no limits for any principal."""
    return UNLIMITED
