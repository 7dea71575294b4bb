"""What runs a network on this machine, and the bytes of its weights by their type."""

from __future__ import annotations

from typing import Final

import torch

from ferrule_server.config import ServerConfig
from ferrule_server.executor.base import BLOCK_SIZE
from ferrule_server.executor.cpu.support import choose
from ferrule_server.executor.cuda.kernel_choice import unsupported_reason
from ferrule_server.executor.sizes import weights_bytes
from ferrule_server.kernels.cpu.plan import WeightKind
from ferrule_server.loading import LoadPlan
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.weights import TORCH_DTYPES

_QUANTISED: Final[tuple[WeightKind, ...]] = ("int8", "int4")


def gpu_reason(network: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return why the kernels of a GPU cannot run a network; empty if they can."""
    return unsupported_reason(network, dtype, BLOCK_SIZE)


def executor_of(config: ServerConfig, plan: LoadPlan) -> tuple[str, str]:
    """Return what runs a model, ``numba-cuda``, ``numba-cpu`` or ``torch``, and why, for people; may be empty."""
    is_gpu = plan.device.index is not None
    if config.executor == "torch" or (is_gpu and not config.has_cuda_runner):
        return "torch", "the settings say so"
    if not is_gpu:
        return "torch" if plan.choice.plan is None else "numba-cpu", plan.choice.reason
    reason = gpu_reason(plan.network, TORCH_DTYPES[plan.dtype])
    return "torch" if reason else "numba-cuda", reason


def bytes_by_type(config: ServerConfig, plan: LoadPlan) -> dict[str, int]:
    """Return the bytes of the weights for each type of ``--dtype``, and of ``--weights`` that can be used."""
    network, has_kernels = plan.network, plan.device.index is None and config.executor != "torch"
    sizes = {}
    for name, dtype in TORCH_DTYPES.items():
        kernels = choose(network, name).plan if has_kernels and name != "float16" else None
        sizes[name] = weights_bytes(network, dtype, kernels)
    for weights in _QUANTISED if has_kernels else ():
        has_int8_inputs = config.activations == "int8" and weights == "int8"
        kernels = choose(network, plan.dtype, weights, has_int8_inputs=has_int8_inputs).plan
        if kernels is not None:
            sizes[weights] = weights_bytes(network, TORCH_DTYPES[plan.dtype], kernels)
    return sizes
