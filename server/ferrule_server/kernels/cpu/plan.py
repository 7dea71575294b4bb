"""The compile-time part of a kernel: which instructions it uses, and the sizes that are constants in its code.

A :class:`Plan` is an argument of every kernel. Numba compiles a kernel once for each plan, because a plan is its own
type; the code of a kernel reads the attributes of its plan as constants, and branches on them vanish.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Literal

from numba import types
from numba.core.imputils import lower_constant
from numba.extending import NativeValue, models, overload_attribute, register_model, typeof_impl, unbox

from ferrule_server.kernels.matrix_kinds import BFLOAT16, FLOAT32, MatrixKind

Instructions = Literal["fma", "avx512-bf16", "avx512-vnni", "amx-bf16"]
WeightKind = Literal["float", "int8", "int4"]
"""How linear layers are kept: as floats, or quantised when they are read."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How kernels are compiled.

    Attributes:
        instructions: Which products of matrices: what every processor with fused multiply-add has, the dot products of
            AVX512-BF16, those of AVX512-VNNI (for quantised weights), or the tiles of AMX.
        is_emulated: Compute the same bits with other instructions; for tests on other processors.
        is_bfloat16: KV is bfloat16, and so are weights that are not quantised, and their inputs; else float32, with
            ``fma`` alone.
        head_dim: Width of a head, a multiple of 32; 0 in kernels that read it from the record of the
            model, so that models of other shapes share their machine code.
        block_size: Slots of a block.
        packed: How the matrix is kept that the kernel reads (``dot_quantised``); None: its numbers are floats.
        has_int8_inputs: The inputs of quantised layers with codes of 8 bits are int8; else int16.
    """

    instructions: Instructions
    is_emulated: bool
    is_bfloat16: bool
    head_dim: int
    block_size: int = 16
    packed: MatrixKind | None = None
    has_int8_inputs: bool = False

    @property
    def plain_kind(self) -> MatrixKind:
        """How matrices of floats are packed."""
        return BFLOAT16 if self.is_bfloat16 else FLOAT32

    @property
    def kind(self) -> MatrixKind:
        """How the matrices are packed that these kernels read."""
        return self.packed or self.plain_kind

    def of(self, kind: MatrixKind) -> Plan:
        """Return the plan of kernels that read matrices of a kind in a model with this plan.

        Inputs of floats beside quantised matrices are float32, as all that are not integers are there.
        """
        if kind.is_quantised:
            return replace(self, packed=kind, has_int8_inputs=self.has_int8_inputs and kind.bits == 8)
        if not self.is_quantised:
            return self
        return replace(self, packed=None, has_int8_inputs=False, instructions="fma", is_bfloat16=kind == BFLOAT16)

    @property
    def input_tile_bytes(self) -> int:
        """Bytes of 32 inputs of a row, as linear layers read them."""
        if self.is_quantised:
            return 32 if self.has_int8_inputs else 64
        return 128 if self.has_wide_inputs else 64

    @property
    def is_quantised(self) -> bool:
        """Weights of linear layers are integers, and so are their inputs."""
        return self.kind.is_quantised

    @property
    def tiles_at_once(self) -> int:
        """How many tiles are multiplied with one part of the rows after the other: about 32 KiB of weights.

        The inputs of so many quantised tiles share a scale.
        """
        return 16 if self.is_quantised else 8

    @property
    def rows_at_once(self) -> int:
        """The most rows of inputs that are multiplied together, so that all sums stay in registers."""
        if self.has_tiles:
            return 32
        if self.is_emulated or self.instructions not in ("avx512-bf16", "avx512-vnni"):
            return 5
        return 16 if self.is_quantised and not self.kind.is_grouped and not self.has_int8_inputs else 12

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
        """The inputs of linear layers are stored as float32, although they may be rounded."""
        return self.instructions == "fma" or self.is_quantised

    @property
    def has_rounded_inputs(self) -> bool:
        """The inputs of linear layers are rounded to bfloat16."""
        return self.is_bfloat16 and not self.is_quantised


class PlanType(types.Type):
    """The Numba type of one plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(repr(plan))
        self.plan = plan


class _KindType(types.Type):
    """The Numba type of one kind of matrix."""

    def __init__(self, kind: MatrixKind) -> None:
        super().__init__(repr(kind))
        self.kind = kind


@register_model(PlanType)
@register_model(_KindType)
class _EmptyModel(models.OpaqueModel):
    """Nothing of them exists at run time."""


@typeof_impl.register(Plan)
def _typeof_plan(plan: Plan, _context: Any) -> PlanType:
    return PlanType(plan)


@typeof_impl.register(MatrixKind)
def _typeof_kind(kind: MatrixKind, _context: Any) -> _KindType:
    return _KindType(kind)


@lower_constant(_KindType)
def _lower_kind(context: Any, _builder: Any, _type: Any, _value: Any) -> Any:
    return context.get_dummy_value()


@unbox(PlanType)
def _unbox_plan(_type: Any, _obj: Any, context: Any) -> NativeValue:
    return NativeValue(context.context.get_dummy_value())


def _attributes(record: type) -> set[str]:
    """Return the fields and properties of a record that kernels can read."""
    properties = {name for name, value in vars(record).items() if isinstance(value, property)}
    return properties | {field.name for field in fields(record)} - {"instructions", "packed", "name", "scale", "levels"}


def _declare(kind: type, name: str, of: Callable[[Any], Any]) -> None:
    @overload_attribute(kind, name)
    def _attribute(plan):  # type: ignore[no-untyped-def]
        value = getattr(of(plan), name)
        return lambda plan: value  # noqa: ARG005  (Numba matches its name)


for _name in _attributes(Plan):
    _declare(PlanType, _name, attrgetter("plan"))
for _name in _attributes(MatrixKind):
    _declare(_KindType, _name, attrgetter("kind"))
