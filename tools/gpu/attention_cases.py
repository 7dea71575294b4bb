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
from ferrule_server.kernels.cuda import attention, work_list
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from tools.gpu.cases import EPS, Case, Instance, random_bf16, worst, zeros
from tools.gpu.gpu import Call, Gpu

CONTEXT, SHORT_CONTEXT = 2048, 256
BATCHES = (1, 8, 32)
VERIFY_ROWS = 8
SHORT_SPLIT = 64
"""What is tried in place of ``work_list.SPLIT``: at batch 1 more CTAs have something to do."""


def cases_of(shape: ModelShape, specs: Sequence[KernelSpec] | None) -> list[Case]:
    """Return decodes and verifies at several batches, single decodes with short splits too; given kernels at one."""
    if specs:
        return [_case(_Step(shape, spec, CONTEXT, 8)) for spec in specs]
    default, short = attention.spec(shape), attention.spec(shape, SPLIT_TOKENS=SHORT_SPLIT)
    steps = [_Step(shape, default, CONTEXT, batch) for batch in BATCHES]
    steps += [_Step(shape, short, CONTEXT, 1), *(_Step(shape, spec, SHORT_CONTEXT, 1) for spec in (default, short))]
    steps += [_Step(shape, default, CONTEXT, batch, VERIFY_ROWS) for batch in BATCHES]
    return [_case(step) for step in steps]


@dataclass(frozen=True)
class _Step:
    """A step that appends the last tokens of every sequence; all at the same length."""

    shape: ModelShape
    spec: KernelSpec
    context: int
    batch: int
    rows: int = 1

    @property
    def split(self) -> int:
        return int(dict(self.spec.constants)["SPLIT_TOKENS"])  # type: ignore[arg-type]

    @property
    def block_size(self) -> int:
        return int(dict(self.spec.constants)["BLOCK_SIZE"])  # type: ignore[arg-type]

    @property
    def max_blocks(self) -> int:
        return -(-self.context // self.block_size)

    def arrays(self) -> dict[str, np.ndarray[Any, np.dtype[np.int32]]]:
        """Return what the host writes each step."""
        order = np.random.default_rng(3).permutation(self.batch * self.max_blocks) + 1
        tables = order.reshape(self.batch, -1)
        positions = np.arange(self.context - self.rows, self.context)
        slots = tables[:, positions // self.block_size] * self.block_size + positions % self.block_size
        return {
            "positions": np.tile(positions, self.batch).astype(np.int32),
            "slot_mapping": slots.reshape(-1).astype(np.int32),
            "block_tables": tables.astype(np.int32),
        }

    def work_list(self, num_sms: int) -> work_list.WorkList:
        """Return the work list."""
        return work_list.make_work_list(
            cu_seqlens_q=np.arange(0, self.batch * self.rows + 1, self.rows, dtype=np.int32),
            kv_lens=np.full(self.batch, self.context, np.int32),
            num_new=np.full(self.batch, self.rows, np.int32),
            positions=self.arrays()["positions"],
            num_kv_heads=self.shape.num_kv_heads,
            rows_per_tile=16 // self.shape.group,
            num_ctas=num_sms * self.spec.ctas_per_sm,
            split=self.split,
        )


def _case(step: _Step) -> Case:
    shape, state = step.shape, dict[str, Any]()

    def build(gpu: Gpu, index: int) -> Instance:
        return _instance(gpu, step, state, index)

    num_bytes = 2 * step.batch * step.context * shape.num_kv_heads * shape.head_dim * 2
    name = f"attention rows={step.rows} batch={step.batch} context={step.context}"
    name += f" split={step.split}"
    bar = 0.8 if (step.rows, step.batch) == (1, 8) else None
    return Case(name, [step.spec], num_bytes, build, bar, most_instances=shape.num_layers, state=state)


def instance(
    gpu: Gpu, shape: ModelShape, spec: KernelSpec, batch: int, *, state: dict[str, Any], layer: int
) -> Instance:
    """Return buffers of a decode step of some sequences, for one layer of the pool that ``state`` keeps."""
    return _instance(gpu, _Step(shape, spec, CONTEXT, batch), state, layer)


def _instance(gpu: Gpu, step: _Step, state: dict[str, Any], layer: int) -> Instance:
    """Return one layer of a pool that all instances share: no layer is in a cache when its turn comes."""
    shape = step.shape
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    if "pool" not in state:
        layers = 2 if gpu.is_dry else shape.num_layers
        inside = (2, kv_heads, step.block_size, head_dim)
        state["pool"] = random_bf16(gpu, (1 + step.batch * step.max_blocks, layers, *inside), 11)
    pool: Tensor = state["pool"]
    arrays = {name: torch.from_numpy(array).to(gpu.torch_device) for name, array in step.arrays().items()}
    work = step.work_list(gpu.num_sms)
    num_rows = step.batch * step.rows
    qkv = random_bf16(gpu, (num_rows, heads + 2 * kv_heads, head_dim), 100 + layer)
    q_norm, k_norm = (random_bf16(gpu, (head_dim,), 7 + i, 0.1) + 1 for i in range(2))
    frequencies = 1e6 ** -(torch.arange(0, head_dim, 2, device=gpu.torch_device) / head_dim)
    angles = torch.outer(torch.arange(step.context, device=gpu.torch_device).float(), frequencies)
    out = random_bf16(gpu, (num_rows, heads, head_dim), 8)
    given: dict[str, Any] = {
        **arrays,
        "qkv": qkv,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "rope": torch.cat((angles.cos(), angles.sin()), -1),
        "items": torch.from_numpy(work.items).to(gpu.torch_device),
        "tickets": zeros(gpu, (work.num_tiles,), torch.int32),
        "partials": zeros(gpu, (max(1, work.num_places), shape.group, head_dim + 4), torch.float32),
        "out": out,
        "pool": pool,
        "block_stride": pool.stride(0) * 2,
        "layer_stride": pool.stride(1) * 2,
        "layer": layer,
        "num_kv_heads": kv_heads,
        "max_blocks": step.max_blocks,
        "eps": EPS,
        "masks": zeros(gpu, (num_rows,), torch.int64),
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
        is_seen = torch.arange(step.context, device=query.device) <= positions[: step.rows].unsqueeze(1)
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

    call = Call(step.spec, given, work.num_ctas)
    return Instance([call], [out], expect, lambda expected: worst(out, expected), torch_op)
