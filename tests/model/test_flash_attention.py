"""Attention by torch's flash attention operator: its bookkeeping on the CPU, its launches, and a real GPU."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.kernels.reference import AttentionRule
from ferrule_server.model import decoder as decoder_module
from ferrule_server.model import flash_attention
from ferrule_server.model.attention import GroupedAttention, LayerAttention, PlainAttention, StepArrays
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.decoder import Decoder
from ferrule_server.model.flash_attention import FlashAttention, can_attend, can_compute, has_trailing_rows
from ferrule_server.model.tensors import LayerWeights, ModelWeights
from tests.configs import uniform_config, with_layers
from tests.model.conftest import Example
from tests.model.flash_operator import FlashOperator
from tests.model.launch_count import count_launches
from tests.model.stepping import Piece, PooledSequence, Stepper
from tests.model.test_attention import BLOCK_SIZE, Seq, make_pool, make_step

NewExecutor = Callable[..., TorchExecutor]

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 97, 37)]
MIXED = [(37, 129), (0, 17), (90, 1), (8, 128), (91, 1), (15, 1), (30, 5)]
STEPS: dict[str, list[Seq]] = {
    "first": [(0, 1)],
    "whole blocks": [(16, 16)],
    "decodes": [(3, 1), (500, 1), (31, 1), (15, 1)],
    "verifies": [(30, 5), (40, 5), (2, 3)],
    "chunk": [(1024, 300)],
    "prompt": [(0, 97)],
    "mixed": MIXED,
}
LLAMA_8B = uniform_config(
    architecture="LlamaForCausalLM",
    vocab_size=128,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=8192,
    norm_eps=1e-5,
    rope_theta=5e5,
    is_tied=True,
)
QWEN3_8B = with_layers(replace(LLAMA_8B, qk_norm="head"), intermediate_size=12288)
QWEN2_7B = with_layers(replace(LLAMA_8B, num_heads=28, has_qkv_bias=True), num_kv_heads=4)


@pytest.fixture
def operator() -> Iterator[FlashOperator]:
    """The operator on the CPU, which here takes float32 and every head size too."""
    with FlashOperator(is_strict=False).installed() as operator:
        yield operator


def assert_same_attention(pool: torch.Tensor, step: StepArrays, num_heads: int, tolerance: float) -> None:
    """Compare outputs, to rounding, and pools, bit for bit, with the definition in float32."""
    num_layers, _, num_kv_heads, _, head_dim = pool.shape[1:]
    num_rows, dtype = len(step.positions), pool.dtype
    plain_pool, rule = pool.float(), AttentionRule(head_dim**-0.5)
    query = (3 * torch.randn(num_rows, num_heads, head_dim)).to(pool)
    heads = torch.randn(num_rows, 2 * num_kv_heads, head_dim).to(pool)
    key, value = heads[:, :num_kv_heads], heads[:, num_kv_heads:]
    for layer in range(num_layers):
        wide = (key.float(), value.float())
        plain = PlainAttention(plain_pool, step).attend(layer, query.float(), wide, rule, sinks=None)
        flash = FlashAttention(pool, step, num_heads).attend(layer, query, (key, value), rule, sinks=None)
        assert flash.dtype == dtype
        torch.testing.assert_close(flash.float(), plain, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pool, plain_pool.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(8, 2, 10), (3, 3, 16), (6, 1, 24)], ids=["4to1", "1to1", "6to1"])
@pytest.mark.parametrize("seqs", STEPS.values(), ids=list(STEPS))
def test_it_equals_the_definition(
    operator: FlashOperator, seqs: list[Seq], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Every step takes one call of the operator per layer, over a pool that is NaN wherever a sequence has nothing."""
    torch.manual_seed(4)
    num_heads, num_kv_heads, head_dim = heads
    step, num_blocks = make_step(seqs, np.random.default_rng(5))
    assert has_trailing_rows(step)
    pool = make_pool(step, (num_blocks, 2, 2, num_kv_heads, BLOCK_SIZE, head_dim), dtype)
    assert_same_attention(pool, step, num_heads, 2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert operator.num_calls == 2


@pytest.mark.parametrize("left", [float("inf"), float("-inf")])
def test_rows_without_a_slot_and_infinities_left_in_the_pool(operator: FlashOperator, left: float) -> None:
    """Queries read what is in the pool and change no byte of it; what others left in unused slots reaches no row."""
    torch.manual_seed(6)
    step, num_blocks = make_step(MIXED, np.random.default_rng(7))
    begins = step.cu_seqlens_q
    step.slot_mapping[begins[1] : begins[2]] = -1  # a prompt that was run before
    step.slot_mapping[begins[2]] = -1  # a decode
    step.slot_mapping[begins[7] - 2 :] = -1  # the last rows of a verify
    pool = make_pool(step, (num_blocks + 3, 2, 2, 2, BLOCK_SIZE, 8), torch.float32)
    pool[pool.isnan()] = left
    assert_same_attention(pool, step, 4, 1e-5)
    assert operator.num_calls == 2


def test_sequences_share_blocks(operator: FlashOperator) -> None:
    """Forks that read the blocks of their trunk, and queries of the same sequence, are gathered each by itself."""
    torch.manual_seed(8)
    step, num_blocks = make_step([(48, 1), (48, 1), (48, 3), (10, 2)], np.random.default_rng(9))
    step.block_tables[1:3, :3] = step.block_tables[0, :3]
    step.block_tables[3, 0] = step.block_tables[0, 0]
    step.slot_mapping[-2:] = -1
    pool = make_pool(step, (num_blocks, 2, 2, 2, BLOCK_SIZE, 16), torch.float32)
    assert_same_attention(pool, step, 4, 1e-5)
    assert operator.num_calls == 2


def test_the_gathered_copy_is_bounded(operator: FlashOperator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with more K and V than the bound are attended in several calls, one that is too long alone."""
    torch.manual_seed(10)
    step, num_blocks = make_step(MIXED, np.random.default_rng(11))
    pool = make_pool(step, (num_blocks, 2, 2, 2, BLOCK_SIZE, 8), torch.float32)
    block_bytes = pool[0, 0].nbytes
    assert (-(-step.kv_lens // BLOCK_SIZE)).tolist() == [11, 2, 6, 9, 6, 1, 3]
    monkeypatch.setattr(flash_attention, "GATHERED_BYTES", 10 * block_bytes)
    assert_same_attention(pool, step, 4, 1e-5)
    assert operator.num_calls == 2 * len(["11", "2 + 6", "9", "6 + 1 + 3"])


def test_rows_that_are_not_the_last_of_their_sequence_are_noticed() -> None:
    """The operator would let them see too much."""
    step, _ = make_step(MIXED, np.random.default_rng(12))
    assert has_trailing_rows(step)
    for change in (-1, 1):
        moved = replace(step, kv_lens=step.kv_lens + np.array([0, 0, 0, change, 0, 0, 0], np.int32))
        assert not has_trailing_rows(moved)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "is_taken"),
    [
        (torch.bfloat16, 128, True),
        (torch.float16, 64, True),
        (torch.bfloat16, 256, True),
        (torch.bfloat16, 100, False),
        (torch.bfloat16, 264, False),
        (torch.float32, 128, False),
    ],
)
def test_pools_that_the_operator_takes(dtype: torch.dtype, head_dim: int, is_taken: bool) -> None:
    """The operator itself is asked, so whatever it refuses runs as before."""
    pool = torch.zeros(2, 1, 2, 1, BLOCK_SIZE, head_dim, dtype=dtype)
    assert not can_attend(pool)  # on the CPU
    with FlashOperator().installed():
        assert can_attend(pool) == is_taken


def test_an_operator_that_masks_otherwise_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """The small call at the start sees whether the mask is aligned at the lower right."""
    caplog.set_level(logging.DEBUG)
    pool = torch.zeros(2, 1, 2, 1, BLOCK_SIZE, 8, dtype=torch.bfloat16)
    with FlashOperator(is_lower_right=False).installed() as operator:
        assert not can_attend(pool)
        assert operator.num_calls == 1
    assert "reason=it returned other values than expected" in caplog.text


def test_a_refusal_on_an_accelerator_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Prefill is slower then, so the reason is a warning; on a CPU it is what everybody has."""
    with caplog.at_level(logging.INFO):
        assert not can_attend(torch.zeros(2, 1, 2, 1, BLOCK_SIZE, 8))
        assert not caplog.messages
        assert not can_attend(torch.zeros(2, 1, 2, 1, BLOCK_SIZE, 8, device="meta"))
    assert [message.partition(" reason=")[0] for message in caplog.messages] == ["event=no_flash_attention device=meta"]


def run_mixed_steps(stepper: Stepper, example: Example, tolerance: float) -> None:
    """Prefill, fork, decode, append and query in shared steps, and compare logits with those of transformers."""
    trunk = PooledSequence()
    stepper.run(Piece(trunk, PROMPT))
    forks = [stepper.fork(trunk) for _ in range(3)]
    for token in range(2):
        logits = stepper.logits(
            *(Piece(fork, [token + index]) for index, fork in enumerate(forks)),
            Piece(PooledSequence(), PROMPT[:33], num_outputs=3),
            Piece(trunk, PROMPT[-2:], is_query=True, num_outputs=2),
        )
        histories = [[*PROMPT, *(done + index for done in range(token + 1))] for index in range(3)]
        expected = [example.logits(history)[-1:] for history in histories]
        expected += [example.logits(PROMPT[:33])[-3:], example.logits(PROMPT)[-2:]]
        theirs = np.concatenate(expected)
        assert np.abs(logits - theirs).max() <= tolerance * np.abs(theirs).max()


def test_the_executor_uses_it(operator: FlashOperator, example: Example, new_executor: NewExecutor) -> None:
    """Steps of forks, chunks and queries give the logits of transformers, with one call for a layer.

    A model with windows or capped scores makes none.
    """
    stepper = Stepper(new_executor(example.folder))
    num_before = operator.num_calls
    run_mixed_steps(stepper, example, 1e-4)
    config = stepper.executor.info.model.config
    assert operator.num_calls - num_before == (3 * config.num_layers if can_compute(config) else 0)


def test_steps_with_other_rows_run_without_it(
    operator: FlashOperator, qwen3: Example, new_executor: NewExecutor
) -> None:
    """A row sees what its position says, even if its sequence goes on in the pool."""
    stepper, seq = Stepper(new_executor(qwen3.folder)), PooledSequence()
    stepper.run(Piece(seq, PROMPT))
    num_before = operator.num_calls
    batch = stepper.batch(Piece(seq, PROMPT[-1:], is_query=True))
    batch = replace(batch, positions=batch.positions - 5, token_ids=np.array([PROMPT[-6]], np.int32))
    (row,) = stepper.executor.run(batch).rows
    assert row.logits is not None
    theirs = qwen3.logits(PROMPT)[-6]
    assert np.abs(row.logits - theirs).max() <= 1e-4 * np.abs(theirs).max()
    assert operator.num_calls == num_before


def test_the_definition_does_not_use_it(operator: FlashOperator, qwen3: Example, new_executor: NewExecutor) -> None:
    """An executor that runs the reference alone has nothing from torch's kernels."""
    Stepper(new_executor(qwen3.folder, is_plain=True)).run(Piece(PooledSequence(), PROMPT))
    assert operator.num_calls == 0


def test_operations_of_a_gpu_give_the_same_logits(
    operator: FlashOperator, example: Example, new_executor: NewExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused norms, residuals inside products and no tiles, here in float32 on the CPU."""
    monkeypatch.setattr(decoder_module, "_LAUNCHING_DEVICE", "cpu")
    executor = new_executor(example.folder)
    run_mixed_steps(Stepper(executor), example, 1e-4)
    assert (operator.num_calls > 0) == can_compute(executor.info.model.config)


def assert_as_exact_as_transformers(stepper: Stepper, example: Example) -> None:
    """In bfloat16 we err no more than transformers does, against float32."""
    ours = stepper.logits(Piece(PooledSequence(), PROMPT, num_outputs=len(PROMPT)))
    exact, theirs = example.logits(PROMPT), example.logits(PROMPT, torch.bfloat16)
    assert np.square(ours - exact).mean() <= 1.2**2 * np.square(theirs - exact).mean()


def test_operations_of_a_gpu_round_no_worse(
    operator: FlashOperator, example: Example, new_executor: NewExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer roundings than the definition has."""
    monkeypatch.setattr(decoder_module, "_LAUNCHING_DEVICE", "cpu")
    executor = new_executor(example.folder, "bfloat16")
    assert_as_exact_as_transformers(Stepper(executor), example)
    assert (operator.num_calls > 0) == can_compute(executor.info.model.config)


def layer_launches(
    config: ModelConfig,
    seqs: list[Seq],
    *,
    num_queries: int = 0,
    attention: type[FlashAttention | GroupedAttention] = FlashAttention,
    device: str = "meta",
) -> Counter[str]:
    """Return the launches of one layer: what a second layer adds to the first.

    Args:
        config: Shapes of the model.
        seqs: The sequences of the step.
        num_queries: The first so many are queries, whose rows have no slots.
        attention: What attends.
        device: Launches are counted by a profiler on ``cuda``, as operations on ``meta``.
    """
    step, num_blocks = make_step(seqs, np.random.default_rng(0))
    step.slot_mapping[: step.cu_seqlens_q[num_queries]] = -1
    rows = torch.zeros(len(step.positions), dtype=torch.int64, device=device)
    counts = []
    for num_layers in (1, 2):
        shaped = with_layers(config, num_layers=num_layers)
        decoder = Decoder(shaped, make_weights(shaped, device), device=torch.device(device))
        shape = (num_blocks, num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        pool = torch.empty(shape, dtype=torch.bfloat16, device=device)
        attending = LayerAttention(shaped, [attention(pool, step, config.num_heads)])
        run = partial(decoder.forward, rows, rows, attending, rows[: len(seqs)])
        counts.append(count_launches(run) if device == "meta" else profile_launches(run))
    return counts[1] - counts[0]


def profile_launches(run: Callable[[], object]) -> Counter[str]:
    """Return the kernels of a call, by name, that a GPU ran."""
    with torch.inference_mode():
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
    events = [event.name for event in profile.events() or () if str(event.device_type).endswith("CUDA")]
    return Counter(name for name in events if not name.startswith("Mem"))


def make_weights(config: ModelConfig, device: str) -> ModelWeights:
    """Return weights in bfloat16 whose values do not matter."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    attended = config.num_heads * config.head_dim
    qkv = attended + 2 * config.num_kv_heads * config.head_dim

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    layers = [
        LayerWeights(
            **(dict.fromkeys(("q_norm", "k_norm"), empty(config.head_dim)) if config.qk_norm == "head" else {}),
            **({"qkv_bias": empty(qkv)} if config.has_qkv_bias else {}),
            attention_norm=empty(hidden),
            qkv=empty(qkv, hidden),
            attention_out=empty(hidden, attended),
            mlp_norm=empty(hidden),
            gate_up=empty(2 * intermediate, hidden),
            down=empty(hidden, intermediate),
        )
        for _ in range(config.num_layers)
    ]
    return ModelWeights({"embedding": empty(config.vocab_size, hidden), "final_norm": empty(hidden)}, layers)


CHUNK: list[Seq] = [(1024, 512)]
MANY: list[Seq] = [(1024, 200), (0, 17), *[(100 + length, 1) for length in range(40)], (37, 129), (30, 5)]


@pytest.mark.parametrize(
    ("config", "most"),
    [(QWEN3_8B, 19), (LLAMA_8B, 17), (QWEN2_7B, 17)],
    ids=["qwen3-8b", "llama-8b", "qwen2-7b"],
)
def test_a_layer_takes_few_launches_however_many_sequences_there_are(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, most: int
) -> None:
    """The host launches at most 20 kernels for a layer of a step: with more, it would be slower than the GPU."""
    monkeypatch.setattr(decoder_module, "_LAUNCHING_DEVICE", "meta")
    launches = layer_launches(config, CHUNK)
    assert launches["aten._flash_attention_forward.default"] == 1
    assert launches.total() == most
    assert layer_launches(config, MANY) == launches
    assert layer_launches(config, [(0, 2048)]) == launches
    queries = layer_launches(config, MANY, num_queries=20)
    assert queries - launches == Counter({"aten.index.Tensor": 1})
    assert queries.total() <= 20


def test_without_it_a_layer_takes_hundreds_of_launches() -> None:
    """What the count replaces: tiles whose scores fit the cache of a CPU."""
    assert layer_launches(QWEN3_8B, CHUNK, attention=GroupedAttention).total() > 200


HAS_GPU = torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64), (8, 8, 256), (6, 1, 72)])
@pytest.mark.parametrize("seqs", STEPS.values(), ids=list(STEPS))
def test_the_operator_of_a_gpu_equals_the_definition(
    seqs: list[Seq], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The same comparison with torch's own kernel."""
    torch.manual_seed(4)
    num_heads, num_kv_heads, head_dim = heads
    step, num_blocks = make_step(seqs, np.random.default_rng(5))
    pool = make_pool(step, (num_blocks, 2, 2, num_kv_heads, BLOCK_SIZE, head_dim), dtype).cuda()
    assert can_attend(pool)
    assert_same_attention(pool, step, num_heads, 2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_gpu_is_as_exact_as_transformers(example: Example, new_executor: NewExecutor) -> None:
    """The whole decoder in bfloat16 on a GPU; heads of 10 and 22 values do without the operator."""
    assert_as_exact_as_transformers(Stepper(new_executor(example.folder, "bfloat16", device="cuda:0")), example)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("config", [QWEN3_8B, LLAMA_8B, QWEN2_7B], ids=["qwen3-8b", "llama-8b", "qwen2-7b"])
def test_a_gpu_runs_as_many_kernels_as_were_counted(config: ModelConfig) -> None:
    """No operation that counts as one launch is several."""
    kernels = layer_launches(config, CHUNK, device="cuda")
    assert kernels.total() <= 20, kernels


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(512, 4096), (40, 32, 128), (3, 1000)])
def test_fused_norms_of_a_gpu_are_rounded_once(shape: tuple[int, ...]) -> None:
    """Within half a unit in the last place of bfloat16, and a little for the sums, of the norm in float64."""
    x, weight = torch.randn(shape).bfloat16(), (0.5 + torch.rand(shape[-1:])).bfloat16()
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    ours = torch.nn.functional.rms_norm(x.cuda(), weight.shape, weight.cuda(), 1e-6).cpu().double()
    assert ((ours - exact).abs() <= 1.001 * 2.0**-8 * exact.abs()).all()
