"""What a Generate makes under its request_id, no other request adds to: of another size, kind or content."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.engine.jobs import AppendJob, ForkJob, GenerateJob, OutputRequest, StopRules
from ferrule_server.errors import FerruleError, RequestIdReused
from ferrule_server.kv.handle import Handle, StalePolicy
from tests.engine.harness import GREEDY, NOTHING, Harness, append
from tests.engine.streams import drawn_with, generate, start

FIRST = generate(None, 1, 2, 3, output=GREEDY, request_id="a", num_branches=2, max_tokens=3)

_Creating = AppendJob | ForkJob | GenerateJob


def outcome_of(harness: Harness, job: _Creating) -> FerruleError | None:
    """Run a job to its end; returns why it was refused, None where it was not."""
    if isinstance(job, GenerateJob):
        call = start(harness, dataclasses.replace(job))
        return call.refusal()
    outcome = harness.submit(dataclasses.replace(job)).outcome()
    return outcome if isinstance(outcome, FerruleError) else None


def num_sequences(harness: Harness) -> int:
    """How many live."""
    return harness.engine.snapshot().num_sequences


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(FIRST, num_branches=1),
        dataclasses.replace(FIRST, num_branches=3),
        dataclasses.replace(FIRST, token_ids=(1, 2)),
        dataclasses.replace(FIRST, output=drawn_with(3)),
        dataclasses.replace(FIRST, ttl_s=90.0),
        append(None, 1, 2, 3, output=FIRST.output, request_id="a"),
    ],
    ids=["n=1", "n=3", "tokens", "policy", "ttl", "Prefill"],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_another_request_with_the_id_of_a_generate_is_refused(
    other: GenerateJob | AppendJob, is_reversed: bool
) -> None:
    """And the other way round: whichever comes first, the second makes nothing and appends nothing."""
    first, second = (other, FIRST) if is_reversed else (FIRST, other)
    with Harness() as harness:
        assert outcome_of(harness, first) is None
        num_before, num_steps = num_sequences(harness), len(harness.executor.batches)
        assert isinstance(outcome_of(harness, second), RequestIdReused)
        assert num_sequences(harness) == num_before
        assert len(harness.executor.batches) == num_steps
        assert outcome_of(harness, first) is None
        assert num_sequences(harness) == num_before


@pytest.mark.parametrize("on_stale", StalePolicy)
@pytest.mark.parametrize("counts", [(2, 1), (2, 3), (3, 2)])
def test_branches_of_a_handle_are_made_by_one_size_only(
    harness: Harness, on_stale: StalePolicy, counts: tuple[int, int]
) -> None:
    """Also where the first branch is the sequence of the handle itself, and the tip stays where it was."""
    handle = harness.prefill(1, 2, 3).handle
    first, second = (
        generate(handle, 4, on_stale=on_stale, request_id="a", num_branches=count, max_tokens=3) for count in counts
    )
    assert outcome_of(harness, first) is None
    num_before, num_steps = num_sequences(harness), len(harness.executor.batches)
    assert isinstance(outcome_of(harness, second), RequestIdReused)
    assert (num_sequences(harness), len(harness.executor.batches)) == (num_before, num_steps)
    for other in (append(None, 7, request_id="a"), ForkJob("me", handle, 3, 1, request_id="a")):
        assert isinstance(outcome_of(harness, other), RequestIdReused)
    assert num_sequences(harness) == num_before


def test_how_long_a_loop_goes_on_is_no_part_of_what_it_makes(harness: Harness) -> None:
    """max_tokens and stops may differ: a client that has read some of it asks for the rest of it."""
    assert outcome_of(harness, FIRST) is None
    for stop in (StopRules(max_tokens=9), StopRules(max_tokens=1), StopRules(4, sequences=((1, 2),))):
        assert outcome_of(harness, dataclasses.replace(FIRST, stop=stop)) is None
    assert num_sequences(harness) == 2


KINDS: list[Callable[[Handle, tuple[int, ...], OutputRequest, int], AppendJob | ForkJob | GenerateJob]] = [
    lambda _, ids, output, __: AppendJob("me", ids, None, output, request_id="a"),
    lambda _, ids, output, n: generate(None, *ids, output=output, request_id="a", num_branches=n, max_tokens=n),
    lambda handle, _, __, n: ForkJob("me", handle, handle.length, n, request_id="a"),
    lambda handle, ids, output, n: generate(
        handle, *ids, output=output, on_stale=StalePolicy.FORK, request_id="a", num_branches=n, max_tokens=2
    ),
    lambda handle, ids, output, n: generate(
        handle, *ids, output=output, on_stale=StalePolicy.REWIND, request_id="a", num_branches=n, max_tokens=3
    ),
]
REPEATS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from([(1, 2), (1, 2, 3), (9,)]),
        st.sampled_from([GREEDY, drawn_with(3)]),
        st.integers(1, 4),
    ),
    min_size=2,
    max_size=8,
)


@given(REPEATS)
@settings(max_examples=150)
def test_whatever_comes_with_one_id_only_one_request_makes_sequences(
    requests: list[
        tuple[
            Callable[[Handle, tuple[int, ...], OutputRequest, int], AppendJob | ForkJob | GenerateJob],
            tuple[int, ...],
            OutputRequest,
            int,
        ]
    ],
) -> None:
    """Of all requests with one id, one makes sequences; what differs from it is refused or makes nothing."""
    with Harness() as harness:
        handle = harness.prefill(5, 6, 7).handle
        harness.decode(handle, 8, output=NOTHING)
        makers: set[int] = set()
        for make, token_ids, output, count in requests:
            num_before = num_sequences(harness)
            outcome_of(harness, make(handle, token_ids, output, count))
            if num_sequences(harness) > num_before:
                makers.add(len(makers))
        assert len(makers) <= 1
        harness.engine._lanes.creations.check_integrity(
            {each.handle_id for each in harness.store.registry.soonest(1000)}
        )
