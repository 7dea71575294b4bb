"""The engine against a sequential model: random frames of jobs, every outcome predicted by plain lists of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ferrule_server.engine.jobs import AppendJob, AppendResult, ForkJob, ForkResult, TruncateJob, TruncateResult
from ferrule_server.errors import FerruleError
from ferrule_server.kv.handle import Handle, StalePolicy
from tests.engine.harness import Harness, Pending, append
from tests.fakes import FakeExecutor, fake_next_token

VOCAB = 32
TOKENS = st.lists(st.integers(1, 2), min_size=0, max_size=6)
STALE = st.sampled_from(StalePolicy)


@dataclass(eq=False)
class Model:
    """What one sequence should hold."""

    tokens: tuple[int, ...]
    is_released: bool = False
    last_truncate: tuple[tuple[int, ...], int] | None = None


@dataclass(frozen=True)
class Known:
    """A handle some reply returned, and what it must go on meaning."""

    handle: Handle
    model: Model
    prefix: tuple[int, ...]


class EngineMachine(RuleBasedStateMachine):
    """Frames of appends, forks and truncates on any handle ever issued; releases in between."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(FakeExecutor(num_blocks=4096), max_step_rows=5)
        self.harness.engine.start()
        self.known: list[Known] = []

    def teardown(self) -> None:
        """Release everything: not a block may be left in use."""
        for known in self.known:
            self.harness.release(known.handle)
        self.harness.engine.close()
        self.harness.store.check_integrity()
        snapshot = self.harness.engine.snapshot()
        assert snapshot.free_blocks == snapshot.total_blocks

    @initialize(tokens=TOKENS)
    def first(self, tokens: list[int]) -> None:
        """There is one sequence to begin with."""
        self.create((*tokens, 1))

    @rule(tokens=TOKENS)
    def prefill(self, tokens: list[int]) -> None:
        """A new sequence."""
        self.create((*tokens, 2))

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 1000))
    def release(self, pick: int) -> None:
        """End a sequence: its handles are unknown from now on."""
        known = self.known[pick % len(self.known)]
        self.harness.release(known.handle)
        known.model.is_released = True

    @precondition(lambda self: self.known)
    @rule(frame=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5), TOKENS, STALE), min_size=1, max_size=5))
    def run_frame(self, frame: list[tuple[int, int, list[int], StalePolicy]]) -> None:
        """Submit jobs together; on each sequence they must behave as if sent one after another."""
        asked = []
        for pick, kind, tokens, on_stale in frame:
            known = self.known[pick % len(self.known)]
            job: AppendJob | ForkJob | TruncateJob = append(known.handle, *tokens, on_stale=on_stale)
            if kind == 4:
                job = ForkJob("me", known.handle, known.handle.length, 2)
            elif kind == 5:
                job = TruncateJob("me", known.handle, min(known.handle.length, len(tokens) + 1))
            asked.append((known, job))
        pending = self.harness.submit_all(*(job for _, job in asked))
        for (known, job), each in zip(asked, pending, strict=True):
            if isinstance(job, AppendJob):
                self.check_append(known, job, each)
            elif isinstance(job, ForkJob):
                self.check_fork(known, each)
            else:
                self.check_truncate(known, job, each)

    def create(self, tokens: tuple[int, ...]) -> None:
        """Prefill and remember."""
        result = self.harness.prefill(*tokens)
        assert result.rows[0].token == fake_next_token(tokens, VOCAB)
        self.known.append(Known(result.handle, Model(tokens), tokens))

    def refusal(self, known: Known) -> str | None:
        """Why a handle cannot be used at all."""
        if known.model.is_released:
            return "HANDLE_UNKNOWN"
        if known.model.tokens[: len(known.prefix)] != known.prefix:
            return "HANDLE_STALE"
        return None

    def check_append(self, known: Known, job: AppendJob, pending: Pending) -> None:
        """The table of the append rule."""
        model, prefix, tokens = known.model, known.prefix, job.token_ids
        reason = self.refusal(known)
        tail = model.tokens[len(prefix) :]
        is_replay = bool(tokens) and bool(tail) and tail[: len(tokens)] == tokens
        if reason is None and tokens and tail and not is_replay and job.on_stale is StalePolicy.FAIL:
            reason = "HANDLE_STALE"
        outcome = pending.outcome()
        if reason is not None:
            assert isinstance(outcome, FerruleError)
            assert reason == outcome.REASON
            return
        assert isinstance(outcome, AppendResult), outcome
        after = prefix + tokens
        assert outcome.rows[0].token == fake_next_token(after, VOCAB)
        assert outcome.replayed == is_replay
        assert outcome.handle.length == len(after)
        is_fork = bool(tokens) and bool(tail) and not is_replay and job.on_stale is StalePolicy.FORK
        assert outcome.forked == is_fork
        if is_fork:
            model = Model(after)
        elif tokens and not is_replay:
            model.tokens, model.last_truncate = after, None
        self.known.append(Known(outcome.handle, model, after))

    def check_fork(self, known: Known, pending: Pending) -> None:
        """Both branches hold the prefix, whatever the source holds by now."""
        outcome = pending.outcome()
        reason = self.refusal(known)
        if reason is not None:
            assert isinstance(outcome, FerruleError)
            assert reason == outcome.REASON
            return
        assert isinstance(outcome, ForkResult)
        self.known += [Known(handle, Model(known.prefix), known.prefix) for handle in outcome.handles]

    def check_truncate(self, known: Known, job: TruncateJob, pending: Pending) -> None:
        """Absolute; the equal request succeeds again while the tip still is where it put it."""
        outcome = pending.outcome()
        model, asked = known.model, (known.prefix, job.new_length)
        is_again = model.last_truncate == asked and len(model.tokens) == job.new_length
        reason = None if is_again and not model.is_released else self.refusal(known)
        if reason is not None:
            assert isinstance(outcome, FerruleError)
            assert reason == outcome.REASON
            return
        assert isinstance(outcome, TruncateResult), outcome
        model.tokens, model.last_truncate = known.prefix[: job.new_length], asked
        self.known.append(Known(outcome.handle, model, model.tokens))


TestEngineModel = EngineMachine.TestCase
TestEngineModel.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
