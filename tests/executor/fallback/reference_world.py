"""Doubles around :class:`FallbackExecutor`: a stream, and kernels and torch that are both the paged reference.

What is put into the stream runs when somebody waits, and a step that fails leaves garbage in its slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from ferrule_server.executor.base import (
    ExecutorState,
    MemoryPlan,
    OutputSpec,
    RowOutput,
    StepBatch,
    StepResult,
)
from ferrule_server.executor.cuda.cuda_device import CudaDevice
from ferrule_server.executor.cuda.driver import GpuInfo
from ferrule_server.executor.cuda.gpu import Gpu, GpuLost
from ferrule_server.executor.cuda.runner import NAME
from ferrule_server.executor.fallback.executor import FallbackExecutor
from ferrule_server.executor.reference import PagedReferenceExecutor
from tests.model.stepping import Piece, PooledSequence, Stepper

GREEDY = OutputSpec(greedy=True)
MAX_ROWS = 8
TIMEOUT_S = 10.0
PLAN = MemoryPlan(total=100, weights=10, kv_pool=20, buffers=5, workspace=5, graphs=8, free=52)


_CALLS = ("submit", "result", "current", "synchronize", "capture")


class StreamGpu:
    """A stream, and nothing else of a GPU."""

    def __init__(self) -> None:
        self.info = GpuInfo("Stream GPU", (9, 0), (13, 0), 1, 0, 0)
        self.work: deque[Callable[[], None]] = deque()
        self.failures: dict[str, list[Exception | None]] = {}
        self.is_closed = False

    def fail(self, call: str, error: Exception, nth: int = 1) -> None:
        """Let the nth call from now fail."""
        self.failures[call] = [None] * (nth - 1) + [error]

    def hit(self, call: str) -> None:
        """Fail if it is time."""
        due = self.failures.get(call)
        error = due.pop(0) if due else None
        if isinstance(error, GpuLost):
            self.failures = {name: [error] * 99 for name in _CALLS}
        if error is not None:
            raise error

    def run(self) -> None:
        """Run what is in the stream."""
        while self.work:
            self.work.popleft()()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Torch's work comes behind what is in the stream."""
        self.hit("current")
        self.run()
        yield

    def synchronize(self) -> None:
        """Wait."""
        self.hit("synchronize")
        self.run()

    def close(self) -> None:
        """Nothing comes after this."""
        self.is_closed = True


@dataclass
class Queued:
    """A step in the stream."""

    gpu: StreamGpu
    rows: list[RowOutput] = field(default_factory=list)

    def result(self) -> StepResult:
        """Wait for it."""
        self.gpu.hit("result")
        self.gpu.run()
        return StepResult(self.rows, ("kernels",) * len(self.rows))


class ReferenceRunner:
    """Stands for the runner; feeds tokens back as the device does, by what the step before left."""

    def __init__(self, gpu: StreamGpu, executor: PagedReferenceExecutor) -> None:
        self.gpu = gpu
        self.executor = executor
        self.max_rows = MAX_ROWS
        self.max_seq_rows = MAX_ROWS
        self.batches: list[StepBatch] = []
        self.tokens = np.zeros(MAX_ROWS, np.int32)
        self.num_wanted = 0
        self.captured_batch_sizes: tuple[int, ...] = ()
        self.graph_bytes = 0
        self.num_graph_steps = self.num_launched_steps = 0
        self.is_closed = False

    @property
    def state(self) -> ExecutorState:
        """As the real one tells it."""
        return ExecutorState(
            NAME,
            preparation=f"capturing graphs, {self.num_wanted} left" if self.num_wanted else "",
            captured_batch_sizes=self.captured_batch_sizes,
            num_graph_steps=self.num_graph_steps,
            num_launched_steps=self.num_launched_steps,
        )

    def can_submit(self, batch: StepBatch) -> bool:
        """Whatever fits."""
        self.gpu.hit("can_submit")
        return not any(spec.full_logits for spec in batch.output_specs)

    def submit(self, batch: StepBatch) -> Queued:
        """Put a step into the stream; a failed one is in it partly."""
        assert not self.is_closed
        assert batch.num_rows <= MAX_ROWS
        self.batches.append(batch)
        self.num_wanted = 1
        self.num_launched_steps += 1
        queued = Queued(self.gpu)
        try:
            self.gpu.hit("submit")
        except Exception:  # raised again, whatever the test has injected
            self.gpu.work.append(lambda: self._spoil(batch))
            raise
        self.gpu.work.append(lambda: queued.rows.extend(self._step(batch)))
        return queued

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step."""
        return self.submit(batch).result()

    def capture_next(self) -> bool:
        """One graph is wanted at most."""
        assert not self.gpu.work, "captured with work in the stream"
        self.gpu.hit("capture")
        self.captured_batch_sizes, self.graph_bytes, self.num_wanted = (1,), 3, 0
        return False

    def close(self) -> None:
        """The stream must be idle."""
        assert not self.gpu.work
        self.is_closed = True
        self.gpu.hit("close")

    def _step(self, batch: StepBatch) -> list[RowOutput]:
        if batch.feedback is not None:
            token_ids = np.where(batch.feedback >= 0, self.tokens[batch.feedback], batch.token_ids)
            batch = replace(batch, token_ids=token_ids.astype(np.int32), feedback=None)
        rows = self.executor.run(batch).rows
        self.tokens[: len(rows)] = [-1 if row.token is None else row.token for row in rows]
        return rows

    def _spoil(self, batch: StepBatch) -> None:
        """Write anything to the slots of a step, and no others."""
        token_ids = (batch.token_ids + 5) % self.executor.info.model.config.vocab_size
        self.executor.run(replace(batch, token_ids=token_ids.astype(np.int32), feedback=None))


class Torch(PagedReferenceExecutor):
    """Stands for torch, and counts its steps."""

    def __init__(self) -> None:
        super().__init__(vocab_size=50, num_layers=1, num_heads=2, num_kv_heads=2, kv_memory_bytes=64 << 10)
        self.batches: list[StepBatch] = []
        self.error: Exception | None = None
        self.is_closed = False

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step, or fail."""
        self.batches.append(batch)
        if self.error is not None:
            raise self.error
        return super().run(batch)

    def close(self) -> None:
        """Nothing comes after this."""
        self.is_closed = True


class World:
    """An executor over a stream, with a runner that is ready to be made."""

    def __init__(self, **options: Any) -> None:
        self.gpu = StreamGpu()
        self.torch = Torch()
        self.kernels = PagedReferenceExecutor.run  # of the same pool
        self.runner: ReferenceRunner | None = None
        given = {"make_runner": self.make_runner, "memory": PLAN, **options}
        self.executor = FallbackExecutor(self.torch, device_of(self.gpu), name=NAME, **given)
        self.stepper = Stepper(self.executor)
        self.seqs = [PooledSequence(), PooledSequence()]

    def make_runner(self) -> ReferenceRunner:
        """Make the runner, over the pool that torch has."""
        self.runner = ReferenceRunner(self.gpu, cast("PagedReferenceExecutor", _Untold(self.torch)))
        return self.runner

    def made(self) -> ReferenceRunner:
        """Return the runner, which has been made."""
        assert self.runner is not None
        return self.runner

    def decode(self, *tokens: int, spec: OutputSpec = GREEDY) -> StepBatch:
        """Return a step with one row for each of the first sequences."""
        seqs = self.seqs[: len(tokens)]
        return self.stepper.batch(*(Piece(seq, [token], spec=spec) for seq, token in zip(seqs, tokens, strict=True)))

    def fed(self, *sources: int, spec: OutputSpec = GREEDY) -> StepBatch:
        """Return such a step whose tokens are those that outputs of the step before choose."""
        batch = self.decode(*(0 for _ in sources), spec=spec)
        return replace(batch, feedback=np.array(sources, np.int32))

    def start(self) -> None:
        """Bring both sequences into the pool and make the runner."""
        self.stepper.run(*(Piece(seq, list(range(3 + 20 * i, 20 + 20 * i))) for i, seq in enumerate(self.seqs)))
        if self.executor.runner is None:
            self.executor.run(self.decode(7, 8))
            assert self.executor.tend()
            del self.torch.batches[1:]
        self.executor.run(self.decode(7, 8))
        assert self.executor.state.fallback_reason == ""

    def pool(self) -> bytes:
        """Return what is in the pool."""
        return self.executor.read_blocks(np.arange(self.torch.info.num_blocks, dtype=np.int32)).tobytes()


def started(**options: Any) -> World:
    """Return a world whose sequences are in the pool and whose runner is made."""
    world = World(**options)
    world.start()
    return world


class _Untold:
    """The stand-in of torch without its count."""

    def __init__(self, executor: Torch) -> None:
        self.info = executor.info
        self._executor = executor

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step on the same pool."""
        return PagedReferenceExecutor.run(self._executor, batch)


def device_of(gpu: StreamGpu | None) -> CudaDevice:
    """Return a stream as the executor sees it."""
    return CudaDevice(cast("Gpu | None", gpu), "cpu")


def tokens_of(result: StepResult) -> list[int | None]:
    """Return the tokens of a step."""
    return [row.token for row in result.rows]
