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
    rope = adopt_weights(gpu, plain, model.config, 64)
    tensors = [*plain.parts.values(), *(tensor for layer in plain.layers for tensor in layer.values())]
    adopted = gpu.calls("adopt")
    assert sum(call.num_bytes for call in adopted) == sum(tensor.nbytes for tensor in tensors) + (
        4 * 64 * model.config.head_dim
    )
    assert len(adopted) == len({id(tensor) for tensor in tensors}) + 1 == len(tensors) + 1
    assert (plain.head is plain.embedding) == model.config.is_tied
    assert all(gpu.address(tensor) for tensor in (*tensors, rope))


def test_weights_must_be_contiguous() -> None:
    """A kernel knows no strides."""
    plain = tiny_model().take_weights()
    plain.layers[0]["down"] = plain.layers[0]["down"].t()
    with pytest.raises(AssertionError, match="down0"):
        adopt_weights(FakeGpu(), plain, tiny_config(), 64)
