"""Long lists of handles: sent in parts that the server accepts, whatever its limit is and however it is learned."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule import AsyncClient, Client, FerruleError, Handle
from ferrule.errors import DeadlineExceededError
from ferrule.types import Append, Lease
from ferrule_client import _leases
from ferrule_client._parts import HandleLimit, Parts
from ferrule_client._status import error_from_status
from ferrule_client._tip import Tip
from ferrule_client.sync._lease import LeaseKeeper
from ferrule_server.addresses import ListenAddress
from ferrule_server.api.limits import ApiLimits
from tests.api.harness import RunningServer
from tests.client.aio_harness import run
from tests.client.fake_server import Failure, FakeServer, status_of, wait_for

INVALID = grpc.StatusCode.INVALID_ARGUMENT
COUNT = 5_000
PROMPT = [1, 2, 3]


def strangers(count: int, instance: str = "test") -> list[Handle]:
    """Return handles that no server gave out."""
    return [Handle(f"{instance}.e1.{number:022d}", 1, bytes(16), instance) for number in range(count)]


def too_many(limit: int | None, field: str = "kv_caches") -> FerruleError:
    """Return the refusal of a list that is too long; None: it does not name the limit."""
    told = {} if limit is None else {"limit": str(limit)}
    return error_from_status(status_of(INVALID, "INVALID_FIELD", field=field, **told))


# ---- cutting --------------------------------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(0, 40), max_size=4),
    assumed=st.integers(1, 50),
    actual=st.integers(1, 50),
    names_limit=st.booleans(),
)
def test_every_handle_is_in_one_accepted_part(counts: list[int], assumed: int, actual: int, names_limit: bool) -> None:
    """Each place comes in order within its instance, whatever the server's limit and whether it names it."""
    handles = [one for number, count in enumerate(counts) for one in strangers(count, f"i{number}")]
    limit = HandleLimit()
    limit.most = assumed
    parts, accepted, num_refused = Parts(handles, limit), dict[str, list[int]](), 0
    for instance, places, messages in parts:
        assert [one.cache_id for one in messages] == [handles[place].cache_id for place in places]
        if len(places) > actual:
            num_refused += 1
            assert parts.shrink(too_many(actual if names_limit else None))
            assert limit.most < len(places)
        else:
            accepted.setdefault(instance, []).extend(places)
    assert sorted(place for places in accepted.values() for place in places) == list(range(len(handles)))
    assert all(places == sorted(places) for places in accepted.values())
    assert parts.is_alone == (len(accepted) == 1)
    assert num_refused <= (1 if names_limit else 6)


@pytest.mark.parametrize(
    ("error", "count", "most"),
    [
        (too_many(7), 512, 7),
        (too_many(7, "release"), 512, 7),
        (too_many(None), 512, 256),
        (too_many(None), 1, None),
        (too_many(512), 512, None),
        (too_many(0), 512, None),
        (too_many(7, "kv_caches[3].cache_id"), 512, None),
        (too_many(7, "items"), 512, None),
        (error_from_status(status_of(INVALID, "REQUEST_TOO_LARGE", num_bytes="9", limit_bytes="8")), 512, 256),
        (error_from_status(status_of(grpc.StatusCode.NOT_FOUND, "HANDLE_UNKNOWN", limit="7")), 512, None),
    ],
)
def test_only_refusals_of_the_length_shrink_the_parts(error: FerruleError, count: int, most: int | None) -> None:
    """None: the same list is not sent again in shorter parts, since that could not help."""
    limit = HandleLimit()
    assert limit.shrink(error, count) == (most is not None)
    assert limit.most == (512 if most is None else most)


# ---- real servers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[None, 7])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A server with the default limit, and one that advertises 7."""
    limits = ApiLimits() if request.param is None else ApiLimits(max_handles_per_request=request.param)
    with RunningServer(limits=limits) as running:
        yield running


def test_5000_caches_are_kept_and_released_by_one_call_each(server: RunningServer) -> None:
    """No handle is left out, in either client; answers are in the order of the list."""
    num_free = server.free_blocks
    with (
        Client(server.address.target) as client,
        client.prefill(PROMPT, keep_alive=False) as trunk,
    ):
        handles = [one.detach() for _ in range(COUNT // 250) for one in trunk.fork(250)]
        leases = client.keep_alive([*handles, *strangers(3)], ttl=100)
        assert [isinstance(one, Lease) for one in leases] == [True] * COUNT + [False] * 3
        released = client.release([*strangers(3), *handles])
        assert released.released == (False,) * 3 + (True,) * COUNT
    assert server.free_blocks == num_free


@pytest.mark.parametrize("advertised", [0, 7, 600])
def test_asyncio_sends_what_the_server_accepts(fake: FakeServer, advertised: int) -> None:
    """Whether it advertises its limit or not; in requests and in frames."""
    fake.max_handles, fake.advertised = advertised or 9, advertised

    async def main() -> None:
        async with AsyncClient(fake.target) as client, client.stream() as stream:
            assert len(await client.keep_alive(strangers(COUNT, "fake"))) == COUNT
            assert len((await client.release(strangers(COUNT, "fake"))).released) == COUNT
            async with client.prefill(PROMPT) as trunk:
                losers = [one for _ in range(4) for one in await trunk.fork(250)]
                await stream.run([Append(trunk, 5)], release=losers)
                assert all(one.is_released for one in losers)
                assert len(fake.sequences) == 1

    run(main())
    assert max(*fake.kept, *fake.ended) == fake.max_handles


def test_a_frame_may_end_more_sequences_than_a_request(server: RunningServer) -> None:
    """They are released before the items of the same step are judged."""
    with (
        Client(server.address.target) as client,
        client.stream() as stream,
        client.prefill(PROMPT) as trunk,
    ):
        losers = [one for _ in range(4) for one in trunk.fork(250)]
        (output,) = stream.run([Append(trunk, 5)], release=losers)
        assert output.handle.length == len(PROMPT) + 1
        assert all(one.is_released for one in losers)
        assert len(list(client.list_caches())) == 1


def test_a_limit_that_shrinks_at_a_restart_is_learned() -> None:
    """The client had asked the first server; the second one refuses what it accepted, and says how many."""
    lists = strangers(600)
    first = RunningServer()
    with first:
        address = first.address
        client = Client(address.target)
        assert len(client.keep_alive(lists)) == 600
        assert client.capabilities().max_handles_per_request == 512
    with RunningServer(limits=ApiLimits(max_handles_per_request=7), listen=_same(address), epoch="b" * 12), client:
        assert len(client.keep_alive(lists)) == 600
        assert client.release(lists).released == (False,) * 600
        with client.prefill(PROMPT) as cache, client.stream() as stream:
            stream.run([Append(cache, 5)], release=cache.fork(20))
            assert len(list(client.list_caches())) == 1


def _same(address: ListenAddress) -> ListenAddress:
    return ListenAddress(address.host, address.port)


# ---- what it costs, and servers that do not say ---------------------------------------------------------------------


def test_short_lists_cost_no_call_besides(fake: FakeServer, fake_client: Client) -> None:
    """The limit is asked for once, and only before a list that is longer than the assumed one."""
    fake.advertised = 2_000
    for count in (0, 1, 512):
        fake_client.keep_alive(strangers(count))
        fake_client.release(strangers(count))
    assert fake.calls["GetCapabilities"] == 0
    for _ in range(3):
        fake_client.release(strangers(2_001))
    assert fake.calls["GetCapabilities"] == 1
    assert fake.ended == [0, 1, 512, *[2_000, 1] * 3]


def _unimplemented(fake: FakeServer) -> None:
    fake.failures["GetCapabilities"] = [Failure(grpc.StatusCode.UNIMPLEMENTED)] * 9


def _broken(fake: FakeServer) -> None:
    fake.failures["GetCapabilities"] = [Failure(grpc.StatusCode.UNAVAILABLE)] * 9


def _hanging(fake: FakeServer) -> None:
    fake.GetCapabilities = lambda *_: time.sleep(3)  # type: ignore[method-assign]


@pytest.mark.parametrize("names_limit", [True, False])
@pytest.mark.parametrize("spoil", [_unimplemented, _broken, _hanging, lambda _: None])
def test_a_server_that_does_not_say_its_limit_is_served(spoil: Callable[[FakeServer], None], names_limit: bool) -> None:
    """The assumed limit is tried, and refusals lower it; the call has time left after the question."""
    with FakeServer() as fake, Client(fake.target, timeout=8) as client:
        spoil(fake)
        fake.max_handles, fake.names_limit = 5, names_limit
        assert len(client.keep_alive(strangers(600))) == 600
        assert client.release(strangers(600)).released == (False,) * 600
        assert max(fake.kept) <= 5
        assert client._connection.handle_limit.most in (4, 5)


# ---- the keep-alive thread ------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew after moments instead of seconds."""
    monkeypatch.setattr(_leases, "_MIN_LEASE_S", 0.15)
    monkeypatch.setattr(_leases, "_MAX_PAUSE_S", 0.05)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("names_limit", [True, False])
def test_leases_are_kept_whatever_the_limit(fake: FakeServer, fake_client: Client, names_limit: bool) -> None:
    """The thread never asks for the limit, which could take the time of a lease; it shrinks while it runs."""
    fake.ttl_s, fake.max_handles, fake.names_limit = 0.3, 6, names_limit
    _hanging(fake)
    caches = [fake_client.prefill(PROMPT) for _ in range(20)]
    wait_for(lambda: sum(fake.kept) >= 60)
    fake.max_handles = 1
    fake.kept.clear()
    wait_for(lambda: len(fake.kept) >= 60)
    assert set(fake.kept) == {1}
    assert fake.calls["GetCapabilities"] == 0
    fake_client.release(caches)


@pytest.mark.usefixtures("quick")
def test_leases_are_kept_by_asyncio_whatever_the_limit(fake: FakeServer) -> None:
    """As by the thread."""

    async def main() -> None:
        async with AsyncClient(fake.target) as client:
            caches = [await client.prefill(PROMPT) for _ in range(20)]
            while sum(fake.kept) < 60:
                await asyncio.sleep(0.01)
            await client.release(caches)

    fake.ttl_s, fake.max_handles = 0.3, 6
    run(main())
    assert max(fake.kept) <= 6
    assert fake.calls["GetCapabilities"] == 0


class FlakyServer:
    """Renews three handles in each request; from the fourth request of a round on it fails twice.

    Attributes:
        renewed: Names of the handles of each request that was answered.
    """

    def __init__(self) -> None:
        self.renewed: list[list[str]] = []
        self._num_failures = 0

    def __call__(self, handles: Sequence[Handle], timeout_s: float) -> list[Lease | FerruleError]:
        """Renew the first ones."""
        if len(self.renewed) == 3 and self._num_failures < 2:
            self._num_failures += 1
            raise DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "hung")
        part = handles[:3]
        self.renewed.append([one.cache_id for one in part])
        return [Lease(300.0, 300.0) for _ in part]


@pytest.mark.usefixtures("quick")
def test_a_request_that_fails_takes_no_time_from_those_that_wait() -> None:
    """What was not renewed comes next, rather than again after what was: no lease waits for ever."""
    server = FlakyServer()
    keeper = LeaseKeeper(server)
    tips = [Tip(handle) for handle in strangers(20)]
    for tip in tips:
        keeper.add(tip)
    wait_for(lambda: all(tip.ttl_s == 300.0 for tip in tips))
    keeper.close()
    first: dict[str, int] = {}
    for number, part in enumerate(server.renewed):
        for name in part:
            first.setdefault(name, number)
    assert [len(part) for part in server.renewed[:3]] == [3, 3, 3]
    assert len(first) == 20
    assert max(first.values()) <= 7  # 20 handles in threes: 7 requests, and one more if not all were there at first


def _names(found: Any) -> list[str]:
    return [tip.handle.cache_id for tip in found]


@given(order=st.permutations(range(8)))
def test_what_is_due_first_is_renewed_first(order: list[int]) -> None:
    """Within an instance; so a list too long for one request begins with the most urgent."""
    tips = [Tip(handle) for handle in strangers(8)]
    due = [(tips[number], float(number)) for number in order]
    ((instance, found),) = _leases.due_groups(due, 3.0, Counter())
    assert (instance, _names(found)) == ("test", _names(tips))
