"""Replies that are larger than their client accepts are refused before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ferrule.v1 import executor_pb2, types_pb2
from tests.api.harness import FULL, GREEDY, RunningServer, decode_item, read_status, refused
from tests.fakes import FakeExecutor

VOCAB_SIZE = 152_000
NUM_ROWS = 16
ALL = types_pb2.LOGITS_POSITIONS_ALL
ACCEPTS_MORE = (("ferrule-max-reply-bytes", str(64 << 20)),)


@pytest.fixture(scope="module")
def large() -> Iterator[RunningServer]:
    """A server with the vocabulary of Qwen3: a row of logits has 0.6 MB."""
    with RunningServer(FakeExecutor(vocab_size=VOCAB_SIZE)) as server:
        yield server


def prompt(policy: object = FULL) -> executor_pb2.PrefillInput:
    """Return a prompt with a row for each of its tokens: 9.7 MB of full logits."""
    return executor_pb2.PrefillInput(
        input_ids=[1] * NUM_ROWS,
        logits_policy=policy,  # type: ignore[arg-type]
        logits_positions=ALL,
    )


def test_what_a_usual_client_cannot_receive_is_refused(large: RunningServer) -> None:
    """With the policy as the reason, and no sequence is made."""
    steps = large.engine.counters.steps
    for is_batch, field in ((False, "input.logits_policy"), (True, "inputs[0].logits_policy")):
        with refused() as refusals:
            if is_batch:
                large.stub.BatchPrefill(executor_pb2.BatchPrefillRequest(inputs=[prompt()]), timeout=20)
            else:
                large.stub.Prefill(executor_pb2.PrefillRequest(input=prompt()), timeout=20)
        assert (refusals[0].reason, refusals[0].fields) == ("REPLY_TOO_LARGE", (field,))
        assert refusals[0].metadata["limit_bytes"] == str(4 << 20)
        assert "logits_policy" in refusals[0].message
    assert large.engine.counters.steps == steps


def test_a_client_that_accepts_more_says_so(large: RunningServer) -> None:
    """Up to what the server sends at most; a nonsense number is named."""
    request = executor_pb2.PrefillRequest(input=prompt())
    output = large.stub.Prefill(request, timeout=20, metadata=ACCEPTS_MORE).output
    assert len(output.outputs.logits.data) == NUM_ROWS * VOCAB_SIZE * 4
    for text in ("", "-1", "4MiB", "1e9"):
        with refused() as refusals:
            large.stub.Prefill(request, timeout=20, metadata=(("ferrule-max-reply-bytes", text),))
        assert (refusals[0].reason, refusals[0].fields) == ("INVALID_FIELD", ("ferrule-max-reply-bytes",))


def test_a_client_cannot_lower_the_usual_limit(large: RunningServer) -> None:
    """A reply up to 4 MiB is sent whatever the client says, so a refusal names that limit."""
    request, says_less = executor_pb2.PrefillRequest(input=prompt()), (("ferrule-max-reply-bytes", "1000"),)
    with refused() as refusals:
        large.stub.Prefill(request, timeout=20, metadata=says_less)
    assert (refusals[0].reason, refusals[0].metadata["limit_bytes"]) == ("REPLY_TOO_LARGE", str(4 << 20))
    del request.input.input_ids[6:]
    assert large.stub.Prefill(request, timeout=20, metadata=says_less).output.outputs.num_rows == 6


def test_small_replies_need_no_word(large: RunningServer) -> None:
    """Neither a token for each row nor six rows of logits."""
    request = executor_pb2.PrefillRequest(input=prompt(GREEDY))
    assert len(large.stub.Prefill(request, timeout=20).output.outputs.tokens) == NUM_ROWS
    request.input.logits_policy.CopyFrom(FULL)
    del request.input.input_ids[6:]
    assert large.stub.Prefill(request, timeout=20).output.outputs.num_rows == 6


def test_an_item_of_a_stream_is_refused_alone(large: RunningServer) -> None:
    """The others of its frame are answered."""
    handle = large.prefill().kv_cache
    piece = executor_pb2.UnifiedBatchItem(q_tokens=[1] * NUM_ROWS, logits_policy=FULL, logits_positions=ALL)
    stream = large.open_stream()
    stream.send(piece, decode_item(handle, 7))
    results = {result.seq: result for frame in stream.rest() for result in frame.results}
    refusal = read_status(results[0].error)
    assert (refusal.reason, refusal.fields) == ("REPLY_TOO_LARGE", ("items[0].unified.logits_policy",))
    assert results[1].decode.kv_cache.length == handle.length + 1
