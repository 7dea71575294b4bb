"""Compressed messages: the server inflates none, with or without credentials."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.api.harness import RunningServer
from tests.api.hostile import http2
from tests.hostile.servers import MemoryWatch

BOMB_MIB = 256
MAX_GROWTH_MIB = 64.0
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
EXECUTOR = "/ferrule.v1.ModelExecutorService/"
OK, UNIMPLEMENTED, INTERNAL = "0", "12", "13"


@pytest.fixture(scope="module")
def reflecting() -> Iterator[RunningServer]:
    """A server that offers reflection too."""
    with RunningServer(has_reflection=True) as server:
        yield server


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("path", [HEALTH, REFLECTION, f"{EXECUTOR}Prefill", f"{EXECUTOR}StreamDecode"])
def test_a_compressed_message_is_refused_before_it_is_inflated(
    reflecting: RunningServer, path: str, encoding: str
) -> None:
    """256 MiB of zeros in 260 KB; the answer is UNIMPLEMENTED, and the next call is served."""
    message = http2.grpc_message(http2.bomb(BOMB_MIB, encoding), flag=1)
    with http2.caller(reflecting.address.host, reflecting.address.port) as caller:
        with MemoryWatch(psutil.Process()) as watch:
            assert caller.call(http2.call_headers(path, grpc_encoding=encoding), message) == UNIMPLEMENTED
        assert watch.grown_mib < MAX_GROWTH_MIB
        assert caller.call(http2.call_headers(HEALTH), http2.grpc_message(b"")) == OK


def test_a_compressed_message_without_a_name_for_how_is_refused(reflecting: RunningServer) -> None:
    """The flag alone says that it is compressed."""
    message = http2.grpc_message(http2.bomb(BOMB_MIB), flag=1)
    with http2.caller(reflecting.address.host, reflecting.address.port) as caller:
        with MemoryWatch(psutil.Process()) as watch:
            assert caller.call(http2.call_headers(HEALTH), message) == INTERNAL
        assert watch.grown_mib < MAX_GROWTH_MIB
