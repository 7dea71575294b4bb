"""Lookahead: the next step of Generates is queued before the tokens of this one are read, and nobody can tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.jobs import (
    AppendResult,
    CacheInfo,
    Finish,
    ForkJob,
    ForkResult,
    Job,
    OutputRequest,
    SlotsWanted,
    StopRules,
    TruncateJob,
    TruncateResult,
)
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import OutputSpec, SampleSpec
from ferrule_server.executor.reference import PagedReferenceExecutor
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.reserved_slots import SlotReservation
from tests.engine.deferred import DeferredHarness, Rounds, check_pool, what_became_of
from tests.engine.harness import GREEDY, Harness, Pending, append
from tests.engine.streams import Stream, drawn_with, generate, start
from tests.fakes import FakeExecutor

NUM_TOKENS = 40


# ---- the same as without ----------------------------------------------------------------------------------------


def test_a_long_generate_is_queued_ahead_and_its_steps_are_those_of_an_engine_that_waits() -> None:
    """All but the first two steps come out of the queue, block by block; at max_tokens nothing is thrown away."""
    plain = Harness()
    with plain:
        expected = start(plain, generate(None, 1, 2, 3, output=GREEDY, max_tokens=NUM_TOKENS)).branch()
    with DeferredHarness() as harness:
        branch = start(harness, generate(None, 1, 2, 3, output=GREEDY, max_tokens=NUM_TOKENS)).branch()
        counters = harness.engine.counters
        assert what_became_of(branch) == what_became_of(expected)
        assert (counters.steps, counters.queued_steps, counters.discarded_rows) == (NUM_TOKENS, NUM_TOKENS - 2, 0)
        assert [call for call, _ in harness.deferred.calls if call != "tend"] == [
            "run",
            *["submit", "submit"],
            *["result", "submit"] * (NUM_TOKENS - 3),
            *["result", "result"],
        ]
        for ours, theirs in zip(harness.inner.batches, plain.executor.batches, strict=True):
            for field in dataclasses.fields(ours):
                np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name), field.name)


@pytest.mark.parametrize("is_eager", [False, True, None])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("output", [GREEDY, drawn_with(7)], ids=["greedy", "drawn"])
def test_whatever_is_generated_is_generated_alike(
    output: OutputRequest, block_size: int, is_eager: bool | None
) -> None:
    """Branches, stops and prompts of all sorts beside each other, whenever the device gets to it."""

    def all_of(harness: Harness) -> list[object]:
        jobs = [
            generate(None, 1, 2, 3, output=output, max_tokens=30),
            generate(None, *range(20), output=output, max_tokens=25, num_branches=3),
            generate(None, 5, output=output, stop=StopRules(max_tokens=40, token_ids=frozenset({3, 4, 5}))),
            generate(None, 5, 6, output=output, stop=StopRules(max_tokens=40, sequences=((7,), (8,)))),
        ]
        streams = [Stream() for _ in jobs]
        harness.engine.submit(list(zip(jobs, streams, strict=True)))
        return [what_became_of(branch) for stream in streams for branch in stream.branches()]

    with Harness(FakeExecutor(block_size=block_size, num_blocks=400)) as plain:
        expected = all_of(plain)
    inner = FakeExecutor(block_size=block_size, num_blocks=400)
    with DeferredHarness(inner, is_eager=is_eager) as harness:
        assert all_of(harness) == expected
        assert harness.engine.counters.queued_steps > 10
        check_pool(harness, inner)


def test_the_bits_of_the_paged_reference_are_the_same() -> None:
    """Draws, their log-probabilities and everything else that comes with a token, of real attention over real KV."""
    output = OutputRequest(OutputSpec(sample=SampleSpec(seed=3, top_p=0.9), logprobs=True, entropy=True))

    def rows_of(harness: Harness) -> list[object]:
        jobs = [generate(None, *prompt, output=output, max_tokens=50, num_branches=2) for prompt in ((1, 2), range(30))]
        return [branch.rows for job in jobs for branch in start(harness, job).branches()]

    with DeferredHarness(cast("FakeExecutor", PagedReferenceExecutor(kv_memory_bytes=4 << 20))) as harness:
        ours = rows_of(harness)
        assert harness.engine.counters.queued_steps > 80
    with DeferredHarness(cast("FakeExecutor", PagedReferenceExecutor(kv_memory_bytes=4 << 20))) as plain:
        plain.deferred.refuses = True
        assert rows_of(plain) == ours
        assert plain.engine.counters.queued_steps == 0


def test_at_a_stop_one_token_is_thrown_away() -> None:
    """A row of nobody, read and forgotten; the others keep theirs."""
    with Harness() as plain:
        tokens = start(plain, generate(None, 1, 2, 3, output=GREEDY, max_tokens=20)).branch().tokens
    stop = StopRules(max_tokens=20, token_ids=frozenset({tokens[11]}))
    num_drawn = tokens.index(tokens[11]) + 1
    with DeferredHarness() as harness:
        stopped = start(harness, generate(None, 1, 2, 3, output=GREEDY, stop=stop)).branch()
        assert (stopped.tokens, stopped.last.finish) == (tokens[:num_drawn], Finish.STOP_TOKEN)
        assert harness.engine.counters.discarded_rows == 1
    with DeferredHarness() as harness:
        rounds = Rounds(harness)
        streams = [rounds.start(generate(None, 1, 2, 3, output=GREEDY, stop=stop))]
        streams.append(rounds.start(generate(None, 1, 2, 3, output=GREEDY, max_tokens=20)))
        rounds.finish()
        assert [len(stream.branch().tokens) for stream in streams] == [num_drawn, 20]
        assert harness.engine.counters.discarded_rows == 1
        assert harness.engine.counters.queued_steps == 18


# ---- whatever happens in between --------------------------------------------------------------------------------

Meddle = Callable[[Rounds, Stream, int], Pending]


def tip_of(stream: Stream, index: int = 0) -> Handle:
    """The newest handle that a reader knows of a branch."""
    return stream.so_far()[index].handles[-1]


def fork(rounds: Rounds, stream: Stream, index: int) -> Pending:
    """Fork what is being generated."""
    handle = tip_of(stream, index)
    return rounds.ask(ForkJob("me", handle, handle.length, 2))


def fork_and_release(rounds: Rounds, stream: Stream, index: int) -> Pending:
    """Share the last block, and have it back before anybody has written to it."""
    pending = fork(rounds, stream, index)
    rounds.run(1)
    outcome = pending.outcome()
    assert isinstance(outcome, ForkResult)
    rounds.ask(host_calls.release("me", outcome.handles))
    return pending


def truncate(rounds: Rounds, stream: Stream, index: int) -> Pending:
    """Shorten it under the Generate's feet."""
    handle = tip_of(stream, index)
    return rounds.ask(TruncateJob("me", handle, handle.length - 2))


def truncate_to_tip(rounds: Rounds, stream: Stream, index: int) -> Pending:
    """Shorten it to what it is, or one less."""
    handle = tip_of(stream, index)
    return rounds.ask(TruncateJob("me", handle, handle.length))


def release(rounds: Rounds, stream: Stream, index: int) -> Pending:
    """End it; its blocks go to whoever comes next."""
    pending = rounds.ask(host_calls.release("me", (tip_of(stream, index),)))
    rounds.start(generate(None, 9, 9, 9, 9, 9, 9, 9, 9, 9, output=GREEDY, max_tokens=8))
    return pending


def reserve(rounds: Rounds, stream: Stream, index: int) -> Pending:
    """Have blocks set aside, so that it takes others than foreseen."""
    handle = tip_of(stream, index)
    return rounds.ask(host_calls.reserve("me", (SlotsWanted(handle, handle.length + 20),)))


def append_behind(rounds: Rounds, stream: Stream, index: int) -> Pending:
    """Append another token where the Generate is about to."""
    return rounds.ask(append(tip_of(stream, index), 30))


def branch_off(rounds: Rounds, stream: Stream, index: int) -> Pending:
    """Branch off behind the tip."""
    return rounds.ask(append(tip_of(stream, index), 30, on_stale=StalePolicy.FORK))


def rewind(rounds: Rounds, stream: Stream, index: int) -> Pending:
    """Rewrite what has been generated."""
    return rounds.ask(append(stream.so_far()[index].handles[0], 30, 30, on_stale=StalePolicy.REWIND))


def look(rounds: Rounds, stream: Stream, index: int) -> Pending:
    """Only look."""
    return rounds.ask(host_calls.describe("me", tip_of(stream, index)))


def outcome_of(pending: Pending) -> object:
    """What came of a job, names and times left out."""
    outcome = pending.outcome()
    told: object = outcome
    match outcome:
        case AppendResult():
            told = (outcome.handle.length, outcome.handle.lineage, outcome.rows[0].token)
        case ForkResult():
            told = [(handle.length, handle.lineage) for handle in outcome.handles]
        case TruncateResult():
            told = (outcome.handle.length, outcome.handle.lineage, outcome.freed_blocks)
        case CacheInfo():
            told = (outcome.length, outcome.num_blocks, outcome.num_shared_blocks)
        case SlotReservation():
            told = [(each.blocks_before, each.blocks_after) for each in outcome.allocations]
        case FerruleError():
            told = outcome.reason
    return told


@pytest.mark.parametrize("at", range(6, 12))
@pytest.mark.parametrize(
    "meddle",
    [fork, fork_and_release, truncate, truncate_to_tip, release, reserve, append_behind, branch_off, rewind, look],
)
def test_whatever_is_done_to_the_sequence_while_a_step_is_queued_ends_as_without(meddle: Meddle, at: int) -> None:
    """At every offset in a block: the same tokens, the same answers, and every sequence's own tokens in its blocks."""

    def run(harness: Harness, executor: FakeExecutor) -> tuple[object, ...]:
        rounds = Rounds(harness)
        job = generate(None, 1, 2, 3, output=GREEDY, max_tokens=NUM_TOKENS, num_branches=2)
        stream, other = rounds.start(job), rounds.start(generate(None, 4, output=drawn_with(3), max_tokens=30))
        rounds.run(at)
        pending = meddle(rounds, stream, 1)
        for _ in range(3):
            rounds.run(1)
            check_pool(harness, executor)
        rounds.finish()
        check_pool(harness, executor)
        branches = [what_became_of(branch) for branch in stream.branches() + other.branches()]
        return (branches, outcome_of(pending))

    expected = run(plain := Harness(), plain.executor)
    for is_eager in (False, True):
        harness = DeferredHarness(is_eager=is_eager)
        assert run(harness, harness.inner) == expected
        assert harness.engine.counters.queued_steps > 10
        assert harness.deferred.misuse == []
        assert not harness.deferred.num_pending


NEXT: dict[str, Callable[[Handle, Handle, int], list[Job[object]]]] = {
    "the_same": lambda tip, _, token: [append(tip, token)],
    "another_token": lambda tip, _, token: [append(tip, (token + 1) % 32)],
    "another_output": lambda tip, _, token: [append(tip, token, output=drawn_with(9))],
    "two_tokens": lambda tip, _, token: [append(tip, token, 5)],
    "no_token": lambda tip, _, __: [append(tip)],
    "shorter": lambda tip, before, token: [TruncateJob("me", tip, before.length), append(before, token)],
    "rewound": lambda _, before, token: [append(before, token, on_stale=StalePolicy.REWIND)],
    "branched_off": lambda _, before, token: [append(before, (token + 1) % 32, on_stale=StalePolicy.FORK)],
    "shared": lambda tip, _, token: [ForkJob("me", tip, tip.length, 1), append(tip, token)],
    "behind_others": lambda tip, _, token: [append(None, 1, 2), append(None, 3), append(tip, token)],
    "released": lambda tip, _, token: [host_calls.release("me", (tip,)), append(None, 1, 2, token), append(tip, token)],
}
"""What a client may do with a sequence on which a Generate stopped, by its last two handles and the last token."""


@pytest.mark.parametrize("num_prompt", range(1, 9))
@pytest.mark.parametrize("name", NEXT)
def test_a_row_of_a_generate_that_stopped_is_nobody_elses_unless_it_is_the_same(name: str, num_prompt: int) -> None:
    """At the next moment a client goes on in its place, while the guess is still in the queue for another Generate."""
    prompt = range(num_prompt)
    with Harness() as plain:
        tokens = start(plain, generate(None, *prompt, output=GREEDY, max_tokens=9)).branch().tokens
    num_drawn = tokens.index(tokens[-1]) + 1
    stop = StopRules(token_ids=frozenset({tokens[-1]}))

    def run(harness: Harness, executor: FakeExecutor) -> list[object]:
        rounds = Rounds(harness)
        other = rounds.start(generate(None, 9, 9, output=GREEDY, max_tokens=30))
        stream = rounds.start(generate(None, *prompt, output=GREEDY, stop=stop))
        while not stream.is_over:
            rounds.run(1)
        tip, before = reversed(stream.branch().handles[-2:] if num_drawn > 1 else stream.branch().handles * 2)
        pending = rounds.ask_all(*NEXT[name](tip, before, tokens[-1]))
        rounds.finish()
        check_pool(harness, executor)
        return [what_became_of(other.branch()), *map(outcome_of, pending)]

    plain = Harness()
    expected = run(plain, plain.executor)
    for is_eager in (False, True):
        harness = DeferredHarness(is_eager=is_eager)
        assert run(harness, harness.inner) == expected
        assert harness.deferred.misuse == []
        assert harness.engine.counters.discarded_rows <= (name != "the_same")
