"""Which instructions the processor has, and so which kernels can be compiled for it.

The question is asked before anything is compiled: LLVM ends the process if it meets an instruction that its target
lacks, and the system ends a thread that uses AMX without permission.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from functools import cache
from typing import Final

import llvmlite.binding as llvm
from numba.core import config

from ferrule_server.kernels.cpu.plan import Instructions, Plan
from ferrule_server.kernels.matrix_kinds import CODES4_OFFSET, INT8, MatrixKind

_VERSIONS: Final[Mapping[str, int]] = {"fma": 1, "avx512-bf16": 1, "amx-bf16": 1, "packed": 1}
"""Raised whenever a kernel set gives other bits than before."""

QUANTISERS: Final[Mapping[MatrixKind, int]] = {INT8: 1, CODES4_OFFSET: 1}
"""Versions of how floats are quantised: raised whenever the same floats give other codes or scales than before."""

_NR_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XFEATURE_XTILEDATA: Final = 18


def kernel_set_id(plan: Plan) -> str:
    """Return the name of the bits that kernels of a plan compute, such as ``fma-bf16/1``.

    Packed weights give the same bits with all instructions, so the name of their kernels has the type of KV only.
    """
    kv = "bf16" if plan.is_bfloat16 else "f32"
    if plan.is_quantised:
        return f"packed{'-a8' if plan.has_int8_inputs else ''}-{kv}/{_VERSIONS['packed']}"
    name = plan.instructions if plan.instructions != "fma" else f"fma-{kv}"
    return f"{name}/{_VERSIONS[plan.instructions]}"


def target_features() -> dict[str, bool]:
    """Return the features that Numba compiles for, by LLVM's names: those of the processor, unless overridden."""
    if config.CPU_FEATURES is None:
        return dict(llvm.get_host_cpu_features()) if config.CPU_NAME is None else {}
    names = [name.strip() for name in config.CPU_FEATURES.split(",") if name.strip()]
    return {name[1:]: name.startswith("+") for name in names}


@cache
def may_use_amx() -> bool:
    """Ask the system for permission to use AMX, for this process and for good; return whether it was given."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(_NR_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def choose_instructions(dtype: str, packed: str = "") -> tuple[Instructions | None, str]:
    """Return the fastest instructions for weights of a type, and the reason, for people.

    Args:
        dtype: ``bfloat16`` or ``float32``.
        packed: How matrices are packed, for people; empty: they are floats.

    Returns:
        None if the processor lacks an instruction that they need: then the kernels cannot run.
    """
    features = target_features()
    if platform.machine() != "aarch64" and not features.get("fma"):
        return None, "the processor has no fused multiply-add (FMA)"
    if packed:
        if platform.machine() != "aarch64" and not features.get("f16c"):
            return None, f"the weights are {packed}, and the processor has no float16 (F16C)"
        has_vnni = features.get("avx512vnni") and features.get("avx512bw")
        if not has_vnni:
            return "fma", f"the weights are {packed}, and the processor has no AVX512-VNNI"
        return "avx512-vnni", f"the weights are {packed}, and the processor has AVX512-VNNI"
    if dtype == "float32":
        return "fma", "the weights are float32"
    if not features.get("avx512bf16"):
        return "fma", "the processor has no AVX512-BF16"
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return "avx512-bf16", "the processor has AVX512-BF16"
    if not may_use_amx():
        return "avx512-bf16", "the processor has AMX, but the system does not permit it"
    return "amx-bf16", "the processor has AMX"
