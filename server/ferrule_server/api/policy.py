"""Reads LogitsReturnPolicy: what a request wants of its output rows, every field checked.

The same few policies come with nearly every token, so a policy once read is remembered by its bytes: the decode hot
path costs one serialisation of a few bytes and one look-up.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ferrule.v1 import policy_pb2, types_pb2
from ferrule_server.engine.jobs import OutputRequest
from ferrule_server.errors import FeatureUnsupported, InvalidRequest
from ferrule_server.executor.base import OutputSpec, SampleSpec

_MAX_REMEMBERED: Final = 512
_MAX_REMEMBERED_BYTES: Final = 128
_ROW_OVERHEAD_BYTES: Final = 40


@dataclass(frozen=True, slots=True)
class _Interval:
    """Values that a field may have: finite, from ``low`` to ``high``, the lower end left out where ``is_open``."""

    name: str
    low: float
    high: float
    is_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value lies in it."""
        return self.low <= value <= self.high and not (self.is_open and value == self.low)


_MAX_FLOAT: Final = sys.float_info.max
_FINITE: Final = _Interval("finite", -_MAX_FLOAT, _MAX_FLOAT)
_POSITIVE: Final = _Interval("finite and more than 0", 0.0, _MAX_FLOAT, is_open=True)
_NOT_NEGATIVE: Final = _Interval("finite and at least 0", 0.0, _MAX_FLOAT)
_TOP_P: Final = _Interval("in (0, 1]", 0.0, 1.0, is_open=True)
_MIN_P: Final = _Interval("in [0, 1]", 0.0, 1.0)

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
    """

    output: OutputRequest
    dtype: int
    row_bytes: int


class PolicyReader:
    """Turns policies into plans for one model.

    Args:
        vocab_size: Token ids of the model.
        max_top_logprobs: Largest ``top_logprobs``.
    """

    def __init__(self, vocab_size: int, max_top_logprobs: int) -> None:
        self._vocab_size = vocab_size
        self._max_top_logprobs = max_top_logprobs
        self._remembered: dict[tuple[bytes, bool], OutputPlan] = {}

    def read(self, policy: policy_pb2.LogitsReturnPolicy, at: str, all_positions: bool = False) -> OutputPlan:
        """Return the plan for a policy; an unset one reads as empty: full logits in float32.

        Args:
            policy: As it came; not changed.
            at: Path of the message that holds it, with a dot behind it, for errors.
            all_positions: A row for each input token instead of the last one only.

        Raises:
            InvalidRequest: A value is out of its range, or two exclude each other.
            FeatureUnsupported: A part that this server does not serve.
        """
        key = (policy.SerializeToString(), all_positions)
        plan = self._remembered.get(key)
        if plan is None:
            plan = self._read(policy, f"{at}logits_policy", all_positions)
            self._remember(key, plan)
        return plan

    def _remember(self, key: tuple[bytes, bool], plan: OutputPlan) -> None:
        if len(key[0]) > _MAX_REMEMBERED_BYTES:
            return
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered[key] = plan

    def _read(self, policy: policy_pb2.LogitsReturnPolicy, path: str, all_positions: bool) -> OutputPlan:
        if policy.none:
            _check_none_alone(policy, path)
            return OutputPlan(OutputRequest(spec=None), types_pb2.DATA_TYPE_FLOAT32, 0)
        _check_supported(policy)
        spec, is_seeded = self._spec(policy, path)
        dtype = self._logits_dtype(policy, path)
        output = OutputRequest(spec, all_positions, is_seeded, policy.target_logprobs)
        return OutputPlan(output, dtype, self._row_bytes(spec, dtype))

    def _spec(self, policy: policy_pb2.LogitsReturnPolicy, path: str) -> tuple[OutputSpec, bool]:
        """Return what each row returns, and whether the caller gave the seed (or needs none)."""
        selection = policy.WhichOneof("selection")
        if policy.logprobs and selection is None:
            raise InvalidRequest(f"{path}.logprobs", "needs a selection (greedy_argmax or sample)")
        sample, is_seeded = None, True
        if selection == "greedy_argmax":
            _check_greedy(policy.greedy_argmax, f"{path}.greedy_argmax")
        elif selection == "sample":
            sample, is_seeded = self._sample(policy.sample, f"{path}.sample")
        spec = OutputSpec(
            full_logits=policy.HasField("full_logits") or _is_empty(policy),
            greedy=selection is not None and sample is None,
            sample=sample,
            logprobs=policy.logprobs,
            num_top_logprobs=self._num_top_logprobs(policy.top_logprobs, f"{path}.top_logprobs"),
        )
        return spec, is_seeded

    def _num_top_logprobs(self, count: int, path: str) -> int:
        if count > self._max_top_logprobs:
            raise InvalidRequest(path, f"{count} is more than the {self._max_top_logprobs} served")
        return min(count, self._vocab_size)

    def _sample(self, sample: policy_pb2.Sample, path: str) -> tuple[SampleSpec | None, bool]:
        """Return how a token is drawn (None: temperature 0 takes the largest logit), and whether it is seeded."""
        _check_sample_supported(sample, path)
        temperature = _number(sample, "temperature", path, _NOT_NEGATIVE)
        top_p = _number(sample, "top_p", path, _TOP_P)
        min_p = _number(sample, "min_p", path, _MIN_P)
        if temperature == 0.0:
            return None, True
        spec = SampleSpec(
            temperature=1.0 if temperature is None else temperature,
            top_k=sample.top_k if sample.top_k < self._vocab_size else 0,
            top_p=1.0 if top_p is None else top_p,
            min_p=min_p or 0.0,
            seed=sample.seed,
        )
        return spec, sample.HasField("seed")

    def _logits_dtype(self, policy: policy_pb2.LogitsReturnPolicy, path: str) -> int:
        dtype = policy.full_logits.dtype or types_pb2.DATA_TYPE_FLOAT32
        if dtype not in LOGITS_ITEM_BYTES:
            raise InvalidRequest(f"{path}.full_logits.dtype", f"{dtype} is none of FLOAT32, BFLOAT16, FLOAT16")
        return dtype

    def _row_bytes(self, spec: OutputSpec, dtype: int) -> int:
        logits_bytes = self._vocab_size * LOGITS_ITEM_BYTES[dtype] if spec.full_logits else 0
        return logits_bytes + 9 * spec.num_top_logprobs + _ROW_OVERHEAD_BYTES


def _is_empty(policy: policy_pb2.LogitsReturnPolicy) -> bool:
    """Whether nothing at all is asked for, which means full logits."""
    return policy.WhichOneof("selection") is None and not policy.top_logprobs and not policy.target_logprobs


def _check_none_alone(policy: policy_pb2.LogitsReturnPolicy, path: str) -> None:
    others = [field.name for field, _ in policy.ListFields() if field.name != "none"]
    if others:
        raise InvalidRequest(f"{path}.none", f"excludes {', '.join(others)}")


def _check_supported(policy: policy_pb2.LogitsReturnPolicy) -> None:
    if policy.logprob_token_ids:
        raise FeatureUnsupported("logprob_token_ids")
    if policy.entropy:
        raise FeatureUnsupported("entropy")
    if policy.hidden_state:
        raise FeatureUnsupported("hidden_state")


def _check_greedy(greedy: policy_pb2.GreedyArgmax, path: str) -> None:
    if greedy.HasField("token_mask"):
        raise FeatureUnsupported("token_mask")
    if _number(greedy, "repetition_penalty", path, _POSITIVE) not in (None, 1.0):
        raise FeatureUnsupported("repetition_penalty")


def _check_sample_supported(sample: policy_pb2.Sample, path: str) -> None:
    if sample.HasField("token_mask"):
        raise FeatureUnsupported("token_mask")
    if sample.logit_bias:
        raise FeatureUnsupported("logit_bias")
    if _number(sample, "repetition_penalty", path, _POSITIVE) not in (None, 1.0):
        raise FeatureUnsupported("repetition_penalty")
    for name in ("frequency_penalty", "presence_penalty"):
        if _number(sample, name, path, _FINITE) not in (None, 0.0):
            raise FeatureUnsupported(name)


def _number(
    message: policy_pb2.GreedyArgmax | policy_pb2.Sample, name: str, path: str, interval: _Interval
) -> float | None:
    """Return an optional float of ``message``, None where it is unset; NaN lies in no interval."""
    if not message.HasField(name):
        return None
    value: float = getattr(message, name)
    if not interval.holds(value):
        raise InvalidRequest(f"{path}.{name}", f"must be {interval.name}, got {value}")
    return value
