"""Packing weights while they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
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
    matrix = prepared.packer.finish(model.take_weights()).layers[0]["down"]
    assert isinstance(matrix, PackedMatrix)
    assert matrix.kind.name == "bfloat16"
    packed = matrix.data
    blocks = packed.view(torch.bfloat16).view(-1, plain.shape[1] // 2, 64, 2)
    assert blocks[1, 53, 39, 1] == plain[64 + 39, 106 + 1]
    assert packed.data_ptr() % 64 == 0
    assert prepared.packer._used == len(prepared.packer._arena)


def rounded_to_int8(weight: Tensor) -> Tensor:
    """Return what int8 with a scale per row makes of a matrix."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scales.where(scales > 0, torch.inf)).round() * scales


def nearest_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both candidates of int4 for blocks of 32 inputs, [2, rows, blocks, 32], and their squared errors."""
    blocks = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % 32)).view(len(weight), -1, 32)
    lowest, highest = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    extreme = lowest.where(-lowest > highest, highest)
    candidates = []
    for level in (-8, -7):
        scales = (extreme / level).bfloat16().float()
        integers = (blocks / scales.where(scales != 0, torch.inf)).round().clamp(-8, 7)
        candidates.append(integers * scales)
    both = torch.stack(candidates)
    return both, (both - blocks).square().sum(3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("write", [write_tiny, write_awkward])
def test_quantised_matrices_are_the_nearest_ones(
    tmp_path: Path, write: Callable[[Path], Path], dtype: DTypeName
) -> None:
    """int8 as torch quantises; int4 the better of two scales; all else is as it was, and a tied head is one tensor."""
    folder = write(tmp_path / "model")
    exact = load_model(folder, dtype=dtype).take_weights()
    rounded: dict[WeightKind, ModelWeights] = {kind: unpacked(folder, dtype, kind) for kind in ("int8", "int4")}
    for weights in rounded.values():
        assert (weights.head is weights.embedding) == (exact.head is exact.embedding)
        assert weights.head is weights.embedding or torch.equal(weights.embedding, exact.embedding)
        assert torch.equal(weights.layers[1]["attention_norm"], exact.layers[1]["attention_norm"])
    triples = [(exact.head, rounded["int8"].head, rounded["int4"].head)]
    for layers in zip(exact.layers, rounded["int8"].layers, rounded["int4"].layers, strict=True):
        triples += [(layers[0][name], layers[1][name], layers[2][name]) for name in MATRICES]
    for weight, int8, int4 in triples:
        assert torch.equal(int8, rounded_to_int8(weight).to(weight.dtype))
        both, errors = nearest_int4(weight)
        best = both[errors.argmin(0), *torch.meshgrid(*map(torch.arange, errors.shape[1:]), indexing="ij")]
        best = best.flatten(1)[:, : weight.shape[1]].to(weight.dtype)
        is_same = (int4 == best).all(1)
        assert is_same.float().mean() > 0.99, "but for ties that differ by the order of sums"


def test_quantised_weights_have_another_fingerprint_and_are_smaller(tmp_path: Path) -> None:
    """No handle of one form of a model is valid for another; metrics show the bytes that are in memory."""
    folder = write_tiny(tmp_path / "model")
    models = [load_packed(folder, "bfloat16", kind)[1] for kind in ("float", "int8", "int4")]
    assert models[0].fingerprint == load_model(folder, dtype="bfloat16").fingerprint
    assert len({model.fingerprint for model in models}) == 3
    sizes = [model.weights_bytes / model.num_parameters for model in models]
    assert sizes == pytest.approx([2, 1, 0.5625], rel=0.1)


def test_a_failure_while_a_matrix_is_packed_ends_the_load(tmp_path: Path) -> None:
    """It happens in another thread, while the next matrix is read."""
    folder = write_tiny(tmp_path / "model")
    prepared, _ = load_packed(folder, "bfloat16")
    with pytest.raises(AssertionError, match="the arena is full"):
        load_model(folder, dtype="bfloat16", encoding=prepared.packer)  # the arena is full already
