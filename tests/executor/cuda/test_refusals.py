"""All kernels are loaded when the runner is made; if the GPU refuses one, then or later, torch runs every step."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrule_server.executor.base import OutputSpec, SampleSpec, StepBatch
from ferrule_server.executor.cuda.compose import Kernels
from ferrule_server.executor.cuda.gpu import GpuError
from ferrule_server.executor.fallback.executor import FallbackExecutor
from tests.executor.cuda.fake_gpu import FakeGpu
from tests.executor.cuda.tiny_model import tiny_executor
from tests.executor.cuda.toy_runner import cubins_of, executor_over, rows_of

ONE = rows_of([1], [4])
FOUR = rows_of([1, 2, 3, 4], [4, 5, 6, 9])
SAMPLED = rows_of([1], [4], spec=OutputSpec(sample=SampleSpec(seed=3)))
SCORED = rows_of([1], [4], spec=OutputSpec(greedy=True, entropy=True))
TOP = rows_of([1], [4], spec=OutputSpec(greedy=True, num_top_logprobs=2))

CASES = [
    pytest.param(kernel, batch, id=kernel)
    for kernel, batch in {
        "embed": ONE,
        "attention": ONE,
        "gemv": ONE,
        "head": ONE,
        "add_norm": FOUR,
        "gemm": FOUR,
        "argmax": FOUR,
        "shape_and_select": SAMPLED,
        "draw": SAMPLED,
        "log_sum_exp": SCORED,
        "gather_top_k": TOP,
    }.items()
]
"""Every kernel, with a step that needs it."""


def opened(gpu: FakeGpu, **options: bool) -> FallbackExecutor:
    """Return an executor whose kernels do nothing, after the gap in which the runner is made."""
    inner = tiny_executor(num_layers=1)
    executor = executor_over(gpu, inner, Kernels(Path("bundle"), cubins_of(inner)), **options)
    executor.run(ONE)
    executor.tend()
    return executor


def paths_of(executor: FallbackExecutor, batch: StepBatch) -> set[str]:
    """Run a step and return how its rows were computed."""
    result = executor.run(batch)
    assert len(result.rows) == len(result.paths) == len(batch.output_rows)
    return set(result.paths)


def assert_torch_serves(executor: FallbackExecutor, caplog: pytest.LogCaptureFixture) -> None:
    """Every step, for good, with the reason in the state, and in the log once."""
    for batch in (ONE, FOUR, SAMPLED):
        assert paths_of(executor, batch) == {"torch"}
        assert not executor.can_submit(batch)
    assert not executor.tend()
    state = executor.state
    assert (state.name, state.fallback_reason, state.is_torch_for_good) == ("torch", "refused on purpose", True)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["event=torch_serves reason='refused on purpose'"]


def test_every_kernel_is_loaded_when_the_runner_is_made() -> None:
    """So no step waits for one, whatever it asks for."""
    gpu = FakeGpu()
    executor = opened(gpu)
    loaded = [call.subject for call in gpu.calls("load")]
    assert len(loaded) == len(cubins_of(tiny_executor(num_layers=1)))
    gpu.log.clear()
    for batch in (ONE, FOUR, SAMPLED, SCORED, TOP):
        assert paths_of(executor, batch) == {"kernels"}
    used = {kernel for call in gpu.calls("launch") for kernel in call.kernels}
    assert used <= set(loaded)
    assert not gpu.calls("load")


@pytest.mark.parametrize(("kernel", "needing"), CASES)
@pytest.mark.parametrize("call", ["load", "prepare", "launch"])
def test_a_kernel_that_is_refused_leaves_every_step_to_torch(
    call: str, kernel: str, needing: StepBatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that met it too."""
    gpu = FakeGpu()
    if call == "load":
        gpu.fail(f"load {kernel}", GpuError("refused on purpose"))
    executor = opened(gpu)
    if call != "load":
        gpu.fail(f"{call} {kernel}", GpuError("refused on purpose"))
    assert paths_of(executor, needing) == {"torch"}
    assert_torch_serves(executor, caplog)


def test_a_replay_that_is_refused_leaves_every_step_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    """The graphs are given back."""
    gpu = FakeGpu()
    executor = opened(gpu)
    executor.run(ONE)
    while executor.tend():
        pass
    assert paths_of(executor, ONE) == {"graph"}
    gpu.fail("replay", GpuError("refused on purpose"))
    assert_torch_serves(executor, caplog)
    assert (executor.state.captured_batch_sizes, gpu.graphs) == ((), [])


def test_graphs_may_be_switched_off() -> None:
    """Then none is captured, and nothing waits for one; that is no fallback."""
    gpu = FakeGpu()
    executor = opened(gpu, has_graphs=False)
    assert paths_of(executor, ONE) == {"kernels"}
    assert not executor.tend()
    assert executor.can_submit(ONE)
    assert (gpu.calls("capture"), executor.state.preparation, executor.state.fallback_reason) == ([], "", "")


def test_a_mixed_step_says_of_each_row_how_it_was_computed() -> None:
    """In the order of the outputs."""
    executor = opened(FakeGpu())
    long = rows_of([1, *range(20), 5], [4, *range(20), 6], counts=[1, 20, 1], outputs=[0, 20, 21])
    assert executor.run(long).paths == ["kernels", "torch", "kernels"]
