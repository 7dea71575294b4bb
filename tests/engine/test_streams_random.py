"""Many Generates and Forwards beside random appends, forks, releases and cancels: nothing is lost or mixed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.jobs import (
    AppendJob,
    AppendResult,
    ForkJob,
    ForkResult,
    ForwardFrame,
    ForwardJob,
    GenerateFrame,
    GenerateJob,
    Job,
    OutputRequest,
    Pooling,
    TruncateJob,
    TruncateResult,
    WarmupJob,
    Window,
)
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import DeviceLost, OutputSpec, SampleSpec
from ferrule_server.kv.handle import Handle, StalePolicy
from tests.engine.harness import GREEDY, Harness, Pending, append
from tests.engine.streams import UNSEEDED, VOCAB, Stream, forward, generate
from tests.fakes import FakeExecutor, fake_next_token
from tests.kv.dense_model import lineage_of

NUM_ROUNDS = 20
NUM_OPS = 40
FINGERPRINT = bytes(range(32))
DRAWN = OutputRequest(OutputSpec(sample=SampleSpec(top_k=3, seed=9)))
SPICY = OutputRequest(OutputSpec(sample=SampleSpec(temperature=3.0)), is_seeded=False)


@dataclass
class Client:
    """A client that does anything, and knows what the tokens behind each of its handles are."""

    harness: Harness
    chance: random.Random
    tokens_of: dict[Handle, tuple[int, ...]] = field(default_factory=dict)
    streams: list[tuple[GenerateJob | ForwardJob, Stream]] = field(default_factory=list)
    pending: list[tuple[Job[object], Pending]] = field(default_factory=list)
    num_checked: int = 0
    num_requests: int = 0

    def act(self) -> None:
        """Do one thing."""
        weights: dict[Callable[[], None], float] = {
            self._generate: 6,
            self._append: 4,
            self._fork: 1,
            self._truncate: 1,
            self._release: 2,
        }
        weights |= {self._forward: 1, self._cancel: 2, self._read: 6, self._warm: 0.1}
        (act,) = self.chance.choices(list(weights), list(weights.values()))
        act()

    def _handle(self, odds_of_none: float) -> Handle | None:
        """Some handle, more often a recent one."""
        if not self.tokens_of or self.chance.random() < odds_of_none:
            return None
        handles = list(self.tokens_of)
        return handles[-min(len(handles), 1 + int(self.chance.expovariate(0.15)))]

    def _some_tokens(self, least: int, most: int) -> tuple[int, ...]:
        """Random tokens."""
        return tuple(self.chance.randrange(VOCAB) for _ in range(self.chance.randint(least, most)))

    def _request_id(self) -> str:
        """None, a new one, or one used before."""
        self.num_requests += 1
        return self.chance.choice(["", "", f"r{self.num_requests}", f"r{self.chance.randint(1, self.num_requests)}"])

    def _window(self) -> Window:
        """Wide, or so narrow that the stream stands still again and again."""
        return Window(self.chance.choice([1 << 30, 1 << 30, 64, 300]))

    def _generate(self) -> None:
        handle = self._handle(0.4)
        job = generate(
            handle,
            *self._some_tokens(0 if handle else 1, 9),
            output=self.chance.choice([GREEDY, GREEDY, DRAWN, UNSEEDED, SPICY]),
            max_tokens=self.chance.randint(1, 25),
            on_stale=self.chance.choice(list(StalePolicy)),
            request_id=self._request_id(),
            num_branches=self.chance.choice([1, 1, 2, 4]),
            window=self._window(),
        )
        self._stream(job)

    def _forward(self) -> None:
        pooling = self.chance.choice(list(Pooling))
        self._stream(
            forward(
                *self._some_tokens(1, 30), pooling=pooling, chunk_rows=self.chance.randint(1, 12), window=self._window()
            )
        )

    def _stream(self, job: GenerateJob | ForwardJob) -> None:
        sink = Stream()
        self.streams.append((job, sink))
        self.harness.engine.submit([(job, sink)])

    def _append(self) -> None:
        handle = self._handle(0.3)
        on_stale = self.chance.choice(list(StalePolicy))
        self._send(append(handle, *self._some_tokens(1, 5), on_stale=on_stale, request_id=self._request_id()))

    def _fork(self) -> None:
        if handle := self._handle(0.0):
            self._send(ForkJob("me", handle, self.chance.randint(1, handle.length), self.chance.randint(1, 3)))

    def _truncate(self) -> None:
        if handle := self._handle(0.0):
            self._send(TruncateJob("me", handle, self.chance.randint(1, handle.length)))

    def _release(self) -> None:
        if handle := self._handle(0.0):
            self._send(host_calls.release("me", (handle,)))

    def _warm(self) -> None:
        self._send(WarmupJob("me", (self.chance.randint(1, 8),)))

    def _cancel(self) -> None:
        if self.streams:
            stream_job, _ = self.chance.choice(self.streams)
            stream_job.is_cancelled = True
            if self.chance.random() < 0.5:
                self.harness.engine.resume(stream_job)
        if self.pending and self.chance.random() < 0.3:
            job = self.chance.choice(self.pending)[0]
            if isinstance(job, AppendJob | ForkJob):
                job.is_cancelled = True

    def _read(self) -> None:
        for job, _ in self.streams:
            job.window.taken_bytes = job.window.sent_bytes
            self.harness.engine.resume(job)

    def _send(self, job: Job[object]) -> None:
        self.pending.append((job, self.harness.submit(job)))

    def settle(self) -> None:
        """Read everything until every stream and job is over, and learn from what they answered."""
        for stream_job, stream in self.streams:
            stream_job.window.limit_bytes = 1 << 40
            self.harness.engine.resume(stream_job)
            stream.wait()
        for job, sink in self.pending:
            self._learn(job, sink)
        for stream_job, stream in self.streams:
            if isinstance(stream_job, GenerateJob):
                self._check_generate(stream_job, stream)
            else:
                self._check_forward(stream_job, stream)
        self.streams.clear()
        self.pending.clear()

    def make_room(self) -> None:
        """Release half of the sequences, those of streams that broke off too, and forget those handles."""
        store = self.harness.store
        for sequence in list(store.registry):
            if self.chance.random() < 0.5:
                assert self.harness.release(sequence.handle_at())
        alive = {sequence.cache_id for sequence in store.registry}
        self.tokens_of = {handle: each for handle, each in self.tokens_of.items() if handle.cache_id in alive}

    def _learn(self, job: Job[object], sink: Pending) -> None:
        outcome = sink.outcome()
        if isinstance(outcome, AppendResult):
            assert isinstance(job, AppendJob)
            before = self.tokens_of[job.handle] if job.handle else ()
            self._know(outcome.handle, before + job.token_ids)
            assert outcome.rows[0].token == fake_next_token(before + job.token_ids, VOCAB)
        elif isinstance(outcome, ForkResult):
            assert isinstance(job, ForkJob)
            for handle in outcome.handles:
                self._know(handle, self.tokens_of[job.handle][: job.length])
        elif isinstance(outcome, TruncateResult):
            assert isinstance(job, TruncateJob)
            self._know(outcome.handle, self.tokens_of[job.handle][: job.new_length])

    def _know(self, handle: Handle, tokens: tuple[int, ...]) -> None:
        assert (handle.length, handle.lineage) == (len(tokens), lineage_of(tokens, FINGERPRINT)), (
            "a handle names other tokens"
        )
        self.tokens_of[handle] = tokens
        self.num_checked += 1

    def _check_generate(self, job: GenerateJob, stream: Stream) -> None:
        """Every handle names exactly the prompt and what was drawn before its newest token, in every branch."""
        assert sum(isinstance(outcome, FerruleError) for outcome in stream.outcomes) <= 1
        if isinstance(stream.outcomes[-1], FerruleError):
            assert len(stream.outcomes) == 1
            return
        last = stream.outcomes[-1]
        assert isinstance(last, GenerateFrame)
        assert last.is_last
        prompt = (self.tokens_of[job.handle] if job.handle else ()) + job.token_ids
        for branch in stream.so_far():
            assert branch.last.finish is not None, "a stream is over and a branch is not"
            assert [row.position for row in branch.rows] == [len(prompt) + i for i in range(len(branch.rows))]
            drawn = prompt + tuple(branch.tokens)
            for handle in branch.handles:
                self._know(handle, drawn[: handle.length])
            if job.output is GREEDY:
                for end in range(len(prompt), len(drawn)):
                    assert drawn[end] == fake_next_token(drawn[:end], VOCAB)

    def _check_forward(self, job: ForwardJob, stream: Stream) -> None:
        """Rows in order, without gaps, up to the end or the error."""
        frames = [frame for frame in stream.outcomes if isinstance(frame, ForwardFrame)]
        assert [frame.is_last for frame in frames[:-1]] == [False] * len(frames[:-1])
        assert len(stream.outcomes) - len(frames) == (not frames or not frames[-1].is_last)
        rows = [row for frame in frames for row in frame.rows]
        expected = [fake_next_token(job.token_ids[:end], VOCAB) for end in range(1, len(rows) + 1)]
        assert [row.token for row in rows] == expected


@pytest.mark.parametrize("seed", range(6))
def test_anything_beside_anything_keeps_every_handle_true_and_every_stream_ends_once(seed: int) -> None:
    """Some seeds with a small pool, short contexts, steps that fail or many chunks."""
    chance = random.Random(seed)
    executor = FakeExecutor(
        num_blocks=chance.choice([24, 200]), max_context=chance.choice([40, 256]), step_time_s=0.0002
    )
    if seed % 2:
        executor.errors = {step: RuntimeError("told to fail") for step in chance.sample(range(2000), 100)}
    with Harness(executor, max_step_rows=chance.choice([5, 64])) as harness:
        client = Client(harness, chance)
        for _ in range(NUM_ROUNDS):
            for _ in range(NUM_OPS):
                client.act()
            client.settle()
            client.make_room()
            assert harness.engine.snapshot().num_streams == 0
            assert not harness.engine._drivers.parked
            assert all(not sequence.num_pins for sequence in harness.store.registry)
            harness.check_integrity()
        assert client.num_checked > 100


@pytest.mark.parametrize("seed", range(4))
def test_whenever_the_engine_ends_every_stream_and_job_ends_once(seed: int) -> None:
    """Closed in the midst of everything, or by a device that is lost."""
    chance = random.Random(100 + seed)
    executor = FakeExecutor(step_time_s=0.0005)
    with Harness(executor) as harness:
        client = Client(harness, chance)
        for _ in range(3):
            for _ in range(NUM_OPS):
                client.act()
            client.settle()
        for _ in range(NUM_OPS):
            client.act()
        if seed % 2:
            executor.errors = {len(executor.batches) + n: DeviceLost() for n in range(1, 1000)}
        harness.engine.close()
        for _, stream in client.streams:
            stream.wait()
        for _, sink in client.pending:
            sink.outcome()
        assert harness.num_failures <= seed % 2
