"""Appends used again: the tokens of a Generate are those of appends made anew, and so is all that anybody can tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.jobs import (
    AppendResult,
    Finish,
    ForkJob,
    GenerateJob,
    Job,
    OutputRequest,
    StopRules,
    TruncateJob,
)
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import OutputSpec, SampleSpec
from ferrule_server.kv.handle import StalePolicy
from ferrule_server.quotas import QuotaLimits
from tests.engine.deferred import DeferredHarness, Rounds, what_became_of
from tests.engine.harness import GREEDY, Harness, Pending, append
from tests.engine.streams import Branch, Stream, drawn_with, generate, start
from tests.fakes import FakeExecutor

SCORED = OutputRequest(OutputSpec(sample=SampleSpec(seed=5), logprobs=True))
Scene = Callable[[Harness], object]


def make_anew(harness: Harness) -> None:
    """Have no append used again."""
    harness.engine._lanes._enter_again = lambda *_: False  # type: ignore[method-assign]


def count_again(harness: Harness) -> Counter[bool]:
    """Count the appends that are used again, and those that were to be."""
    counts: Counter[bool] = Counter()
    enter_again = harness.engine._lanes._enter_again

    def counted(run: RunningAppend, at: float) -> bool:
        counts[taken := enter_again(run, at)] += 1
        return taken

    harness.engine._lanes._enter_again = counted  # type: ignore[method-assign]
    return counts


def told(pending: Pending) -> object:
    """What somebody heard, names of sequences left out."""
    outcome = pending.outcome()
    if isinstance(outcome, FerruleError):
        return outcome.reason
    if isinstance(outcome, AppendResult):
        kind = (outcome.replayed, outcome.recomputed, outcome.cached_tokens, outcome.ttl_s)
        return (outcome.handle.length, outcome.handle.lineage, outcome.rows, outcome.seed, kind)
    return type(outcome)


def state_of(harness: Harness) -> object:
    """All that is left in the store and in the records, and what was counted; names left out."""
    counters = harness.engine.counters
    sequences = sorted(
        (list(each.token_ids), each.block_ids, each.ttl_s, each.spare_ids, each.num_pins, each.reserved_length)
        for each in harness.store.registry
    )
    held = harness.engine._lanes.admission.records._records.values()
    records = sorted(
        (each.start, each.num_tokens, str(each.result.seed), str(each.is_whole and each.result.rows)) for each in held
    )
    names = ("decodes", "prefills", "replays", "recomputed", "queries", "joined", "released", "discarded_rows")
    return (sequences, records, [getattr(counters, name) for name in names])


def branches_of(harness: Harness) -> object:
    """Streams of all sorts beside each other."""
    jobs = [
        generate(None, 1, 2, 3, output=SCORED, max_tokens=40),
        generate(None, *range(20), output=drawn_with(3), max_tokens=25, num_branches=3),
        generate(None, 5, output=GREEDY, stop=StopRules(max_tokens=40, token_ids=frozenset({3, 4, 5}))),
    ]
    streams = [Stream() for _ in jobs]
    harness.engine.submit(list(zip(jobs, streams, strict=True)))
    Rounds(harness).finish()
    return [what_became_of(branch) for stream in streams for branch in stream.branches()]


def retries_of(harness: Harness) -> object:
    """The last token is sent again, by itself and by a Generate that walks over what is there."""
    rounds = Rounds(harness)
    stream = rounds.start(generate(None, 1, 2, 3, output=drawn_with(3), max_tokens=20))
    rounds.finish()
    branch = stream.branch()
    before, last = branch.handles[-2], branch.tokens[-2]
    again = rounds.ask(append(before, last, output=drawn_with(3)))
    other = rounds.ask(append(before, last, output=GREEDY))
    rounds.finish()
    walk = rounds.start(generate(branch.handles[2], branch.tokens[2], output=drawn_with(3), max_tokens=30))
    rounds.finish()
    assert told(again)[-1][:2] == (True, False)  # type: ignore[index]
    return [told(again), told(other), what_became_of(walk.branch())]


def room_runs_out(harness: Harness) -> object:
    """The pool, for somebody in the middle of a block and for somebody at its end."""
    rounds = Rounds(harness)
    streams = [
        rounds.start(generate(None, *range(length), output=drawn_with(length), max_tokens=900)) for length in (3, 4, 6)
    ]
    rounds.finish()
    branches = [stream.branch() for stream in streams]
    assert Finish.KV_BLOCKS_EXHAUSTED in {branch.last.finish for branch in branches}
    return [what_became_of(branch) for branch in branches]


def meddled_with(harness: Harness) -> object:
    """Somebody else forks, truncates, rewrites and appends meanwhile, at every round."""
    heard: list[object] = []
    for when in range(3, 24):
        rounds = Rounds(harness)
        stream = rounds.start(generate(None, 1, 2, 3, output=drawn_with(when), max_tokens=30))
        rounds.run(when)
        tip, drawn = stream.so_far()[0].handles[-1], stream.so_far()[0].tokens[-1]
        choices: list[list[Job[object]]] = [
            [ForkJob("me", tip, tip.length, 1)],
            [TruncateJob("me", tip, 2)],
            [append(tip, drawn, output=drawn_with(when))],
            [append(tip, (drawn + 1) % 32), append(tip, 9, on_stale=StalePolicy.FORK)],
            [append(stream.so_far()[0].handles[0], 8, on_stale=StalePolicy.REWIND)],
            [TruncateJob("me", tip, tip.length - 1), append(tip, drawn)],
        ]
        asked = rounds.ask_all(*choices[when % 6])
        rounds.finish()
        heard += [what_became_of(stream.branch()), *map(told, asked)]
    return heard


def stand_still(rounds: Rounds, seed: int, num_rows: int = 6) -> Stream:
    """A Generate whose reader has had so many rows and takes no more for now."""
    job = generate(None, 1, 2, 3, output=drawn_with(seed), max_tokens=20)
    job.window.limit_bytes = num_rows * job.row_bytes
    stream = rounds.start(job)
    rounds.run(100)
    assert len(stream.so_far()[0].tokens) == num_rows
    return stream


def read_on(rounds: Rounds, stream: Stream) -> None:
    """Its reader takes all there will be."""
    (driver,) = rounds.harness.engine._drivers.active
    driver.job.window.taken_bytes += 1 << 30
    rounds.harness.engine.resume(driver.job)


def while_it_stands_still(harness: Harness) -> object:
    """Somebody appends, rewrites, or has an append in flight when the reader goes on; or the lease is over."""
    heard: list[object] = []
    for case in range(6):
        rounds = Rounds(harness)
        stream = stand_still(rounds, case)
        tip, drawn = stream.so_far()[0].handles[-1], stream.so_far()[0].tokens[-1]
        asked: list[Pending] = []
        if case in (1, 2):
            asked.append(rounds.ask(append(tip, drawn, output=drawn_with(case))))
        if case == 2:
            rounds.run(10)
        if case == 3:  # other tokens of the same length
            asked.append(rounds.ask(append(stream.so_far()[0].handles[-2], 31, on_stale=StalePolicy.REWIND)))
            rounds.run(10)
        if case == 4:
            asked.append(rounds.ask(append(tip, (drawn + 1) % 32)))
        sequence = harness.store.resolve(tip, "me")
        if case == 5:
            sequence.expires_at = -1.0
        read_on(rounds, stream)
        rounds.run(100)
        harness.store.renew(sequence)
        rounds.finish()
        heard += [what_became_of(stream.branch()), *map(told, asked)]
    reasons = [each[3] for each in heard if isinstance(each, tuple) and len(each) == 5 and isinstance(each[0], list)]
    assert reasons == [None, None, None, "HANDLE_STALE", "HANDLE_STALE", "HANDLE_EXPIRED"]
    return heard


def slow_reader(harness: Harness) -> object:
    """The branches stand still again and again; what is likely to follow is not the same from token to token."""
    rounds = Rounds(harness)
    job = generate(None, 1, 2, 3, output=drawn_with(4), max_tokens=32, num_branches=2)
    job.window.limit_bytes = 7 * job.row_bytes
    stream = rounds.start(job)
    for _ in range(60):
        rounds.run(9)
        job.window.taken_bytes = job.window.sent_bytes
        harness.engine.resume(job)
    rounds.finish()
    return list(map(what_became_of, stream.branches()))


def context_is_full(harness: Harness) -> object:
    """At its last token, in the middle of a block."""
    branch = start_and_finish(harness, generate(None, 1, 2, 3, output=drawn_with(1), max_tokens=90))
    assert branch.last.finish is Finish.CONTEXT_FULL
    return what_became_of(branch)


def start_and_finish(harness: Harness, job: GenerateJob) -> Branch:
    """What becomes of one alone."""
    rounds = Rounds(harness)
    stream = rounds.start(job)
    rounds.finish()
    return stream.branch()


SCENES = (branches_of, retries_of, room_runs_out, meddled_with, while_it_stands_still, slow_reader, context_is_full)


@pytest.mark.parametrize("is_piped", [False, True])
@pytest.mark.parametrize("scene", SCENES)
def test_nobody_can_tell_whether_appends_are_used_again(scene: Scene, is_piped: bool) -> None:
    """Neither by what is answered nor by what is left behind."""
    seen: list[object] = []
    for is_made_anew in (False, True):
        executor = FakeExecutor(block_size=4, num_blocks=24 if scene is room_runs_out else 600, max_context=50)
        harness = DeferredHarness(executor) if is_piped else Harness(executor)
        counts = count_again(harness)
        if is_made_anew:
            make_anew(harness)
        seen.append((scene(harness), state_of(harness)))
        assert is_made_anew == (not counts[True])
        harness.check_integrity()
    assert seen[0] == seen[1]


def test_a_quota_ends_a_branch_that_was_used_again() -> None:
    """At the token that needs one block too many."""
    with Harness(FakeExecutor(block_size=4), limits_of=lambda _: QuotaLimits(kv_tokens=16)) as harness:
        counts = count_again(harness)
        branch = start(harness, generate(None, 1, 2, 3, max_tokens=40)).branch()
        assert (len(branch.tokens), branch.last.finish) == (14, Finish.ERROR)
        assert counts[True] > 8
