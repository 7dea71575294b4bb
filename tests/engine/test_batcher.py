"""The batcher: who gets how many rows of a step, within a principal and between them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.jobs import AppendJob, Drafts, OutputRequest
from ferrule_server.engine.steps.batcher import DECODE_ROWS, Batcher, Chunk
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.reservation import Reservation
from ferrule_server.kv.sequence import Sequence
from tests.engine.harness import Pending

SINK = Pending()
SEQUENCE = object.__new__(Sequence)
"""Some sequence: the batcher asks only whether there is one, and for its name."""
SEQUENCE.handle_id = "somebody"


class Clock:
    """Nanoseconds that pass when told to."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        """Return the time."""
        return self.now_ns


def running(num_tokens: int, principal: str, sequence: Sequence | None) -> RunningAppend:
    """An append of which nothing has been run."""
    handle = None if sequence is None else Handle("id", 4, bytes(16))
    job = AppendJob(principal, (1,) * num_tokens, handle, OutputRequest(None))
    verdict = Verdict.CREATE if sequence is None else Verdict.APPEND
    reservation = Reservation(verdict, sequence, principal, 0, num_tokens, [], [], [])
    return RunningAppend(job, SINK, reservation, job.token_ids, specs={})


def prompt(num_tokens: int, principal: str = "me") -> RunningAppend:
    """A new sequence."""
    return running(num_tokens, principal, None)


def decode(principal: str = "me", num_tokens: int = 1) -> RunningAppend:
    """An append to a sequence."""
    return running(num_tokens, principal, SEQUENCE)


def cohort(run: RunningAppend, number: int) -> RunningAppend:
    """The append as one of a cohort."""
    run.job.cohort = number
    return run


def batcher(max_rows: int) -> Batcher:
    """A batcher for which no time passes."""
    return Batcher(max_rows, None, Clock())


def rows_of(chunks: list[Chunk]) -> list[int]:
    """Rows of each chunk, in their order."""
    return [chunk.num_rows for chunk in chunks]


def by_principal(chunks: list[Chunk]) -> dict[str, int]:
    """Rows of each principal."""
    counts: Counter[str] = Counter()
    for chunk in chunks:
        counts[chunk.run.job.principal] += chunk.num_rows
    return dict(counts)


def advance(chunks: list[Chunk], runs: list[RunningAppend]) -> list[RunningAppend]:
    """Run the chunks and return what has rows left."""
    for chunk in chunks:
        chunk.run.cursor += chunk.num_rows
    return [run for run in runs if run.remaining]


def test_decodes_that_fit_are_all_run_in_their_order() -> None:
    """Nothing is shared out while there is enough."""
    runs = [decode("a"), decode("b", 3), decode("a", DECODE_ROWS)]
    chunks = batcher(64).plan(runs)
    assert [chunk.run for chunk in chunks] == runs
    assert rows_of(chunks) == [1, 3, 8]


@pytest.mark.parametrize(
    ("max_rows", "prompts", "rows"),
    [
        (40, {"me": [200, 60, 12]}, {"me": [(200, 20), (60, 8), (12, 12)]}),
        (15, {"me": [7, 8]}, {"me": [(8, 8), (7, 7)]}),
        (40, {"me": [7, 8], "other": [20, 5]}, {"me": [(8, 8), (7, 7)], "other": [(20, 20), (5, 5)]}),
        (64, {"flood": [1000] * 50, "calm": [300]}, {"flood": [(1000, 16), (1000, 16)], "calm": [(300, 32)]}),
        (100, {"a": [1000], "b": [10], "c": [1000]}, {"a": [(1000, 45)], "b": [(10, 10)], "c": [(1000, 45)]}),
    ],
    ids=["one alone", "all fit", "all of two fit", "a flood", "one is short"],
)
def test_rows_of_prompts_are_shared_equally_between_principals(
    max_rows: int, prompts: dict[str, list[int]], rows: dict[str, list[tuple[int, int]]]
) -> None:
    """None is cut while there is room for all; of a principal's part its oldest prompt has half, then the shortest."""
    had: dict[str, list[tuple[int, int]]] = {name: [] for name in prompts}
    for chunk in batcher(max_rows).plan([prompt(size, name) for name, sizes in prompts.items() for size in sizes]):
        had[chunk.run.job.principal].append((len(chunk.run.job.token_ids), chunk.num_rows))
    assert {name: sorted(each, reverse=True) for name, each in had.items()} == rows


def test_a_cohort_that_fits_is_one_step() -> None:
    """Its prefills are not held back, neither for its own decodes nor for others; prompts wait for the next step."""
    each = batcher(64)
    for number in range(1, 50):
        runs = [cohort(decode(), number) for _ in range(20)] + [cohort(prompt(22), number) for _ in range(2)]
        chunks = each.plan(runs)
        assert sorted(rows_of(chunks)) == [1] * 20 + [22, 22]
        each.learn(chunks, 10_000_000)
    mixed = [decode(), *(cohort(decode(), 99) for _ in range(19)), cohort(prompt(44), 99)]
    assert sum(rows_of(each.plan(mixed))) == 64
    beside = [cohort(decode(), 99), cohort(prompt(20), 99), prompt(40, "other")]
    each = batcher(64)
    assert by_principal(each.plan(beside)) == {"me": 21}
    assert by_principal(each.plan(beside)) == {"other": 40}, "what was left out goes next, without a cohort"


def test_what_is_left_of_a_cohort_does_not_wait_for_its_own_decodes() -> None:
    """Larger than a step: the rest has the whole next one, unless somebody else decodes."""
    each = batcher(64)
    runs = [*(cohort(decode(), 7) for _ in range(10)), cohort(prompt(100), 7)]
    chunks = each.plan(runs)
    assert sum(rows_of(chunks)) == 64
    left = advance(chunks, runs)
    each.learn(chunks, 10_000_000)
    assert rows_of(each.plan(left)) == [46]
    assert sum(rows_of(each.plan([replace(left[0], job=prompt(1).job)]))) < 46


def test_a_verify_of_any_length_is_a_decode() -> None:
    """It goes before prompts, and as a whole where it fits."""
    long = decode(num_tokens=40)
    long.job.drafts = Drafts(39)
    chunks = batcher(64).plan([prompt(100), long, decode()])
    assert [chunk.run for chunk in chunks[:2]] == [long, chunks[1].run]
    assert rows_of(chunks[:2]) == [40, 1]


def test_the_drafts_alone_make_a_long_verify_a_decode() -> None:
    """One that brings a prompt's worth of certain tokens is a prefill: whoever decodes does not wait for all of it."""
    long = decode("flood", num_tokens=1000)
    long.job.drafts = Drafts(3)
    chunks = batcher(512).plan([long, decode("calm")])
    assert chunks[0].run is not long
    assert by_principal(chunks)["calm"] == 1
    assert by_principal(chunks).get("flood", 0) <= 64


def test_principals_take_turns_where_there_is_no_room_for_all() -> None:
    """16 rows for 30 principals: two at a time, and after a round all have had the same."""
    each = batcher(16)
    runs = [prompt(10_000, f"p{i}") for i in range(30)]
    served: Counter[str] = Counter()
    for _ in range(30):
        chunks = each.plan(runs)
        assert len(chunks) == 2
        served.update(by_principal(chunks))
        advance(chunks, runs)
    assert set(served.values()) == {16}


def test_who_comes_later_has_no_credit_for_its_absence() -> None:
    """A newcomer starts level: it neither waits nor goes first for long."""
    each = batcher(8)
    old = [prompt(10_000, "a"), prompt(10_000, "b")]
    for _ in range(100):
        advance(each.plan(old), old)
    runs = [*old, prompt(10_000, "new")]
    served: Counter[str] = Counter()
    for _ in range(30):
        chunks = each.plan(runs)
        served.update(by_principal(chunks))
        advance(chunks, runs)
    assert set(served.values()) == {80}


def test_who_stays_is_not_starved_by_many_who_come_and_go() -> None:
    """Short prompts that end in each step and are sent again leave a long one its part, however they take turns."""
    for num_others in (2, 3, 5, 8, 13):
        each = batcher(16)
        long = prompt(10**6, "long")
        others = {name: prompt(8, name) for name in (f"p{i}" for i in range(num_others))}
        away: list[str] = []
        served: Counter[str] = Counter()
        for _ in range(300):
            chunks = each.plan([long, *others.values()])
            served.update(by_principal(chunks))
            advance(chunks, [])
            back, away = away, [name for name, run in others.items() if not run.remaining]
            others = {name: run for name, run in others.items() if run.remaining}
            others |= {name: prompt(8, name) for name in back}
        assert served["long"] >= 0.8 * 300 * 16 / (num_others + 1), f"{num_others} others: {served}"


def test_what_was_to_spare_is_not_held_against_who_took_it() -> None:
    """A long prompt had all that a small one left; when a third comes, the two long ones have the same."""
    each = batcher(16)
    long = prompt(10**6, "long")
    for _ in range(200):
        advance(each.plan([long, prompt(1, "small")]), [])
    third, served = prompt(10**6, "third"), Counter[str]()
    for _ in range(100):
        served.update(by_principal(each.plan([long, prompt(1, "small"), third])))
    assert abs(served["long"] - served["third"]) <= 16


def test_decodes_that_do_not_fit_are_shared_between_principals() -> None:
    """One principal's thousand decodes do not hold up another's one, nor do they starve."""
    each = batcher(64)
    many = [decode("many") for _ in range(1000)]
    chunks = each.plan([*many, decode("few"), decode("few")])
    assert by_principal(chunks) == {"many": 62, "few": 2}
    left = advance(chunks, many)
    num_steps = 1
    while left:
        left = advance(each.plan([*left, decode("few"), decode("few")]), left)
        num_steps += 1
    assert num_steps == 17


def test_more_principals_than_rows_take_turns() -> None:
    """Everyone's decode is run within so many steps as it takes to serve all once."""
    each = batcher(4)
    runs = [decode(f"p{i}") for i in range(10)]
    num_steps = 0
    left = runs
    while left:
        left = advance(each.plan(left), left)
        num_steps += 1
    assert num_steps == 3


def test_a_prompt_is_not_starved_by_decodes_that_fill_every_step() -> None:
    """One row in eight is kept for prefills, once it is known what decodes alone take."""
    each = batcher(64)
    waiting = prompt(400)
    for _ in range(200):
        chunks = each.plan([*(decode() for _ in range(100)), waiting])
        assert sum(rows_of(chunks)) <= 64
        each.learn(chunks, 10_000_000)
        if not advance(chunks, [waiting]):
            break
    assert waiting.remaining == 0


def test_a_flood_of_short_prompts_is_a_flood_of_prompts() -> None:
    """New sequences are prefills however short they are, so they do not crowd out the decodes."""
    each = batcher(512)
    for _ in range(10):
        each.learn(each.plan([decode()]), 10_000_000)
    chunks = each.plan([decode("calm"), *(prompt(2, "flood") for _ in range(400))])
    assert chunks[0].run.job.principal == "calm"
    assert by_principal(chunks) == {"calm": 1, "flood": 16}


def test_prefills_are_held_back_only_while_somebody_decodes() -> None:
    """A decode step takes 10 ms, so do 200 prefill rows; without decodes 512 are run."""
    clock = Clock()
    each = Batcher(512, None, clock)
    calm, flood = decode("calm"), prompt(10**6, "flood")
    for _ in range(50):
        for runs in ([calm], [calm, flood]):
            calm.job.submitted_ns = clock.now_ns
            chunks = each.plan(runs)
            step_ns = 10_000_000 + 50_000 * sum(chunk.num_rows for chunk in chunks if chunk.run is flood)
            clock.now_ns += step_ns
            each.learn(chunks, step_ns)
    calm.job.submitted_ns = clock.now_ns
    assert 180 <= by_principal(each.plan([calm, flood]))["flood"] <= 200
    assert by_principal(each.plan([flood]))["flood"] < 512
    clock.now_ns += 2 * 10**9
    assert by_principal(each.plan([flood])) == {"flood": 512}


def test_prefills_alone_are_never_held_back() -> None:
    """Nobody decodes: as many rows as there is room for, from the first step on, however long that takes."""
    each = Batcher(512, 0.001, Clock())
    for _ in range(100):
        chunks = each.plan([prompt(10**6)])
        assert rows_of(chunks) == [512]
        each.learn(chunks, 5 * 10**8)


def test_nobody_is_held_back_by_decodes_of_its_own() -> None:
    """A question behind an answer, and the next prompt after a release, are cut by the rows of a step alone."""
    each = batcher(512)
    for _ in range(10):
        each.learn(each.plan([decode()]), 10_000_000)
    assert rows_of(each.plan([running(1000, "me", SEQUENCE)])) == [512]
    assert rows_of(each.plan([prompt(1000)])) != [512]
    each.forget(SEQUENCE.handle_id)
    assert rows_of(each.plan([prompt(1000)])) == [512]


def test_every_plan_makes_progress() -> None:
    """Whatever runs, in whatever room, is ended by steps of at least one row, none above the bound."""
    for max_rows in (2, 3, 16, 17, 512):
        each = batcher(max_rows)
        runs = [prompt(33, "a"), decode("b"), prompt(1, "b"), decode("a", 8), prompt(70, "c"), decode("c", 5)]
        runs = [replace(run) for run in runs]
        left, num_steps = runs, 0
        while left:
            chunks = each.plan(left)
            assert len({id(chunk.run) for chunk in chunks}) == len(chunks)
            assert all(1 <= chunk.num_rows <= chunk.run.remaining for chunk in chunks)
            assert 1 <= sum(rows_of(chunks)) <= max_rows
            each.learn(chunks, 1_000_000)
            left = advance(chunks, left)
            num_steps += 1
            assert num_steps < 500


def test_a_step_that_was_queued_ahead_is_charged_too() -> None:
    """It was not planned; from now on no step is queued ahead until nobody is ahead of others any more."""
    clock = Clock()
    each = Batcher(512, None, clock)
    calm, flood = decode("calm"), [decode("flood") for _ in range(64)]
    each.learn(each.plan([calm]), 1_000_000)
    each.learn([Chunk(run, 1) for run in (*flood, calm)], 20_000_000)
    assert each.has_debts
    clock.now_ns += 1_000_000
    assert by_principal(each.plan([*flood, calm])) == {"calm": 1}
    assert each.plan(flood) == []
    clock.now_ns += int(each.hold_s * 1e9) + 1
    assert by_principal(each.plan(flood))["flood"] >= 1
    clock.now_ns += 2 * 10**9
    assert by_principal(each.plan(flood)) == {"flood": 64}
    assert not each.has_debts
