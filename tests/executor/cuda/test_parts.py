"""A kernel that is refused takes out what its part serves: the table fits the launches, and the other parts go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ferrule_server.executor.base import DeviceLost, OutputSpec, SampleSpec, StepBatch
from ferrule_server.executor.cuda.choices import OutputKind
from ferrule_server.executor.cuda.compose import Kernels
from ferrule_server.executor.cuda.gpu import GpuError, GpuLost
from ferrule_server.executor.cuda.graphs import GRAPHS, GraphKey
from ferrule_server.executor.cuda.kernel_choice import shape_of, specs_needed
from ferrule_server.executor.cuda.parts import ESSENTIAL, PARTS, WorkingParts, part_of
from ferrule_server.executor.fallback.executor import FallbackExecutor
from tests.executor.cuda.fake_gpu import FakeGpu
from tests.executor.cuda.tiny_model import KINDS, tiny_config, tiny_executor
from tests.executor.cuda.toy_runner import GREEDY, Toy, cubins_of, executor_over, rows_of

# ---- the table ------------------------------------------------------------------------------------------------------


def keys() -> Iterator[GraphKey]:
    """Yield keys of every sort."""
    sizes, flags = (1, 2, 4, 64, 80), (False, True)
    kinds = [kind for kind in OutputKind if kind is not OutputKind.TORCH]
    for num_rows, kind, has_outputs, keeps_rows in product(sizes, kinds, flags, flags):
        yield GraphKey(num_rows, kind, has_outputs, keeps_rows)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_is_of_a_part(kind: str) -> None:
    """Of one, or there is no path without it."""
    names = {spec.kernel.__name__ for spec in specs_needed(shape_of(tiny_config(kind)), is_deterministic=False)}
    assert {name for name in names if not part_of(name)} == ESSENTIAL
    listed = [kernel for part in PARTS for kernel in part.kernels]
    assert len(listed) == len(set(listed))
    assert set(listed) - names == {GRAPHS}


@pytest.mark.parametrize("kind", ["qwen3", "wide group"])
def test_steps_launch_the_kernels_of_the_parts_that_serve_them(kind: str) -> None:
    """So that a step whose parts work never meets a kernel of one that does not."""
    toy = Toy(max_rows=80, kind=kind)
    shape = shape_of(toy.executor.info.model.config)
    for key in keys():
        launched = {spec.kernel.__name__ for spec in toy.specs_of(key)}
        serving = {part.name for part in PARTS if part.serves is not None and part.serves(key, shape)}
        assert {part_of(name) for name in launched - ESSENTIAL} <= serving, key


def test_a_choice_that_has_failed_is_made_by_torch_and_a_step_that_has_failed_is_not_run() -> None:
    """In this order: what torch may choose from is still computed by the kernels."""
    parts = WorkingParts(shape_of(tiny_config()), {"log-probabilities": "no"})
    key = GraphKey(1, OutputKind.TOP)
    assert not parts.serve(key)
    assert parts.largest_kind(key) is OutputKind.SAMPLE
    assert WorkingParts(shape_of(tiny_config()), {}).largest_kind(key) is OutputKind.TOP
    before = parts.failures
    parts.drop(part_of("draw"), "no")
    assert parts.largest_kind(key) is OutputKind.GREEDY
    assert parts.serve(replace(key, kind=OutputKind.GREEDY))
    parts.drop(part_of("gemv"), "no")
    assert not parts.serve(replace(key, kind=parts.largest_kind(key)))
    assert before == {"log-probabilities": "no"}


# ---- each part, taken out -------------------------------------------------------------------------------------------

ONE = rows_of([1], [4])
FOUR = rows_of([1, 2, 3, 4], [4, 5, 6, 9])


def asking(**wanted: object) -> StepBatch:
    """Return a decode of one row that asks for something."""
    return rows_of([1], [4], spec=OutputSpec(**wanted))  # type: ignore[arg-type]


SAMPLED = asking(sample=SampleSpec(seed=3))
SCORED = asking(greedy=True, entropy=True)
TOP = asking(greedy=True, num_top_logprobs=2)

CASES = [
    # kernel, step that needs it, how that runs without it, step that does not need it
    pytest.param("gemv", ONE, "torch", FOUR, id="gemv"),
    pytest.param("head", ONE, "torch", FOUR, id="head"),
    pytest.param("gemm", FOUR, "torch", ONE, id="gemm"),
    pytest.param("shape_and_select", SAMPLED, "kernels+torch", ONE, id="shape_and_select"),
    pytest.param("draw", SAMPLED, "kernels+torch", ONE, id="draw"),
    pytest.param("log_sum_exp", SCORED, "kernels+torch", SAMPLED, id="log_sum_exp"),
    pytest.param("gather_top_k", TOP, "kernels+torch", SCORED, id="gather_top_k"),
]


def opened(refused: Iterable[str] = (), **options: bool) -> tuple[FallbackExecutor, FakeGpu]:
    """Return an executor whose kernels do nothing, opened; the bundle lacks some."""
    gpu, inner = FakeGpu(), tiny_executor(num_layers=1)
    cubins = {spec: cubin for spec, cubin in cubins_of(inner).items() if spec.kernel.__name__ not in refused}
    kernels = Kernels(Path("bundle"), cubins, {part_of(kernel): "refused on purpose" for kernel in refused})
    executor = executor_over(gpu, inner, kernels, **options)
    executor.run(ONE)
    assert executor.tend() or executor.runner is not None
    return executor, gpu


def paths_of(executor: FallbackExecutor, batch: StepBatch) -> set[str]:
    """Run a step and return how its rows were computed."""
    result = executor.run(batch)
    assert len(result.rows) == len(result.paths) == len(batch.output_rows)
    return set(result.paths)


@pytest.mark.parametrize("call", ["load", "prepare", "launch"])
@pytest.mark.parametrize(("kernel", "needing", "path", "other"), CASES)
def test_a_kernel_that_is_refused_takes_out_its_part(
    call: str, kernel: str, needing: StepBatch, path: str, *, other: StepBatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps run another way from the one on that met it; one warning, and the reason in the state."""
    executor, gpu = opened()
    gpu.fail(f"{call} {kernel}", GpuError("refused on purpose"))
    for _ in range(2):
        assert paths_of(executor, needing) == {path}
        assert paths_of(executor, other) == {"kernels"}
    assert_left(executor, kernel)
    while executor.tend():
        pass
    assert executor.can_submit(other)
    assert not executor.can_submit(needing)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"event=part_falls_back reason='{part_of(kernel)}: refused on purpose'"]


@pytest.mark.parametrize(("kernel", "needing", "path", "other"), CASES)
def test_a_kernel_that_no_bundle_has_takes_out_its_part(
    kernel: str, needing: StepBatch, path: str, other: StepBatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the start."""
    executor, _ = opened([kernel])
    assert paths_of(executor, needing) == {path}
    assert paths_of(executor, other) == {"kernels"}
    assert_left(executor, kernel)
    assert "event=part_falls_back" in caplog.text


def assert_left(executor: FallbackExecutor, *kernels: str) -> None:
    """The kernels serve, and the state says which parts are left out."""
    state = executor.state
    reason = "; ".join(f"{part_of(kernel)}: refused on purpose" for kernel in kernels)
    assert (state.name, state.fallback_reason, state.is_torch_for_good) == ("numba-cuda", reason, False)


def test_parts_fail_one_after_the_other() -> None:
    """The state tells of all."""
    executor, gpu = opened()
    gpu.fail("launch draw", GpuError("refused on purpose"))
    assert paths_of(executor, SAMPLED) == {"kernels+torch"}
    gpu.fail("launch gemv", GpuError("refused on purpose"))
    assert paths_of(executor, SAMPLED) == {"torch"}
    assert paths_of(executor, FOUR) == {"kernels"}
    assert_left(executor, "draw", "gemv")


def test_a_choice_that_has_failed_costs_only_the_rows_that_need_it() -> None:
    """The kernels still choose for their neighbours, and torch from the same logits."""
    executor, gpu = opened()
    gpu.fail("launch log_sum_exp", GpuError("refused on purpose"))
    specs = (OutputSpec(greedy=True), OutputSpec(entropy=True), OutputSpec(sample=SampleSpec(seed=3)))
    mixed = replace(rows_of([1, 2, 3], [4, 5, 6]), output_specs=specs)
    for _ in range(2):
        assert list(executor.run(mixed).paths) == ["kernels", "kernels+torch", "kernels"]
    assert_left(executor, "log_sum_exp")


def test_copies_that_are_refused_are_left_to_torch() -> None:
    """For good, and nothing else is."""
    executor, gpu = opened()
    pairs = np.array([[1, 2]], np.int32)
    gpu.fail("launch copy_blocks", GpuError("refused on purpose"))
    for _ in range(2):
        executor.copy_blocks(pairs)
    assert [call.kernels for call in gpu.calls("launch")].count(("copy_blocks",)) == 1
    assert paths_of(executor, ONE) == {"kernels"}
    assert_left(executor, "copy_blocks")


def test_graphs_that_cannot_be_replayed_are_done_without() -> None:
    """Steps are launched, the one that met it too, and none is captured again."""
    executor, gpu = opened()
    executor.run(ONE)
    while executor.tend():
        pass
    assert paths_of(executor, ONE) == {"graph"}
    gpu.fail("replay", GpuError("refused on purpose"))
    assert paths_of(executor, ONE) == {"kernels"}
    assert_left(executor, GRAPHS)
    assert not executor.tend()
    assert executor.can_submit(ONE)
    assert (executor.state.captured_batch_sizes, gpu.graphs) == ((), [])


def test_graphs_may_be_switched_off() -> None:
    """Then none is captured, and nothing waits for one; that is no fallback."""
    executor, gpu = opened(has_graphs=False)
    assert paths_of(executor, ONE) == {"kernels"}
    assert not executor.tend()
    assert executor.can_submit(ONE)
    assert (gpu.calls("capture"), executor.state.preparation, executor.state.fallback_reason) == ([], "", "")


@pytest.mark.parametrize("kernel", sorted(ESSENTIAL))
def test_without_an_essential_kernel_torch_serves(kernel: str) -> None:
    """There is nothing left that the kernels could run."""
    executor, gpu = opened()
    gpu.fail(f"launch {kernel}", GpuError("refused on purpose"))
    assert paths_of(executor, FOUR) == {"torch"}
    assert executor.runner is None
    assert executor.state.is_torch_for_good


def test_a_lost_device_is_not_a_lost_part() -> None:
    """Whatever kernel was launched when it showed."""
    executor, gpu = opened()
    gpu.fail("launch draw", GpuLost("gone"))
    with pytest.raises(DeviceLost, match="gone"):
        executor.run(SAMPLED)


def test_a_refusal_that_is_the_first_sign_of_a_lost_device_loses_it() -> None:
    """The stream is synchronised before anything runs another way."""
    executor, gpu = opened()
    gpu.fail("launch draw", GpuError("refused on purpose"))
    gpu.fail("synchronize", GpuLost("gone"))
    with pytest.raises(DeviceLost, match="gone"):
        executor.run(SAMPLED)


def test_a_mixed_step_says_of_each_row_how_it_was_computed() -> None:
    """In the order of the outputs."""
    executor, gpu = opened()
    gpu.fail("launch gemm", GpuError("refused on purpose"))
    executor.run(FOUR)
    long = rows_of([1, *range(20), 5], [4, *range(20), 6], counts=[1, 20, 1], outputs=[0, 20, 21])
    assert executor.run(long).paths == ["kernels", "torch", "kernels"]
    assert GREEDY in long.output_specs
