"""Reads LogitsReturnPolicy: what a request wants of its output rows, every field checked.

The same few policies come with nearly every token, so a policy once read is remembered by its bytes: the decode hot
path costs one serialisation of a few bytes and one look-up; large ones are read again. A registered mask is named by
what is in it, so the same bytes mean the same for everybody: whether the caller may use it is asked each time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ferrule.v1 import policy_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.masks import MaskReader
from ferrule_server.engine.jobs import OutputRequest
from ferrule_server.errors import InvalidRequest, TokenOutOfVocab
from ferrule_server.executor.base import OutputSpec, SampleSpec, Shaping, TokenMask

_MAX_REMEMBERED: Final = 512
_MAX_REMEMBERED_BYTES: Final = 128
_ROW_OVERHEAD_BYTES: Final = 40
_FLOAT_BYTES: Final = 4

LOGITS_ITEM_BYTES: Final[Mapping[int, int]] = {
    types_pb2.DATA_TYPE_FLOAT32: 4,
    types_pb2.DATA_TYPE_BFLOAT16: 2,
    types_pb2.DATA_TYPE_FLOAT16: 2,
}
"""Element types in which logits are sent, and their sizes."""


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What an append returns, and how that is written.

    Attributes:
        output: For the engine.
        dtype: DataType of the logits on the wire; of no meaning without logits.
        row_bytes: Upper bound of what one output row takes in the reply.
        mask_name: Fingerprint of the registered mask it names; empty: none.
    """

    output: OutputRequest
    dtype: int
    row_bytes: int
    mask_name: bytes = b""


NO_ROWS: Final = OutputPlan(OutputRequest(spec=None), types_pb2.DATA_TYPE_FLOAT32, 0)
"""Nothing comes back."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """The selection part of a policy, read.

    Attributes:
        spec: What a row returns, with nothing but the selection set.
        is_seeded: Whether the caller gave the seed, or needs none.
    """

    spec: OutputSpec
    is_seeded: bool = True


class PolicyReader:
    """Turns policies into plans for one model.

    Args:
        vocab_size: Token ids of the model.
        hidden_size: Width of a hidden state.
        limits: What a policy may hold.
        masks: Reads masks.
    """

    def __init__(self, vocab_size: int, hidden_size: int, limits: ApiLimits, masks: MaskReader) -> None:
        self._vocab_size = vocab_size
        self._id_bytes = max(1, -(-(vocab_size - 1).bit_length() // 7))
        self._hidden_size = hidden_size
        self._masks = masks
        self._limits = limits
        self._shaping = ShapingReader(vocab_size, limits.max_logit_biases, masks)
        self._remembered: dict[tuple[bytes, bool], OutputPlan] = {}

    def read(
        self, policy: policy_pb2.LogitsReturnPolicy, at: str, principal: str, all_positions: bool = False
    ) -> OutputPlan:
        """Return the plan for a policy; an unset one reads as empty: full logits in float32.

        Args:
            policy: As it came; not changed.
            at: Path of the message that holds it, with a dot behind it, for errors.
            principal: Whose registered masks count.
            all_positions: A row for each input token instead of the last one only.

        Raises:
            InvalidRequest: A value is out of its range, or two exclude each other.
            TokenOutOfVocab: A token named is not in the vocabulary.
            MaskUnknown: A mask is not registered.
        """
        key = (policy.SerializeToString(), all_positions)
        plan = self._remembered.get(key)
        if plan is None:
            plan = self._read(policy, f"{at}logits_policy", principal, all_positions)
            if len(key[0]) <= _MAX_REMEMBERED_BYTES:
                self._remember(key, plan)
        elif plan.mask_name:
            self._masks.check(plan.mask_name, principal)
        return plan

    def _remember(self, key: tuple[bytes, bool], plan: OutputPlan) -> None:
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered[key] = plan

    def _read(
        self, policy: policy_pb2.LogitsReturnPolicy, path: str, principal: str, all_positions: bool
    ) -> OutputPlan:
        if policy.none:
            _check_none_alone(policy, path)
            return NO_ROWS
        choice = self._choice(policy, path, principal)
        spec = OutputSpec(
            full_logits=policy.HasField("full_logits") or is_empty(policy),
            greedy=choice.spec.greedy,
            sample=choice.spec.sample,
            shaping=choice.spec.shaping,
            logprobs=policy.logprobs,
            num_top_logprobs=self._num_top_logprobs(policy.top_logprobs, f"{path}.top_logprobs"),
            logprob_ids=self._logprob_ids(policy.logprob_token_ids, f"{path}.logprob_token_ids"),
            entropy=policy.entropy,
            hidden_state=policy.hidden_state,
        )
        dtype = _logits_dtype(policy, path)
        output = OutputRequest(spec, all_positions, choice.is_seeded, policy.target_logprobs)
        return OutputPlan(output, dtype, self._row_bytes(spec, dtype), _mask_name(policy))

    def _choice(self, policy: policy_pb2.LogitsReturnPolicy, path: str, principal: str) -> _Choice:
        """Return how one token is chosen for each row."""
        selection = policy.WhichOneof("selection")
        if selection == "greedy_argmax":
            shaping = self._shaping.greedy(policy.greedy_argmax, f"{path}.greedy_argmax", principal)
            return _Choice(OutputSpec(greedy=True, shaping=shaping))
        if selection == "sample":
            return self._sample(policy.sample, f"{path}.sample", principal)
        if policy.logprobs:
            raise InvalidRequest(f"{path}.logprobs", "needs a selection (greedy_argmax or sample)")
        return _Choice(OutputSpec())

    def _sample(self, sample: policy_pb2.Sample, path: str, principal: str) -> _Choice:
        """Return how a token is drawn; temperature 0 takes the largest logit."""
        temperature = number(sample, "temperature", path, NOT_NEGATIVE, 1.0)
        law = SampleSpec(
            temperature=temperature,
            top_k=sample.top_k if sample.top_k < self._vocab_size else 0,
            top_p=number(sample, "top_p", path, TOP_P, 1.0),
            min_p=number(sample, "min_p", path, MIN_P, 0.0),
            seed=sample.seed,
        )
        shaping = self._shaping.sample(sample, path, principal)
        if temperature == 0.0:
            return _Choice(OutputSpec(greedy=True, shaping=shaping))
        return _Choice(OutputSpec(sample=law, shaping=shaping), is_seeded=sample.HasField("seed"))

    def _num_top_logprobs(self, count: int, path: str) -> int:
        if count > self._limits.max_top_logprobs:
            raise InvalidRequest(path, f"{count} is more than the {self._limits.max_top_logprobs} served")
        return min(count, self._vocab_size)

    def _logprob_ids(self, token_ids: Sequence[int], path: str) -> tuple[int, ...]:
        if len(token_ids) > self._limits.max_logprob_token_ids:
            raise InvalidRequest(
                path, f"has {len(token_ids)} entries, the limit is {self._limits.max_logprob_token_ids}"
            )
        for index, token_id in enumerate(token_ids):
            if token_id >= self._vocab_size:
                raise TokenOutOfVocab(f"{path}[{index}]", token_id, self._vocab_size)
        return tuple(token_ids)

    def _row_bytes(self, spec: OutputSpec, dtype: int) -> int:
        """Return an upper bound of what one row takes; ids are written in seven bits to a byte."""
        num_bytes = _ROW_OVERHEAD_BYTES + _FLOAT_BYTES * len(spec.logprob_ids)
        num_bytes += (_FLOAT_BYTES + self._id_bytes) * spec.num_top_logprobs
        if spec.full_logits:
            num_bytes += self._vocab_size * LOGITS_ITEM_BYTES[dtype]
        if spec.hidden_state:
            num_bytes += self._hidden_size * _FLOAT_BYTES
        return num_bytes


def is_empty(policy: policy_pb2.LogitsReturnPolicy) -> bool:
    """Whether nothing at all is asked for, which means full logits where nothing else is said."""
    return not (
        policy.none
        or policy.HasField("full_logits")
        or policy.WhichOneof("selection") is not None
        or policy.top_logprobs
        or policy.logprob_token_ids
        or policy.target_logprobs
        or policy.entropy
        or policy.hidden_state
    )


def _mask_name(policy: policy_pb2.LogitsReturnPolicy) -> bytes:
    """Return the fingerprint of the registered mask that a policy names; empty where it names none."""
    selection = policy.WhichOneof("selection")
    return b"" if selection is None else bytes(getattr(policy, selection).token_mask.fingerprint)


def _check_none_alone(policy: policy_pb2.LogitsReturnPolicy, path: str) -> None:
    others = [field.name for field, _ in policy.ListFields() if field.name != "none"]
    if others:
        raise InvalidRequest(f"{path}.none", f"excludes {', '.join(others)}")


def _logits_dtype(policy: policy_pb2.LogitsReturnPolicy, path: str) -> int:
    dtype = policy.full_logits.dtype or types_pb2.DATA_TYPE_FLOAT32
    if dtype not in LOGITS_ITEM_BYTES:
        raise InvalidRequest(f"{path}.full_logits.dtype", f"{dtype} is none of FLOAT32, BFLOAT16, FLOAT16")
    return dtype


class ShapingReader:
    """Turns the shaping part of a selection into a :class:`Shaping`, None where nothing is changed.

    Args:
        vocab_size: Token ids of the model.
        max_logit_biases: Most entries of ``logit_bias``.
        masks: Reads masks.
    """

    def __init__(self, vocab_size: int, max_logit_biases: int, masks: MaskReader) -> None:
        self._vocab_size = vocab_size
        self._max_logit_biases = max_logit_biases
        self._masks = masks

    def greedy(self, message: policy_pb2.GreedyArgmax, path: str, principal: str) -> Shaping | None:
        """Return what a greedy choice changes.

        Raises:
            InvalidRequest: A value is out of its range.
            TokenOutOfVocab: The mask names a token that is not in the vocabulary.
            MaskUnknown: The mask is not registered.
        """
        return _shaping(
            Shaping(
                repetition_penalty=number(message, "repetition_penalty", path, POSITIVE, 1.0),
                penalty_start=message.penalty_start,
                mask=self._mask(message, path, principal),
            )
        )

    def sample(self, message: policy_pb2.Sample, path: str, principal: str) -> Shaping | None:
        """Return what a drawn choice changes. Raises as :meth:`greedy`."""
        return _shaping(
            Shaping(
                repetition_penalty=number(message, "repetition_penalty", path, POSITIVE, 1.0),
                frequency_penalty=number(message, "frequency_penalty", path, FINITE, 0.0),
                presence_penalty=number(message, "presence_penalty", path, FINITE, 0.0),
                penalty_start=message.penalty_start,
                bias=self._bias(message.logit_bias, f"{path}.logit_bias") if message.logit_bias else (),
                mask=self._mask(message, path, principal),
            )
        )

    def _mask(
        self, message: policy_pb2.GreedyArgmax | policy_pb2.Sample, path: str, principal: str
    ) -> TokenMask | None:
        if not message.HasField("token_mask"):
            return None
        return self._masks.read(message.token_mask, f"{path}.token_mask", principal)

    def _bias(self, biases: Mapping[int, float], path: str) -> tuple[tuple[int, float], ...]:
        if len(biases) > self._max_logit_biases:
            raise InvalidRequest(path, f"has {len(biases)} entries, the limit is {self._max_logit_biases}")
        for token_id, bias in biases.items():
            if token_id >= self._vocab_size:
                raise TokenOutOfVocab(f"{path}[{token_id}]", token_id, self._vocab_size)
            if not FINITE.holds(bias):
                raise InvalidRequest(f"{path}[{token_id}]", f"must be {FINITE.name}, got {bias}; a mask rules out")
        return tuple(sorted((token_id, bias) for token_id, bias in biases.items() if bias != 0.0))


def _shaping(shaping: Shaping) -> Shaping | None:
    """Return a shaping in its one form for what it does: None for nothing, ``penalty_start`` only with penalties."""
    if shaping.has_penalties:
        return shaping
    if not shaping.bias and shaping.mask is None:
        return None
    return Shaping(bias=shaping.bias, mask=shaping.mask)


@dataclass(frozen=True, slots=True)
class Interval:
    """Values that a field may have: finite, from ``low`` to ``high``, the lower end left out where ``is_open``."""

    name: str
    low: float
    high: float
    is_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value lies in it; NaN lies in none."""
        return self.low <= value <= self.high and not (self.is_open and value == self.low)


_MAX_FLOAT: Final = sys.float_info.max
FINITE: Final = Interval("finite", -_MAX_FLOAT, _MAX_FLOAT)
POSITIVE: Final = Interval("finite and more than 0", 0.0, _MAX_FLOAT, is_open=True)
NOT_NEGATIVE: Final = Interval("finite and at least 0", 0.0, _MAX_FLOAT)
TOP_P: Final = Interval("in (0, 1]", 0.0, 1.0, is_open=True)
MIN_P: Final = Interval("in [0, 1]", 0.0, 1.0)


def number(
    message: policy_pb2.GreedyArgmax | policy_pb2.Sample, name: str, path: str, interval: Interval, unset: float
) -> float:
    """Return an optional float of ``message``, ``unset`` where it is not set.

    Raises:
        InvalidRequest: It lies outside the interval.
    """
    if not message.HasField(name):
        return unset
    value: float = getattr(message, name)
    if not interval.holds(value):
        raise InvalidRequest(f"{path}.{name}", f"must be {interval.name}, got {value}")
    return value
