"""Reads LogitsReturnPolicy: the fields that a request wants for each output row.

Nearly every token comes with one of a few policies, so small policies are remembered by their bytes. The hot path costs
one serialisation of a few bytes and one look-up. Registered masks are named by a hash of their content, so equal bytes
mean the same for every principal. Whether the caller may use the mask is checked for each request.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ferrule.v1 import policy_pb2, types_pb2
from ferrule_server.api.requests.fields import WIRE_TYPES, FieldReader, check_count
from ferrule_server.api.requests.masks import MaskReader
from ferrule_server.engine.jobs import OutputRequest
from ferrule_server.errors import InvalidRequest, TokenOutOfVocab
from ferrule_server.executor.base import OutputSpec, SampleSpec, Shaping

_MAX_REMEMBERED: Final = 512
_MAX_REMEMBERED_BYTES: Final = 128
_ROW_OVERHEAD_BYTES: Final = 40
_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The fields that an append returns for each row, and how they are written.

    Attributes:
        output: The request to the engine.
        dtype: DataType of the logits on the wire; without logits it has no meaning.
        row_bytes: Upper bound of the size of one output row in the reply.
        mask_name: Fingerprint of the registered mask that the policy names; empty: it names none.
    """

    output: OutputRequest
    dtype: int
    row_bytes: int
    mask_name: bytes = b""


NO_ROWS: Final = OutputPlan(OutputRequest(spec=None), types_pb2.DATA_TYPE_FLOAT32, 0)
"""The plan that returns no rows."""
_UNCHANGED: Final = Shaping()
_WITH_PRESENCE: Final = frozenset({"temperature", "top_p"})
"""Fields in which 0 is not the same as unset."""


class PolicyReader:
    """Turns policies into plans for one model.

    Args:
        fields: Reads the fields that many requests have.
        hidden_size: Width of a hidden state.
        masks: Reads masks.
    """

    def __init__(self, fields: FieldReader, hidden_size: int, masks: MaskReader) -> None:
        self._fields = fields
        self._id_bytes = max(1, -(-(fields.vocab_size - 1).bit_length() // 7))
        self._hidden_size = hidden_size
        self._masks = masks
        self._remembered: dict[tuple[bytes, bool], OutputPlan] = {}

    def read(
        self, policy: policy_pb2.LogitsReturnPolicy, at: str, principal: str, all_positions: bool = False
    ) -> OutputPlan:
        """Return the plan for a policy; an empty one returns no rows.

        Args:
            policy: The message; not changed.
            at: Path of the message that holds the policy, with a dot at the end, for errors.
            principal: The owner of registered masks.
            all_positions: Return a row for each input token instead of the last one only.

        Raises:
            InvalidRequest: A value is out of its range, or two values exclude each other.
            TokenOutOfVocab: A token is not in the vocabulary.
            MaskUnknown: A mask is not registered.
        """
        key = (policy.SerializeToString(), all_positions)
        if not key[0]:
            return NO_ROWS
        plan = self._remembered.get(key)
        if plan is None:
            plan = self._read(policy, f"{at}logits_policy", principal, all_positions)
            if len(key[0]) <= _MAX_REMEMBERED_BYTES:
                if len(self._remembered) >= _MAX_REMEMBERED:
                    self._remembered.clear()
                self._remembered[key] = plan
        elif plan.mask_name:
            self._masks.registry.find(principal, plan.mask_name)
        return plan

    def _read(
        self, policy: policy_pb2.LogitsReturnPolicy, path: str, principal: str, all_positions: bool
    ) -> OutputPlan:
        spec = replace(
            self._selection(policy, path, principal),
            full_logits=policy.HasField("full_logits"),
            logprobs=policy.logprobs,
            num_top_logprobs=self._num_top_logprobs(policy.top_logprobs, f"{path}.top_logprobs"),
            logprob_ids=self._logprob_ids(policy.logprob_token_ids, f"{path}.logprob_token_ids"),
            entropy=policy.entropy,
            hidden_state=policy.hidden_state,
        )
        dtype = policy.full_logits.dtype or types_pb2.DATA_TYPE_FLOAT32
        if dtype not in WIRE_TYPES:
            raise InvalidRequest(f"{path}.full_logits.dtype", f"{dtype} is not FLOAT32, BFLOAT16 or FLOAT16")
        is_seeded = spec.sample is None or policy.sample.HasField("seed")
        output = OutputRequest(spec, all_positions, is_seeded, policy.target_logprobs)
        return OutputPlan(output, dtype, self._row_bytes(spec, dtype), _mask_name(policy))

    def _selection(self, policy: policy_pb2.LogitsReturnPolicy, path: str, principal: str) -> OutputSpec:
        """Return a spec that only chooses the token of each row."""
        selection = policy.WhichOneof("selection")
        if selection == "greedy_argmax":
            shaping = self._shaping(policy.greedy_argmax, f"{path}.greedy_argmax", principal, _UNCHANGED)
            return OutputSpec(greedy=True, shaping=shaping)
        if selection == "sample":
            return self._sample(policy.sample, f"{path}.sample", principal)
        if policy.logprobs:
            raise InvalidRequest(f"{path}.logprobs", "requires a selection (greedy_argmax or sample)")
        return OutputSpec()

    def _sample(self, message: policy_pb2.Sample, path: str, principal: str) -> OutputSpec:
        """Return a spec that samples a token; temperature 0 chooses the largest logit."""
        sample = SampleSpec(
            temperature=number(message, "temperature", path, NOT_NEGATIVE, 1.0),
            top_k=message.top_k if message.top_k < self._fields.vocab_size else 0,
            top_p=number(message, "top_p", path, TOP_P, 1.0),
            min_p=number(message, "min_p", path, MIN_P, 0.0),
            seed=message.seed,
        )
        only_sampled = Shaping(
            frequency_penalty=number(message, "frequency_penalty", path, FINITE, 0.0),
            presence_penalty=number(message, "presence_penalty", path, FINITE, 0.0),
            bias=self._bias(message.logit_bias, f"{path}.logit_bias") if message.logit_bias else (),
        )
        shaping = self._shaping(message, path, principal, only_sampled)
        if sample.temperature == 0.0:
            return OutputSpec(greedy=True, shaping=shaping)
        return OutputSpec(sample=sample, shaping=shaping)

    def _shaping(
        self, message: policy_pb2.GreedyArgmax | policy_pb2.Sample, path: str, principal: str, others: Shaping
    ) -> Shaping | None:
        """Return ``others`` with the fields that both selections have; None if the logits are not changed.

        Equal effects give equal results: ``penalty_start`` is set only together with a penalty.
        """
        mask = None
        if message.HasField("token_mask"):
            mask = self._masks.read(message.token_mask, f"{path}.token_mask", principal)
        repetition_penalty = number(message, "repetition_penalty", path, POSITIVE, 1.0)
        shaping = replace(others, repetition_penalty=repetition_penalty, mask=mask)
        if shaping.has_penalties:
            return replace(shaping, penalty_start=message.penalty_start)
        return None if shaping == _UNCHANGED else shaping

    def _bias(self, biases: Mapping[int, float], path: str) -> tuple[tuple[int, float], ...]:
        check_count(path, len(biases), self._fields.limits.max_logit_biases)
        for token_id, bias in biases.items():
            if token_id >= self._fields.vocab_size:
                raise TokenOutOfVocab(f"{path}[{token_id}]", token_id, self._fields.vocab_size)
            if not FINITE.holds(bias):
                text = f"must be {FINITE.name}, got {bias}; use a mask to exclude a token"
                raise InvalidRequest(f"{path}[{token_id}]", text)
        return tuple(sorted((token_id, bias) for token_id, bias in biases.items() if bias != 0.0))

    def _num_top_logprobs(self, count: int, path: str) -> int:
        if count > self._fields.limits.max_top_logprobs:
            raise InvalidRequest(path, f"{count} is more than the limit, {self._fields.limits.max_top_logprobs}")
        return min(count, self._fields.vocab_size)

    def _logprob_ids(self, token_ids: Sequence[int], path: str) -> tuple[int, ...]:
        check_count(path, len(token_ids), self._fields.limits.max_logprob_token_ids)
        return self._fields.in_vocabulary(token_ids, path)

    def _row_bytes(self, spec: OutputSpec, dtype: int) -> int:
        """Return an upper bound of the size of one row on the wire, where a byte holds seven bits of an id."""
        num_bytes = _ROW_OVERHEAD_BYTES + _FLOAT_BYTES * len(spec.logprob_ids)
        num_bytes += (_FLOAT_BYTES + self._id_bytes) * spec.num_top_logprobs
        if spec.full_logits:
            num_bytes += self._fields.vocab_size * WIRE_TYPES[dtype].itemsize
        if spec.hidden_state:
            num_bytes += self._hidden_size * _FLOAT_BYTES
        return num_bytes


def _mask_name(policy: policy_pb2.LogitsReturnPolicy) -> bytes:
    """Return the fingerprint of the registered mask that a policy names; empty if it names none."""
    selection = policy.WhichOneof("selection")
    return b"" if selection is None else bytes(getattr(policy, selection).token_mask.fingerprint)


@dataclass(frozen=True, slots=True)
class Interval:
    """The finite values from ``low`` to ``high``; ``low`` itself is excluded if ``is_open``."""

    name: str
    low: float
    high: float
    is_open: bool = False

    def holds(self, value: float) -> bool:
        """Return whether the interval contains a value; none contains NaN."""
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
    """Return a float of ``message``, or ``unset`` if it is not set; without presence, 0 is not set.

    Raises:
        InvalidRequest: The value is outside the interval.
    """
    value: float = getattr(message, name)
    is_set = message.HasField(name) if name in _WITH_PRESENCE else value != 0.0
    if not is_set:
        return unset
    if not interval.holds(value):
        raise InvalidRequest(f"{path}.{name}", f"must be {interval.name}, got {value}")
    return value
