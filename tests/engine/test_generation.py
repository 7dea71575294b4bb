"""Generate: its tokens, handles, branches and ends are those of decoding step by step."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Sequence

import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.jobs import (
    Finish,
    ForkJob,
    ForkResult,
    GenerateFrame,
    OutputRequest,
    StopRules,
    TruncateJob,
)
from ferrule_server.errors import (
    BlocksExhausted,
    Cancelled,
    ContextExceeded,
    HandleStale,
    HandleUnknown,
    NonFiniteLogits,
    QuotaExceeded,
)
from ferrule_server.executor.base import OutputSpec, SampleSpec
from ferrule_server.executor.reference import PagedReferenceExecutor
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.quotas import QuotaLimits
from tests.engine.harness import GREEDY, NOTHING, Harness, append
from tests.engine.streams import UNSEEDED, VOCAB, SteppedExecutor, Stream, drawn_with, forward, generate, start
from tests.fakes import FakeExecutor, fake_next_token

RICH = OutputRequest(OutputSpec(sample=SampleSpec(temperature=0.7, top_k=9, seed=11), logprobs=True))


def names(handles: Sequence[Handle]) -> list[tuple[int, bytes]]:
    """What handles say of their tokens, whatever the sequence."""
    return [(handle.length, handle.lineage) for handle in handles]


def decode_on(
    harness: Harness, handle: Handle | None, *token_ids: int, output: OutputRequest, count: int
) -> tuple[list[int], list[Handle]]:
    """Draw ``count`` tokens step by step; returns them and the handle before each."""
    result = harness.submit(append(handle, *token_ids, output=output)).result()
    tokens, handles = [result.rows[0].token], [result.handle]
    while len(tokens) < count:
        assert tokens[-1] is not None
        result = harness.decode(result.handle, tokens[-1], output=output)
        tokens.append(result.rows[0].token)
        handles.append(result.handle)
    return [token for token in tokens if token is not None], handles


# ---- tokens and handles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", [GREEDY, drawn_with(5), RICH])
def test_tokens_rows_and_handles_are_those_of_step_by_step_decoding(harness: Harness, output: OutputRequest) -> None:
    """Same tokens, same lengths and lineages, and every frame's handle is before its newest token."""
    tokens, handles = decode_on(harness, None, 1, 2, 3, output=output, count=9)
    branch = start(harness, generate(None, 1, 2, 3, output=output, max_tokens=9)).branch()
    assert branch.tokens == tokens
    assert names(branch.handles) == names(handles)
    assert [row.position for row in branch.rows] == list(range(3, 12))
    assert [row.model_logprob is None for row in branch.rows] == [output is not RICH] * 9
    assert branch.last.finish is Finish.MAX_TOKENS


@pytest.mark.parametrize("output", [GREEDY, drawn_with(5)])
def test_on_the_paged_reference_it_is_the_same(output: OutputRequest) -> None:
    """Attention over a real paged pool, long enough for several blocks."""
    with Harness(PagedReferenceExecutor(block_size=4, kv_memory_bytes=1 << 20)) as harness:  # type: ignore[arg-type]
        prompt = [7 * i % 256 for i in range(21)]
        tokens, handles = decode_on(harness, None, *prompt, output=output, count=20)
        first, second = start(harness, generate(None, *prompt, output=output, max_tokens=20, num_branches=2)).branches()
        assert (first.tokens, names(first.handles)) == (tokens, names(handles))
        assert (second.tokens == tokens) == (output is GREEDY)


def test_the_first_frame_has_the_seed_that_draws_the_same_again(harness: Harness) -> None:
    """Unseeded: one is drawn and told, once; greedy draws nothing and has none."""
    branch = start(harness, generate(None, 1, 2, 3)).branch()
    seed = branch.frames[0].seed
    assert seed is not None
    assert [frame.seed for frame in branch.frames[1:]] == [None] * 7
    assert start(harness, generate(None, 1, 2, 3, output=drawn_with(seed))).branch().tokens == branch.tokens
    assert start(harness, generate(None, 1, 2, 3)).branch().frames[0].seed != seed
    assert start(harness, generate(None, 1, 2, 3, output=GREEDY)).branch().frames[0].seed is None


def test_each_step_gives_one_frame_and_one_flush(harness: Harness) -> None:
    """Tokens are sent as they are drawn; several streams share their steps."""
    one, other = Stream(), Stream()
    harness.engine.submit(
        [(generate(None, 1, 2, max_tokens=5), one), (generate(None, 3, 4, max_tokens=5, num_branches=3), other)]
    )
    one.branches()
    other.branches()
    assert (len(one.outcomes), one.num_flushes) == (5, 5)
    assert (len(other.outcomes), other.num_flushes) == (6, 6)
    assert max(batch.num_seqs for batch in harness.executor.batches) == 4
    assert len(harness.executor.batches) == 6


def test_a_prompt_that_is_known_is_not_run_again_and_the_first_frame_says_so(harness: Harness) -> None:
    """Whole blocks come out of the prefix cache, unless that is not wanted."""
    whole = start(harness, generate(None, *range(11), output=GREEDY, num_branches=2)).branches()
    again = start(harness, generate(None, *range(11), output=GREEDY, num_branches=2)).branches()
    assert [branch.tokens for branch in again] == [branch.tokens for branch in whole]
    assert (whole[0].frames[0].cached_tokens, again[0].frames[0].cached_tokens) == (0, 8)
    assert {frame.cached_tokens for frame in again[0].frames[1:] + again[1].frames} == {0}
    fresh = generate(None, *range(11), output=GREEDY, reuse_prefix=False)
    assert start(harness, fresh).branch().frames[0].cached_tokens == 0


# ---- branches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3, (1 << 64) - 2])
def test_branch_i_draws_what_a_generate_of_its_own_draws_with_seed_plus_i(harness: Harness, seed: int) -> None:
    """Each has a sequence of its own; seeds wrap at 2^64."""
    branches = start(harness, generate(None, 1, 2, 3, output=drawn_with(seed), num_branches=4)).branches()
    for index, branch in enumerate(branches):
        own = drawn_with((seed + index) % (1 << 64))
        tokens, handles = decode_on(harness, None, 1, 2, 3, output=own, count=8)
        assert branch.tokens == tokens
        assert names(branch.handles) == names(handles)
        assert branch.frames[0].seed == (seed + index) % (1 << 64)
        assert {handle.cache_id for handle in branch.handles} == {branch.handles[0].cache_id}
    assert len({branch.handles[0].cache_id for branch in branches}) == 4
    assert len(harness.store.registry) == 8
    assert len({tuple(branch.tokens) for branch in branches}) > 1


def test_a_branch_that_stops_leaves_the_others_going(harness: Harness) -> None:
    """Frames hold the branches that drew something in their step."""
    free = start(harness, generate(None, 1, 2, output=drawn_with(8), num_branches=3, max_tokens=6)).branches()
    token = free[1].tokens[2]
    rules = StopRules(6, token_ids=frozenset({token}))
    job = generate(None, 1, 2, output=drawn_with(8), num_branches=3, stop=rules)
    for branch, whole in zip(start(harness, job).branches(), free, strict=True):
        end = whole.tokens.index(token) + 1 if token in whole.tokens else 6
        assert branch.tokens == whole.tokens[:end]
        assert branch.last.finish is (Finish.STOP_TOKEN if end < 6 or token in whole.tokens else Finish.MAX_TOKENS)


def test_no_room_for_the_branches_fails_the_call_and_leaves_nothing() -> None:
    """All or nothing: a new sequence that nobody was told of goes with it."""
    limits = QuotaLimits(handles=2)
    with Harness(limits_of=lambda _: limits) as harness:
        error = start(harness, generate(None, 1, 2, 3, num_branches=4)).error()
        assert isinstance(error, QuotaExceeded)
        assert len(harness.store.registry) == 0
        handle = harness.prefill(1, 2, 3).handle
        assert isinstance(start(harness, generate(handle, 4, num_branches=4)).error(), QuotaExceeded)
        assert len(harness.store.registry) == 1


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_what_ends_it_is_returned_and_is_not_in_the_handle(harness: Harness) -> None:
    """Stop tokens, the model's own and sequences: the token that ends it is the last one."""
    tokens = start(harness, generate(None, 1, 2, 3, output=GREEDY, max_tokens=12)).branch().tokens
    end = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])
    before = next(i for i in range(12) if tokens[i : i + 2] == tokens[end - 1 : end + 1]) + 1
    cases = [
        (StopRules(12, eos_ids=frozenset({tokens[end]})), Finish.EOS, end),
        (StopRules(12, token_ids=frozenset({tokens[end]})), Finish.STOP_TOKEN, end),
        (StopRules(12, sequences=(tuple(tokens[end - 1 : end + 1]),)), Finish.STOP_SEQUENCE, before),
        (StopRules(), Finish.CONTEXT_FULL, None),
    ]
    for rules, finish, at in cases[:3]:
        branch = start(harness, generate(None, 1, 2, 3, output=GREEDY, stop=rules)).branch()
        assert (branch.tokens, branch.last.finish) == (tokens[: (at or 0) + 1], finish)
        assert branch.handles[-1].length == 3 + len(branch.tokens) - 1


def test_it_ends_when_the_context_is_full_with_the_last_token_that_could_be_drawn() -> None:
    """The token behind the last place is drawn and cannot be appended."""
    with Harness(FakeExecutor(max_context=10)) as harness:
        branch = start(harness, generate(None, 1, 2, 3, output=GREEDY, max_tokens=0)).branch()
        assert len(branch.tokens) == 8
        assert branch.handles[-1].length == 10
        assert (branch.last.finish, branch.last.error) == (Finish.CONTEXT_FULL, None)
        full = start(harness, generate(branch.handles[-1], output=GREEDY, max_tokens=0)).branch()
        assert (full.tokens, full.last.finish) == (branch.tokens[-1:], Finish.CONTEXT_FULL)


def test_it_ends_when_no_block_is_left_and_goes_on_when_there_is_one() -> None:
    """The last handle stays good: release something, send it with the last token."""
    with Harness(FakeExecutor(num_blocks=5)) as harness:  # 4 blocks of 4 tokens
        other = harness.prefill(*range(8)).handle
        branch = start(harness, generate(None, 1, 2, 3, output=GREEDY, max_tokens=0)).branch()
        assert (branch.last.finish, branch.last.error) == (Finish.KV_BLOCKS_EXHAUSTED, None)
        assert branch.handles[-1].length == 8
        harness.release(other)
        rest = start(harness, generate(branch.handles[-1], branch.tokens[-1], output=GREEDY, max_tokens=0)).branch()
        assert rest.last.finish is Finish.KV_BLOCKS_EXHAUSTED  # now the whole pool is its own
        assert rest.handles[-1].length == 16
        everything = [1, 2, 3, *branch.tokens, *rest.tokens]
        assert all(fake_next_token(everything[:i], VOCAB) == everything[i] for i in range(3, len(everything)))


def test_a_branch_that_fails_ends_alone_with_its_handle_good(harness: Harness) -> None:
    """A row of NaN is that branch's error; the others draw on."""
    free = start(harness, generate(None, 1, 2, output=drawn_with(8), num_branches=3)).branches()
    bad = next(token for token in free[1].tokens[:-1] if token not in free[0].tokens + free[2].tokens)
    harness.executor.bad_token_ids = {bad}
    first, second, third = start(harness, generate(None, 1, 2, output=drawn_with(8), num_branches=3)).branches()
    assert (first.tokens, third.tokens) == (free[0].tokens, free[2].tokens)
    assert first.last.finish is third.last.finish is Finish.MAX_TOKENS
    assert second.last.finish is Finish.ERROR
    assert isinstance(second.last.error, NonFiniteLogits)
    assert (second.last.handle, second.last.rows) == (None, ())
    assert second.tokens[-1] == bad
    harness.executor.bad_token_ids = set()
    rest = 8 - len(second.tokens)
    again = generate(second.handles[-1], bad, output=drawn_with(9), max_tokens=rest)
    assert second.tokens + start(harness, again).branch().tokens == free[1].tokens


def test_errors_before_the_first_frame_are_those_of_the_call() -> None:
    """As in Prefill: nothing was made, nothing is counted."""
    with Harness(FakeExecutor(max_context=16, num_blocks=4)) as harness:
        handle = harness.prefill(1, 2, 3).handle
        harness.decode(handle, 4)
        cases = [
            (generate(Handle("test.e1.x", 3, bytes(16)), 4), HandleUnknown),
            (generate(handle, 5), HandleStale),
            (generate(None, *range(17)), ContextExceeded),
            (generate(None, *range(12)), BlocksExhausted),
        ]
        for job, kind in cases:
            assert type(start(harness, job).error()) is kind
        harness.executor.bad_token_ids = {9}
        assert isinstance(start(harness, generate(None, 9)).error(), NonFiniteLogits)
        assert len(harness.store.registry) == 1
        assert harness.engine.snapshot().num_streams == 0


def test_whoever_rewinds_its_sequence_ends_the_branch_and_harms_nothing() -> None:
    """The tokens are then another's; the branch must not append to them."""
    executor = SteppedExecutor()
    with Harness(executor) as harness:
        stream = start(harness, generate(None, 1, 2, 3, output=GREEDY, max_tokens=20))
        executor.arrive()
        executor.step(4)
        handle, drawn = stream.so_far()[0].handles[1], stream.so_far()[0].tokens[0]
        mine = (fake_next_token([1, 2, 3, drawn], VOCAB) + 1) % VOCAB
        rewound = harness.submit(append(handle, mine, on_stale=StalePolicy.REWIND))
        executor.run_freely()
        assert rewound.result().rows[0].token == fake_next_token([1, 2, 3, drawn, mine], VOCAB)
        branch = stream.branch()
        assert branch.last.finish is Finish.ERROR
        assert isinstance(branch.last.error, HandleStale)
        info = harness.submit(host_calls.describe("me", handle, with_token_ids=True)).outcome()
        assert info.token_ids == (1, 2, 3, drawn, mine)  # type: ignore[attr-defined]


# ---- from a handle, and again ---------------------------------------------------------------------------------------


def test_without_tokens_it_draws_from_the_last_row_of_the_handle(harness: Harness) -> None:
    """Nothing is appended for the first token."""
    handle = harness.prefill(1, 2, 3, output=NOTHING).handle
    branch = start(harness, generate(handle, output=drawn_with(4))).branch()
    assert branch.tokens == decode_on(harness, None, 1, 2, 3, output=drawn_with(4), count=8)[0]
    assert branch.handles[0] == handle
    assert harness.executor.batches[1].slot_mapping.tolist() == [-1]


@pytest.mark.parametrize("with_token", [False, True])
@pytest.mark.parametrize("num_branches", [1, 2])
def test_a_broken_stream_is_gone_on_from_any_frame_with_rewind(
    harness: Harness, with_token: bool, num_branches: int
) -> None:
    """(last handle, [token]) with another seed drops what had been drawn beyond and goes on from there."""
    whole = start(harness, generate(None, 1, 2, 3, output=drawn_with(1), max_tokens=10)).branch()
    handle, token = whole.handles[4], whole.tokens[4]
    tokens = (token,) if with_token else ()
    prefix = [1, 2, 3, *whole.tokens[: 4 + with_token]]
    job = generate(
        handle, *tokens, output=drawn_with(77), on_stale=StalePolicy.REWIND, num_branches=num_branches, max_tokens=5
    )
    for index, branch in enumerate(start(harness, job).branches()):
        expected, handles = decode_on(harness, None, *prefix, output=drawn_with(77 + index), count=5)
        assert branch.tokens == expected
        assert names(branch.handles) == names(handles)
        assert (branch.handles[0].cache_id == handle.cache_id) == (index == 0)


def test_a_broken_stream_is_replayed_with_its_seed_and_nothing_is_doubled(harness: Harness) -> None:
    """What is committed already is drawn again and not appended again; then it goes on."""
    whole = start(harness, generate(None, 1, 2, 3, output=drawn_with(1), max_tokens=12)).branch()
    stream = start(harness, generate(whole.handles[2], whole.tokens[2], output=drawn_with(1), max_tokens=15))
    again = stream.branch()
    assert again.tokens[:9] == whole.tokens[3:]
    for index in (0, 1, 2, 3, 4, 5, 6, 8):  # the last append is answered from its record, with the one before it
        assert again.handle_before(index) == whole.handles[3 + index]
    assert again.frames[0].replayed
    assert again.handles[-1].length == 3 + 3 + 14
    expected = decode_on(harness, None, 1, 2, 3, output=drawn_with(1), count=18)[0]
    assert whole.tokens[:3] + again.tokens == expected


def test_behind_the_tip_other_tokens_are_refused_unless_told_otherwise(harness: Harness) -> None:
    """FAIL is the default; the answer is the call's own, or the branch's where it drew other tokens under way."""
    whole = start(harness, generate(None, 1, 2, 3, output=drawn_with(1))).branch()
    other = (whole.tokens[2] + 1) % VOCAB
    assert isinstance(start(harness, generate(whole.handles[2], other)).error(), HandleStale)
    branch = start(harness, generate(whole.handles[2], output=drawn_with(123456))).branch()
    assert branch.tokens[0] != whole.tokens[2], "choose another seed"
    assert (branch.last.finish, len(branch.tokens)) == (Finish.ERROR, 1)
    assert isinstance(branch.last.error, HandleStale)


@pytest.mark.parametrize("with_token", [False, True])
def test_fork_makes_a_branch_once_it_draws_other_tokens_and_once_only(harness: Harness, with_token: bool) -> None:
    """The request_id finds the branch again, also where no seed was given; the old sequence stays as it is."""
    whole = start(harness, generate(None, 1, 2, 3, output=drawn_with(1))).branch()
    tokens = ((whole.tokens[2] + 1) % VOCAB,) if with_token else ()
    job = generate(whole.handles[2], *tokens, on_stale=StalePolicy.FORK, request_id="branch", max_tokens=6)
    first = start(harness, job).branch()
    assert first.last.finish is Finish.MAX_TOKENS
    assert first.handles[-1].cache_id != whole.handles[2].cache_id
    num_sequences = len(harness.store.registry)
    again = start(harness, dataclasses.replace(job)).branch()
    assert again.tokens == first.tokens
    assert again.agrees_with(first)
    assert again.frames[0].seed == first.frames[0].seed
    assert len(harness.store.registry) == num_sequences
    info = harness.submit(host_calls.describe("me", whole.handles[2])).outcome()
    assert info.tip.length == whole.handles[-1].length  # type: ignore[attr-defined]


@pytest.mark.parametrize("output", [UNSEEDED, GREEDY, drawn_with(3)])
@pytest.mark.parametrize("num_branches", [1, 3])
def test_a_repeated_request_id_finds_the_same_sequences_and_tokens(
    harness: Harness, output: OutputRequest, num_branches: int
) -> None:
    """Its branches too; what is committed is replayed, what is not is drawn on."""
    job = generate(None, 1, 2, 3, output=output, request_id="a", num_branches=num_branches, max_tokens=5)
    first = start(harness, job).branches()
    longer = dataclasses.replace(job, stop=StopRules(max_tokens=9))
    again = start(harness, longer).branches()
    for old, new in zip(first, again, strict=True):
        assert new.agrees_with(old)
        assert (len(old.tokens), len(new.tokens)) == (5, 9)
        assert new.frames[0].seed == old.frames[0].seed
        assert {handle.cache_id for handle in new.handles} == {old.handles[0].cache_id}
    assert again[0].frames[0].replayed
    assert len(harness.store.registry) == num_branches


def test_a_request_repeated_while_the_first_runs_joins_it() -> None:
    """One prompt is run; both hear the same tokens of the same sequences."""
    executor = SteppedExecutor()
    with Harness(executor) as harness:
        job = generate(None, *range(20), request_id="a", num_branches=3, max_tokens=6)
        one = start(harness, job)
        executor.arrive()
        other = start(harness, dataclasses.replace(job))
        executor.run_freely()
        first, second = one.branches(), other.branches()
        for mine, theirs in zip(first, second, strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.agrees_with(theirs)
        assert len(harness.store.registry) == 3
        assert sum(batch.num_rows for batch in executor.batches if batch.num_rows >= 20) == 20


def test_seeds_of_requests_without_one_differ_by_request(harness: Harness) -> None:
    """The same request_id on another prompt, or by another principal, draws otherwise."""
    jobs = [
        generate(harness.prefill(5).handle, *tokens, request_id=name)
        for tokens, name in [((1, 2), "a"), ((1, 3), "a"), ((1, 2), "b")]
    ]
    jobs.append(dataclasses.replace(generate(None, 1, 2, request_id="a"), principal="you"))
    seeds = [start(harness, job).branch().frames[0].seed for job in jobs]
    assert len(set(seeds)) == 4


def test_no_request_id_of_a_client_can_meet_those_of_the_branches(harness: Harness) -> None:
    """They are longer than a client's may be; a fork with the Generate's own id is another request, and refused."""
    start(harness, generate(None, 1, 2, request_id="a" * 128, num_branches=2)).branches()
    ids = [request_id for _, request_id in harness.engine._lanes.creations._creations]
    assert sorted(len(each.encode()) > 128 for each in ids) == [False, True]


def test_leases_are_renewed_by_every_token() -> None:
    """A long Generate outlives its lease, and has the one that was asked for."""
    now = [1000.0]
    executor = SteppedExecutor()
    harness = Harness(executor)
    harness.clock = lambda: now[0]
    with harness:
        job = generate(None, 1, 2, num_branches=2, max_tokens=8, ttl_s=20.0)
        stream = start(harness, job)
        executor.arrive()
        for _ in range(6):
            now[0] += 15.0
            executor.step()
        executor.run_freely()
        for branch in stream.branches():
            assert branch.last.finish is Finish.MAX_TOKENS
            info = harness.submit(host_calls.describe("me", branch.handles[-1])).outcome()
            assert info.lease.ttl_s == 20.0  # type: ignore[attr-defined]


def test_fork_and_truncate_wait_for_their_turn_between_two_tokens() -> None:
    """Other jobs on the sequence are judged in order of arrival: a Generate never has the lane for good."""
    executor = SteppedExecutor()
    with Harness(executor) as harness:
        stream = start(harness, generate(None, 1, 2, 3, output=GREEDY, max_tokens=20))
        executor.arrive()
        executor.step(3)
        handle = stream.so_far()[0].handles[-1]
        fork = harness.submit(ForkJob("me", handle, 3, 1))
        truncate = harness.submit(TruncateJob("me", handle, 4))
        executor.run_freely()
        assert isinstance(fork.outcome(), ForkResult)
        truncate.outcome()
        branch = stream.branch()
        assert isinstance(branch.last.error, HandleStale)
        last = stream.outcomes[-1]
        assert isinstance(last, GenerateFrame)
        assert last.is_last


@pytest.mark.parametrize("request_id", ["", "mine"])
def test_of_a_call_that_ends_unheard_nothing_is_left_that_nobody_can_find(request_id: str) -> None:
    """Its branches would else hold their blocks for a lease; with a request_id a retry finds all of them."""
    executor = SteppedExecutor()
    with Harness(executor) as harness:
        job = generate(None, 1, 2, 3, num_branches=5, request_id=request_id)
        stream = start(harness, job)
        executor.arrive()
        job.is_cancelled = True
        harness.engine.resume(job)
        executor.run_freely()
        assert isinstance(stream.error(), Cancelled)
        harness.release()
        assert len(harness.store.registry) == (5 if request_id else 0)


def test_who_asked_is_not_kept_by_a_call_that_has_ended() -> None:
    """Not even until the garbage collector comes: a call holds its messages."""
    gc.collect()
    gc.disable()
    try:
        with Harness() as harness:
            streams = [
                start(harness, generate(None, 1, 2, 3, num_branches=2, max_tokens=3)),
                start(harness, forward(1, 2, 3, chunk_rows=1)),
            ]
            kept = [weakref.ref(stream) for stream in streams]
            for stream in streams:
                stream.wait()
            del stream
            streams.clear()
            harness.release()
            assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()
