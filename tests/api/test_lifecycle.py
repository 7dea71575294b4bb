"""From starting to draining: what is answered in each phase, health, reflection, and who holds the address."""

from __future__ import annotations

import asyncio
import socket
import stat
import threading
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, info_pb2, policy_pb2, tokenizer_pb2, types_pb2
from ferrule_server.addresses import ListenAddress
from ferrule_server.api.serve import SERVICES
from ferrule_server.api.unix_socket import SocketPath
from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import DeviceLost
from tests.api.harness import (
    EPOCH,
    INSTANCE,
    PROMPT,
    Refusal,
    RunningServer,
    StreamClient,
    decode_item,
    read_status,
    refused,
    wait_until,
)
from tests.fakes import FakeExecutor

Health = health_pb2.HealthCheckResponse


def _health(server: RunningServer, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(server.channel)
    status: int = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status
    return status


def test_while_loading_everything_but_status_and_health_is_refused() -> None:
    """GetStatus tells how far it is; health says NOT_SERVING; the rest says STARTING."""
    with RunningServer(is_loaded=False) as server:
        server.state.load_stage, server.state.load_progress = "reading weights", 0.25
        status = server.stub.GetStatus(executor_pb2.GetStatusRequest()).status
        assert (status.state, status.is_ready) == (info_pb2.EXECUTOR_STATE_STARTING, False)
        assert (status.load_stage, status.load_progress) == ("reading weights", 0.25)
        assert _health(server, "") == Health.NOT_SERVING
        for call in (
            server.prefill,
            lambda: server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest()),
            lambda: server.stub.BatchDecode(executor_pb2.BatchDecodeRequest()),
            lambda: server.text.Tokenize(tokenizer_pb2.TokenizeRequest(text="x")),
            lambda: server.open_stream().read(),
        ):
            with refused() as refusals:
                call()
            assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAVAILABLE, "STARTING")
        server.run(server.make_ready())
        assert all(_health(server, name) == Health.SERVING for name in ("", *SERVICES))
        assert server.prefill().kv_cache.length > 0


class _Drain:
    """A drain under way; leave the block once it must have ended by itself."""

    def __init__(self, server: RunningServer, grace_s: float) -> None:
        self._drained = asyncio.run_coroutine_threadsafe(server.server.drain(grace_s), server.loop)
        wait_until(lambda: _health(server, "") == Health.NOT_SERVING)

    def goes_on(self) -> bool:
        """Whether it still waits."""
        return not self._drained.done()

    def ends(self) -> None:
        """Wait until it has ended, which must be long before its grace."""
        self._drained.result(timeout=10)


def test_draining_refuses_new_prompts_and_serves_live_handles() -> None:
    """Health turns and a prompt hears DRAINING; all that goes on a live handle goes on until the last one is gone."""
    with RunningServer() as server:
        handle = server.prefill().kv_cache
        drain = _Drain(server, 60.0)
        assert all(_health(server, name) == Health.NOT_SERVING for name in ("", *SERVICES))
        branch = server.fork(handle)[0]
        assert server.decode(branch, 9).kv_cache.length == handle.length + 1
        server.decode(handle, 7)
        forked = server.decode(handle, 8, on_stale=types_pb2.STALE_POLICY_FORK).kv_cache
        assert server.prefill((9,), kv_cache=forked).kv_cache.length == handle.length + 2
        keep_alive = cache_pb2.KeepAliveRequest(kv_caches=[handle, branch])
        assert all(result.HasField("lease") for result in server.stub.KeepAlive(keep_alive, timeout=10).results)
        with refused() as refusals:
            server.prefill()
        assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        status = server.stub.GetStatus(executor_pb2.GetStatusRequest()).status
        assert (status.state, status.is_ready) == (info_pb2.EXECUTOR_STATE_DRAINING, False)
        server.release(handle, forked)
        assert drain.goes_on()
        server.release(branch)
        drain.ends()
        with refused() as refusals:
            server.decode(branch, 1)
        assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


def test_a_new_prompt_is_refused_before_it_is_read() -> None:
    """A client that must go elsewhere is not told what is wrong, and the mask it names does not count as used."""
    with RunningServer() as server:
        assert server.state.serving is not None
        masks = server.state.serving.inputs.masks
        request = cache_pb2.RegisterTokenMaskRequest(masks=[bytes([1] * 32), bytes([2] * 32)])
        older = server.stub.RegisterTokenMask(request, timeout=20).fingerprints[0]
        mask = policy_pb2.TokenMask(fingerprint=older)
        masked = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax(token_mask=mask))
        used = list(masks._order)
        server.prefill()
        _Drain(server, 60.0)
        for wrong in ({"input_ids": [1 << 20]}, {"input_ids": PROMPT, "logits_policy": masked}, {}):
            with refused() as refusals:
                message = executor_pb2.PrefillInput(**wrong)
                server.stub.Prefill(executor_pb2.PrefillRequest(input=message), timeout=20)
            assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert list(masks._order) == used


def test_a_drain_takes_new_connections_and_streams_for_live_handles() -> None:
    """A client that reconnects in the middle of a drain goes on where it was."""
    with RunningServer() as server:
        handle = server.prefill().kv_cache
        drain = _Drain(server, 60.0)
        with grpc.insecure_channel(server.address.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stream = StreamClient(executor_pb2_grpc.ModelExecutorServiceStub(channel))
            stream.send(decode_item(handle, 7))
            assert stream.read().results[0].HasField("decode")
            stream.send(release=[handle])
            stream.read()
            drain.ends()
            with refused() as refusals:
                stream.read()
            assert refusals[0].reason == "DRAINING"


def test_a_quiet_stream_is_kept_while_a_handle_lives_and_ended_with_the_last() -> None:
    """Thinking is no reason to lose one's stream; nothing left to do is."""
    with RunningServer() as server:
        handle = server.prefill().kv_cache
        stream = server.open_stream()
        stream.send(decode_item(handle, 7))
        stream.read()
        drain = _Drain(server, 60.0)
        time.sleep(0.5)  # longer than what counts as quiet
        assert drain.goes_on()
        stream.send(decode_item(handle, 7))
        assert stream.read().results[0].decode.replayed
        server.release(handle)
        drain.ends()
        with refused() as refusals:
            stream.read()
        assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


def test_an_expired_lease_ends_the_drain() -> None:
    """A client that went away holds the server no longer than its lease."""
    with RunningServer() as server:
        server.prefill()
        drain = _Drain(server, 60.0)
        assert drain.goes_on()
        server.clock.offset_s = 61.0
        drain.ends()


def test_a_drain_without_handles_ends_an_idle_stream_at_once() -> None:
    """It is told why, and the grace is not waited for."""
    with RunningServer() as server:
        stream = server.open_stream()
        stream.send()
        stream.read()
        _Drain(server, 60.0).ends()
        with refused() as refusals:
            stream.read()
        assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


class _Watch:
    """A Health.Watch call, read frame by frame."""

    def __init__(self, server: RunningServer, service: str) -> None:
        self._frames = health_pb2_grpc.HealthStub(server.channel).Watch(
            health_pb2.HealthCheckRequest(service=service), timeout=20
        )

    def next(self) -> int:
        """Return the next status told."""
        status: int = next(self._frames).status
        return status

    def cancel(self) -> None:
        """Go away."""
        self._frames.cancel()


def test_watchers_see_every_phase_and_are_told_the_end() -> None:
    """NOT_SERVING while it loads, SERVING, NOT_SERVING from the first moment of a drain, then UNAVAILABLE."""
    with RunningServer(is_loaded=False) as server:
        watches = [_Watch(server, name) for name in ("", *SERVICES)]
        assert {watch.next() for watch in watches} == {Health.NOT_SERVING}
        server.run(server.make_ready())
        assert {watch.next() for watch in watches} == {Health.SERVING}
        handle = server.prefill().kv_cache
        drain = _Drain(server, 60.0)
        assert {watch.next() for watch in watches} == {Health.NOT_SERVING}
        server.release(handle)
        drain.ends()
        server.run(server.server.stop())
        for watch in watches:
            with refused() as refusals:
                watch.next()
            assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


def test_a_watcher_that_goes_away_takes_nobodys_news_with_it() -> None:
    """The other watchers of the same service still hear of the drain."""
    with RunningServer() as server:
        first, second = _Watch(server, ""), _Watch(server, "")
        assert (first.next(), second.next()) == (Health.SERVING, Health.SERVING)
        num_watchers = len(server.server._health._watchers)
        first.cancel()
        wait_until(lambda: len(server.server._health._watchers) == num_watchers - 1)
        _Drain(server, 60.0).ends()
        assert second.next() == Health.NOT_SERVING


def test_a_list_has_the_status_of_every_service() -> None:
    """That of the server too, before it is ready and after."""
    with RunningServer(is_loaded=False) as server:
        stub = health_pb2_grpc.HealthStub(server.channel)
        for status in (Health.NOT_SERVING, Health.SERVING):
            statuses = stub.List(health_pb2.HealthListRequest()).statuses
            assert {name: one.status for name, one in statuses.items()} == dict.fromkeys(("", *SERVICES), status)
            server.run(server.make_ready())


def test_an_unknown_service_is_told_as_the_health_protocol_says() -> None:
    """NOT_FOUND to Check, SERVICE_UNKNOWN to Watch."""
    with RunningServer() as server:
        with pytest.raises(grpc.RpcError) as caught:
            _health(server, "x" * 5000)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert _Watch(server, "nobody").next() == Health.SERVICE_UNKNOWN


@pytest.mark.parametrize(
    ("cache_id", "code", "reason"),
    [
        (f"{INSTANCE}.0123456789ab.{'A' * 22}", grpc.StatusCode.NOT_FOUND, "EPOCH_CHANGED"),
        (f"elsewhere.{EPOCH}.{'A' * 22}", grpc.StatusCode.ABORTED, "WRONG_INSTANCE"),
    ],
)
def test_handles_of_another_run_say_so_to_every_call(
    server: RunningServer, cache_id: str, code: grpc.StatusCode, reason: str
) -> None:
    """EPOCH_CHANGED after a restart, WRONG_INSTANCE at another server; a release has nothing to release."""
    handle = types_pb2.KvCacheHandle(cache_id=cache_id, length=3, lineage=bytes(16))
    for call in (
        lambda: server.decode(handle, 1),
        lambda: server.prefill((1,), kv_cache=handle),
        lambda: server.fork(handle),
        lambda: server.truncate(handle, 1),
        lambda: server.info(handle),
    ):
        with refused() as refusals:
            call()
        assert (refusals[0].code, refusals[0].reason) == (code, reason)
    stream = server.open_stream()
    stream.send(decode_item(handle, 1))
    assert read_status(stream.rest()[0].results[0].error).reason == reason
    kept = server.stub.KeepAlive(cache_pb2.KeepAliveRequest(kv_caches=[handle]), timeout=10)
    assert read_status(kept.results[0].error).reason == reason
    assert not server.release(handle).results[0].released


def test_a_stream_that_opens_while_the_server_drains_ends() -> None:
    """Whatever it meets first: it is refused, or ended with the others."""
    for _ in range(20):
        with RunningServer() as server:
            stream = server.open_stream()
            stream.send()
            server.run(server.server.drain(0.1))
            with refused() as refusals:
                list(stream.call)
            assert refusals[0].reason == "DRAINING"


def test_a_drain_answers_every_call_it_has_taken() -> None:
    """Clients that decode without end hear DRAINING when they ask, never for what they asked before."""
    refusals: list[Refusal] = []

    def decode_until_refused(handle: types_pb2.KvCacheHandle) -> None:
        started = time.monotonic()
        with refused() as caught:
            while time.monotonic() - started < 20:
                server.decode(handle)
        refusals.extend(caught)

    with RunningServer(FakeExecutor(step_time_s=0.02)) as server:
        handles = [server.prefill((i, 2, 3)).kv_cache for i in range(4)]
        clients = [threading.Thread(target=decode_until_refused, args=(handle,)) for handle in handles]
        for client in clients:
            client.start()
        server.run(server.server.drain(0.6))
        server.engine.close()
        for client in clients:
            client.join(timeout=10)
    assert [refusal.reason for refusal in refusals] == ["DRAINING"] * 4
    assert "DRAINING" not in server.engine.counters.refused


def test_a_lost_device_is_told_and_later_calls_are_refused() -> None:
    """HANDLE_LOST for what ran, UNAVAILABLE afterwards, and a status that says FAILED."""
    executor = FakeExecutor()
    with RunningServer(executor) as server:
        handle = server.prefill((1, 2)).kv_cache
        executor.errors[2] = DeviceLost()
        with refused() as refusals:
            server.decode(handle, 3)
        assert refusals[0].reason == "HANDLE_LOST"
        status = server.stub.GetStatus(executor_pb2.GetStatusRequest()).status
        assert status.state == info_pb2.EXECUTOR_STATE_FAILED
        server.run(server.server.drain(0.0, has_failed=True))
        with refused() as refusals:
            server.decode(handle, 3)
        assert refusals[0].code is grpc.StatusCode.UNAVAILABLE


def test_reflection_names_the_services_where_it_is_switched_on() -> None:
    """Off by default: the call is unknown then."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with RunningServer(has_reflection=True) as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        reply = next(stub.ServerReflectionInfo(iter([request])))
        assert {service.name for service in reply.list_services_response.service} > set(SERVICES)
    with RunningServer() as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.ServerReflectionInfo(iter([request])))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_tcp_port_in_use_is_refused_before_anything_loads(server: RunningServer) -> None:
    """GRPC would share it silently."""
    with pytest.raises(ConfigError, match="another server uses it"), RunningServer(listen=server.address):
        pass


def test_a_unix_socket_is_private_and_disappears_with_its_server(tmp_path: Path) -> None:
    """Mode 0600 from the start; nothing is left behind."""
    path = tmp_path / "f.sock"
    with RunningServer(listen=ListenAddress(path=path)) as server:
        assert server.prefill().kv_cache.length > 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with (
            pytest.raises(ConfigError, match="another server uses it"),
            RunningServer(listen=ListenAddress(path=path)),
        ):
            pass
        assert server.prefill().kv_cache.length > 0
    assert list(tmp_path.iterdir()) == []


def test_a_stale_socket_is_replaced_and_a_live_or_other_file_is_not(tmp_path: Path) -> None:
    """Only a socket nobody listens on is removed, whoever left it."""
    path = tmp_path / "f.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(ConfigError, match="another server uses it"):
            SocketPath(path)
    SocketPath(path).release()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        SocketPath(path)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot listen"):
        SocketPath(tmp_path / "missing" / "f.sock")
