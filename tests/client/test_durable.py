"""Durable handles in the client: what is waited for, for how long, and what the caller is told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest

from ferrule import Cache, Client, greedy
from ferrule.errors import (
    DrainingError,
    DurabilityLostError,
    InstanceUnreachableError,
    RestoringError,
    UnavailableError,
)
from ferrule.types import Append, Lease, Output, Prompt
from ferrule.v1 import types_pb2
from ferrule_cli import app
from ferrule_client._leases import Leases
from ferrule_client._retry import Attempts, RetrySettings
from ferrule_client._tip import Tip
from tests.client.fake_server import Failure, FakeServer

CODES = grpc.StatusCode


def restoring(retry_after_s: float | None = 0.05) -> Failure:
    """Return the refusal of a sequence that is being restored."""
    metadata = (("handle_id", "ab"), ("tokens_to_recompute", "9000"))
    return Failure(CODES.UNAVAILABLE, "run again", reason="RESTORING", retry_after_s=retry_after_s, metadata=metadata)


LOST = Failure(CODES.UNAVAILABLE, "the disk failed", reason="DURABILITY_LOST", retry_after_s=1.0, after=True)
DRAINING = Failure(CODES.UNAVAILABLE, "bye", reason="DRAINING")

Call = Callable[[Client, Cache], object]


def _in_a_frame(client: Client, cache: Cache) -> Output:
    with client.stream() as stream:
        (output,) = stream.run([Append(cache, 1)])
    return output


CALLS: list[tuple[str, Call]] = [
    ("Decode", lambda _, cache: cache.append(1)),
    ("Prefill", lambda _, cache: cache.append([1, 2])),
    ("item", _in_a_frame),
    ("Generate", lambda _, cache: cache.generate(2, policy=greedy()).read()),
]
each_call = pytest.mark.parametrize(("rpc", "call"), CALLS, ids=[rpc for rpc, _ in CALLS])


@each_call
def test_a_sequence_that_is_restored_is_waited_for(fake: FakeServer, rpc: str, call: Call) -> None:
    """As often as the server asks for it, whatever ``max_retries`` says, and at least as long."""
    with Client(fake.target, max_retries=0, timeout=20) as client, client.prefill([*b"ab"]) as cache:
        fake.failures[rpc] = [restoring()] * 3
        start = time.monotonic()
        call(client, cache)
        assert time.monotonic() - start > 0.15
        assert not fake.failures[rpc]


@each_call
def test_a_restore_that_takes_longer_is_told(fake: FakeServer, rpc: str, call: Call) -> None:
    """Within the timeout, with the number of tokens; nothing happened, so nothing is in doubt."""
    with Client(fake.target, timeout=20) as client, client.prefill([*b"ab"]) as cache:
        fake.failures[rpc] = [restoring(0.05), restoring(30.0)]
        with pytest.raises(RestoringError, match="run again") as caught:
            call(client, cache)
        assert (caught.value.tokens_to_recompute, caught.value.retry_after_s) == (9000, 30.0)
        assert (cache.length, cache._tip.doubts) == (2, frozenset())
        fake.failures.clear()


@pytest.mark.parametrize("rpc", ["Decode", "item"])
def test_a_disk_that_failed_is_told_at_once(fake: FakeServer, fake_client: Client, rpc: str) -> None:
    """It is unknown what happened: the same call again replays what did."""
    call = dict(CALLS)[rpc]
    with fake_client.prefill([*b"ab"]) as cache:
        fake.failures[rpc] = [LOST]
        with pytest.raises(DurabilityLostError) as caught:
            call(fake_client, cache)
        assert isinstance(caught.value, UnavailableError)
        assert caught.value.retry_after_s == 1.0
        assert cache.length == 2
        output = call(fake_client, cache)
        assert isinstance(output, Output)
        assert output.replayed is (rpc == "Decode")  # the fake refuses items before it runs them
        assert fake.sequences[cache.handle.cache_id] == [*b"ab", 1]


# ---- a server that is away -------------------------------------------------------------------------------------------


@contextmanager
def away(server: FakeServer, seconds: float) -> Iterator[None]:
    """Stop the server; after so many seconds start one with the same sequences on its port, while the block runs."""
    server.__exit__()
    back: list[FakeServer] = []

    def come_back() -> None:
        new = FakeServer()
        new.sequences, new.has_request_ids = server.sequences, server.has_request_ids
        assert new._server.add_insecure_port(f"127.0.0.1:{server.port}") == server.port
        back.append(new.__enter__())

    timer = threading.Timer(seconds, come_back)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        back[0].__exit__()


@each_call
def test_a_call_on_a_sequence_outlasts_a_restart(rpc: str, call: Call) -> None:
    """The connection is refused for longer than all retries take; the call continues when the server is back."""
    del rpc
    with FakeServer() as server, Client(server.target, max_retries=1, timeout=20) as client:
        cache = client.prefill([*b"ab"], keep_alive=False)
        with away(server, 1.0):
            start = time.monotonic()
            call(client, cache)
            assert 0.8 < time.monotonic() - start < 12
            assert len(server.sequences[cache.handle.cache_id]) > 2
            cache.release()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda _, cache: cache.append("b"), id="append"),
        pytest.param(lambda client, cache: list(client.stream().run([Append(cache, "b")])), id="stream"),
        pytest.param(lambda _, cache: cache.generate(2, tokens="b", policy=greedy()).read(), id="generate"),
        pytest.param(lambda client, cache: client.detokenizer(cache.token_ids).push(98), id="detokenizer"),
    ],
)
def test_text_of_a_call_on_a_sequence_outlasts_a_restart(call: Call) -> None:
    """The tokenizer is asked first, and is waited for as the call itself is."""
    with FakeServer() as server, Client(server.target, max_retries=1, timeout=20) as client:
        cache = client.prefill([*b"ab"], keep_alive=False)
        with away(server, 1.0):
            start = time.monotonic()
            call(client, cache)
            assert 0.8 < time.monotonic() - start < 12
            cache.release()


def test_the_next_turn_of_a_chat_outlasts_a_restart() -> None:
    """The template is rendered when the server is back; the first turn fails as a prefill does."""
    with FakeServer() as server, Client(server.target, max_retries=1, timeout=20) as client:
        with client.chat(policy=greedy(), max_tokens=2) as chat:
            chat.send("a")
            with away(server, 1.0):
                assert chat.send("b").tokens
                chat.close()
        with client.chat() as chat, pytest.raises(UnavailableError, match="no server at"):
            chat.send("a")


def test_a_call_on_a_sequence_ends_with_its_timeout() -> None:
    """The refusal is what the caller is told; without a timeout the retries end it, and so they do new prompts."""
    with FakeServer() as server, Client(server.target, max_retries=1, timeout=1.0) as client:
        cache = client.prefill([*b"ab"], keep_alive=False)
        server.__exit__()
        start = time.monotonic()
        with pytest.raises(UnavailableError, match="no server at"):
            cache.append(1)
        assert 0.7 < time.monotonic() - start < 5
        for call in (lambda: cache.append(1, timeout=None), lambda: client.prefill([1, 2], timeout=20)):
            start = time.monotonic()
            with pytest.raises(UnavailableError, match="no server at"):
                call()
            assert time.monotonic() - start < 5
        cache.detach()


def test_a_lost_connection_counts_as_ever(fake: FakeServer) -> None:
    """A request that may have run is not repeated without end: it may be what ends the server."""
    with Client(fake.target, max_retries=1, timeout=20) as client, client.prefill([*b"ab"]) as cache:
        fake.failures["Decode"] = [Failure(CODES.UNAVAILABLE, "Socket closed")] * 9
        with pytest.raises(UnavailableError, match="Socket closed"):
            cache.append(1)
        assert len(fake.failures["Decode"]) == 7
        fake.failures.clear()


@pytest.mark.parametrize("is_durable", [True, False])
def test_a_drain_is_waited_for_where_handles_survive_it(
    fake: FakeServer,
    is_durable: bool,
) -> None:
    """The server is asked once; new prompts are refused at once all the same."""
    fake.is_durable = is_durable
    with Client(fake.target, max_retries=0, timeout=20) as client, client.prefill([*b"ab"]) as cache:
        for _ in range(2):
            fake.failures["Decode"] = [DRAINING] * 2
            if is_durable:
                cache.append(1)
            else:
                with pytest.raises(DrainingError):
                    cache.append(1)
        assert fake.calls["GetCapabilities"] == 1
        assert fake.calls["Decode"] == (6 if is_durable else 2)
        fake.failures.clear()
        fake.failures["Prefill"] = [DRAINING]
        with pytest.raises(DrainingError):
            client.prefill([1, 2])


def test_an_instance_out_of_reach_is_waited_for_where_handles_survive() -> None:
    """Unless the cache recovers: it then continues at another instance."""
    error = InstanceUnreachableError(CODES.UNAVAILABLE, "INSTANCE_UNREACHABLE", "gone", {"instance": "a"})

    def outlasts(timeout: float | None = 9.0, *, is_patient: bool = False, is_durable: bool | None = True) -> bool:
        attempts = Attempts(
            RetrySettings(max_retries=0), timeout, on_sequence=True, is_patient=is_patient, is_durable=is_durable
        )
        return attempts.waits_for(error)

    assert outlasts()
    assert not outlasts(is_durable=None)
    assert not outlasts(is_patient=True)
    assert not outlasts(None)
    assert Attempts(RetrySettings(), 9.0, on_sequence=True).needs_durability(error)
    assert not Attempts(RetrySettings(), 9.0, on_sequence=True, is_durable=False).needs_durability(error)
    assert not Attempts(RetrySettings(), 9.0).needs_durability(error)


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_a_lease_that_the_server_cannot_tell_now_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    """DURABILITY_LOST as the answer for one handle: it is due again soon."""
    with FakeServer() as server, Client(server.target) as client:
        cache = client.prefill([*b"ab"], keep_alive=False)
        tip, leases = Tip(cache.handle), Leases()
        leases.begin(tip, 0.0)
        error = DurabilityLostError(CODES.UNAVAILABLE, "DURABILITY_LOST", "the disk failed")
        assert not leases.take("fake", [tip], [tip.handle], [error], 10.0)
        assert 10.0 < leases.due[tip] <= 11.0
        leases.take("fake", [tip], [tip.handle], [Lease(60.0, 60.0)], 11.0)
        assert leases.due[tip] == 31.0
        assert "lost" not in caplog.text
        cache.release()


# ---- the level, and what shows it ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "sent"),
    [
        (None, types_pb2.DURABILITY_UNSPECIFIED),
        ("none", types_pb2.DURABILITY_NONE),
        ("journaled", types_pb2.DURABILITY_JOURNALED),
    ],
)
def test_the_level_of_a_client_is_that_of_its_sequences(fake: FakeServer, level: str | None, sent: int) -> None:
    """Of prompts, of items of a frame, and of generations."""
    with Client(fake.target, durability=level) as client:  # type: ignore[arg-type]
        client.prefill([*b"ab"]).release()
        with client.stream() as stream:
            stream.run([Prompt([*b"cd"])], errors="return")  # the fake has no prompts in frames
        client.generate([*b"ef"], 2, policy=greedy()).read()
    assert fake.prompts[0].cache.durability == sent
    assert fake.frames[0][0].unified.cache.durability == sent
    assert fake.generates[0].cache.durability == sent


def test_a_real_server_without_a_journal_says_none(client: Client) -> None:
    """In the information of a sequence and in lists; a durable sequence is refused there."""
    with client.prefill([1, 2, 3]) as cache:
        info = cache.info()
        assert (info.durability, info.tokens_to_recompute) == ("none", 0)
        (listed,) = client.list_caches()
        assert (listed.durability, listed.tokens_to_recompute) == ("none", 0)
        assert "durable" not in cache._repr_html_()


def test_the_command_reads_a_journal_by_the_servers_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own, with what was given; its exit code is the command's."""
    ran: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        assert not check
        ran.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert app.main(["durable", "verify", "/journal", "--json"]) == 1
    assert ran == [[sys.executable, "-m", "ferrule_server.durability", "verify", "/journal", "--json"]]
