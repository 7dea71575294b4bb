"""Packing weights while they are read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ferrule_server.executor.cpu.executor import Prepared
from ferrule_server.executor.cpu.weights import PackedMatrix
from ferrule_server.kernels.cpu.plan import WeightKind
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.tensors import ModelWeights
from ferrule_server.model.weights import DTypeName, LoadedModel, load_model
from tests.executor.cpu.models import QUANTISED_SETS, plan_of, prepared_of, write_awkward, write_tiny
from tests.executor.cpu.unpacking import unpack_model

MATRICES = ("qkv", "attention_out", "gate_up", "down")


def load_packed(folder: Path, dtype: DTypeName, kind: WeightKind = "float") -> tuple[Prepared, LoadedModel]:
    """Return a model whose matrices are packed for kernels that other tests compile too."""
    config = read_config(folder)
    instructions, is_emulated = QUANTISED_SETS[0 if kind == "float" or dtype == "float32" else -1]
    plan = plan_of(config, dtype, instructions, kind, is_emulated=is_emulated)
    prepared = prepared_of(config, plan)
    return prepared, load_model(folder, dtype=dtype, encoding=prepared.packer)


def unpacked(folder: Path, dtype: DTypeName, kind: WeightKind = "float") -> ModelWeights:
    """Return the weights of a model that were packed in between."""
    prepared, model = load_packed(folder, dtype, kind)
    return unpack_model(model.config, prepared.packer.finish(model.take_weights()), model.torch_dtype)


def test_packed_matrices_are_streams_of_64_outputs(tmp_path: Path) -> None:
    """Output 64 g + n, input 2 p + i is at [g][p][n][i]; the arena holds all matrices and nothing else."""
    folder = write_tiny(tmp_path / "model")
    plain = load_model(folder, dtype="bfloat16").take_weights().layers[0]["down"]
    prepared, model = load_packed(folder, "bfloat16")
    (matrix,) = prepared.packer.finish(model.take_weights()).layers[0]["down"]
    assert isinstance(matrix, PackedMatrix)
    assert matrix.kind.name == "bfloat16"
    blocks = matrix.data.view(torch.bfloat16).view(-1, plain.shape[1] // 2, 64, 2)
    assert blocks[1, 53, 39, 1] == plain[64 + 39, 106 + 1]
    assert matrix.data.data_ptr() % 64 == 0
    packed = prepared.packer.finish(load_model(folder, dtype="bfloat16").take_weights())
    matrices = [part for holder in (packed.parts, *packed.layers) for part in holder.values() if isinstance(part, list)]
    places = sorted((piece.data.data_ptr(), piece.data.nbytes) for pieces in matrices for piece in pieces)
    assert all(begin + size == following for (begin, size), (following, _) in pairwise(places))
    assert sum(size for _, size in places) == len(prepared.packer._arena)


def rounded_to_int8(weight: Tensor) -> Tensor:
    """Return what int8 with a scale per row makes of a matrix."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scales.where(scales > 0, torch.inf)).round() * scales


def by_range(weight: Tensor) -> Tensor:
    """Return what 16 steps between the least and the largest of 32 numbers make of a matrix."""
    blocks = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % 32)).view(len(weight), -1, 32)
    lowest = blocks.amin(2, keepdim=True).half().float()
    scales = ((blocks.amax(2, keepdim=True) - lowest) / 15).half().float()
    codes = ((blocks - lowest) / scales.where(scales != 0, torch.inf)).round().clamp(0, 15)
    return (codes * scales + lowest).flatten(1)[:, : weight.shape[1]]


def error_of(found: Tensor, weight: Tensor) -> float:
    """Return the root of the mean squared error as a share of the numbers' own."""
    return float((found.float() - weight.float()).square().mean().sqrt() / weight.float().square().mean().sqrt())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("write", [write_tiny, write_awkward])
def test_quantised_matrices_are_near(tmp_path: Path, write: Callable[[Path], Path], dtype: DTypeName) -> None:
    """int8 as torch quantises, int4 nearer than by the range of 32 numbers; values, last layers and head have int8.

    All else is as it was, and a tied head is one tensor.
    """
    folder = write(tmp_path / "model")
    exact = load_model(folder, dtype=dtype).take_weights()
    rounded: dict[WeightKind, ModelWeights] = {kind: unpacked(folder, dtype, kind) for kind in ("int8", "int4")}
    for weights in rounded.values():
        assert (weights.head is weights.embedding) == (exact.head is exact.embedding)
        assert weights.head is weights.embedding or torch.equal(weights.embedding, exact.embedding)
        assert torch.equal(weights.layers[1]["attention_norm"], exact.layers[1]["attention_norm"])
    config = read_config(folder)
    num_values = config.num_kv_heads * config.head_dim
    triples = [(exact.head, rounded["int8"].head, rounded["int4"].head)]
    for layers in zip(exact.layers, rounded["int8"].layers, rounded["int4"].layers, strict=True):
        triples += [(layers[0][name], layers[1][name], layers[2][name]) for name in MATRICES]
    for number, (weight, int8, int4) in enumerate(triples):
        as_int8 = rounded_to_int8(weight).to(weight.dtype)
        assert torch.equal(int8, as_int8)
        num_in_int8 = (len(weight), num_values, 0, 0)[number % 4]
        others = len(weight) - num_in_int8
        assert torch.equal(int4[others:], as_int8[others:])
        if others:
            assert error_of(int4[:others], weight[:others]) < 0.95 * error_of(
                by_range(weight)[:others], weight[:others]
            )


def test_numbers_on_sixteen_levels_are_kept(tmp_path: Path) -> None:
    """int4 is exact for what codes of 4 bits with a scale and an offset can express."""
    folder = write_awkward(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name, generator = "model.layers.0.self_attn.q_proj.weight", torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (576, 5, 32), generator=generator)
    codes[:, :, :2] = torch.tensor([0, 15])
    scales, offsets = (2.0 ** torch.randint(-9, -5, (576, 5, 1), generator=generator) for _ in range(2))
    tensors[name] = (codes * scales - 8 * offsets).flatten(1)[:, :144].contiguous()
    save_file(tensors, folder / "model.safetensors")
    found = unpacked(folder, "float32", "int4").layers[0]["qkv"][:576]
    exact = load_model(folder, dtype="float32").take_weights().layers[0]["qkv"][:576]
    assert torch.equal(found[:, :128], exact[:, :128])


def test_quantised_weights_have_another_fingerprint_and_are_smaller(tmp_path: Path) -> None:
    """No handle of one form of a model is valid for another; metrics show the bytes that are in memory."""
    folder = write_tiny(tmp_path / "model")
    models = [load_packed(folder, "bfloat16", kind)[1] for kind in ("float", "int8", "int4")]
    assert models[0].fingerprint == load_model(folder, dtype="bfloat16").fingerprint
    assert len({model.fingerprint for model in models}) == 3
    sizes = [model.weights_bytes / model.num_parameters for model in models]
    assert sizes == pytest.approx([2, 1, 0.8], rel=0.1)


def test_a_failure_while_a_matrix_is_packed_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens in another thread, while the next matrix is read."""
    folder = write_tiny(tmp_path / "model")
    prepared, _ = load_packed(folder, "bfloat16")

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("no more")

    monkeypatch.setattr(prepared.packer, "_copy", fail)
    with pytest.raises(RuntimeError, match="no more"):
        load_model(folder, dtype="bfloat16", encoding=prepared.packer)
