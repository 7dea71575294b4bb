"""A warm-up on the kernels: it is answered when a Generate of such a size would run from its graph."""

from __future__ import annotations

from pathlib import Path

from ferrule_server.engine.jobs import WarmupJob, WarmupResult
from ferrule_server.executor.cuda.compose import Kernels
from tests.engine.harness import Harness
from tests.executor.cuda.fake_gpu import FakeGpu
from tests.executor.cuda.tiny_model import tiny_executor
from tests.executor.cuda.toy_runner import cubins_of, executor_over


def test_a_warm_up_is_answered_once_the_graphs_of_its_sizes_are_there() -> None:
    """Asked before the kernels are loaded, it waits for them; asked again it finds nothing to do."""
    gpu, inner = FakeGpu(simulate=True, num_sms=1), tiny_executor(num_layers=1)
    executor = executor_over(gpu, inner, Kernels(Path("bundle"), cubins_of(inner)))
    with Harness(executor, max_step_rows=24) as harness:  # type: ignore[arg-type]
        warming = harness.submit(WarmupJob("admin", (1, 2)))
        harness.prefill(1, 2, 3)
        result = warming.outcome()
        assert isinstance(result, WarmupResult)
        assert result.batch_sizes == (1, 2)
        assert executor.state.captured_batch_sizes == (1, 2)
        assert executor.state.preparation == ""
        assert harness.submit(WarmupJob("admin", (2,))).outcome() == WarmupResult((), (1, 2))
