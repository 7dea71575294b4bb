"""Clients see which kernels run, whose bits are promised."""

from __future__ import annotations

import logging

import pytest

from ferrule.v1 import executor_pb2, info_pb2
from ferrule_server.config import ServerConfig
from ferrule_server.executor.cpu.executor import NumbaCpuExecutor
from ferrule_server.loading import create_executor
from tests.api.harness import RunningServer, refused
from tests.executor.cpu.models import lose_a_thread


def _described(
    server: RunningServer,
) -> tuple[info_pb2.ModelInfo, info_pb2.ExecutorStatus, info_pb2.ExecutorCapabilities]:
    info = server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest()).info
    status = server.stub.GetStatus(executor_pb2.GetStatusRequest()).status
    return info, status, server.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest()).capabilities


def test_the_kernel_set_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """With the reason and the promise of its bits. A failure loses every handle, and nothing serves afterwards."""
    caplog.set_level(logging.CRITICAL)
    executor = create_executor(ServerConfig(kv_memory_bytes=16 << 20), lambda _stage, _share: None).executor
    assert isinstance(executor, NumbaCpuExecutor)
    with RunningServer(executor) as server:
        info, status, capabilities = _described(server)
        assert info.kernel_set == status.debug["kernel_set"] == executor.info.kernel_set
        assert "the processor" in status.debug["kernel_set_reason"]
        assert len(info.numerics_fingerprint) == 32
        assert (status.executor, status.fallback_reason) == ("numba-cpu", "")
        assert info_pb2.FEATURE_DETERMINISTIC in capabilities.features
        handle = server.prefill().kv_cache
        lose_a_thread(executor)
        with refused() as caught:
            server.decode(handle, 5)
        assert caught[0].reason == "HANDLE_LOST"
        with refused():
            server.prefill()
