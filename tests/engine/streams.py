"""Streams for engine tests: sinks that collect frames, jobs that ask for them, an executor that runs step by step."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from ferrule_server.engine.jobs import (
    BranchFrame,
    ForwardFrame,
    ForwardJob,
    GenerateFrame,
    GenerateJob,
    Job,
    Outcome,
    OutputRequest,
    Pooling,
    StopRules,
    StreamJob,
    Window,
)
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import OutputSpec, RowOutput, SampleSpec
from ferrule_server.kv.handle import Handle, StalePolicy
from tests.engine.harness import Harness, with_new
from tests.fakes import FakeExecutor

VOCAB = 32
UNSEEDED = OutputRequest(OutputSpec(sample=SampleSpec()), is_seeded=False)


def drawn_with(seed: int) -> OutputRequest:
    """A plain draw with that seed."""
    return OutputRequest(OutputSpec(sample=SampleSpec(seed=seed)))


class SteppedExecutor(FakeExecutor):
    """Each run waits to be allowed, while ``is_stepped``."""

    is_stepped = True

    def __init__(self, **settings: int) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self._allowed = threading.Semaphore(0)
        self._waits = threading.Semaphore(0)

    def _wait(self) -> None:
        if self.is_stepped:
            self._waits.release()
            assert self._allowed.acquire(timeout=30), "a step was not allowed within 30 s"

    def arrive(self) -> None:
        """Wait until a step is about to run."""
        assert self._waits.acquire(timeout=20), "no step within 20 s"

    def step(self, count: int = 1) -> None:
        """Let ``count`` steps run, and wait until the one after them is about to."""
        for _ in range(count):
            self._allowed.release()
            self.arrive()

    def run_freely(self) -> None:
        """Let the step that waits run, and all that follow."""
        self.is_stepped = False
        self._allowed.release()


class Stream:
    """A sink for one stream job: collects its frames and waits for its end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_over = False
        self.outcomes: list[Outcome] = []
        self.num_flushes = 0

    def deliver(self, job: Job[object], outcome: Outcome) -> None:
        """Take a frame or an error; anything after the end fails the test."""
        with self._changed:
            assert not self._is_over, f"{outcome} came after the end"
            self.outcomes.append(outcome)
            self._is_over = not isinstance(outcome, GenerateFrame | ForwardFrame) or outcome.is_last
            self._changed.notify_all()

    def flush(self) -> None:
        """Count the flushes."""
        self.num_flushes += 1

    @property
    def is_over(self) -> bool:
        """Whether the last frame, or an error, is there."""
        return self._is_over

    def wait(self) -> list[Outcome]:
        """Wait for the end."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_over, 60), f"no end within 60 s of {self.outcomes[-3:]}"
        return self.outcomes

    def wait_for(self, count: int) -> list[Outcome]:
        """Wait for so many frames."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outcomes) >= count, 20), f"{len(self.outcomes)} frames"
        return self.outcomes[:count]

    def error(self) -> FerruleError:
        """Wait for the end, which must be an error in place of the first frame."""
        (outcome,) = self.wait()
        assert isinstance(outcome, FerruleError), f"expected an error, got {outcome}"
        return outcome

    def refusal(self) -> FerruleError | None:
        """Wait for the end; return the error in place of the first frame, None where there were frames."""
        outcome = self.wait()[0]
        return outcome if isinstance(outcome, FerruleError) else None

    def forward(self) -> list[ForwardFrame]:
        """Wait for the end, which must be a Forward's last frame."""
        frames = [frame for frame in self.wait() if isinstance(frame, ForwardFrame)]
        assert frames == self.outcomes, f"not all frames: {self.outcomes[-1]}"
        return frames

    def branches(self) -> list[Branch]:
        """Wait for the end and return what became of each branch."""
        self.wait()
        return self.so_far()

    def branch(self) -> Branch:
        """Wait for the end and return what became of the one branch."""
        (branch,) = self.branches()
        return branch

    def so_far(self) -> list[Branch]:
        """What has become of each branch up to now."""
        branches: dict[int, Branch] = {}
        for frame in list(self.outcomes):
            assert isinstance(frame, GenerateFrame), f"expected frames, got {frame}"
            indices = [each.index for each in frame.branches]
            assert indices == sorted(set(indices)) != [], f"branches out of order: {indices}"
            for each in frame.branches:
                branches.setdefault(each.index, Branch([], [], [])).add(each)
        return [branches[index] for index in sorted(branches)]


@dataclass
class Branch:
    """What became of one branch of a Generate: ``handles`` are those of its frames."""

    frames: list[BranchFrame]
    rows: list[RowOutput]
    handles: list[Handle]

    def add(self, frame: BranchFrame) -> None:
        """Take its next frame."""
        assert not self.frames or self.frames[-1].finish is None, "a branch went on after its end"
        self.frames.append(frame)
        self.rows += frame.rows
        if frame.rows:
            assert frame.handle is not None
            self.handles.append(frame.handle)

    @property
    def tokens(self) -> list[int]:
        """Tokens drawn."""
        return [row.token for row in self.rows if row.token is not None]

    def handle_before(self, index: int) -> Handle | None:
        """The handle before the token with that index, None where a frame told of several tokens and not of this."""
        length = self.rows[index].position
        return next((handle for handle in self.handles if handle.length == length), None)

    def agrees_with(self, other: Branch) -> bool:
        """Whether both tell the same of the tokens that both drew, and at least of the last of them."""
        count = min(len(self.rows), len(other.rows))
        pairs = [(self.handle_before(index), other.handle_before(index)) for index in range(count)]
        is_told = {pair for pair in pairs if None not in pair}
        return self.tokens[:count] == other.tokens[:count] and bool(is_told) and all(a == b for a, b in is_told)

    @property
    def last(self) -> BranchFrame:
        """Its last frame."""
        return self.frames[-1]


def generate(
    handle: Handle | None,
    *token_ids: int,
    output: OutputRequest = UNSEEDED,
    max_tokens: int = 8,
    stop: StopRules | None = None,
    on_stale: StalePolicy = StalePolicy.FAIL,
    window: Window | None = None,
    **fields: Any,  # of the job
) -> GenerateJob:
    """A Generate of the principal ``me``."""
    stop = stop or StopRules(max_tokens=max_tokens)
    return GenerateJob("me", token_ids, handle, output, stop, window or Window(1 << 30), on_stale, **with_new(fields))


def forward(
    *token_ids: int,
    output: OutputRequest | None = None,
    pooling: Pooling = Pooling.NONE,
    chunk_rows: int = 8,
    window: Window | None = None,
) -> ForwardJob:
    """A Forward of the principal ``me``."""
    output = output or OutputRequest(OutputSpec(greedy=True), all_positions=True)
    return ForwardJob("me", token_ids, output, window or Window(1 << 30), chunk_rows, 100, pooling)


def start(harness: Harness, job: StreamJob[object]) -> Stream:
    """Submit a stream job alone."""
    stream = Stream()
    harness.engine.submit([(job, stream)])
    return stream
