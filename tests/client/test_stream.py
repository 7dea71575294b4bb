"""Packed streams: many caches, one frame."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence

import grpc
import pytest

from ferrule import Cache, Client, FerruleError, HandleNotFoundError, Policy, greedy, sample
from ferrule.errors import (
    CallCancelledError,
    ContextExceededError,
    DeadlineExceededError,
    TokenOutOfVocabError,
)
from ferrule.types import Append, Output, Prompt, Tokens
from tests.api.harness import RunningServer
from tests.client.fake_server import Failure, FakeServer, threads_named, wait_for
from tests.fakes import FakeExecutor


def appends(caches: Sequence[Cache], tokens: Sequence[Tokens], policy: Policy | None = None) -> list[Append[Cache]]:
    """Return one append for each cache."""
    return [Append(cache, one, policy) for cache, one in zip(caches, tokens, strict=True)]


def test_packed_steps_equal_single_decodes(client: Client) -> None:
    """Three branches in one frame per step draw what each draws alone."""
    with client.prefill([5, 6, 7]) as cache:
        singles, branches = cache.fork(3), cache.fork(3)
        alone = [list(branch.generate(6, policy=sample(seed=seed))) for seed, branch in enumerate(singles)]
        policies = [sample(seed=seed) for seed in range(3)]
        with client.stream() as stream:
            together: list[list[int]] = [[], [], []]
            for _ in range(6):
                steps = [Append(branch, policy=policy) for branch, policy in zip(branches, policies, strict=True)]
                for tokens, output in zip(together, stream.run(steps), strict=True):
                    tokens.append(output.token)
            assert stream.num_frames == 6
            assert stream.free_blocks is not None
        assert together == alone
        client.release([*singles, *branches])


def test_a_frame_of_one_thread_does_not_wait_for_that_of_another() -> None:
    """Two threads with a stream each of one client: each has the time it asked for."""
    executor = FakeExecutor()
    with RunningServer(executor) as server, Client(server.address.target, timeout=10) as client:
        first, second = (client.prefill([n]) for n in (1, 2))
        executor.gate = threading.Event()
        executor.is_waiting.clear()
        with client.stream() as stream, client.stream() as other:
            slow = threading.Thread(target=stream.run, args=([Append(first, 5)],))
            slow.start()
            assert executor.is_waiting.wait(10)
            with pytest.raises(DeadlineExceededError):
                other.run([Append(second, 6)], timeout=0.2)
            assert slow.is_alive()
            executor.gate.set()
            slow.join(10)
        assert first.length == second.append([6]).handle.length == 2
        client.release([first, second])


def test_results_come_in_the_order_of_the_caches(fake: FakeServer, fake_client: Client) -> None:
    """The server may answer in any order; the fake answers backwards."""
    caches = [fake_client.prefill([*b"x"] * n) for n in range(1, 6)]
    with fake_client.stream() as stream:
        outputs = stream.run(appends(caches, [1, 2, 3, 4, [5, 5]], greedy()))
        assert [output.handle.length for output in outputs] == [2, 3, 4, 5, 7]
        assert [output.token for output in outputs] == [fake.text[length] for length in (2, 3, 4, 5, 7)]
        assert [cache.length for cache in caches] == [2, 3, 4, 5, 7]
        stream.run(appends(caches, [output.token for output in outputs]))
        assert [cache.length for cache in caches] == [3, 4, 5, 6, 8]
    assert [len(frame) for frame in fake.frames] == [5, 5]
    assert fake.calls["StreamDecode"] == 1
    fake_client.release(caches)


def test_one_bad_item_leaves_its_neighbours_alone(fake: FakeServer, fake_client: Client) -> None:
    """The error says which cache it was; the others have moved."""
    caches = [fake_client.prefill([*b"abc"]) for _ in range(3)]
    del fake.sequences[caches[1].handle.cache_id]
    with fake_client.stream() as stream:
        first, second, third = stream.run(appends(caches, [1, 2, 3]), errors="return")
        assert isinstance(first, Output)
        assert isinstance(second, HandleNotFoundError)
        assert isinstance(third, Output)
        with pytest.raises(HandleNotFoundError) as caught:
            stream.run(appends(caches, [1, 2, 3]))
    assert "item 1 of 3" in caught.value.__notes__[0]
    assert [cache.length for cache in caches] == [5, 3, 5]
    fake_client.release(caches)


def test_one_bad_item_costs_no_further_call(fake: FakeServer, fake_client: Client) -> None:
    """Where no sequence was made there is none to release."""
    with fake_client.prefill([1]) as cache, fake_client.stream() as stream:
        fake.failures["item"] = [Failure(grpc.StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD")]
        with pytest.raises(FerruleError):
            stream.run([Append(cache, 5)])
        assert fake.calls["ReleaseCache"] == 0


def test_a_dropped_mask_is_registered_once_for_all_items(fake: FakeServer, fake_client: Client) -> None:
    """However many need it."""
    policy = greedy(mask=fake_client.register_mask([1, 2, 3]))
    with fake_client.prefill([1]) as cache, cache.fork(6) as branches, fake_client.stream() as stream:
        fake.failures["item"] = [Failure(grpc.StatusCode.NOT_FOUND, reason="MASK_UNKNOWN")] * 6
        assert len(stream.run([Append(one, 5, policy) for one in branches])) == 6
        assert fake.calls["RegisterTokenMask"] == 2


def test_release_travels_with_the_frame(client: Client) -> None:
    """Losers go and winners move in one round trip."""
    with client.prefill([5, 6, 7]) as cache, client.stream() as stream:
        winner, *losers = cache.fork(3)
        stream.run([Append(winner, 9)], release=losers)
        assert all(loser.is_released for loser in losers)
        assert len(list(client.list_caches())) == 2
        stream.run([], release=[winner])
        assert len(list(client.list_caches())) == 1


def test_failed_frame_leaves_the_losers_ours(fake: FakeServer, fake_client: Client) -> None:
    """What was not certainly released is still released by its ``with``."""
    with fake_client.prefill([1]) as cache, fake_client.stream() as stream:
        with fake_client.prefill([2]) as loser:
            fake.failures["frame"] = [Failure(grpc.StatusCode.DATA_LOSS)]
            with pytest.raises(FerruleError):
                stream.run([Append(cache, 3)], release=[loser])
            assert not loser.is_released
        assert len(fake.sequences) == 1


def test_broken_stream_sends_only_what_was_not_answered(fake: FakeServer, fake_client: Client) -> None:
    """A frame whose reply was lost is sent again and replayed: nothing is doubled."""
    caches = [fake_client.prefill([*b"abc"]) for _ in range(2)]
    fake.failures["frame"] = [Failure(grpc.StatusCode.UNAVAILABLE, after=True)]
    with fake_client.stream() as stream:
        outputs = stream.run(appends(caches, [1, 2], greedy()))
    assert [output.replayed for output in outputs] == [True, True]
    assert [fake.sequences[cache.handle.cache_id][3:] for cache in caches] == [[1], [2]]
    fake_client.release(caches)


def test_misuse_is_said_before_anything_is_sent(fake: FakeServer, fake_client: Client) -> None:
    """A cache can be in a frame only once, and each item must be one, with arguments in their range."""
    with fake_client.prefill([*b"abc"]) as cache, fake_client.stream() as stream:
        with pytest.raises(ValueError, match="once"):
            stream.run(appends([cache, cache], [1, 2]))
        with pytest.raises(TypeError, match="an item is a Prompt, an Append or a Verify, got Cache"):
            stream.run([Append(cache, 1), cache])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="on_stale"):
            stream.run([Append(cache, 1, on_stale="panic")])  # type: ignore[arg-type,list-item]
        with pytest.raises(ValueError, match="errors must be one of raise, return"):
            stream.run([Append(cache, 1)], errors="ignore")  # type: ignore[call-overload]
        assert fake.frames == []


def test_closed_stream_refuses(fake_client: Client) -> None:
    """After close, and after the client's close, there is one clear error."""
    with fake_client.prefill([*b"abc"]) as cache:
        stream = fake_client.stream()
        stream.run([Append(cache, 1)])
        stream.close()
        stream.close()
        with pytest.raises(CallCancelledError, match="closed"):
            stream.run([Append(cache, 1)])
    fake_client.close()
    with pytest.raises(FerruleError, match="closed"):
        fake_client.status()


def test_forgotten_stream_leaves_no_thread(fake_client: Client) -> None:
    """A stream that nobody closed ends with its object."""
    with fake_client.prefill([*b"abc"]) as cache:
        stream = fake_client.stream()
        stream.run([Append(cache, 1)])
        del stream
        gc.collect()
        wait_for(lambda: not list(threads_named("ferrule-stream")))


def test_beams_branch_in_one_frame(client: Client) -> None:
    """The first place moves the parent, the others are new caches, and each holds its own text."""
    wanted = Policy(top_logprobs=6)
    with client.prefill([5, 6, 7], policy=wanted) as root, client.stream() as stream:
        beams = stream.branch([root, root, root], [1, 2, [3, 4]], policy=wanted)
        assert beams[0] is root
        texts = [list(beam.info(token_ids=True).token_ids) for beam in beams]
        assert texts == [[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 7, 3, 4]]
        assert all(len(beam.last.top_logprobs[0]) == 6 for beam in beams)
        first, loser, third = beams
        after = stream.branch([third, first, first], [9, 8, 7], policy=wanted, release=[loser])
        assert list(after[:2]) == [third, first]
        assert loser.is_released
        texts = [list(beam.info(token_ids=True).token_ids) for beam in after]
        assert texts == [[5, 6, 7, 3, 4, 9], [5, 6, 7, 1, 8], [5, 6, 7, 1, 7]]
        with client.prefill([5, 6, 7, 1, 7], policy=wanted) as alone:
            assert after[2].last.top_logprobs == alone.last.top_logprobs
        client.release([third, after[2]])


def test_branches_take_the_pending_token_along(client: Client) -> None:
    """After a loop each child begins with the loop's last token."""
    with client.prefill([5, 6, 7]) as root, client.stream() as stream:
        (said,) = root.generate(1, policy=greedy())
        _, other = stream.branch([root, root], [1, 2])
        with other:
            assert list(other.info(token_ids=True).token_ids) == [5, 6, 7, said, 2]
            assert list(root.info(token_ids=True).token_ids) == [5, 6, 7, said, 1]
            assert other.pending is None


def test_branches_after_a_loop_that_was_left_are_new(client: Client) -> None:
    """Also where they say what the server has drawn there already: that would be a replay, and one sequence twice."""
    policy = sample(seed=3)
    with client.prefill([5, 6, 7]) as twin:
        said = list(map(int, twin.generate(20, policy=policy)))
    with client.prefill([5, 6, 7]) as root, client.stream() as stream:
        loop = root.generate(20, policy=policy)
        assert next(loop) == said[0]
        wait_for(lambda: root.info().handle.length > 8)
        _, other = stream.branch([root, root], [said[1], said[1:3]])
        with other:
            assert other.handle.cache_id != root.handle.cache_id
            assert list(other.info(token_ids=True).token_ids) == other.token_ids == [5, 6, 7, *said[:3]]
            assert root.token_ids == [5, 6, 7, *said[:2]]


def test_branches_must_differ(fake: FakeServer, fake_client: Client) -> None:
    """Equal tokens would be a replay and one sequence twice; so would a query."""
    with fake_client.prefill([1, 2]) as cache, fake_client.stream() as stream:
        for tokens in ([3, 3], [[3, 4], 3], [(), 3], [3, ()]):
            with pytest.raises(ValueError, match="places 0 and 1 have the same parent"):
                stream.branch([cache, cache], tokens)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="one entry per parent: there are 2 and 1 entries"):
            stream.branch([cache, cache], [3])
        assert fake.frames == []


def test_failed_branch_leaves_nothing_behind(client: Client) -> None:
    """The branches that did come into being are released; the fixture counts the blocks."""
    with client.prefill([1] * 510) as cache, client.stream() as stream:
        with pytest.raises(ContextExceededError) as caught:
            stream.branch([cache, cache, cache], [1, 2, [3, 4, 5]])
        assert "place 2 of 3" in caught.value.__notes__[0]
        assert cache.length == 511
        assert len(list(client.list_caches())) == 1


def test_prompts_fail_item_by_item(client: Client) -> None:
    """Caches and errors in the order of the prompts, each with what it would say alone."""
    prompts = [[1, 2, 3], [4, 5], [6] * 40]
    alone = [client.generate(prompt, 2, policy=greedy()).read().tokens for prompt in prompts]
    with client.stream() as stream:
        items = [Prompt(prompt, greedy(), ttl=30) for prompt in [*prompts, [999], [1] * 600]]
        results = stream.run(items, errors="return")
        assert [type(one) for one in results[3:]] == [TokenOutOfVocabError, ContextExceededError]
        caches = [one for one in results if isinstance(one, Cache)]
        assert [cache.token_ids for cache in caches] == prompts
        assert [round(cache.info().lease.ttl_s) for cache in caches] == [30] * 3
        first = [cache.last.token for cache in caches]
        second = [output.token for output in stream.run([Append(cache, policy=greedy()) for cache in caches])]
        assert [list(pair) for pair in zip(first, second, strict=True)] == alone
        bad, good = stream.run(appends(caches[:2], [999, 1], sample(seed=1)), errors="return")
        assert isinstance(bad, TokenOutOfVocabError)
        assert isinstance(good, Output)
        assert [cache.length for cache in caches] == [4, 5, 41]
        assert stream.run([]) == []
    client.release(caches)


def test_failed_prompt_leaves_nothing_behind(client: Client) -> None:
    """Where the first error is raised nobody sees the other prompts' caches; what has moved stays moved."""
    with client.prefill([1, 2]) as cache, client.stream() as stream:
        with pytest.raises(TokenOutOfVocabError) as caught:
            stream.run([Prompt([3, 4]), Append(cache, 5), Prompt([999])])
        assert "item 2 of 3" in caught.value.__notes__[0]
        assert cache.token_ids == [1, 2, 5]
        assert len(list(client.list_caches())) == 1


def test_pieces_make_the_sequence_of_a_prefill(client: Client) -> None:
    """Of any size, beside appends to another; the lineage tells."""
    prompt = list(range(50))
    with (
        client.prefill(prompt, policy=greedy()) as whole,
        client.prefill([1, 2]) as other,
        client.stream() as stream,
    ):
        cache, _ = stream.run([Prompt(prompt[:17], greedy(), is_final=False), Append(other, 7)])
        with cache:
            assert cache.last.tokens == ()
            assert cache.pending is None
            middle, _ = stream.run([Append(cache, prompt[17:34], greedy(), is_final=False), Append(other, 7)])
            assert middle.tokens == ()
            assert cache.pending is None
            end, _ = stream.run([Append(cache, prompt[34:], greedy()), Append(other, 7)])
            assert cache.handle.lineage == whole.handle.lineage
            assert end.tokens == whole.last.tokens
            assert cache.pending == whole.pending
            assert other.token_ids == [1, 2, 7, 7, 7]


def test_a_piece_may_have_rows_at_all_positions(client: Client) -> None:
    """As a prefill of the same tokens has them, for a new sequence and for one that goes on."""
    scores = Policy(target_logprobs=True)
    with client.prefill([5, 6, 7, 8], policy=scores, all_positions=True) as whole, client.stream() as stream:
        expected = whole.last.target_logprobs.tolist()
        (cache,) = stream.run([Prompt([5, 6, 7, 8], scores, all_positions=True)])
        with cache, client.prefill([5, 6]) as other:
            assert cache.last.target_logprobs.tolist() == expected
            (output,) = stream.run([Append(other, [7, 8], scores, all_positions=True)])
            assert output.target_logprobs.tolist() == expected[2:]
