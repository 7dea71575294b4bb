"""Which kernels run a network, and what a server on this machine uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ferrule_server.config import ServerConfig
from ferrule_server.executor.base import BLOCK_SIZE
from ferrule_server.executor.cpu.support import WeightKind, choose
from ferrule_server.executor.cuda.kernel_choice import unsupported_reason
from ferrule_server.executor.host_plan import HostPlan
from ferrule_server.executor.sizes import TORCH_DTYPES, weights_bytes
from ferrule_server.loading import cpu_choice, device_of, dtype_of, host_plan
from ferrule_server.model.config import ModelConfig

__all__ = ["Path", "gpu_reason", "path_of"]

_QUANTISED: tuple[WeightKind, ...] = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class Path:
    """How a server runs a model.

    Attributes:
        executor: ``numba-cuda``, ``numba-cpu`` or ``torch``.
        device: As PyTorch names it.
        dtype: Of weights that are not quantised, activations and KV.
        reason: Why this executor, for people; may be empty.
        memory: What the memory of the host will be for.
    """

    executor: str
    device: str
    dtype: str
    reason: str
    memory: HostPlan


def gpu_reason(network: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return why the kernels of a GPU cannot run a network; empty if they can."""
    return unsupported_reason(network, dtype, BLOCK_SIZE)


def path_of(config: ServerConfig, network: ModelConfig) -> tuple[Path, dict[str, int]]:
    """Return how a server with these settings runs a network, and the bytes of the weights by their type.

    The types are those of ``--dtype``, and those of ``--weights`` that can be used.

    Raises:
        ConfigError: The settings require kernels that cannot run, or a GPU that is not there.
    """
    device = device_of(config)
    choice = None if device.index is not None else cpu_choice(config, network)
    dtype = dtype_of(config, device, choice)
    if device.index is not None:
        is_chosen = config.executor == "torch" or not config.has_cuda_runner
        reason = "the settings say so" if is_chosen else gpu_reason(network, TORCH_DTYPES[dtype])
        executor = "torch" if reason else "numba-cuda"
    else:
        executor = "numba-cpu" if choice is not None and choice.plan is not None else "torch"
        reason = "the settings say so" if choice is None else choice.reason
    memory = host_plan(config, network, device, choice)
    has_int8_inputs = config.activations == "int8"
    sizes = _sizes(network, dtype, has_plans=choice is not None, has_int8_inputs=has_int8_inputs)
    return Path(executor, device.name, dtype, reason, memory), sizes


def _sizes(network: ModelConfig, dtype: str, *, has_plans: bool, has_int8_inputs: bool) -> dict[str, int]:
    """Return the bytes of the weights by their type; ``dtype`` is that of what is not quantised."""
    sizes = {}
    for name, torch_dtype in TORCH_DTYPES.items():
        plan = choose(network, name).plan if has_plans and name != "float16" else None
        sizes[name] = weights_bytes(network, torch_dtype, plan)
    for weights in _QUANTISED if has_plans else ():
        plan = choose(network, dtype, weights, has_int8_inputs=has_int8_inputs and weights == "int8").plan
        if plan is not None:
            sizes[weights] = weights_bytes(network, TORCH_DTYPES[dtype], plan)
    return sizes
