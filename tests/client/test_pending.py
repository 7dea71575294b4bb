"""Pending tokens: what the server chose is sent first, once, whatever the network does."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import grpc
import pytest

from ferrule import Cache, Client, Policy, greedy, sample
from ferrule.errors import FerruleError, PendingTokenError, UnavailableError
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


def test_a_token_after_other_tokens_is_no_confirmation(client: Client) -> None:
    """Even if value and position are the same: it was chosen in another text."""
    chosen = greedy(mask=[7])
    with client.prefill(PROMPT, policy=chosen) as cache, client.prefill([*PROMPT[:3], 30], policy=chosen) as other:
        token = other.pending
        assert token is not None
        assert (token, other.length) == (cache.pending, cache.length)
        with pytest.raises(PendingTokenError):
            cache.append(token)
        assert held(cache) == PROMPT


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


def test_a_lost_verify_is_decided_again(client: Client, fake: FakeServer) -> None:
    """Without a seed the second call draws other tokens, so what landed of the first one is dropped."""
    for policy, acceptance in ((sample(temperature=30), "exact"), (sample(), "rejection"), (greedy(), "none")):
        with Client(fake.target, max_retries=0) as lossy, lossy.prefill([*b"the"], policy=greedy()) as cache:
            fake.failures["ForwardVerify"] = [LOST]
            with pytest.raises(UnavailableError):
                cache.verify([*b"qu"], policy=policy, acceptance=acceptance)  # type: ignore[arg-type]
            assert (cache.length, cache.pending) == (3, ord(" "))
            cache.append([*b"!"])
            assert bytes(fake.sequences[cache.handle.cache_id]) == b"the !"
            assert cache.token_ids == [*b"the !"]
    with prefilled(client) as cache:
        cache._tip.doubts = frozenset({(int(cache.last.token), 8, 13)})  # as after an answer that did not come
        other = client.adopt(cache.handle, keep_alive=False)
        other.append([int(cache.last.token), 8])
        other.detach()
        cache.verify([8, 13], policy=sample(temperature=30))
        assert held(cache)[:5] == [*PROMPT, cache.token_ids[4]]


def test_a_replacement_in_the_middle_of_a_loop_ends_it(client: Client) -> None:
    """The loop goes on from what is there then, and client and server agree."""
    with client.prefill(PROMPT) as cache:
        loop = cache.generate(30, policy=greedy())
        said = [int(next(loop))]
        cache.append((), pending="drop", policy=greedy(mask=[200]))
        said = [200, *(int(next(loop)) for _ in range(2))]
        loop.close()
        cache.append([40])
        assert held(cache) == [*PROMPT, *said, 40]


def test_a_failed_redraw_changes_nothing(fake: FakeServer) -> None:
    """Also in the middle of a loop, where more stands on the server."""
    fake.tokens_per_frame = 4
    with Client(fake.target, max_retries=0) as client, client.prefill([*b"the"], policy=greedy()) as cache:
        loop = cache.generate(12, policy=greedy())
        said = bytes([next(loop) for _ in range(3)])
        before = cache.length, cache.pending, cache.token_ids
        fake.failures["Decode"] = fake.failures["Prefill"] = [Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="X")]
        with pytest.raises(FerruleError):
            cache.step(greedy(mask=[ord("!")]), redraw=True)
        fake.failures.clear()
        assert (cache.length, cache.pending, cache.token_ids) == before
        cache.append([*b"?"])
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the " + said + b"?"


def test_loops_and_verifies_may_replace_it_too(client: Client) -> None:
    """Or say it twice."""
    with prefilled(client) as cache, cache.fork() as other, cache.fork() as third:
        token = int(cache.last.token)
        with pytest.raises(PendingTokenError):
            list(cache.generate(2, tokens=[token]))
        said = cache.generate(2, tokens=[token, 3], policy=greedy(), pending="send").read().tokens
        assert held(cache) == [*PROMPT, token, token, 3, said[0]]
        said = other.generate(2, tokens=[30], policy=greedy(), pending="drop").read().tokens
        assert held(other) == [*PROMPT, 30, said[0]]
        third.verify([], tokens=[token, 4], pending="send")
        assert held(third) == [*PROMPT, token, token, 4]


def test_steps_go_on_by_the_policy_of_a_verify_and_of_each_branch(client: Client) -> None:
    """Whatever chose the pending token."""
    with client.prefill(PROMPT, policy=greedy(mask=[9])) as cache, client.stream() as stream:
        cache.verify([], policy=greedy(mask=[11]))
        assert cache.step().token == 11
        stream.run([Verify(cache, [], policy=greedy(mask=[12]))])
        assert cache.step().token == 12
        with cache.generate(2, n=3, policy=sample(seed=5)).read().caches as caches:
            seeds = [one.step().seed for one in caches]
            assert seeds == [5, 6, 7]


def test_a_token_that_is_there_already_is_refused(client: Client) -> None:
    """An old object is a mistake; its number may be said again."""
    with prefilled(client) as cache:
        old = cache.last.token
        cache.step(greedy(mask=[(old + 1) % 256]))
        with pytest.raises(ValueError, match="is there already"):
            cache.append(old)
        cache.append(int(old))
        assert held(cache) == [*PROMPT, old, (old + 1) % 256, old]


def test_tokens_of_one_frame_know_their_places(fake: FakeServer, fake_client: Client) -> None:
    """Also after a journey through pickle, where the object is another one."""
    fake.tokens_per_frame = 4
    with fake_client.prefill([*b"the"]) as cache:
        loop = cache.generate(8, policy=greedy())
        for place in range(6):
            token = next(loop)
            assert token.position == cache.last.token.position == 3 + place
        cache.append([pickle.loads(pickle.dumps(token)), *b"!"])
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the quick!"
        assert cache.token_ids == [*b"the quick!"]


def test_a_stale_policy_of_fork_makes_no_branch_of_our_own_draws(client: Client) -> None:
    """What a loop has drawn beyond is dropped, as by any append."""
    with client.prefill(PROMPT) as cache:
        said = int(next(cache.generate(50, policy=greedy())))
        before = cache.handle.handle_id
        cache.append([200], on_stale="fork")
        assert cache.handle.handle_id == before
        assert held(cache) == [*PROMPT, said, 200]
        assert len(list(client.list_caches())) == 1
