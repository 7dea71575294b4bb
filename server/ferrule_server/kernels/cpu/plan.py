"""The compile-time part of a kernel: which instructions it uses, and the sizes that are constants in its code.

A :class:`Plan` is an argument of every kernel. Numba compiles a kernel once for each plan, because a plan is its own
type; the code of a kernel reads the attributes of its plan as constants, and branches on them vanish.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from numba import types
from numba.extending import NativeValue, models, overload_attribute, register_model, typeof_impl, unbox

__all__ = ["Instructions", "Plan", "PlanType"]

Instructions = Literal["fma", "avx512-bf16", "amx-bf16"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How kernels are compiled.

    Attributes:
        instructions: Which products of matrices: fused multiply-add of float32 lanes, the dot products of AVX512-BF16,
            or the tiles of AMX.
        is_emulated: Compute the same bits with fused multiply-add instead; for tests on other processors.
        is_bfloat16: Weights, KV and the inputs of linear layers are bfloat16; else float32, with ``fma`` alone.
        head_dim: Width of a head, a multiple of 32; 0 in kernels that read it from the record of the
            model, so that models of other shapes share their machine code.
        block_size: Slots of a block.
    """

    instructions: Instructions
    is_emulated: bool
    is_bfloat16: bool
    head_dim: int
    block_size: int = 16

    @property
    def rows_at_once(self) -> int:
        """The most rows of inputs that are multiplied together, so that all sums stay in registers."""
        if self.has_tiles:
            return 32
        return 12 if self.instructions == "avx512-bf16" and not self.is_emulated else 5

    @property
    def rows_stored(self) -> int:
        """Sums are stored for so many rows at a time, whatever the number of rows that were asked for."""
        return 16 if self.has_tiles else 1

    @property
    def has_many_registers(self) -> bool:
        """There are registers for about 24 times 16 lanes, else for 6."""
        return self.instructions != "fma"

    @property
    def has_tiles(self) -> bool:
        """Whether threads need the tiles of AMX."""
        return self.instructions == "amx-bf16" and not self.is_emulated

    @property
    def has_wide_inputs(self) -> bool:
        """The inputs of linear layers are stored as float32, although they may be rounded to bfloat16."""
        return self.instructions == "fma"


class PlanType(types.Type):
    """The Numba type of one plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(repr(plan))
        self.plan = plan


@register_model(PlanType)
class _PlanModel(models.OpaqueModel):
    """Nothing of a plan exists at run time."""


@typeof_impl.register(Plan)
def _typeof_plan(plan: Plan, _context: Any) -> PlanType:
    return PlanType(plan)


@unbox(PlanType)
def _unbox_plan(_type: Any, _obj: Any, context: Any) -> NativeValue:
    return NativeValue(context.context.get_dummy_value())


_ATTRIBUTES: Final = (
    *(field.name for field in fields(Plan) if field.name != "instructions"),
    "has_wide_inputs",
    "rows_at_once",
    "rows_stored",
)


def _declare(name: str) -> None:
    @overload_attribute(PlanType, name)
    def _attribute(plan):  # type: ignore[no-untyped-def]
        value = getattr(plan.plan, name)
        return lambda plan: value  # noqa: ARG005  (Numba matches its name)


for _name in _ATTRIBUTES:
    _declare(_name)
