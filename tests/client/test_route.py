"""Which instance calls name, and what becomes of them where a proxy does not reach it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
import pytest

from ferrule import AsyncClient, Cache, Client, FerruleError, Handle, greedy
from ferrule.errors import InstanceUnreachableError, UnavailableError, WrongInstanceError
from ferrule.types import Append, Output
from ferrule_client._leases import due_groups
from ferrule_client._route import instance_of_handle
from ferrule_client._tip import Tip
from tests.client.aio_harness import run
from tests.client.fake_server import NO_OWNER, Failure, FakeServer, wait_for
from tests.client.frames import append_all, append_by_stream

PROMPT = [*b"the"]


def make(fake: FakeServer, client: Client, instance: str, **options: bool) -> Cache:
    """Return a cache whose handle names an instance."""
    fake.instance = instance
    return client.prefill(PROMPT, **options)  # type: ignore[arg-type]


@pytest.fixture
def pair(fake: FakeServer, fake_client: Client) -> Iterator[tuple[Cache, Cache]]:
    """A cache on instance a and one on instance b; nothing is known of calls before."""
    caches = make(fake, fake_client, "a"), make(fake, fake_client, "b")
    fake.routes.clear()
    yield caches
    fake.unreachable.clear()
    fake_client.release(caches)


@pytest.mark.parametrize("name", ["", "a b", "a\nb: c", "\u00e4", "x" * 65])
def test_a_name_that_metadata_cannot_carry_is_left_out(name: str) -> None:
    """A handle may come out of a file; nothing of its name can get into the metadata."""
    assert instance_of_handle(Handle("secret", 1, b"l" * 16, name)) == ""
    assert instance_of_handle(Handle("secret", 1, b"l" * 16, "ferrule-a_1")) == "ferrule-a_1"


def test_every_call_on_a_handle_names_its_instance(fake: FakeServer, fake_client: Client) -> None:
    """Those that name no handle name no instance."""
    with make(fake, fake_client, "a", recover=True) as cache:
        cache.append(1)
        cache.append([2, 3])
        cache.verify([4], tokens=[9], policy=greedy())
        list(cache.generate(2))
        cache.info()
        cache.truncate(2)
        branch = cache.fork()
        append_by_stream(fake_client, [cache, branch], [5, 6])
        fake_client.keep_alive([cache])
        fake_client.release([branch])
        fake_client.status()
    on_handles = ("Decode", "Prefill", "ForwardVerify", "Generate", "GetCacheInfo", "TruncateKv", "ForkCache", "frame")
    expected = {(rpc, "a") for rpc in (*on_handles, "KeepAlive", "ReleaseCache")}
    assert set(fake.routes) == {*expected, ("Prefill", None), ("GetStatus", None)}
    assert fake.routes[0] == ("Prefill", None)


def test_a_pinned_client_names_its_instance_where_no_handle_does(fake: FakeServer) -> None:
    """A handle goes before it; the name is checked."""
    with Client(fake.target, instance="b") as client:
        client.status()
        with make(fake, client, "a") as cache:
            cache.append(1)
    assert fake.routes == [("GetStatus", "b"), ("Prefill", "b"), ("Decode", "a"), ("ReleaseCache", "a")]
    for name, error in (("a b", ValueError), ("", ValueError), (7, TypeError)):
        with pytest.raises(error, match="instance"):
            Client(fake.target, instance=name)  # type: ignore[arg-type]


def test_metadata_of_the_caller_travels_with_every_call(fake: FakeServer) -> None:
    """Asked for where the call is made; what the client sets itself stays."""
    seen: list[int] = []

    def extra() -> list[tuple[str, str]]:
        seen.append(threading.get_ident())
        return [("traceparent", f"00-{len(seen)}"), ("authorization", "other"), ("ferrule-instance", "other")]

    with Client(fake.target, token="ours", metadata=extra) as client:
        client.status()
        assert (fake.metadata["traceparent"], fake.metadata["authorization"]) == ("00-1", "Bearer ours")
        with make(fake, client, "a") as cache:
            append_by_stream(client, [cache], [1])
            assert (fake.metadata["traceparent"], fake.metadata["ferrule-instance"]) == ("00-3", "a")
            list(cache.generate(1))
            assert fake.metadata["traceparent"] == "00-4"
    assert set(seen) == {threading.get_ident()}

    async def main() -> None:
        async with AsyncClient(fake.target, metadata=lambda: [("traceparent", "aio")], instance="b") as client:
            await client.status()
            assert (fake.metadata["traceparent"], fake.metadata["ferrule-instance"]) == ("aio", "b")

    run(main())


# ---- several instances in one call ----------------------------------------------------------------------------------


def test_a_call_on_many_handles_is_one_for_each_instance(
    fake: FakeServer, fake_client: Client, pair: tuple[Cache, Cache]
) -> None:
    """Answers come back in the order of the handles."""
    a, b = pair
    leases = fake_client.keep_alive([a, b, a.handle])
    assert len(leases) == 3
    assert not any(isinstance(lease, FerruleError) for lease in leases)
    assert fake.kept[-2:] == [2, 1]
    losers = [make(fake, fake_client, name) for name in "aba"]
    assert fake_client.release(losers).released == (True,) * 3
    with fake_client.stream() as stream:
        outputs = stream.run([Append(b, [1, 2]), Append(a, 3)], release=[b.fork()])
        assert [output.handle.length for output in outputs] == [5, 4]
        assert fake.calls["StreamDecode"] == 2
        append_all(stream, [a, b], [1, 2])
        assert fake.calls["StreamDecode"] == 2
    with pytest.raises(ValueError, match="instances 'a' and 'b'"):
        fake_client.reserve([a, b], 10)
    expected: dict[tuple[str, str | None], int] = {
        **{(rpc, name): 1 for rpc in ("KeepAlive", "ReleaseCache") for name in "ab"},
        **{("frame", name): 2 for name in "ab"},
        ("ForkCache", "b"): 1,
        ("Prefill", None): 3,
    }
    assert Counter(fake.routes) == Counter(expected)


def test_one_instance_that_is_out_of_reach_takes_nothing_from_the_other(
    fake: FakeServer, fake_client: Client, pair: tuple[Cache, Cache]
) -> None:
    """Its handles get the error, with what it takes to prefill them again; the others move."""
    a, b = pair
    fake.unreachable = {"a"}
    lost, lease = fake_client.keep_alive([a, b])
    assert isinstance(lost, InstanceUnreachableError)
    assert not isinstance(lease, FerruleError)
    with fake_client.stream() as stream:
        error, output = stream.run([Append(a, 1), Append(b, 2)], errors="return")
    assert isinstance(error, InstanceUnreachableError)
    assert (error.instance, error.code) == ("a", grpc.StatusCode.UNAVAILABLE)
    assert isinstance(output, Output)
    assert (a.length, b.length) == (3, 4)
    loser = b.fork()
    with pytest.raises(InstanceUnreachableError):
        fake_client.release([make(fake, fake_client, "a"), loser])
    assert loser.handle.cache_id not in fake.sequences


# ---- owners that are gone -------------------------------------------------------------------------------------------


def test_an_owner_out_of_reach_is_a_typed_error_after_the_retries(
    fake: FakeServer, fake_client: Client, pair: tuple[Cache, Cache]
) -> None:
    """Not at the timeout; and once known, at the first attempt."""
    a, _ = pair
    fake.unreachable = {"a"}
    started = time.monotonic()
    with pytest.raises(InstanceUnreachableError, match="cannot reach instance 'a'") as caught:
        a.append(1)
    assert time.monotonic() - started < 5
    assert (caught.value.instance, caught.value.token_ids, caught.value.pending) == ("a", PROMPT, ())
    fake.routes.clear()
    with pytest.raises(InstanceUnreachableError):
        a.append(1)
    assert len(fake.routes) == 1
    fake.unreachable.clear()
    a.append(1)


def test_a_call_without_time_says_nothing_of_its_instance(
    fake: FakeServer, fake_client: Client, pair: tuple[Cache, Cache]
) -> None:
    """Others have the time to find it back."""
    a, _ = pair
    fake.unreachable = {"a"}
    with pytest.raises(FerruleError):
        a.info(timeout=0.02)
    fake.routes.clear()
    with pytest.raises(InstanceUnreachableError):
        a.info()
    assert [rpc for rpc, _ in fake.routes].count("GetCacheInfo") >= 6


@pytest.mark.parametrize("is_renamed", [False, True])
@pytest.mark.parametrize("name", ["decode", "stream", "generate"])
def test_a_cache_that_recovers_goes_on_elsewhere(
    fake: FakeServer, fake_client: Client, name: str, is_renamed: bool
) -> None:
    """It is prefilled again without a name, if its instance is out of reach or the server has another name now."""
    with make(fake, fake_client, "a", recover=True) as cache:
        fake.instance = "b"
        if is_renamed:
            fake.only = "b"
        else:
            fake.unreachable = {"a"}
        if name == "decode":
            cache.append(1)
        elif name == "stream":
            append_by_stream(fake_client, [cache], [1])
        else:
            assert bytes(list(cache.generate(4))) == b" qui"
        assert (cache.num_recoveries, cache.handle.instance) == (1, "b")


def test_wrong_instance_is_sent_once_to_the_one_it_names(fake: FakeServer, fake_client: Client) -> None:
    """Where the id names another one than the server says; not a second time, and not back to the same."""
    with make(fake, fake_client, "a") as cache:
        fake.failures["Decode"] = [told("b")]
        cache.append(1)
        assert fake.routes[-2:] == [("Decode", "a"), ("Decode", "b")]
        for failures in ([told("b"), told("c")], [told("a")]):
            fake.failures["Decode"] = list(failures)
            with pytest.raises(WrongInstanceError):
                cache.append(2)
            assert fake.failures["Decode"] == []


def told(instance: str) -> Failure:
    """Return the refusal of a server that says whose the handle is."""
    return Failure(grpc.StatusCode.ABORTED, "elsewhere", reason="WRONG_INSTANCE", metadata=(("instance", instance),))


def test_an_instance_that_is_no_longer_there_is_a_loss(fake: FakeServer, fake_client: Client) -> None:
    """The call named it, and whoever got it says that it is another's: recovered, if that was asked for."""
    with make(fake, fake_client, "a", recover=True) as cache, make(fake, fake_client, "a") as plain:
        fake.failures["Decode"] = [told("a")] * 2
        fake.instance = "b"
        with pytest.raises(WrongInstanceError):
            plain.append(1)
        cache.append(1)
        assert (cache.num_recoveries, cache.handle.instance) == (1, "b")


def test_a_pinned_client_at_another_server_is_told(fake: FakeServer) -> None:
    """Once, with both names; nothing was done."""
    fake.only = "a"
    with Client(fake.target, instance="b") as client:
        calls: tuple[Callable[[], object], ...]
        calls = (client.status, lambda: client.prefill(PROMPT), lambda: client.keep_alive([]))
        for call in calls:
            with pytest.raises(WrongInstanceError) as caught:
                call()
            assert (caught.value.instance, caught.value.metadata["answered_by"]) == ("b", "a")
    assert fake.prompts == []


def test_a_server_that_goes_by_another_name_is_quiet_about_what_it_had(fake: FakeServer, fake_client: Client) -> None:
    """Leases and releases as if the sequences had gone; appends say why, each to its own cache."""
    caches = [make(fake, fake_client, "a") for _ in range(3)]
    with make(fake, fake_client, "a"):
        fake.only = fake.instance = "b"
        assert [type(one) for one in fake_client.keep_alive(caches)] == [WrongInstanceError] * 3
        with fake_client.stream() as stream:
            items = [Append(cache, token) for token, cache in enumerate(caches[:2], 1)]
            errors = stream.run(items, errors="return", release=[caches[2]])
        assert [type(one) for one in errors] == [WrongInstanceError] * 2
        with pytest.raises(WrongInstanceError):
            caches[0].append(1)
        with fake_client.stream() as stream, make(fake, fake_client, "b") as there:
            error, output = stream.run([Append(caches[0], 1), Append(there, 2)], errors="return")
            assert isinstance(error, WrongInstanceError)
            assert isinstance(output, Output)
    assert fake_client.release(caches[:2]).released == (False, False)
    assert caches[2].release().released == (False,)


def test_a_proxy_without_any_server_is_named(fake: FakeServer) -> None:
    """It is not taken for a server that nobody started."""
    with Client(fake.target, max_retries=0) as client:
        for text in (NO_OWNER, "no healthy upstream"):
            fake.failures["GetStatus"] = [Failure(grpc.StatusCode.UNAVAILABLE, text)]
            with pytest.raises(UnavailableError, match=r"the proxy at .* reaches no server") as caught:
                client.status()
            assert caught.value.reason == "CONNECTION_FAILED"
        cut = Failure(grpc.StatusCode.UNAVAILABLE, NO_OWNER.replace("remote connection failure", "connection reset"))
        fake.failures["GetStatus"] = [cut]
        with pytest.raises(UnavailableError) as caught:
            client.status()
        assert caught.value.reason == "CONNECTION_LOST"


def test_a_stream_that_ended_while_idle_is_opened_again(fake: FakeServer, fake_client: Client) -> None:
    """A server that drained ends it, and the next frame goes to that server's next run."""
    with make(fake, fake_client, "a") as cache, fake_client.stream() as stream:
        append_all(stream, [cache], [1])
        (call,) = stream._calls.values()
        call._call.cancel()
        wait_for(lambda: call.is_over)
        append_all(stream, [cache], [2])
        assert fake.calls["StreamDecode"] == 2


# ---- leases ---------------------------------------------------------------------------------------------------------


def tip_on(instance: str) -> Tip:
    """Return a sequence of an instance."""
    return Tip(Handle("secret", 1, b"l" * 16, instance))


def test_leases_of_a_failing_instance_come_last() -> None:
    """All of an instance as soon as one of it is due, and nothing of the others."""
    tips = {name: tip_on(name[0]) for name in ("a1", "a2", "b1", "c1")}
    due = {tips["a1"]: 5.0, tips["a2"]: 99.0, tips["b1"]: 4.0, tips["c1"]: 99.0}
    groups = due_groups(due.items(), 5.0, Counter({"a": 2}))
    assert groups == [("b", [tips["b1"]]), ("a", [tips["a1"], tips["a2"]])]
