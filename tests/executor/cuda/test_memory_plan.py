"""The plan of the memory: it adds up, it is kept, and what does not fit is refused with what would do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import MemoryPlan
from ferrule_server.executor.block_pool import bytes_per_block
from ferrule_server.executor.cuda import linears
from ferrule_server.executor.cuda.buckets import bucket_sizes
from ferrule_server.executor.cuda.choices import OutputKind
from ferrule_server.executor.cuda.gpu import Operation
from ferrule_server.executor.cuda.graphs import NODE_BYTES, GraphKey
from ferrule_server.executor.cuda.memory_plan import format_plan, num_launches, plan_memory
from ferrule_server.executor.cuda.options import GpuOptions
from ferrule_server.executor.cuda.runner import CudaDecodeRunner
from ferrule_server.executor.sizes import weights_bytes
from ferrule_server.model.config import CheckpointNames, ClampedSwiglu, ModelConfig
from ferrule_server.model.families.gemma import GEMMA_TENSORS
from ferrule_server.model.tensors import allocate
from tests.configs import uniform_config, with_layers
from tests.executor.cuda.fake_gpu import FakeGpu, FakeLaunch
from tests.executor.cuda.tiny_model import tiny_executor
from tests.executor.cuda.toy_runner import cubins_of, limits_of

GIB = 1 << 30
QWEN3_8B = uniform_config(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=40960,
    rope_theta=1e6,
    qk_norm="head",
)
TINY = with_layers(
    replace(QWEN3_8B, vocab_size=1001, hidden_size=64, num_heads=8), num_layers=2, intermediate_size=72, head_dim=64
)
MIXED_HEADS = (TINY.layers[0], with_layers(TINY, head_dim=32, num_kv_heads=2).layers[0])
BLOCK_BYTES = bytes_per_block(QWEN3_8B, 16, torch.bfloat16)


def plan(config: ModelConfig = QWEN3_8B, **changed: Any) -> MemoryPlan:
    """Return the plan of an H100, with some things changed."""
    settings: dict[str, Any] = {
        "total_bytes": 80 * GIB,
        "free_bytes": 79 * GIB,
        "device": "cuda:0",
        "dtype": torch.bfloat16,
        "max_context": 40960,
    } | changed
    num_ctas = settings.pop("num_ctas", 132)
    return plan_memory(config, GpuOptions(**settings), num_ctas)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"is_tied": True},
        {"has_qkv_bias": True, "has_attention_out_bias": True, "has_mlp_bias": True},
        {"qk_norm": "none", "layers": with_layers(TINY, num_kv_heads=4).layers},
        {"hidden_size": 96, "layers": with_layers(TINY, head_dim=10, num_layers=3).layers},
        {"layers": with_layers(TINY, has_sinks=True).layers},
        {"names": CheckpointNames(GEMMA_TENSORS), "norm_offset": 1.0, "has_norm_after": True, "layers": MIXED_HEADS},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_take_what_the_loader_allocates(changed: dict[str, Any], dtype: torch.dtype) -> None:
    """To the byte, from the configuration alone."""
    config = replace(TINY, **changed)
    _, places = allocate(config, dtype, lambda shape, dtype: torch.empty(*shape, dtype=dtype, device="meta"))
    assert weights_bytes(config, dtype) == sum(place.tensor.nbytes for place in places.values())


def test_weights_of_a_well_known_model_take_what_its_card_says() -> None:
    """8.19 billion parameters of two bytes."""
    assert weights_bytes(QWEN3_8B, torch.bfloat16) == 2 * 8_190_735_360


def test_a_pool_of_layers_with_other_heads_takes_the_sum_of_all() -> None:
    """One layer of 8 heads of 64 values, and one of 2 of 32."""
    config = replace(TINY, layers=MIXED_HEADS)
    made = plan(config, kv_memory_bytes=GIB, num_ctas=0)
    block = 2 * (8 * 64 + 2 * 32) * 16 * 2
    assert made.kv_pool == GIB // block * block


@pytest.mark.parametrize(
    "config",
    [
        with_layers(TINY, window=64),
        with_layers(TINY, chunk=64),
        with_layers(TINY, has_sinks=True),
        replace(TINY, score_softcap=30.0),
        replace(TINY, clamped_swiglu=ClampedSwiglu(7.0, 1.7)),
    ],
    ids=["window", "chunk", "sinks", "cap", "clamped"],
)
def test_what_a_plain_model_lacks_takes_work_space(config: ModelConfig) -> None:
    """Torch makes masks, copies scores to cap them or to add sinks, and clamps each half of a product."""
    assert plan(config, num_ctas=0).workspace > plan(TINY, num_ctas=0).workspace


@given(
    st.integers(1, 200),
    st.integers(0, 200),
    st.floats(0.05, 1.0),
    st.one_of(st.none(), st.integers(0, 100 * GIB)),
    st.booleans(),
)
def test_every_plan_adds_up(total: int, free: int, fraction: float, kv_bytes: int | None, has_kernels: bool) -> None:
    """Nothing is given out twice, nothing is negative, and the setting is kept."""
    assume(free <= total)
    total_bytes, free_bytes = total * GIB, free * GIB
    sizes: dict[str, Any] = {"total_bytes": total_bytes, "free_bytes": free_bytes}
    num_ctas = 132 if has_kernels else 0
    try:
        made = plan(memory_fraction=fraction, kv_memory_bytes=kv_bytes, num_ctas=num_ctas, **sizes)
    except ConfigError:
        return
    used = made.weights + made.kv_pool + made.buffers + made.workspace + made.graphs
    assert made.total == total_bytes
    assert used + made.free == free_bytes
    assert made.free >= 0
    assert made.kv_pool % BLOCK_BYTES == 0
    assert made.kv_pool >= 8 * BLOCK_BYTES
    assert made.free >= (512 << 20) + made.weights // 50
    if kv_bytes is None:
        left = made.free - max(total_bytes * (1 - fraction), (512 << 20) + made.weights // 50)
        assert -1 <= left < BLOCK_BYTES
    else:
        assert kv_bytes - BLOCK_BYTES < made.kv_pool <= kv_bytes


@pytest.mark.parametrize("total", [GIB, 17 * GIB, 19 * GIB, 40 * GIB])
@pytest.mark.parametrize("kv_bytes", [None, 100, 2 * GIB, 30 * GIB])
def test_what_fits_is_not_refused(total: int, kv_bytes: int | None) -> None:
    """A pool of eight blocks at least, of the size asked for."""
    need = plan(kv_memory_bytes=GIB)
    fixed = need.weights + need.buffers + need.workspace + need.graphs
    least_free = (512 << 20) + need.weights // 50
    left = total - fixed - (max(total - int(total * 0.9), least_free) if kv_bytes is None else least_free)
    fits = left > 9 * BLOCK_BYTES and (kv_bytes is None or 8 * BLOCK_BYTES <= kv_bytes <= left)
    if fits:
        assert plan(total_bytes=total, free_bytes=total, kv_memory_bytes=kv_bytes).kv_pool > 0
    else:
        with pytest.raises(ConfigError):
            plan(total_bytes=total, free_bytes=total, kv_memory_bytes=kv_bytes)


def test_more_than_the_fraction_may_be_asked_for() -> None:
    """A size of the pool is taken at its word, as long as there is memory."""
    assert plan(memory_fraction=0.1, kv_memory_bytes=GIB).kv_pool == GIB // BLOCK_BYTES * BLOCK_BYTES


def test_without_kernels_nothing_is_kept_for_them() -> None:
    """Torch alone needs neither buffers nor graphs; the pool gets what they would take."""
    alone, both = plan(num_ctas=0), plan()
    assert (alone.buffers, alone.graphs) == (0, 0)
    gained = alone.kv_pool - both.kv_pool
    assert abs(gained - both.buffers - both.graphs) < BLOCK_BYTES
    assert alone.workspace == both.workspace


@pytest.mark.parametrize(
    "changed", [{"kv_memory_bytes": 60 * GIB}, {"memory_fraction": 1.0}, {"memory_fraction": 0.995}], ids=str
)
def test_something_stays_free_whatever_is_asked_for(changed: dict[str, Any]) -> None:
    """For cuBLAS, modules that are loaded late, and pieces of memory that torch cannot use; else prompts run out."""
    floor = (512 << 20) + weights_bytes(QWEN3_8B, torch.bfloat16) // 50
    assert plan(**changed).free >= floor
    with pytest.raises(ConfigError, match=rf"^--kv-memory .* {floor / GIB:.2f} GiB must stay free .* that leaves"):
        plan(kv_memory_bytes=plan(memory_fraction=1.0).kv_pool + BLOCK_BYTES)
    with pytest.raises(ConfigError, match="must stay free"):
        plan(free_bytes=plan(kv_memory_bytes=GIB).weights + (2 << 30), memory_fraction=1.0)


def test_graphs_are_planned_by_their_launches() -> None:
    """One of each size: more layers, more memory; a launch counts for what ``graphs.py`` says."""
    half = plan(with_layers(QWEN3_8B, num_layers=18)).graphs
    per_graph = 18 * 10 * NODE_BYTES
    assert plan().graphs - half == per_graph * len(bucket_sizes(256))
    assert 300 << 20 < plan().graphs < GIB


def _runner(kind: str) -> tuple[CudaDecodeRunner, ModelConfig]:
    """Return a runner of a tiny model whose kernels do not run."""
    gpu, executor = FakeGpu(), tiny_executor(kind)
    made = CudaDecodeRunner(
        cubins_of(executor),
        gpu=gpu,
        torch_executor=executor,
        limits=limits_of(80),
    )
    return made, executor.info.model.config


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_step_has_no_more_launches_than_planned(kind: str) -> None:
    """Of any size and kind, of a real chain."""
    runner, config = _runner(kind)
    for num_rows in (1, 2, 4, 64, 80):
        for output_kind in OutputKind:
            operations = runner._operations(GraphKey(num_rows, output_kind, keeps_rows=True))
            launches = sum(_num_kernels(operation) for operation in operations)
            assert launches <= num_launches(config), (num_rows, output_kind)


@pytest.mark.parametrize(("num_rows", "per_layer", "besides"), [(1, 5, 2), (2, 5, 2), (3, 7, 4), (64, 7, 4)])
def test_launches_of_a_decode_step(num_rows: int, per_layer: int, besides: int) -> None:
    """At one row 5 per layer and 2: 142 for 28 layers of Qwen3-0.6B, 182 for 36 of Qwen3-8B; choices add few."""
    runner, config = _runner("qwen3")
    chain = per_layer * config.num_layers + besides
    more = {OutputKind.GREEDY: 0, OutputKind.SAMPLE: 2, OutputKind.SCORE: 3, OutputKind.TOP: 4}
    assert {kind: len(runner._operations(GraphKey(num_rows, kind))) - chain for kind in more} == more


def _num_kernels(operation: Operation) -> int:
    """Return how many kernels an operation launches; one of torch may be two."""
    if isinstance(operation, FakeLaunch):
        return 1
    assert isinstance(operation, partial)
    is_two = operation.func in (linears._swiglu_out, linears._logits_out)
    return 2 if is_two or operation.args[3] is not None else 1


def test_longer_contexts_and_larger_steps_need_more_workspace() -> None:
    """What torch takes for a prefill grows with both."""
    usual = plan().workspace
    assert plan(max_context=2048).workspace < usual < plan(max_step_rows=4096).workspace
    assert usual > 40960 * 1024 * 8  # scores of one tile of rows in bfloat16 and float32


def test_too_little_memory_names_numbers_and_settings() -> None:
    """One sentence says what takes what and which settings change it."""
    with pytest.raises(ConfigError) as refused:
        plan(total_bytes=16 * GIB, free_bytes=15 * GIB)
    text = str(refused.value)
    for part in ("--gpu-memory-fraction 0.9", "16.00 GiB", "weights 15.26 GiB", "others 1.00 GiB"):
        assert part in text
    for way_out in ("--kv-memory", "--max-context", "--device cpu"):
        assert way_out in text
    assert ", free" not in text
    with pytest.raises(ConfigError, match=r"^--kv-memory 70.00 GiB: .* leaves 6[01].\d\d GiB"):
        plan(kv_memory_bytes=70 * GIB)


def test_a_plan_for_people_is_aligned_and_adds_up() -> None:
    """A line for each use; the numbers end in one column."""
    lines = format_plan(plan()).splitlines()
    assert len({len(line) for line in lines}) == 1
    sizes = {line[:18].strip(): float(line[18:].removesuffix("GiB")) for line in lines}
    assert list(sizes)[:3] == ["memory of the GPU", "weights", "KV pool"]
    assert sizes["weights"] == 15.26
    assert sum(sizes.values()) == pytest.approx(2 * sizes["memory of the GPU"], abs=0.05)
