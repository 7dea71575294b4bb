"""Attention of one step over the block pool: K and V are written once, then groups of sequences read them.

Sequences with equally few rows (decode steps, verifies) are attended together: their blocks are gathered into one
padded ``[2, num_seqs, num_kv_heads, length, head_dim]`` and their query heads stacked per KV head. Longer chunks are
attended one by one, in tiles of rows. Padding repeats the sequence's own first block, and slots past its end are zeroed
in the gathered copy: whatever other sequences left in the pool, infinities included, cannot reach a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.kernels.reference import AttentionRule
from ferrule_server.model.config import LayerKind, ModelConfig
from ferrule_server.model.pool_shape import Int32Array, Int64Array, KvWriter, PoolShape, index_tensor

# Stands in a table for a block that was given back, because it is outside every window; its content never matters.
_NULL_BLOCK = 0
# A chunk of more query rows per KV head than this is attended alone.
_MAX_GROUPED_ROWS = 32
# Rows of a chunk attended at a time, and how many scores at a time. One thread is as fast with scores that fit its L2
# cache (1 << 18); with more threads each call costs a wake-up, and fewer, larger ones win (0.6 B model, 512 rows, two
# threads: 1.12 s with 1 << 18 and 128 rows, 0.93 s with these).
_TILE_ROWS = 256
_TILE_SCORES = 1 << 19
# In bfloat16 torch's fused kernel makes many small products, which cost more than two large ones and a softmax once
# there are many elements of K, times rows: (rows + 6) * elements, fitted to measurements with 2 to 32 rows.
_FUSED_WORK = 2_000_000
# A sequence joins a group when that pads it by at most this many blocks, or by this share of the longest.
_PADDING_BLOCKS = 4
_PADDING_SHARE = 4


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The places of a step's rows, as in ``StepBatch``; all arrays are int32 and owned by the caller.

    Attributes:
        positions: [num_rows].
        slot_mapping: [num_rows]; -1 = do not write.
        cu_seqlens_q: [num_seqs + 1].
        kv_lens: [num_seqs].
        block_tables: [num_seqs, max_blocks].
    """

    positions: Int32Array
    slot_mapping: Int32Array
    cu_seqlens_q: Int32Array
    kv_lens: Int32Array
    block_tables: Int32Array


Kv = tuple[Tensor, Tensor] | None
"""K and V of the rows, each [num_rows, num_kv_heads, head_dim]; None if a layer reads those of an earlier one."""


class PoolAttention(Protocol):
    """Attention over one pool, whose layers have equal heads, during one step."""

    def attend(self, layer: int, query: Tensor, kv: Kv, rule: AttentionRule, *, sinks: Tensor | None) -> Tensor:
        """Write K and V of the rows, then return the attention of every row over its own sequence.

        Args:
            layer: Number of the layer among those of the pool.
            query: [num_rows, num_heads, head_dim].
            kv: K and V of the rows.
            rule: How scores are made.
            sinks: [num_heads], a score of each head that joins the softmax and has no value; None: there is none.

        Returns:
            [num_rows, num_heads * head_dim].
        """
        ...


class LayerAttention:
    """Gives the layers of the decoder access to the KV pools during one step.

    Args:
        config: The network.
        pools: The attention over the pool of each of ``config.kv_groups``.
    """

    def __init__(self, config: ModelConfig, pools: Sequence[PoolAttention]) -> None:
        self._layers = attention_layers(config)
        self._pools = pools

    def attend(self, layer: int, query: Tensor, kv: Kv, *, sinks: Tensor | None) -> Tensor:
        """See :class:`PoolAttention`; ``layer`` is its number in the network, which says how its scores are made."""
        place, index, rule = self._layers[layer]
        return self._pools[place].attend(index, query, kv, rule, sinks=sinks)


@cache
def attention_layers(config: ModelConfig) -> tuple[tuple[int, int, AttentionRule], ...]:
    """Return for each layer: the pool in which its K and V are, its number there, and how its scores are made."""
    places = {layer: (pool, index) for pool, group in enumerate(config.kv_groups) for index, layer in enumerate(group)}
    return tuple(
        (*places[index if kind.kv_layer is None else kind.kv_layer], _rule_of(config, kind))
        for index, kind in enumerate(config.layers)
    )


def _rule_of(config: ModelConfig, kind: LayerKind) -> AttentionRule:
    return AttentionRule(kind.score_scale, kind.window, config.score_softcap, kind.chunk)


class PlainAttention:
    """Implements ``PoolAttention`` with ``kernels.reference`` alone.

    Args:
        pool: The KV pool; :meth:`attend` changes it.
        step: The rows of the step.
    """

    def __init__(self, pool: Tensor, step: StepArrays) -> None:
        self._pool = pool
        self._step = {name: torch.tensor(array, device=pool.device) for name, array in asdict(step).items()}

    def attend(self, layer: int, query: Tensor, kv: Kv, rule: AttentionRule, *, sinks: Tensor | None) -> Tensor:
        """See :class:`PoolAttention`."""
        step = dict(self._step)
        slots = step.pop("slot_mapping")
        if kv is not None:
            reference.kv_append(self._pool, layer, *kv, slots)
        out = reference.paged_attention(query, self._pool, layer, **step, rule=rule, sinks=sinks)
        return out.flatten(1)


class GroupedAttention:
    """Implements ``PoolAttention`` with few torch calls per layer, whatever the number of sequences.

    All indices are computed once per step: the part of each layer in the pool is the same rows, shifted.

    Args:
        pool: The KV pool, contiguous; :meth:`attend` changes it.
        step: The rows of the step.
        num_heads: Query heads.
    """

    def __init__(self, pool: Tensor, step: StepArrays, num_heads: int) -> None:
        self._pool = pool
        self._shape = PoolShape.of(pool, num_heads)
        self._writer = KvWriter(pool, self._shape, step.slot_mapping)
        self._groups = [_Group(self._shape, step, seqs, pool) for seqs in _group_seqs(step, self._shape)]

    def attend(self, layer: int, query: Tensor, kv: Kv, rule: AttentionRule, *, sinks: Tensor | None) -> Tensor:
        """See :class:`PoolAttention`."""
        if kv is not None:
            self._writer.write(layer, *kv)
        pieces = self._shape.layer_pieces(self._pool, layer)
        if len(self._groups) == 1:
            return self._groups[0].attend(query, pieces, rule, sinks=sinks).reshape(query.shape[0], -1)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in self._groups:
            out[group.rows] = group.attend(query[group.rows], pieces, rule, sinks=sinks)
        return out.flatten(1)


def _group_seqs(step: StepArrays, shape: PoolShape) -> Iterator[Int64Array]:
    """Yield sequences to attend together: they have as many rows and similar lengths. A long chunk is alone."""
    num_rows = np.diff(step.cu_seqlens_q)
    order = np.lexsort((-step.kv_lens, num_rows))
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or not _fits(step, shape, num_rows, order[begin], order[end]):
            yield np.sort(order[begin:end])
            begin = end


def _fits(step: StepArrays, shape: PoolShape, num_rows: Int32Array, longest: int, candidate: int) -> bool:
    is_alike = num_rows[longest] == num_rows[candidate]
    is_short = num_rows[longest] * shape.num_queries_per_kv <= _MAX_GROUPED_ROWS
    blocks, own_blocks = (-(-int(step.kv_lens[seq]) // shape.block_size) for seq in (longest, candidate))
    return bool(is_alike and is_short and blocks - own_blocks <= max(_PADDING_BLOCKS, blocks // _PADDING_SHARE))


class _Group:
    """Sequences that are attended together, with ``q_len`` rows each, and K and V padded to ``length``.

    Attributes:
        rows: The rows of the step; a slice if they are consecutive.
    """

    def __init__(self, shape: PoolShape, step: StepArrays, seqs: Int64Array, pool: Tensor) -> None:
        begins, ends = step.cu_seqlens_q[seqs], step.cu_seqlens_q[seqs + 1]
        kv_lens = step.kv_lens[seqs]
        num_blocks = -(-int(kv_lens.max()) // shape.block_size)
        self._shape = shape
        self._num_seqs, self._q_len = len(seqs), int(ends[0] - begins[0])
        self._length = num_blocks * shape.block_size
        rows = (begins[:, None] + np.arange(self._q_len)).reshape(-1)
        is_consecutive = int(rows[-1] - rows[0]) == len(rows) - 1
        self.rows = slice(int(rows[0]), int(rows[-1]) + 1) if is_consecutive else index_tensor(rows, pool)
        tables = step.block_tables[seqs, :num_blocks]
        self._pieces = index_tensor(shape.pieces(_own_blocks(tables, kv_lens, shape)), pool)
        is_given_back = np.repeat(tables == _NULL_BLOCK, shape.block_size, axis=1)
        is_stale = (np.arange(self._length) >= kv_lens[:, None]) | is_given_back
        # In the order of the gathered slots: [2, num_seqs, num_kv_heads, length].
        spread = np.broadcast_to(is_stale[None, :, None, :], (2, len(seqs), shape.num_kv_heads, self._length))
        self._stale = index_tensor(np.flatnonzero(spread), pool)
        self._begin, self._device = int(step.positions[rows[0]]), pool.device
        self._future: Tensor | None = None  # of a chunk: the mask of a tile over its own keys
        self._positions: Tensor | None = None  # of all others: those of the rows
        if self._q_len * shape.num_queries_per_kv > _MAX_GROUPED_ROWS:
            tile = torch.arange(min(self._q_len, _TILE_ROWS), device=pool.device)
            self._future = self._mask(tile.unsqueeze(1), tile, AttentionRule(1.0), torch.float32)
        else:
            self._positions = index_tensor(step.positions[rows], pool).view(self._num_seqs, 1, self._q_len, 1)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def attend(self, query: Tensor, layer_pieces: Tensor, rule: AttentionRule, *, sinks: Tensor | None) -> Tensor:
        """Return [rows, num_heads, head_dim] for query [rows, num_heads, head_dim]."""
        shape = self._shape
        gathered = layer_pieces.index_select(0, self._pieces).view(-1, shape.head_dim)
        if len(self._stale):
            gathered.index_fill_(0, self._stale, 0)
        key, value = gathered.view(2, self._num_seqs, shape.num_kv_heads, self._length, shape.head_dim).unbind(0)
        attend = self._attend_short if self._future is None else self._attend_chunk
        return attend(query, key, value, rule, sinks)

    def _attend_chunk(
        self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, sinks: Tensor | None
    ) -> Tensor:
        """Attend consecutive rows of one sequence tile by tile, each tile over the keys that it may see."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for begin in range(0, self._q_len, _TILE_ROWS):
            end = min(begin + _TILE_ROWS, self._q_len)
            first = _first_key(self._begin + begin, rule)
            keys = slice(first, self._begin + end)
            tile = self._stack(query[begin:end], 1)
            mask = self._tile_mask(begin, end, first, rule)
            stacked = self._stack_sinks(sinks, end - begin)
            attended = _attend_tile(tile[0], key[0, :, keys], value[0, :, keys], mask, rule, sinks=stacked)
            out[begin:end] = self._unstack(attended.unsqueeze(0), 1)
        return out

    def _tile_mask(self, begin: int, end: int, first: int, rule: AttentionRule) -> Tensor:
        """Return the mask of a tile over its last keys; over all from ``first`` if there are windows or chunks."""
        assert self._future is not None
        if not rule.window and not rule.chunk:
            return self._future[: (end - begin) * self._shape.num_queries_per_kv, : end - begin]
        rows = torch.arange(self._begin + begin, self._begin + end, device=self._device)
        keys = torch.arange(first, self._begin + end, device=self._device)
        return self._mask(rows.unsqueeze(1), keys, rule, torch.float32)

    def _attend_short(
        self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, sinks: Tensor | None
    ) -> Tensor:
        """Compute the attention of the few rows of many sequences at once."""
        seen = (rule.window, rule.chunk)
        if seen not in self._masks:
            assert self._positions is not None
            keys = torch.arange(self._length, device=self._device)
            self._masks[seen] = self._mask(self._positions, keys, rule, query.dtype)
        stacked, mask = self._stack(query, self._num_seqs), self._masks[seen]
        is_large = query.dtype == torch.bfloat16 and (stacked.shape[2] + 6) * key.numel() > _FUSED_WORK
        if is_large or rule.softcap or sinks is not None:
            out = _attend_by_products(stacked, key, value, mask, rule, sinks=self._stack_sinks(sinks, self._q_len))
        else:
            out = F.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=rule.scale)
        return self._unstack(out, self._num_seqs)

    def _stack(self, query: Tensor, num_seqs: int) -> Tensor:
        """Return [num_seqs, num_kv_heads, rows * num_queries_per_kv, head_dim]: the queries by their KV head."""
        shape = self._shape
        heads = query.view(num_seqs, -1, shape.num_kv_heads, shape.num_queries_per_kv, shape.head_dim)
        return heads.transpose(1, 2).reshape(num_seqs, shape.num_kv_heads, -1, shape.head_dim)

    def _stack_sinks(self, sinks: Tensor | None, num_rows: int) -> Tensor | None:
        """Return float32 [num_kv_heads, rows * num_queries_per_kv, 1], as :meth:`_stack` orders rows."""
        if sinks is None:
            return None
        shape = self._shape
        heads = sinks.float().view(shape.num_kv_heads, 1, shape.num_queries_per_kv)
        return heads.expand(-1, num_rows, -1).reshape(shape.num_kv_heads, -1, 1)

    def _unstack(self, out: Tensor, num_seqs: int) -> Tensor:
        """Undo :meth:`_stack`: return [rows of all sequences, num_heads, head_dim]."""
        shape = self._shape
        heads = out.view(num_seqs, shape.num_kv_heads, -1, shape.num_queries_per_kv, shape.head_dim)
        return heads.transpose(1, 2).reshape(-1, shape.num_heads, shape.head_dim)

    def _mask(self, positions: Tensor, keys: Tensor, rule: AttentionRule, dtype: torch.dtype) -> Tensor:
        """Return what is added to scores: 0, or -inf for a key that a row does not see.

        Args:
            positions: Integers [..., rows, 1], of rows.
            keys: Integers [length], positions of keys.
            rule: Its window and chunk are read.
            dtype: Of the mask.

        Returns:
            [..., rows * num_queries_per_kv, length], as :meth:`_stack` orders rows.
        """
        hidden = reference.is_hidden(keys, positions, rule).repeat_interleave(self._shape.num_queries_per_kv, -2)
        return torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, float("-inf"))


def _first_key(position: int, rule: AttentionRule) -> int:
    """Return the first position that a row sees."""
    begin = position - position % rule.chunk if rule.chunk else 0
    return max(begin, position + 1 - rule.window) if rule.window else begin


def _attend_tile(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rule: AttentionRule, *, sinks: Tensor | None
) -> Tensor:
    """Compute the attention of one tile of a chunk, as many KV heads at a time as have scores that fit into the cache.

    Args:
        query: [num_kv_heads, stacked rows, head_dim].
        key: [num_kv_heads, length, head_dim].
        value: Like ``key``.
        mask: float32 [stacked rows, k], added to the scores of the last k keys.
        rule: How scores are made.
        sinks: float32 [num_kv_heads, stacked rows, 1], a score that has no value; None: there is none.

    Returns:
        [num_kv_heads, stacked rows, head_dim].
    """
    if query.dtype != torch.bfloat16 and not rule.softcap and sinks is None:
        wide = F.pad(mask, (key.shape[1] - mask.shape[1], 0)).to(query.dtype)
        parts = (query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0))
        return F.scaled_dot_product_attention(*parts, wide, scale=rule.scale).squeeze(0)
    out = torch.empty_like(query)
    num_heads = max(1, _TILE_SCORES // (query.shape[1] * key.shape[1]))
    for begin in range(0, len(query), num_heads):
        heads = slice(begin, begin + num_heads)
        part = None if sinks is None else sinks[heads]
        out[heads] = _attend_by_products(query[heads], key[heads], value[heads], mask, rule, sinks=part)
    return out


def _attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rule: AttentionRule, *, sinks: Tensor | None
) -> Tensor:
    """Attend by two batched products. The scores keep 16 significant bits, although bfloat16 rounds to 8.

    ``low`` is the rounding error of ``high``: the same product with ``high`` subtracted from its float32 sums.

    Args:
        query: [..., rows, head_dim].
        key: [..., length, head_dim].
        value: Like ``key``.
        mask: Broadcasts to [..., rows, k], added to the scores of the last k keys.
        rule: How scores are made.
        sinks: float32, broadcasts to [..., rows, 1], a score that has no value; None: there is none.

    Returns:
        [..., rows, head_dim].
    """
    leading = query.shape[:-2]
    query, key, value = (part.reshape(-1, *part.shape[-2:]) for part in (query, key, value))
    if query.dtype == torch.float16:  # its range may be too small for a product that is not scaled yet
        query, key = query.float(), key.float()
    high = torch.bmm(query, key.transpose(1, 2))
    low = torch.baddbmm(high, query, key.transpose(1, 2), beta=-1)
    scores = high.float().add_(low).mul_(rule.scale).view(*leading, *high.shape[-2:])
    if rule.softcap:
        scores = reference.softcap(scores, rule.softcap)
    scores[..., scores.shape[-1] - mask.shape[-1] :].add_(mask)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]].to(value.dtype)
    return torch.bmm(weights.reshape(high.shape), value).view(*leading, *query.shape[-2:])


def _own_blocks(block_tables: Int32Array, kv_lens: Int32Array, shape: PoolShape) -> Int32Array:
    """Return the block tables, in which the first block of each sequence replaces the padding."""
    is_used = np.arange(block_tables.shape[1]) * shape.block_size < kv_lens[:, None]
    return np.where(is_used, block_tables, block_tables[:, :1])
