"""The proxy does to connections what it says, or the campaigns behind it would prove nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.chaos.cutting_proxy import CuttingProxy


@pytest.fixture
def echo_port() -> Iterator[int]:
    """Port of a server that sends everything back, one thread for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=_echo, args=(listener.accept()[0],), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def _connect(proxy: CuttingProxy) -> socket.socket:
    host, _, port = proxy.target.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def _exchange_until_cut(proxy: CuttingProxy) -> int:
    """Return how many bytes came back before the connection was cut."""
    num_bytes = 0
    with _connect(proxy) as connection, contextlib.suppress(OSError):
        while num_bytes < 1_000_000:
            connection.sendall(b"x" * 100)
            data = connection.recv(1 << 16)
            if not data:
                break
            num_bytes += len(data)
    return num_bytes


def test_without_cuts_every_byte_passes_both_ways(echo_port: int) -> None:
    """A proxy that lost bytes by itself would be blamed on the server."""
    sent = bytes(range(256)) * 4000
    with CuttingProxy(echo_port) as proxy, _connect(proxy) as connection:
        threading.Thread(target=connection.sendall, args=(sent,), daemon=True).start()
        received = b""
        while len(received) < len(sent):
            received += connection.recv(1 << 16)
    assert received == sent
    assert proxy.num_cuts == 0


def test_cuts_fall_in_both_directions_at_every_place_and_of_both_kinds(echo_port: int) -> None:
    """Twelve ways to cut, and each of them happens."""
    with CuttingProxy(echo_port, seed=1, mean_bytes=300) as proxy:
        lives = [_exchange_until_cut(proxy) for _ in range(150)]
    assert proxy.num_cuts == proxy.num_connections == 150
    assert len(proxy.cuts) == 12
    assert len(set(lives)) > 5


def test_the_same_seed_cuts_at_the_same_places(echo_port: int) -> None:
    """So that what failed once can be looked at again."""
    runs = []
    for _ in range(2):
        with CuttingProxy(echo_port, seed=7, mean_bytes=500) as proxy:
            for _ in range(20):
                _exchange_until_cut(proxy)
        runs.append(proxy.cuts)
    assert runs[0] == runs[1]


def test_a_frozen_proxy_swallows_bytes_and_gives_them_out_when_thawed(echo_port: int) -> None:
    """A partition: the connection stands and nothing comes."""
    with CuttingProxy(echo_port) as proxy, _connect(proxy) as connection:
        connection.sendall(b"before")
        assert connection.recv(100) == b"before"
        proxy.freeze()
        connection.sendall(b"while")
        connection.settimeout(0.05)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        connection.settimeout(10)
        proxy.thaw()
        assert connection.recv(100) == b"while"


def test_a_port_where_nobody_listens_ends_the_connection() -> None:
    """As between the death of a server and its restart."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with CuttingProxy(port) as proxy, _connect(proxy) as connection:
        assert connection.recv(100) == b""
