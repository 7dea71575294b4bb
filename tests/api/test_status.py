"""The table of errors: each class once, with its code, reason and metadata, on the object and through a real server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from unittest import mock

import grpc
import pytest

from ferrule.v1 import cache_pb2, executor_pb2, policy_pb2, types_pb2
from ferrule_server import errors
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.rpc.state import Phase
from ferrule_server.api.rpc.status import MAX_DETAILS_BYTES, STATUS_TABLE, fault_of, to_status
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import DeviceLost
from tests.api.harness import EPOCH, FULL, INSTANCE, Refusal, RunningServer, read_status, refusal_of, refused
from tests.fakes import FakeExecutor

Code = grpc.StatusCode

TABLE: dict[type[FerruleError], tuple[FerruleError, Code, str, set[str]]] = {
    type(error): (error, code, reason, set(keys.split()))
    for error, code, reason, keys in (
        (errors.InvalidRequest("input.a", "is wrong"), Code.INVALID_ARGUMENT, "INVALID_FIELD", "field"),
        (
            errors.TokenOutOfVocab("input.input_ids[3]", 300, 256),
            Code.INVALID_ARGUMENT,
            "TOKEN_OUT_OF_VOCAB",
            "field token_id vocab_size",
        ),
        (errors.RequestIdReused("r"), Code.INVALID_ARGUMENT, "REQUEST_ID_REUSED", "field request_id"),
        (
            errors.ReplyTooLarge("input.logits_policy", 2, 1),
            Code.INVALID_ARGUMENT,
            "REPLY_TOO_LARGE",
            "field reply_bytes limit_bytes",
        ),
        (
            errors.RequestTooLarge(2, 1),
            Code.INVALID_ARGUMENT,
            "REQUEST_TOO_LARGE",
            "field num_bytes limit_bytes",
        ),
        (errors.RequestTimeout(30.0), Code.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT", "timeout_s"),
        (errors.TokenMissing("no token"), Code.UNAUTHENTICATED, "TOKEN_MISSING", ""),
        (errors.TokenInvalid("bad token"), Code.UNAUTHENTICATED, "TOKEN_INVALID", ""),
        (errors.RoleRequired("admin"), Code.PERMISSION_DENIED, "ROLE_REQUIRED", "role"),
        (errors.HandleUnknown("ab"), Code.NOT_FOUND, "HANDLE_UNKNOWN", "handle_id"),
        (errors.HandleExpired("ab"), Code.NOT_FOUND, "HANDLE_EXPIRED", "handle_id"),
        (errors.EpochChanged("ab"), Code.NOT_FOUND, "EPOCH_CHANGED", "handle_id"),
        (errors.HandleLost("ab"), Code.NOT_FOUND, "HANDLE_LOST", "handle_id"),
        (errors.MaskUnknown(bytes(16)), Code.NOT_FOUND, "MASK_UNKNOWN", "fingerprint"),
        (errors.WrongInstance("ab", "b"), Code.ABORTED, "WRONG_INSTANCE", "handle_id instance"),
        (errors.CallElsewhere("b", "a"), Code.ABORTED, "WRONG_INSTANCE", "instance answered_by"),
        (errors.HandleStale("ab", 3, 5), Code.ABORTED, "HANDLE_STALE", "handle_id length tip_length"),
        (errors.HandleRewritten("ab", 3, 5), Code.ABORTED, "HANDLE_STALE", "handle_id length tip_length"),
        (errors.TruncateBeyond("ab", 9, 5), Code.OUT_OF_RANGE, "TRUNCATE_BEYOND", "handle_id new_length length"),
        (errors.ContextExceeded(9, 8), Code.OUT_OF_RANGE, "CONTEXT_EXCEEDED", "length max_context"),
        (
            errors.KvGivenBack("ab", 9, 12),
            Code.OUT_OF_RANGE,
            "KV_GIVEN_BACK",
            "handle_id length lowest_length tokens_to_recompute",
        ),
        (errors.ExceedsPool(9, 8), Code.OUT_OF_RANGE, "EXCEEDS_POOL", "needed_blocks total_blocks"),
        (
            errors.QuotaExceeded("KV_TOKENS", 9, 8),
            Code.RESOURCE_EXHAUSTED,
            "QUOTA_KV_TOKENS",
            "quota used limit",
        ),
        (
            errors.BlocksExhausted(9, 8),
            Code.RESOURCE_EXHAUSTED,
            "KV_BLOCKS_EXHAUSTED",
            "needed_blocks free_blocks",
        ),
        (errors.QueueFull(9, 8), Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "num_jobs limit"),
        (errors.SlowConsumer(9, 8), Code.RESOURCE_EXHAUSTED, "SLOW_CONSUMER", "queued_bytes limit_bytes"),
        (errors.Starting(), Code.UNAVAILABLE, "STARTING", ""),
        (errors.Draining(), Code.UNAVAILABLE, "DRAINING", ""),
        (
            errors.Restoring("ab", 9000, 2.5),
            Code.UNAVAILABLE,
            "RESTORING",
            "handle_id tokens_to_recompute",
        ),
        (errors.DurabilityLost(), Code.UNAVAILABLE, "DURABILITY_LOST", ""),
        (errors.FeatureUnsupported("entropy"), Code.UNIMPLEMENTED, "FEATURE_UNSUPPORTED", "feature"),
        (errors.Cancelled(), Code.CANCELLED, "CANCELLED", ""),
        (errors.SeedRequired(), Code.INVALID_ARGUMENT, "INVALID_FIELD", ""),
        (errors.NonFiniteLogits(7), Code.INTERNAL, "NON_FINITE_LOGITS", "position"),
        (errors.EngineFault("abcd"), Code.INTERNAL, "ENGINE_FAULT", "fault_id"),
    )
}
"""One row per error class; abstract ones (no REASON of their own) have none."""

NOT_RAISED_YET = {
    errors.Cancelled: "never: whoever could read it has gone away",
    errors.SeedRequired: "never: it is sent as the InvalidRequest of its field",
}
"""Rows that no served call can reach, and what will make it reach them."""


def test_the_table_has_every_error_class_once() -> None:
    """A new error class must get a row here, and so a code."""
    concrete = {cls for cls in _descendants(FerruleError) if "REASON" in vars(cls) or cls is errors.QuotaExceeded}
    assert set(TABLE) == concrete
    assert set(STATUS_TABLE) <= _descendants(FerruleError) | {FerruleError}


def _descendants(cls: type[FerruleError]) -> set[type[FerruleError]]:
    found = set(cls.__subclasses__())
    return found.union(*(_descendants(child) for child in found))


@pytest.mark.parametrize("cls", TABLE, ids=lambda cls: cls.__name__)
def test_each_error_has_its_code_reason_and_metadata(cls: type[FerruleError]) -> None:
    """What varies in the message is in the metadata; field errors name their field; retries say when."""
    error, code, reason, keys = TABLE[cls]
    refusal = read_status(to_status(error))
    assert (refusal.code, refusal.reason, set(refusal.metadata)) == (code, reason, keys)
    assert refusal.reason == error.reason
    assert refusal.message == error.message
    if isinstance(error, errors.InvalidRequest):
        assert refusal.fields == (error.field,)
    assert refusal.retry_after_s == getattr(error, "retry_after_s", None)


def test_details_stay_below_the_limit_whatever_an_error_holds() -> None:
    """GRPC turns any error with large trailers into another one."""
    error = errors.InvalidRequest("f" * 9000, "\u00e9" * 9000, **{f"key{i}": "\u4e16" * 9000 for i in range(40)})
    assert to_status(error).ByteSize() <= MAX_DETAILS_BYTES


def test_an_unknown_exception_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the traceback under an id; the caller gets the id and nothing else."""
    with caplog.at_level(logging.ERROR):
        fault = fault_of(ValueError("secret detail"), "Decode")
    refusal = read_status(to_status(fault))
    assert refusal.reason == "ENGINE_FAULT"
    assert "secret" not in refusal.message
    assert refusal.metadata["fault_id"] in caplog.text
    assert "secret detail" in caplog.text


# ---- each row that a served call can reach, through a real server ---------------------------------------------------


def _full(server: RunningServer) -> None:
    server.prefill((1,) * 20, FULL, logits_positions=types_pb2.LOGITS_POSITIONS_ALL)


def _other(server: RunningServer, cache_id: str) -> None:
    server.decode(types_pb2.KvCacheHandle(cache_id=cache_id, length=1, lineage=bytes(16)), 1)


def _stale(server: RunningServer) -> None:
    handle = server.prefill().kv_cache
    server.decode(handle, 7)
    server.decode(handle, 8)


def _rewritten(server: RunningServer) -> None:
    handle = server.prefill((1, 2, 3)).kv_cache
    server.truncate(handle, 2)
    server.stub.ForkCache(cache_pb2.ForkCacheRequest(kv_cache=handle), timeout=10)


def _expired(server: RunningServer) -> None:
    handle = server.prefill().kv_cache
    server.clock.offset_s += 100
    server.decode(handle, 7)


def _exhausted(server: RunningServer) -> None:
    for token in range(20):
        server.prefill((token,) * 60)


def _draining(server: RunningServer) -> None:
    server.state.phase = Phase.DRAINING
    server.prefill()


def _non_finite(server: RunningServer) -> None:
    assert isinstance(server.executor, FakeExecutor)
    server.executor.bad_token_ids.add(13)
    server.prefill((1, 13))


def _fault(server: RunningServer) -> None:
    assert isinstance(server.executor, FakeExecutor)
    failure = RuntimeError("the device said something secret")
    server.executor.errors.update({len(server.executor.batches) + i: failure for i in (1, 2)})
    server.prefill()


def _lost(server: RunningServer) -> None:
    assert isinstance(server.executor, FakeExecutor)
    server.executor.errors[len(server.executor.batches) + 1] = DeviceLost()
    server.prefill()


def _reused(server: RunningServer) -> None:
    server.prefill((1, 2), request_id="once")
    server.prefill((1, 3), request_id="once")


def _unmasked(server: RunningServer) -> None:
    mask = policy_pb2.TokenMask(fingerprint=bytes(16))
    greedy = policy_pb2.GreedyArgmax(token_mask=mask)
    server.prefill(policy=policy_pb2.LogitsReturnPolicy(greedy_argmax=greedy))


def _tree(server: RunningServer) -> None:
    handle = server.prefill().kv_cache
    message = executor_pb2.VerifyInput(kv_cache=handle, input_ids=[1], draft_ids=[2, 3], parents=[0, 0])
    server.stub.ForwardVerify(executor_pb2.ForwardVerifyRequest(input=message), timeout=10)


def _refused_by_the_store(server: RunningServer, error: FerruleError) -> None:
    """Have the look-up of a handle fail, as where a journal was lost or a sequence has no KV yet."""
    handle = server.prefill().kv_cache
    with mock.patch.object(server.store, "resolve", side_effect=error):
        server.decode(handle, 7)


REACHED: dict[type[FerruleError], Callable[[RunningServer], object]] = {
    errors.InvalidRequest: lambda server: server.prefill(()),
    errors.TokenOutOfVocab: lambda server: server.prefill((1, 99999)),
    errors.ReplyTooLarge: _full,
    errors.HandleUnknown: lambda server: _other(server, f"{INSTANCE}.{EPOCH}.AAAAAAAAAAAAAAAAAAAAAA"),
    errors.HandleExpired: _expired,
    errors.EpochChanged: lambda server: _other(server, f"{INSTANCE}.0123456789ab.AAAAAAAAAAAAAAAAAAAAAA"),
    errors.HandleLost: _lost,
    errors.WrongInstance: lambda server: _other(server, f"other.{EPOCH}.AAAAAAAAAAAAAAAAAAAAAA"),
    errors.HandleStale: _stale,
    errors.HandleRewritten: _rewritten,
    errors.TruncateBeyond: lambda server: server.truncate(server.prefill().kv_cache, 999),
    errors.RequestTooLarge: lambda server: server.prefill((1,) * 200_000),
    errors.ContextExceeded: lambda server: server.prefill((1,) * 300),
    errors.ExceedsPool: lambda server: server.prefill((1,) * 250),
    errors.BlocksExhausted: _exhausted,
    errors.RequestIdReused: _reused,
    errors.MaskUnknown: _unmasked,
    errors.FeatureUnsupported: _tree,
    errors.Draining: _draining,
    errors.Restoring: lambda server: _refused_by_the_store(server, errors.Restoring("ab", 9000, 2.5)),
    errors.DurabilityLost: lambda server: _refused_by_the_store(server, errors.DurabilityLost()),
    errors.NonFiniteLogits: _non_finite,
    errors.EngineFault: _fault,
}
"""How a client meets each error on a server with a context of 256 tokens and a pool of 160."""

ELSEWHERE = {
    errors.KvGivenBack: "tests/client/test_windows.py: a model with windows is needed",
    errors.QuotaExceeded: "test_auth.test_quotas_hold_for_a_principal_and_follow_the_file",
    errors.QueueFull: "test_a_full_queue_refuses_at_once",
    errors.TokenMissing: "test_auth.test_every_method_wants_a_token",
    errors.TokenInvalid: "test_auth.test_every_method_wants_a_token",
    errors.RequestTimeout: "test_admission_deadline.test_a_client_reads_that_its_message_did_not_come",
    errors.RoleRequired: "test_auth.test_administration_needs_the_role",
    errors.CallElsewhere: "test_instance.test_a_drain_for_another_server_drains_nothing",
    errors.SlowConsumer: "test_stream.test_a_reader_that_stops_reading_loses_its_stream_not_its_sequences",
    errors.Starting: "test_lifecycle.test_while_loading_everything_but_status_and_health_is_refused",
}


def _small_server() -> RunningServer:
    executor = FakeExecutor(vocab_size=32, num_blocks=41, block_size=4, max_context=256)
    return RunningServer(executor, limits=ApiLimits(max_reply_bytes=3000))


def test_every_row_is_reached_or_listed() -> None:
    """Nothing is forgotten: each class is produced through a server, or it is said why not."""
    assert set(REACHED) | set(ELSEWHERE) | set(NOT_RAISED_YET) == set(TABLE)
    assert not set(REACHED) & set(NOT_RAISED_YET)


@pytest.mark.parametrize("cls", REACHED, ids=lambda cls: cls.__name__)
def test_a_client_meets_each_error(cls: type[FerruleError], caplog: pytest.LogCaptureFixture) -> None:
    """Code, reason and metadata keys are those of the table, and the refusal is one line in the log."""
    _, code, reason, keys = TABLE[cls]
    with _small_server() as server, caplog.at_level(logging.WARNING, "ferrule_server.api.rpc.status"):
        with refused() as refusals:
            REACHED[cls](server)
        refusal = refusals[0]
    assert (refusal.code, refusal.reason) == (code, reason), refusal
    assert keys <= set(refusal.metadata)
    assert "secret" not in refusal.message
    lines = [record.getMessage() for record in caplog.records if record.name == "ferrule_server.api.rpc.status"]
    assert len(lines) == 1
    assert f"reason={reason}" in lines[0]
    assert "principal=local" in lines[0]


def test_a_full_queue_refuses_at_once() -> None:
    """Beyond the bound on waiting jobs: QUEUE_FULL with the time to wait."""
    executor = FakeExecutor()
    with RunningServer(executor, settings=EngineSettings(max_waiting_jobs=1)) as server:
        executor.gate = threading.Event()
        request = executor_pb2.PrefillRequest(input=executor_pb2.PrefillInput(input_ids=[1]))
        first = server.stub.Prefill.future(request)
        assert executor.is_waiting.wait(10)
        later = [server.stub.Prefill.future(request) for _ in range(2)]
        threading.Timer(0.2, executor.gate.set).start()
        refusals = [_refusal_or_none(call) for call in (first, *later)]
    found = [refusal for refusal in refusals if refusal is not None]
    assert found
    assert {(refusal.code, refusal.reason) for refusal in found} == {(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")}
    assert found[0].retry_after_s == pytest.approx(0.1)


def _refusal_or_none(call: grpc.Future[executor_pb2.PrefillResponse]) -> Refusal | None:
    """Return how a call ended: None is OK."""
    error = call.exception(timeout=10)
    assert error is None or isinstance(error, grpc.RpcError)
    return None if error is None else refusal_of(error)
