"""The torch executor's pool and its edges; what it computes is in tests/model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.make_random_model import write_model
from ferrule_server.errors import ConfigError
from ferrule_server.executor import block_pool
from ferrule_server.executor import torch as torch_executor
from ferrule_server.executor.base import Executor, OutputSpec, Shaping
from ferrule_server.executor.torch import TorchExecutor, least_kv_bytes
from ferrule_server.model.weights import DTypeName, LoadedModel, load_model
from tests.model.stepping import Piece, PooledSequence, Stepper

TOKENS = list(range(3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3."""
    path = tmp_path_factory.mktemp("tiny")
    write_model(path, "tiny")
    return path


@pytest.fixture
def model(folder: Path) -> LoadedModel:
    """The tiny model in float32, its weights not yet taken."""
    return load_model(folder, dtype="float32")


@pytest.fixture
def executor(model: LoadedModel) -> Iterator[TorchExecutor]:
    """An executor with 32 blocks."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = TorchExecutor(model, kv_memory_bytes=4 * least_kv_bytes(model.config, model.torch_dtype), max_context=256)
    yield made
    made.close()
    torch.set_num_threads(num_threads)


def random_blocks(executor: Executor, num_blocks: int) -> np.ndarray:
    """Return the bytes of as many random blocks of finite numbers."""
    values = np.random.default_rng(0).normal(size=(num_blocks, executor.info.bytes_per_block // 4))
    return values.astype(np.float32).view(np.uint8)


def test_plain_weights_are_those_of_the_checkpoint(folder: Path) -> None:
    """What kernels share: nothing is missing, and a tied head is the embedding itself."""
    model = load_model(folder, dtype="bfloat16")
    executor = TorchExecutor(
        model, kv_memory_bytes=least_kv_bytes(model.config, torch.bfloat16), max_context=64, is_plain=True
    )
    stored = load_file(folder / "model.safetensors")
    plain = executor.plain_weights
    assert plain is not None
    assert plain.head is plain.embedding
    assert torch.equal(plain.embedding, stored["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(plain.final_norm, stored["model.norm.weight"].bfloat16())
    assert len(plain.layers) == executor.info.model.config.num_layers
    for index, layer in enumerate(plain.layers):
        assert torch.equal(layer["down"], stored[f"model.layers.{index}.mlp.down_proj.weight"].bfloat16())
        assert torch.equal(layer["q_norm"], stored[f"model.layers.{index}.self_attn.q_norm.weight"].bfloat16())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float16_is_float32_but_for_rounding(folder: Path, tmp_path: Path, stored: torch.dtype) -> None:
    """Whatever the checkpoint has: a prompt in chunks, then decodes, on weights and KV of two bytes."""
    tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    exact, half = _logits_in(tmp_path, "float32"), _logits_in(tmp_path, "float16")
    assert 0 < np.abs(half - exact).max() <= 4e-3 * np.abs(exact).max()


def _logits_in(folder: Path, dtype: DTypeName) -> np.ndarray:
    """Return logits of a prompt in chunks and of decodes."""
    model = load_model(folder, dtype=dtype)
    executor = TorchExecutor(
        model, kv_memory_bytes=4 * least_kv_bytes(model.config, model.torch_dtype), max_context=256
    )
    assert (executor.info.kv_dtype, executor.pool.dtype) == (dtype, getattr(torch, dtype))
    stepper, seq = Stepper(executor), PooledSequence()
    pieces = [TOKENS[:17], TOKENS[17:34], TOKENS[34:35], TOKENS[35:36]]
    logits = [stepper.logits(Piece(seq, tokens, num_outputs=len(tokens))) for tokens in pieces]
    executor.close()
    return np.concatenate(logits)


def test_the_pool_is_shared(executor: TorchExecutor) -> None:
    """What somebody else writes into it is there."""
    assert tuple(executor.pool.shape[:1]) == (executor.info.num_blocks,)
    with torch.inference_mode():
        executor.pool[3].fill_(1.5)
    assert (executor.read_blocks(np.array([3], np.int32)).view(np.float32) == 1.5).all()


def test_info_describes_model_and_pool(executor: TorchExecutor) -> None:
    """Every figure follows from config.json and the settings."""
    info = executor.info
    assert (info.name, info.device, info.kv_dtype, info.block_size) == ("torch", "cpu", "float32", 16)
    assert info.bytes_per_block == 2 * 2 * 2 * 16 * 32 * 4
    assert info.num_blocks == 32
    assert (info.model.config.vocab_size, info.model.max_context, info.model.dtype) == (1024, 256, "float32")
    assert info.model.weights_bytes == 4 * info.model.num_parameters
    assert len(info.model.fingerprint) == 32


def test_blocks_written_are_read_back(executor: TorchExecutor) -> None:
    """read_blocks returns what write_blocks was given, in the order asked, as a copy."""
    data = random_blocks(executor, 3)
    executor.write_blocks(np.array([7, 2, 30], np.int32), data)
    back = executor.read_blocks(np.array([30, 7], np.int32))
    np.testing.assert_array_equal(back, data[[2, 0]])
    back[:] = 0
    np.testing.assert_array_equal(executor.read_blocks(np.array([7], np.int32)), data[:1])


def test_write_blocks_refuses_other_sizes(executor: TorchExecutor) -> None:
    """A wrong shape or dtype writes nothing."""
    before = executor.read_blocks(np.arange(32, dtype=np.int32))
    data = random_blocks(executor, 2)
    wrongs: list[Any] = [data[:1], data[:, 1:], data.astype(np.int8)]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="block data"):
            executor.write_blocks(np.array([1, 2], np.int32), wrong)
    np.testing.assert_array_equal(executor.read_blocks(np.arange(32, dtype=np.int32)), before)


@pytest.mark.parametrize("num_bytes", [1, 1 << 20])
def test_copy_blocks_copies_all_layers_and_nothing_else(
    executor: TorchExecutor, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destinations become their sources, one source may have several; all other blocks stay, however many at a time."""
    monkeypatch.setattr(block_pool, "_COPY_BYTES", num_bytes)
    all_blocks = np.arange(32, dtype=np.int32)
    data = random_blocks(executor, 32)
    executor.write_blocks(all_blocks, data)
    executor.copy_blocks(np.array([[3, 9], [3, 10], [5, 1]], np.int32))
    expected = data.copy()
    expected[[9, 10, 1]] = data[[3, 3, 5]]
    np.testing.assert_array_equal(executor.read_blocks(all_blocks), expected)


def test_copy_slots_reads_every_source_before_writing(executor: TorchExecutor) -> None:
    """A chain moves each slot by one (a tree commit), across blocks and in all layers."""
    all_blocks = np.arange(32, dtype=np.int32)
    data = random_blocks(executor, 32)
    executor.write_blocks(all_blocks, data)
    executor.copy_slots(np.array([[33, 32], [34, 33], [81, 34]], np.int32))
    shape = (32, 2, 2, 2, 16, 32)
    slots = data.view(np.float32).reshape(shape)
    expected = slots.copy()
    for source, destination in ((33, 32), (34, 33), (81, 34)):
        to, of = divmod(destination, 16), divmod(source, 16)
        expected[to[0], :, :, :, to[1]] = slots[of[0], :, :, :, of[1]]
    np.testing.assert_array_equal(executor.read_blocks(all_blocks).view(np.float32).reshape(shape), expected)


def test_empty_copies_and_steps_do_nothing(executor: TorchExecutor) -> None:
    """No pairs, no blocks: no error, no change."""
    before = executor.read_blocks(np.arange(32, dtype=np.int32))
    executor.copy_blocks(np.empty((0, 2), np.int32))
    executor.copy_slots(np.empty((0, 2), np.int32))
    assert executor.read_blocks(np.empty(0, np.int32)).shape == (0, executor.info.bytes_per_block)
    np.testing.assert_array_equal(executor.read_blocks(np.arange(32, dtype=np.int32)), before)


def test_kv_moved_to_other_blocks_decodes_the_same(executor: TorchExecutor) -> None:
    """A sequence exported and imported elsewhere gives the same logits."""
    stepper, seq = Stepper(executor), PooledSequence()
    stepper.run(Piece(seq, TOKENS))
    data = executor.read_blocks(np.array(seq.blocks, np.int32))
    moved = PooledSequence(seq.length, [stepper.free.pop() for _ in seq.blocks])
    stepper.refcounts.update(dict.fromkeys(moved.blocks, 1))
    executor.write_blocks(np.array(moved.blocks, np.int32), data)
    logits = stepper.logits(Piece(seq, [1]), Piece(moved, [1]))
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-5, atol=1e-6)


def test_output_head_runs_in_tiles_of_rows(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are asked for, few of them have logits at a time; what they return is the same."""
    stepper, seen = Stepper(executor), []
    head = executor._decoder.head

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(executor._decoder, "head", spy)
    spec = OutputSpec(greedy=True, logprobs=True, hidden_state=True, shaping=Shaping(frequency_penalty=9.0))
    batch = stepper.batch(Piece(PooledSequence(), TOKENS, num_outputs=len(TOKENS), spec=spec))
    histories = tuple(np.array(TOKENS[: i + 1], np.int32) for i in range(len(TOKENS)))
    batch = replace(batch, histories=histories)
    whole = executor.run(batch).rows
    monkeypatch.setattr(torch_executor, "_TILE_BYTES", 4 * 1024 * 5)
    tiled = executor.run(batch).rows
    assert seen[0] == len(TOKENS)
    assert max(seen[1:]) == 5
    assert sum(seen[1:]) == len(TOKENS)
    assert len(tiled) == len(whole)
    for one, other in zip(tiled, whole, strict=True):
        assert (one.position, one.token) == (other.position, other.token)
        assert one.model_logprob == pytest.approx(other.model_logprob, abs=1e-5)
        assert one.hidden_state is not None
        assert other.hidden_state is not None
        np.testing.assert_allclose(one.hidden_state, other.hidden_state, rtol=1e-5, atol=1e-6)


def test_hidden_state_is_what_the_output_head_reads(executor: TorchExecutor, folder: Path) -> None:
    """The head's matrix times it is the row of logits."""
    spec = OutputSpec(full_logits=True, hidden_state=True)
    (row,) = Stepper(executor).run(Piece(PooledSequence(), TOKENS, spec=spec))
    assert row.hidden_state is not None
    assert row.hidden_state.dtype == np.float32
    assert row.hidden_state.shape == (executor.info.model.config.hidden_size,)
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].float().numpy()
    assert row.logits is not None
    np.testing.assert_allclose(head @ row.hidden_state, row.logits, rtol=1e-4, atol=1e-4)


def test_rows_with_infinite_logits_are_flagged(folder: Path, tmp_path: Path) -> None:
    """An infinite weight of the tied head shows in the row, and the step does not raise."""
    write_model(tmp_path, "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(tmp_path, dtype="float32")
    stepper = Stepper(TorchExecutor(model, kv_memory_bytes=1 << 20, max_context=64))
    rows = stepper.run(Piece(PooledSequence(), [9]))
    assert not rows[0].is_finite
    assert rows[0].logits is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_context": 0}, "max_context"),
        ({"max_context": 4096}, "2048"),
        ({"kv_memory_bytes": 1000}, "at least"),
    ],
)
def test_settings_out_of_range_are_refused(model: LoadedModel, settings: dict[str, Any], named: str) -> None:
    """The error names the limit, and the model can still be used."""
    good: dict[str, Any] = {"kv_memory_bytes": 1 << 20, "max_context": 256, "block_size": 16}
    with pytest.raises(ConfigError, match=named):
        TorchExecutor(model, **{**good, **settings})
    TorchExecutor(model, **good).close()
