"""Kernels read torch's own weights; only the table of rotations is new."""

from __future__ import annotations

import pytest

from ferrule_server.executor.cuda.weights import adopt_weights
from tests.executor.cuda.fake_gpu import FakeGpu
from tests.executor.cuda.tiny_model import KINDS, tiny_config, tiny_model


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_adopted_once(kind: str) -> None:
    """A tied head is the embedding; nothing is copied."""
    gpu, model = FakeGpu(), tiny_model(kind)
    plain = model.take_weights()
    weights = adopt_weights(gpu, plain, model.config, 64)
    tensors = [plain.embedding, plain.head, plain.final_norm]
    tensors += [getattr(layer, name) for layer in plain.layers for name in layer.__slots__]
    distinct = {id(tensor): tensor for tensor in tensors if tensor is not None}
    adopted = gpu.calls("adopt")
    assert sum(call.num_bytes for call in adopted) == sum(tensor.nbytes for tensor in distinct.values()) + (
        4 * 64 * model.config.head_dim
    )
    assert len(adopted) == len(distinct) + 1
    assert weights.layers[1].down is plain.layers[1].down
    assert (weights.head is weights.embedding) == model.config.is_tied
    assert gpu.address(weights.head)


def test_weights_must_be_contiguous() -> None:
    """A kernel knows no strides."""
    plain = tiny_model().take_weights()
    plain.layers[0].down = plain.layers[0].down.t()
    with pytest.raises(AssertionError, match="down0"):
        adopt_weights(FakeGpu(), plain, tiny_config(), 64)
