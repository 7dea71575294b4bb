"""Which kernels steps run: those that are shipped, and for every size that there is a step of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, field, fields, make_dataclass, replace
from itertools import product

import pytest
import torch

from ferrule_server.executor.cuda import kernel_choice
from ferrule_server.executor.cuda.buckets import bucket_sizes
from ferrule_server.executor.cuda.buffers import DecodeBuffers, Limits
from ferrule_server.executor.cuda.chain import StepChain
from ferrule_server.executor.cuda.kernel_choice import (
    BLOCK_SIZES,
    HEAD_DIMS,
    KNOWN_FIELDS,
    attention_grid,
    attention_spec,
    gemv_spec,
    shape_of,
    specs_needed,
    unsupported_reason,
)
from ferrule_server.executor.cuda.kernel_set import KernelSet
from ferrule_server.executor.cuda.linears import StepParts
from ferrule_server.executor.cuda.weights import adopt_weights
from ferrule_server.kernel_builder.compile import ARCHITECTURES, capability_of
from ferrule_server.kernels.cuda import attention
from ferrule_server.kernels.cuda.catalog import kernels_of
from ferrule_server.kernels.cuda.logit_rows import num_slices
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, SHARED_LIMITS, KernelSpec, ModelShape
from ferrule_server.model.config import Experts, LayerKind, ModelConfig
from ferrule_server.model.rope import LinearScaling, Rope, YarnScaling
from tests.configs import with_layers
from tests.executor.cuda.fake_gpu import CUBIN, FakeGpu, FakeLaunch
from tests.executor.cuda.tiny_model import KINDS, tiny_config, tiny_executor

QWEN, LLAMA = MODEL_SHAPES["Qwen3-8B"], MODEL_SHAPES["Llama-3.2-1B"]


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_what_steps_need_is_shipped(name: str) -> None:
    """Less than all of it: no trees; less still in deterministic mode."""
    shape = MODEL_SHAPES[name]
    shipped = {spec.name: spec for spec in kernels_of(shape)}
    needed = {one: specs_needed(shape, is_deterministic=one) for one in (False, True)}
    for spec in needed[False]:
        assert spec.shared_bytes <= shipped[spec.name].shared_bytes
        assert replace(spec, shared_bytes=0) == replace(shipped[spec.name], shared_bytes=0)
    assert set(needed[True]) <= set(needed[False])
    assert {"gemv", "head"}.isdisjoint(spec.kernel.__name__ for spec in needed[True])
    constants = [dict(spec.constants) for spec in needed[False]]
    assert not any(one.get("TREE") for one in constants)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("is_deterministic", "capability"), [(False, (9, 0)), (False, (8, 6)), (True, (9, 0))])
def test_no_step_asks_for_more_than_was_said(kind: str, is_deterministic: bool, capability: tuple[int, int]) -> None:
    """Every size of a graph uses every kernel but those behind the logits."""
    executor = tiny_executor(kind, num_layers=1)
    assert executor.plain_weights is not None
    shape, gpu = shape_of(executor.info.model.config), FakeGpu(num_sms=3, capability=capability)
    specs = specs_needed(shape, is_deterministic=is_deterministic, limit=gpu.info.shared_bytes_per_cta)
    limits = Limits(max_blocks=16, max_rows=64 if is_deterministic else 80, max_entries=8)
    kernels, weights = KernelSet(gpu, dict.fromkeys(specs, CUBIN)), executor.plain_weights
    rope = adopt_weights(gpu, weights, executor.info.model.config, 256)
    buffers = DecodeBuffers(gpu.allocate, shape, limits, attention_grid(shape, gpu.info))
    chain = StepChain(StepParts(kernels, weights, rope, buffers, shape, 1e-6), executor.pool)
    used = {
        launch.spec.name
        for num_rows in bucket_sizes(limits.max_rows)
        for launch in chain.operations(num_rows, stores_logits=True, is_deterministic=is_deterministic)
        if isinstance(launch, FakeLaunch)
    }
    assert {_module(spec) for spec in specs if spec.name not in used} == {"log_sum_exp", "sample", "top_k"}


def _module(spec: KernelSpec) -> str:
    return spec.kernel.__module__.rpartition(".")[2]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (with_layers(tiny_config(), head_dim=96), "heads of 64 or 128 values, not 96"),
        (
            with_layers(replace(tiny_config(), num_heads=34), num_kv_heads=2),
            "at most 16 query heads per KV head, not 17",
        ),
        (replace(tiny_config(), hidden_size=100), "a hidden_size that is a multiple of 8, not 100"),
        (with_layers(tiny_config(), intermediate_size=1001), "an intermediate_size that is a multiple of 8, not 1001"),
        (replace(tiny_config(), vocab_size=1 << 20), "a vocabulary of at most 1048575, not 1048576"),
    ],
)
def test_models_the_kernels_cannot_run_are_named(config: ModelConfig, words: str) -> None:
    """With what would do and what there is."""
    assert unsupported_reason(tiny_config(), torch.bfloat16, 16) == ""
    assert unsupported_reason(config, torch.bfloat16, 16) == f"the kernels need {words}"


def test_every_other_field_of_a_model_is_refused_by_name() -> None:
    """A new field of the configuration is first taken into account by the kernels, then listed in ``KNOWN_FIELDS``."""
    names = {each.name for each in fields(ModelConfig) if each.compare}  # the others are no part of the network
    assert names > KNOWN_FIELDS
    for name in names - KNOWN_FIELDS:
        value = not getattr(tiny_config(), name)
        config = replace(tiny_config(), **{name: value})  # type: ignore[arg-type]
        assert unsupported_reason(config, torch.bfloat16, 16) == f"the kernels need the default {name}, not {value!r}"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(tiny_config(), qk_norm="row"), "norms of single heads, not of all heads of a row"),
        (with_layers(tiny_config(), window=64), "attention to all tokens, not to the last 64"),
        (with_layers(tiny_config(), chunk=64), "attention to all tokens, not to chunks of 64"),
        (with_layers(tiny_config(), has_sinks=True), "attention without sinks"),
        (with_layers(tiny_config(), is_value_key=True), "a projection of values"),
        (with_layers(tiny_config(), experts=Experts(8, 2, 32)), "one feed-forward part for all rows, not experts"),
        (with_layers(tiny_config(), score_scale=0.25), "scores divided by the root of head_dim, not times 0.25"),
        (
            with_layers(tiny_config(), rope=Rope(1e4, 32, 64, YarnScaling(4.0, 64, magnitude=1.5))),
            "rotations that keep lengths",
        ),
        (
            replace(tiny_config(), layers=(tiny_config().layers[0], with_layers(tiny_config(), rope=None).layers[0])),
            "equal layers",
        ),
    ],
)
def test_layers_the_kernels_cannot_run_are_named(config: ModelConfig, words: str) -> None:
    """They know equal layers of plain attention to all tokens."""
    assert unsupported_reason(config, torch.bfloat16, 16) == f"the kernels need {words}"


def test_every_field_of_a_layer_is_computed_or_refused() -> None:
    """A new one needs a rule in ``unknown_features`` first, and then a case above or an entry here."""
    computed = {"head_dim", "num_kv_heads", "intermediate_size", "rope"}
    refused = {"score_scale", "window", "chunk", "has_sinks", "is_value_key", "experts"}
    of_other_layers = {"kv_layer"}
    assert {each.name for each in fields(LayerKind)} == computed | refused | of_other_layers


def test_layers_without_a_rotation_or_with_other_frequencies_run() -> None:
    """Both are only another table."""
    for rope in (None, Rope(1e6, 16, 32), Rope(1e6, 32, 64, LinearScaling(2.0))):
        assert unsupported_reason(with_layers(tiny_config(), rope=rope), torch.bfloat16, 16) == ""


@pytest.mark.parametrize("default", [0, MISSING])
def test_a_model_with_a_field_that_is_not_known_is_refused(default: object) -> None:
    """It is never ignored; only a field that has a default, and is left at it, changes nothing."""
    given = {each.name: getattr(tiny_config(), each.name) for each in fields(ModelConfig)}
    extra = field(default=default, kw_only=True)
    wider = make_dataclass("Wider", [("sliding_window", int, extra)], bases=(ModelConfig,), frozen=True)
    reason = unsupported_reason(wider(**given, sliding_window=4096), torch.bfloat16, 16)
    assert reason == "the kernels need the default sliding_window, not 4096"
    unset = unsupported_reason(wider(**given, sliding_window=0), torch.bfloat16, 16)
    assert bool(unset) == (default is MISSING)


def test_other_data_types_and_blocks_are_refused() -> None:
    """Both are settings of the server; all reasons are given at once."""
    reason = unsupported_reason(tiny_config(), torch.float32, 8)
    assert reason == "the kernels need bfloat16, not float32, blocks of 16 or 32 or 64 tokens, not 8"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_of_a_supported_shape_fits_every_gpu(all_specs: frozenset[KernelSpec], architecture: str) -> None:
    """One CTA fits, with the registers that the compiler may give it; the driver's own check agrees."""
    gpu, whole = FakeGpu(capability=capability_of(architecture)), ARCHITECTURES[architecture]
    assert gpu.info.shared_bytes_per_cta == whole.max_shared_bytes_per_cta
    for spec in all_specs:
        num_registers = min(255, 65536 // (2 * spec.ctas_per_sm * spec.num_threads))
        assert whole.ctas(spec.num_threads, num_registers, spec.shared_bytes) >= 1, spec
        gpu.load(spec, CUBIN)


@pytest.fixture(scope="module")
def all_specs() -> frozenset[KernelSpec]:
    """Return every kernel that a step of a supported model may launch, and attention along trees."""
    ways = list(product(BLOCK_SIZES, (False, True), SHARED_LIMITS))
    return frozenset(
        spec
        for shape in _shapes()
        for block_size, is_deterministic, limit in ways
        for spec in (
            *specs_needed(shape, is_deterministic=is_deterministic, block_size=block_size, limit=limit),
            attention.spec(shape, TREE=True, BLOCK_SIZE=block_size),
        )
    )


def _shapes() -> Iterator[ModelShape]:
    """Yield models of every head width and group, from tiny ones to the widest that fits 99 KiB."""
    sizes = ((1, 8, 16), (8, 1024, 3072), (2, 1536, 8960), (8, 4096, 14336), (8, 8192, 24576))
    for head_dim, group, (num_kv_heads, hidden, intermediate) in product(HEAD_DIMS, range(1, 17), sizes):
        num_heads = group * num_kv_heads
        yield ModelShape(hidden, intermediate, 1, num_heads, num_kv_heads, head_dim, 151936, has_qk_norm=group % 2 == 0)


def test_the_largest_vocabulary_is_one_the_kernels_take() -> None:
    """The limit said here is theirs."""
    num_slices(kernel_choice.MAX_VOCAB_SIZE)
    with pytest.raises(ValueError, match="vocabulary"):
        num_slices(kernel_choice.MAX_VOCAB_SIZE + 1)


def test_attention_is_one_kernel_of_the_pools_blocks() -> None:
    """Whose grid is as many CTAs as fit the multiprocessors."""
    assert dict(attention_spec(QWEN, 32).constants)["BLOCK_SIZE"] == 32
    for capability in ((9, 0), (8, 9)):
        gpu = FakeGpu(num_sms=132, capability=capability).info
        assert (attention_grid(LLAMA, gpu), attention_grid(QWEN, gpu)) == (264, 132)


def test_linears_of_one_epilogue_share_a_kernel() -> None:
    """Which is planned for the wider; a launch takes the shared memory of its own size."""
    out, down = (gemv_spec(QWEN.linears[name], 1, 227 << 10) for name in ("attention_out", "down"))
    assert out.name == down.name
    assert out.shared_bytes < down.shared_bytes
