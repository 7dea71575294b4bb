"""The ABA case: a sequence that is as long as it was, and holds other tokens.

A handle that named a place only by its length would be taken for good, and its next token appended to a history that
its owner never saw. The lineage tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ferrule.v1 import executor_pb2, types_pb2
from tests.api.harness import GREEDY, PROMPT, RunningServer, read_status, refused

Handle = types_pb2.KvCacheHandle
FAIL, FORK, REWIND = types_pb2.STALE_POLICY_FAIL, types_pb2.STALE_POLICY_FORK, types_pb2.STALE_POLICY_REWIND


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One server for all of them."""
    with RunningServer() as running:
        yield running


def verify(server: RunningServer, old: Handle, on_stale: types_pb2.StalePolicy = FAIL) -> object:
    """Verify two drafts behind a handle."""
    message = executor_pb2.VerifyInput(
        input_ids=[9],
        draft_ids=[1, 2],
        kv_cache=old,
        logits_policy=GREEDY,
        acceptance=executor_pb2.ACCEPTANCE_RULE_EXACT,
        on_stale=on_stale,
    )
    return server.stub.ForwardVerify(executor_pb2.ForwardVerifyRequest(input=message), timeout=20)


def generate(server: RunningServer, old: Handle, *tokens: int, on_stale: types_pb2.StalePolicy = FAIL) -> object:
    """Let the server go on behind a handle."""
    request = executor_pb2.GenerateRequest(
        input_ids=tokens, kv_cache=old, logits_policy=GREEDY, on_stale=on_stale, max_tokens=3
    )
    return list(server.stub.Generate(request, timeout=20))


def batch_errors(server: RunningServer, old: Handle) -> list[str]:
    """Use a handle in every kind of batch; returns the reasons of their items."""
    stub, reasons = server.stub, []
    decode = executor_pb2.DecodeInput(input_ids=[9], kv_cache=old)
    piece = executor_pb2.UnifiedBatchItem(q_tokens=[9], kv_cache=old, pos_offset=old.length)
    prefill = executor_pb2.PrefillInput(input_ids=[9], kv_cache=old)
    batch = executor_pb2.UnifiedBatch(items=[piece])
    for reply in (
        stub.BatchPrefill(executor_pb2.BatchPrefillRequest(inputs=[prefill]), timeout=20),
        stub.BatchDecode(executor_pb2.BatchDecodeRequest(inputs=[decode]), timeout=20),
        stub.UnifiedDecode(executor_pb2.UnifiedDecodeRequest(batch=batch), timeout=20),
    ):
        (result,) = reply.results
        reasons.append(read_status(result.error).reason)
    return reasons


USES: dict[str, Callable[[RunningServer, Handle], object]] = {
    "append": lambda server, old: server.decode(old, 9),
    "append and fork": lambda server, old: server.decode(old, 9, on_stale=FORK),
    "append and rewind": lambda server, old: server.decode(old, 9, on_stale=REWIND),
    "query": lambda server, old: server.decode(old),
    "fork": lambda server, old: server.fork(old),
    "truncate": lambda server, old: server.truncate(old, 3),
    "verify": verify,
    "verify and fork": lambda server, old: verify(server, old, FORK),
    "generate": lambda server, old: generate(server, old, 9),
    "generate and rewind": lambda server, old: generate(server, old, 9, on_stale=REWIND),
    "generate from the last row": generate,
}


@pytest.mark.parametrize("use", USES)
def test_aba_truncate_one_append_another_then_the_old_handle_is_stale(server: RunningServer, use: str) -> None:
    """Whatever the old handle is used for, and the sequence stays as it is."""
    old = server.decode(server.prefill().kv_cache, 7).kv_cache
    shorter = server.truncate(old, old.length - 1).kv_cache
    new = server.decode(shorter, 8).kv_cache
    assert (new.cache_id, new.length) == (old.cache_id, old.length)
    assert new.lineage != old.lineage
    with refused() as caught:
        USES[use](server, old)
    assert caught[0].reason == "HANDLE_STALE"
    assert caught[0].metadata["tip_length"] == str(new.length)
    assert batch_errors(server, old) == ["HANDLE_STALE"] * 3
    assert list(server.info(new, include_token_ids=True).token_ids) == [*PROMPT, 8]
    server.release(new)


def test_aba_with_the_same_token_again_is_the_same_handle(server: RunningServer) -> None:
    """Truncate and append the very token: every handle to it is good, for it names the same tokens."""
    old = server.decode(server.prefill().kv_cache, 7).kv_cache
    again = server.decode(server.truncate(old, old.length - 1).kv_cache, 7).kv_cache
    assert again == old
    assert server.decode(old, 9).kv_cache.length == old.length + 1
    server.release(old)
