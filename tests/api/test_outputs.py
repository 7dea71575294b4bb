"""Results to messages: rounding of logits, and replies that never pass the bound computed before the step."""

from __future__ import annotations

import numpy as np
import pytest

from ferrule.v1 import executor_pb2, policy_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.fields import FieldReader
from ferrule_server.api.responses.outputs import fill_prefill, fill_rows, fill_verify, handle_message
from ferrule_server.engine.jobs import AppendResult, StepTiming, Verified
from ferrule_server.executor.base import Float32Array, RowOutput
from ferrule_server.kv.handle import Handle
from tests.api.reading import make_reader

VOCAB_SIZE = 5000
HANDLE = Handle("i" * 64 + "." + "e" * 12 + "." + "s" * 22, 2**32 - 1, b"l" * 16)


def _result(num_rows: int, logits: Float32Array) -> AppendResult:
    """A result as large as it can be: every field at its widest."""
    row = RowOutput(
        position=2**31,
        token=VOCAB_SIZE - 1,
        model_logprob=-1.5,
        sampled_logprob=-2.5,
        target_logprob=-3.5,
        top_ids=np.arange(VOCAB_SIZE - 1000, VOCAB_SIZE, dtype=np.int32),
        top_logprobs=np.full(1000, -9.0, np.float32),
        logits=logits,
        requested_logprobs=np.full(300, -9.0, np.float32),
        entropy=2.5,
        hidden_state=np.ones(24, np.float32),
    )
    timing = StepTiming(2**63 - 1, 2**63 - 1, 2**32 - 1)
    return AppendResult(HANDLE, (row,) * num_rows, 2**64 - 1, 2**31, timing, replayed=True, recomputed=True)


@pytest.mark.parametrize("dtype", [types_pb2.DATA_TYPE_FLOAT32, types_pb2.DATA_TYPE_BFLOAT16])
@pytest.mark.parametrize("num_rows", [1, 17])
def test_a_reply_never_passes_its_bound(dtype: types_pb2.DataType, num_rows: int) -> None:
    """REPLY_TOO_LARGE is decided before the step by a bound that the reply then keeps."""
    policy = policy_pb2.LogitsReturnPolicy(
        full_logits=policy_pb2.FullLogits(dtype=dtype),
        sample=policy_pb2.Sample(temperature=1.0),
        logprobs=True,
        top_logprobs=1000,
        target_logprobs=True,
        logprob_token_ids=range(300),
        entropy=True,
        hidden_state=True,
    )
    message = executor_pb2.PrefillInput(
        request_id="r" * 128,
        input_ids=[1] * num_rows,
        logits_policy=policy,
        logits_positions=types_pb2.LOGITS_POSITIONS_ALL,
    )
    planned = make_reader(VOCAB_SIZE).prefill(message, "input.", "p")
    output = executor_pb2.PrefillOutput()
    fill_prefill(output, _result(num_rows, np.ones(VOCAB_SIZE, np.float32)), planned)
    frame = executor_pb2.StreamDecodeResponse(free_blocks=2**32 - 1)
    result = frame.results.add(seq=2**32 - 1)
    result.decode.MergeFromString(output.SerializeToString())
    assert output.outputs.num_rows == num_rows
    assert len(output.outputs.top_token_ids) == 1000 * num_rows
    assert 0.8 * planned.reply_bytes < frame.ByteSize() <= planned.reply_bytes


@pytest.mark.parametrize("has_handles", [True, False])
@pytest.mark.parametrize("num_drafts", [0, 64])
def test_a_reply_of_a_verify_never_passes_its_bound(num_drafts: int, has_handles: bool) -> None:
    """With every draft accepted and a handle at each row, the widest there are."""
    message = executor_pb2.VerifyInput(
        request_id="r" * 128,
        kv_cache=handle_message(HANDLE),
        input_ids=[1],
        draft_ids=[1] * num_drafts,
        logits_policy=policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(), logprobs=True, top_logprobs=1000),
        acceptance=executor_pb2.ACCEPTANCE_RULE_EXACT,
        return_row_handles=has_handles,
    )
    planned = make_reader(VOCAB_SIZE).verifies.read(message, "", "p")
    num_rows = num_drafts + 1
    result = _result(num_rows, np.ones(VOCAB_SIZE, np.float32))
    row_handles = (HANDLE,) * num_rows if has_handles else ()
    result.verified = Verified(num_drafts, VOCAB_SIZE - 1, row_handles)
    frame = executor_pb2.StreamDecodeResponse(free_blocks=2**32 - 1)
    sent = frame.results.add(seq=2**32 - 1)
    fill_verify(sent.verify, result, planned)
    assert list(sent.verify.accepted_indices) == list(range(1, num_rows))
    assert (sent.verify.accepted_count, sent.verify.next_token) == (num_drafts, VOCAB_SIZE - 1)
    assert len(sent.verify.row_handles) == len(row_handles)
    assert 0.8 * planned.reply_bytes < frame.ByteSize() <= planned.reply_bytes


def test_what_became_of_nothing_is_unset() -> None:
    """Without a rule there is no count and no next token, though 0 may be one."""
    message = executor_pb2.VerifyInput(kv_cache=handle_message(HANDLE), input_ids=[1], draft_ids=[2])
    planned = make_reader(VOCAB_SIZE).verifies.read(message, "", "p")
    output = executor_pb2.VerifyOutput()
    fill_verify(output, AppendResult(HANDLE, verified=Verified()), planned)
    assert {field.name for field, _ in output.ListFields()} == {"kv_cache", "timing"}
    fill_verify(output, AppendResult(HANDLE, verified=Verified(0, 0)), planned)
    assert output.HasField("next_token")


def test_every_value_of_a_row_has_its_place() -> None:
    """Row after row, as asked for and in no other field."""
    policy = policy_pb2.LogitsReturnPolicy(logprob_token_ids=[3, 1], entropy=True, hidden_state=True)
    message = executor_pb2.PrefillInput(input_ids=[1], logits_policy=policy)
    planned = make_reader().prefill(message, "input.", "p")
    rows = [
        RowOutput(
            i,
            requested_logprobs=np.array([-i, -i - 0.5], np.float32),
            entropy=float(i),
            hidden_state=np.arange(i, i + 24, dtype=np.float32),
        )
        for i in (1, 2)
    ]
    outputs = policy_pb2.Outputs()
    fill_rows(outputs, rows, None, planned.plan)
    assert list(outputs.requested_logprobs) == [-1.0, -1.5, -2.0, -2.5]
    assert list(outputs.entropies) == [1.0, 2.0]
    assert (list(outputs.hidden_state.shape), outputs.hidden_state.dtype) == ([2, 24], types_pb2.DATA_TYPE_FLOAT32)
    states = np.frombuffer(outputs.hidden_state.data, "<f4").reshape(2, 24)
    assert states[:, 0].tolist() == [1.0, 2.0]
    assert {field.name for field, _ in outputs.ListFields()} == {
        "num_rows",
        "requested_logprobs",
        "entropies",
        "hidden_state",
    }


def test_bfloat16_rounds_to_nearest_with_ties_to_even() -> None:
    """As hardware does it: halves go to the even neighbour."""
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000, 0x00000000, 0x7F7F8000], np.uint32)
    full_logits = policy_pb2.FullLogits(dtype=types_pb2.DATA_TYPE_BFLOAT16)
    policy = policy_pb2.LogitsReturnPolicy(full_logits=full_logits)
    message = executor_pb2.PrefillInput(input_ids=[1], logits_policy=policy)
    planned = make_reader(len(bits)).prefill(message, "input.", "p")
    result = AppendResult(HANDLE, (RowOutput(1, logits=bits.view(np.float32)),))
    output = executor_pb2.PrefillOutput()
    fill_prefill(output, result, planned)
    tensor = output.outputs.logits
    assert list(tensor.shape) == [1, len(bits)]
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xBF80, 0x0000, 0x7F80]
    assert np.frombuffer(tensor.data, "<u2").tolist() == expected


def test_float16_is_the_nearest_value() -> None:
    """Little-endian, and infinite beyond its range."""
    values = np.array([1.0, -2.5, 1 / 3, 65504.0, 1e6], np.float32)
    policy = policy_pb2.LogitsReturnPolicy(full_logits=policy_pb2.FullLogits(dtype=types_pb2.DATA_TYPE_FLOAT16))
    message = executor_pb2.PrefillInput(input_ids=[1], logits_policy=policy)
    output = executor_pb2.PrefillOutput()
    result = AppendResult(HANDLE, (RowOutput(1, logits=values),))
    fill_prefill(output, result, make_reader(len(values)).prefill(message, "input.", "p"))
    assert np.frombuffer(output.outputs.logits.data, "<f2").tolist() == [1.0, -2.5, 1365 / 4096, 65504.0, np.inf]


def test_a_handle_is_sent_as_it_is() -> None:
    """And read back as the same value."""
    message = handle_message(HANDLE)
    assert FieldReader(8, 512, ApiLimits(), 0).handle(message, "") == HANDLE
