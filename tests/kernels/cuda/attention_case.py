"""Steps for attention: sequences, what is in the pool of them, and the answer in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda.append import rope_table
from ferrule_server.kernels.cuda.work_list import WorkList, make_work_list
from tools.cuda_simulator import Memory, to_bf16

__all__ = ["EPS", "LAYER", "Seq", "Shape", "Step", "bits", "pool_bytes", "set_pool_bytes"]

EPS = 1e-6
LAYER, NUM_LAYERS = 1, 3
THETA = 10000.0
_POOL = {"bytes": 120 << 30}


def pool_bytes() -> int:
    """Return the size of the pool that steps are placed at the end of: 120 GiB, or what was set."""
    return _POOL["bytes"]


def set_pool_bytes(num_bytes: int) -> None:
    """Set the size of the pool, before any step is made: a GPU has less memory than the simulator.

    Args:
        num_bytes: More than 8 GiB, so that 32 bits count neither the bytes nor the values before the last block.
    """
    assert num_bytes > 8 << 30, num_bytes
    _POOL["bytes"] = num_bytes


@dataclass(frozen=True)
class Shape:
    """Of the model and its pool; strides in bytes are larger than they need be."""

    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    has_qk_norm: bool = True

    @property
    def layer_stride(self) -> int:
        """Bytes from layer to layer of a block."""
        return 4 * self.num_kv_heads * self.block_size * self.head_dim + 32

    @property
    def block_stride(self) -> int:
        """Bytes from block to block."""
        return NUM_LAYERS * self.layer_stride + 48


@dataclass(frozen=True)
class Seq:
    """A sequence of a step: tokens, rows in the step, and how many of these are new (the last ones)."""

    kv_len: int
    rows: int = 1
    new: int = 1


@dataclass
class Step:
    """Random K, V and projections of some sequences, and where everything lies.

    Attributes:
        shape: Of the model.
        seqs: In the order of the step.
        seed: Of all random numbers but block ids; a sequence's own depend on nothing else in the step.
        without_slot: Rows that are new but not to be written.
        inverse_frequencies: Of the rotation, the plain ones if None.
    """

    shape: Shape
    seqs: tuple[Seq, ...]
    seed: int = 0
    without_slot: tuple[int, ...] = ()
    inverse_frequencies: Tensor | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Draw what is not given."""
        shape = self.shape
        heads = (shape.group + 2) * shape.num_kv_heads
        self.cu_seqlens_q = np.cumsum([0] + [seq.rows for seq in self.seqs]).astype(np.int32)
        self.kv_lens = np.array([seq.kv_len for seq in self.seqs], np.int32)
        self.num_new = np.array([seq.new for seq in self.seqs], np.int32)
        self.positions = np.concatenate([np.arange(seq.kv_len - seq.rows, seq.kv_len) for seq in self.seqs]).astype(
            np.int32
        )
        norms = torch.Generator().manual_seed(self.seed)
        self.q_norm, self.k_norm = (torch.rand((2, shape.head_dim), generator=norms) + 0.5).bfloat16()
        if self.inverse_frequencies is None:
            self.inverse_frequencies = THETA ** -torch.arange(0, 1, 2 / shape.head_dim)
        self.rope = rope_table(self.inverse_frequencies, int(self.kv_lens.max()) + 3)
        rows = []
        for seq in self.seqs:
            random = torch.Generator().manual_seed(self.seed * 1000003 + seq.kv_len * 101 + seq.rows)
            rows.append(torch.randn((seq.rows, heads, shape.head_dim), generator=random).bfloat16())
            old = (seq.kv_len - seq.new, shape.num_kv_heads, shape.head_dim)
            self.keys.append((2 * torch.randn(old, generator=random)).bfloat16())
            self.values.append((torch.randn(old, generator=random) + 1).bfloat16())
        self.qkv = torch.cat(rows)
        self._place_blocks()

    def _place_blocks(self) -> None:
        """Give the sequences blocks at the very end of the pool, in no order, and the new rows their slots."""
        size = self.shape.block_size
        width = int(-(-self.kv_lens.max() // size)) + 2
        last = pool_bytes() // self.shape.block_stride - 1
        ids = iter(last - np.random.default_rng(self.seed).permutation(width * len(self.seqs)))
        self.block_tables = np.zeros((len(self.seqs), width), np.int32)
        self.slots = np.full(len(self.positions), -1, np.int32)
        for index, seq in enumerate(self.seqs):
            num_blocks = -(-seq.kv_len // size)
            self.block_tables[index, :num_blocks] = [next(ids) for _ in range(num_blocks)]
            for row in range(int(self.cu_seqlens_q[index + 1]) - seq.new, int(self.cu_seqlens_q[index + 1])):
                if row not in self.without_slot:
                    block, inside = divmod(int(self.positions[row]), size)
                    self.slots[row] = self.block_tables[index, block] * size + inside

    def place(self, index: int, token: int, part: int, head: int) -> int:
        """Return where K (part 0) or V (1) of a token's head lies in the pool, in bytes."""
        shape = self.shape
        block, inside = divmod(token, shape.block_size)
        row = (part * shape.num_kv_heads + head) * shape.block_size + inside
        base = int(self.block_tables[index, block]) * shape.block_stride
        return base + LAYER * shape.layer_stride + row * shape.head_dim * 2

    def fill(self, memory: Memory, pool: int) -> None:
        """Write NaN into every byte of the blocks of the tables, whatever was there, then all old tokens."""
        nothing = np.full(self.shape.block_stride, 0xFF, np.uint8)
        for block in np.unique(self.block_tables):
            memory.write(pool + int(block) * self.shape.block_stride, nothing)
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            for part, data in enumerate((bits(keys), bits(values))):
                for token, head in np.ndindex(*data.shape[:2]):
                    memory.write(pool + self.place(index, token, part, head), data[token, head])

    def prepared(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normalised and rotated, and values of all rows: bf16 [rows, heads, head_dim]."""
        shape = self.shape
        assert self.inverse_frequencies is not None
        angles = reference.rope_angles(torch.from_numpy(self.positions), self.inverse_frequencies)
        sizes = [shape.group * shape.num_kv_heads, shape.num_kv_heads, shape.num_kv_heads]
        query, key, value = torch.split(self.qkv, sizes, dim=1)
        weights = (self.q_norm, self.k_norm) if shape.has_qk_norm else (None, None)
        query = reference.qk_norm_rope(query, weights[0], EPS, *angles)
        return query, reference.qk_norm_rope(key, weights[1], EPS, *angles), value

    def expected(self) -> Tensor:
        """Return the output before it is rounded: float32 [rows, num_heads, head_dim]."""
        shape = self.shape
        query, key, value = self.prepared()
        width = self.block_tables.shape[1]
        tables = torch.arange(len(self.seqs) * width).reshape(len(self.seqs), width)
        pool = torch.zeros(tables.numel(), 1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        for index, seq in enumerate(self.seqs):
            end = int(self.cu_seqlens_q[index + 1])
            slots = torch.arange(seq.kv_len) + index * width * shape.block_size
            keys = torch.cat((self.keys[index], key[end - seq.new : end])).float()
            reference.kv_append(
                pool, 0, keys, torch.cat((self.values[index], value[end - seq.new : end])).float(), slots
            )
        return reference.paged_attention(
            query.float(),
            pool,
            0,
            positions=torch.from_numpy(self.positions),
            cu_seqlens_q=torch.from_numpy(self.cu_seqlens_q),
            kv_lens=torch.from_numpy(self.kv_lens),
            block_tables=tables,
        )

    def work_list(self, num_ctas: int, *, rows_per_tile: int, split: int, is_tree: bool) -> WorkList:
        """Return what each of so many CTAs does."""
        return make_work_list(
            cu_seqlens_q=self.cu_seqlens_q,
            kv_lens=self.kv_lens,
            num_new=self.num_new,
            positions=self.positions,
            num_kv_heads=self.shape.num_kv_heads,
            rows_per_tile=rows_per_tile,
            num_ctas=num_ctas,
            split=split,
            is_tree=is_tree,
        )


def bits(values: Tensor) -> NDArray[np.uint16]:
    """Return the bits of bf16 values."""
    assert values.dtype == torch.bfloat16
    return to_bf16(values.float().numpy())
