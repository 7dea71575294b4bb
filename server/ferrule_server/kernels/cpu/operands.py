"""The operands of a product of some rows and 64 outputs, for all who write code of it."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.kernels.cpu.lanes import Builder, Value, advance


@dataclass(frozen=True, slots=True)
class Operands:
    """Addresses and sizes, int64 values of LLVM; ``dot.dot_group`` says what each of them is."""

    weight: Value
    num_tiles: Value
    inputs: Value
    row_bytes: Value
    scales: Value
    out: Value
    out_row_bytes: Value
    ahead: Value
    num_lines: Value

    def input_rows(self, builder: Builder, num_rows: int) -> list[Value]:
        """Return the address of each row of inputs."""
        return [advance(builder, self.inputs, self.row_bytes, m) for m in range(num_rows)]
