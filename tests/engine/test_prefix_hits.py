"""Prefix hits: prompts whose blocks are there are not run again, and nobody can tell but by the time it takes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ferrule_server.engine.jobs import (
    Acceptance,
    AppendJob,
    Drafts,
    OutputRequest,
)
from ferrule_server.errors import Cancelled, NonFiniteLogits
from ferrule_server.executor.base import OutputSpec, SampleSpec, Shaping
from ferrule_server.kv.handle import StalePolicy
from ferrule_server.quotas import QuotaLimits
from tests.engine.harness import GREEDY, NOTHING, Harness, append, logits_of, paged_harness
from tests.fakes import FakeExecutor, fake_next_token

VOCAB = 32
BLOCK = 4
ALL = OutputRequest(OutputSpec(greedy=True), all_positions=True)
FULL = OutputRequest(OutputSpec(full_logits=True))
PENALISED = OutputRequest(OutputSpec(greedy=True, shaping=Shaping(frequency_penalty=0.7, penalty_start=2)))


def prompt_of(length: int) -> tuple[int, ...]:
    """Tokens in which no block is like another."""
    return tuple((7 * i + i // 5) % VOCAB for i in range(length))


def rows_since(harness: Harness, num_steps: int) -> list[int]:
    """Rows of each step after that many."""
    return [batch.num_rows for batch in harness.executor.batches[num_steps:]]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 17])
@pytest.mark.parametrize("is_released", [False, True])
@pytest.mark.parametrize("output", [GREEDY, PENALISED, NOTHING])
def test_a_prompt_is_run_from_where_it_is_not_known(length: int, output: OutputRequest, is_released: bool) -> None:
    """Whole blocks are taken over, from live sequences and released ones; a prompt that is there whole runs one row."""
    tokens = prompt_of(length)
    with Harness() as harness:
        first = harness.prefill(*tokens, output=output)
        assert first.cached_tokens == 0
        if is_released:
            harness.release(first.handle)
        num_steps = len(harness.executor.batches)
        again = harness.prefill(*tokens, output=output)
        assert again.cached_tokens == length // BLOCK * BLOCK
        assert rows_since(harness, num_steps) == [max(1, length - again.cached_tokens)]
        assert [row.token for row in again.rows] == [row.token for row in first.rows]
        assert again.handle.cache_id != first.handle.cache_id
        assert (again.handle.length, again.handle.lineage) == (length, first.handle.lineage)
        if length % BLOCK == 0:
            assert harness.executor.batches[-1].slot_mapping.tolist() == [-1]
        harness.check_integrity()
        after = harness.decode(again.handle, 30)
        assert after.rows[0].token == fake_next_token((*tokens, 30), VOCAB)


def test_prompts_share_what_they_begin_with() -> None:
    """Blocks up to the one that differs; whatever is appended to one of them, the others do not change."""
    stem = prompt_of(10)
    with Harness() as harness:
        handles = []
        for i in range(5):
            result = harness.prefill(*stem, 20 + i, 21)
            assert result.cached_tokens == (8 if i else 0)
            handles.append(harness.decode(result.handle, i).handle)
        for i, handle in enumerate(handles):
            assert harness.decode(handle).rows[0].token == fake_next_token((*stem, 20 + i, 21, i), VOCAB)
        longer = harness.prefill(*stem, 21, 21, 1, 9, 9)
        assert longer.cached_tokens == 12


def test_rows_that_are_wanted_are_run() -> None:
    """A row for each token, or its target, needs each token run; a hit would leave rows out."""
    tokens = prompt_of(12)
    scored = OutputRequest(OutputSpec(), all_positions=True, wants_targets=True)
    with Harness() as harness:
        harness.prefill(*tokens)
        every = harness.prefill(*tokens, output=ALL)
        assert (every.cached_tokens, len(every.rows)) == (0, 12)
        assert every.rows[4].token == fake_next_token(tokens[:5], VOCAB)
        assert harness.prefill(*tokens, output=scored).cached_tokens == 0
        last = OutputRequest(OutputSpec(), wants_targets=True, last_target=3)
        assert harness.prefill(*tokens, output=last).cached_tokens == 12


def test_who_does_not_want_it_has_none() -> None:
    """reuse_prefix and publish_prefix, each by itself; other principals never see each other's."""
    tokens = prompt_of(8)
    with Harness() as harness:
        hidden = append(None, *tokens, publish_prefix=False)
        harness.submit(hidden).result()
        assert harness.prefill(*tokens).cached_tokens == 0
        alone = append(None, *tokens, reuse_prefix=False)
        assert harness.submit(alone).result().cached_tokens == 0
        other = AppendJob("other", tokens, None, GREEDY)
        assert harness.submit(other).result().cached_tokens == 0
        assert harness.prefill(*tokens).cached_tokens == 8


def test_what_is_appended_later_is_found_too() -> None:
    """Decodes, drafts that held and branches fill blocks like prompts do; drafts that did not hold do not."""
    tokens = prompt_of(6)
    with Harness() as harness:
        first = harness.prefill(*tokens)
        second = harness.decode(first.handle, 1, 2)
        assert harness.prefill(*tokens, 1, 2, 5).cached_tokens == 8
        good = fake_next_token((*tokens, 1, 2, 3), VOCAB)
        bad = (good + 1) % VOCAB
        job = append(second.handle, 3, good, bad, bad, bad, bad, bad, drafts=Drafts(6, Acceptance.EXACT))
        verified = harness.submit(job).result()
        assert verified.handle.length == 10
        assert harness.prefill(*tokens, 1, 2, 3, good, bad, bad, bad).cached_tokens == 8
        harness.decode(verified.handle, 8, 9)
        assert harness.prefill(*tokens, 1, 2, 3, good, 8, 9).cached_tokens == 12
        branch = harness.submit(append(first.handle, 4, 4, 4, on_stale=StalePolicy.FORK)).result()
        found = harness.prefill(*tokens, 4, 4, 7)
        assert found.cached_tokens == 8
        assert found.rows[0].token == fake_next_token((*tokens, 4, 4, 7), VOCAB)
        assert harness.decode(branch.handle).rows[0].token == fake_next_token((*tokens, 4, 4, 4), VOCAB)


def test_a_prompt_that_failed_is_not_found() -> None:
    """NaN, or cancelled half-way: nothing was committed, so nothing is known; what was found stays so."""
    tokens = prompt_of(20)
    executor = FakeExecutor()
    with Harness(executor, max_step_rows=4) as harness:
        executor.bad_token_ids = {tokens[-1]}
        assert isinstance(harness.submit(append(None, *tokens)).error(), NonFiniteLogits)
        executor.bad_token_ids = set()
        harness.prefill(*tokens[:8])
        job = append(None, *tokens)
        pending = harness.hold(job)
        job.is_cancelled = True
        harness.let_go()
        assert isinstance(pending.error(), Cancelled)
        executor.gate = None
        result = harness.prefill(*tokens)
        assert result.cached_tokens == 8
        assert result.rows[0].token == fake_next_token(tokens, VOCAB)


@pytest.mark.parametrize("output", [GREEDY, OutputRequest(OutputSpec(sample=SampleSpec()), is_seeded=False)])
def test_a_creation_that_hit_is_repeated_like_any_other(output: OutputRequest) -> None:
    """From the record with what it says of the cache; run again where the sequence has moved on."""
    tokens = prompt_of(8)
    with Harness() as harness:
        harness.prefill(*tokens)
        job = append(None, *tokens, output=output, request_id="r")
        once = harness.submit(job).result()
        assert once.cached_tokens == 8
        again = harness.submit(dataclasses.replace(job)).result()
        assert again.replayed
        assert (again.cached_tokens, again.handle, again.rows) == (8, once.handle, once.rows)
        harness.decode(once.handle, 5)
        again = harness.submit(dataclasses.replace(job)).result()
        assert (again.recomputed, again.handle, again.seed) == (True, once.handle, once.seed)
        assert [row.token for row in again.rows] == [row.token for row in once.rows]


def test_hits_are_neither_counted_nor_charged_as_prefill() -> None:
    """Tokens found cost no prefill rate, but the one row that is run again."""
    tokens = prompt_of(96)
    limits = QuotaLimits(prefill_tokens_per_s=100)
    with Harness(FakeExecutor(num_blocks=200), limits_of=lambda _: limits) as harness:
        harness.prefill(*tokens)
        for _ in range(4):
            assert harness.prefill(*tokens).cached_tokens == 96
        counters = harness.engine.counters
        assert (counters.prefills, counters.prefill_tokens) == (5, 96)
        assert harness.store.metrics().num_prefix_hit_tokens == 4 * 96


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 97])
def test_a_hit_changes_not_a_bit_of_the_logits(block_size: int, length: int) -> None:
    """The paged reference: cold, behind a shorter hit, wholly cached, and one decode later."""
    rng = np.random.default_rng(length)
    tokens = tuple(int(token) for token in rng.integers(0, 256, length))
    with paged_harness(block_size=block_size) as cold, paged_harness(block_size=block_size) as warm:
        expected = cold.prefill(*tokens, output=FULL)
        later = cold.decode(expected.handle, 9, output=FULL)
        if length > 20:
            warm.prefill(*tokens[:20], output=NOTHING)
        for _ in range(3):
            result = warm.prefill(*tokens, output=FULL)
            assert logits_of(result) == logits_of(expected)
            assert logits_of(warm.decode(result.handle, 9, output=FULL)) == logits_of(later)
        assert result.cached_tokens == length // block_size * block_size
