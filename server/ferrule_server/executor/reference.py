"""The paged reference executor: it has no weights and starts at once, but attends over a real paged KV pool.

The model, after the paged reference of sizzlecar/ferrum-infer-rs: token t is the one-hot vector at index
``t mod (num_kv_heads * head_dim)``; Q, K and V are that vector in every layer, each query head taking the part of its
KV head; causal softmax attention on the last layer with scale 1/sqrt(head_dim); ``logits[i mod vocab_size] += out[i]``
over the flattened output. All of it is float32, with sums in float64. The hidden state is that flattened output,
because there is no norm.

The arithmetic is exact where the order of operations could matter. Scores have one term. Attention weights are float32
numbers in (0, 1], and float64 holds their sum without rounding. So a row's logits have the same bits whatever shares
the step, and however its sequence was split into steps.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import ExecutorInfo, Float32Array, Int32Array, ModelDescription, StepBatch, StepResult
from ferrule_server.executor.sampling.selection import select_rows
from ferrule_server.model.config import LayerKind, ModelConfig

_CHUNK_ELEMENTS = 1 << 14
"""The most gathered K numbers of output rows that attend together: 128 KiB in float64. Beyond that the C library maps
and unmaps pages for every temporary array, which costs more than the arithmetic."""


class PagedReferenceExecutor:
    """Implements ``executor.base.Executor`` in numpy; the oracle for tests of the engine, the protocol and the client.

    Invariant: the pool changes only at the slots of ``slot_mapping`` and by the copy and write methods.

    Args:
        vocab_size: Tokens in the vocabulary.
        num_layers: Layers whose KV is kept; only the last layer attends.
        num_heads: Query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: Heads of K and V.
        head_dim: Numbers per head.
        max_context: Longest sequence in tokens.
        window: How many tokens a row attends to, itself included; 0: all.
        block_size: Slots per block, a power of two.
        kv_memory_bytes: Size of the pool, rounded down to whole blocks, the null block included.

    Attributes:
        info: The description of this executor; constant.

    Raises:
        ConfigError: The memory holds less than the null block and one more.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        num_layers: int = 2,
        num_heads: int = 4,
        num_kv_heads: int = 4,
        head_dim: int = 8,
        max_context: int = 512,
        window: int = 0,
        block_size: int = 16,
        kv_memory_bytes: int = 64 << 20,
    ) -> None:
        config = ModelConfig(
            architecture="PagedReference",
            vocab_size=vocab_size,
            hidden_size=num_heads * head_dim,
            num_heads=num_heads,
            max_positions=max_context,
            layers=(LayerKind(head_dim, num_kv_heads, window=window),) * num_layers,
        )
        bytes_per_block = num_layers * 2 * num_kv_heads * block_size * head_dim * 4
        num_blocks = kv_memory_bytes // bytes_per_block
        if num_blocks < 2:
            raise ConfigError(f"{kv_memory_bytes} bytes of KV memory hold fewer than 2 blocks of {bytes_per_block}")
        self.info = ExecutorInfo(
            name="paged-reference",
            device="cpu",
            kv_dtype="float32",
            block_size=block_size,
            num_blocks=num_blocks,
            bytes_per_block=bytes_per_block,
            model=_describe(config),
        )
        self._window = window
        self._num_layers, self._num_kv_heads, self._head_dim = num_layers, num_kv_heads, head_dim
        self._kv = np.zeros((num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), np.float32)

    def run(self, batch: StepBatch) -> StepResult:
        """Write the KV of the step's rows and return what its output rows request."""
        embeddings = self._embed(batch.token_ids)
        self._write(embeddings, batch.slot_mapping)
        if len(batch.output_rows) == 0:
            return StepResult()
        positions = batch.positions[batch.output_rows]
        seqs = batch.cu_seqlens_q.searchsorted(batch.output_rows, side="right") - 1
        hidden = np.concatenate(
            [
                self._attend(embeddings[batch.output_rows[part]], positions[part], batch.block_tables[seqs[part]])
                for part in self._chunks(positions)
            ]
        )
        logits = self._project(hidden)
        return StepResult(select_rows(logits, positions.tolist(), batch.output_specs, batch.histories, hidden))

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks, all layers: int32 [n, 2] of (source, destination), destinations distinct."""
        self._kv[block_pairs[:, 1]] = self._kv[block_pairs[:, 0]]

    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy single slots, all layers: int32 [n, 2] of (source, destination), read before any is written."""
        blocks, offsets = np.divmod(slot_pairs, self.info.block_size)
        self._kv[blocks[:, 1], :, :, :, offsets[:, 1]] = self._kv[blocks[:, 0], :, :, :, offsets[:, 0]]

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the raw bytes of blocks: uint8 [n, bytes_per_block], a copy."""
        return self._kv[block_ids].view(np.uint8).reshape(len(block_ids), self.info.bytes_per_block)

    def write_blocks(self, block_ids: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks with raw bytes of the same shape as :meth:`read_blocks` returns."""
        blocks = np.ascontiguousarray(data).view(np.float32)
        self._kv[block_ids] = blocks.reshape(len(block_ids), *self._kv.shape[1:])

    def close(self) -> None:
        """Free the pool; the executor is not used again."""
        self._kv = self._kv[:0].copy()

    def _embed(self, token_ids: Int32Array) -> Float32Array:
        """Return one-hot rows: float32 [num_rows, num_kv_heads, head_dim]."""
        width = self._num_kv_heads * self._head_dim
        embeddings = np.zeros((len(token_ids), width), np.float32)
        embeddings[np.arange(len(token_ids)), token_ids % width] = 1
        return embeddings.reshape(len(token_ids), self._num_kv_heads, self._head_dim)

    def _write(self, embeddings: Float32Array, slot_mapping: Int32Array) -> None:
        """Write K = V = embedding of every row that has a slot, in all layers."""
        rows = np.flatnonzero(slot_mapping >= 0)
        blocks, offsets = np.divmod(slot_mapping[rows], self.info.block_size)
        self._kv[blocks, :, :, :, offsets] = embeddings[rows, None, None]

    def _chunks(self, positions: Int32Array) -> list[slice]:
        """Return slices that cover the output rows in order; the rows of a slice attend together."""
        row_elements = (int(positions.max()) + 1) * self._num_kv_heads * self._head_dim
        size = max(1, _CHUNK_ELEMENTS // row_elements)
        return [slice(start, start + size) for start in range(0, len(positions), size)]

    def _attend(self, embeddings: Float32Array, positions: Int32Array, block_tables: Int32Array) -> Float32Array:
        """Return the attention output of rows, each over its own sequence: float32 [num_rows, num_heads * head_dim].

        Args:
            embeddings: float32 [num_rows, num_kv_heads, head_dim].
            positions: int32 [num_rows]; a row sees positions 0 up to its own.
            block_tables: int32 [num_rows, max_blocks], the table of each row's sequence.
        """
        num_rows, group = len(positions), self.info.model.config.num_heads // self._num_kv_heads
        keys, values, is_visible = self._gather(positions, block_tables)
        queries = np.repeat(embeddings[:, :, None], group, axis=2)
        scores = np.matmul(queries, keys.swapaxes(-1, -2)) * np.float32(self._head_dim**-0.5)
        scores = np.where(is_visible[:, None, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True)).astype(np.float64)
        out = np.matmul(weights, values) / weights.sum(axis=-1, keepdims=True)
        hidden: Float32Array = out.astype(np.float32).reshape(num_rows, -1)
        return hidden

    def _gather(
        self, positions: Int32Array, block_tables: Int32Array
    ) -> tuple[Float32Array, Float32Array, npt.NDArray[np.bool_]]:
        """Return keys, values (float32 [num_rows, num_kv_heads, length, head_dim]) and the visible slots of each row.

        Slots that are not visible are set to 0 in the copy, so the values that the pool holds there cannot reach a sum.
        """
        block_size = self.info.block_size
        num_blocks = int(positions.max()) // block_size + 1
        length = num_blocks * block_size
        slots, last = np.arange(length), positions[:, None]
        is_visible = (slots <= last) & (slots > last - (self._window or length))
        heads = np.arange(2 * self._num_kv_heads).reshape(2, 1, -1, 1)
        last_layers = (block_tables[:, :num_blocks] + 1) * (self._num_layers * 2 * self._num_kv_heads) - heads.size
        pieces = self._kv.reshape(-1, block_size * self._head_dim).take(last_layers[:, None] + heads, axis=0)
        kv = pieces.reshape(2, len(positions), self._num_kv_heads, length, self._head_dim)
        rows, slots = np.nonzero(~is_visible)
        kv[:, rows, :, slots] = 0
        return kv[0], kv[1], is_visible

    def _project(self, out: Float32Array) -> Float32Array:
        """Fold the attention output into logits: ``logits[i mod vocab_size] += out[i]``, ascending i."""
        vocab_size = self.info.model.config.vocab_size
        logits = np.zeros((len(out), vocab_size), np.float32)
        for start in range(0, out.shape[1], vocab_size):
            piece = out[:, start : start + vocab_size]
            logits[:, : piece.shape[1]] += piece
        return logits


def _describe(config: ModelConfig) -> ModelDescription:
    kv = f"layers={config.num_layers} kv_heads={config.num_kv_heads} head_dim={config.head_dim}"
    if config.attention_window:
        kv += f" window={config.attention_window}"
    return ModelDescription(
        config=config,
        model_id="paged-reference",
        num_parameters=0,
        max_context=config.max_positions,
        dtype="float32",
        fingerprint=hashlib.sha256(f"paged-reference float32 {kv}".encode()).digest(),
    )
