"""Packing weights, and unpacking them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from ferrule_server.executor.cpu.weights import pack_model, unpack_model
from ferrule_server.model.weights import DTypeName, LayerWeights, load_model
from tests.executor.cpu.models import write_awkward, write_tiny


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("write", [write_tiny, write_awkward])
def test_unpacked_weights_are_those_that_were_packed(
    tmp_path: Path, write: Callable[[Path], Path], dtype: DTypeName
) -> None:
    """Torch can take over after a fault: every tensor is back, bit for bit, and a tied head is the embedding."""
    folder = write(tmp_path / "model")
    expected = load_model(folder, dtype=dtype).take_weights()
    model = load_model(folder, dtype=dtype)
    shares: list[float] = []
    packed = pack_model(model.config, model.take_weights(), shares.append)
    found = unpack_model(model.config, packed)
    assert (found.head is found.embedding) == (expected.head is expected.embedding)
    assert torch.equal(found.embedding, expected.embedding)
    assert torch.equal(found.head, expected.head)
    assert torch.equal(found.final_norm, expected.final_norm)
    for layer, original in zip(found.layers, expected.layers, strict=True):
        for field in fields(LayerWeights):
            one, other = getattr(layer, field.name), getattr(original, field.name)
            assert (one is None) == (other is None), field.name
            assert one is None or torch.equal(one, other), field.name
    assert shares == sorted(shares)
    assert 0.9 < shares[-1] <= 1, "the arena is as large as what it holds"


def test_packed_matrices_are_streams_of_64_outputs(tmp_path: Path) -> None:
    """Output 64 g + n, input 2 p + i is at [g][p][n][i]."""
    folder = write_tiny(tmp_path / "model")
    plain = load_model(folder, dtype="bfloat16").take_weights().layers[0].down
    model = load_model(folder, dtype="bfloat16")
    packed = pack_model(model.config, model.take_weights(), lambda _share: None).layers[0].down
    blocks = packed.view(-1, plain.shape[1] // 2, 64, 2)
    assert blocks[1, 53, 39, 1] == plain[64 + 39, 106 + 1]
    assert packed.data_ptr() % 64 == 0
