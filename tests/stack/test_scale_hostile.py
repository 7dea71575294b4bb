"""What one client does to Envoy or makes a server answer takes nothing away from the others."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.api.hostile import http2
from tests.chaos.raw_clients import open_channel
from tools.compose.envoy import EnvoyProcess, free_ports

CODES = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
PREFILL = "/ferrule.v1.ModelExecutorService/Prefill"
DRAIN = "/ferrule.v1.AdminService/Drain"


class Ending(grpc.GenericRpcHandler):
    """Ends each call with the code that its message asks for, as servers do when deadlines are too short."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Serve Prefill."""
        return grpc.unary_unary_rpc_method_handler(self._end) if details.method == PREFILL else None

    @staticmethod
    def _end(request: bytes, context: grpc.ServicerContext) -> bytes:
        return context.abort(grpc.StatusCode[request.decode()], "as asked")


def code_of(channel: grpc.Channel, method: str, message: bytes) -> grpc.StatusCode:
    """Return what a call that fails ends with."""
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=10)
    return caught.value.code()


@pytest.fixture(scope="module")
def envoy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvoyProcess]:
    """In front of two servers that are healthy."""
    ports = dict(zip(("ferrule-a", "ferrule-b"), free_ports(2), strict=True))
    servers = []
    for port in ports.values():
        server = grpc.server(ThreadPoolExecutor(4), handlers=[Ending()])
        servicer = health.HealthServicer()
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        servers.append(server)
    with EnvoyProcess(tmp_path_factory.mktemp("envoy"), ports) as proxy:
        proxy.wait_for_healthy(set(ports.values()))
        yield proxy
    for server in servers:
        server.stop(0).wait()


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_errors_that_are_answers_eject_no_server(envoy: EnvoyProcess, code: grpc.StatusCode) -> None:
    """One caller with deadlines that are too short, or many under load, would shut servers to all new prompts."""
    with open_channel(envoy.target) as channel:
        assert [code_of(channel, PREFILL, code.name.encode()) for _ in range(30)] == [code] * 30
    assert envoy.stats("cluster.executors.outlier_detection.ejections_enforced_total") == {
        "cluster.executors.outlier_detection.ejections_enforced_total": 0
    }
    assert len(envoy.healthy()) == 2


class Unfinished:
    """A connection whose calls send most of a large message and never the rest; within the windows that it is given.

    Args:
        port: Of the proxy.
    """

    def __init__(self, port: int) -> None:
        self._peer = http2.Peer("127.0.0.1", port)
        self._peer.socket.settimeout(None)
        self._window, self._is_open = 65535, True
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        time.sleep(0.2)  # until the settings are there: they make the windows of calls larger

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._peer.socket.shutdown(socket.SHUT_RDWR)
        self._peer.socket.close()

    def begin(self, stream: int, size: int) -> bool:
        """Begin one call and send so much of it; False: the proxy takes no more."""
        self._peer.send(
            http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.call_headers(PREFILL)),
            http2.frame(http2.DATA, 0, stream, http2.grpc_message(b"", 10 << 20)),
        )
        for _ in range(size // 16384):
            with self._changed:
                if not self._changed.wait_for(lambda: self._window >= 16384 or not self._is_open, 2):
                    return False
                self._window -= 16384
            self._peer.send(http2.frame(http2.DATA, 0, stream, bytes(16384)))
        return self._is_open

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            for kind, flags, owner, payload in self._peer.frames():
                if kind in (http2.SETTINGS, http2.PING) and not flags:  # they require an answer
                    self._peer.send(http2.frame(kind, http2.ACK, 0, payload if kind == http2.PING else b""))
                elif kind == http2.WINDOW_UPDATE and owner == 0:
                    with self._changed:
                        self._window += int.from_bytes(payload)
                        self._changed.notify()
        with self._changed:
            self._is_open = False
            self._changed.notify()


@pytest.mark.slow
def test_unfinished_calls_do_not_take_the_memory(envoy: EnvoyProcess) -> None:
    """Each holds nearly what may be repeated elsewhere; the container has 768 MiB, and others are still served."""
    memory, servers = psutil.Process(envoy.process.pid), envoy.healthy()
    with contextlib.ExitStack() as stack, open_channel(envoy.target) as channel:
        most = 0
        for _ in range(4):
            client = stack.enter_context(Unfinished(envoy.port))
            for number in range(250):
                if not client.begin(2 * number + 1, 900_000):
                    break
                most = max(most, memory.memory_info().rss)
        assert 250 << 20 < most < 640 << 20
        deadline = time.monotonic() + 3
        while (code := code_of(channel, DRAIN, b"")) is grpc.StatusCode.UNAVAILABLE and time.monotonic() < deadline:
            time.sleep(0.1)  # at the very top nothing new is taken, until the largest calls have been cut off
        assert code is grpc.StatusCode.PERMISSION_DENIED  # the proxy's own answer
    envoy.wait_for_healthy(servers)  # the servers of this test have few threads, and unfinished calls held all
    with open_channel(envoy.target) as channel:
        assert code_of(channel, PREFILL, b"INTERNAL") is grpc.StatusCode.INTERNAL
    assert envoy.stats("envoy.overload_actions.reset_high_memory_stream")
