"""Lost sequences: the error has what it takes to go on, and a cache that recovers does so by itself."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable

import grpc
import pytest

from ferrule import AsyncClient, Cache, Client, FerruleError, HandleNotFoundError, greedy, sample
from ferrule.errors import (
    BlocksExhaustedError,
    DeadlineExceededError,
    DrainingError,
    UnavailableError,
)
from ferrule.types import Append, Output
from ferrule_server.addresses import ListenAddress
from tests.api.harness import RunningServer
from tests.client.fake_server import Failure, FakeServer, threads_named, wait_for
from tests.client.frames import append_all, append_by_stream

CODES = grpc.StatusCode
PROMPT = [*b"the"]


def branch(client: Client, cache: Cache) -> None:
    """Make one child beside the parent, and let it go."""
    with client.stream() as stream:
        client.release(stream.branch([cache, cache], [1, 2], policy=greedy())[1:])


Call = Callable[[Client, Cache], object]
CALLS: dict[str, Call] = {
    "decode": lambda _, cache: cache.append(1, policy=greedy()),
    "several": lambda _, cache: cache.append([1, 2], policy=greedy()),
    "text": lambda _, cache: cache.append("ab"),
    "step": lambda _, cache: cache.step(greedy()),
    "redraw": lambda _, cache: cache.step(greedy(), redraw=True),
    "fork": lambda _, cache: cache.fork().release(),
    "forks": lambda client, cache: client.release(cache.fork(2)),
    "truncate": lambda _, cache: cache.truncate(2),
    "info": lambda _, cache: cache.info(token_ids=True),
    "verify": lambda _, cache: cache.verify([2], tokens=[1], policy=greedy()),
    "generate": lambda _, cache: list(cache.generate(3)),
    "pieces": lambda _, cache: list(cache.generate(3).pieces()),
    "stream": lambda client, cache: append_by_stream(client, [cache], [1], greedy()),
    "branch": branch,
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_on_a_lost_sequence_tells_its_tokens(fake: FakeServer, fake_client: Client, name: str) -> None:
    """What the handle covered, and apart from it what was handed out and not appended yet."""
    with fake_client.prefill(PROMPT) as cache:
        cache.append([*b" qu"])
        (said,) = cache.generate(1)
        fake.lose_all()
        with pytest.raises(HandleNotFoundError) as caught:
            CALLS[name](fake_client, cache)
        assert caught.value.token_ids == [*b"the qu"]
        assert caught.value.pending == (said,)
        assert pickle.loads(pickle.dumps(caught.value)).token_ids == [*b"the qu"]
        assert (cache.length, cache.pending, cache.num_recoveries) == (6, said, 0)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_brings_a_lost_sequence_back(fake: FakeServer, fake_client: Client, name: str) -> None:
    """One prefill of its tokens, as the first one was asked for, and the call as if nothing had been."""
    with fake_client.prefill(PROMPT, ttl=7, publish_prefix=False, recover=True) as cache:
        cache.append([*b" qu"])
        fake.lose_all()
        CALLS[name](fake_client, cache)
        assert cache.num_recoveries == 1
        assert [bytes(prompt.input_ids) for prompt in fake.prompts] == [b"the", b"the qu"]
        first, again = fake.prompts
        assert again.cache == first.cache
        assert not again.logits_policy.ByteSize()
        assert again.request_id not in ("", first.request_id)
        held = fake.sequences[cache.handle.cache_id]
        assert held[:2] == [*b"th"]
        assert cache.token_ids == held[: cache.length]


def test_loop_goes_on_over_losses(fake: FakeServer, fake_client: Client) -> None:
    """A generation that loses its sequence three times says what it would have said."""
    with fake_client.prefill(PROMPT, recover=True) as cache:
        fake.delay_s = 0.02  # so that it is in the middle of the loop
        said = []
        loop = cache.generate(16)
        for token in loop:
            said.append(token)
            if len(said) in (1, 4, 9):
                fake.lose_all()
        assert bytes(said) == b" quick brown fox"
        assert cache.num_recoveries == 3
        assert {request.logits_policy.sample.seed for request in fake.generates} == {loop.seed}
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the quick brown fo"


def test_forks_recover_with_tokens_of_their_own(fake: FakeServer, fake_client: Client) -> None:
    """Each branch knows where it branched and what it appended since."""
    with fake_client.prefill(PROMPT, ttl=7, reserve_length=99, recover=True) as cache:
        cache.append([*b" qu"])
        first, second = cache.fork(length=2, ttl=11), cache.fork()
        append_by_stream(fake_client, [first, second, cache], [1, 2, 3])
        fake.lose_all()
        fake.prompts.clear()
        append_by_stream(fake_client, [first, second, cache], [4, 5, 6])
        assert [one.token_ids for one in (first, second)] == [[*b"th", 1, 4], [*b"the qu", 2, 5]]
        assert [bytes(prompt.input_ids) for prompt in fake.prompts] == [b"th\x01", b"the qu\x02", b"the qu\x03"]
        assert [prompt.cache.ttl.seconds for prompt in fake.prompts] == [11, 7, 7]
        assert [prompt.cache.reserve_length for prompt in fake.prompts] == [0, 0, 99]
        assert all(fake.sequences[one.handle.cache_id] == one.token_ids for one in (first, second, cache))
        fake_client.release([first, second])


def test_beams_recover_their_parent_once(fake: FakeServer, fake_client: Client) -> None:
    """Children of one lost parent come from one new sequence."""
    with fake_client.prefill([1, 2], recover=True) as root, fake_client.stream() as stream:
        fake.lose_all()
        beams = stream.branch([root, root, root], [3, 4, 5])
        assert [one.token_ids for one in beams] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
        assert [fake.sequences[one.handle.cache_id] for one in beams] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
        assert (root.num_recoveries, len(fake.prompts), len(fake.sequences)) == (1, 2, 3)
        fake_client.release(beams[1:])


def test_only_lost_items_are_sent_again(fake: FakeServer, fake_client: Client) -> None:
    """The neighbours of a lost sequence in a frame have their answers already; one that does not recover raises."""
    kept, lost = (fake_client.prefill(PROMPT, recover=True) for _ in range(2))
    with kept, lost, fake_client.prefill(PROMPT) as plain, fake_client.stream() as stream:
        for one in (lost, plain):
            del fake.sequences[one.handle.cache_id]
        items = [Append(cache, token, greedy()) for token, cache in enumerate((kept, lost, plain), 1)]
        first, second, third = stream.run(items, errors="return")
        assert isinstance(first, Output)
        assert isinstance(second, Output)
        assert isinstance(third, HandleNotFoundError)
        assert third.token_ids == PROMPT
        assert [len(frame) for frame in fake.frames] == [3, 1]
        assert (kept.num_recoveries, lost.num_recoveries, plain.length) == (0, 1, 3)


def test_a_call_within_a_frame_recovers_for_the_loop_too(fake: FakeServer, fake_client: Client) -> None:
    """What is left of the frame names the lost sequence, and is not handed out."""
    fake.tokens_per_frame = 4
    with fake_client.prefill(PROMPT, recover=True) as cache:
        loop = cache.generate(8)
        said = [next(loop)]
        fake.lose_all()
        cache.info()
        said += loop
        assert said == [fake.text[(3 + n) % len(fake.text)] for n in range(8)]
        assert cache.num_recoveries == 1
        assert fake.sequences == {cache.handle.cache_id: [*PROMPT, *said[:-1]]}


def test_calls_at_once_recover_once(fake: FakeServer) -> None:
    """Those that only look may run together; the first that has brought the sequence back has done it for all."""

    async def look() -> None:
        async with AsyncClient(fake.target) as client, client.prefill(PROMPT, recover=True) as cache:
            fake.lose_all()
            await asyncio.gather(*(cache.info() for _ in range(3)))
            assert cache.num_recoveries == 1
            assert fake.sequences == {cache.handle.cache_id: PROMPT}

    asyncio.run(look())


def test_recovery_happens_once_per_call(fake: FakeServer, fake_client: Client) -> None:
    """A sequence that is lost again at once is an error, and the next call tries anew."""
    with fake_client.prefill(PROMPT, recover=True) as cache:
        lost = Failure(CODES.NOT_FOUND, reason="HANDLE_EXPIRED")
        fake.failures["Decode"] = [lost, lost]
        with pytest.raises(HandleNotFoundError) as caught:
            cache.append(1)
        assert caught.value.token_ids == PROMPT
        fake.failures["item"] = [lost, lost]
        with pytest.raises(HandleNotFoundError):
            append_by_stream(fake_client, [cache], [1])
        cache.append(1)
        assert cache.num_recoveries == 2
        assert fake.sequences[cache.handle.cache_id] == [*PROMPT, 1]


def test_other_errors_are_not_recovered(fake: FakeServer, fake_client: Client) -> None:
    """A handle of another instance, a stale one, an unknown mask: prefilling again would hide a mistake."""
    with fake_client.prefill(PROMPT, recover=True) as cache:
        for reason, code in (
            ("WRONG_INSTANCE", CODES.ABORTED),
            ("HANDLE_STALE", CODES.ABORTED),
            ("MASK_UNKNOWN", CODES.NOT_FOUND),
        ):
            fake.failures["Decode"] = [Failure(code, reason=reason)]
            with pytest.raises(FerruleError) as caught:
                cache.append(1)
            assert caught.value.reason == reason
        assert cache.num_recoveries == 0


def test_prefill_that_fails_leaves_the_cache_as_it_was(fake: FakeServer, fake_client: Client) -> None:
    """Its error is the call's; later calls recover."""
    with fake_client.prefill(PROMPT, recover=True) as cache:
        fake.lose_all()
        fake.failures["Prefill"] = [Failure(CODES.RESOURCE_EXHAUSTED, "full", reason="KV_BLOCKS_EXHAUSTED")] * 2
        with pytest.raises(BlocksExhaustedError) as caught:
            cache.append(1)
        assert caught.value.__notes__ == [
            "the sequence is lost (HANDLE_UNKNOWN), and this is what prefilling it again failed with"
        ]
        with pytest.raises(BlocksExhaustedError):
            append_by_stream(fake_client, [cache], [1])
        assert (cache.length, cache.num_recoveries) == (3, 0)
        cache.append(1)
        assert (cache.length, cache.num_recoveries) == (4, 1)


def test_another_model_is_not_taken_for_the_same(fake: FakeServer, fake_client: Client) -> None:
    """Equal tokens of another model have another lineage: the caller hears of it, and nothing is left behind."""
    with fake_client.prefill(PROMPT, recover=True) as cache:
        fake.lose_all()
        fake.lineage = b"m" * 16
        with pytest.raises(HandleNotFoundError) as caught:
            cache.append(1)
        assert "another model" in caught.value.__notes__[0]
        assert fake.sequences == {}


def test_adopted_handle_has_no_tokens_until_they_are_asked_for(fake: FakeServer, fake_client: Client) -> None:
    """The sequence's tokens never passed through this client."""
    handle = fake_client.prefill(PROMPT).detach()
    with fake_client.adopt(handle) as cache:
        cache.append(1)
        fake.failures["Decode"] = [Failure(CODES.NOT_FOUND, reason="HANDLE_EXPIRED")]
        with pytest.raises(HandleNotFoundError) as caught:
            cache.append(2)
        assert caught.value.token_ids is None
        cache.info(token_ids=True)
        assert cache.token_ids == [*PROMPT, 1]
        cache.append(2)
        assert cache.token_ids == [*PROMPT, 1, 2]


def test_doubts_end_with_the_sequence(fake: FakeServer, fake_client: Client) -> None:
    """What may have landed on a lost sequence is not on the new one."""
    with fake_client.prefill(PROMPT, recover=True) as cache:
        fake.failures["Prefill"] = [Failure(CODES.DEADLINE_EXCEEDED, "Deadline Exceeded", after=True)]
        with pytest.raises(DeadlineExceededError):
            cache.append([1, 2])
        fake.lose_all()
        cache.append(9)
        assert fake.sequences[cache.handle.cache_id] == [*PROMPT, 9]
        assert cache.num_recoveries == 1


def test_recovery_is_logged_without_secrets(
    fake: FakeServer, fake_client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """One line with both loggable ids; neither tokens nor the handle itself."""
    with fake_client.prefill(PROMPT, recover=True) as cache:
        before = cache.handle
        fake.lose_all()
        with caplog.at_level(logging.INFO, logger="ferrule_client"):
            cache.append(1)
        (line,) = (record.getMessage() for record in caplog.records)
        assert line.startswith(f"recovered handle_id={before.handle_id} as={cache.handle.handle_id} reason=")
        assert before.cache_id not in line


def test_recovered_sequence_is_kept_alive(fake: FakeServer, fake_client: Client) -> None:
    """The keep-alive that had given the lost one up begins again."""
    fake.granted_ttl_s = fake.ttl_s = 0.3
    with fake_client.prefill(PROMPT, recover=True) as cache:
        wait_for(lambda: fake.calls["KeepAlive"] > 0)
        fake.lose_all()
        wait_for(lambda: not list(threads_named("ferrule-keep-alive")))
        cache.append(1)
        num_calls = fake.calls["KeepAlive"]
        wait_for(lambda: fake.calls["KeepAlive"] > num_calls + 1)


def test_draining_server_is_waited_for_by_those_who_recover(fake: FakeServer) -> None:
    """More often than any number of retries; the others hear of it at once."""
    with Client(fake.target, max_retries=0, timeout=20) as client:
        draining = Failure(CODES.UNAVAILABLE, "bye", reason="DRAINING")
        with (
            client.prefill(PROMPT) as plain,
            client.prefill(PROMPT, recover=True) as cache,
            client.stream() as stream,
        ):
            for rpc, call in (("Decode", plain.append), ("frame", lambda token: append_all(stream, [plain], [token]))):
                fake.failures[rpc] = [draining]
                with pytest.raises(DrainingError):
                    call(1)
            fake.failures["Decode"] = fake.failures["frame"] = [draining] * 2
            cache.append(1)
            fake.failures["frame"] = [draining] * 2
            append_all(stream, [cache], [1])
            fake.failures["Decode"] = [draining] * 100
            with pytest.raises(DrainingError):
                cache.append(1, timeout=0.3)


@pytest.fixture
def port() -> int:
    """A port of this machine that nobody uses."""
    with RunningServer() as server:
        return server.address.port


@pytest.mark.parametrize("seed", [None, 7])
def test_loop_survives_the_end_of_its_server(port: int, seed: int | None) -> None:
    """A server ends and a new one starts where it was: the next loop says what it would have said."""
    temperature = 0.0 if seed is None else 0.9
    address = ListenAddress("127.0.0.1", port)
    server = RunningServer(listen=address).__enter__()
    with Client(server.address.target, max_retries=0) as client:
        with client.prefill([5, 6, 7]) as cache:
            expected = list(cache.generate(20, policy=sample(temperature=temperature, seed=seed)))
        with client.prefill([5, 6, 7], recover=True) as cache:
            said = list(cache.generate(9, policy=sample(temperature=temperature, seed=seed)))
            loop = cache.generate(11, policy=sample(temperature=temperature, seed=seed))
            server.__exit__(None, None, None)
            with pytest.raises(UnavailableError):
                client.status()
            with RunningServer(listen=address) as server:
                said += loop
                assert said == expected
                assert cache.num_recoveries == 1
                assert [one.length for one in client.list_caches()] == [cache.length]
                cache.release()


def test_expired_sequence_of_a_real_server_comes_back() -> None:
    """The lease was granted, ran out, and the next call says so, or goes on."""
    with RunningServer() as server, Client(server.address.target) as client:
        plain = client.prefill([1, 2, 3], ttl=7, keep_alive=False)
        branch = plain.fork(ttl=9)
        cache = client.prefill([1, 2, 3], ttl=7, keep_alive=False, recover=True)
        assert [one._tip.ttl_s for one in (plain, branch, cache)] == [7.0, 9.0, 7.0]
        expected = append_by_stream(client, [plain, cache], [4, 4], greedy())[1].token
        server.clock.offset_s += 30.0
        with pytest.raises(HandleNotFoundError) as caught:
            plain.step(redraw=True)
        assert (caught.value.reason, caught.value.token_ids) == ("HANDLE_EXPIRED", [1, 2, 3, 4])
        assert cache.step(redraw=True).token == expected
        assert (cache.num_recoveries, cache._tip.ttl_s) == (1, 7.0)
        assert cache.info(token_ids=True).token_ids == (1, 2, 3, 4)
        client.release([plain, branch, cache])


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("use", ["truncate", "fork", "branches", "redraw", "step", "append"])
def test_a_sequence_may_get_lost_in_the_middle_of_a_frame(fake: FakeServer, use: str, place: int) -> None:
    """Where the handle covers less than was handed out, all of that is brought back."""
    fake.tokens_per_frame = 4
    fake.has_request_ids = True
    with Client(fake.target) as client, client.prefill([*b"the"], recover=True) as cache:
        loop = cache.generate(12, policy=greedy())
        said = b"the" + bytes([next(loop) for _ in range(place)])
        pending = cache.pending
        fake.sequences.clear()
        if use == "truncate":
            cache.truncate(cache.length)
            assert cache.pending is None
        elif use == "fork":
            with cache.fork() as branch:
                assert (bytes(branch.token_ids), branch.pending) == (said[:-1], pending)
        elif use == "branches":
            with cache.fork(2) as branches:
                assert [bytes(one.token_ids) for one in branches] == [said[:-1]] * 2
        elif use == "redraw":
            cache.step(greedy(), redraw=True)
        elif use == "step":
            cache.step(greedy())
        else:
            cache.append([*b"!"])
        tail = {"step": said[-1:], "append": said[-1:] + b"!"}.get(use, b"")
        assert bytes(cache.token_ids) == said[:-1] + tail
        assert bytes(fake.sequences[cache.handle.cache_id])[: cache.length] == said[:-1] + tail
        assert cache.num_recoveries == 1
