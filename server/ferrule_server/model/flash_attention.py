"""Attention of one step on a GPU: one gather and one launch of torch's flash attention operator per layer.

The blocks of all sequences are gathered side by side, K and V of each head apart::

    blocks of the pool       seq 0: 7 3        seq 1: 9
    gathered, one KV head    [ 7 | 3..stale | 9....stale ]    cu_seqlens_k = [0, 32, 48], kv_lens = [20, 13]

The operator reads ``kv_lens[s]`` slots of sequence s, so it never sees what others left behind them. Its causal mask is
aligned at the lower right: the last row of a sequence sees all of its keys. Query head h reads KV head
``h // (num_heads // num_kv_heads)``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferrule_server.kernels.reference import AttentionRule
from ferrule_server.model.attention import Kv, StepArrays
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.pool_shape import Int32Array, KvWriter, PoolShape, index_tensor

GATHERED_BYTES = 128 << 20
"""The most bytes of K and V that are gathered at a time, unless a single sequence has more."""

_log = logging.getLogger(__name__)


def can_attend(pool: Tensor) -> bool:
    """Return whether the operator works on the device, the dtype and the head size of a pool; a small call is checked.

    It works on GPUs of compute capability 8.0 and newer, in bfloat16 and float16, for head sizes that are a multiple of
    8 and at most 256.
    """
    value = pool.new_tensor([0.0, 1.0, 2.0, float("nan")]).view(4, 1, 1).repeat(1, 1, pool.shape[-1])
    num_rows, num_slots, kv_lens = np.array([[2], [4], [3]], np.int32)
    try:
        query = pool.new_zeros(2, 2, pool.shape[-1])
        out = _run(query, 0 * value, value, _lengths(num_rows, num_slots, kv_lens, pool.device))
        is_right = (out - out.new_tensor([[[0.5]], [[1.0]]])).abs().max().item() < 0.01
        reason = "" if is_right else "it returned other values than expected"
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
    if reason:
        level = logging.DEBUG if pool.device.type == "cpu" else logging.WARNING
        _log.log(level, "event=no_flash_attention device=%s reason=%s", pool.device, reason)
    return not reason


def can_compute(config: ModelConfig) -> bool:
    """Return whether the operator computes the scores of all layers; it knows no windows, chunks, caps and sinks."""
    return not config.score_softcap and not any(kind.reach or kind.has_sinks for kind in config.layers)


def has_trailing_rows(step: StepArrays) -> bool:
    """Return whether the rows of each sequence are its last ones, as the operator's causal mask assumes."""
    ahead = np.repeat(step.kv_lens - step.cu_seqlens_q[1:], np.diff(step.cu_seqlens_q))
    return np.array_equal(step.positions, ahead + np.arange(len(ahead)))


class FlashAttention:
    """Implements ``PoolAttention`` for a pool that :func:`can_attend` accepts and steps with trailing rows.

    Args:
        pool: The KV pool, contiguous; :meth:`attend` changes it.
        step: The rows of the step, for which :func:`has_trailing_rows` is true.
        num_heads: Query heads.
    """

    def __init__(self, pool: Tensor, step: StepArrays, num_heads: int) -> None:
        self._pool = pool
        self._shape = PoolShape.of(pool, num_heads)
        self._writer = KvWriter(pool, self._shape, step.slot_mapping)
        num_blocks = -(-step.kv_lens // self._shape.block_size)
        most_blocks = GATHERED_BYTES // (pool[0, 0].numel() * pool.element_size())
        self._packs = [_Pack(self._shape, step, seqs, pool) for seqs in _pack_seqs(num_blocks, most_blocks)]

    def attend(self, layer: int, query: Tensor, kv: Kv, rule: AttentionRule, *, sinks: Tensor | None) -> Tensor:
        """See :class:`PoolAttention`; there are no sinks, see :func:`can_compute`."""
        assert sinks is None
        if kv is not None:
            self._writer.write(layer, *kv)
        pieces = self._shape.layer_pieces(self._pool, layer)
        parts = [pack.attend(query[pack.rows], pieces, rule.scale) for pack in self._packs]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def _pack_seqs(num_blocks: Int32Array, most_blocks: int) -> Iterator[slice]:
    """Yield consecutive sequences that together have at most ``most_blocks``; a longer sequence is alone."""
    begin = total = 0
    for seq, blocks in enumerate(num_blocks.tolist()):
        if seq > begin and total + blocks > most_blocks:
            yield slice(begin, seq)
            begin, total = seq, 0
        total += blocks
    yield slice(begin, len(num_blocks))


class _Pack:
    """Consecutive sequences that one call of the operator attends.

    Attributes:
        rows: The rows of the step.
    """

    def __init__(self, shape: PoolShape, step: StepArrays, seqs: slice, pool: Tensor) -> None:
        kv_lens, tables = step.kv_lens[seqs], step.block_tables[seqs]
        begins = step.cu_seqlens_q[seqs.start : seqs.stop + 1]
        num_blocks = -(-kv_lens // shape.block_size)
        blocks = tables[np.arange(tables.shape[1]) < num_blocks[:, None]]
        self.rows = slice(int(begins[0]), int(begins[-1]))
        self._kv_shape = (2, shape.num_kv_heads, -1, shape.head_dim)
        self._pieces = index_tensor(shape.pieces(blocks[None]), pool)
        self._lengths = _lengths(np.diff(begins), num_blocks * shape.block_size, kv_lens, pool.device)

    def attend(self, query: Tensor, layer_pieces: Tensor, scale: float) -> Tensor:
        """Return [rows, num_heads, head_dim] for query [rows, num_heads, head_dim]."""
        gathered = layer_pieces.index_select(0, self._pieces).view(self._kv_shape)
        key, value = gathered.transpose(1, 2).unbind(0)
        return _run(query, key, value, {**self._lengths, "scale": scale})


def _lengths(
    num_rows: Int32Array, num_slots: Int32Array, kv_lens: Int32Array, device: torch.device
) -> dict[str, Tensor | int]:
    """Return the arguments of the operator for sequences with so many rows, gathered slots and tokens: [num_seqs]."""
    arrays = {"cum_seq_q": np.cumsum([0, *num_rows]), "cum_seq_k": np.cumsum([0, *num_slots]), "seqused_k": kv_lens}
    tensors = {name: torch.from_numpy(array.astype(np.int32)).to(device) for name, array in arrays.items()}
    return {**tensors, "max_q": int(num_rows.max()), "max_k": int(kv_lens.max())}


def _run(query: Tensor, key: Tensor, value: Tensor, lengths: dict[str, Any]) -> Tensor:
    """Call the operator itself: ``scaled_dot_product_attention`` would need a mask for each sequence.

    Its public form, ``torch.nn.attention.varlen``, adds a launch, and importing it takes seconds.

    Args:
        query: [rows, num_heads, head_dim]; of this and the others, only the last dimension need be contiguous.
        key: [slots, num_kv_heads, head_dim].
        value: Like ``key``.
        lengths: From :func:`_lengths`, and the scale of the scores if it is not 1 / sqrt(head_dim).

    Returns:
        [rows, num_heads, head_dim], contiguous.
    """
    run = torch.ops.aten._flash_attention_forward  # noqa: SLF001
    out: Tensor = run(query, key, value, dropout_p=0.0, is_causal=True, return_debug_mask=False, **lengths)[0]
    return out
