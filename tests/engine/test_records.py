"""Replay records: what is small stays as long as the sequence, what is bulky is bounded for all and for each."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ferrule_server.engine.appends.records import ReplayRecords
from ferrule_server.engine.jobs import AppendJob, AppendResult, OutputRequest
from ferrule_server.executor.base import OutputSpec, RowOutput, SampleSpec, Shaping
from ferrule_server.kv.handle import Handle
from ferrule_server.quotas import QuotaLimits
from tests.engine.harness import Harness, append

SPEC = OutputRequest(OutputSpec(full_logits=True))
ROW_BYTES = 200 + 400
UNSEEDED_LOGITS = OutputRequest(OutputSpec(full_logits=True, sample=SampleSpec()), is_seeded=False)
UNSEEDED_ROWS = OutputRequest(OutputSpec(sample=SampleSpec()), all_positions=True, is_seeded=False)


def asking(output: OutputRequest) -> AppendJob:
    """An append of one token behind length 1."""
    return AppendJob("me", (5,), Handle("x", 1, bytes(16)), output)


def keep(
    records: ReplayRecords, handle_id: str, principal: str = "me", num_rows: int = 1, *, bulky: bool = True
) -> None:
    """Record an append of one token behind length 1, with rows of 100 logits each."""
    logits = np.zeros(100, np.float32) if bulky else None
    rows = tuple(RowOutput(2, token=7, logits=logits) for _ in range(num_rows))
    job = AppendJob(principal, (5,), Handle("x", 1, bytes(16)), SPEC)
    records.keep(handle_id, 1, job, AppendResult(Handle("x", 2, bytes(16)), rows, seed=11))
    records.check_integrity()


def has_rows(records: ReplayRecords, handle_id: str) -> bool:
    """Whether the rows are still there; the record itself must be."""
    record = records.find(handle_id, 1, 1, asking(SPEC))
    assert record is not None
    assert record.result.seed == 11
    return record.is_whole


def test_bulky_rows_are_dropped_beyond_the_bound_the_oldest_first() -> None:
    """The seed stays, and so does the record itself."""
    records = ReplayRecords(3 * ROW_BYTES)
    for name in "abcd":
        keep(records, name)
    assert [has_rows(records, name) for name in "abcd"] == [False, True, True, True]
    keep(records, "b")  # appended again: the youngest now
    keep(records, "e")
    assert [has_rows(records, name) for name in "abcde"] == [False, True, False, True, True]
    assert len(records) == 5


def test_a_principal_has_a_bound_of_its_own() -> None:
    """Its own oldest go; those of others stay."""
    limits = {"small": QuotaLimits(retained_bytes=2 * ROW_BYTES), "large": QuotaLimits()}
    records = ReplayRecords(100 * ROW_BYTES, limits.__getitem__)
    keep(records, "x", "large")
    for name in "abc":
        keep(records, name, "small")
    assert [has_rows(records, name) for name in "xabc"] == [True, False, True, True]
    assert records.memory.of("small") == 2 * ROW_BYTES
    keep(records, "d", "small", num_rows=3)
    assert records.memory.of("small") == 0
    assert not has_rows(records, "d")


def test_a_single_row_of_numbers_costs_nothing_and_stays() -> None:
    """Tokens and log-probabilities are kept as long as the sequence, whatever the bound."""
    records = ReplayRecords(0)
    keep(records, "small", bulky=False)
    keep(records, "rows", num_rows=2, bulky=False)
    assert has_rows(records, "small")
    assert not has_rows(records, "rows")
    assert records.memory.num_held == 0


def test_a_long_request_counts_as_well_and_is_known_again_when_it_was_dropped() -> None:
    """Thousands of biases stay with every sequence else, on nobody's account; a retry of them still finds its seed."""
    bias = tuple((token_id, 0.5) for token_id in range(4096))
    shaped = OutputSpec(sample=SampleSpec(seed=1), shaping=Shaping(bias=bias), logprob_ids=tuple(range(1000)))
    output = OutputRequest(shaped, is_seeded=False)
    other = dataclasses.replace(output, spec=dataclasses.replace(shaped, shaping=Shaping(bias=bias[1:])))
    result = AppendResult(Handle("x", 2, bytes(16)), (RowOutput(2, token=7),), seed=11)
    records = ReplayRecords(1_200_000)
    for name in "abc":
        records.keep(name, 1, asking(output), result)
        records.check_integrity()
    assert records.memory.num_held > 4096 * 100
    kept = [records.find(name, 1, 1, asking(output)) for name in "abc"]
    assert [each is not None and each.result.seed for each in kept] == [11, 11, 11]
    assert [each is not None and not each.is_whole for each in kept] == [True, False, False]
    assert [records.find(name, 1, 1, asking(other)) for name in "abc"] == [None] * 3
    assert kept[0] is not None
    assert isinstance(kept[0].output, bytes)


def test_nothing_is_left_of_what_is_forgotten() -> None:
    """Forgetting twice, or what never was, changes nothing."""
    records = ReplayRecords(10 * ROW_BYTES)
    keep(records, "a")
    keep(records, "b", bulky=False)
    for name in ("a", "a", "b", "nobody"):
        records.forget(name)
        records.check_integrity()
    assert (len(records), records.memory.num_held) == (0, 0)


def test_only_the_append_that_was_recorded_is_found() -> None:
    """Another start, number of tokens or policy is another append."""
    records = ReplayRecords(10 * ROW_BYTES)
    keep(records, "a")
    assert records.find("a", 1, 1, asking(SPEC)) is not None
    assert records.find("a", 2, 1, asking(SPEC)) is None
    assert records.find("a", 1, 2, asking(SPEC)) is None
    assert records.find("a", 1, 1, asking(UNSEEDED_LOGITS)) is None


@pytest.mark.parametrize("output", [UNSEEDED_LOGITS, UNSEEDED_ROWS])
def test_an_exact_retry_needs_no_seed_though_its_rows_were_dropped(output: OutputRequest) -> None:
    """The seed that was drawn is remembered, so the same tokens come out again."""
    with Harness(retained_bytes=0) as harness:
        first = harness.prefill(1, 2, 3)
        once = harness.decode(first.handle, 4, 5, output=output)
        again = harness.decode(first.handle, 4, 5, output=output)
        assert again.replayed
        assert again.recomputed
        assert again.seed == once.seed
        assert [row.token for row in again.rows] == [row.token for row in once.rows]
        third = harness.submit(append(first.handle, 4, 5, output=output)).result()
        assert [row.token for row in third.rows] == [row.token for row in once.rows]


def test_the_next_token_of_the_same_request_replaces_the_record() -> None:
    """Whether it is small again or not, and whether its request was made anew: only the newest is found."""
    small, large = RowOutput(3, token=8), RowOutput(3, token=8, logits=np.zeros(100, np.float32))
    output = OutputRequest(OutputSpec(greedy=True))
    for row in (small, large):
        for other in (output, dataclasses.replace(output), OutputRequest(OutputSpec(greedy=True, entropy=True))):
            records = ReplayRecords(1 << 20)
            first, second = AppendJob("me", (5,), None, output), AppendJob("me", (6,), None, other)
            records.keep("a", 1, first, AppendResult(Handle("x", 2, bytes(16)), (RowOutput(2, token=6),), seed=1))
            record = records.find("a", 1, 1, first)
            assert record is not None
            answer = AppendResult(Handle("x", 3, bytes(16)), (row,), seed=2)
            records.keep("a", 2, second, answer)
            records.check_integrity()
            assert records.find("a", 1, 1, first) is None
            found = records.find("a", 2, 1, second)
            assert found is not None
            assert (found.result, found.result.seed, found.num_tokens, found.start) == (answer, 2, 1, 2)
            assert (found is record) == (row is small and other is output)
