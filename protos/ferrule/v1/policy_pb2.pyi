from ferrule.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogitsReturnPolicy(_message.Message):
    __slots__ = ("full_logits", "greedy_argmax", "sample", "logprobs", "top_logprobs", "logprob_token_ids", "target_logprobs", "entropy", "hidden_state")
    FULL_LOGITS_FIELD_NUMBER: _ClassVar[int]
    GREEDY_ARGMAX_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_FIELD_NUMBER: _ClassVar[int]
    full_logits: FullLogits
    greedy_argmax: GreedyArgmax
    sample: Sample
    logprobs: bool
    top_logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    target_logprobs: bool
    entropy: bool
    hidden_state: bool
    def __init__(self, full_logits: _Optional[_Union[FullLogits, _Mapping]] = ..., greedy_argmax: _Optional[_Union[GreedyArgmax, _Mapping]] = ..., sample: _Optional[_Union[Sample, _Mapping]] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., target_logprobs: _Optional[bool] = ..., entropy: _Optional[bool] = ..., hidden_state: _Optional[bool] = ...) -> None: ...

class FullLogits(_message.Message):
    __slots__ = ("dtype",)
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    dtype: _types_pb2.DataType
    def __init__(self, dtype: _Optional[_Union[_types_pb2.DataType, str]] = ...) -> None: ...

class GreedyArgmax(_message.Message):
    __slots__ = ("token_mask", "repetition_penalty", "penalty_start")
    TOKEN_MASK_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PENALTY_START_FIELD_NUMBER: _ClassVar[int]
    token_mask: TokenMask
    repetition_penalty: float
    penalty_start: int
    def __init__(self, token_mask: _Optional[_Union[TokenMask, _Mapping]] = ..., repetition_penalty: _Optional[float] = ..., penalty_start: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty", "penalty_start", "logit_bias", "token_mask")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PENALTY_START_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MASK_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_start: int
    logit_bias: _containers.ScalarMap[int, float]
    token_mask: TokenMask
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., penalty_start: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., token_mask: _Optional[_Union[TokenMask, _Mapping]] = ...) -> None: ...

class TokenMask(_message.Message):
    __slots__ = ("inline_bits", "allowed_ids", "fingerprint")
    INLINE_BITS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    inline_bits: bytes
    allowed_ids: TokenIdList
    fingerprint: bytes
    def __init__(self, inline_bits: _Optional[bytes] = ..., allowed_ids: _Optional[_Union[TokenIdList, _Mapping]] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class TokenIdList(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Outputs(_message.Message):
    __slots__ = ("num_rows", "logits", "tokens", "model_logprobs", "sampled_logprobs", "target_logprobs", "top_token_ids", "top_logprobs", "requested_logprobs", "entropies", "hidden_state", "seed")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TARGET_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENTROPIES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    logits: _types_pb2.Tensor
    tokens: _containers.RepeatedScalarFieldContainer[int]
    model_logprobs: _containers.RepeatedScalarFieldContainer[float]
    sampled_logprobs: _containers.RepeatedScalarFieldContainer[float]
    target_logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    requested_logprobs: _containers.RepeatedScalarFieldContainer[float]
    entropies: _containers.RepeatedScalarFieldContainer[float]
    hidden_state: _types_pb2.Tensor
    seed: int
    def __init__(self, num_rows: _Optional[int] = ..., logits: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., model_logprobs: _Optional[_Iterable[float]] = ..., sampled_logprobs: _Optional[_Iterable[float]] = ..., target_logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., requested_logprobs: _Optional[_Iterable[float]] = ..., entropies: _Optional[_Iterable[float]] = ..., hidden_state: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...
