"""Batches: prompts, decodes and chunks by one call, each on its own, and repeated where that is safe."""

from __future__ import annotations

import pytest

from ferrule_client import (
    Cache,
    Chunk,
    Client,
    ContextExceededError,
    InvalidRequestError,
    Output,
    TokenOutOfVocabError,
    greedy,
    no_output,
    sample,
)

PROMPTS = [[1, 2, 3], [4, 5], [6] * 40]


def alone(client: Client, prompt: list[int]) -> list[int]:
    """Return the first two greedy tokens behind a prompt."""
    return client.generate(prompt, 2, temperature=0).read().tokens


def test_batch_prefill_fails_item_by_item(client: Client) -> None:
    """Caches and errors in the order of the prompts, with what each would say alone."""
    results = client.batch_prefill([*PROMPTS, [999], [1] * 600], policy=greedy(), ttl=30)
    caches = [one for one in results if isinstance(one, Cache)]
    assert [type(one) for one in results[3:]] == [TokenOutOfVocabError, ContextExceededError]
    assert [cache.token_ids for cache in caches] == PROMPTS
    first = [cache.last.token for cache in caches if cache.last is not None]
    outputs = client.batch_decode(caches, [token or 0 for token in first], policy=[greedy()] * 3)
    assert all(isinstance(one, Output) for one in outputs)
    second = [one.token for one in outputs if isinstance(one, Output)]
    assert [list(pair) for pair in zip(first, second, strict=True)] == [alone(client, one) for one in PROMPTS]
    bad, good = client.batch_decode(caches[:2], [999, 1], policy=sample(seed=1))
    assert isinstance(bad, TokenOutOfVocabError)
    assert isinstance(good, Output)
    assert [cache.length for cache in caches] == [4, 4, 41]
    client.release(caches)


def test_empty_batches_are_nothing(client: Client) -> None:
    """And sizes must agree."""
    assert client.batch_prefill([]) == []
    assert client.unified([]) == []
    with pytest.raises(ValueError, match="one entry"):
        client.batch_prefill([[1]], policy=[greedy(), greedy()])


def test_chunks_make_the_sequence_of_a_prefill(client: Client) -> None:
    """In pieces of any size, beside decodes of another; the lineage tells."""
    prompt = list(range(50))
    with client.prefill(prompt, policy=greedy()) as whole, client.prefill([1, 2], policy=no_output()) as other:
        cache: Cache | None = None
        for start in range(0, 50, 17):
            piece = Chunk(prompt[start : start + 17], cache, greedy(), is_final=start + 17 >= 50, pos_offset=start)
            first, second = client.unified([piece, Chunk(7, other, greedy())])
            assert isinstance(first, Cache)
            assert second is other
            assert cache is None or first is cache
            cache = first
        assert cache is not None
        assert cache.handle.lineage == whole.handle.lineage
        assert cache.last is not None
        assert whole.last is not None
        assert cache.last.tokens == whole.last.tokens
        assert other.token_ids == [1, 2, 7, 7, 7]
        cache.release()


def test_wrong_offset_is_told(client: Client) -> None:
    """A scheduler's mistake changes nothing, and its neighbours run."""
    with client.prefill([1, 2, 3], policy=no_output()) as cache, client.prefill([1], policy=no_output()) as other:
        error, fine = client.unified([Chunk(4, cache, greedy(), pos_offset=9), Chunk(4, other, greedy())])
        assert isinstance(error, InvalidRequestError)
        assert error.field == "batch.items[0].pos_offset"
        assert fine is other
        assert (cache.length, other.length) == (3, 2)
        with pytest.raises(ValueError, match="only once"):
            client.unified([Chunk(4, cache), Chunk(5, cache)])


def test_chunks_go_over_a_stream(client: Client) -> None:
    """As `unified` items, a new sequence among them."""
    with client.stream() as stream:
        (cache,) = stream.run([Chunk([1, 2, 3], is_final=False)])
        assert isinstance(cache, Cache)
        with cache:
            assert cache.last is not None
            assert cache.last.tokens == ()
            (again,) = stream.run([Chunk([4], cache, greedy())])
            assert again is cache
            assert cache.token_ids == [1, 2, 3, 4]
