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

    ``kv_tokens`` counts whole blocks: a physical block counts once, however many sequences of the principal share it,
    and reserved blocks count too. ``queued_rows`` counts rows of appends that are accepted and not finished. Beyond
    ``retained_bytes`` and ``mask_bytes`` nothing is refused: the oldest outputs, or the least recently used masks, of
    the principal are dropped. Rates are averages. Bytes of requests include those of stream frames.
    """

    handles: int | None = _QUOTA.optional("--quota-handles", POSITIVE)
    """live sequences"""
    kv_tokens: int | None = _QUOTA.optional("--quota-kv-tokens", POSITIVE)
    """tokens in the KV pool; shared blocks count once"""
    queued_rows: int | None = _QUOTA.optional("--quota-queued-rows", POSITIVE)
    """tokens that wait to be run"""
    prefill_tokens_per_s: int | None = _QUOTA.optional("--quota-prefill-rate", POSITIVE)
    """prompt tokens per second"""
    retained_bytes: int | None = _QUOTA.optional("--quota-retained", SIZE)
    """size of the outputs that are kept for replay, such as 16MiB; the oldest are dropped"""
    mask_bytes: int | None = _QUOTA.optional(
        "--quota-mask-bytes", Kind("SIZE|none", _size_or_none), f"{_DEFAULT_MASKS}; 256MiB for all together"
    )
    """size of the registered token masks: one bit per token of the vocabulary and 1 KiB for each mask; the least
    recently used are dropped
    """
    calls_per_s: int | None = _QUOTA.optional("--quota-call-rate", POSITIVE)
    """calls per second"""
    request_bytes_per_s: int | None = _QUOTA.optional("--quota-request-bytes", POSITIVE_SIZE)
    """bytes of requests per second, such as 16MiB"""
    text_bytes_per_s: int | None = _QUOTA.optional("--quota-text-rate", POSITIVE_SIZE)
    """bytes of text per second that are tokenized or rendered, such as 1MiB; a token that is turned into text counts as
    four bytes
    """


DEFAULT_QUOTAS: Final = QuotaLimits(mask_bytes=parse_size(_DEFAULT_MASKS))
"""The limits of every principal unless something else is set."""

UNLIMITED: Final = QuotaLimits()

TEXT_BYTES_PER_TOKEN: Final = 4
"""Bytes that one decoded token id counts in ``text_bytes_per_s``: about the length of its text."""

LimitsOf = Callable[[str], QuotaLimits]
"""Return the limits of a principal by its name; called from any thread, must not block."""


def unlimited(principal: str) -> QuotaLimits:  # noqa: ARG001  (the same for every principal)
    """Return no limits for any principal."""
    return UNLIMITED
