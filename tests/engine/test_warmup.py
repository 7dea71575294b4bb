"""Warm-up: real shapes, nothing of anybody touched, once for each, and never long in anybody's way."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np

from ferrule_server.engine.jobs import Finish, WarmupJob, WarmupResult
from ferrule_server.errors import Draining, EngineFault, HandleLost
from ferrule_server.executor.base import NO_SLOT, NULL_BLOCK, DeviceLost, ExecutorState, StepBatch, StepResult
from ferrule_server.executor.reference import PagedReferenceExecutor
from tests.engine.deferred import DeferredExecutor
from tests.engine.harness import Harness, Pending, append
from tests.engine.streams import SteppedExecutor, generate, start
from tests.fakes import FakeExecutor, fake_next_token


def warm(harness: Harness, *batch_sizes: int) -> WarmupResult:
    """Ask for a warm-up and wait."""
    return harness.answer(WarmupResult, WarmupJob("admin", batch_sizes))


def test_by_default_decodes_of_each_power_of_two_and_one_full_prefill_are_run() -> None:
    """Up to 64, or what a step can hold."""
    with Harness(max_step_rows=40) as harness:
        result = warm(harness)
        assert [step[:2] for step in result.steps] == [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (32, 32), (1, 40)]
        assert all(step.run_ns > 0 for step in result.steps)
        assert result.batch_sizes == (1, 2, 4, 8, 16, 32)
    with Harness(FakeExecutor(max_context=1000), max_step_rows=512) as harness:
        result = warm(harness)
        assert result.steps[-2:] == (
            (64, 64, result.steps[-2].run_ns),
            (1, 512, result.steps[-1].run_ns),
        )


def test_its_rows_write_nothing_and_read_the_null_block() -> None:
    """No slot, no block of anybody; lengths within the context; rows that go through the head."""
    with Harness(FakeExecutor(max_context=30, num_blocks=3), max_step_rows=100) as harness:
        warm(harness)
        for batch in harness.executor.batches:
            assert set(batch.slot_mapping.tolist()) == {NO_SLOT}
            assert set(batch.block_tables.ravel().tolist()) == {NULL_BLOCK}
            assert batch.block_tables.shape == (batch.num_seqs, -(-int(batch.kv_lens.max()) // 4))
            assert int(batch.kv_lens.max()) <= 30
            assert len(batch.output_rows) == batch.num_seqs
            assert all(array.dtype == np.int32 for array in (batch.token_ids, batch.kv_lens, batch.output_rows))
        assert [batch.kv_lens.tolist() for batch in harness.executor.batches][-1] == [30, 30, 30, 10]
        assert harness.executor.copied_blocks == []
        assert harness.engine.counters.steps == 0
        assert (len(harness.store.registry), harness.store.pool.num_free) == (0, 2)


def test_what_is_warm_is_left_alone() -> None:
    """Asked again nothing is run; asked for more, only that."""
    with Harness(max_step_rows=40) as harness:
        result = warm(harness, 4, 1, 4)
        assert [step[:2] for step in result.steps] == [(1, 1), (4, 4), (1, 40)]
        assert warm(harness, 4, 1) == WarmupResult((), (1, 4))
        result = warm(harness, 3, 4)
        assert ([step[:2] for step in result.steps], result.batch_sizes) == ([(3, 3)], (1, 3, 4))


def test_two_at_once_share_the_work() -> None:
    """The second finds warm what the first has run."""
    with Harness(max_step_rows=40) as harness:
        sinks = harness.submit_all(WarmupJob("admin", (1, 2)), WarmupJob("admin", (2, 3)))
        results = [sink.outcome() for sink in sinks]
        assert [[step.num_rows for step in result.steps] for result in results] == [[1, 2, 40], [3]]  # type: ignore[attr-defined]


def test_who_is_served_waits_for_one_warm_step_at_most() -> None:
    """Between two warm steps every client has its turn; their tokens are what they were."""
    executor = SteppedExecutor()
    with Harness(executor, max_step_rows=40) as harness:
        stream = start(harness, generate(None, 1, 2, max_tokens=5))
        executor.arrive()
        warming = harness.submit(WarmupJob("admin"))
        pending = harness.submit(append(None, 7, 8))
        executor.run_freely()
        assert isinstance(warming.outcome(), WarmupResult)
        assert pending.result().rows[0].token == fake_next_token([7, 8], 32)
        assert stream.branch().last.finish is Finish.MAX_TOKENS
        is_warm = [not batch.block_tables.any() for batch in executor.batches]
        assert sum(is_warm) == 7
        served = len(is_warm) - is_warm[::-1].index(False)
        assert not any(one and next_one for one, next_one in pairwise(is_warm[:served]))
        assert any(is_warm[:served])


def test_a_warm_step_that_fails_ends_the_warm_up_alone() -> None:
    """The others are served on; asked again it is tried again."""
    with Harness(max_step_rows=40) as harness:
        harness.executor.errors[2] = RuntimeError("told to fail")
        harness.answer(EngineFault, WarmupJob("admin", (1, 2)))
        harness.prefill(1)
        result = warm(harness, 1, 2)
        assert [step.num_rows for step in result.steps] == [2, 40]


def test_a_device_lost_while_warming_is_lost_for_everybody() -> None:
    """As in any step."""
    executor = SteppedExecutor()
    with Harness(executor, max_step_rows=40) as harness:
        executor.errors[2] = DeviceLost()
        stream = start(harness, generate(None, 1, 2, max_tokens=5))
        executor.arrive()
        warming = harness.submit(WarmupJob("admin"))
        executor.run_freely()
        assert isinstance(warming.outcome(), HandleLost)
        assert isinstance(stream.branch().last.error, HandleLost)
        assert harness.num_failures == 1


def test_closing_ends_it_with_draining() -> None:
    """After the step that runs."""
    executor = SteppedExecutor()
    with Harness(executor, max_step_rows=40) as harness:
        sinks: list[Pending] = harness.submit_all(WarmupJob("admin"), WarmupJob("admin"))
        executor.arrive()
        closing = threading.Thread(target=harness.engine.close)
        closing.start()
        while len(harness.engine._inbox) == 0:
            time.sleep(0.001)
        executor.run_freely()
        closing.join()
        assert [type(sink.outcome()) for sink in sinks] == [Draining, Draining]


def test_the_paged_reference_can_be_warmed() -> None:
    """Its pool is what it was: a prompt gives the same afterwards."""
    with Harness(PagedReferenceExecutor(kv_memory_bytes=1 << 20)) as harness:  # type: ignore[arg-type]
        before = harness.prefill(1, 2, 3).rows[0].token
        result = warm(harness)
        assert result.batch_sizes[-1] == 64
        assert harness.prefill(1, 2, 3).rows[0].token == before


class PreparingExecutor(DeferredExecutor):
    """Decodes in torch until its kernels are there, then kernel by kernel, then from graphs, captured by ``tend``.

    Attributes:
        are_built: The kernels are there; without, ``preparation`` says that they are being compiled.
        reason: Why torch serves for good.
        ways: How each decode ran, with its rows.
        captured: Rows of the graphs that exist.
    """

    def __init__(self) -> None:
        super().__init__(FakeExecutor())
        self.are_built = self._is_open = False
        self.reason = ""
        self.ways: list[tuple[str, int]] = []
        self._launched: list[int] = []
        self.captured: set[int] = set()

    @property
    def state(self) -> ExecutorState:
        """What it is doing."""
        preparation = "" if self.are_built or self.reason else "compiling kernels, 1 of 42"
        if self._launched and not self.reason:
            preparation = f"capturing graphs, {len(self._launched)} left"
        return ExecutorState("torch" if self.reason else "numba-cuda", preparation, self.reason)

    def can_submit(self, batch: StepBatch) -> bool:
        """Only from a graph."""
        return not self.reason and batch.num_rows in self.captured

    def run(self, batch: StepBatch) -> StepResult:
        """Note the way of a decode."""
        if batch.num_rows == batch.num_seqs:
            way = "torch" if self.reason or not self._is_open else "launched"
            way = "graph" if self.can_submit(batch) else way
            self.ways.append((way, batch.num_rows))
            if way == "launched" and batch.num_rows not in self._launched:
                self._launched.append(batch.num_rows)
        return super().run(batch)

    def tend(self) -> bool:
        """Load the kernels, or capture a graph."""
        super().tend()
        if self._launched:
            self.captured.add(self._launched.pop())
        self._is_open = self._is_open or self.are_built
        return bool(self._launched)


def test_a_warm_up_waits_for_kernels_that_are_being_compiled() -> None:
    """What torch has run is run again on the kernels, and answered when its graphs are there; others are served."""
    executor = PreparingExecutor()
    with Harness(executor, max_step_rows=40) as harness:  # type: ignore[arg-type]
        warming = harness.submit(WarmupJob("admin", (1, 2)))
        assert harness.prefill(1, 2, 3).rows[0].token == fake_next_token([1, 2, 3], 32)
        assert not warming.is_done
        executor.are_built = True
        result = warming.outcome()
        assert isinstance(result, WarmupResult)
        assert result.batch_sizes == (1, 2)
        assert executor.captured == {1, 2}
        assert executor.ways[0] == ("torch", 1)
        assert executor.ways[-2:] == [("launched", 1), ("launched", 2)]
        assert warm(harness, 2, 1) == WarmupResult((), (1, 2))
        assert executor.misuse == []


def test_what_is_waited_for_costs_no_processor_time() -> None:
    """The idle engine looks now and then."""
    executor = PreparingExecutor()
    with Harness(executor, max_step_rows=40) as harness:  # type: ignore[arg-type]
        warming = harness.submit(WarmupJob("admin", (1,)))
        time.sleep(0.3)
        assert executor.num_calls["tend"] < 12
        executor.reason = "told to fail"
        assert isinstance(warming.outcome(), WarmupResult)
        assert executor.ways == [("torch", 1)]


def test_what_was_warm_on_kernels_is_warmed_again_for_torch() -> None:
    """Once they have been given up."""
    executor = PreparingExecutor()
    executor.are_built = True
    with Harness(executor, max_step_rows=40) as harness:  # type: ignore[arg-type]
        warm(harness, 1)
        executor.reason = "told to fail"
        result = warm(harness, 1)
        assert [step.num_rows for step in result.steps] == [1, 40]


def test_a_size_that_never_gets_a_graph_is_not_waited_for() -> None:
    """After a few runs it is as warm as it will be."""
    executor = DeferredExecutor(FakeExecutor())
    executor.refuses = True
    with Harness(executor, max_step_rows=40) as harness:  # type: ignore[arg-type]
        result = warm(harness, 1, 2)
        assert [step.num_rows for step in result.steps] == [1, 1, 1, 1, 2, 2, 2, 2, 40]
