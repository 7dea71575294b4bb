"""What ``Stream.run`` runs in one frame: prompts, appends and verifies, in any combination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ferrule_client._public import publish
from ferrule_client.masks import MaskLike
from ferrule_client.policy import Policy, hinting
from ferrule_client.types import Acceptance, OnStale, Output, Pending, Tokens, Verification

__all__ = ["Append", "DraftDistributions", "Item", "Prompt", "Verify"]

C = TypeVar("C")
R_co = TypeVar("R_co", covariant=True)

DraftDistributions = npt.NDArray[np.floating] | Sequence[Mapping[int, float]]
"""Distributions of drafts: dense, [drafts, vocab_size], or for each draft its probabilities by token id."""


class Item(Generic[R_co]):
    """Something that a stream can run; ``R_co`` is what comes of it."""

    __slots__ = ()


@hinting
@dataclass(frozen=True, slots=True)
class Prompt(Item[Any]):
    """A new sequence; its result is its cache.

    Attributes:
        tokens: Token ids or text, as in ``Client.prefill``.
        policy: As in ``Client.prefill``.
        is_final: False: the prompt goes on in later appends, and no output row is computed yet.
        all_positions: As in ``Client.prefill``.
        ttl: As in ``Client.prefill``.
        reserve_length: As in ``Client.prefill``.
        reuse_prefix: As in ``Client.prefill``.
        publish_prefix: As in ``Client.prefill``.
        drop_outside_window: As in ``Client.prefill``.
        recover: As in ``Client.prefill``.
        parse_special_tokens: As in ``Client.prefill``.
        add_special_tokens: As in ``Client.prefill``.

    Example::

        caches = stream.run([Prompt("def area("), Prompt("def volume(")])
    """

    tokens: Tokens | str
    policy: Policy | None = None
    is_final: bool = True
    all_positions: bool = False
    ttl: float | None = None
    reserve_length: int | None = None
    reuse_prefix: bool = True
    publish_prefix: bool = True
    drop_outside_window: bool = False
    recover: bool = False
    parse_special_tokens: bool = False
    add_special_tokens: bool = True


@hinting
@dataclass(frozen=True, slots=True)
class Append(Item[Output], Generic[C]):
    """Tokens to append to a cache, as ``Cache.append`` does; its result is the output.

    Attributes:
        cache: The sequence.
        tokens: Token ids or text; none: only the pending token, or if there is none, the newest row again.
        policy: As in ``Cache.append``.
        pending: As in ``Cache.append``.
        all_positions: As in ``Cache.append``.
        is_final: False: more of a prompt follows, and no output row is computed.
        on_stale: As in ``Cache.append``.
        parse_special_tokens: As in ``Cache.append``.

    Example::

        outputs = stream.run([Append(branch, policy=greedy()) for branch in branches])
    """

    cache: C
    tokens: Tokens | str = ()
    policy: Policy | None = None
    pending: Pending = "auto"
    all_positions: bool = False
    is_final: bool = True
    on_stale: OnStale = "fail"
    parse_special_tokens: bool = False

    @property
    def is_chunk(self) -> bool:
        """True: it is sent as a piece of a unified batch."""
        return self.all_positions or not self.is_final


@hinting
@dataclass(frozen=True, slots=True, eq=False)
class Verify(Item[Verification], Generic[C]):
    """Drafts to check, as ``Cache.verify`` does; its result is the verification.

    Attributes:
        cache: The sequence.
        draft: Draft token ids.
        tokens: As in ``Cache.verify``.
        policy: As in ``Cache.verify``.
        acceptance: As in ``Cache.verify``.
        parents: As in ``Cache.verify``.
        draft_probs: As in ``Cache.verify``.
        masks: As in ``Cache.verify``.
        row_handles: As in ``Cache.verify``.
        pending: As in ``Cache.append``.
        on_stale: As in ``Cache.append``.
        parse_special_tokens: As in ``Cache.append``.
    """

    cache: C
    draft: Sequence[int]
    tokens: Tokens | str = ()
    policy: Policy | None = None
    acceptance: Acceptance | None = None
    parents: Sequence[int] = ()
    draft_probs: DraftDistributions | None = None
    masks: Sequence[MaskLike] = ()
    row_handles: bool = False
    pending: Pending = "auto"
    on_stale: OnStale = "fail"
    parse_special_tokens: bool = False


publish(globals(), ("Append", "Item", "Prompt", "Verify"))
