"""Two servers behind a real Envoy with the shipped configuration: whatever happens, handles reach their owner.

Servers have flags of their own, which are quick; what must hold of docker-compose.yml as well runs on both.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import yaml

from ferrule import Cache, Client, FerruleError, Policy, greedy, sample
from ferrule.errors import AuthError, EpochChangedError, InstanceUnreachableError, UnavailableError, WrongInstanceError
from ferrule.types import Append, Output, Prompt
from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc
from ferrule_client._convert import handle_to_message
from ferrule_client._status import error_from_call
from tests.chaos.raw_clients import open_channel
from tests.stack.fleet import NAMES, A, B, OwnFleet, Worker, connect, owner, status_of
from tools.compose.envoy import CONFIG, EnvoyProcess, validate

pytestmark = pytest.mark.timeout(120)

NUM_HANDLES = 1000
HEALTH_S = 5.0
"""Two failed checks, a second apart, and their time on a busy machine."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnFleet]:
    """One for all tests of this file; who ends a server starts it again."""
    with OwnFleet(tmp_path_factory.mktemp("scale")) as running:
        yield running


@pytest.fixture
def client(stack: OwnFleet) -> Iterator[Client]:
    """A client of the proxy."""
    with stack.client() as one:
        yield one


def prompt(number: int) -> list[int]:
    """Return a prompt that no other number has."""
    return [number % 251, number // 251 + 7, 5]


def make_on(client: Client, name: str, tokens: Sequence[int] = (5, 6, 7), **options: object) -> Cache:
    """Return a cache on an instance, made by prompts through the proxy until one lands there."""
    for _ in range(100):
        cache = client.prefill(tokens, **options)  # type: ignore[arg-type]
        if owner(cache) == name:
            return cache
        cache.release()
    raise AssertionError(f"of 100 prompts none came to {name}")


def picked(endpoint: str) -> list[tuple[str, str | bytes]]:
    """Return what a picker sends along with a new prompt."""
    return [("x-gateway-destination-endpoint", endpoint)]


def likeliest_after(target: str, texts: Sequence[Sequence[int]]) -> list[set[int]]:
    """Return the likeliest token after each text, by a server that is asked directly, and all that are so near."""
    with Client(target) as direct, direct.stream() as stream:
        found = []
        for start in range(0, len(texts), 50):
            for cache in stream.run([Prompt(text, greedy(top_logprobs=4)) for text in texts[start : start + 50]]):
                best, *others = cache.last.top_logprobs[0]
                found.append({best.token, *(one.token for one in others if one.logprob == best.logprob)})
                cache.release()
        return found


# ---- affinity -------------------------------------------------------------------------------------------------------


def test_every_append_of_a_thousand_handles_reaches_its_owner(stack: OwnFleet) -> None:
    """By the owners' own counts, and because every token is what the text before it makes likeliest."""
    with connect(stack.target) as client:
        caches = [client.prefill(prompt(number), keep_alive=False) for number in range(NUM_HANDLES)]
        try:
            check_appends(stack, client, caches)
        finally:
            freed = client.release(caches)
        assert freed.released == (True,) * NUM_HANDLES


def check_appends(stack: OwnFleet, client: Client, caches: list[Cache]) -> None:
    """Append to all, one by one and together, and ask the owners how many appends came."""
    owners = Counter(map(owner, caches))
    assert min(owners[A], owners[B]) > NUM_HANDLES // 5, f"new prompts do not spread: {owners}"
    before = status_of(stack)
    with client.stream() as stream:
        outputs = stream.run([Append(cache, 1, greedy()) for cache in caches])
        for cache, output in zip(caches[:100], outputs[:100], strict=True):
            cache.append(output.token, policy=greedy())
        items = [Append(cache, 9, greedy(), pending="drop") for cache in caches[100:164]]
        assert all(isinstance(result, Output) for result in stream.run(items, errors="return"))
    sent = owners + Counter(map(owner, caches[:164]))
    after = status_of(stack)
    assert {name: after[name].num_decodes - before[name].num_decodes for name in NAMES} == sent
    assert {name: after[name].num_errors - before[name].num_errors for name in NAMES} == {A: 0, B: 0}
    texts = [[*prompt(number), 1] for number in range(NUM_HANDLES)]
    likeliest = likeliest_after(stack.targets[B], texts)
    assert all(output.token in tokens for output, tokens in zip(outputs, likeliest, strict=True))
    assert sum(map(len, likeliest)) < 1.3 * NUM_HANDLES, "everything is near a tie"


def test_calls_on_many_handles_are_put_together_again(stack: OwnFleet, client: Client) -> None:
    """Leases, frames with releases, chunks and batches over both; what must be one call says what is wrong."""
    on_a, on_b, loser = make_on(client, A), make_on(client, B), make_on(client, A)
    assert [lease.ttl_s for lease in client.keep_alive([on_b, on_a, loser]) if not isinstance(lease, Exception)] == [
        60.0
    ] * 3
    with client.stream() as stream:
        ranked = Policy(top_logprobs=1)
        outputs = stream.run([Append(on_b, [1, 2], ranked), Append(on_a, 1, ranked)], release=[loser])
        assert [output.handle.length for output in outputs] == [5, 4]
        children = stream.branch([on_a, on_a, on_b, on_b], [1, 2, 1, 2])
        assert list(map(owner, children)) == [A, A, B, B]
    assert loser.is_released
    with pytest.raises(ValueError, match="'ferrule-a' and 'ferrule-b'"):
        client.reserve([on_a, on_b], 100)
    assert client.release([children[3], on_a, children[1], on_b]).released == (True,) * 4


def test_new_sequences_of_a_stream_go_where_it_is(client: Client) -> None:
    """Pieces of prompts beside appends are one frame, as with one server; alone they open no second call."""
    with make_on(client, B) as on_b, client.stream() as stream:
        first, moved = stream.run([Prompt([1, 2]), Append(on_b, 1, greedy())])
        second, third = stream.run([Prompt([3, 4]), Prompt([5, 6])])
        assert isinstance(moved, Output)
        made = [one for one in (first, second, third) if isinstance(one, Cache)]
        assert [owner(one) for one in made] == [B] * 3
        assert stream.num_frames == 2
        client.release(made)
    with client.stream() as stream:
        (fresh,) = stream.run([Prompt([1, 2])])
        stream.run([Append(fresh, 3)])
        assert list(stream._calls) == [owner(fresh)]
        fresh.release()


def test_masks_are_known_where_they_are_used(client: Client) -> None:
    """Registered once, anywhere; each instance is given them when it needs them, and new prompts take them along."""
    mask = client.register_mask([3, 4])
    with make_on(client, A) as on_a, make_on(client, B) as on_b, client.stream() as stream:
        outputs = stream.run([Append(cache, 1, greedy(mask=mask)) for cache in (on_a, on_b)])
        assert {output.token for output in outputs} <= {3, 4}
        for cache in (on_a, on_b):
            assert cache.append(1, policy=greedy(mask=mask), pending="drop").token in (3, 4)
    for _ in range(10):
        with client.prefill([1, 2], policy=greedy(mask=mask)) as cache:
            assert cache.last.token in (3, 4)


def test_a_client_may_be_of_one_instance(stack: OwnFleet) -> None:
    """What names no handle goes there; without a name, administration is refused by the proxy."""
    for name, server in stack.servers.items():
        with stack.client(instance=name) as pinned:
            caches = [pinned.prefill([number]) for number in range(5)]
            assert {owner(cache) for cache in caches} == {name}
            assert pinned.status().live_sequences == server.status().live_sequences
            assert pinned.admin.warmup([1]).batch_sizes
            pinned.release(caches)
    with stack.client() as client, pytest.raises(AuthError, match="ferrule-instance"):
        client.admin.drain()


# ---- what others may try --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [B, "nowhere", "executors", "admin", "ferrule-a,ferrule-b", "ferrule-aa", ""])
def test_a_forged_instance_leads_to_no_wrong_answer(stack: OwnFleet, client: Client, name: str) -> None:
    """Whichever server it comes to says that it is not the one; the owner, too, when it is called by another name."""
    with make_on(client, A) as cache, open_channel(stack.envoy.target) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        request = cache_pb2.GetCacheInfoRequest(kv_cache=handle_to_message(cache.handle))
        for _ in range(8):
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetCacheInfo(request, metadata=(("ferrule-instance", name),), timeout=10)
            ours = error_from_call(caught.value)
            assert isinstance(ours, WrongInstanceError), ours
            assert ours.instance == (A if name == B else name)


def test_clients_cannot_choose_the_server_of_a_new_prompt(stack: OwnFleet) -> None:
    """The header of a picker is taken away when a client sends it."""
    endpoint = f"127.0.0.1:{stack.servers[B].port}"
    with stack.client(metadata=functools.partial(picked, endpoint)) as client:
        caches = [client.prefill([number]) for number in range(30)]
        assert {owner(cache) for cache in caches} == {A, B}
        client.release(caches)


def test_a_picker_can_choose_the_server_of_a_new_prompt(stack: OwnFleet, tmp_path: Path) -> None:
    """Behind the filter that takes the header away it would stand; here that filter is taken out."""
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    assert "header_mutation" in manager["http_filters"].pop(0)["name"]
    source = tmp_path / "open.yaml"
    source.write_text(yaml.safe_dump(config), "utf-8")
    ports = {name: server.port for name, server in stack.servers.items()}
    with EnvoyProcess(tmp_path, ports, source) as envoy:
        envoy.wait_for_healthy(set(ports.values()))
        for name in NAMES:
            endpoint = f"127.0.0.1:{ports[name]}"
            with Client(envoy.target, metadata=functools.partial(picked, endpoint)) as client:
                caches = [client.prefill([number]) for number in range(10)]
                assert {owner(cache) for cache in caches} == {name}
                client.release(caches)


def test_envoy_takes_the_shipped_configuration() -> None:
    """As it is, without a word about what is deprecated."""
    assert validate(CONFIG) == ""


def test_only_figures_of_the_admin_interface_are_published(stack: OwnFleet) -> None:
    """Prometheus and health checks need two paths; nothing else of it can be reached from outside."""
    get = stack.envoy.get_published
    assert "envoy_cluster_upstream_rq_total" in get("/stats/prometheus")
    assert get("/ready").strip() == "LIVE"
    assert [get(path) for path in ("/config_dump", "/quitquitquit", "/stats/../config_dump", "/")] == ["404"] * 4
    assert get("/ready", method="POST") == "404"


# ---- the end of a server --------------------------------------------------------------------------------------------


def test_handles_of_a_killed_owner_are_typed_errors_and_others_go_on(stack: OwnFleet, client: Client) -> None:
    """Nobody answers in its place. New prompts go to the one that lives; caches that recover, too."""
    on_a, on_b, text = make_on(client, A), make_on(client, B), [5, 6, 7, 1]
    again = make_on(client, A, recover=True)
    loop = make_on(client, A, recover=True)
    with loop.fork() as copy:
        undisturbed = list(copy.generate(400, policy=sample(temperature=0.9, seed=3)))
    said = loop.generate(400, policy=sample(temperature=0.9, seed=3))
    begun = [next(said) for _ in range(3)]
    stack.servers[A].kill()
    started = time.monotonic()
    with pytest.raises(InstanceUnreachableError) as caught:
        on_a.decode(1, policy=greedy())
    assert (caught.value.instance, caught.value.token_ids) == (A, [5, 6, 7])
    with client.stream() as stream:
        results = stream.run([Append(on_a, 1, greedy()), Append(on_b, 1, greedy())], errors="return")
    assert isinstance(results[0], InstanceUnreachableError)
    assert isinstance(results[1], Output)
    assert {results[1].token} == likeliest_after(stack.servers[B].target, [text])[0]
    lease, other = client.keep_alive([on_a, on_b])
    assert isinstance(lease, UnavailableError)
    assert not isinstance(other, FerruleError)
    assert time.monotonic() - started < 6, "a dead owner took others' time"
    assert again.decode(1, policy=greedy()).token == results[1].token
    assert (owner(again), again.num_recoveries) == (B, 1)
    assert begun + list(said) == undisturbed
    assert (owner(loop), loop.num_recoveries) == (B, 1)
    for number in range(20):
        client.prefill([number]).release()
    assert stack.envoy.wait_for_healthy({stack.servers[B].port}) < HEALTH_S
    stack.servers[A].start()
    with pytest.raises(EpochChangedError):
        on_a.decode(1, timeout=20)
    stack.wait_for_all()
    with pytest.raises(EpochChangedError):
        on_a.append(())
    client.release([on_a, on_b, again, loop])


def test_with_no_server_left_the_proxy_says_so(stack: OwnFleet) -> None:
    """Within the retries, not at the timeout; and a cache that recovers waits for one."""
    with stack.client() as client, make_on(client, A) as cache, make_on(client, A, recover=True) as again:
        for server in stack.servers.values():
            server.kill()
        with pytest.raises(UnavailableError, match="reaches no server"):
            client.prefill([1])
        with pytest.raises(InstanceUnreachableError):
            cache.decode(1)
        starting = threading.Timer(0.5, stack.servers[B].start)
        starting.start()
        again.decode(1)
        starting.join()
        assert owner(again) == B
        stack.servers[A].start()
        stack.wait_for_all()


def test_a_rolling_restart_under_load_fails_nothing(stack: OwnFleet) -> None:
    """A drained server serves its handles to their end; new prompts go elsewhere, also before Envoy knows."""
    stop = threading.Event()
    workers = [Worker(stack.target, number, stop) for number in range(8)]
    for worker in workers:
        worker.start()
    try:
        for name in NAMES:
            time.sleep(0.3)
            before = {worker: worker.owners[name] for worker in workers}
            assert stack.end(name) == 0, "it did not end by itself within the grace"
            late = sum(worker.owners[name] - before[worker] for worker in workers)
            assert late <= len(workers), "new prompts still came to a server that drains"
            stack.start(name)
            stack.wait_for_all()
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert [failure for worker in workers for failure in worker.failures] == []
    assert sum(worker.appends for worker in workers) > 500
    assert all(sum(worker.owners[name] for worker in workers) > 0 for name in NAMES)
    assert {status.live_sequences for status in status_of(stack).values()} == {0}


def test_handles_are_served_while_every_server_drains(stack: OwnFleet) -> None:
    """Long after Envoy has found them unhealthy: what it knows of their health has no say in where handles lead."""
    with stack.client(max_retries=1) as client, client.stream() as kept:
        caches = [make_on(client, name) for name in NAMES]
        for server in stack.servers.values():
            server.process.send_signal(signal.SIGTERM)
        stack.envoy.wait_for_healthy(set())
        end = time.monotonic() + 4  # twice what two failed checks take
        while time.monotonic() < end:
            with client.stream() as fresh:
                fresh.run([Append(cache, 1) for cache in caches])
            kept.run([Append(cache, 1) for cache in caches])
            assert all(not isinstance(lease, FerruleError) for lease in client.keep_alive(caches))
            time.sleep(0.2)
        with pytest.raises(UnavailableError):
            client.prefill([1])
        assert client.release(caches).released == (True, True)
    for server in stack.servers.values():
        assert server.process.wait(20) == 0
        server.stop()
        server.channel.close()
        server.start()
    stack.wait_for_all()


def test_a_call_without_a_body_reaches_a_server_too(stack: OwnFleet) -> None:
    """GetStatus and the health service by the proxy, as orchestrators ask."""
    with stack.client() as client:
        assert client.admin.health()
        assert client.wait_until_ready().is_ready
        with open_channel(stack.envoy.target) as channel:
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            assert stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=5).status.is_ready
