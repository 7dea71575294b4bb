"""Attention on tensor cores in the simulator, against plain torch with every query row on its own.

The tolerance is the one the kernel states: half a bf16 ulp of the output, and what rounding the weights to bf16 can add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda.attention_mma import ROWS, attention_mma, partial_bytes, shared_bytes
from ferrule_server.kernels.cuda.work_list import WorkList, make_work_list
from tests.kernels.cuda.simulator import Launch, Memory, from_bf16, run, to_bf16

EPS = 1e-6
LAYER, NUM_LAYERS = 1, 3
POOL_BYTES = 120 << 30
SEQS = ((97, 8, 8), (16, 1, 1))
"""KV tokens, query rows and new tokens of the sequences of most tests."""


@dataclass(frozen=True)
class Shape:
    """Constants of the kernel and the shape of the model around it."""

    head_dim: int = 64
    group: int = 2
    num_kv_heads: int = 2
    block_size: int = 16
    split: int = 64
    warps: int = 2
    has_qk_norm: bool = True
    is_tree: bool = False

    def constants(self) -> dict[str, bool | int]:
        """Return them by the kernel's names."""
        return {
            "HEAD_DIM": self.head_dim,
            "GROUP": self.group,
            "BLOCK_SIZE": self.block_size,
            "SPLIT": self.split,
            "WARPS": self.warps,
            "QK_NORM": self.has_qk_norm,
            "TREE": self.is_tree,
        }


@dataclass
class Step:
    """Some sequences, what is in the pool of them, and the rows that are attended."""

    shape: Shape
    seqs: tuple[tuple[int, int, int], ...]
    seed: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape, random = self.shape, np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)
        heads = (shape.group + 2) * shape.num_kv_heads
        starts = np.cumsum([0] + [rows for _, rows, _ in self.seqs])
        self.cu_seqlens_q = starts.astype(np.int32)
        self.qkv = torch.randn(int(starts[-1]), heads, shape.head_dim).bfloat16()
        self.qkv[:, -shape.num_kv_heads :] += 2.0
        self.q_norm, self.k_norm = (torch.rand(2, shape.head_dim) + 0.5).bfloat16()
        longest = max(kv_len for kv_len, _, _ in self.seqs) + 4
        angles = torch.outer(torch.arange(longest).float(), 10000 ** -(torch.arange(0, 1, 2 / shape.head_dim)))
        self.rope = torch.cat((angles.cos(), angles.sin()), -1)
        self.masks = random.integers(0, 1 << 32, (int(starts[-1]), 2), dtype=np.uint32)
        self.positions = np.zeros(int(starts[-1]), np.int32)
        self.block_tables = np.full((len(self.seqs), 2 + longest // shape.block_size), -1, np.int32)
        self.slots = np.full(int(starts[-1]), -1, np.int32)
        self.block_stride = NUM_LAYERS * self.layer_stride + 48
        last = POOL_BYTES // self.block_stride - 1
        ids = iter(last - random.permutation(200))
        for seq, (kv_len, rows, new) in enumerate(self.seqs):
            old = (kv_len - new, shape.num_kv_heads, shape.head_dim)
            self.keys.append(torch.randn(old).bfloat16())
            self.values.append((torch.randn(old) + 2.0).bfloat16())
            for block in range(-(-kv_len // shape.block_size)):
                self.block_tables[seq, block] = next(ids)
            begin, end = int(starts[seq]), int(starts[seq + 1])
            self.positions[begin:end] = self._positions(kv_len, rows, new, begin, random)
            for row, token in zip(range(end - new, end), range(kv_len - new, kv_len), strict=True):
                block = self.block_tables[seq, token // shape.block_size]
                self.slots[row] = block * shape.block_size + token % shape.block_size

    def _positions(self, kv_len: int, rows: int, new: int, begin: int, random: np.random.Generator) -> np.ndarray:
        """Return the rows' positions: in a row, or depths in a random tree whose masks are set."""
        positions = np.arange(kv_len - rows, kv_len)
        if self.shape.is_tree:
            seen: list[int] = []
            for j in range(new):
                parent = int(random.integers(-1, j)) if j else -1
                seen.append((seen[parent] if parent >= 0 else 0) | 1 << j)
                positions[rows - new + j] = kv_len - new + seen[-1].bit_count() - 1
            for i, bits in enumerate([0] * (rows - new) + seen):
                self.masks[begin + i] = (bits & 0xFFFFFFFF, bits >> 32)
        return positions

    @property
    def layer_stride(self) -> int:
        """Bytes, more than a layer takes."""
        return 4 * self.shape.num_kv_heads * self.shape.block_size * self.shape.head_dim + 32

    def place(self, seq: int, token: int) -> int:
        """Return where K of a token's first head lies in the pool."""
        block = int(self.block_tables[seq, token // self.shape.block_size])
        inside = token % self.shape.block_size * self.shape.head_dim * 2
        return block * self.block_stride + LAYER * self.layer_stride + inside

    def rotated(self) -> tuple[Tensor, Tensor]:
        """Return query and new keys as the decoder gives them to attention."""
        shape = self.shape
        num_heads = shape.group * shape.num_kv_heads
        parts = []
        for heads, weight in (
            (self.qkv[:, :num_heads], self.q_norm),
            (self.qkv[:, num_heads : -shape.num_kv_heads], self.k_norm),
        ):
            wide = heads.float()
            if shape.has_qk_norm:
                wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()
            cos, sin = self.rope[torch.from_numpy(self.positions).long()].chunk(2, -1)
            parts.append(reference.apply_rope(wide, cos, sin).bfloat16())
        return parts[0], parts[1]

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return the output in float32, not rounded, and how far from it the kernel may be: [rows, heads, head_dim]."""
        query, new_keys = self.rotated()
        out, bound = torch.empty(query.shape), torch.empty(query.shape)
        for seq, (kv_len, _, new) in enumerate(self.seqs):
            begin, end = self.cu_seqlens_q[seq : seq + 2].tolist()
            key = torch.cat((self.keys[seq], new_keys[end - new : end])).float()
            value = torch.cat((self.values[seq], self.qkv[end - new : end, -self.shape.num_kv_heads :])).float()
            for row in range(begin, end):
                sees = self._sees(row, kv_len, new)
                for head in range(query.shape[1]):
                    k, v = key[sees, head // self.shape.group], value[sees, head // self.shape.group]
                    weights = torch.softmax(k @ query[row, head].float() / math.sqrt(self.shape.head_dim), 0)
                    exact = weights @ v
                    out[row, head] = exact
                    bound[row, head] = 2**-8 * (weights @ (v - exact).abs()) + 2**-8 * exact.abs() + 1e-5
        return out, bound

    def _sees(self, row: int, kv_len: int, new: int) -> list[int]:
        if not self.shape.is_tree:
            return list(range(int(self.positions[row]) + 1))
        bits = int(self.masks[row, 0]) | int(self.masks[row, 1]) << 32
        return [*range(kv_len - new), *(kv_len - new + j for j in range(new) if bits >> j & 1)]

    def work_list(self, num_ctas: int) -> WorkList:
        """Return what each of so many CTAs does."""
        return make_work_list(
            cu_seqlens_q=self.cu_seqlens_q,
            kv_lens=np.array([kv_len for kv_len, _, _ in self.seqs], np.int32),
            num_new=np.array([new for _, _, new in self.seqs], np.int32),
            positions=self.positions,
            num_kv_heads=self.shape.num_kv_heads,
            rows_per_tile=ROWS // self.shape.group,
            num_ctas=num_ctas,
            split=self.shape.split,
            is_tree=self.shape.is_tree,
        )


class Simulation:
    """A step in simulated memory; ``run`` may be called again and again on it."""

    def __init__(self, step: Step, *, num_ctas: int = 3) -> None:
        self.step, shape = step, step.shape
        self.memory = memory = Memory()
        work = step.work_list(num_ctas)
        pool = memory.sparse("pool", POOL_BYTES)
        self.pool = pool
        for seq, (keys, values) in enumerate(zip(step.keys, step.values, strict=True)):
            for token in range(len(keys)):
                for head in range(shape.num_kv_heads):
                    for part, data in enumerate((keys, values)):
                        memory.write(self._address(seq, token, part, head), to_bf16(data[token, head].float().numpy()))
        put = memory.put
        self.arguments = (
            put("qkv", to_bf16(step.qkv.float().numpy()), mutable=True, offset=16),
            put("q_norm", to_bf16(step.q_norm.float().numpy()), offset=16),
            put("k_norm", to_bf16(step.k_norm.float().numpy())),
            put("rope", step.rope.numpy(), offset=16),
            put("positions", step.positions, mutable=True),
            put("slot_mapping", step.slots, mutable=True),
            put("block_tables", step.block_tables, mutable=True),
            put("items", work.items, mutable=True, offset=16),
            put("tickets", np.zeros(work.num_tiles, np.uint32), mutable=True),
            memory.empty("partials", (max(work.num_partials, 1), partial_bytes(shape.head_dim) // 4), np.float32),
            memory.empty("out", (len(step.qkv), shape.group * shape.num_kv_heads, shape.head_dim), np.uint16),
            pool,
            step.block_stride,
            step.layer_stride,
            LAYER,
            shape.num_kv_heads,
            step.block_tables.shape[1],
            EPS,
            put("masks", step.masks, mutable=True),
        )
        self.num_ctas = num_ctas

    def _address(self, seq: int, token: int, part: int, head: int) -> int:
        shape = self.step.shape
        inside = (part * shape.num_kv_heads + head) * shape.block_size * shape.head_dim * 2
        return self.pool + self.step.place(seq, token) + inside

    def run(self, *, seed: int, specialised: object = None) -> np.ndarray:
        """Run the kernel once; return the bits of the output."""
        shape = self.step.shape
        launch = Launch(
            attention_mma,
            shape.constants(),
            self.arguments,
            grid=self.num_ctas,
            num_threads=32 * shape.warps,
            shared_bytes=shared_bytes(shape.head_dim, WARPS=shape.warps),
            **({} if specialised is None else {"specialised": specialised}),
        )
        run(self.memory, [launch], seed=seed)
        return self.memory.get("out").copy()

    def appended(self, seq: int, token: int, part: int) -> np.ndarray:
        """Return K (0) or V (1) of a token in the pool: bits [num_kv_heads, head_dim]."""
        shape = self.step.shape
        addresses = [self._address(seq, token, part, head) for head in range(shape.num_kv_heads)]
        return np.stack([self.memory.read(address, (shape.head_dim,), np.uint16) for address in addresses])


def check(step: Step, bits: np.ndarray) -> None:
    """Compare an output with the definition."""
    expected, bound = step.expected()
    difference = (torch.from_numpy(from_bf16(bits)).reshape(expected.shape) - expected).abs()
    assert (difference <= bound).all(), f"worst {float((difference / bound).max()):.2f} of what is allowed"


def test_one() -> None:
    """Temporary."""
    step = Step(Shape(), SEQS)
    simulation = Simulation(step)
    check(step, simulation.run(seed=1))
