"""A runner over a real chain whose kernels do little: a step's next tokens follow from its tokens and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ferrule_server.executor.base import Int32Array, OutputSpec, StepBatch
from ferrule_server.executor.cuda.buffers import Limits
from ferrule_server.executor.cuda.choice_launches import ChoiceSpecs
from ferrule_server.executor.cuda.compose import Kernels
from ferrule_server.executor.cuda.cuda_device import CudaDevice
from ferrule_server.executor.cuda.graphs import GraphKey
from ferrule_server.executor.cuda.kernel_choice import shape_of, specs_needed
from ferrule_server.executor.cuda.runner import NAME, CudaDecodeRunner
from ferrule_server.executor.fallback.executor import FallbackExecutor
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.kernels.cuda.catalog import merged
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec
from tests.executor.cuda.fake_gpu import CUBIN, FakeGpu, FakeLaunch
from tests.executor.cuda.tiny_model import tiny_executor

__all__ = ["GREEDY", "Toy", "cubins_of", "executor_over", "limits_of", "next_tokens", "rows_of"]

GREEDY = OutputSpec(greedy=True)
VOCAB = 67


def next_tokens(tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return what follows each token at its position."""
    return [(7 * token + 3 * position + 1) % VOCAB for token, position in zip(tokens, positions, strict=True)]


def cubins_of(executor: TorchExecutor, *, is_deterministic: bool = False) -> dict[KernelSpec, Cubin]:
    """Return stand-ins for every kernel of a model."""
    shape = shape_of(executor.info.model.config)
    specs = specs_needed(shape, is_deterministic=is_deterministic)
    return dict.fromkeys(merged([*specs, *ChoiceSpecs.of(shape)]), CUBIN)


def limits_of(max_rows: int) -> Limits:
    """Return small limits."""
    return Limits(max_blocks=16, max_rows=max_rows, max_requests=32, max_entries=64)


def executor_over(
    gpu: FakeGpu, inner: TorchExecutor, kernels: Kernels, *, is_deterministic: bool = False, **options: Any
) -> FallbackExecutor:
    """Return an executor with these kernels."""

    def make_runner() -> CudaDecodeRunner:
        return CudaDecodeRunner(
            kernels.cubins,
            gpu=gpu,
            torch_executor=inner,
            limits=limits_of(8),
            is_deterministic=is_deterministic,
            **options,
        )

    return FallbackExecutor(
        inner,
        CudaDevice(gpu, "cpu"),
        name=NAME,
        make_runner=make_runner,
        is_deterministic=is_deterministic,
    )


def rows_of(
    tokens: Sequence[int],
    positions: Sequence[int],
    *,
    spec: OutputSpec = GREEDY,
    feedback: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
    outputs: Sequence[int] | None = None,
) -> StepBatch:
    """Return a step, one row for each sequence unless ``counts`` says how many; block s + 1 is that of sequence s."""
    sizes = [1] * len(tokens) if counts is None else list(counts)
    ends = np.cumsum([0, *sizes])
    seqs = np.repeat(np.arange(len(sizes)), sizes)
    rows = list(range(len(tokens))) if outputs is None else list(outputs)
    return StepBatch(
        token_ids=_array(tokens),
        positions=_array(positions),
        slot_mapping=_array((seqs + 1) * 16 + np.array(positions) % 16),
        cu_seqlens_q=_array(ends),
        kv_lens=_array([positions[end - 1] + 1 for end in ends[1:]]),
        block_tables=np.repeat(_array([[s + 1] for s in range(len(sizes))]), 16, axis=1),
        output_rows=_array(rows),
        output_specs=(spec,) * len(rows),
        feedback=None if feedback is None else _array(feedback),
    )


def _array(values: object) -> Int32Array:
    return np.array(values, np.int32)


class Toy:
    """A runner and the GPU it runs on; kernels but for the first and the last do nothing."""

    def __init__(
        self,
        *,
        max_rows: int = 8,
        is_deterministic: bool = False,
        graph_bytes: int = 1 << 30,
        cubins: dict[KernelSpec, Cubin] | None = None,
        kind: str = "qwen3",
    ) -> None:
        self.gpu = FakeGpu(stand_ins={"embed": self._embed, "head": self._end, "argmax": self._end})
        self.executor = tiny_executor(kind, num_layers=1)
        self.runner = CudaDecodeRunner(
            cubins_of(self.executor, is_deterministic=is_deterministic) if cubins is None else cubins,
            gpu=self.gpu,
            torch_executor=self.executor,
            limits=limits_of(max_rows),
            is_deterministic=is_deterministic,
            graph_bytes=graph_bytes,
        )
        self.num_rows: list[int] = []
        self.seen: list[int] = []
        self.gpu.log.clear()

    def capture(self) -> None:
        """Capture every graph that is wanted."""
        while self.runner.capture_next():
            pass

    def specs_of(self, key: GraphKey) -> list[KernelSpec]:
        """Return the kernels that steps of a key launch, in order."""
        operations = self.runner._operations(key)
        return [operation.spec for operation in operations if isinstance(operation, FakeLaunch)]

    def settle(self, batch: StepBatch) -> None:
        """Run a step and capture its graph."""
        self.runner.run(batch)
        self.capture()
        assert self.runner.can_submit(batch)

    def _embed(self, arguments: Mapping[str, int | float]) -> None:
        num_rows = int(arguments["num_rows"])
        token_ids = self.gpu.at(arguments["token_ids"], (num_rows,), torch.int32).tolist()
        sampled = self.gpu.at(arguments["sampled"], (int(arguments["num_sampled"]),), torch.int32).tolist()
        self.num_rows.append(num_rows)
        self.seen = [sampled[-2 - token] if token <= -2 else token for token in token_ids]

    def _end(self, arguments: Mapping[str, int | float]) -> None:
        positions = self.runner.buffers.input["positions"][: len(self.seen)].tolist()
        tokens = next_tokens(self.seen, positions)
        self.gpu.at(arguments["tokens"], (len(tokens),), torch.int32).copy_(torch.tensor(tokens))
        if arguments["logits"]:
            logits = self.gpu.at(arguments["logits"], (len(tokens), VOCAB), torch.float32)
            logits.copy_(-(torch.arange(VOCAB) - torch.tensor(tokens).unsqueeze(1)).abs().float())
