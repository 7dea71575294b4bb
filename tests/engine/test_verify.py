"""Verify: what holds of the drafts is appended, and nothing else; whatever is lost, repeated, branched or broken."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ferrule_server.engine.jobs import (
    Acceptance,
    AppendJob,
    AppendResult,
    Drafts,
    OutputRequest,
    TruncateJob,
    TruncateResult,
)
from ferrule_server.errors import (
    HandleStale,
    NonFiniteLogits,
    QuotaExceeded,
    RequestIdReused,
    SeedRequired,
)
from ferrule_server.executor.base import DraftDistribution, OutputSpec, SampleSpec, Shaping, TokenMask
from ferrule_server.executor.sampling.distributions import sampling_distribution
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.quotas import QuotaLimits
from tests.engine.harness import GREEDY, NOTHING, Harness, append, logits_of, paged_harness
from tests.fakes import FakeExecutor, fake_logits, fake_next_token

VOCAB = 32
PROMPT = (1, 2, 3)
FULL = OutputRequest(OutputSpec(full_logits=True, greedy=True))
SEEDED = OutputRequest(OutputSpec(sample=SampleSpec(seed=5)))
UNSEEDED = OutputRequest(OutputSpec(sample=SampleSpec()), is_seeded=False)
PENALISED = OutputRequest(OutputSpec(greedy=True, shaping=Shaping(repetition_penalty=1.5, frequency_penalty=0.4)))
EXACT, REJECTION, NONE = Acceptance.EXACT, Acceptance.REJECTION, Acceptance.NONE


def greedy_tokens(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The next ``count`` tokens of the model, one by one."""
    after = tokens
    for _ in range(count):
        after += (fake_next_token(after, VOCAB),)
    return after[len(tokens) :]


def other_than(token: int | None) -> int:
    """Some other token."""
    assert token is not None
    return (token + 1) % VOCAB


def verify(
    handle: Handle | None,
    input_ids: tuple[int, ...],
    draft_ids: tuple[int, ...],
    acceptance: Acceptance = EXACT,
    output: OutputRequest = GREEDY,
    *,
    on_stale: StalePolicy = StalePolicy.FAIL,
    request_id: str = "",
    distributions: tuple[DraftDistribution, ...] = (),
    row_masks: tuple[TokenMask, ...] = (),
    wants_row_handles: bool = True,
) -> AppendJob:
    """A verify job of the principal ``me``."""
    return append(
        handle,
        *input_ids,
        *draft_ids,
        output=output,
        on_stale=on_stale,
        request_id=request_id,
        drafts=Drafts(len(draft_ids), acceptance, distributions, row_masks, wants_row_handles),
    )


def tokens_of(harness: Harness, handle: Handle) -> tuple[int, ...]:
    """What the sequence holds, read once the engine stands still or waits."""
    return tuple(harness.store.resolve(handle, "me").token_ids)


def accepted(result: AppendResult) -> tuple[int, int | None]:
    """Accepted drafts and the token that follows them."""
    assert result.verified is not None
    return result.verified.accepted_count, result.verified.next_token


@pytest.mark.parametrize("num_good", range(6))
@pytest.mark.parametrize("max_step_rows", [2, 4, 64])
def test_drafts_hold_up_to_the_first_that_the_model_would_not_say(num_good: int, max_step_rows: int) -> None:
    """Input and accepted drafts are appended, the row behind them says what comes next; chunks change nothing."""
    input_ids = (4, 5)
    good = greedy_tokens((*PROMPT, *input_ids), 6)
    drafts = (*good[:num_good], *(other_than(each) for each in good[num_good:5]))
    with Harness(max_step_rows=max_step_rows) as harness:
        first = harness.prefill(*PROMPT)
        result = harness.submit(verify(first.handle, input_ids, drafts)).result()
        assert accepted(result) == (num_good, good[num_good])
        assert [row.token for row in result.rows] == list(good[: num_good + 1])
        assert [row.position for row in result.rows] == list(range(5, 5 + num_good + 1))
        after = (*PROMPT, *input_ids, *good[:num_good])
        assert tokens_of(harness, result.handle) == after
        assert result.handle.length == len(after)
        assert not result.replayed
        decoded = harness.decode(result.handle, 9)
        assert decoded.rows[0].token == fake_next_token((*after, 9), VOCAB)


def test_what_does_not_hold_leaves_no_block_behind(harness: Harness) -> None:
    """After a verify of 20 drafts of which none holds, the pool is as after a decode of one token."""
    first = harness.prefill(*PROMPT)
    twin = harness.prefill(9, *PROMPT[1:])
    before = harness.engine.snapshot().free_blocks
    harness.decode(twin.handle, 4)
    decoded = before - harness.engine.snapshot().free_blocks
    drafts = (other_than(greedy_tokens((*PROMPT, 4), 1)[0]),) * 20
    result = harness.submit(verify(first.handle, (4,), drafts)).result()
    assert before - decoded - harness.engine.snapshot().free_blocks == decoded
    sequence = harness.store.resolve(result.handle, "me")
    assert harness.executor.tokens_at(sequence.block_ids, 4) == [*PROMPT, 4]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("num_good", [0, 1, 3, 7])
def test_the_kv_after_a_partial_accept_is_that_of_the_accepted_prefix(num_good: int, block_size: int) -> None:
    """Bit-equal on the paged reference: the same logits later on as if the drafts had never been there."""
    tokens = tuple(range(20, 34))
    with paged_harness(block_size) as verified, paged_harness(block_size) as plain:
        handle, good = plain.prefill(*tokens).handle, [7]
        for _ in range(8):
            step = plain.decode(handle, good[-1], output=FULL)
            assert step.rows[0].token is not None
            handle = step.handle
            good.append(step.rows[0].token)
        drafts = (*good[1 : num_good + 1], *((good[num_good + 1] + 1) % 256,) * 9)
        first = verified.prefill(*tokens).handle
        result = verified.submit(verify(first, (7,), drafts, output=FULL)).result()
        assert accepted(result) == (num_good, good[num_good + 1])
        cold = plain.prefill(*tokens, *good[: num_good + 1], output=replace(FULL, all_positions=True))
        assert logits_of(result) == logits_of(cold)
        for after in ((1, 2, 3), (200,) * 20):
            again, expected = (
                harness.submit(append(at, *after, output=FULL, on_stale=StalePolicy.REWIND)).result()
                for harness, at in ((verified, result.handle), (plain, cold.handle))
            )
            assert logits_of(again) == logits_of(expected)


def test_row_handles_name_every_row_that_is_appended() -> None:
    """Each is good for a query, a fork or a rewind; the last one is the answer's own."""
    good = greedy_tokens((*PROMPT, 4), 3)
    with Harness() as harness:
        first = harness.prefill(*PROMPT)
        result = harness.submit(verify(first.handle, (4,), (*good[:2], other_than(good[2])))).result()
        assert result.verified is not None
        handles = result.verified.row_handles
        assert [handle.length for handle in handles] == [4, 5, 6]
        assert handles[-1] == result.handle
        for row, handle in enumerate(handles):
            assert harness.decode(handle).rows[0].token == good[row]
        job = verify(result.handle, (5,), (6, 7), wants_row_handles=False)
        quiet = harness.submit(job).result()
        assert quiet.verified is not None
        assert quiet.verified.row_handles == ()


def test_where_the_client_decides_all_drafts_are_appended() -> None:
    """All rows come back; going on from a row handle with REWIND drops what did not hold."""
    drafts = (7, 8, 9)
    with Harness() as harness:
        first = harness.prefill(*PROMPT)
        result = harness.submit(verify(first.handle, (4,), drafts, NONE)).result()
        assert accepted(result) == (0, None)
        assert [row.token for row in result.rows] == [
            fake_next_token((*PROMPT, 4, *drafts[:count]), VOCAB) for count in range(4)
        ]
        assert tokens_of(harness, result.handle) == (*PROMPT, 4, *drafts)
        assert result.verified is not None
        assert [handle.length for handle in result.verified.row_handles] == [4, 5, 6, 7]
        back = append(result.verified.row_handles[1], 11, on_stale=StalePolicy.REWIND)
        assert harness.submit(back).result().rows[0].token == fake_next_token((*PROMPT, 4, 7, 11), VOCAB)
        assert harness.engine.counters.accepted_tokens == 0


def test_a_verify_without_drafts_is_a_decode_that_says_what_comes_next(harness: Harness) -> None:
    """Accepted 0 of 0, the token behind the input."""
    first = harness.prefill(*PROMPT)
    for acceptance, output in ((EXACT, GREEDY), (REJECTION, SEEDED)):
        before = tokens_of(harness, first.handle)
        result = harness.submit(verify(first.handle, (4,), (), acceptance, output)).result()
        assert accepted(result) == (0, result.rows[0].token)
        assert tokens_of(harness, result.handle) == (*before, 4)
        first = result


@pytest.mark.parametrize("output", [SEEDED, PENALISED, GREEDY])
def test_an_exact_verify_is_decoding_one_by_one(harness: Harness, output: OutputRequest) -> None:
    """Same seed, same penalties: every token that comes out is the one a decode would have drawn."""
    first = harness.prefill(*PROMPT)
    one_by_one: list[int] = []
    handle, token = harness.prefill(*PROMPT).handle, 4
    for _ in range(6):
        step = harness.decode(handle, token, output=output)
        assert step.rows[0].token is not None
        handle, token = step.handle, step.rows[0].token
        one_by_one.append(token)
    for num_good in (0, 3, 5):
        drafts = (*one_by_one[:num_good], other_than(one_by_one[num_good]))
        branch = harness.submit(verify(first.handle, (4,), drafts, output=output, on_stale=StalePolicy.REWIND)).result()
        assert accepted(branch) == (num_good, one_by_one[num_good])
        assert [row.token for row in branch.rows] == one_by_one[: num_good + 1]


def test_masks_of_rows_stand_in_place_of_the_selections_own() -> None:
    """Each row chooses from its own mask; the penalties and the bias stay."""
    shaping = Shaping(bias=((3, 100.0), (6, 50.0)), mask=_mask(1))
    output = OutputRequest(OutputSpec(greedy=True, shaping=shaping))
    masks = (_mask(3, 6), _mask(6, 7), _mask(9), _mask(10))
    with Harness() as harness:
        first = harness.prefill(*PROMPT)
        result = harness.submit(verify(first.handle, (4,), (3, 6, 5), output=output, row_masks=masks)).result()
        assert accepted(result) == (2, 9)
        assert [row.token for row in result.rows] == [3, 6, 9]


def _mask(*token_ids: int) -> TokenMask:
    """These tokens alone."""
    bits = np.zeros(VOCAB, np.uint8)
    bits[list(token_ids)] = 1
    packed = np.packbits(bits, bitorder="little")
    return TokenMask(packed.tobytes().ljust(16, b"\0"), packed)


def _distribution(probs: list[float], token_ids: list[int] | None = None) -> DraftDistribution:
    """A draft distribution."""
    values = np.array(probs, np.float64)
    ids = None if token_ids is None else np.array(token_ids, np.int32)
    return DraftDistribution(repr((probs, token_ids)).encode().ljust(16)[:16], ids, values)


@pytest.mark.parametrize("has_distributions", [False, True])
def test_speculative_sampling_leaves_the_distribution_of_the_model(has_distributions: bool) -> None:
    """Chi-square over many seeds: the first token that comes out is drawn from the model's own distribution."""
    vocab, drafts, seeds = 8, np.random.default_rng(3), range(3000)
    q = np.array([0.3, 0.3, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
    seen: Counter[int] = Counter()
    with Harness(FakeExecutor(vocab_size=vocab)) as harness:
        first = harness.prefill(*PROMPT)
        for seed in seeds:
            draft = int(drafts.choice(vocab, p=q)) if has_distributions else 2
            distributions = (_distribution(q.tolist()),) if has_distributions else ()
            output = OutputRequest(OutputSpec(sample=SampleSpec(seed=seed)))
            job = verify(
                first.handle,
                (4,),
                (draft,),
                REJECTION,
                output,
                distributions=distributions,
                on_stale=StalePolicy.REWIND,
            )
            job.drafts = replace(job.drafts, wants_row_handles=False)  # type: ignore[type-var]
            result = harness.submit(job).result()
            count, token = accepted(result)
            assert result.rows[0].is_accepted == (count == 1)
            seen[draft if count else int(token or 0)] += 1
    logits = fake_logits((*PROMPT, 4), vocab)
    weights = sampling_distribution(logits, SampleSpec(), float(logits.max())).weights
    expected = weights / weights.sum() * len(seeds)
    chi_square = sum((seen[i] - expected[i]) ** 2 / expected[i] for i in range(vocab))
    assert chi_square < 24.3, f"p < 0.001 with 7 degrees of freedom: {chi_square:.1f}"


def test_the_row_behind_the_last_draft_is_an_ordinary_draw(harness: Harness) -> None:
    """All accepted: the next token is what a plain draw with that seed gives there."""
    first = harness.prefill(*PROMPT)
    certain = tuple(OutputRequest(OutputSpec(sample=SampleSpec(temperature=0, seed=seed))) for seed in (1, 2))
    good = greedy_tokens((*PROMPT, 4), 3)
    result = harness.submit(verify(first.handle, (4,), good[:2], REJECTION, certain[0])).result()
    assert accepted(result) == (2, good[2])
    assert [row.is_accepted for row in result.rows] == [True, True, None]
    assert harness.decode(result.handle, output=certain[1]).rows[0].token == good[2]


# ---- NaN ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_step_rows", [2, 64])
def test_nan_behind_what_holds_does_not_matter(max_step_rows: int) -> None:
    """The row of a draft that was rejected, or follows one that was, may hold anything."""
    good = greedy_tokens((*PROMPT, 4), 3)
    executor = FakeExecutor()
    with Harness(executor, max_step_rows=max_step_rows) as harness:
        first = harness.prefill(*PROMPT)
        bad = next(token for token in range(VOCAB) if token not in (*good, 4, *PROMPT))
        executor.bad_token_ids = {bad}
        result = harness.submit(verify(first.handle, (4,), (good[0], bad, bad, 3))).result()
        assert accepted(result) == (1, good[1])
        assert [row.is_finite for row in result.rows] == [True, True]


@pytest.mark.parametrize("acceptance", [EXACT, NONE])
def test_nan_in_what_holds_fails_the_verify_and_nothing_else(acceptance: Acceptance) -> None:
    """Nothing is appended, a neighbour in the step is answered; where all rows are returned, all count."""
    good = greedy_tokens((*PROMPT, 4), 3)
    executor = FakeExecutor()
    with Harness(executor) as harness:
        first, other = harness.prefill(*PROMPT), harness.prefill(7)
        executor.bad_token_ids = {good[1]}
        job = verify(first.handle, (4,), good, acceptance)
        failed, neighbour = harness.submit_all(job, append(other.handle, 8))
        assert isinstance(failed.error(), NonFiniteLogits)
        assert neighbour.result().handle.length == 2
        assert tokens_of(harness, first.handle) == PROMPT
        executor.bad_token_ids = set()
        assert accepted(harness.submit(verify(first.handle, (4,), good)).result())[0] == 3


# ---- again ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retained_bytes", [0, 1 << 20])
@pytest.mark.parametrize("output", [GREEDY, FULL, UNSEEDED, PENALISED])
@pytest.mark.parametrize("acceptance", [EXACT, NONE])
def test_a_retry_is_answered_as_the_first_was(
    acceptance: Acceptance, output: OutputRequest, retained_bytes: int
) -> None:
    """From the record, or the rows run again and what was decided kept; nothing is appended twice."""
    good = greedy_tokens((*PROMPT, 4), 2)
    with Harness(retained_bytes=retained_bytes) as harness:
        first = harness.prefill(*PROMPT)
        job = verify(first.handle, (4,), (*good, 17, 18), acceptance, output)
        once, num_steps = harness.submit(job).result(), len(harness.executor.batches)
        again = harness.submit(dataclasses.replace(job)).result()
        assert again.replayed
        is_dropped = retained_bytes == 0 and (len(once.rows) > 1 or output is FULL)
        assert again.recomputed == is_dropped
        assert (again.handle, again.seed, again.verified) == (once.handle, once.seed, once.verified)
        assert [row.token for row in again.rows] == [row.token for row in once.rows]
        new_steps = harness.executor.batches[num_steps:]
        assert len(new_steps) == is_dropped
        assert all((step.slot_mapping == -1).all() for step in new_steps)
        assert tokens_of(harness, once.handle)[:4] == (*PROMPT, 4)
        assert len(tokens_of(harness, once.handle)) == once.handle.length


def test_a_retry_of_speculative_sampling_keeps_what_was_drawn() -> None:
    """Rows dropped, seed not the caller's: the same drafts hold and the same token follows."""
    distribution = _distribution([0.5, 0.25, 0.25], [3, 8, 20])
    with Harness(retained_bytes=0) as harness:
        first = harness.prefill(*PROMPT)
        for draft_ids in ((3, 8, 20), (8, 8), (20, 3, 3, 3)):
            distributions = (distribution,) * len(draft_ids)
            job = verify(first.handle, (4,), draft_ids, REJECTION, UNSEEDED, distributions=distributions)
            once = harness.submit(job).result()
            equal_distributions = tuple(_distribution([0.5, 0.25, 0.25], [3, 8, 20]) for _ in draft_ids)
            retry = verify(first.handle, (4,), draft_ids, REJECTION, UNSEEDED, distributions=equal_distributions)
            again = harness.submit(retry).result()
            assert again.recomputed == (len(once.rows) > 1)
            assert (again.replayed, again.seed, again.verified) == (True, once.seed, once.verified)
            assert [row.token for row in again.rows] == [row.token for row in once.rows]
            assert [row.is_accepted for row in again.rows] == [row.is_accepted for row in once.rows]
            first = once


@pytest.mark.parametrize("change", ["drafts", "acceptance", "distributions", "masks", "output", "handles"])
def test_what_differs_is_no_retry(change: str) -> None:
    """Another request behind the tip is stale, whatever it has in common with the last append."""
    distributions = tuple(_distribution([1.0], [token]) for token in (7, 8))
    job_args = {"distributions": distributions, "row_masks": (_mask(7, 8),) * 3}
    with Harness() as harness:
        first = harness.prefill(*PROMPT)
        job = verify(first.handle, (4,), (7, 8), REJECTION, SEEDED, **job_args)  # type: ignore[arg-type]
        harness.submit(job).result()
        other = dataclasses.replace(job)
        assert other.drafts is not None
        match change:
            case "drafts":
                other.token_ids = (4, 7, 9)
            case "acceptance":
                other.drafts = replace(other.drafts, acceptance=EXACT)
            case "distributions":
                other.drafts = replace(other.drafts, distributions=(distributions[1], distributions[0]))
            case "masks":
                other.drafts = replace(other.drafts, row_masks=(_mask(7, 9),) * 3)
            case "output":
                other.output = OutputRequest(OutputSpec(sample=SampleSpec(seed=6)))
            case _:
                other.drafts = replace(other.drafts, wants_row_handles=False)
        assert isinstance(harness.submit(other).error(), HandleStale)
        assert harness.submit(dataclasses.replace(job)).result().replayed


@pytest.mark.parametrize(("first_ids", "other_ids"), [((4,), (4, 7)), ((4, 7), (4,))])
@pytest.mark.parametrize("drafts", [(7,), ()])
def test_other_certain_tokens_are_no_retry(
    harness: Harness, first_ids: tuple[int, ...], other_ids: tuple[int, ...], drafts: tuple[int, ...]
) -> None:
    """Equal drafts behind more or fewer tokens are another verify, though what is committed begins alike."""
    first = harness.prefill(*PROMPT)
    once = harness.submit(verify(first.handle, first_ids, drafts)).result()
    assert accepted(once)[0] == 0
    assert isinstance(harness.submit(verify(first.handle, other_ids, drafts)).error(), HandleStale)
    assert harness.submit(verify(first.handle, first_ids, drafts)).result().replayed
    rewound = harness.submit(verify(first.handle, other_ids, drafts, on_stale=StalePolicy.REWIND)).result()
    assert not rewound.replayed
    assert tokens_of(harness, rewound.handle) == PROMPT + other_ids


def test_only_the_last_append_can_be_told_from_a_new_one() -> None:
    """After another append, on_stale decides: fail, verify again behind the handle, or in a branch."""
    good = greedy_tokens((*PROMPT, 4), 3)
    drafts = (good[0], other_than(good[1]))
    with Harness() as harness:
        first = harness.prefill(*PROMPT)
        once = harness.submit(verify(first.handle, (4,), drafts)).result()
        harness.decode(once.handle, 9)
        assert isinstance(harness.submit(verify(first.handle, (4,), drafts)).error(), HandleStale)
        branch = harness.submit(verify(first.handle, (4,), drafts, on_stale=StalePolicy.FORK)).result()
        assert branch.handle.cache_id != first.handle.cache_id
        assert accepted(branch) == accepted(once)
        assert tokens_of(harness, branch.handle) == (*PROMPT, 4, good[0])
        assert tokens_of(harness, once.handle) == (*PROMPT, 4, good[0], 9)
        rewound = harness.submit(verify(first.handle, (4,), drafts, on_stale=StalePolicy.REWIND)).result()
        assert not rewound.replayed
        assert tokens_of(harness, rewound.handle) == (*PROMPT, 4, good[0])
        again = harness.submit(verify(first.handle, (4,), drafts, on_stale=StalePolicy.FORK)).result()
        assert (again.replayed, again.handle) == (True, rewound.handle)


def test_a_verify_whose_tokens_were_truncated_is_not_replayed() -> None:
    """What it appended is not all there any more, so it is stale, even to itself."""
    good = greedy_tokens((*PROMPT, 4), 3)
    with Harness() as harness:
        first = harness.prefill(*PROMPT)
        job = verify(first.handle, (4,), good)
        once = harness.submit(job).result()
        assert isinstance(harness.submit(TruncateJob("me", once.handle, 5)).outcome(), TruncateResult)
        assert isinstance(harness.submit(dataclasses.replace(job)).error(), HandleStale)
        assert isinstance(harness.submit(TruncateJob("me", once.handle, 3)).error(), HandleStale)


def test_tokens_that_a_verify_appended_are_replayed_to_a_plain_append() -> None:
    """The append rule knows tokens; who brought them does not matter."""
    good = greedy_tokens((*PROMPT, 4), 2)
    with Harness() as harness:
        first = harness.prefill(*PROMPT)
        once = harness.submit(verify(first.handle, (4,), (*good, 30))).result()
        plain = harness.decode(first.handle, 4, *good)
        assert (plain.replayed, plain.recomputed, plain.handle, plain.verified) == (True, True, once.handle, None)
        assert plain.rows[0].token == fake_next_token((*PROMPT, 4, *good), VOCAB)


def test_an_unseeded_verify_that_lost_its_record_needs_the_seed(harness: Harness) -> None:
    """The client decided, so its tokens are a replay; what was drawn is not known any more."""
    first = harness.prefill(*PROMPT)
    job = verify(first.handle, (4,), (5,), NONE, UNSEEDED)
    once = harness.submit(job).result()
    assert once.seed is not None
    harness.decode(once.handle, 9)
    assert isinstance(harness.submit(dataclasses.replace(job)).error(), SeedRequired)
    sample = replace(SampleSpec(), seed=once.seed)
    seeded = replace(job, output=OutputRequest(OutputSpec(sample=sample)))
    again = harness.submit(seeded).result()
    assert [row.token for row in again.rows] == [row.token for row in once.rows]


def test_a_verify_that_returns_no_rows_runs_none_again(harness: Harness) -> None:
    """Policy none, the client decides: a replay needs no step, and has its row handles."""
    first = harness.prefill(*PROMPT)
    once = harness.submit(verify(first.handle, (4,), (5, 6), NONE, NOTHING)).result()
    assert once.rows == ()
    harness.decode(once.handle, 9)
    num_steps = len(harness.executor.batches)
    again = harness.submit(verify(first.handle, (4,), (5, 6), NONE, NOTHING)).result()
    assert (again.replayed, again.verified) == (True, once.verified)
    assert len(harness.executor.batches) == num_steps


def test_a_record_keeps_neither_masks_nor_distributions_alive() -> None:
    """They may be large, and a device may keep what it made of a mask as long as somebody refers to it."""
    mask, distribution = _mask(5, 6), _distribution([1.0], [5])
    with Harness() as harness:
        first = harness.prefill(*PROMPT)
        output = OutputRequest(OutputSpec(sample=SampleSpec(seed=1), shaping=Shaping(mask=mask)))
        once = harness.submit(append(first.handle, 4, output=output)).result()
        job = verify(
            once.handle, (4,), (5,), REJECTION, output, distributions=(distribution,), row_masks=(_mask(5), _mask(6))
        )
        once = harness.submit(job).result()
        watched = [weakref.ref(mask), *(weakref.ref(each) for each in job.drafts.row_masks)]  # type: ignore[union-attr]
        harness.executor.batches.clear()
        del mask, distribution, output, job
        harness.decode(once.handle, 9)
        harness.executor.batches.clear()
        gc.collect()
        assert [ref() for ref in watched] == [None, None, None]


# ---- with others ----------------------------------------------------------------------------------------------------


def test_a_duplicate_of_a_verify_in_flight_joins_it() -> None:
    """One run answers both; other drafts wait and find the tip moved."""
    good = greedy_tokens((*PROMPT, 4), 2)
    with Harness(max_step_rows=2) as harness:
        first = harness.prefill(*PROMPT)
        jobs = [verify(first.handle, (4,), good) for _ in range(3)]
        jobs[2].token_ids = (4, good[0], other_than(good[1]))
        original = harness.hold(jobs[0])
        joined, other = harness.submit_all(*jobs[1:])
        harness.let_go()
        assert joined.result() == dataclasses.replace(original.result(), replayed=True)
        assert isinstance(other.error(), HandleStale)
        assert harness.engine.counters.joined == 1


@pytest.mark.parametrize("acceptance", [EXACT, NONE])
def test_a_branch_by_request_id_is_made_once(acceptance: Acceptance) -> None:
    """The repeated request hears of the same branch and the same drafts, also when the branch has moved on."""
    good = greedy_tokens((*PROMPT, 4), 2)
    args = {"acceptance": acceptance, "on_stale": StalePolicy.FORK, "request_id": "r"}
    with Harness() as harness:
        first = harness.prefill(*PROMPT)
        harness.decode(first.handle, 9)
        job = verify(first.handle, (4,), (*good, 30), **args)  # type: ignore[arg-type]
        once = harness.submit(job).result()
        assert once.handle.cache_id != first.handle.cache_id
        again = harness.submit(dataclasses.replace(job)).result()
        assert (again.replayed, again.recomputed, again.verified) == (True, False, once.verified)
        harness.decode(once.handle, 11)
        again = harness.submit(dataclasses.replace(job)).result()
        assert (again.recomputed, again.handle, again.verified) == (True, once.handle, once.verified)
        assert [row.token for row in again.rows] == [row.token for row in once.rows]
        other = verify(first.handle, (4,), (*good, 29), **args)  # type: ignore[arg-type]
        assert isinstance(harness.submit(other).error(), RequestIdReused)
        other = replace(job, drafts=replace(job.drafts, wants_row_handles=False))  # type: ignore[type-var]
        assert isinstance(harness.submit(other).error(), RequestIdReused)


def test_a_verify_needs_room_for_all_its_drafts_and_keeps_it_for_those_that_hold() -> None:
    """The quota is for the whole need; what is left afterwards is the accepted prefix."""
    limits = QuotaLimits(kv_tokens=16)
    with Harness(limits_of=lambda _: limits) as harness:
        first = harness.prefill(*PROMPT)
        too_many = verify(first.handle, (4,), (30,) * 13)
        assert isinstance(harness.submit(too_many).error(), QuotaExceeded)
        fits = harness.submit(verify(first.handle, (4,), (30,) * 12)).result()
        assert fits.handle.length == 4 + accepted(fits)[0]
        assert harness.store.usage.of("me").num_blocks == 1


def test_drafts_are_not_charged_to_the_prefill_rate() -> None:
    """A verify stands for decodes; certain tokens of more than one count like any append of as many."""
    limits = QuotaLimits(prefill_tokens_per_s=30)
    with Harness(limits_of=lambda _: limits) as harness:
        handle = harness.prefill(*PROMPT).handle
        for _ in range(10):
            handle = harness.submit(verify(handle, (4,), (30,) * 12)).result().handle
        handle = harness.submit(verify(handle, (4,) * 40, (30,))).result().handle
        assert harness.submit(verify(handle, (4,), (30,))).result() is not None
        assert isinstance(harness.submit(verify(handle, (4, 5), (30,))).error(), QuotaExceeded)


def test_verifies_are_counted_by_what_became_of_their_drafts() -> None:
    """Neither prefills nor decodes; a replay counts as a replay."""
    good = greedy_tokens((*PROMPT, 4), 3)
    with Harness() as harness:
        first = harness.prefill(*PROMPT)
        job = verify(first.handle, (4,), (*good[:2], other_than(good[2])))
        once = harness.submit(job).result()
        harness.submit(dataclasses.replace(job)).result()
        harness.decode(once.handle, 9)
        counters = harness.engine.counters
        assert (counters.verifies, counters.draft_tokens, counters.accepted_tokens) == (1, 3, 2)
        assert (counters.decodes, counters.decode_tokens, counters.prefills, counters.replays) == (1, 4, 1, 1)
