"""The engine against a sequential model: random frames of jobs, every outcome predicted by plain lists of tokens.

Whatever is sent twice, joined, cancelled or branched, each sequence must hold what the answers say: nothing doubled,
nothing lost, and every creation made once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ferrule_server.engine import host_calls
from ferrule_server.engine.failpoints import Failpoints
from ferrule_server.engine.jobs import (
    Acceptance,
    AppendJob,
    AppendResult,
    CacheInfo,
    Drafts,
    ForkJob,
    ForkResult,
    Outcome,
    TruncateJob,
    TruncateResult,
)
from ferrule_server.errors import Cancelled, FerruleError
from ferrule_server.kv.handle import Handle, StalePolicy
from tests.engine.harness import Harness, append
from tests.fakes import FakeExecutor, fake_next_token

VOCAB = 32
TOKENS = st.lists(st.integers(1, 2), min_size=0, max_size=6)
STALE = st.sampled_from(StalePolicy)
ACTIONS = (
    *("append", "append", "append", "append", "fork", "truncate", "prefill", "again", "again", "repeat", "clash"),
    *("verify", "verify"),
)

LaneJob = AppendJob | ForkJob | TruncateJob


@dataclass(eq=False)
class Model:
    """What one sequence should hold, and the last append, by which a verify is told from a retry of it."""

    tokens: tuple[int, ...]
    last_append: object = None
    is_released: bool = False
    last_truncate: tuple[tuple[int, ...], int] | None = None


@dataclass(frozen=True)
class Known:
    """A handle some reply returned, and what it must go on meaning."""

    handle: Handle
    model: Model
    prefix: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """What a request_id made."""

    content: object
    known: list[Known]


@dataclass(frozen=True)
class Draw:
    """One job of a frame as it is drawn."""

    action: str
    pick: int
    tokens: list[int]
    on_stale: StalePolicy
    has_id: bool
    is_cancelled: bool
    num_good: int = 0
    is_exact: bool = True


@dataclass(eq=False)
class Asked:
    """One job of a frame, and the handle it stands on."""

    known: Known | None
    job: LaneJob
    may_be_cancelled: bool = field(default=False)


DRAWS = st.builds(
    Draw,
    st.sampled_from(ACTIONS),
    st.integers(0, 1000),
    TOKENS,
    STALE,
    st.booleans(),
    st.integers(0, 4).map(lambda n: n == 0),
    st.integers(0, 3),
    st.integers(0, 2).map(bool),
)


class EngineMachine(RuleBasedStateMachine):
    """Frames of creations, appends, forks and truncates on any handle ever issued; releases in between."""

    def __init__(self) -> None:
        super().__init__()
        failpoints = Failpoints()
        failpoints.arm("before_schedule", self.cancel)
        self.harness = Harness(FakeExecutor(num_blocks=4096), failpoints=failpoints, max_step_rows=5)
        self.harness.engine.start()
        self.known: list[Known] = []
        self.made: dict[str, Made] = {}
        self.creating: list[Asked] = []
        self.to_cancel: list[LaneJob] = []
        self.num_ids = 0

    def teardown(self) -> None:
        """Every sequence holds what the answers said; released, not a block is left in use."""
        for known in self.known:
            self.check_tip(known.model, known.handle)
            self.harness.release(known.handle)
            known.model.is_released = True
        self.harness.engine.close()
        self.harness.check_integrity()
        snapshot = self.harness.engine.snapshot()
        assert snapshot.free_blocks == snapshot.total_blocks

    def cancel(self) -> None:
        """Runs on the engine thread before each step: some callers go away."""
        while self.to_cancel:
            self.to_cancel.pop().is_cancelled = True

    @initialize(tokens=TOKENS)
    def first(self, tokens: list[int]) -> None:
        """There is one sequence to begin with."""
        self.run_frame([Draw("prefill", 0, tokens, StalePolicy.FAIL, has_id=True, is_cancelled=False)])

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 1000))
    def release(self, pick: int) -> None:
        """End a sequence: its handles are unknown from now on."""
        known = self.known[pick % len(self.known)]
        self.harness.release(known.handle)
        known.model.is_released = True
        self.harness.check_integrity()

    @rule(frame=st.lists(DRAWS, min_size=1, max_size=6))
    def run_frame(self, frame: list[Draw]) -> None:
        """Submit jobs together; on each sequence they must behave as if sent one after another."""
        asked: list[Asked] = []
        for draw in frame:
            asked.append(self.ask(draw, asked))
        self.to_cancel = [each.job for each in asked if each.may_be_cancelled]
        pending = self.harness.submit_all(*(each.job for each in asked))
        outcomes = [each.outcome() for each in pending]
        for each, outcome in zip(asked, outcomes, strict=True):
            self.check(each, outcome)
        self.harness.check_integrity()

    # ---- asking -----------------------------------------------------------------------------------------------------

    def ask(self, draw: Draw, before: list[Asked]) -> Asked:
        """Turn a draw into a job: a new one, one sent again, or one with an id that is taken."""
        known = self.known[draw.pick % len(self.known)] if self.known else None
        source = before if draw.action == "again" else self.creating if draw.action == "repeat" else []
        if source:
            first = source[draw.pick % len(source)]
            asked = Asked(first.known, _copy_of(first.job))
        elif known is None or draw.action == "prefill":
            asked = Asked(None, append(None, *draw.tokens, 1, request_id=self.new_id(draw)))
        elif draw.action == "clash" and self.creating:
            taken = self.creating[draw.pick % len(self.creating)].job.request_id
            asked = Asked(None, append(None, *draw.tokens, 9, request_id=taken))
        elif draw.action == "fork":
            asked = Asked(known, ForkJob("me", known.handle, known.handle.length, 2, request_id=self.new_id(draw)))
        elif draw.action == "truncate":
            asked = Asked(known, TruncateJob("me", known.handle, min(known.handle.length, len(draw.tokens) + 1)))
        elif draw.action == "verify":
            asked = Asked(known, self.ask_verify(known, draw))
        else:
            job = append(known.handle, *draw.tokens, on_stale=draw.on_stale, request_id=self.new_id(draw))
            asked = Asked(known, job)
        # A rewind that is cancelled may have dropped the tail already: that is told apart elsewhere.
        is_rewind = isinstance(asked.job, AppendJob) and asked.job.on_stale is StalePolicy.REWIND
        asked.may_be_cancelled = draw.is_cancelled and not is_rewind
        return asked

    def ask_verify(self, known: Known, draw: Draw) -> AppendJob:
        """Drafts of which the first few are what the model says, the others what was drawn."""
        certain = (1, *draw.tokens[:1])
        tokens = known.prefix + certain
        for _ in range(draw.num_good):
            tokens += (fake_next_token(tokens, VOCAB),)
        tokens += tuple(draw.tokens[1:])
        job = append(known.handle, *tokens[len(known.prefix) :], on_stale=draw.on_stale, request_id=self.new_id(draw))
        job.drafts = Drafts(
            len(job.token_ids) - len(certain),
            Acceptance.EXACT if draw.is_exact else Acceptance.NONE,
            wants_row_handles=True,
        )
        return job

    def new_id(self, draw: Draw) -> str:
        """A request_id that was never used, or none."""
        self.num_ids += 1
        return f"r{self.num_ids}" if draw.has_id else ""

    # ---- checking ---------------------------------------------------------------------------------------------------

    def check(self, asked: Asked, outcome: Outcome) -> None:
        """Compare an outcome with what the model says, and remember what it made."""
        if isinstance(outcome, Cancelled):
            assert asked.may_be_cancelled
            return
        job, made = asked.job, self.made.get(asked.job.request_id)
        if made is not None and made.content == _content_of(job):
            self.check_repeat(made, job, outcome)
            return
        is_taken = made is not None
        if is_taken and (isinstance(job, ForkJob) or job.handle is None):
            self.check_refused(outcome, "REQUEST_ID_REUSED")
            return
        created: list[Known] = []
        if isinstance(job, ForkJob):
            assert asked.known is not None
            created = self.check_fork(asked.known, outcome)
        elif isinstance(job, TruncateJob):
            assert asked.known is not None
            self.check_truncate(asked.known, job, outcome)
        elif asked.known is None:
            created = [self.check_answer(outcome, job, Model(job.token_ids), job.token_ids)]
        else:
            created = self.check_append(asked.known, job, outcome, is_taken=is_taken)
        if created and job.request_id:
            self.made[job.request_id] = Made(_content_of(job), created)
            self.creating.append(asked)

    def check_repeat(self, made: Made, job: LaneJob, outcome: Outcome) -> None:
        """Sent again: the same handles while they last, else why not; never anything new."""
        if all(known.model.is_released for known in made.known):
            self.check_refused(outcome, "HANDLE_UNKNOWN")
        elif isinstance(job, ForkJob):
            assert isinstance(outcome, ForkResult), outcome
            assert outcome.replayed
            assert list(outcome.handles) == [known.handle for known in made.known]
        else:
            (known,) = made.known
            if (reason := self.refusal(known)) is not None:
                self.check_refused(outcome, reason)
                return
            assert isinstance(job, AppendJob)
            self.check_answer(outcome, job, known.model, known.prefix, is_replay=True)
            assert isinstance(outcome, AppendResult)
            assert outcome.handle == known.handle

    def refusal(self, known: Known) -> str | None:
        """Why a handle cannot be used at all."""
        if known.model.is_released:
            return "HANDLE_UNKNOWN"
        if known.model.tokens[: len(known.prefix)] != known.prefix:
            return "HANDLE_STALE"
        return None

    def check_refused(self, outcome: Outcome, reason: str) -> None:
        """The outcome is this refusal."""
        assert isinstance(outcome, FerruleError), outcome
        assert reason == outcome.REASON

    def check_append(self, known: Known, job: AppendJob, outcome: Outcome, *, is_taken: bool) -> list[Known]:
        """The table of the append rule; returns the branch it made."""
        model, prefix, tokens = known.model, known.prefix, _appended(known.prefix, job)
        reason = self.refusal(known)
        tail = model.tokens[len(prefix) :]
        is_replay = bool(tokens) and bool(tail) and tail[: len(tokens)] == tokens
        if _is_exact(job):
            is_replay = is_replay and model.last_append == (job.handle, job.token_ids, job.drafts)
        is_stale = bool(tokens) and bool(tail) and not is_replay
        is_fork = is_stale and job.on_stale is StalePolicy.FORK
        if reason is None and is_stale and job.on_stale is StalePolicy.FAIL:
            reason = "HANDLE_STALE"
        if reason is None and is_fork and is_taken:
            reason = "REQUEST_ID_REUSED"
        if reason is not None:
            self.check_refused(outcome, reason)
            return []
        after = prefix + tokens
        if is_fork:
            model = Model(after)
        elif tokens and not is_replay:
            model.tokens, model.last_truncate, model.last_append = after, None, (job.handle, job.token_ids, job.drafts)
        answered = self.check_answer(outcome, job, model, after, is_replay=is_replay)
        assert isinstance(outcome, AppendResult)
        assert outcome.forked == is_fork
        return [answered] if is_fork else []

    def check_answer(
        self, outcome: Outcome, job: AppendJob, model: Model, tokens: tuple[int, ...], *, is_replay: bool = False
    ) -> Known:
        """The answer of an append that ends with ``tokens``."""
        assert isinstance(outcome, AppendResult), outcome
        assert outcome.rows[-1].token == fake_next_token(tokens, VOCAB)
        assert (outcome.verified is None) == (job.drafts is None)
        if outcome.verified is not None and job.drafts is not None:
            num_sent = len(job.token_ids) - job.drafts.count
            num_held = len(outcome.rows) - 1
            handles = outcome.verified.row_handles
            assert [handle.length for handle in handles] == list(range(len(tokens) - num_held, len(tokens) + 1))
            assert outcome.verified.accepted_count == (num_held if _is_exact(job) else 0)
            assert tokens[len(tokens) - num_held - num_sent :] == job.token_ids[: num_sent + num_held]
            self.known += [Known(handle, model, tokens[: handle.length]) for handle in handles[:-1]]
        assert outcome.replayed == is_replay
        assert outcome.handle.length == len(tokens)
        assert outcome.ttl_s == 60
        self.known.append(Known(outcome.handle, model, tokens))
        return self.known[-1]

    def check_fork(self, known: Known, outcome: Outcome) -> list[Known]:
        """Both branches hold the prefix, whatever the source holds by now."""
        reason = self.refusal(known)
        if reason is not None:
            self.check_refused(outcome, reason)
            return []
        assert isinstance(outcome, ForkResult), outcome
        assert not outcome.replayed
        made = [Known(handle, Model(known.prefix), known.prefix) for handle in outcome.handles]
        self.known += made
        return made

    def check_truncate(self, known: Known, job: TruncateJob, outcome: Outcome) -> None:
        """Absolute; the equal request succeeds again while the tip still is where it put it."""
        model, asked = known.model, (known.prefix, job.new_length)
        is_again = model.last_truncate == asked and len(model.tokens) == job.new_length
        reason = None if is_again and not model.is_released else self.refusal(known)
        if reason is not None:
            self.check_refused(outcome, reason)
            return
        assert isinstance(outcome, TruncateResult), outcome
        model.tokens, model.last_truncate = known.prefix[: job.new_length], asked
        self.known.append(Known(outcome.handle, model, model.tokens))

    def check_tip(self, model: Model, handle: Handle) -> None:
        """The sequence holds what was applied: nothing doubled, nothing lost."""
        info = self.harness.submit(host_calls.describe("me", handle, with_token_ids=True)).outcome()
        if model.is_released:
            self.check_refused(info, "HANDLE_UNKNOWN")
        else:
            assert isinstance(info, CacheInfo), info
            assert info.token_ids == model.tokens


def _copy_of(job: LaneJob) -> LaneJob:
    """The same request, as a retry sends it."""
    if isinstance(job, AppendJob):
        copy = append(job.handle, *job.token_ids, on_stale=job.on_stale, request_id=job.request_id)
        copy.drafts = job.drafts
        return copy
    if isinstance(job, ForkJob):
        return ForkJob("me", job.handle, job.length, job.count, request_id=job.request_id)
    return TruncateJob("me", job.handle, job.new_length)


def _is_exact(job: AppendJob) -> bool:
    return job.drafts is not None and job.drafts.acceptance is Acceptance.EXACT


def _appended(prefix: tuple[int, ...], job: AppendJob) -> tuple[int, ...]:
    """What is left of the job's tokens once its drafts are judged."""
    if not _is_exact(job) or job.drafts is None:
        return job.token_ids
    tokens = prefix + job.token_ids
    num_held = len(tokens) - job.drafts.count
    while num_held < len(tokens) and tokens[num_held] == fake_next_token(tokens[:num_held], VOCAB):
        num_held += 1
    return tokens[len(prefix) : num_held]


def _content_of(job: LaneJob) -> object:
    if isinstance(job, AppendJob):
        return (job.handle, job.token_ids, job.on_stale, job.drafts)
    return (job.handle, job.length, job.count) if isinstance(job, ForkJob) else None


TestEngineModel = EngineMachine.TestCase
TestEngineModel.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
