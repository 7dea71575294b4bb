"""What the memory of a GPU is for, decided before anything of a model is read: what does not fit is one error, at once.

Weights, pool and buffers are known to the byte. What torch takes for a while in a prefill, and what the driver takes
for graphs, are estimates on the safe side; what they do not use stays free. Whatever is asked for, something is kept
free of all of it: for libraries that load code and take work space late, and for torch's allocator, which rounds up and
leaves pieces that are too small.
"""

from __future__ import annotations

from dataclasses import replace

from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import BLOCK_SIZE, MemoryPlan
from ferrule_server.executor.cuda.buckets import bucket_sizes
from ferrule_server.executor.cuda.buffers import Limits, decode_buffer_bytes
from ferrule_server.executor.cuda.graphs import FIRST_GRAPH_BYTES, NODE_BYTES
from ferrule_server.executor.cuda.kernel_choice import shape_of
from ferrule_server.executor.cuda.options import GpuOptions
from ferrule_server.executor.host_plan import gib
from ferrule_server.executor.sizes import weights_bytes
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.flash_attention import GATHERED_BYTES, can_compute

_MIN_BLOCKS = 8
"""Fewer, the null block included, could not hold a prompt and a fork of it."""

_LIBRARY_BYTES = 128 << 20
"""Work space of cuBLAS, loaded kernels, and the pieces torch's allocator cannot use."""
_LOGIT_TILE_BYTES = 32 << 20
"""Of the float32 logits that torch has at a time; selecting from them takes three times as much besides."""
_ATTENTION_TILE_ROWS = 256
"""Rows of a chunk that torch attends at a time."""
_SCORE_BYTES = 16
"""Per score of such a tile: two bfloat16 products, float32 scores and weights, bfloat16 weights."""
_RULE_BYTES = 20
"""Per score in a model with windows, chunks, sinks or capped scores: the mask, and what capping scores or appending
sinks makes in between."""
_CLAMPED_INNER = 7
"""Rows as wide as the feed-forward part that a clamped SwiGLU holds at once, those of its projections included."""
_LAYER_LAUNCHES = 10
"""Of a step, per layer, at most: above 64 rows products, norms and activations are launches of their own."""
_BIAS_LAUNCHES = 1
"""And for each product of a layer that has a bias."""
_STEP_LAUNCHES = 11
"""Besides layers: embedding, norm, head, and what the largest kind of outputs adds."""
_LEAST_FREE_BYTES = 512 << 20
_LEAST_FREE_SHARE = 50
"""That much, and a part of the weights, always stays free: the context grows by the code that is loaded late (100 to
200 MiB), cuBLAS takes 32 MiB for each thread and stream, torch rounds what is large up to 2 MiB and cuts the rest from
blocks of 20 MiB."""


def num_launches(config: ModelConfig) -> int:
    """Return how many kernels one step of a model launches at most, of those that a graph holds."""
    num_biased = config.has_qkv_bias + config.has_attention_out_bias + 2 * config.has_mlp_bias
    return config.num_layers * (_LAYER_LAUNCHES + num_biased * _BIAS_LAUNCHES) + _STEP_LAUNCHES


def plan_memory(config: ModelConfig, options: GpuOptions, num_ctas: int) -> MemoryPlan:
    """Return what the memory of a GPU will be for.

    Args:
        config: Of the model.
        options: The size of the pool is rounded down to whole blocks; without one the fraction says how much others and
            this process may use in all. Something stays free in either case.
        num_ctas: The grid of attention on the kernels; 0: they are not used.

    Raises:
        ConfigError: It is too little.
    """
    plan = MemoryPlan(
        total=options.total_bytes,
        weights=weights_bytes(config, options.dtype),
        kv_pool=0,
        buffers=_buffer_bytes(config, options, num_ctas) if num_ctas else 0,
        workspace=_workspace_bytes(config, options),
        graphs=_graph_bytes(config, options.limits) if num_ctas else 0,
        free=0,
    )
    plan = replace(plan, free=options.free_bytes - plan.weights - plan.buffers - plan.workspace - plan.graphs)
    kv_bytes, fraction = options.kv_memory_bytes, options.memory_fraction
    spare = max(_spare_bytes(plan), 0 if kv_bytes is not None else int(plan.total * (1 - fraction)))
    left = plan.free - spare
    block_bytes = config.kv_values * BLOCK_SIZE * options.dtype.itemsize
    kv_pool = (left if kv_bytes is None else kv_bytes) // block_bytes * block_bytes
    if not _MIN_BLOCKS * block_bytes <= kv_pool <= left:
        asked = f"--gpu-memory-fraction {fraction}" if kv_bytes is None else f"--kv-memory {gib(kv_bytes)}"
        raise ConfigError(_complaint(plan, asked, spare, _MIN_BLOCKS * block_bytes))
    return replace(plan, kv_pool=kv_pool, free=plan.free - kv_pool)


def format_plan(plan: MemoryPlan) -> str:
    """Return a plan for people: a line for each use, in GiB, aligned."""
    lines = [("memory of the GPU", plan.total), *((f"  {name}", size) for name, size in _uses(plan).items())]
    return "\n".join(f"{name:<18}{gib(size):>12}" for name, size in lines)


def _uses(plan: MemoryPlan) -> dict[str, int]:
    """Return every part of the memory by name; they add up to all of it."""
    uses = {
        "weights": plan.weights,
        "KV pool": plan.kv_pool,
        "buffers": plan.buffers,
        "workspace": plan.workspace,
        "graphs": plan.graphs,
    }
    return {**uses, "others": plan.total - sum(uses.values()) - plan.free, "free": plan.free}


def _complaint(plan: MemoryPlan, asked: str, spare: int, least: int) -> str:
    """Return what is too little and what would do."""
    left = max(0, plan.free - spare)
    uses = ", ".join(f"{name} {gib(size)}" for name, size in _uses(plan).items() if size > 0 and name != "free")
    return (
        f"{asked}: of the {gib(plan.total)} of the GPU are for {uses}, and {gib(spare)} must stay free for PyTorch "
        f"and others; that leaves {gib(left)} for the KV pool, which needs at least {gib(least)}; change --kv-memory "
        "or --gpu-memory-fraction, lower --max-context, end other programs on the GPU, take a smaller model, or serve "
        "on the processor with --device cpu"
    )


def _buffer_bytes(config: ModelConfig, options: GpuOptions, num_ctas: int) -> int:
    """Return what the kernels need besides weights and pool: their buffers and the table of rotations."""
    rotations = options.max_context * config.head_dim * 4
    return decode_buffer_bytes(shape_of(config), options.limits, num_ctas) + rotations


def _graph_bytes(config: ModelConfig, limits: Limits) -> int:
    """Return what is kept for graphs: one of each size in any case; what is free takes further ones (``graphs.py``)."""
    return FIRST_GRAPH_BYTES + len(bucket_sizes(limits.max_rows)) * num_launches(config) * NODE_BYTES


def _spare_bytes(plan: MemoryPlan) -> int:
    """Return what nobody may plan with."""
    return _LEAST_FREE_BYTES + plan.weights // _LEAST_FREE_SHARE


def _workspace_bytes(config: ModelConfig, options: GpuOptions) -> int:
    """Return what torch takes at most for a prefill of one long sequence: activations, attention, logits."""
    dtype_bytes, max_context, max_rows = options.dtype.itemsize, options.max_context, options.max_step_rows
    qkv, group = shape_of(config).qkv_size, config.num_heads // config.num_kv_heads
    inner = (4 if config.clamped_swiglu is None else _CLAMPED_INNER) * config.intermediate_size
    activations = max_rows * dtype_bytes * (10 * config.hidden_size + 2 * qkv + inner)
    score_bytes = _SCORE_BYTES + (0 if can_compute(config) else _RULE_BYTES)
    scores = min(_ATTENTION_TILE_ROWS, max_rows) * group * max_context * score_bytes
    gathered = max(4 * max_context * config.num_kv_heads * config.head_dim * dtype_bytes, GATHERED_BYTES)
    return activations + scores + gathered + 4 * _LOGIT_TILE_BYTES + _LIBRARY_BYTES
