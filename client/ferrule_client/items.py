"""What one frame or batch can be made of: decodes, verifies and chunks, in any mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ferrule_client.masks import MaskLike
from ferrule_client.policy import Policy
from ferrule_client.types import Acceptance, OnStale, Tokens

__all__ = ["Chunk", "DecodeItem", "DraftDistributions", "VerifyItem"]

C = TypeVar("C")

DraftDistributions = npt.NDArray[np.floating] | Sequence[Mapping[int, float]]
"""Distributions of drafts: dense, [drafts, vocab_size], or for each draft its probabilities by token id."""


@dataclass(frozen=True, slots=True)
class DecodeItem(Generic[C]):
    """Tokens to append to a cache, as ``Cache.decode`` does.

    Attributes:
        cache: The sequence.
        tokens: One token id, several, or none (a query of the newest row).
        policy: What to return for the row. None: full logits in float32.
        on_stale: As in ``Cache.decode``.
    """

    cache: C
    tokens: Tokens = ()
    policy: Policy | None = None
    on_stale: OnStale = "fail"


@dataclass(frozen=True, slots=True, eq=False)
class VerifyItem(Generic[C]):
    """Drafts to check, as ``Cache.verify`` does.

    Attributes:
        cache: The sequence.
        draft: Draft token ids.
        tokens: Certain tokens before them, behind what is pending.
        policy: As in ``Cache.verify``.
        acceptance: As in ``Cache.verify``.
        parents: As in ``Cache.verify``.
        draft_probs: As in ``Cache.verify``.
        masks: As in ``Cache.verify``.
        row_handles: As in ``Cache.verify``.
        on_stale: As in ``Cache.decode``.
    """

    cache: C
    draft: Sequence[int]
    tokens: Tokens = ()
    policy: Policy | None = None
    acceptance: Acceptance | None = None
    parents: Sequence[int] = ()
    draft_probs: DraftDistributions | None = None
    masks: Sequence[MaskLike] = ()
    row_handles: bool = False
    on_stale: OnStale = "fail"


@dataclass(frozen=True, slots=True)
class Chunk(Generic[C]):
    """A piece of a batch that the caller schedules: a chunk of a prompt, or tokens to decode.

    Attributes:
        tokens: Token ids of this piece.
        cache: The sequence to append to. None: a new one, which its first chunk makes.
        policy: What to return for the row of a final piece. None: full logits in float32.
        is_final: False: more of this prompt follows, and no output row is computed.
        pos_offset: Position of the first token, which the server checks. None: that of the cache.
        all_positions: True: a row for every token of a final piece.
        on_stale: As in ``Cache.decode``.
        ttl: Lease of a new sequence in seconds. None: the server's default.
        reserve_length: Length in tokens up to which a new sequence has its room from the start.
        reuse_prefix: False: do not look for a new sequence's tokens in the prefix cache.
        publish_prefix: False: do not keep its blocks for later prompts.
    """

    tokens: Tokens
    cache: C | None = None
    policy: Policy | None = None
    is_final: bool = True
    pos_offset: int | None = None
    all_positions: bool = False
    on_stale: OnStale = "fail"
    ttl: float | None = None
    reserve_length: int | None = None
    reuse_prefix: bool = True
    publish_prefix: bool = True
