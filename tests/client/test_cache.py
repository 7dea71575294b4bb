"""Caches against a real server: what moves, what stays, and what is owned by whom."""

from __future__ import annotations

import gc
import pickle
import warnings

import numpy as np
import pytest

from ferrule import Client, Handle, HandleNotFoundError, Policy, greedy, logits, sample
from ferrule.errors import (
    ContextExceededError,
    HandleStaleError,
    InvalidRequestError,
    TokenOutOfVocabError,
    TruncateBeyondError,
    UnsupportedError,
)
from ferrule.types import Append
from tests.client.fake_server import FakeServer

PROMPT = [5, 6, 7, 8]


def test_nothing_is_returned_that_was_not_asked_for(client: Client) -> None:
    """Without a policy no row is computed; what is missing says how to ask for it."""
    with client.prefill(PROMPT) as cache:
        assert cache.length == 4
        assert cache.pending is None
        for name, hint in {
            "token": "greedy",
            "logits": r"logits\(\)",
            "target_logprobs": "Policy",
            "entropies": "Policy",
            "hidden_state": "Policy",
            "requested_logprobs": "Policy",
        }.items():
            with pytest.raises(AttributeError, match=hint):
                getattr(cache.last, name)
    with client.prefill(PROMPT, policy=logits()) as cache:
        assert cache.last.logits.shape == (1, 256)
        assert cache.last.logits.dtype == np.float32


def test_decode_moves_the_cache_and_not_the_old_handle(client: Client) -> None:
    """A handle is a value; the cache is what moves."""
    with client.prefill(np.array(PROMPT)) as cache:
        before = cache.handle
        output = cache.append(9, policy=greedy(logprobs=True))
        assert before.length == 4
        assert cache.handle.length == 5
        assert cache.handle == output.handle
        assert cache.last is output
        assert output.logprob < 0
        assert output.timing.run_ns > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_of_every_wire_type_arrive_as_float32(client: Client, dtype: str) -> None:
    """Sixteen bits on the wire cost precision, never a shape or a type."""
    with client.prefill(PROMPT, policy=logits()) as cache:
        exact = cache.last.logits
        output = cache.append((), policy=logits(dtype))  # type: ignore[arg-type]
        assert output.logits.dtype == np.float32
        np.testing.assert_allclose(output.logits, exact, rtol=2**-7)


def test_appending_nothing_reads_the_newest_row_again(client: Client) -> None:
    """And changes nothing."""
    with client.prefill(PROMPT) as cache:
        handle = cache.handle
        output = cache.append((), policy=greedy(top_logprobs=3))
        assert cache.handle == handle
        assert len(output.top_logprobs[0]) == 3
        assert output.top_logprobs[0][0].token == output.token
        drawn = [cache.step(sample(seed=1), redraw=True).token for _ in range(2)]
        assert drawn[0] == drawn[1]
        assert cache.handle == handle


def test_all_positions_give_a_row_for_each_token(client: Client) -> None:
    """Scoring a text takes one prefill."""
    policy = Policy(target_logprobs=True, logits="float32")
    with client.prefill(PROMPT, policy=policy, all_positions=True) as cache:
        assert cache.last.logits.shape == (4, 256)
        assert cache.last.target_logprobs.shape == (3,)
        more = cache.append([1, 2, 3], policy=policy, all_positions=True)
        assert more.logits.shape == (3, 256)
        assert cache.length == 7


def test_a_repeated_append_is_replayed(client: Client) -> None:
    """Sending an append again from the old handle appends nothing and gives the same answer."""
    with client.prefill(PROMPT) as cache:
        again = client.adopt(cache.handle, keep_alive=False)
        first = cache.append([9, 10], policy=greedy())
        second = again.append([9, 10], policy=greedy())
        assert second.replayed
        assert not first.replayed
        assert second.token == first.token
        assert again.detach() == cache.handle


def test_stale_handles_say_where_the_sequence_is(client: Client) -> None:
    """The error carries the tip, and each stale policy does what its name says."""
    with client.prefill(PROMPT) as cache:
        stale = client.adopt(cache.handle)
        cache.append([9, 10])
        with pytest.raises(HandleStaleError) as caught:
            stale.append(99)
        assert caught.value.tip_length == 6
        assert caught.value.handle_id == cache.handle.handle_id
        old = stale.handle
        branch = stale.append(99, on_stale="fork")
        assert branch.handle.cache_id != cache.handle.cache_id
        stale.release()
        rewound = client.adopt(old)
        rewound.append(99, on_stale="rewind")
        assert cache.info().handle == rewound.detach()


def test_fork_shares_blocks_and_truncate_frees_them(client: Client) -> None:
    """Branches share what they have in common; a truncate gives back what is its own."""
    with client.prefill(range(40)) as cache:
        first, second = branches = cache.fork(2)
        assert first.handle.lineage == cache.handle.lineage
        with client.stream() as stream:
            stream.run([Append(first, [1] * 30), Append(second, [2] * 30)])
        info = first.info(blocks=True, token_ids=True)
        assert info.num_shared_blocks == 2
        assert info.token_ids == (*range(40), *[1] * 30)
        assert set(info.block_ids) & set(second.info(blocks=True).block_ids)
        assert first.truncate(40) >= 1
        assert first.length == 40
        early = cache.fork(length=10)
        assert early.length == 10
        assert client.release([*branches, early]).released == (True, True, True)


def test_truncate_beyond_the_handle_is_refused(client: Client) -> None:
    """Lengths outside 1 to the cache's own change nothing."""
    with client.prefill(PROMPT) as cache:
        for length in (-1, 0, 5):
            with pytest.raises(TruncateBeyondError):
                cache.truncate(length)
        assert cache.length == 4
        with pytest.raises(TruncateBeyondError, match="to -1 tokens: lengths go from 1 to 4"):
            cache.truncate(-1)


def test_release_is_idempotent_and_ends_the_cache(client: Client) -> None:
    """After a release nothing is sent any more, and the handle is gone."""
    cache = client.prefill(PROMPT)
    handle = cache.handle
    assert cache.release().freed_blocks == 1
    assert cache.release().released == (False,)
    for use in (lambda: cache.append(1), cache.info, cache.fork):
        with pytest.raises(RuntimeError, match="released"):
            use()
    gone = client.adopt(handle)
    with pytest.raises(HandleNotFoundError):
        gone.append(1)
    assert client.release([handle]).released == (False,)
    gone.detach()


def test_bad_input_has_typed_errors(client: Client) -> None:
    """What the server refuses arrives as the class of its reason."""
    with pytest.raises(InvalidRequestError) as caught:
        client.prefill([])
    assert caught.value.field
    with pytest.raises(TokenOutOfVocabError):
        client.prefill([1, 256])
    with pytest.raises(ContextExceededError):
        client.prefill([1] * 600)
    with pytest.raises(ValueError, match="negative"):
        client.prefill([-1])
    with pytest.raises(UnsupportedError):
        client.tokenize("no tokenizer here")


def test_verify_is_refused_truthfully(client: Client) -> None:
    """What the server does not serve is an UnsupportedError, and its features say so too."""
    assert "tree_verify" not in client.capabilities().features
    with client.prefill(PROMPT) as cache:
        with pytest.raises(UnsupportedError):
            cache.verify([1, 2], tokens=9, policy=greedy(), parents=[0, 0])
        assert cache.length == 4


def test_verify_loop_keeps_its_own_books(fake: FakeServer, fake_client: Client) -> None:
    """The next token of a verify is pending and certain in the next one."""
    with fake_client.prefill([*b"the quick"], policy=greedy()) as cache:
        cache.truncate(cache.length)
        with pytest.raises(ValueError, match="certain"):
            cache.verify([1])
        with pytest.raises(ValueError, match="acceptance must be one of none, greedy, exact, rejection"):
            cache.verify([1], tokens=2, acceptance="always")  # type: ignore[arg-type]
        first = cache.verify(list(b"bro?"), tokens=ord(" "), policy=greedy())
        assert first.accepted_count == 3
        assert first.accepted_indices == (1, 2, 3)
        assert cache.pending == first.next_token == ord("w")
        second = cache.verify(list(b"n "), policy=greedy())
        assert second.accepted_count == 2
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the quick brown "


def test_repr_shows_no_secrets(client: Client) -> None:
    """Ids in reprs are the loggable ones; neither cache_id nor lineage nor a token of the wire is in them."""
    secret = Client("unix:/nowhere", token="s3cret-token")
    with client.prefill(PROMPT, policy=greedy()) as cache:
        texts = [repr(cache), repr(cache.handle), repr(cache.last), repr(client), repr(secret), str(cache.info())]
        for text in texts:
            assert cache.handle.cache_id not in text
            assert repr(cache.handle.lineage) not in text
            assert "s3cret" not in text
        assert cache.handle.handle_id in repr(cache)
        assert cache.handle.handle_id == next(iter(client.list_caches())).handle_id
        assert pickle.loads(pickle.dumps(cache.handle)) == cache.handle
    secret.close()


def test_leaked_cache_warns(client: Client) -> None:
    """Forgetting a sequence is said aloud, once, with its loggable id."""
    cache = client.prefill(PROMPT)
    handle = cache.handle
    with pytest.warns(ResourceWarning, match=handle.handle_id):
        del cache
    client.release([handle])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.adopt(handle).detach()
        gc.collect()


def test_leaving_with_survives_a_dead_server() -> None:
    """The error of the body stays visible when the release cannot be sent."""
    with FakeServer() as fake:
        client = Client(fake.target, max_retries=0)
        cache = client.prefill([*b"abc"])
    with pytest.raises(ZeroDivisionError), cache:
        _ = 1 / 0
    assert cache.is_released
    client.close()


def test_list_caches_walks_the_pages(client: Client) -> None:
    """Iterating asks for page after page."""
    with client.prefill(PROMPT) as cache:
        branches = cache.fork(5)
        listed = [summary.handle_id for summary in client.list_caches(page_size=2)]
        assert len(listed) == 6
        assert listed == sorted(listed)
        client.release(branches)


def test_keep_alive_answers_for_each_handle(client: Client) -> None:
    """One call, one lease or error per handle."""
    with client.prefill(PROMPT) as cache:
        gone = client.prefill(PROMPT)
        gone.release()
        lease, error = client.keep_alive([cache, gone.handle], ttl=100)
        assert getattr(lease, "ttl_s", 0) == pytest.approx(100, abs=1)
        assert isinstance(error, HandleNotFoundError)


def test_long_lists_of_handles_are_sent_in_parts(client: Client) -> None:
    """A server accepts a limited number of handles in a request; the client may be given more."""
    count = client.capabilities().max_handles_per_request + 1
    strangers = [Handle(f"test.e1.{i:022d}", 1, bytes(16)) for i in range(count)]
    assert client.release(strangers).released == (False,) * count
    assert len(client.keep_alive(strangers)) == count
