"""The weights of a model where kernels find them: torch's own tensors, and the table of rotations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ferrule_server.executor.cuda.gpu import Gpu
from ferrule_server.kernels.cuda.append import rope_table
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.rope import inverse_frequencies
from ferrule_server.model.tensors import LayerWeights, ModelWeights

__all__ = ["StepWeights", "adopt_weights"]


@dataclass(frozen=True, slots=True)
class StepWeights:
    """What the kernels of a step read and nobody writes any more, all of it on the GPU.

    Attributes:
        embedding: bf16 [vocab_size, hidden_size].
        head: bf16 [vocab_size, hidden_size]; the very tensor ``embedding`` when tied.
        final_norm: bf16 [hidden_size].
        layers: In order.
        rope: float32 [max_context, head_dim], cosines of all pairs, then sines.
    """

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    layers: tuple[LayerWeights, ...]
    rope: Tensor


def adopt_weights(gpu: Gpu, weights: ModelWeights, config: ModelConfig, max_context: int) -> StepWeights:
    """Let kernels use the weights that a decoder in torch runs on; only the table of rotations is new memory.

    Args:
        gpu: On whose device they lie.
        weights: bf16, contiguous; must outlive the launches.
        config: Of the model.
        max_context: Positions of the table.

    Raises:
        GpuError: There is no memory for the table.
    """
    with gpu.current():
        rope = rope_table(inverse_frequencies(config.layers[0].rope, config.head_dim).to(gpu.torch_device), max_context)
    for name, tensor in (*_named(weights), ("rope", rope)):
        assert tensor.is_contiguous(), name
        gpu.adopt(name, tensor, is_mutable=False)
    return StepWeights(weights.embedding, weights.head, weights.final_norm, tuple(weights.layers), rope)


def _named(weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor once."""
    yield from weights.parts.items()
    for index, layer in enumerate(weights.layers):
        yield from ((f"{name}{index}", tensor) for name, tensor in layer.items())
