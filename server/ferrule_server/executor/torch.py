"""The torch executor: runs steps with the decoder in torch, on any device, and owns the KV pool.

It is the reference for results, and runs what the kernels cannot.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import ExecutorInfo, Int32Array, ModelDescription, RowOutput, StepBatch, StepResult
from ferrule_server.executor.block_pool import BlockPool, bytes_per_block
from ferrule_server.executor.sampling.device_outputs import DeviceOutputs
from ferrule_server.model.attention import GroupedAttention, LayerAttention, PlainAttention, StepArrays
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.decoder import Decoder
from ferrule_server.model.flash_attention import FlashAttention, can_attend, can_compute, has_trailing_rows
from ferrule_server.model.tensors import ModelWeights
from ferrule_server.model.weights import LoadedModel

_MIN_BLOCKS = 8
"""The fewest blocks, the null block included, that hold a prompt and a fork of it."""

_TILE_BYTES = 32 << 20
"""The most bytes of float32 logits that exist at a time: 55 rows of 152 000."""


class TorchExecutor:
    """Implements ``executor.base.Executor``.

    Invariant: a step changes only the slots of its ``slot_mapping``, and nothing else of a step is kept. The pool is
    contiguous, allocated and committed once; the content of block 0, the null block, never matters.

    Args:
        model: The executor takes its weights; the model cannot be used for a second executor.
        kv_memory_bytes: Size of the pool, rounded down to whole blocks, the null block included.
        max_context: Longest sequence in tokens, at most the model's own.
        block_size: Slots per block, a power of two.
        device: A torch device.
        is_plain: Run ``kernels.reference`` for every operation: slow, the definition to compare with.
        fallback_reason: Why a faster executor is not in use, although one was requested.

    Attributes:
        info: What this executor is; constant.
        blocks: The KV pool.

    Raises:
        ConfigError: A setting is out of range, or the pool would hold too few blocks.
        ModelError: The weights were taken before.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: LoadedModel,
        *,
        kv_memory_bytes: int,
        max_context: int,
        block_size: int = 16,
        device: str = "cpu",
        is_plain: bool = False,
        fallback_reason: str = "",
    ) -> None:
        check_settings(model.config, model.torch_dtype, kv_memory_bytes, max_context, block_size)
        num_bytes = bytes_per_block(model.config, block_size, model.torch_dtype)
        self._device = torch.device(device)
        self._is_plain = is_plain
        self._outputs = DeviceOutputs(self._device)
        self._decoder = Decoder(model.config, model.take_weights(), device=self._device, is_plain=is_plain)
        self.info = ExecutorInfo(
            name="torch",
            device=str(self._device),
            kv_dtype=model.dtype,
            block_size=block_size,
            num_blocks=kv_memory_bytes // num_bytes,
            bytes_per_block=num_bytes,
            model=describe(model, max_context),
            supported_dtypes=("float32", "bfloat16", "float16"),
            fallback_reason=fallback_reason,
        )
        self.blocks = BlockPool(self.info, model.torch_dtype)
        self._has_flash = not is_plain and can_compute(model.config) and all(map(can_attend, self.blocks.tensors))

    @property
    def plain_weights(self) -> ModelWeights | None:
        """The tensors that it uses, for kernels on the same device; None if they are packed for a CPU."""
        return self._decoder.plain_weights

    @property
    def pool(self) -> torch.Tensor:
        """The KV of every sequence, ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``.

        Only of a model whose layers have equal heads.
        """
        (tensor,) = self.blocks.tensors
        return tensor

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        """Write the KV of the step's rows and return what its output rows request.

        If the logits of a row hold NaN or infinity, its own RowOutput says so; its neighbours are not affected.
        """
        if not batch.num_rows:
            return StepResult()
        hidden = self._decoder.forward(
            self._index(batch.token_ids),
            self._index(batch.positions),
            self._attention(batch),
            self._index(batch.output_rows),
        )
        return StepResult(self._select(hidden, batch))

    def _select(self, hidden: torch.Tensor, batch: StepBatch) -> list[RowOutput]:
        """Return the outputs of the rows; output head and selection process a tile of rows at a time."""
        positions = batch.positions[batch.output_rows].tolist()
        rows: list[RowOutput] = []
        for tile in self._tiles(len(positions)):
            part = hidden[tile]
            logits = self._decoder.head(part)
            rows += self._outputs.select(logits, part, positions[tile], batch.output_specs[tile], batch.histories[tile])
        return rows

    def _tiles(self, num_rows: int) -> list[slice]:
        """Return slices of about equal size, none with more logits than ``_TILE_BYTES`` hold."""
        most = max(1, _TILE_BYTES // (4 * self.info.model.config.vocab_size))
        num_tiles = -(-num_rows // most)
        return [slice(num_rows * i // num_tiles, num_rows * (i + 1) // num_tiles) for i in range(num_tiles)]

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks, all layers: int32 [n, 2] of (source, destination), destinations distinct.

        No block is both a source and a destination.
        """
        self.blocks.copy_blocks(block_pairs)

    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy single slots, all layers: int32 [n, 2] of (source, destination), read before any is written."""
        self.blocks.copy_slots(slot_pairs)

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the raw bytes of blocks: uint8 [n, bytes_per_block], a copy."""
        return self.blocks.read_blocks(block_ids)

    def write_blocks(self, block_ids: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks with raw bytes of the same shape as :meth:`read_blocks` returns.

        Raises:
            ValueError: ``data`` has another shape or dtype; nothing is written.
        """
        self.blocks.write_blocks(block_ids, data)

    def close(self) -> None:
        """Release weights and pool; the executor is not used again."""
        del self._decoder, self.blocks

    def _attention(self, batch: StepBatch) -> LayerAttention:
        step = StepArrays(batch.positions, batch.slot_mapping, batch.cu_seqlens_q, batch.kv_lens, batch.block_tables)
        config, pools = self.info.model.config, self.blocks.tensors
        if self._is_plain:
            return LayerAttention(config, [PlainAttention(pool, step) for pool in pools])
        make = FlashAttention if self._has_flash and has_trailing_rows(step) else GroupedAttention
        return LayerAttention(config, [make(pool, step, config.num_heads) for pool in pools])

    def _index(self, values: Int32Array) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def least_kv_bytes(config: ModelConfig, dtype: torch.dtype, block_size: int = 16) -> int:
    """Return the smallest ``kv_memory_bytes`` with which a model can run."""
    return _MIN_BLOCKS * bytes_per_block(config, block_size, dtype)


def check_settings(
    config: ModelConfig, dtype: torch.dtype, kv_memory_bytes: int, max_context: int, block_size: int
) -> None:
    """Refuse settings with which no executor can run a model.

    Raises:
        ConfigError: A setting is out of range, or the pool would hold too few blocks.
    """
    if not 1 <= max_context <= config.max_positions:
        raise ConfigError(f"max_context {max_context} is outside [1, {config.max_positions}], the model's range")
    least_bytes = least_kv_bytes(config, dtype, block_size)
    if kv_memory_bytes < least_bytes:
        raise ConfigError(
            f"--kv-memory is {kv_memory_bytes} bytes, too little for this model: it needs at least "
            f"{-(-least_bytes >> 10)}KiB ({_MIN_BLOCKS} blocks of {block_size} tokens)"
        )


def describe(model: LoadedModel, max_context: int) -> ModelDescription:
    """Return the description of a model for the executor that runs it."""
    return ModelDescription(
        config=model.config,
        model_id=model.model_id,
        num_parameters=model.num_parameters,
        max_context=max_context,
        dtype=model.dtype,
        fingerprint=model.fingerprint,
        weights_bytes=model.weights_bytes,
    )
