"""Pending tokens: what the server chose is sent first, once, whatever the network does."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import grpc
import pytest

from ferrule import Cache, Client, Policy, greedy, sample
from ferrule.errors import DeadlineExceededError, PendingTokenError, UnavailableError
from ferrule.types import Append, Output, Prompt, Token, Verification, Verify
from tests.client.fake_server import Failure, FakeServer

PROMPT = [5, 6, 7, 8]
LOST = Failure(grpc.StatusCode.UNAVAILABLE, after=True)
"""The server does it, and the answer gets lost."""


def held(cache: Cache) -> list[int]:
    """Return what the server holds, which the cache must know."""
    ids = list(cache.info(token_ids=True).token_ids)
    assert cache.token_ids == ids
    return ids


def prefilled(client: Client) -> Cache:
    """A prompt."""
    return client.prefill(PROMPT, policy=greedy())


def appended(client: Client) -> Cache:
    """An append."""
    cache = client.prefill(PROMPT[:2])
    cache.append(PROMPT[2:], policy=greedy())
    return cache


def stepped(client: Client) -> Cache:
    """A step."""
    cache = client.prefill(PROMPT)
    cache.step()
    return cache


def drawn(client: Client) -> Cache:
    """A loop."""
    cache = client.prefill(PROMPT)
    cache.generate(1, policy=greedy()).read()
    return cache


def verified(client: Client) -> Cache:
    """A verify."""
    cache = client.prefill(PROMPT[:3])
    cache.verify([], tokens=PROMPT[3])
    return cache


def streamed(client: Client) -> Cache:
    """A prompt on a stream."""
    with client.stream() as stream:
        (cache,) = stream.run([Prompt(PROMPT, greedy())])
    return cache


def branched(client: Client) -> Cache:
    """A branch on a stream."""
    with client.prefill(PROMPT[:3]) as root, client.stream() as stream:
        other, cache = stream.branch([root, root], [[9], PROMPT[3]], policy=greedy())
        assert other is root
    return cache


WAYS = [prefilled, appended, stepped, drawn, verified, streamed, branched]


@pytest.mark.parametrize("way", WAYS)
def test_whatever_chose_a_token_leaves_it_pending(client: Client, way: Callable[[Client], Cache]) -> None:
    """It is not in the KV cache, and the next append sends it before its own tokens."""
    with client.prefill(PROMPT) as other:
        expected = int(other.step().token)
    with way(client) as cache:
        token = cache.pending
        assert token == expected
        assert isinstance(token, Token)
        assert (token.position, token.lineage) == (4, cache.handle.lineage)
        assert held(cache) == PROMPT
        cache.append([20, 21])
        assert held(cache) == [*PROMPT, expected, 20, 21]
        assert cache.pending is None


@pytest.mark.parametrize("way", WAYS)
def test_the_token_itself_confirms_and_an_equal_int_is_an_error(client: Client, way: Callable[[Client], Cache]) -> None:
    """By value it cannot be known whether the text has it once or twice."""
    with way(client) as cache:
        token = cache.pending
        assert token is not None
        for wrong in (int(token), [int(token), 1]):
            with pytest.raises(PendingTokenError, match=r"pending='send'") as caught:
                cache.append(wrong)
            assert caught.value.token == token
            assert held(cache) == PROMPT
        cache.append([token, 20])
        assert held(cache) == [*PROMPT, token, 20]


def test_a_token_of_another_place_is_no_confirmation(client: Client) -> None:
    """Even if it has the same value: the text may say it twice."""
    with client.prefill(PROMPT, policy=greedy(mask=[7])) as cache:
        first = cache.last.token
        cache.append(first, policy=greedy(mask=[7]))
        with pytest.raises(PendingTokenError):
            cache.append(first)
        cache.append(cache.last.token)
        assert held(cache) == [*PROMPT, 7, 7]


def test_a_token_travels_and_still_confirms(client: Client) -> None:
    """Its place goes with it: through pickle, and into a fork, which takes the pending token along."""
    with prefilled(client) as cache, cache.fork() as branch:
        token = pickle.loads(pickle.dumps(cache.pending))
        assert branch.pending == token
        branch.append([token, 30])
        cache.append([token, 31])
        assert held(branch) == [*PROMPT, token, 30]
        assert held(cache) == [*PROMPT, token, 31]


def test_the_text_may_say_it_twice_or_not_at_all(client: Client) -> None:
    """``send`` sends it first whatever follows, and ``drop`` replaces it."""
    with prefilled(client) as cache, cache.fork() as other:
        token = int(cache.last.token)
        cache.append([token, 1], pending="send")
        assert held(cache) == [*PROMPT, token, token, 1]
        other.append([token, 1], pending="drop")
        assert held(other) == [*PROMPT, token, 1]
        with pytest.raises(ValueError, match="pending must be one of auto, send, drop"):
            other.append(1, pending="keep")  # type: ignore[arg-type]


def test_a_redraw_takes_the_same_row(client: Client) -> None:
    """Best of n needs different first tokens: nothing is appended, and the choice is replaced."""
    policy = sample(temperature=5.0)
    with client.prefill(PROMPT, policy=policy) as cache:
        tokens = {int(cache.step(redraw=True).token) for _ in range(20)}
        assert len(tokens) > 1
        assert held(cache) == PROMPT
        with cache.fork(8, redraw=True) as branches:
            assert {branch.pending for branch in branches} == {None}
            assert len({int(branch.step(policy).token) for branch in branches}) > 1
            assert {tuple(held(branch)) for branch in branches} == {tuple(PROMPT)}


def test_a_redraw_in_the_middle_of_a_loop_is_exact(client: Client) -> None:
    """What the server drew beyond is dropped, and the newest row is the one before the newest token."""
    with client.prefill(PROMPT) as cache:
        loop = cache.generate(30, policy=greedy())
        said = [int(next(loop)) for _ in range(5)]
        other = (said[-1] + 1) % 256
        assert cache.step(greedy(mask=[other]), redraw=True).token == other
        cache.append([40])
        assert held(cache) == [*PROMPT, *said[:-1], other, 40]


def test_step_goes_on_by_the_policy_that_chose_last(client: Client) -> None:
    """Also after a loop; one that chooses nothing is refused."""
    with client.prefill(PROMPT, policy=greedy(mask=[9])) as cache:
        assert [int(cache.step().token) for _ in range(3)] == [9, 9, 9]
        cache.generate(2, policy=greedy(mask=[11])).read()
        assert cache.step().token == 11
        assert cache.step(greedy(mask=[12])).token == 12
        assert cache.step().token == 12
        with pytest.raises(ValueError, match="chooses a token"):
            cache.step(Policy(top_logprobs=1))


def test_a_verify_and_a_loop_send_it_first(client: Client) -> None:
    """So do items of a stream, where an equal int is an error as well."""
    with client.prefill(PROMPT) as other:
        expected = other.generate(6, policy=greedy()).read().tokens
    with prefilled(client) as cache, prefilled(client) as second, client.stream() as stream:
        check = cache.verify(expected[1:3])
        assert (check.accepted_count, int(check.next_token)) == (2, expected[3])
        assert cache.generate(2, policy=greedy()).read().tokens == expected[4:6]
        with pytest.raises(PendingTokenError):
            stream.run([Append(second, expected[0])])
        output, again = stream.run([Append(second, second.last.token, greedy()), Verify(cache, [])])
        assert isinstance(output, Output)
        assert isinstance(again, Verification)
        assert output.token == expected[1]
        assert again.accepted_count == 0
        assert held(second) == [*PROMPT, expected[0]]


def test_a_draft_follows_the_pending_token(client: Client) -> None:
    """The token itself as a draft is a mistake; an equal int may be meant."""
    with prefilled(client) as cache, client.stream() as stream:
        token = cache.last.token
        for call in (lambda: cache.verify([token, 5]), lambda: stream.run([Verify(cache, [token])])):
            with pytest.raises(PendingTokenError):
                call()
        cache.verify([int(token)], acceptance="none")
        assert held(cache) == [*PROMPT, token, token]


def test_text_after_a_pending_token_is_text(fake: FakeServer, fake_client: Client) -> None:
    """Nobody encodes what the server chose, so a text that begins alike says it twice."""
    with fake_client.prefill("the", policy=greedy()) as cache:
        assert cache.pending == ord(" ")
        cache.append(" x")
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the  x"


@pytest.mark.parametrize("rpc", ["Decode", "Prefill"])
def test_a_lost_answer_leaves_it_pending_and_doubles_nothing(fake: FakeServer, rpc: str) -> None:
    """The same call once more is the same append, with the token itself or without."""
    for confirm in (False, True):
        with Client(fake.target, max_retries=0) as client, client.prefill([*b"the"], policy=greedy()) as cache:
            tokens = [] if rpc == "Decode" else [*b"quick"]
            given = [cache.last.token, *tokens] if confirm else tokens
            fake.failures[rpc] = [LOST]
            with pytest.raises(UnavailableError):
                cache.append(given, policy=greedy())
            assert (cache.length, cache.pending) == (3, ord(" "))
            output = cache.append(given, policy=greedy())
            assert output.replayed
            assert bytes(fake.sequences[cache.handle.cache_id]) == b"the " + bytes(tokens)


def test_after_a_lost_answer_it_may_be_replaced(fake: FakeServer) -> None:
    """What landed is dropped, the pending token too."""
    with Client(fake.target, max_retries=0) as client, client.prefill([*b"the"], policy=greedy()) as cache:
        fake.failures["Decode"] = [LOST]
        with pytest.raises(UnavailableError):
            cache.step()
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the "
        cache.append([*b"!!"], pending="drop")
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the!!"


def test_a_redraw_after_a_lost_answer_reads_the_old_row(fake: FakeServer) -> None:
    """And the next append drops what landed."""
    with Client(fake.target, max_retries=0) as client, client.prefill([*b"the"], policy=greedy()) as cache:
        fake.failures["Decode"] = [LOST]
        with pytest.raises(UnavailableError):
            cache.append([*b""], policy=greedy())
        cache.step(sample(seed=1), redraw=True)
        cache.append([*b"x"])
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the x"


def test_retries_of_the_library_send_it_once(fake: FakeServer, fake_client: Client) -> None:
    """By unary calls, on a stream and in a loop."""
    with fake_client.prefill([*b"the"], policy=greedy()) as cache, fake_client.stream() as stream:
        fake.failures["Decode"] = [LOST]
        cache.step()
        fake.failures["append"] = [LOST]
        stream.run([Append(cache, policy=greedy())])
        fake.failures["token"] = [LOST]
        cache.generate(3, policy=greedy()).read()
        assert bytes(fake.sequences[cache.handle.cache_id]) + bytes([cache.pending or 0]) == b"the quick"


def test_a_timeout_leaves_it_pending(fake: FakeServer, fake_client: Client) -> None:
    """As any append that was not answered in time."""
    with fake_client.prefill([*b"the"], policy=greedy()) as cache, fake_client.stream() as stream:
        fake.delay_s = 0.5
        with pytest.raises(DeadlineExceededError) as caught:
            stream.run([Append(cache, policy=greedy())], timeout=0.1)
        assert isinstance(caught.value, TimeoutError)
        fake.delay_s = 0.0
        assert cache.pending == ord(" ")
        cache.step()
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the "
