"""What the host needs for a step of Generate when the device needs nothing: the engine, the wire, the GPU runner.

Every figure is CPU time of one thread, so that what else the machine does counts little, and medians over rounds:

    engine   the engine's rounds over an executor that costs nothing, its own time left out, with two steps in flight as
             on a GPU and with one; for sequences of one Generate each and for branches of one
    frame    a Generate frame to a message and its bytes, one token for each branch
    runner   the steps of the GPU's decode runner over a GPU that does nothing at all

    python benchmarks/bench_engine_host.py [--rounds 7] [--steps 100] [--only engine frame runner]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from in_process import PRINCIPAL  # type: ignore[import-not-found]  # beside this script, not a package

if TYPE_CHECKING:
    from torch import Tensor

    from ferrule_server.engine.engine import Engine
    from ferrule_server.engine.jobs import Job, Outcome
    from ferrule_server.executor.base import ExecutorInfo, ExecutorState, OutputSpec, StepBatch, StepResult

SIZES = (1, 8, 32, 128)
BLOCK_SIZE = 16
PROMPT_TOKENS = 40
_VOCAB = 1000
_now = time.thread_time_ns


def main() -> None:
    """Measure, print a table and one JSON line."""
    args = _parse_arguments()
    parts = {"engine": _engine_figures, "frame": _frame_figures, "runner": _runner_figures}
    measures = {name: part for key in args.only for name, part in parts[key](args.steps).items()}
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for round_ in range(args.rounds + 1):
        for name, measure in measures.items():
            samples[name] += [measure()] if round_ else []  # the first round warms up
    report = {**_environment(args), "figures": {name: _summary(values) for name, values in samples.items()}}
    _print_table(report)
    print(json.dumps(report), flush=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--only", nargs="*", choices=("engine", "frame", "runner"), default=["engine", "frame", "runner"]
    )
    return parser.parse_args()


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# ---- engine ---------------------------------------------------------------------------------------------------------


class FreeStep:
    """A submitted step: what it gives was known at once."""

    def __init__(self, outputs: StepResult) -> None:
        self._outputs = outputs

    def result(self) -> StepResult:
        """Return it."""
        return self._outputs


class FreeExecutor:
    """A device that needs no time; the token behind position p is p + 1 modulo the vocabulary.

    Attributes:
        spent_ns: What it took all the same, to be left out.
    """

    def __init__(self) -> None:
        self.info = _info()
        self.spent_ns = 0

    def run(self, batch: StepBatch) -> StepResult:
        """Return rows of numbers."""
        begun = _now()
        outputs = _outputs(batch)
        self.spent_ns += _now() - begun
        return outputs

    def copy_blocks(self, block_pairs: object) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        """Nothing is held."""


class FreePipeline(FreeExecutor):
    """The same with two steps in flight."""

    @property
    def state(self) -> ExecutorState:
        """What it is doing."""
        from ferrule_server.executor.base import ExecutorState

        return ExecutorState("numba-cuda")

    def can_submit(self, batch: StepBatch) -> bool:
        """Whatever has one row for each sequence."""
        return batch.num_rows == batch.num_seqs == len(batch.output_rows)

    def submit(self, batch: StepBatch) -> FreeStep:
        """Take a step."""
        begun = _now()
        step = FreeStep(_outputs(batch))
        self.spent_ns += _now() - begun
        return step

    def tend(self) -> bool:
        """Nothing is to be prepared."""
        return False

    def read_blocks(self, block_ids: object) -> None:
        """Nothing is stored."""

    copy_slots = write_blocks = read_blocks


def _outputs(batch: StepBatch) -> StepResult:
    from ferrule_server.executor.base import RowOutput, StepResult

    rows = batch.positions[batch.output_rows].tolist()
    return StepResult([RowOutput(position + 1, (position + 1) % _VOCAB) for position in rows])


def _info() -> ExecutorInfo:
    from ferrule_server.executor.base import ExecutorInfo, ModelDescription
    from ferrule_server.model.config import LayerKind, ModelConfig

    config = ModelConfig("Free", _VOCAB, 8, 1, 1 << 16, (LayerKind(head_dim=8, num_kv_heads=1),))
    model = ModelDescription(config, "free", 1, config.max_positions, "float32", bytes(32))
    return ExecutorInfo("free", "cpu", "float32", BLOCK_SIZE, 1 << 15, 64, model)


class Reader:
    """A sink that counts frames and keeps what has to be released."""

    def __init__(self) -> None:
        self.num_over = 0
        self.error: Exception | None = None

    def deliver(self, job: Job[object], outcome: Outcome) -> None:  # noqa: ARG002  (as a sink is called)
        """Take a frame."""
        from ferrule_server.engine.jobs import GenerateFrame

        if isinstance(outcome, GenerateFrame):
            self.num_over += outcome.is_last
        else:
            self.error = outcome if isinstance(outcome, Exception) else TypeError(f"{outcome!r}")

    def flush(self) -> None:
        """Nothing waits."""


def _engine_figures(num_steps: int) -> dict[str, Callable[[], float]]:
    """Return what measures us a step: of sequences, of branches, and with one step in flight."""
    figures: dict[str, Callable[[], float]] = {}
    for size in SIZES:
        for name, is_branching, is_piped in (
            ("sequences", False, True),
            ("branches", True, True),
            ("sequences, one in flight", False, False),
        ):
            figures[f"engine: {size} {name}"] = lambda n=size, b=is_branching, p=is_piped: _measure_engine(  # type: ignore[misc]
                n, num_steps, is_branching=b, executor=FreePipeline() if p else FreeExecutor()
            )
    return figures


def _measure_engine(size: int, num_steps: int, *, is_branching: bool, executor: FreeExecutor) -> float:
    """Return us of the engine in a step in which every sequence has a row."""
    engine, reader = _engine(executor), Reader()
    num_jobs, num_branches = (1, size) if is_branching else (size, 1)
    engine.submit([(_generate(index, num_branches), reader) for index in range(num_jobs)])
    for _ in range(10):  # the prompts, the forks, and the first steps
        engine._round()  # noqa: SLF001  (without its thread)
    if reader.error is not None:
        raise reader.error
    steps, begun, spent = engine.counters.steps, _now(), executor.spent_ns
    for _ in range(num_steps):
        engine._round()  # noqa: SLF001  (without its thread)
    elapsed = _now() - begun - (executor.spent_ns - spent)
    if engine.counters.steps - steps != num_steps or engine.counters.last_step_seqs != size or reader.num_over:
        raise RuntimeError("the steps were not those to be measured")
    return elapsed * 1e-3 / num_steps


def _engine(executor: Any) -> Engine:
    from ferrule_server.engine.assembly.assemble import Setup
    from ferrule_server.engine.engine import Engine
    from ferrule_server.engine.settings import EngineSettings
    from ferrule_server.kv.block_pool import BlockPool
    from ferrule_server.kv.sequence_store import SequenceStore

    info = executor.info
    store = SequenceStore(
        BlockPool(info.num_blocks, info.block_size),
        instance="benchmark",
        epoch="1",
        max_context=info.model.max_context,
        max_ttl_s=3600.0,
    )
    return Engine(Setup(executor, store, EngineSettings(max_step_rows=1 << 14), lambda call: call()))


def _generate(index: int, num_branches: int) -> Job[object]:
    from ferrule_server.engine.jobs import GenerateJob, OutputRequest, StopRules, Window
    from ferrule_server.executor.base import OutputSpec

    prompt = tuple((index + each) % _VOCAB for each in range(PROMPT_TOKENS + index % BLOCK_SIZE))
    rules = StopRules(max_tokens=1 << 20, eos_ids=frozenset({_VOCAB}))
    output = OutputRequest(OutputSpec(greedy=True))
    return GenerateJob(PRINCIPAL, prompt, None, output, rules, Window(1 << 40), num_branches=num_branches)


# ---- frame ----------------------------------------------------------------------------------------------------------


def _frame_figures(num_steps: int) -> dict[str, Callable[[], float]]:
    return {f"frame: {size} branches": lambda n=size: _measure_frames(n, num_steps) for size in SIZES}  # type: ignore[misc]


def _measure_frames(size: int, num_frames: int) -> float:
    """Return us of a frame from the engine to bytes."""
    from ferrule_server.api.requests.policy import OutputPlan
    from ferrule_server.api.rpc.refusals import Refusals
    from ferrule_server.api.streams.replies import GenerateReplies
    from ferrule_server.engine.jobs import BranchFrame, GenerateFrame, OutputRequest, StepTiming
    from ferrule_server.executor.base import OutputSpec, RowOutput
    from ferrule_server.kv.handle import Handle

    plan = OutputPlan(OutputRequest(OutputSpec(greedy=True)), 0, 64)
    replies = GenerateReplies(plan, "request", 1 << 22, Refusals("Generate", "somebody"))
    handles = [Handle(f"benchmark.1.{index:022d}", 1000, bytes(16)) for index in range(size)]
    frames = [
        GenerateFrame(
            tuple(BranchFrame(i, handle, (RowOutput(1000, 70 + i),)) for i, handle in enumerate(handles)),
            StepTiming(1, 2, 3),
        )
        for _ in range(num_frames)
    ]
    begun = _now()
    for frame in frames:
        replies.add(frame)
        while (reply := replies.next()) is not None:
            reply.message.SerializeToString()
    return (_now() - begun) * 1e-3 / num_frames


# ---- runner ---------------------------------------------------------------------------------------------------------


class _Nothing:
    """A kernel, a launch, a graph and an event, which do nothing."""

    def __init__(self, spec: object = None) -> None:
        self.spec = spec

    def prepare(self, *_: object, **__: object) -> _Nothing:
        """Return a launch."""
        return self

    def wait(self) -> None:
        """Nothing is awaited."""

    def close(self) -> None:
        """Nothing is held."""


_NOTHING = _Nothing()


class NullGpu:
    """Implements ``executor.cuda.gpu.Gpu`` with memory of the host; nothing is copied and nothing runs."""

    def __init__(self) -> None:
        import torch

        from ferrule_server.executor.cuda.driver import GpuInfo

        self.info = GpuInfo("nothing", (9, 0), (13, 0), 132, 228 << 10, 227 << 10)
        self.torch_device = torch.device("cpu")

    def free_bytes(self) -> int:
        """Return what is left: all of it."""
        return 80 << 30

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> Tensor:  # noqa: ARG002
        """Return zeros."""
        import torch

        return torch.zeros(shape, dtype=dtype)

    def allocate_pinned(self, name: str, num_bytes: int) -> Tensor:  # noqa: ARG002
        """Return zeros."""
        import torch

        return torch.zeros(num_bytes, dtype=torch.uint8)

    def adopt(self, name: str, tensor: Tensor, *, is_mutable: bool) -> None:
        """Nothing is kept."""

    def address(self, tensor: Tensor) -> int:
        """Return where it is on the host."""
        return tensor.data_ptr()

    def load(self, spec: object, cubin: object) -> _Nothing:  # noqa: ARG002
        """Return a kernel."""
        return _Nothing(spec)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Change nothing."""
        yield

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Nothing is copied; sizes are looked at, and where both lie."""
        assert target.nbytes == source.nbytes and target.data_ptr() and source.data_ptr()  # noqa: PT018

    download = upload

    def record(self) -> _Nothing:
        """Return an event."""
        return _NOTHING

    def launch(self, operations: Sequence[object]) -> None:
        """Nothing runs."""

    def capture(self, operations: Sequence[object]) -> _Nothing:  # noqa: ARG002
        """Return a graph."""
        return _NOTHING

    def replay(self, graph: _Nothing) -> None:
        """Nothing runs."""

    def synchronize(self) -> None:
        """Nothing is awaited."""

    def close(self) -> None:
        """Nothing is held."""


def _runner_figures(num_steps: int) -> dict[str, Callable[[], float]]:
    """Return what measures us a step of the runner, two in flight: greedy, and drawn."""
    from ferrule_server.executor.base import OutputSpec, SampleSpec

    runner = _runner()
    specs: dict[str, Callable[[int], OutputSpec]] = {
        "greedy": lambda _: OutputSpec(greedy=True),
        "drawn": lambda row: OutputSpec(sample=SampleSpec(temperature=0.8, top_p=0.95, seed=row)),
    }
    figures: dict[str, Callable[[], float]] = {}
    for name, spec in specs.items():
        for size in SIZES:
            specs_of_rows = [spec(row) for row in range(size)]  # each its own, the same from step to step
            batches = [_step(size, 500 + number, tuple(specs_of_rows)) for number in range(num_steps)]
            runner.run(batches[0])
            while runner.capture_next():
                pass
            figures[f"runner: {size} {name}"] = lambda b=batches: _measure_runner(runner, b)  # type: ignore[misc]
    return figures


def _runner() -> Any:
    from ferrule_server.executor.cuda.buffers import Limits
    from ferrule_server.executor.cuda.choice_launches import ChoiceSpecs
    from ferrule_server.executor.cuda.kernel_choice import shape_of, specs_needed
    from ferrule_server.executor.cuda.runner import CudaDecodeRunner
    from ferrule_server.executor.torch import TorchExecutor
    from ferrule_server.kernels.cuda.catalog import merged
    from ferrule_server.kernels.cuda.spec import Cubin
    from ferrule_server.model.weights import load_model

    gpu = NullGpu()
    model = load_model(Path(__file__).parents[1] / "server" / "ferrule_server" / "demo_model", dtype="bfloat16")
    executor = TorchExecutor(model, kv_memory_bytes=1 << 26, max_context=2048, is_plain=True)
    shape = shape_of(executor.info.model.config)
    specs = merged([*specs_needed(shape, is_deterministic=False), *ChoiceSpecs.of(shape)])
    cubin = Cubin("kernel", b"")
    return CudaDecodeRunner(
        dict.fromkeys(specs, cubin),
        gpu=gpu,  # type: ignore[arg-type]
        torch_executor=executor,
        limits=Limits(max_blocks=128),
    )


def _step(size: int, position: int, specs: tuple[OutputSpec, ...]) -> StepBatch:
    """Return a decode step of sequences of about one length, each in blocks of its own."""
    from ferrule_server.executor.base import StepBatch

    rows = np.arange(size, dtype=np.int32)
    positions = (position + 7 * rows % 64).astype(np.int32)
    width = int(positions.max()) // BLOCK_SIZE + 1
    tables = (1 + rows[:, None] * width + np.arange(width)).astype(np.int32)
    return StepBatch(
        token_ids=np.zeros(size, np.int32),
        positions=positions,
        slot_mapping=tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        cu_seqlens_q=np.arange(size + 1, dtype=np.int32),
        kv_lens=positions + 1,
        block_tables=tables,
        output_rows=rows,
        output_specs=specs,
        feedback=rows,
    )


def _measure_runner(runner: Any, batches: Sequence[StepBatch]) -> float:
    """Return us of a step from its arrays to its rows."""
    pending: deque[Any] = deque()
    begun = _now()
    for batch in batches:
        if not runner.can_submit(batch):
            raise RuntimeError("a step cannot be submitted")
        pending.append(runner.submit(batch))
        if len(pending) == 2:
            pending.popleft().result()
    pending.popleft().result()
    return (_now() - begun) * 1e-3 / len(batches)


# ---- report ---------------------------------------------------------------------------------------------------------


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "benchmark": "engine_host",
        "commit": git.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "rounds": args.rounds,
        "steps": args.steps,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _print_table(report: dict[str, Any]) -> None:
    about = f"commit {report['commit']}, Python {report['python']}, load {report['load']}"
    print(f"{about}: CPU time of the host, us a step")
    print(f"  {'':<40} {'a step':>28} {'a row':>8}")
    for name, figure in report["figures"].items():
        size = int(name.split(": ")[1].split()[0])
        cell = f"{figure['median']:.1f} ({figure['min']:.1f}-{figure['max']:.1f})"
        print(f"  {name:<40} {cell:>28} {figure['median'] / size:>8.2f}")


if __name__ == "__main__":
    main()
