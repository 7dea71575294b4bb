"""Every kernel that a model needs: what is built, checked and tabled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from ferrule_server.kernels.cuda import (
    add_norm,
    argmax,
    attention,
    embed,
    gemm,
    gemv,
    head,
    log_sum_exp,
    sample,
    top_k,
)
from ferrule_server.kernels.cuda.spec import SHARED_LIMITS, KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import KernelError

__all__ = ["OPS", "Op", "kernels_of", "merged"]


@dataclass(frozen=True, slots=True)
class Op:
    """One module of kernels.

    Attributes:
        name: Of the module.
        specs: What a model of some shape needs of it.
        has_limits: It takes limits of shared memory too, some of ``SHARED_LIMITS``, which decide how much is in flight.
    """

    name: str
    specs: Callable[..., list[KernelSpec]]
    has_limits: bool = False


OPS: tuple[Op, ...] = (
    Op("embed", embed.specs),
    Op("gemv", gemv.specs, has_limits=True),
    Op("gemm", gemm.specs),
    Op("add_norm", add_norm.specs),
    Op("attention", attention.specs),
    Op("head", head.specs, has_limits=True),
    Op("argmax", argmax.specs),
    Op("sample", sample.specs),
    Op("log_sum_exp", log_sum_exp.specs),
    Op("top_k", top_k.specs),
)
"""All of them, in the order in which a step runs them."""


def kernels_of(shape: ModelShape, limits: Sequence[int] = SHARED_LIMITS) -> list[KernelSpec]:
    """Return the kernels that a model of this shape needs on GPUs with some limits of shared memory, each once.

    Raises:
        KernelError: Different things are promised of one kernel.
    """
    return merged(spec for op in OPS for spec in (op.specs(shape, limits) if op.has_limits else op.specs(shape)))


def merged(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Return each kernel once, in the order of its first appearance, with the largest shared memory asked for.

    Args:
        specs: May name one kernel for several sizes, which differ in shared memory and in nothing else.

    Raises:
        KernelError: They differ in something else.
    """
    found: dict[str, KernelSpec] = {}
    for spec in specs:
        known = found.setdefault(spec.name, spec)
        largest = max(known.shared_bytes, spec.shared_bytes)
        if replace(known, shared_bytes=largest) != replace(spec, shared_bytes=largest):
            names = [field.name for field in fields(spec) if getattr(known, field.name) != getattr(spec, field.name)]
            raise KernelError(f"{spec.name} is wanted twice with different {' and '.join(names)}")
        found[spec.name] = replace(spec, shared_bytes=largest)
    return list(found.values())
