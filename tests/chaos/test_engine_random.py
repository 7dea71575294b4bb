"""Random traffic on the engine with everything that can go wrong: lost replies, retries, joins, cancels, faults.

Sessions own a sequence each and drive it as a client would: one operation at a time, sent again, and again while the
first attempt is still in flight, until one answer is read. Replies are lost, callers go away, failpoints raise,
executor runs fail, the pool runs out, leases end. Whatever happens, each sequence holds in the end what its session
meant it to hold, all attempts of one operation were answered alike, and not a block is left behind.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.assembly.assemble import Setup
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.faults.failpoints import PLACES, Failpoints, fail
from ferrule_server.engine.jobs import (
    Acceptance,
    AppendJob,
    AppendResult,
    Drafts,
    Finish,
    ForkJob,
    ForkResult,
    GenerateFrame,
    GenerateJob,
    Job,
    Outcome,
    OutputRequest,
    StopRules,
    TruncateJob,
    TruncateResult,
    Window,
)
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.errors import BlocksExhausted, FerruleError
from ferrule_server.executor.base import OutputSpec, SampleSpec, Shaping
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.sequence_store import SequenceStore
from tests.chaos.figures import report, seed_of_run
from tests.engine.harness import check_lanes
from tests.fakes import FakeExecutor, fake_next_token

NUM_JOBS = int(os.environ.get("FERRULE_CHAOS_JOBS", "20000"))
MIN_JOBS_PER_S = 200
"""A campaign that runs slower proves too little, so it fails. In processor time: neighbours do not count."""

VOCAB = 32
OUTPUTS = (
    OutputRequest(OutputSpec(greedy=True)),
    OutputRequest(OutputSpec(sample=SampleSpec()), is_seeded=False),
    OutputRequest(OutputSpec(greedy=True, full_logits=True)),
    OutputRequest(OutputSpec(full_logits=True, sample=SampleSpec()), all_positions=True, is_seeded=False),
    OutputRequest(None),
    OutputRequest(OutputSpec(sample=SampleSpec(seed=3), shaping=Shaping(repetition_penalty=1.3, penalty_start=2))),
)
GREEDY = OUTPUTS[0]
STEMS = ((), (0, 1, 2, 0, 1, 2, 0, 1), (0, 1, 2, 0, 2, 2, 2, 2, 1, 1, 1, 1))
"""What many prompts begin with: the prefix cache finds it."""
MAX_SESSIONS = 16
SHORT_TTL_S, LONG_TTL_S = 5.0, 3600.0
RETRIED = {"ENGINE_FAULT", "CANCELLED", "KV_BLOCKS_EXHAUSTED"}
ENDED = {"HANDLE_UNKNOWN", "HANDLE_EXPIRED"}

LaneJob = AppendJob | ForkJob | TruncateJob | GenerateJob


@dataclass(frozen=True)
class Looped:
    """A Generate that came to its end: what it drew, and the handle before the last of it."""

    tokens: tuple[int, ...]
    handle: Handle


Answer = Outcome | Looped


@dataclass(eq=False)
class Attempt:
    """One sending of an operation; also its sink."""

    job: Job[object]
    outcomes: list[Answer] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    handle: Handle | None = None

    def deliver(self, job: Job[object], outcome: Outcome) -> None:
        """Take the outcome, or a frame on the way to it."""
        assert job is self.job
        if isinstance(outcome, GenerateFrame):
            self._take(outcome)
        else:
            self.outcomes.append(outcome)

    def _take(self, frame: GenerateFrame) -> None:
        assert isinstance(self.job, GenerateJob)
        assert not self.outcomes, "a frame came behind the last one"
        (branch,) = frame.branches
        self.job.window.taken_bytes = self.job.window.sent_bytes
        self.tokens += tuple(row.token for row in branch.rows if row.token is not None)
        self.handle = branch.handle or self.handle
        assert frame.is_last == (branch.finish is not None)
        if branch.finish is Finish.MAX_TOKENS:
            assert self.handle is not None
            self.outcomes.append(Looped(self.tokens, self.handle))
        elif branch.finish is Finish.KV_BLOCKS_EXHAUSTED:
            self.outcomes.append(BlocksExhausted(1, 0))
        elif branch.finish is not None:
            assert branch.error is not None, branch.finish
            self.outcomes.append(branch.error)

    def flush(self) -> None:
        """Nothing is left to do."""


@dataclass(eq=False)
class Operation:
    """What a session wants, until it has read one answer.

    Attributes:
        after: The tokens of its sequence, or of what it makes, afterwards.
        is_alone: No attempt of another operation may be on its way before or after it: it would undo that.
        answer: The first success of any attempt, read or not: what every other must equal.
        drawn: Of a Generate: what it must draw. partial: the last handle of one that broke.
    """

    job: LaneJob
    after: tuple[int, ...]
    is_alone: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    answer: Answer | None = None
    is_done: bool = False
    drawn: tuple[int, ...] = ()
    partial: Handle | None = None

    @property
    def is_known(self) -> bool:
        """Whether a late duplicate changes nothing even where the sequence was shortened since.

        An append would be a new one then, and so would those that a Generate goes on by.
        """
        return bool(self.job.request_id) and not isinstance(self.job, GenerateJob)

    @property
    def makes_others(self) -> bool:
        """Whether its answer lies in other sequences than its session's."""
        job = self.job
        return isinstance(job, ForkJob) or (isinstance(job, AppendJob) and job.on_stale is StalePolicy.FORK)


@dataclass(eq=False)
class Session:
    """One sequence and who drives it; ``tokens`` is what it must hold once nothing is on its way."""

    ttl_s: float
    handle: Handle | None = None
    tokens: tuple[int, ...] = ()
    old: list[Handle] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    is_ended: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether the newest operation has not been answered, as far as the session knows."""
        return bool(self.operations) and not self.operations[-1].is_done

    @property
    def is_quiet(self) -> bool:
        """Whether no attempt is on its way."""
        return not any(operation.attempts for operation in self.operations)


class Campaign:
    """The engine without its thread, so that a run depends on nothing but its seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.count: Counter[str] = Counter()
        self.executor = FakeExecutor(num_blocks=self.random.choice([40, 100, 400]), max_context=64)
        self.failpoints = Failpoints()
        for place in PLACES:
            self.failpoints.arm(place, self.maybe_fail)
        info = self.executor.info
        self.store = SequenceStore(
            BlockPool(info.num_blocks, info.block_size),
            instance="chaos",
            epoch="e1",
            max_context=info.model.max_context,
            max_ttl_s=LONG_TTL_S,
            clock=lambda: self.now,
        )
        retained = self.random.choice([0, 5000, 1 << 20])
        settings = EngineSettings(
            max_step_rows=self.random.choice([2, 5, 64]), gather_share=0.0, retained_bytes=retained
        )
        self.engine = Engine(
            Setup(self.executor, self.store, settings, lambda call: call(), failpoints=self.failpoints)
        )
        self.sessions: list[Session] = []
        self.num_ids = 0
        self.num_cohorts = 0
        self.is_calm = False

    def maybe_fail(self) -> None:
        """A failpoint: raises now and then."""
        if not self.is_calm and self.random.random() < 0.01:
            self.count["failpoints"] += 1
            fail()

    # ---- what sessions do -------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let some sessions act, run one step, read what came back."""
        self.now += self.random.random() * 0.2
        if len(self.sessions) < 8:
            self.sessions.append(Session(self.random.choice([SHORT_TTL_S, LONG_TTL_S, LONG_TTL_S])))
        frame: list[Attempt] = []
        for session in self.random.sample(self.sessions, self.random.randint(1, len(self.sessions))):
            frame += self.act(session)
        if self.random.random() < 0.3:
            self.num_cohorts += 1
            for attempt in frame:
                if isinstance(attempt.job, AppendJob):
                    attempt.job.cohort = self.num_cohorts
        self.run(frame)

    def run(self, frame: list[Attempt]) -> None:
        """Submit a frame, run one step, deliver, check."""
        self.count["jobs"] += len(frame)
        if frame:
            self.engine.submit([(attempt.job, attempt) for attempt in frame])
        if frame or self.engine._lanes.running:
            self.engine._take()
        self.engine._next_expiry_check = 0.0
        self.engine._expire()
        self.engine._turn()
        if self.engine._lanes.running:
            if not self.is_calm and self.random.random() < 0.01:
                self.count["failed_runs"] += 1
                self.executor.errors[len(self.executor.batches) + 1] = RuntimeError("chaos")
            self.engine._stepper.step()
            self.engine._turn()
        self.executor.copied_blocks.clear()
        self.check_integrity()
        for session in list(self.sessions):
            self.read(session)
            if session.is_ended and session.is_quiet:
                self.sessions.remove(session)
            elif session.handle is not None and session.is_quiet and not session.is_waiting:
                self.check_tip(session)

    def act(self, session: Session) -> list[Attempt]:
        """Send an operation, for the first time or again, or let a caller go away."""
        if session.is_ended:
            return []
        current = session.operations[-1] if session.operations else None
        if current is not None and not current.is_done:
            return self.retry(current)
        if current is not None and self.random.random() < 0.3:
            return self.repeat(session)
        if current is not None and current.is_alone and not session.is_quiet:
            return []
        operation = self.new_operation(session)
        if operation is None:
            return []
        session.operations.append(operation)
        self.count["operations"] += 1
        return [self.send(operation)]

    def repeat(self, session: Session) -> list[Attempt]:
        """An attempt that the network has kept for long, of an operation that was answered."""
        done = [operation for operation in session.operations if not operation.is_alone]
        if not done:
            return []
        self.count["late_duplicates"] += 1
        return [self.send(self.random.choice(done))]

    def retry(self, operation: Operation) -> list[Attempt]:
        """The answer is not there yet: wait, send again, or give an attempt up."""
        draw = self.random.random()
        if draw < 0.15 and operation.attempts:
            attempt = self.random.choice(operation.attempts)
            if not operation.is_alone:
                attempt.job.is_cancelled = True  # type: ignore[attr-defined]
        elif (draw < (0.2 if operation.drawn else 0.5) and not operation.is_alone) or not operation.attempts:
            self.count["sent_again"] += 1
            return [self.send(operation)]
        return []

    def send(self, operation: Operation) -> Attempt:
        """One more attempt."""
        job = dataclasses.replace(operation.job, is_cancelled=False)
        if isinstance(job, GenerateJob):
            job.window = Window(self.random.choice([1, 1 << 30]))
        attempt = Attempt(job)
        operation.attempts.append(attempt)
        return attempt

    def new_operation(self, session: Session) -> Operation | None:
        """Choose what the session wants next."""
        output = self.random.choice(OUTPUTS)
        tokens = tuple(self.random.randrange(3) for _ in range(self.random.choice([1, 1, 1, 2, 5, 13])))
        handle, draw = session.handle, self.random.random()
        if draw < 0.1:
            return self.looping(session, tokens)
        if handle is None:
            tokens = self.random.choice(STEMS) + tokens
            job: LaneJob = AppendJob("p", tokens, None, output, StalePolicy.FAIL, session.ttl_s, self.new_id())
            return Operation(job, tokens)
        if draw < 0.25:
            return self.verifying(session, tokens, output)
        if draw < 0.6:
            fits = len(session.tokens) + len(tokens) <= 64
            return Operation(AppendJob("p", tokens, handle, output), session.tokens + tokens) if fits else None
        if draw < 0.8:
            return self.branching(session, tokens, output) if len(self.sessions) < MAX_SESSIONS else None
        return self.shortening(session, tokens, output) if session.is_quiet else None

    def verifying(self, session: Session, tokens: tuple[int, ...], output: OutputRequest) -> Operation | None:
        """Drafts behind the tip or an older handle, some of which the model would say."""
        stale = self.random.choice([StalePolicy.FAIL, StalePolicy.FAIL, StalePolicy.FORK, StalePolicy.REWIND])
        if stale is not StalePolicy.FAIL and (not session.old or len(self.sessions) >= MAX_SESSIONS):
            return None
        if stale is StalePolicy.REWIND and not session.is_quiet:
            return None
        handle = session.handle if stale is StalePolicy.FAIL else self.random.choice(session.old)
        assert handle is not None
        before = session.tokens[: handle.length]
        drafts = self.drafts(before + tokens)
        if len(before + tokens + drafts) > 64 or session.tokens[len(before) :][: len(tokens)] == tokens:
            return None
        acceptance = self.random.choice([Acceptance.EXACT, Acceptance.EXACT, Acceptance.NONE])
        is_exact, is_fork = acceptance is Acceptance.EXACT, stale is StalePolicy.FORK
        job = AppendJob("p", tokens + drafts, handle, GREEDY if is_exact else output, stale)
        job.drafts = Drafts(len(drafts), acceptance, wants_row_handles=self.random.random() < 0.5)
        job.request_id = self.new_id() if is_fork else ""
        held = num_good(before + tokens, drafts) if is_exact else len(drafts)
        self.count["verifies"] += 1
        self.count["drafts_rejected"] += len(drafts) - held
        after = before + tokens + drafts[:held]
        return Operation(job, after, is_alone=stale is StalePolicy.REWIND)

    def looping(self, session: Session, tokens: tuple[int, ...]) -> Operation | None:
        """The server draws: behind the tip, from a prompt, or behind an older handle in place of what is there."""
        handle, stale, before = session.handle, StalePolicy.FAIL, session.tokens
        if handle is None:
            tokens = self.random.choice(STEMS) + tokens
        elif session.old and session.is_quiet and self.random.random() < 0.3:
            handle, stale = self.random.choice(session.old), StalePolicy.REWIND
            before = session.tokens[: handle.length]
        path = before + tokens
        drawn: tuple[int, ...] = ()
        for _ in range(self.random.randint(1, 12)):
            drawn += (fake_next_token(path + drawn, VOCAB),)
        after = path + drawn[:-1]
        if len(after) > 64 or (stale is StalePolicy.REWIND and session.tokens[: len(after)] == after):
            return None
        stop = StopRules(max_tokens=len(drawn))
        job = GenerateJob(
            "p", tokens, handle, GREEDY, stop, Window(1), stale, session.ttl_s if handle is None else None
        )
        job.request_id = self.new_id() if handle is None else ""
        self.count["generates"] += 1
        return Operation(job, after, is_alone=stale is StalePolicy.REWIND, drawn=drawn)

    def drafts(self, before: tuple[int, ...]) -> tuple[int, ...]:
        """Up to six tokens, each with some luck what the model says."""
        tokens = before
        for _ in range(self.random.randint(0, 6)):
            tokens += (fake_next_token(tokens, VOCAB) if self.random.random() < 0.8 else self.random.randrange(VOCAB),)
        return tokens[len(before) :]

    def branching(self, session: Session, tokens: tuple[int, ...], output: OutputRequest) -> Operation | None:
        """New sequences beside the session's own."""
        handle = session.handle
        assert handle is not None
        if self.random.random() < 0.5:
            return self.stale_append(session, tokens, output, StalePolicy.FORK)
        return Operation(ForkJob("p", handle, handle.length, 2, None, self.new_id()), session.tokens)

    def shortening(self, session: Session, tokens: tuple[int, ...], output: OutputRequest) -> Operation | None:
        """A rewind, a truncate, or the end."""
        handle, draw = session.handle, self.random.random()
        assert handle is not None
        if draw < 0.5:
            return self.stale_append(session, tokens, output, StalePolicy.REWIND)
        if draw < 0.75:
            length = self.random.randint(1, handle.length)
            return Operation(TruncateJob("p", handle, length), session.tokens[:length], is_alone=True)
        self.release(session)
        return None

    def stale_append(
        self, session: Session, tokens: tuple[int, ...], output: OutputRequest, on_stale: StalePolicy
    ) -> Operation | None:
        """Other tokens behind a handle that lies behind the tip."""
        if not session.old:
            return None
        older = self.random.choice(session.old)
        length = older.length
        if length + len(tokens) > 64 or session.tokens[length:][: len(tokens)] == tokens:
            return None
        is_fork = on_stale is StalePolicy.FORK
        job = AppendJob("p", tokens, older, output, on_stale, None, self.new_id() if is_fork else "")
        return Operation(job, session.tokens[:length] + tokens, is_alone=not is_fork)

    def new_id(self) -> str:
        """A request_id that was never used."""
        self.num_ids += 1
        return str(self.num_ids)

    def release(self, session: Session, *, is_checked: bool = True) -> None:
        """End the session, and whatever it made without reading of it."""
        session.is_ended = True
        if session.handle is not None:
            if is_checked:
                self.check_tip(session)
            self.give_back(session.handle)
        for operation in session.operations:
            if operation.answer is not None and not operation.is_done:
                self.give_back(*_handles_of(operation.answer))
            elif operation.partial is not None and not operation.is_done:
                self.give_back(operation.partial)

    def give_back(self, *handles: Handle) -> None:
        """Release, however often that fails."""
        outcome: Answer | None = None
        while outcome is None or isinstance(outcome, FerruleError):
            job = host_calls.release("p", handles)
            attempt = Attempt(job)
            self.engine.submit([(job, attempt)])
            self.engine._take()
            self.engine._turn()
            (outcome,) = attempt.outcomes

    # ---- what comes back --------------------------------------------------------------------------------------------

    def read(self, session: Session) -> None:
        """Take the outcomes that are there; some of them are lost on their way."""
        for operation in session.operations:
            for attempt in list(operation.attempts):
                if not attempt.outcomes:
                    continue
                assert len(attempt.outcomes) == 1, "an attempt was answered twice"
                operation.attempts.remove(attempt)
                operation.partial = attempt.handle or operation.partial
                self.check(session, operation, attempt.outcomes[0])
        on_their_way = [each for each in session.operations[:-8] if each.attempts or not each.is_done]
        session.operations = on_their_way + session.operations[-8:]

    def check(self, session: Session, operation: Operation, outcome: Answer) -> None:
        """Every success of an operation is the same success; a failure is one that may happen."""
        if isinstance(outcome, FerruleError):
            self.count[outcome.REASON] += 1
            self.check_failure(session, operation, outcome.REASON)
            return
        self.count["answers"] += 1
        if operation.answer is None:
            operation.answer = outcome
            self.check_first(operation, outcome)
        else:
            self.check_alike(operation.answer, outcome)
        if session.is_ended:
            if not operation.is_done:  # nobody else has it
                self.give_back(*_handles_of(outcome))
            return
        is_lost = not self.is_calm and self.random.random() < 0.3
        self.count["lost_replies"] += is_lost
        if not operation.is_done and not is_lost:
            operation.is_done = True
            self.count["applied"] += 1
            self.go_on(session, operation, outcome)

    def check_failure(self, session: Session, operation: Operation, reason: str) -> None:
        """Retried, or the end of the session; a late attempt may also find that time went on."""
        if reason in RETRIED:
            if reason == "KV_BLOCKS_EXHAUSTED" and not operation.is_done and self.random.random() < 0.3:
                self.count["given_up"] += 1
                self.release(session, is_checked=False)
            return
        if reason in ENDED and operation.is_done and operation.makes_others:
            return  # what it made has ended since
        if reason in ENDED:
            assert session.is_ended or session.ttl_s == SHORT_TTL_S, reason
            session.is_ended = True
            return
        is_late = operation.is_done
        assert is_late, f"{reason} for an operation that is not done"
        assert reason in ("HANDLE_STALE", "INVALID_FIELD"), reason

    def check_first(self, operation: Operation, outcome: Answer) -> None:
        """The answer says what was asked for."""
        if isinstance(outcome, ForkResult):
            assert len(outcome.handles) == 2
        elif isinstance(outcome, TruncateResult):
            assert outcome.handle.length == len(operation.after)
        elif isinstance(outcome, Looped):
            assert (outcome.tokens, outcome.handle.length) == (operation.drawn, len(operation.after))
        else:
            assert isinstance(outcome, AppendResult)
            assert outcome.handle.length == len(operation.after)
            drafts, spec = operation.job.drafts, operation.job.output.spec  # type: ignore[union-attr]
            if drafts is not None and drafts.acceptance is Acceptance.EXACT:
                assert outcome.verified is not None
                assert outcome.verified.next_token == fake_next_token(operation.after, VOCAB)
                assert len(outcome.rows) == outcome.verified.accepted_count + 1
            if spec is not None and spec.greedy:
                assert outcome.rows[-1].token == fake_next_token(operation.after, VOCAB)

    def check_alike(self, first: Answer, other: Answer) -> None:
        """Handles, seed and rows are equal, whether kept or computed again."""
        if isinstance(first, AppendResult):
            assert isinstance(other, AppendResult)
            assert (other.handle, other.seed, other.verified) == (first.handle, first.seed, first.verified)
            assert [row.token for row in other.rows] == [row.token for row in first.rows]
            for row, again in zip(first.rows, other.rows, strict=True):
                assert (row.logits is None) == (again.logits is None)
                assert row.logits is None or row.logits.tolist() == again.logits.tolist()  # type: ignore[union-attr]
        elif isinstance(first, ForkResult):
            assert isinstance(other, ForkResult)
            assert other.handles == first.handles
        else:
            assert other == first

    def go_on(self, session: Session, operation: Operation, outcome: Answer) -> None:
        """The session has read the answer: it stands on a new handle, or has new sessions beside it."""
        if isinstance(outcome, ForkResult):
            for handle in outcome.handles:
                self.sessions.append(Session(session.ttl_s, handle, operation.after))
            return
        assert isinstance(outcome, AppendResult | TruncateResult | Looped)
        handle = outcome.handle
        if session.handle is not None and handle.cache_id != session.handle.cache_id:
            self.sessions.append(Session(session.ttl_s, handle, operation.after))
            return
        if operation.is_alone:
            session.operations = [each for each in session.operations if each.is_known or each is operation]
            session.old = [old for old in session.old if _names_part(old, session.tokens, operation.after)]
        elif session.handle is not None:
            session.old.append(session.handle)
        session.handle, session.tokens = handle, operation.after

    # ---- what must hold ---------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Every part of the engine, between steps."""
        self.store.check_integrity()
        self.engine._lanes.admission.records.check_integrity()
        self.engine._lanes.creations.check_integrity({each.handle_id for each in self.store.registry})
        check_lanes(self.engine._lanes)

    def check_tip(self, session: Session) -> None:
        """The sequence holds exactly what its session applied."""
        assert session.handle is not None
        try:
            sequence = self.store.resolve(session.handle, "p")
        except FerruleError as error:
            assert session.ttl_s == SHORT_TTL_S, error  # noqa: PT017  (only short leases may have ended)
            return
        held = tuple(sequence.token_ids)
        self.count["tips_checked"] += 1
        self.count["doubled"] += len(held) > len(session.tokens)
        self.count["lost"] += len(held) < len(session.tokens)
        self.count["changed"] += len(held) == len(session.tokens) and held != session.tokens

    def finish(self) -> None:
        """Let everything end in peace: every operation is answered, every tip is right, every block comes back."""
        self.is_calm = True
        self.executor.errors.clear()
        for _ in range(5000):
            frame: list[Attempt] = []
            for session in self.sessions:
                current = session.operations[-1] if session.operations else None
                if current is not None and not current.is_done and not current.attempts and not session.is_ended:
                    frame.append(self.send(current))
            if not frame and all(session.is_quiet for session in self.sessions):
                break
            self.run(frame)
        for session in list(self.sessions):
            assert session.is_quiet
            self.release(session)
        self.now += LONG_TTL_S + 1
        self.engine._next_expiry_check = 0.0
        self.engine._expire()
        assert not self.engine._lanes.running
        assert not self.engine._lanes._lanes
        assert self.store.pool.num_used == 0
        assert (len(self.engine._lanes.admission.records), self.engine._lanes.admission.records.memory.num_held) == (
            0,
            0,
        )
        self.check_integrity()
        for name in ("joined", "replays", "recomputed", "accepted_tokens"):
            self.count[name] += getattr(self.engine.counters, name)
        self.count["prefix_hit_tokens"] += self.store.metrics().num_prefix_hit_tokens
        self.count["prefix_evictions"] += self.store.metrics().num_prefix_evictions


def num_good(before: tuple[int, ...], drafts: tuple[int, ...]) -> int:
    """How many of the drafts the model would have said."""
    for count, token in enumerate(drafts):
        if token != fake_next_token(before + drafts[:count], VOCAB):
            return count
    return len(drafts)


def _handles_of(outcome: Answer) -> tuple[Handle, ...]:
    """The handles that an answer gave."""
    if isinstance(outcome, ForkResult):
        return outcome.handles
    return (outcome.handle,) if isinstance(outcome, AppendResult | TruncateResult | Looped) else ()


def _names_part(old: Handle, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a handle on the tokens ``before`` names a part of ``after``."""
    return old.length < len(after) and before[: old.length] == after[: old.length]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_traffic_is_applied_once_whatever_breaks(caplog: pytest.LogCaptureFixture) -> None:
    """Applied = sent, 0 doubled, 0 lost, over campaigns of different pools, steps and bounds."""
    caplog.set_level(logging.CRITICAL)  # what breaks on purpose is logged by the thousand
    total: Counter[str] = Counter()
    started, seed = time.process_time(), seed_of_run()
    while total["jobs"] < NUM_JOBS:
        campaign = Campaign(seed)
        try:
            while campaign.count["jobs"] < 2000:
                campaign.tick()
            campaign.finish()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        total += campaign.count
        seed += 1
    elapsed_s = time.process_time() - started
    jobs_per_s = total["jobs"] / elapsed_s
    wrong = {key: total.pop(key, 0) for key in ("doubled", "lost", "changed")}
    figures = {key.lower(): value for key, value in sorted(total.items())}
    report("engine_random", **wrong, cpu_s=round(elapsed_s, 1), jobs_per_s=round(jobs_per_s), **figures)
    assert not any(wrong.values()), wrong
    assert total["tips_checked"] > total["applied"]
    assert jobs_per_s >= MIN_JOBS_PER_S, f"{jobs_per_s:.0f} jobs/s prove too little"
    happening = ("joined", "replays", "recomputed", "failpoints", "failed_runs", "lost_replies", "CANCELLED")
    for happened in (*happening, "generates", "verifies", "drafts_rejected", "accepted_tokens", "prefix_hit_tokens"):
        assert total[happened] > 0, f"{happened} never happened"
