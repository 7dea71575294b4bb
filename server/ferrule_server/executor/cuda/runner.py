"""Steps on the kernels: one upload, one graph, one download each, and two of them in flight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ferrule_server.executor.base import (
    ExecutorState,
    OutputSpec,
    RowOutput,
    StepBatch,
    StepResult,
)
from ferrule_server.executor.cuda.buckets import bucket_for
from ferrule_server.executor.cuda.buffers import DecodeBuffers, Limits
from ferrule_server.executor.cuda.chain import StepChain
from ferrule_server.executor.cuda.choice_inputs import DrawMemo, fill_choices
from ferrule_server.executor.cuda.choice_launches import ChoiceSpecs, choice_operations
from ferrule_server.executor.cuda.choices import (
    Division,
    are_same,
    divide,
    read_choices,
    with_outputs,
)
from ferrule_server.executor.cuda.gpu import Gpu, Operation
from ferrule_server.executor.cuda.graphs import GraphKey, GraphStore
from ferrule_server.executor.cuda.inputs import fill_inputs
from ferrule_server.executor.cuda.kernel_choice import MAX_GEMM_ROWS, attention_grid, shape_of
from ferrule_server.executor.cuda.kernel_set import KernelSet, Trigger
from ferrule_server.executor.cuda.layout import Array
from ferrule_server.executor.cuda.linears import StepParts
from ferrule_server.executor.cuda.row_copies import RowCopies
from ferrule_server.executor.cuda.staging import Download, DownloadRing, UploadRing
from ferrule_server.executor.cuda.weights import adopt_weights
from ferrule_server.executor.sampling.device_outputs import DeviceOutputs, rows_of
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec
from ferrule_server.kernels.cuda.work_list import MAX_NEW

NAME = "numba-cuda"
"""Name of the executor if kernels run or are to run."""

_GRAPH_BYTES = 1 << 30
_TILE_ROWS = 32
"""Output rows that torch selects from at a time: bounds what it allocates."""


class CudaDecodeRunner:
    """Runs steps over the weights and the pool of torch; implements ``executor.fallback.fast_path.Runner``.

    For one thread at a time; counts are read by any thread.

    Invariant: between steps no work in the stream reads pinned memory that may be written, or writes pinned memory
    that may be read: the rings wait for such work.

    Args:
        cubins: Every kernel of the model; all of them are loaded now.
        gpu: The GPU that torch uses too; its stream runs everything.
        torch_executor: Its weights are plain.
        limits: Limits of a step.
        is_deterministic: A row's bits must not depend on the rows beside it.
        graph_bytes: Memory that graphs may take.
        has_graphs: Capture steps in graphs; else every step is launched kernel by kernel.
        trigger: When kernels let each other start.

    Raises:
        GpuError: Memory is short, or the GPU refuses.

    Attributes:
        buffers: What steps read and write.
        max_rows: Most rows of a step.
        notice: What the status says besides; set before it serves.
    """

    max_seq_rows = MAX_NEW
    """Most rows of one sequence in a step."""

    def __init__(
        self,
        cubins: Mapping[KernelSpec, Cubin],
        *,
        gpu: Gpu,
        torch_executor: TorchExecutor,
        limits: Limits,
        is_deterministic: bool = False,
        graph_bytes: int = _GRAPH_BYTES,
        has_graphs: bool = True,
        trigger: Trigger = "early",
    ) -> None:
        config, weights = torch_executor.info.model.config, torch_executor.plain_weights
        assert weights is not None, "the weights were packed for a CPU"
        shape = shape_of(config)
        self._gpu = gpu
        self.buffers = buffers = DecodeBuffers(gpu.allocate, shape, limits, attention_grid(shape, gpu.info))
        self._kernels = KernelSet(gpu, cubins, trigger)
        rope = adopt_weights(gpu, weights, config, torch_executor.info.model.max_context)
        parts = StepParts(self._kernels, weights, rope, buffers, shape, config.norm_eps)
        self._chain = StepChain(parts, torch_executor.pool)
        self._is_deterministic = is_deterministic
        self._vocab_size = shape.vocab_size
        self.max_rows = min(limits.max_rows, MAX_GEMM_ROWS) if is_deterministic else limits.max_rows
        self._work_lists = self._chain.work_lists()
        self._choice_specs = ChoiceSpecs.of(shape)
        self._uploads = UploadRing(gpu, "inputs", buffers.inputs, buffers.input_layout)
        self._downloads = DownloadRing(gpu, "results", buffers.results, buffers.result_layout)
        self._outputs = DeviceOutputs(gpu.torch_device)
        self._graphs = GraphStore(gpu, self._operations, memory_bytes=graph_bytes, is_enabled=has_graphs)
        self._row_copies = RowCopies(gpu, buffers)
        self._latest: tuple[StepBatch, GraphKey, Division] | None = None
        self._plain: tuple[tuple[OutputSpec, ...], Division] = (), Division()
        self._draws = DrawMemo()
        self._captured_sizes: tuple[int, ...] = ()
        self._num_graph_steps = self._num_launched_steps = 0
        self.notice = ""

    @property
    def state(self) -> ExecutorState:
        """What it has done, and which graphs it prepares."""
        num_wanted = self._graphs.num_wanted
        return ExecutorState(
            NAME,
            preparation=f"capturing graphs, {num_wanted} left" if num_wanted else "",
            fallback_reason=self.notice,
            captured_batch_sizes=self._captured_sizes,
            num_graph_steps=self._num_graph_steps,
            num_launched_steps=self._num_launched_steps,
        )

    @property
    def graph_bytes(self) -> int:
        """Memory that graphs take."""
        return self._graphs.taken_bytes

    def can_submit(self, batch: StepBatch) -> bool:
        """Return whether :meth:`submit` takes this step without waiting.

        It does not take a step before its graph exists: running ahead leaves no gap for the capture.

        Args:
            batch: At most ``max_rows`` rows.
        """
        key, _ = self._plan(batch)
        return not key.keeps_rows and self._downloads.has_room and self._graphs.is_settled(key)

    def submit(self, batch: StepBatch) -> QueuedStep:
        """Put a step into the stream; at most two are pending.

        Args:
            batch: At most ``max_rows`` rows, at most ``max_seq_rows`` of a sequence, those with a slot last; torch
                selects none of its outputs, and none returns whole rows.

        Raises:
            GpuError: It was refused; part of it may be in the stream.
        """
        key, _ = self._plan(batch)
        assert not key.keeps_rows, "the rows of this step are looked at afterwards, which takes the host"
        download, path = self._put(batch, key, batch)
        return QueuedStep(download, batch, key, self._vocab_size, path)

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step; none is pending.

        Args:
            batch: As for :meth:`submit`, but with any outputs. Kernels choose for those that they can serve.

        Raises:
            GpuError: It was refused, or failed.
        """
        key, division = self._plan(batch)
        if not key.keeps_rows:
            return self.submit(batch).result()
        torch_rows = set(division.torch_rows)
        is_torch = [i in torch_rows for i in range(len(batch.output_specs))]
        served = with_outputs(batch, [i for i, by_torch in enumerate(is_torch) if not by_torch])
        download, path = self._put(batch, key, served)
        results = download.read()
        chosen = iter(read_choices(results, served, key.kind, vocab_size=self._vocab_size, stores_logits=True))
        selected = iter(self._selected(with_outputs(batch, division.torch_rows), results["greedy"]))
        rows = [next(selected if by_torch else chosen) for by_torch in is_torch]
        self._row_copies.hand_out(rows)
        return StepResult(rows, tuple(f"{path}+torch" if by_torch else path for by_torch in is_torch))

    def capture_next(self) -> bool:
        """Capture a graph that is wanted and return whether there are more; no step is pending.

        Raises:
            GpuError: It was refused.
        """
        has_more = self._graphs.capture_next()
        self._captured_sizes = tuple(sorted({key.num_rows for key in self._graphs.captured}))
        return has_more

    def close(self) -> None:
        """Give back the graphs; the stream is idle. Memory goes with this object.

        Raises:
            GpuError: The GPU refuses.
        """
        self._graphs.close()

    def _plan(self, batch: StepBatch) -> tuple[GraphKey, Division]:
        """Return what decides the operations of a step, and who chooses; kept, as it is asked for several times."""
        if self._latest is None or self._latest[0] is not batch:
            bucket = bucket_for(batch.num_rows, self.max_rows)
            division = self._division(batch)
            key = GraphKey(bucket, division.kind, len(batch.output_rows) > 0, division.keeps_rows)
            self._latest = batch, key, division
        return self._latest[1:]

    def _division(self, batch: StepBatch) -> Division:
        """Return who chooses; as for the last step without shaping where the rows of this one want the same."""
        specs, (plain, division) = batch.output_specs, self._plain
        if are_same(specs, plain):
            return division
        division = divide(specs, batch.histories, self.buffers.limits)
        if all(spec.shaping is None for spec in specs):  # so that no mask is kept, and no history counts
            self._plain = specs, division
        return division

    def _put(self, batch: StepBatch, key: GraphKey, served: StepBatch) -> tuple[Download, str]:
        """Put a step into the stream; return what it gives and, as a path, whether it is a graph.

        Args:
            batch: The step.
            key: Of the step.
            served: The step with the outputs that kernels choose for.
        """
        self._latest = None
        arrays, layout = self._uploads.fill(), self.buffers.input_layout
        block_size = self._chain.block_size
        num_work = fill_inputs(arrays, batch, key.num_rows, work_lists=self._work_lists, block_size=block_size)
        if key.keeps_rows:
            self._row_copies.fill(arrays, batch)
        used = fill_choices(arrays, served, key, vocab_size=self._vocab_size, draws=self._draws)
        self._uploads.upload(slice(0, layout.end_of("work", num_work)), *layout.spans(used))
        is_graph = self._graphs.put(key)
        self._num_graph_steps += is_graph
        self._num_launched_steps += not is_graph
        if key.keeps_rows:
            self._row_copies.put()
        download = self._downloads.download(*self.buffers.result_layout.spans(used))
        return download, "graph" if is_graph else "kernels"

    def _operations(self, key: GraphKey) -> list[Operation]:
        chain = self._chain.operations(
            key.num_rows,
            stores_logits=key.stores_logits,
            is_deterministic=self._is_deterministic,
            keeps_hidden=key.keeps_rows,
            has_outputs=key.has_outputs,
        )
        return chain + choice_operations(self._kernels, self.buffers, key.num_rows, key.kind, self._choice_specs)

    @torch.inference_mode()
    def _selected(self, batch: StepBatch, best: Array) -> list[RowOutput]:
        """Return what torch selects from the logits of the step that was just read, but for whole rows.

        Args:
            batch: The step, with the outputs that torch selects.
            best: int32 [num_rows], the best token of each row.
        """
        rows: list[RowOutput] = []
        for part in self._tiles(len(batch.output_rows)):
            places = batch.output_rows[part]
            with self._gpu.current():
                rows += self._outputs.select(
                    rows_of(self.buffers.logits, places.tolist()),
                    None,
                    batch.positions[places].tolist(),
                    batch.output_specs[part],
                    batch.histories[part],
                    best=best[places].tolist(),
                )
        return rows

    def _tiles(self, num_outputs: int) -> Iterator[slice]:
        """Yield which outputs are selected together: torch's sums may depend on how many there are."""
        size = 1 if self._is_deterministic else _TILE_ROWS
        return (slice(begin, begin + size) for begin in range(0, num_outputs, size))


class QueuedStep:
    """A step in the stream, whose results are on their way."""

    def __init__(self, download: Download, batch: StepBatch, key: GraphKey, vocab_size: int, path: str) -> None:
        self._download = download
        self._batch = batch
        self._key = key
        self._vocab_size = vocab_size
        self._path = path

    def result(self) -> StepResult:
        """Wait for the step and return its output rows; once, and before the next but one is submitted.

        Raises:
            GpuError: It failed.
        """
        results, key = self._download.read(), self._key
        rows = read_choices(
            results, self._batch, key.kind, vocab_size=self._vocab_size, stores_logits=key.stores_logits
        )
        return StepResult(rows, (self._path,) * len(rows))
