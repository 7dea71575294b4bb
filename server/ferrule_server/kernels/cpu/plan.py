"""The compile-time part of a kernel: which instructions it uses, and the sizes that are constants in its code.

A :class:`Plan` is an argument of every kernel. Numba compiles a kernel once for each plan, because a plan is its own
type; the code of a kernel reads the attributes of its plan as constants, and branches on them vanish.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from numba import types
from numba.extending import NativeValue, models, overload_attribute, register_model, typeof_impl, unbox

Instructions = Literal["fma", "avx512-bf16", "avx512-vnni", "amx-bf16"]
WeightKind = Literal["float", "int8", "int4"]

TILE_INPUTS: Final = 32
"""Inputs of a tile."""


@dataclass(frozen=True, slots=True)
class MatrixKind:
    """How the matrix of a linear layer is packed: groups of 64 outputs, each with tiles of 32 inputs.

    Attributes:
        name: Of the numbers.
        tile_bytes: Bytes of a tile.
        group_end_bytes: Bytes after the last tile of a group.
        is_quantised: The weights are integers with scales, and so are the inputs.
    """

    name: Literal["float32", "bfloat16", "int8", "int4"]
    tile_bytes: int
    group_end_bytes: int = 0
    is_quantised: bool = False

    def packed_bytes(self, num_rows: int, num_inputs: int) -> int:
        """Return the bytes of a matrix whose rows are whole groups."""
        return num_rows // 64 * (-(-num_inputs // 32) * self.tile_bytes + self.group_end_bytes)


_KINDS: Final = {
    kind.name: kind
    for kind in (
        MatrixKind("float32", 8192),
        MatrixKind("bfloat16", 4096),
        MatrixKind("int8", 2048, 256, is_quantised=True),
        MatrixKind("int4", 1024 + 128, is_quantised=True),
    )
}


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
        weights: ``int8`` and ``int4``: linear layers are quantised (``dot_quantised``).
        has_int8_inputs: The inputs of quantised layers are int8, with ``int8`` weights only; else int16.
    """

    instructions: Instructions
    is_emulated: bool
    is_bfloat16: bool
    head_dim: int
    block_size: int = 16
    weights: WeightKind = "float"
    has_int8_inputs: bool = False

    @property
    def kind(self) -> MatrixKind:
        """How the matrices are packed that these kernels read."""
        return _KINDS[self.weights if self.weights != "float" else "bfloat16" if self.is_bfloat16 else "float32"]

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
    def tile_bytes(self) -> int:
        """Bytes of the weights of 32 inputs and 64 outputs."""
        return self.kind.tile_bytes

    @property
    def group_end_bytes(self) -> int:
        """Bytes after the last tile of 64 outputs."""
        return self.kind.group_end_bytes

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
        return 16 if self.weights == "int8" and not self.has_int8_inputs else 12

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
    *(field.name for field in fields(Plan) if field.name not in ("instructions", "weights")),
    *(name for name, value in vars(Plan).items() if isinstance(value, property) and name != "kind"),
)


def _declare(name: str) -> None:
    @overload_attribute(PlanType, name)
    def _attribute(plan):  # type: ignore[no-untyped-def]
        value = getattr(plan.plan, name)
        return lambda plan: value  # noqa: ARG005  (Numba matches its name)


for _name in _ATTRIBUTES:
    _declare(_name)
