"""What to ask of each output row: policies, and the functions that make them read well.

A policy goes with every call that runs tokens::

    cache.decode(token, policy=greedy())
    cache.decode(token, policy=sample(temperature=0.7, top_p=0.9, seed=1))
    cache.decode(token, policy=full_logits("bfloat16"))
    cache.decode(token, policy=greedy(top_logprobs=5))
    cache.decode(token, policy=no_output())
    cache.decode(token, policy=sample(mask=allowed, repetition_penalty=1.1, logit_bias={7: -2.0}))

Only what is asked for is computed and sent. Without a policy the client asks for full logits in float32.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from ferrule_client import _check
from ferrule_client.masks import MaskLike, TokenMask, as_mask

__all__ = [
    "DType",
    "Greedy",
    "Policy",
    "Sampling",
    "check_policy",
    "full_logits",
    "greedy",
    "no_output",
    "sample",
    "seeded",
]

DType = Literal["float32", "bfloat16", "float16"]
"""Element type of logits on the wire. They always arrive as numpy float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """Chooses the token with the highest logit; ties go to the lowest id.

    Attributes:
        repetition_penalty: Divides positive and multiplies negative logits of tokens already there; more than 0.
        penalty_start: Index of the first sequence token that counts for the penalty.
        mask: Tokens that may be chosen; None means all.
    """

    repetition_penalty: float | None = None
    penalty_start: int | None = None
    mask: TokenMask | None = None

    def __post_init__(self) -> None:
        _check.number("repetition_penalty", self.repetition_penalty, 0, above_low=True)
        _check.whole("penalty_start", self.penalty_start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Draws a token on the server, by the sampling order of the contract (protos/README.md).

    None always means "as the contract says for unset". The seed of a policy without one is drawn by the client
    before the request is sent, so that a retry draws the same token.

    Attributes:
        temperature: Divides the logits; 0 is greedy, None is 1.
        top_k: Keeps the k most likely tokens; None or 0 keeps all.
        top_p: Keeps the smallest set of most likely tokens that reaches this probability, in (0, 1].
        min_p: Keeps tokens at least this times as likely as the most likely one, in [0, 1].
        seed: Key of the random generator, from 0 to 2**64 - 1.
        repetition_penalty: Divides positive and multiplies negative logits of tokens already there; more than 0.
        frequency_penalty: Subtracted from a token's logit once per occurrence.
        presence_penalty: Subtracted once from the logit of every token that occurred.
        penalty_start: Index of the first sequence token that counts for the penalties.
        logit_bias: Added to the logits of these token ids.
        mask: Tokens that may be drawn; None means all.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    penalty_start: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    mask: TokenMask | None = None

    def __post_init__(self) -> None:
        _check.number("temperature", self.temperature, 0)
        _check.whole("top_k", self.top_k)
        _check.number("top_p", self.top_p, 0, 1, above_low=True)
        _check.number("min_p", self.min_p, 0, 1)
        _check.whole("seed", self.seed, 0, 2**64 - 1)
        _check.number("repetition_penalty", self.repetition_penalty, 0, above_low=True)
        _check.number("frequency_penalty", self.frequency_penalty)
        _check.number("presence_penalty", self.presence_penalty)
        _check.whole("penalty_start", self.penalty_start)
        for token, bias in self.logit_bias.items():
            _check.whole("a token id of logit_bias", token, 0, 2**32 - 1)
            if bias == -math.inf:
                raise ValueError(f"logit_bias must be finite; to rule token {token} out use a mask")
            _check.number("a value of logit_bias", bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is computed and returned for each output row; any mix.

    Make one with ``greedy``, ``sample``, ``full_logits`` or ``no_output``.

    Attributes:
        selection: How one token is chosen per row; None chooses none.
        logits: Element type of full logits on the wire; None returns none.
        logprobs: Return the chosen token's log-probability, raw and under the distribution it was drawn from.
        top_logprobs: Return this many most likely tokens with their raw log-probabilities.
        logprob_token_ids: Return the raw log-probabilities of these tokens.
        target_logprobs: Return the raw log-probability of the input token that follows each row (scoring).
        entropy: Return the entropy of each row, in nats.
        hidden_state: Return the hidden state of each row after the final norm.
    """

    selection: Greedy | Sampling | None = None
    logits: DType | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    target_logprobs: bool = False
    entropy: bool = False
    hidden_state: bool = False

    def __post_init__(self) -> None:
        if self.logits is not None:
            _check.choice("the dtype of logits", self.logits, get_args(DType))
        _check.whole("top_logprobs", self.top_logprobs)

    def with_seed(self, seed: int | None = None) -> Policy:
        """Return this policy with a seed wherever a draw needs one, so that sending it twice draws the same token.

        Args:
            seed: The seed to use; None draws a random one. A seed that is there already stays.

        Returns:
            The policy itself when nothing is drawn or a seed is set.
        """
        drawn = self.selection
        if not isinstance(drawn, Sampling) or drawn.seed is not None or drawn.temperature == 0:
            return self
        return replace(self, selection=replace(drawn, seed=secrets.randbits(64) if seed is None else seed))


def seeded(policy: Policy | None) -> Policy | None:
    """Return a policy with a seed wherever a draw needs one; None, for full logits, passes.

    Raises:
        TypeError: It is no policy.
    """
    check_policy(policy)
    return None if policy is None else policy.with_seed()


def check_policy(value: object) -> None:
    """Make sure that an argument is a policy or None.

    Raises:
        TypeError: It is not, for instance because the brackets of ``greedy()`` were forgotten.
    """
    if isinstance(value, Policy | None):
        return
    name = getattr(value, "__name__", type(value).__name__)
    hint = f"call it: policy={name}()" if callable(value) else "make one with greedy(), sample() or full_logits()"
    raise TypeError(f"the policy must be a Policy, got {name}; {hint}")


def greedy(
    *,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    penalty_start: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    mask: MaskLike | None = None,
    allowed_ids: Sequence[int] | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    logprob_token_ids: Sequence[int] = (),
    target_logprobs: bool = False,
    entropy: bool = False,
    hidden_state: bool = False,
    logits: DType | None = None,
) -> Policy:
    """Return a policy that chooses the most likely token.

    Args:
        repetition_penalty: See ``Greedy``.
        frequency_penalty: See ``Sampling``; with this, the next or ``logit_bias`` the selection is a ``Sampling`` with
            temperature 0, which is the same choice.
        presence_penalty: See ``Sampling``.
        penalty_start: See ``Greedy``.
        logit_bias: See ``Sampling``.
        mask: Tokens that may be chosen: ids, a bool array, packed bits, or what ``client.register_mask`` returned.
        allowed_ids: The same as ``mask``, by ids.
        logprobs: See ``Policy``; so are the settings up to ``hidden_state``.
        top_logprobs: See ``Policy``.
        logprob_token_ids: See ``Policy``.
        target_logprobs: See ``Policy``.
        entropy: See ``Policy``.
        hidden_state: See ``Policy``.
        logits: Full logits besides, in this type on the wire.

    Example:
        ``token = cache.decode(token, policy=greedy()).token``
    """
    allowed = _mask(mask, allowed_ids)
    selection: Greedy | Sampling = Greedy(
        repetition_penalty=repetition_penalty, penalty_start=penalty_start, mask=allowed
    )
    if logit_bias or frequency_penalty is not None or presence_penalty is not None:
        selection = Sampling(
            temperature=0,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            penalty_start=penalty_start,
            logit_bias=dict(logit_bias or {}),
            mask=allowed,
        )
    return Policy(
        selection=selection,
        logits=logits,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        logprob_token_ids=_ids(logprob_token_ids),
        target_logprobs=target_logprobs,
        entropy=entropy,
        hidden_state=hidden_state,
    )


def sample(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    penalty_start: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    mask: MaskLike | None = None,
    allowed_ids: Sequence[int] | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    logprob_token_ids: Sequence[int] = (),
    target_logprobs: bool = False,
    entropy: bool = False,
    hidden_state: bool = False,
    logits: DType | None = None,
) -> Policy:
    """Return a policy that draws a token on the server.

    Branches that use one seed draw the same tokens: give each its own.

    Args:
        temperature: See ``Sampling``; so are the settings up to ``logit_bias``.
        top_k: See ``Sampling``.
        top_p: See ``Sampling``.
        min_p: See ``Sampling``.
        seed: See ``Sampling``; None lets the client draw one for each call.
        repetition_penalty: See ``Sampling``.
        frequency_penalty: See ``Sampling``.
        presence_penalty: See ``Sampling``.
        penalty_start: See ``Sampling``.
        logit_bias: See ``Sampling``.
        mask: Tokens that may be drawn: ids, a bool array, packed bits, or what ``client.register_mask`` returned.
        allowed_ids: The same as ``mask``, by ids.
        logprobs: See ``Policy``; so are the settings up to ``hidden_state``.
        top_logprobs: See ``Policy``.
        logprob_token_ids: See ``Policy``.
        target_logprobs: See ``Policy``.
        entropy: See ``Policy``.
        hidden_state: See ``Policy``.
        logits: Full logits besides, in this type on the wire.

    Example:
        ``output = cache.decode(token, policy=sample(temperature=0.7, seed=1))``
    """
    selection = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        penalty_start=penalty_start,
        logit_bias=dict(logit_bias or {}),
        mask=_mask(mask, allowed_ids),
    )
    return Policy(
        selection=selection,
        logits=logits,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        logprob_token_ids=_ids(logprob_token_ids),
        target_logprobs=target_logprobs,
        entropy=entropy,
        hidden_state=hidden_state,
    )


def full_logits(
    dtype: DType = "float32",
    *,
    top_logprobs: int = 0,
    logprob_token_ids: Sequence[int] = (),
    target_logprobs: bool = False,
    entropy: bool = False,
    hidden_state: bool = False,
) -> Policy:
    """Return a policy that brings whole logits rows and chooses nothing: the sampling is yours.

    Args:
        dtype: Element type on the wire; half the bytes with the 16-bit ones. Arrays arrive as float32.
        top_logprobs: See ``Policy``.
        logprob_token_ids: See ``Policy``.
        target_logprobs: See ``Policy``.
        entropy: See ``Policy``.
        hidden_state: See ``Policy``.

    Example:
        ``logits = cache.decode(token, policy=full_logits()).logits``
    """
    return Policy(
        logits=dtype,
        top_logprobs=top_logprobs,
        logprob_token_ids=_ids(logprob_token_ids),
        target_logprobs=target_logprobs,
        entropy=entropy,
        hidden_state=hidden_state,
    )


def no_output() -> Policy:
    """Return a policy that only appends: nothing is computed for the output row and nothing comes back."""
    return Policy()


def _ids(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(_check.token_list(ids))


def _mask(mask: MaskLike | None, allowed_ids: Sequence[int] | None) -> TokenMask | None:
    """Return the mask that either argument names.

    Raises:
        ValueError: Both do.
    """
    if mask is not None and allowed_ids is not None:
        raise ValueError("give either mask or allowed_ids, not both")
    given = allowed_ids if mask is None else mask
    return None if given is None else as_mask(given)
