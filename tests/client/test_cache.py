"""Caches against a real server: what moves, what stays, and what is owned by whom."""

from __future__ import annotations

import gc
import pickle
import warnings

import numpy as np
import pytest

from ferrule import Client, HandleNotFoundError, greedy, logits
from ferrule.errors import (
    HandleStaleError,
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


def test_a_lost_handle_is_found_in_the_list(client: Client) -> None:
    """It is there if it is asked for, and the sequence goes on from it."""
    with client.prefill(PROMPT) as cache:
        assert [one.handle for one in client.list_caches()] == [None]
        (found,) = client.list_caches(with_handles=True)
        assert found.handle == cache.handle
        assert found.handle is not None
        again = client.adopt(found.handle, keep_alive=False)
        assert again.append(9, policy=greedy()).handle.length == len(PROMPT) + 1
        again.detach()


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


def test_verify_is_refused_truthfully(client: Client) -> None:
    """What the server does not serve is an UnsupportedError, and its features say so too."""
    assert "tree_verify" not in client.capabilities().features
    with client.prefill(PROMPT) as cache:
        with pytest.raises(UnsupportedError):
            cache.verify([1, 2], tokens=9, policy=greedy(), parents=[0, 0])
        assert cache.length == 4


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
