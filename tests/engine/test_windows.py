"""Sequences that give back blocks outside the window of their model, through the engine."""

from __future__ import annotations

import dataclasses

import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.jobs import (
    Acceptance,
    CacheInfo,
    Drafts,
    ForkJob,
    ForkResult,
    OutputRequest,
    TruncateJob,
    TruncateResult,
)
from ferrule_server.errors import KvGivenBack, RequestIdReused
from ferrule_server.kv.handle import Handle, StalePolicy
from tests.engine.deferred import DeferredHarness, what_became_of
from tests.engine.harness import GREEDY, NOTHING, Harness, append
from tests.engine.streams import generate, start
from tests.fakes import FakeExecutor, fake_next_token

VOCAB, SIZE, WINDOW = 32, 4, 3


def windowed(**settings: int) -> Harness:
    """Return an engine whose rows read the last three tokens, and which fails a test that gives them less."""
    return Harness(FakeExecutor(window=WINDOW, **settings))  # type: ignore[arg-type]


def prefill(harness: Harness, *tokens: int, output: OutputRequest = GREEDY) -> Handle:
    """Begin a sequence that gives back what is outside the window."""
    job = append(None, *tokens, output=output, attention_window=WINDOW)
    return harness.submit(job).result().handle


def describe(harness: Harness, handle: Handle) -> CacheInfo:
    """Return all that is known of a sequence."""
    return harness.answer(CacheInfo, host_calls.describe("me", handle, with_token_ids=True))


def test_a_loop_runs_far_beyond_the_pool() -> None:
    """Tokens are those of the window, and the memory that is held does not grow."""
    with windowed(num_blocks=9, max_context=400) as harness:
        job = generate(None, 1, 2, 3, output=GREEDY, max_tokens=300, attention_window=WINDOW)
        branch = start(harness, job).branch()
        tokens = [1, 2, 3]
        for token in branch.tokens:
            assert token == fake_next_token(tokens[-WINDOW:], VOCAB)
            tokens.append(token)
        info = describe(harness, branch.handles[-1])
        assert (len(branch.tokens), info.length, info.num_blocks) == (300, 302, len(info.block_ids))
        assert info.num_blocks <= 4
        assert info.length - info.first_position <= 2 * WINDOW + 1 + 2 * SIZE
        assert all(info.block_ids)
        assert (harness.engine.snapshot().total_blocks, info.lowest_length) == (8, info.first_position + WINDOW)


def test_a_queued_step_is_claimed_when_blocks_are_given_back() -> None:
    """Lookahead foresees the table that the next append will have, so no row is thrown away."""
    job = generate(None, 1, 2, 3, output=GREEDY, max_tokens=60, attention_window=WINDOW)
    plain = windowed()
    with plain:
        expected = start(plain, dataclasses.replace(job)).branch()
    with DeferredHarness(FakeExecutor(window=WINDOW)) as harness:
        branch = start(harness, job).branch()
        assert what_became_of(branch) == what_became_of(expected)
        counters = harness.engine.counters
        assert (counters.queued_steps, counters.discarded_rows) == (58, 0)
    assert harness.store.metrics().num_given_back > 10


@pytest.mark.parametrize("length", [14, 3])
def test_below_the_lowest_length_the_price_is_announced(length: int) -> None:
    """Query, fork, rewind, branch, truncate: all of them are refused and change nothing."""
    with windowed() as harness:
        handle = prefill(harness, *range(1, 21))
        sequence = harness.store.resolve(handle, "me")
        low = sequence.handle_at(length)
        jobs = [
            append(low),
            append(low, 30, on_stale=StalePolicy.FORK),
            append(low, 30, on_stale=StalePolicy.REWIND),
            ForkJob("me", handle, length, 2),
            TruncateJob("me", handle, length),
        ]
        for job in jobs:
            error = harness.submit(job).error()
            assert isinstance(error, KvGivenBack)
            assert error.metadata["tokens_to_recompute"] == str(length)
            assert error.metadata["lowest_length"] == "15"
        assert describe(harness, handle).length == 20
        assert (harness.engine.counters.queries, harness.engine.counters.replays) == (0, 0)


def test_down_to_the_lowest_length_everything_is_exact() -> None:
    """Query, fork, truncate and what is appended afterwards."""
    tokens = list(range(1, 21))
    with windowed() as harness:
        handle = prefill(harness, *tokens)
        low = harness.store.resolve(handle, "me").handle_at(15)
        row = harness.submit(append(low)).result().rows[0]
        assert row.token == fake_next_token(tokens[12:15], VOCAB)
        forked = harness.answer(ForkResult, ForkJob("me", handle, 15, 1))
        truncated = harness.submit(TruncateJob("me", handle, 15)).outcome()
        assert isinstance(truncated, TruncateResult)
        for tip in (forked.handles[0], truncated.handle):
            result = harness.decode(tip, 29)
            assert result.rows[0].token == fake_next_token([*tokens[13:15], 29], VOCAB)
            assert describe(harness, result.handle).first_position == 12


def test_recorded_answers_are_replayed_and_others_cost() -> None:
    """A replay needs KV only if its rows are run again."""
    with windowed() as harness:
        first = prefill(harness, *range(1, 21))
        answer = harness.decode(first, 21)
        assert harness.decode(first, 21).rows == answer.rows
        handle = answer.handle
        for token in range(22, 31):
            handle = harness.decode(handle, token).handle
        assert describe(harness, handle).lowest_length == 23
        assert harness.submit(append(first, 21, output=NOTHING)).result().replayed
        error = harness.submit(append(first, 21)).error()
        assert isinstance(error, KvGivenBack)
        assert (error.metadata["length"], error.metadata["tokens_to_recompute"]) == ("21", "21")


def test_a_verify_drops_after_what_was_accepted() -> None:
    """Rejected drafts leave no trace, and count for nothing that is given back."""
    tokens = list(range(1, 16))
    with windowed() as harness:
        handle = prefill(harness, *tokens)
        good = fake_next_token([*tokens[-2:], 16], VOCAB)
        wrong = (fake_next_token([*tokens[-1:], 16, good], VOCAB) + 1) % VOCAB
        job = append(handle, 16, good, *[wrong] * 6, drafts=Drafts(7, Acceptance.EXACT))
        result = harness.submit(job).result()
        assert result.verified is not None
        assert result.verified.accepted_count == 1
        assert describe(harness, result.handle).first_position == (17 - 7) // SIZE * SIZE


def test_a_request_id_holds_for_one_option_only() -> None:
    """The same prompt, kept in another way, is another request."""
    with windowed() as harness:
        job = append(None, 1, 2, 3, request_id="r", attention_window=WINDOW)
        harness.submit(job).result()
        assert isinstance(harness.submit(append(None, 1, 2, 3, request_id="r")).error(), RequestIdReused)
