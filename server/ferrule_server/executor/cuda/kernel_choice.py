"""Which kernels run a step of a model: by the number of its rows, and whether bits must not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import torch

from ferrule_server.executor.cuda.driver import GpuInfo
from ferrule_server.kernels.cuda import (
    add_norm,
    attention,
    embed,
    gemm,
    gemv,
    head,
    logit_rows,
)
from ferrule_server.kernels.cuda.append import ROWS
from ferrule_server.kernels.cuda.catalog import OPS, merged
from ferrule_server.kernels.cuda.spec import SHARED_LIMITS, KernelSpec, LinearShape, ModelShape
from ferrule_server.model.config import ModelConfig, unknown_features

MAX_GEMV_ROWS = 2
"""Rows whose linears are products with vectors, the norm in front of them; above, tensor cores and a norm apart."""
MAX_GEMM_ROWS = gemm.MAX_TOKENS
"""Most rows whose linears may be kernels of ours."""
GEMM_ROWS = {8: 64, 9: 64, 10: 64, 12: 64}
"""Rows up to which they are, by major compute capability, from 2 to MAX_GEMM_ROWS; above, cuBLAS. An estimate."""
BLOCK_SIZES = (16, 32, 64)
"""Slots per block that the attention kernels know."""
HEAD_DIMS = (64, 128)
"""Widths of a head that they know."""
MAX_VOCAB_SIZE = min((1 << 20) - 1, 32 * logit_rows.DEFAULT_WARPS * logit_rows.DEFAULT_SLICE)
"""Logits of a row whose slices the threads of one CTA can fold; see ``logit_rows.num_slices``."""

KNOWN_FIELDS = frozenset(
    {
        "architecture", "vocab_size", "hidden_size", "num_heads", "max_positions", "layers", "norm_eps", "qk_norm",
        "is_tied", "has_qkv_bias", "has_attention_out_bias", "has_mlp_bias", "eos_ids",
    }
)  # fmt: skip
"""The fields of :class:`ModelConfig` that the kernels compute. A model that sets any other field runs in torch."""

_LOGIT_OPS = ("argmax", "sample", "log_sum_exp", "top_k")
"""Modules of which a step behind the logits may need everything."""


def shape_of(config: ModelConfig) -> ModelShape:
    """Return the sizes of a model that decide which kernels it needs."""
    same = [field.name for field in fields(ModelShape) if field.name != "has_qk_norm"]
    return ModelShape(**{name: getattr(config, name) for name in same}, has_qk_norm=config.qk_norm != "none")


def unsupported_reason(config: ModelConfig, dtype: torch.dtype, block_size: int) -> str:
    """Return why the kernels cannot run a model; empty if they can.

    A field that :data:`KNOWN_FIELDS` does not list is refused unless it has its default value.

    Args:
        config: The network.
        dtype: Type of weights, activations and KV.
        block_size: Slots per block of the pool.
    """
    group = config.num_heads // config.num_kv_heads
    sizes = {"a hidden_size": config.hidden_size, "an intermediate_size": config.intermediate_size}
    reasons = [f"{name} that is a multiple of 8, not {size}" for name, size in sizes.items() if size % 8]
    if dtype != torch.bfloat16:
        reasons.append(f"bfloat16, not {str(dtype).removeprefix('torch.')}")
    if config.head_dim not in HEAD_DIMS:
        reasons.append(f"heads of {' or '.join(map(str, HEAD_DIMS))} values, not {config.head_dim}")
    if group > ROWS:
        reasons.append(f"at most {ROWS} query heads per KV head, not {group}")
    if block_size not in BLOCK_SIZES:
        reasons.append(f"blocks of {' or '.join(map(str, BLOCK_SIZES))} tokens, not {block_size}")
    if config.vocab_size > MAX_VOCAB_SIZE:
        reasons.append(f"a vocabulary of at most {MAX_VOCAB_SIZE}, not {config.vocab_size}")
    reasons += unknown_features(config, KNOWN_FIELDS)
    return f"the kernels need {', '.join(reasons)}" if reasons else ""


def gemv_spec(linear: LinearShape, num_rows: int, limit: int) -> KernelSpec:
    """Return the kernel of a linear for one or two rows of a step, with the shared memory that its own size takes."""
    spec = gemv.planned(linear, M=num_rows, limit=limit)
    return replace(spec, shared_bytes=gemv.shared_bytes(linear.size, dict(spec.constants)))


def gemm_spec(linear: LinearShape, num_rows: int) -> KernelSpec:
    """Return the kernel of a linear for up to 64 rows of a step."""
    return gemm.spec(TILES=gemm.tiles_for(num_rows), EPILOGUE=linear.epilogue, BIAS=linear.has_bias)


def attention_spec(shape: ModelShape, block_size: int) -> KernelSpec:
    """Return the attention of every step."""
    return attention.spec(shape, BLOCK_SIZE=block_size)


def attention_grid(shape: ModelShape, gpu: GpuInfo) -> int:
    """Return the CTAs that the work list of a step is made for; no grid of the output head is larger."""
    return gpu.wave(attention_spec(shape, BLOCK_SIZES[0]))


def specs_needed(
    shape: ModelShape, *, is_deterministic: bool, block_size: int = 16, limit: int = SHARED_LIMITS[-1]
) -> list[KernelSpec]:
    """Return every kernel that steps of a model may launch, each once.

    Those are among ``catalog.kernels_of`` where blocks have 16 slots: no trees, and no products with vectors where bits
    must not depend on the number of rows.
    """
    logit_kernels = (spec for op in OPS if op.name in _LOGIT_OPS for spec in op.specs(shape))
    return merged([*_chain_specs(shape, is_deterministic, block_size, limit), *logit_kernels])


def _chain_specs(shape: ModelShape, is_deterministic: bool, block_size: int, limit: int) -> Iterator[KernelSpec]:
    """Yield the kernels from embedding to logits."""
    linears = shape.linears.values()
    yield embed.spec()
    if not is_deterministic:
        for num_rows in range(1, MAX_GEMV_ROWS + 1):
            yield from (gemv_spec(linear, num_rows, limit) for linear in linears)
            yield head.planned(shape, M=num_rows, limit=limit)
    for tiles in gemm.TILES_BUILT:
        yield from (gemm_spec(linear, 8 * tiles) for linear in (*linears, shape.head))
    yield add_norm.spec(shape.hidden_size, ADD=False)
    if not is_deterministic:
        yield add_norm.spec(shape.hidden_size, ADD=True)
    yield attention_spec(shape, block_size)
