"""``--failpoints`` on a real process: said loudly, refused when it says nothing, and a killed server starts anew."""

from __future__ import annotations

import grpc
import pytest

from ferrule.v1 import executor_pb2, executor_pb2_grpc
from tests.server.test_main import REFERENCE, _run, _running

LISTEN = ("--listen", "127.0.0.1:0")


def test_failpoints_are_said_loudly_and_exit_kills() -> None:
    """A warning at start; the second commit ends the process with 137, the first was answered."""
    with _running(*REFERENCE, *LISTEN, "--failpoints", "after_commit=exit@2") as (process, values):
        with grpc.insecure_channel(values["listen"]) as channel:
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            prefill = executor_pb2.PrefillRequest(input=executor_pb2.PrefillInput(input_ids=[1, 2]))
            assert stub.Prefill(prefill, timeout=20).output.kv_cache.length == 2
            with pytest.raises(grpc.RpcError) as caught:
                stub.Prefill(prefill, timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        _, err = process.communicate(timeout=20)
    assert process.returncode == 137
    assert "WARNING ferrule_server failpoints are armed, this server breaks on purpose: after_commit=exit@2" in err


def test_failpoints_that_arm_nothing_are_refused() -> None:
    """Exit code 2, and what would do."""
    done = _run(*REFERENCE, *LISTEN, "--failpoints", "nowhere=error")
    assert done.returncode == 2
    assert "--failpoints: 'nowhere=error' is not a failpoint" in done.stderr
