"""Cases of attention: batches of long sequences over shuffled blocks, one new token each, or several to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda import attention, attention_mma, partials, work_list
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from tools.gpu.cases import EPS, Case, Instance, random_bf16, worst, zeros
from tools.gpu.gpu import Call, Gpu

CONTEXT = 2048
BATCHES = (1, 8, 32)
VERIFY_ROWS = 8
_NAMES = ("GROUP", "ROWS", "HEAD_DIM", "TILE", "WARPS", "MAX_NEW_TOKENS", "SPLIT_TOKENS")


def cases_of(op: str, shape: ModelShape, specs: Sequence[KernelSpec] | None) -> list[Case]:
    """Return decode at several batches for the first kernel of the op, one batch for others."""
    module = attention if op == "attention" else attention_mma
    if specs:
        return [_case(shape, spec, 8) for spec in specs]
    default = module.specs(shape)[0]
    return [_case(shape, default, batch) for batch in BATCHES]


@dataclass(frozen=True)
class _Step:
    """A step that appends the last tokens of every sequence; all at the same length."""

    shape: ModelShape
    block_size: int
    batch: int
    rows: int

    @property
    def max_blocks(self) -> int:
        return -(-CONTEXT // self.block_size)

    def arrays(self) -> dict[str, np.ndarray[Any, np.dtype[np.int32]]]:
        """Return what the host writes each step."""
        order = np.random.default_rng(3).permutation(self.batch * self.max_blocks) + 1
        tables = order.reshape(self.batch, -1)
        positions = np.arange(CONTEXT - self.rows, CONTEXT)
        slots = tables[:, positions // self.block_size] * self.block_size + positions % self.block_size
        return {
            "positions": np.tile(positions, self.batch).astype(np.int32),
            "slot_mapping": slots.reshape(-1).astype(np.int32),
            "block_tables": tables.astype(np.int32),
        }

    def items(self, rows_per_tile: int, split: int, num_ctas: int, positions: Any) -> work_list.WorkList:
        """Return the work list."""
        return work_list.make_work_list(
            cu_seqlens_q=np.arange(0, self.batch * self.rows + 1, self.rows, dtype=np.int32),
            kv_lens=np.full(self.batch, CONTEXT, np.int32),
            num_new=np.full(self.batch, self.rows, np.int32),
            positions=positions,
            num_kv_heads=self.shape.num_kv_heads,
            rows_per_tile=rows_per_tile,
            num_ctas=num_ctas,
            split=split,
        )


def _case(shape: ModelShape, spec: KernelSpec, batch: int) -> Case:
    constants: dict[str, Any] = dict(spec.constants)
    is_mma = spec.kernel is attention_mma.attention_mma
    step = _Step(shape, constants["BLOCK_SIZE"], batch, VERIFY_ROWS if is_mma else constants["ROWS"])
    state: dict[str, Any] = {}

    def build(gpu: Gpu, index: int) -> Instance:
        return _instance(gpu, step, spec, state, index)

    num_bytes = 2 * batch * CONTEXT * shape.num_kv_heads * shape.head_dim * 2
    name = f"{'attention_mma' if is_mma else 'attention'} rows={step.rows} batch={batch} context={CONTEXT}"
    bar = 0.8 if not is_mma and batch == 8 else None
    return Case(name, [spec], num_bytes, build, bar, most_instances=shape.num_layers, state=state)


def instance(
    gpu: Gpu, shape: ModelShape, spec: KernelSpec, batch: int, *, state: dict[str, Any], layer: int
) -> Instance:
    """Return buffers of a decode step of some sequences, for one layer of the pool that ``state`` keeps."""
    constants: dict[str, Any] = dict(spec.constants)
    return _instance(gpu, _Step(shape, constants["BLOCK_SIZE"], batch, constants["ROWS"]), spec, state, layer)


def _instance(gpu: Gpu, step: _Step, spec: KernelSpec, state: dict[str, Any], layer: int) -> Instance:
    """Return one layer of a pool that all instances share: no layer is in a cache when its turn comes."""
    shape, constants = step.shape, dict(spec.constants)
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    if "pool" not in state:
        layers = 2 if gpu.is_dry else shape.num_layers
        inside = (2, kv_heads, step.block_size, head_dim)
        state["pool"] = random_bf16(gpu, (1 + step.batch * step.max_blocks, layers, *inside), 11)
    pool: Tensor = state["pool"]
    arrays = {name: torch.from_numpy(array).to(gpu.torch_device) for name, array in step.arrays().items()}
    is_mma = spec.kernel is attention_mma.attention_mma
    rows_per_tile = 16 // shape.group if is_mma else step.rows
    split: Any = constants["SPLIT_TOKENS"]
    items = step.items(rows_per_tile, split, gpu.num_sms * spec.ctas_per_sm, step.arrays()["positions"])
    partial_rows = attention_mma.ROWS if is_mma else attention.PADDED[shape.group * step.rows]
    size = partials.partial_bytes(rows=partial_rows, head_dim=head_dim)
    num_rows = step.batch * step.rows
    qkv = random_bf16(gpu, (num_rows, heads + 2 * kv_heads, head_dim), 100 + layer)
    q_norm, k_norm = (random_bf16(gpu, (head_dim,), 7 + i, 0.1) + 1 for i in range(2))
    frequencies = 1e6 ** -(torch.arange(0, head_dim, 2, device=gpu.torch_device) / head_dim)
    angles = torch.outer(torch.arange(CONTEXT, device=gpu.torch_device).float(), frequencies)
    out = random_bf16(gpu, (num_rows, heads, head_dim), 8)
    given: dict[str, Any] = {
        **arrays,
        "qkv": qkv,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "rope": torch.cat((angles.cos(), angles.sin()), -1),
        "items": torch.from_numpy(items.items).to(gpu.torch_device),
        "tickets": zeros(gpu, (items.num_tiles,), torch.int32),
        "partials": zeros(gpu, (max(1, items.num_partials), size), torch.uint8),
        "out": out,
        "pool": pool,
        "block_stride": pool.stride(0) * 2,
        "layer_stride": pool.stride(1) * 2,
        "layer": layer,
        "num_kv_heads": kv_heads,
        "max_blocks": step.max_blocks,
        "eps": EPS,
        "masks": zeros(gpu, (num_rows, 2), torch.int32),
    }
    norms = (q_norm, k_norm) if shape.has_qk_norm else (None, None)
    positions = arrays["positions"].long()

    def turned(values: Tensor, norm: Tensor | None) -> Tensor:
        wide = values.float()
        if norm is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * norm.float()
        return reference.apply_rope(wide, angles[positions].cos(), angles[positions].sin()).bfloat16()

    def attended(query: Tensor, dtype: torch.dtype) -> Tensor:
        """Attend with K and V laid out plainly: [batch, heads, rows or tokens, head_dim]."""
        kv = pool[arrays["block_tables"].long(), layer]  # [batch, blocks, 2, kv_heads, block_size, head_dim]
        key, value = kv.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).to(dtype)
        query = query.view(step.batch, step.rows, heads, head_dim).transpose(1, 2).to(dtype)
        is_seen = torch.arange(CONTEXT, device=query.device) <= positions[: step.rows].unsqueeze(1)
        made = F.scaled_dot_product_attention(query, key, value, attn_mask=is_seen, enable_gqa=True)
        return made.transpose(1, 2).reshape(num_rows, heads, head_dim)

    def expect() -> Tensor:
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
        reference.kv_append(pool, layer, turned(key, norms[1]), value, arrays["slot_mapping"])
        return attended(turned(query, norms[0]), torch.float32)

    plain: dict[str, Tensor] = {}

    def torch_op() -> Tensor:
        if not plain:  # gathered beforehand: torch reads what lies in one piece
            kv = pool[arrays["block_tables"].long(), layer]
            plain["key"], plain["value"] = kv.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).contiguous()
            plain["query"] = qkv[:, :heads].view(step.batch, step.rows, heads, head_dim).transpose(1, 2).contiguous()
        return F.scaled_dot_product_attention(plain["query"], plain["key"], plain["value"], enable_gqa=True)

    call = Call(spec, given, items.num_ctas)
    return Instance([call], [out], expect, lambda expected: worst(out, expected), torch_op)
