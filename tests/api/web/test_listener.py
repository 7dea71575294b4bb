"""The HTTP listener stays up, bounded and polite, whatever is sent to it."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ferrule_server.addresses import ListenAddress
from ferrule_server.api.web.events import MAX_WATCHERS, VIEW_REQUEST
from ferrule_server.api.web.listener import HEAD_S, MAX_CONNECTIONS, MAX_HEAD_BYTES, SEND_S, WebListener
from ferrule_server.api.web.site import Site
from ferrule_server.errors import ConfigError
from tests.api.web.plain_http import connect, get, listening, read_reply, send


@pytest.fixture(scope="module")
def shared() -> Iterator[WebListener]:
    """A listener for all tests that leave nothing behind."""
    with listening() as listener:
        yield listener


def test_head_is_get_without_a_body(shared: WebListener) -> None:
    """Of everything that is served, of an event stream too, which then ends."""
    for path in ("/metrics", "/ui", "/nothing"):
        whole, head = get(shared.address, path), get(shared.address, path, method="HEAD")
        assert (head.status, head.body) == (whole.status, b"")
        assert head.headers["content-length"] == str(len(whole.body))
    events = get(shared.address, "/ui/events", method="HEAD")
    assert (events.status, events.body) == (200, b"")
    assert events.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("path", ["/metrics", "/ui", "/ui/main.js", "/nothing", "/"])
def test_every_answer_is_safe_to_show(path: str, shared: WebListener) -> None:
    """Nothing from elsewhere runs in the page, no other page frames or reads it, and nothing is kept."""
    headers = get(shared.address, path).headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["server"] == "ferrule"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.0\n\n", 200),
        (b"GET /metrics?a=b HTTP/1.1\r\nhost: localhost:1\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /metrics HTTP/x\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 200),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"\0" * 100, 400),
        (b"\r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc", 413),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /ui/../ui/main.js HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /ui/%2e%2e/listener.py HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n\r\n", 302),
    ],
)
def test_whatever_is_sent_gets_one_plain_answer(sent: bytes, status: int, shared: WebListener) -> None:
    """A line of text that says what is wrong, never a trace or what was sent; the next client is served."""
    reply = send(shared.address, sent)
    assert reply.status == status
    if status >= 400:
        assert reply.headers["content-type"] == "text/plain; charset=utf-8"
        assert len(reply.body) < 200
        assert reply.headers["content-length"] == str(len(reply.body))
    assert reply.headers["connection"] == "close"
    assert get(shared.address, "/metrics").body == b"up 1\n"


def test_who_sends_slowly_is_told_when_the_time_is_over() -> None:
    """A byte now and then gains nothing, nor does silence."""
    with listening(HEAD_S=0.4) as listener, connect(listener.address) as dripping, connect(listener.address) as silent:
        began = time.monotonic()
        for byte in b"GET /metr":
            dripping.send(bytes([byte]))
            time.sleep(0.03)
        assert read_reply(dripping).status == 408
        assert read_reply(silent).status == 408
        assert 0.3 < time.monotonic() - began < 10


def test_connections_beyond_the_bound_are_refused_at_once_and_room_comes_back() -> None:
    """Where all places are held by requests that came whole. The refusal is a whole answer, though it comes first."""
    with listening(MAX_CONNECTIONS=3) as listener, ExitStack() as held:
        watching = [held.enter_context(connect(listener.address)) for _ in range(3)]
        for watcher in watching:
            watcher.sendall(b"GET /ui/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert watcher.recv(10)
        began = time.monotonic()
        refused = get(listener.address, "/metrics")
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert time.monotonic() - began < 5
        for _ in range(20):
            connect(listener.address).close()
        watching[0].close()
        deadline = time.monotonic() + 30
        while get(listener.address, "/metrics").status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_whoever_waits_longest_gives_its_place_to_a_new_connection() -> None:
    """It is told so; those that came later keep theirs and are answered when their requests are whole."""
    with listening(MAX_CONNECTIONS=3) as listener, ExitStack() as held:
        slow = [held.enter_context(connect(listener.address)) for _ in range(3)]
        for connection in slow:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n")
            time.sleep(0.05)
        assert get(listener.address, "/metrics").status == 200
        assert read_reply(slow[0]).status == 503
        for connection in slow[1:]:
            connection.sendall(b"\r\n")
            assert read_reply(connection).status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /metrics HTTP/1.1\r\nHost: ",
        b"\0",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n",
        b"GET /nothing HTTP/1.0\r\n\r\n",
    ],
    ids=["silence", "slow heads", "garbage", "bodies", "errors"],
)
def test_clients_that_hold_connections_keep_no_scraper_out(sent: bytes) -> None:
    """More of them than there are places, each back at once when it is dropped: every scrape is answered."""
    with listening() as listener, _Holders(listener.address, sent, 90) as holders:
        num_scrapes, deadline = 0, time.monotonic() + 30
        while num_scrapes < 40 or holders.num_connections <= 90:  # some have been dropped, and came back
            assert get(listener.address, "/metrics").status == 200
            assert time.monotonic() < deadline
            num_scrapes += 1


class _Holders:
    """Holds connections: sends the same on each, then a byte now and then, and connects again when it is dropped."""

    def __init__(self, address: ListenAddress, sent: bytes, count: int) -> None:
        self._address = address
        self._sent = sent
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._hold, args=(count // 3,)) for _ in range(3)]
        self.num_connections = 0

    def __enter__(self) -> _Holders:
        for thread in self._threads:
            thread.start()
        while self.num_connections < 90:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(10)

    def _hold(self, count: int) -> None:
        held: list[socket.socket] = []
        while not self._is_over.wait(0.01):
            held = [connection for connection in held if self._is_held(connection)]
            while len(held) < count:
                held.append(connect(self._address))
                self.num_connections += 1
                with contextlib.suppress(OSError):
                    held[-1].sendall(self._sent)
        for connection in held:
            connection.close()

    def _is_held(self, connection: socket.socket) -> bool:
        """Send a byte and take what came; return whether the connection stands."""
        try:
            connection.settimeout(0)
            connection.send(self._sent[:1] and b"x")
            if not connection.recv(4096):
                connection.close()
                return False
        except BlockingIOError:
            return True
        except OSError:
            connection.close()
            return False
        return True


def test_a_reader_that_reads_nothing_is_dropped() -> None:
    """Of one large answer, and of a stream; nobody else waits for it."""
    with (
        listening(lambda: b"data: " + b"x" * 500_000 + b"\n\n", metrics=lambda _: ("t", b"m"), SEND_S=0.3) as listener,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((listener.address.host, listener.address.port))
        connection.sendall(b"GET /ui/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deadline = time.monotonic() + 30
        while not listener._open:
            assert time.monotonic() < deadline, "it was never served"
            time.sleep(0.01)
        while listener._open:
            assert time.monotonic() < deadline, "it still has its place"
            time.sleep(0.05)
        assert get(listener.address, "/metrics").body == b"m"


def test_watchers_share_messages_and_are_bounded() -> None:
    """Each message is made once; the seventeenth is asked to come again later."""
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"data: %d\n\n" % len(made)

    with listening(make) as listener, ExitStack() as stack:
        watchers = [stack.enter_context(connect(listener.address)) for _ in range(16)]
        for watcher in watchers:
            watcher.sendall(b"GET /ui/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = [b""] * 16
        for index, watcher in enumerate(watchers):
            while received[index].count(b"data: ") < 3:
                received[index] += watcher.recv(4096)
        assert len(made) < 40, "one for all of them, not one for each"
        refused = get(listener.address, "/ui/events")
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert get(listener.address, "/metrics").status == 200


def test_closing_ends_streams_and_waiting_connections() -> None:
    """Quickly, with an end of the stream rather than a reset, and the address is free again."""
    with listening() as listener, connect(listener.address) as watching, connect(listener.address) as silent:
        watching.sendall(b"GET /ui/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert watching.recv(100)
        assert get(listener.address, "/metrics").status == 200, "so the two before it have been taken"
        began = time.monotonic()
        before = set(threading.enumerate())
        listener.close()
        assert time.monotonic() - began < 5
        left = set(threading.enumerate())
        assert len([thread for thread in before - left if thread.name == "ferrule-web"]) == 1
        while watching.recv(4096):
            pass
        assert silent.recv(100) == b""
        with listening(address=listener.address) as again:
            assert get(again.address, "/metrics").status == 200


def test_who_never_reads_holds_up_no_end() -> None:
    """Neither a page that stands still nor what was being sent to it; an answer that is read gets its moment."""
    with listening(lambda: b"data: " + b"x" * (8 << 20) + b"\n\n") as listener, ExitStack() as stack:
        for _ in range(3):
            watcher = stack.enter_context(connect(listener.address))
            watcher.sendall(b"GET /ui/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert watcher.recv(10)
        time.sleep(0.2)
        began = time.monotonic()
        listener.close()
        assert time.monotonic() - began < 5


def test_an_address_in_use_is_an_unusable_setting() -> None:
    """Named by its flag; so is one that is not of this machine."""

    async def no_metrics(_: str) -> tuple[str, bytes]:
        return "", b""

    with listening() as listener:
        for address, hint in (
            (listener.address, "another server uses it"),
            (ListenAddress("192.0.2.1", 1), "192.0.2.1:1"),
            (ListenAddress("no such host", 1), "no such host"),
        ):
            with pytest.raises(ConfigError, match=f"--metrics-listen: cannot listen on .*{hint}"):
                WebListener(address, Site(no_metrics, None, ""))


def test_what_fails_in_the_metrics_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """The client learns that something failed, the log why, and the next scrape is tried again."""

    def metrics(_: str) -> tuple[str, bytes]:
        raise KeyError("an inner matter")

    with listening(metrics=metrics) as listener, caplog.at_level(logging.ERROR):
        for _ in range(2):
            reply = get(listener.address, "/metrics")
            assert reply.status == 500
            assert b"inner" not in reply.body
        assert get(listener.address, "/ui").status == 200
    assert "an inner matter" in caplog.text


def test_without_descriptors_the_thread_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the interpreter from the engine just when there is trouble already."""
    tries: list[int] = []

    def accept(_: socket.socket) -> None:
        tries.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    with listening() as listener:
        with monkeypatch.context() as patch, connect(listener.address) as waiting:
            patch.setattr(socket.socket, "accept", accept)
            with connect(listener.address):
                time.sleep(0.45)
            assert 1 <= len(tries) <= 6
            assert waiting.fileno() >= 0
        assert get(listener.address, "/metrics").status == 200


def test_ipv6_is_served() -> None:
    """On its loopback, by its name in brackets."""
    with listening(address=ListenAddress("::1", 0)) as listener:
        assert listener.address.target.startswith("[::1]:")
        assert get(listener.address, "/metrics").status == 200


def test_the_bounds_in_the_docs_are_true() -> None:
    """What an operator reads is what is enforced."""
    text = (Path(__file__).parents[3] / "docs" / "observing.md").read_text()
    section = text[text.index("## The web page") :].split("\n## ")[0]
    assert f"* {MAX_CONNECTIONS} connections:" in section
    assert f"* {MAX_WATCHERS} pages that watch:" in section
    assert f"* a request of {MAX_HEAD_BYTES >> 10} KiB within {HEAD_S:.0f} s:" in section
    assert f"read within {SEND_S:.0f} s:" in section
    assert f"more than {VIEW_REQUEST.max_cells}," in section
    assert f"at most {VIEW_REQUEST.max_sequences} are listed" in section
