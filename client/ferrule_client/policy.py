"""What to return for each output row: policies, and the functions that make them.

A policy goes with every call that runs tokens::

    cache.append(token, policy=greedy())
    cache.append(token, policy=sample(temperature=0.7, top_p=0.9, seed=1))
    cache.append(token, policy=logits("bfloat16"))
    cache.append(token, policy=greedy(top_logprobs=5))
    cache.append(token, policy=sample(mask=allowed, repetition_penalty=1.1, logit_bias={7: -2.0}))
    cache.append(token)

Only what is asked for is computed and sent. Without a policy nothing is.
"""

from __future__ import annotations

import functools
import inspect
import math
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args

from ferrule_client import _check
from ferrule_client._public import publish
from ferrule_client.masks import MaskLike, TokenMask, as_mask

__all__ = ["DType", "Policy", "Sampling", "check_policy", "greedy", "logits", "sample", "seeded"]

_T = TypeVar("_T")

_SEED_BITS = 52  # such an integer is exact in JSON and in JavaScript

DType = Literal["float32", "bfloat16", "float16"]
"""Element type of logits on the wire. They always arrive as numpy float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Chooses a token on the server, in the sampling order of the contract (protos/README.md).

    None means "as the contract says for unset". If a policy that draws has no seed, the client draws one before the
    request is sent, so that a retry draws the same token.

    Attributes:
        temperature: Divides the logits. 0 chooses the token with the highest logit, and the lowest id among equals.
            None is 1.
        top_k: Keeps the k most likely tokens; None or 0 keeps all.
        top_p: Keeps the smallest set of most likely tokens that reaches this probability, in (0, 1].
        min_p: Keeps tokens at least this times as likely as the most likely one, in [0, 1].
        seed: Key of the random generator, from 0 to 2**64 - 1.
        repetition_penalty: Divides positive and multiplies negative logits of tokens already there; more than 0.
        frequency_penalty: Subtracted from a token's logit once per occurrence.
        presence_penalty: Subtracted once from the logit of every token that occurred.
        penalty_start: Index of the first sequence token that counts for the penalties.
        logit_bias: Added to the logits of these token ids.
        mask: Tokens that may be chosen; None means all.
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

    @property
    def is_greedy(self) -> bool:
        """True: the most likely token is chosen, without a draw."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is computed and returned for each output row, in any combination.

    Make one with ``greedy``, ``sample`` or ``logits``, or directly if no token is to be chosen.

    Attributes:
        selection: How one token is chosen per row; None chooses none.
        logits: Element type of the logits on the wire; None returns none.
        logprobs: Return the chosen token's log-probability, raw and under the distribution it was drawn from.
        top_logprobs: Return this many most likely tokens with their raw log-probabilities.
        logprob_token_ids: Return the raw log-probabilities of these tokens.
        target_logprobs: Return the raw log-probability of the input token that follows each row (scoring).
        entropy: Return the entropy of each row, in nats.
        hidden_state: Return the hidden state of each row after the final norm.

    Example:
        ``scores = cache.append(ids, policy=Policy(target_logprobs=True), all_positions=True).target_logprobs``
    """

    selection: Sampling | None = None
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
        object.__setattr__(self, "logprob_token_ids", tuple(_check.token_list(self.logprob_token_ids)))

    def with_seed(self, seed: int | None = None) -> Policy:
        """Return this policy with a seed, so that sending it twice draws the same token; itself if it needs none.

        Args:
            seed: The seed to use; None draws a random one. If the policy has a seed, that stays.
        """
        drawn = self.selection
        if drawn is None or drawn.seed is not None or drawn.is_greedy:
            return self
        return replace(self, selection=replace(drawn, seed=secrets.randbits(_SEED_BITS) if seed is None else seed))


class Settings(TypedDict, total=False):
    """Settings that ``greedy`` and ``sample`` share; see ``Sampling`` and ``Policy``, each by the same name.

    ``mask`` is token ids, a bool array [vocab_size], packed bits, or what ``client.register_mask`` returned.
    """

    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    penalty_start: int | None
    logit_bias: Mapping[int, float] | None
    mask: MaskLike | None
    logits: DType | None
    logprobs: bool
    top_logprobs: int
    logprob_token_ids: Sequence[int]
    target_logprobs: bool
    entropy: bool
    hidden_state: bool


def greedy(**settings: Unpack[Settings]) -> Policy:
    """Return a policy that chooses the most likely token: ``sample(temperature=0)``.

    Args:
        **settings: See ``Settings``.

    Example:
        ``token = cache.append("def ", policy=greedy()).token``
    """
    return sample(temperature=0, **settings)


def sample(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    **settings: Unpack[Settings],
) -> Policy:
    """Return a policy that draws a token on the server.

    Branches with the same seed draw the same tokens, so give each its own, or none.

    Args:
        temperature: See ``Sampling``; so are ``top_k``, ``top_p`` and ``min_p``.
        top_k: See ``Sampling``.
        top_p: See ``Sampling``.
        min_p: See ``Sampling``.
        seed: See ``Sampling``; None lets the client draw one for each call.
        **settings: See ``Settings``.

    Example:
        ``output = cache.append("def ", policy=sample(temperature=0.7, seed=1))``
    """
    if unknown := settings.keys() - Settings.__annotations__.keys():
        names = ", ".join(Settings.__annotations__)
        raise TypeError(f"there is no setting {min(unknown)!r}; besides those of sample() there are {names}")
    mask = settings.pop("mask", None)
    selection = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        logit_bias=dict(settings.pop("logit_bias", None) or {}),
        mask=None if mask is None else as_mask(mask),
        repetition_penalty=settings.pop("repetition_penalty", None),
        frequency_penalty=settings.pop("frequency_penalty", None),
        presence_penalty=settings.pop("presence_penalty", None),
        penalty_start=settings.pop("penalty_start", None),
    )
    return Policy(selection=selection, **settings)  # type: ignore[misc,arg-type]  # the others are popped above


def logits(dtype: DType = "float32") -> Policy:
    """Return a policy that returns the logits of each row and chooses nothing: the sampling is yours.

    Args:
        dtype: Element type on the wire; the 16-bit types take half the bytes. Arrays arrive as float32.

    Example:
        ``row = cache.append("def ", policy=logits()).logits[-1]``
    """
    return Policy(logits=dtype)


def seeded(policy: Policy | None) -> Policy | None:
    """Return a policy with a seed if it draws; None stays None. Raises as ``check_policy``."""
    check_policy(policy)
    return None if policy is None else policy.with_seed()


def check_policy(value: object) -> None:
    """Raise TypeError if an argument is no policy, for instance because the brackets of ``greedy()`` were forgotten."""
    if isinstance(value, Policy | None):
        return
    name = getattr(value, "__name__", type(value).__name__)
    hint = f"call it: policy={name}()" if callable(value) else "make one with greedy(), sample() or logits()"
    raise TypeError(f"the policy must be a Policy, got {name}; {hint}")


def hinting(cls: type[_T]) -> type[_T]:
    """Let each method of a class that takes a policy, and ``score``, say where a setting of ``sample`` belongs.

    ``temperature=0.3`` beside the arguments of such a method raises a TypeError that names
    ``policy=sample(temperature=0.3)``, or says that the method draws nothing; so does ``max_new_tokens``, which names
    ``max_tokens``. Everything else reaches the method as it is.
    """
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and (name == "score" or "policy" in inspect.signature(method).parameters):
            setattr(cls, name, _hinting(method, cls.__name__ if name == "__init__" else name))
    return cls


def _hinting(method: Callable[..., Any], name: str) -> Callable[..., Any]:  # Any: of every method
    """Return a method that refuses settings by its name; it stays a coroutine function if it is one."""
    known = frozenset(inspect.signature(method).parameters)

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _refuse_settings(name, known, kwargs)
        return method(*args, **kwargs)

    @functools.wraps(method)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        _refuse_settings(name, known, kwargs)
        return await method(*args, **kwargs)

    return awaited if inspect.iscoroutinefunction(method) else checked


def _refuse_settings(name: str, known: Set[str], given: Mapping[str, object]) -> None:
    """Raise TypeError if arguments of a call, whose own ones are ``known``, are settings of ``sample``, or the like."""
    draws = "policy" in known
    wrong = [key for key in given if key in _SETTINGS or (key in _LENGTHS and not draws)]
    if wrong:
        settings = ", ".join(f"{key}={_shown(given[key])}" for key in wrong)
        instead = f"pass policy=sample({settings})" if draws else "it draws nothing; generate() does"
        raise TypeError(f"{name}() takes no {' nor '.join(wrong)}: {instead}")
    if "max_new_tokens" in given and "max_tokens" in known:
        raise TypeError(f"{name}() takes no max_new_tokens: pass max_tokens={_shown(given['max_new_tokens'])}")


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, (int, float, str)) else "..."


_SETTINGS = frozenset(Sampling.__dataclass_fields__) | frozenset(Settings.__annotations__)
_LENGTHS = frozenset({"max_tokens", "max_new_tokens"})

publish(globals(), ("Policy", "Sampling", "Settings", "greedy", "logits", "sample"))
