"""Policies and values to and from the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrule import Policy, greedy, logits, sample
from ferrule.types import Lease, Status
from ferrule.v1 import cache_pb2, info_pb2, policy_pb2, types_pb2
from ferrule_client import _convert


def message_of(policy: Policy | None) -> policy_pb2.LogitsReturnPolicy:
    """Return the wire form of a policy."""
    message = _convert.policy_to_message(policy)
    assert message is not None
    return message


def test_unset_stays_unset() -> None:
    """None means "as the contract says for unset"; zero is a value."""
    assert _convert.policy_to_message(None) is None
    assert message_of(sample()).sample == policy_pb2.Sample()
    assert message_of(sample()).WhichOneof("selection") == "sample"
    zero = message_of(sample(min_p=0, seed=0)).sample
    assert not zero.HasField("temperature")
    assert zero.HasField("seed")
    assert not zero.HasField("top_p")


def test_every_sampling_setting_travels() -> None:
    """Nothing a caller asks for is dropped on the way."""
    policy = sample(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        penalty_start=2,
        logit_bias={7: 2.0},
        mask=[1, 2],
        logprobs=True,
        top_logprobs=4,
        target_logprobs=True,
        logits="float16",
    )
    message = message_of(policy)
    set_fields = {field.name for field, _ in message.sample.ListFields()}
    assert set_fields == set(policy_pb2.Sample.DESCRIPTOR.fields_by_name)
    assert dict(message.sample.logit_bias) == {7: 2.0}
    assert list(message.sample.token_mask.allowed_ids.token_ids) == [1, 2]
    assert (message.logprobs, message.top_logprobs, message.target_logprobs) == (True, 4, True)
    assert message.full_logits.dtype == types_pb2.DATA_TYPE_FLOAT16


def test_other_policies_travel() -> None:
    """So for the rest."""
    assert message_of(Policy()) == policy_pb2.LogitsReturnPolicy()
    wanted = message_of(Policy(logits="bfloat16", entropy=True, hidden_state=True, top_logprobs=2))
    assert {field.name for field, _ in wanted.ListFields()} == {
        "full_logits",
        "entropy",
        "hidden_state",
        "top_logprobs",
    }
    assert message_of(logits("float16")).full_logits.dtype == types_pb2.DATA_TYPE_FLOAT16
    chosen = message_of(greedy(repetition_penalty=2.0, mask=[3]))
    assert message_of(sample(temperature=0)) == message_of(greedy())
    assert message_of(greedy(logit_bias={1: 2.0})).sample.HasField("temperature")
    assert chosen.greedy_argmax.repetition_penalty == 2.0
    assert list(message_of(Policy(logprob_token_ids=(4, 5))).logprob_token_ids) == [4, 5]


def test_seed_is_drawn_only_where_a_draw_needs_one() -> None:
    """Greedy policies and given seeds stay as they are."""
    for policy in (greedy(), Policy(), sample(temperature=0), sample(seed=5)):
        assert policy.with_seed() is policy
    drawn = sample(temperature=0.5).with_seed()
    assert message_of(drawn).sample.HasField("seed")
    assert sample().with_seed(9) == sample(seed=9)


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        (types_pb2.DATA_TYPE_FLOAT32, np.array([1.5, -2.0], "<f4").tobytes()),
        (types_pb2.DATA_TYPE_FLOAT16, np.array([1.5, -2.0], "<f2").tobytes()),
        (types_pb2.DATA_TYPE_BFLOAT16, bytes.fromhex("c03f00c0")),
    ],
)
def test_float_tensors_become_float32(dtype: types_pb2.DataType, data: bytes) -> None:
    """In their shape."""
    array = _convert.tensor_to_array(types_pb2.Tensor(dtype=dtype, shape=[2, 1], data=data))
    assert array.dtype == np.float32
    assert array.tolist() == [[1.5], [-2.0]]


def test_unreadable_tensor_is_named() -> None:
    """An element type this client does not know is said, not guessed."""
    with pytest.raises(ValueError, match="INT8"):
        _convert.tensor_to_array(types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT8, shape=[1], data=b"x"))


def test_rows_of_lists_are_cut_where_they_belong() -> None:
    """Top and requested log-probabilities come in flat lists."""
    from ferrule.v1 import executor_pb2

    rows = policy_pb2.Outputs(
        num_rows=2,
        top_token_ids=[1, 2, 3, 4],
        top_logprobs=[-1, -2, -3, -4],
        requested_logprobs=[-1, -2, -3, -4, -5, -6],
        entropies=[0.5, 0.25],
        seed=0,
    )
    output = _convert.output_from_message(executor_pb2.DecodeOutput(outputs=rows))
    assert [[top.token for top in row] for row in output.top_logprobs] == [[1, 2], [3, 4]]
    assert output.requested_logprobs.shape == (2, 3)
    assert output.seed == 0
    assert output.tokens == ()
    assert not hasattr(output, "logits")
    assert [output.row(row).requested_logprobs.tolist() for row in range(2)] == [[[-1, -2, -3]], [[-4, -5, -6]]]


def test_values_speak_plain_words() -> None:
    """Enums in lower case, unset as None, times with their zone; numbers from a newer server as digits."""
    info = _convert.model_info_from_message(info_pb2.ModelInfo(dtype=types_pb2.DATA_TYPE_FLOAT8_E4M3))
    assert (info.dtype, info.device_type, info.bos_token_id) == ("float8_e4m3", "unspecified", None)
    status = _convert.value(Status, info_pb2.ExecutorStatus(state=99))  # type: ignore[arg-type]
    assert (status.state, status.load_progress, status.start_time) == ("99", 0.0, None)
    message = cache_pb2.CacheInfo()
    message.summary.create_time.FromSeconds(0)
    message.summary.lease.ttl.FromMilliseconds(1500)
    message.summary.lease.expires_in.FromMilliseconds(700)
    cache_info = _convert.cache_info_from_message(message)
    assert cache_info.create_time is not None
    assert cache_info.create_time.isoformat() == "1970-01-01T00:00:00+00:00"
    assert cache_info.lease == Lease(1.5, 0.7)


def test_features_are_words() -> None:
    """A feature that only a newer client knows is there by its number."""
    served: list[Any] = [info_pb2.FEATURE_FORK, info_pb2.FEATURE_CHAT_TEMPLATE, 9999]
    capabilities = _convert.capabilities_from_message(info_pb2.ExecutorCapabilities(features=served))
    assert capabilities.features == {"fork", "chat_template", "9999"}
