"""The weights of a model where kernels find them: torch's own tensors, and the table of rotations."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ferrule_server.executor.cuda.gpu import Gpu
from ferrule_server.kernels.cuda.append import rope_table
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.rope import rotation_table
from ferrule_server.model.tensors import ModelWeights


def adopt_weights(gpu: Gpu, weights: ModelWeights, config: ModelConfig, max_context: int) -> Tensor:
    """Let kernels use the weights that a decoder in torch runs on, and return the table of rotations, which is new.

    From now on nobody writes any of them.

    Args:
        gpu: On whose device they lie.
        weights: bf16, contiguous; must outlive the launches.
        config: Of the model.
        max_context: Positions of the table.

    Returns:
        float32 [max_context, head_dim], cosines of all pairs, then sines; on the GPU.

    Raises:
        GpuError: There is no memory for the table.
    """
    with gpu.current():
        frequencies, _ = rotation_table(config.layers[0].rope, config.head_dim).to(gpu.torch_device)
        rope = rope_table(frequencies, max_context)
    for name, tensor in (*_named(weights), ("rope", rope)):
        assert tensor.is_contiguous(), name
        gpu.adopt(name, tensor, is_mutable=False)
    return rope


def _named(weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor once."""
    yield from weights.parts.items()
    for index, layer in enumerate(weights.layers):
        yield from ((f"{name}{index}", tensor) for name, tensor in layer.items())
