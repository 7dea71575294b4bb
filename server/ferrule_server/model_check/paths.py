"""Which kernels run a network, and what a server on this machine uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ferrule_server.config import ServerConfig
from ferrule_server.executor.base import BLOCK_SIZE
from ferrule_server.executor.host_plan import HostPlan
from ferrule_server.executor.sizes import TORCH_DTYPES, weights_bytes
from ferrule_server.loading import cpu_choice, device_of, dtype_of, host_plan
from ferrule_server.model.config import ModelConfig

if TYPE_CHECKING:
    from ferrule_server.executor.cpu.support import WeightKind
    from ferrule_server.kernels.cpu.plan import Plan

__all__ = ["Path", "gpu_reason", "path_of", "processor_reason"]


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


def processor_reason(network: ModelConfig) -> str:
    """Return why the kernels of the processor cannot run a network, whatever the processor; empty if they can."""
    from ferrule_server.executor.cpu.support import unsupported

    return unsupported(network)


def gpu_reason(network: ModelConfig) -> str:
    """Return why the kernels of a GPU cannot run a network in bfloat16; empty if they can."""
    from ferrule_server.executor.cuda.kernel_choice import unsupported_reason

    return unsupported_reason(network, torch.bfloat16, BLOCK_SIZE)


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
        reason = _gpu_path_reason(config, network, dtype)
        executor = "torch" if reason else "numba-cuda"
    else:
        executor = "numba-cpu" if choice is not None and choice.plan is not None else "torch"
        reason = "the settings say so" if choice is None else choice.reason
    has_plans = choice is not None
    sizes = {name: _float_bytes(network, name, has_plans=has_plans) for name in TORCH_DTYPES}
    for weights in _quantised(device.index is None and has_plans):
        if (plan := _plan(config, network, dtype, weights)) is not None:
            sizes[weights] = weights_bytes(network, TORCH_DTYPES[dtype], plan)
    return Path(executor, device.name, dtype, reason, host_plan(config, network, device, choice)), sizes


def _gpu_path_reason(config: ServerConfig, network: ModelConfig, dtype: str) -> str:
    from ferrule_server.executor.cuda.kernel_choice import unsupported_reason

    if config.executor == "torch" or not config.has_cuda_runner:
        return "the settings say so"
    return unsupported_reason(network, TORCH_DTYPES[dtype], BLOCK_SIZE)


def _quantised(can_quantise: bool) -> tuple[WeightKind, ...]:
    return ("int8", "int4") if can_quantise else ()


def _float_bytes(network: ModelConfig, dtype: str, *, has_plans: bool) -> int:
    from ferrule_server.executor.cpu.support import choose

    plan = choose(network, dtype).plan if has_plans and dtype != "float16" else None
    return weights_bytes(network, TORCH_DTYPES[dtype], plan)


def _plan(config: ServerConfig, network: ModelConfig, dtype: str, weights: WeightKind) -> Plan | None:
    from ferrule_server.executor.cpu.support import choose

    return choose(network, dtype, weights, has_int8_inputs=config.activations == "int8" and weights == "int8").plan
