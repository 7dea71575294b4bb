"""Small random models for the executor of processors, and executors that run them."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.make_random_model import write_model
from ferrule_server.executor.cpu.crowding import ThreadCount
from ferrule_server.executor.cpu.executor import CpuOptions, NumbaCpuExecutor, Prepared, prepare
from ferrule_server.executor.cpu.weights import Packer, packed_kind, wanted_kernels
from ferrule_server.executor.cpu.workers import Workers
from ferrule_server.kernels.cpu.compiled import Kernels, Wanted, compile_kernels, usable_cache
from ferrule_server.kernels.cpu.plan import Instructions, Plan, WeightKind
from ferrule_server.kernels.cpu.processor import target_features
from ferrule_server.kernels.cpu.sync import _IS_ABORTED
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.tensors import ModelWeights
from ferrule_server.model.weights import DTypeName, load_model

DEMO = Path(__file__).parents[3] / "server" / "ferrule_server" / "demo_model"
HAS_AVX512_BF16 = bool(target_features().get("avx512bf16"))
KERNEL_SETS: tuple[tuple[Instructions, bool], ...] = (
    ("fma", False),
    ("avx512-bf16", not HAS_AVX512_BF16),
    ("amx-bf16", True),
)
"""The instructions of bfloat16 models, and whether they are emulated here (``test_dot`` tests the emulation itself)."""

HAS_VNNI = bool(target_features().get("avx512vnni"))
QUANTISED_SETS: tuple[tuple[Instructions, bool], ...] = (("fma", False), ("avx512-vnni", not HAS_VNNI))
"""The instructions of quantised models, and whether they are emulated here."""


def kernel_set_name(kernels: tuple[Instructions, bool]) -> str:
    """Return the id of a test that runs a kernel set."""
    return f"{kernels[0]}{' emulated' if kernels[1] else ''}"


AWKWARD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1003, "hidden_size": 144,
    "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 96, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "hidden_act": "silu", "eos_token_id": 1,
}  # fmt: skip
"""No size is a multiple of what the kernels work in; every layer has biases, and no norm of heads."""


def write_tiny(folder: Path) -> Path:
    """Write a Qwen3 with heads of 32."""
    write_model(folder, "tiny")
    return folder


def write_awkward(folder: Path) -> Path:
    """Write a random model of the configuration :data:`AWKWARD`."""
    config = AWKWARD
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    linears = {
        "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    shapes = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (config["vocab_size"], hidden))
    tensors: dict[str, tuple[int, ...]] = {**shapes, "model.norm.weight": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        tensors |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, shape in linears.items():
            tensors |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
    generator = torch.Generator().manual_seed(5)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    values = {
        name: torch.randn(shape, generator=generator) * 0.15 + (1.0 if "norm" in name else 0.0)
        for name, shape in tensors.items()
    }
    save_file({name: value.bfloat16() for name, value in values.items()}, folder / "model.safetensors")
    return folder


def plan_of(
    config: ModelConfig,
    dtype: DTypeName,
    instructions: Instructions = "fma",
    weights: WeightKind = "float",
    *,
    is_emulated: bool = False,
    has_int8_inputs: bool = False,
) -> Plan:
    """Return how kernels of a model are compiled in a test."""
    return Plan(
        instructions=instructions,
        is_emulated=is_emulated,
        is_bfloat16=dtype == "bfloat16",
        head_dim=config.head_dim,
        packed=packed_kind(config, weights),
        has_int8_inputs=has_int8_inputs,
    )


KV_BYTES = 12 << 20
"""Room for all sequences of a test."""


@cache
def kernels_of(plan: Plan, wanted: Wanted) -> Kernels:
    """Return the kernels of a plan, loaded once in a process."""
    return compile_kernels(plan, usable_cache(None), lambda *_counts: None, wanted)


def prepared_of(config: ModelConfig, plan: Plan) -> Prepared:
    """Return what there is before weights are read."""
    kernels = kernels_of(plan, wanted_kernels(config, plan))
    return Prepared(kernels, Packer(config, plan, kernels.pack))


@contextmanager
def running(folder: Path, *arguments: Any, **options: Any) -> Iterator[NumbaCpuExecutor]:
    """Open an executor as :func:`opened` does, and close it afterwards."""
    executor = opened(folder, *arguments, **options)
    try:
        yield executor
    finally:
        executor.close()


def opened(
    folder: Path,
    dtype: DTypeName = "bfloat16",
    kernels: tuple[Instructions, bool] = ("fma", False),
    *,
    weights: WeightKind = "float",
    has_int8_inputs: bool = False,
    num_threads: int = 2,
    kernel_cache: Path | None = None,
    change: Callable[[ModelWeights], None] = lambda _weights: None,
    **options: Any,
) -> NumbaCpuExecutor:
    """Return an executor over a model folder; its machine code is shared with other tests.

    ``change`` is called with the weights when they are loaded and packed.
    """
    config = read_config(folder)
    plan = plan_of(config, dtype, kernels[0], weights, is_emulated=kernels[1], has_int8_inputs=has_int8_inputs)
    prepared = prepared_of(config, plan) if kernel_cache is None else prepare(config, plan, kernel_cache)
    model = load_model(folder, dtype=dtype, encoding=prepared.packer)
    assert model.weights is not None
    change(model.weights)
    settings: dict[str, Any] = {"kv_memory_bytes": KV_BYTES, "max_context": 1024, "max_step_rows": 512} | options
    return NumbaCpuExecutor(model, CpuOptions(plan, "a test", num_threads, **settings), prepared)


def lose_a_thread(executor: NumbaCpuExecutor) -> None:
    """Have a thread of the next step fail as soon as it is started."""
    executor._threads = ThreadCount(2)  # it may have left a thread out because other tests are running
    workers = executor._workers
    workers.close()
    run = workers._run

    def fail_in_helpers(thread: int) -> int:
        if thread:
            time.sleep(0.05)
            raise RuntimeError("a thread failed")
        return run(thread)

    sync = workers._sync
    ctypes.c_int64.from_address(sync.address + _IS_ABORTED).value = 0  # closing has aborted it
    executor._workers = Workers(fail_in_helpers, 2, sync)
