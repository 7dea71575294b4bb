"""Arrays side by side in one memory, each at a fixed place: what crosses between host and device in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 256
"""Fields begin at multiples of so many bytes."""

_CLOSE_BYTES = 64 << 10
"""What lies between two fields is copied with them up to here: another copy takes as long."""

Array = npt.NDArray[np.int32 | np.float32]
"""What a field looks like on the host."""


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a layout.

    Attributes:
        name: Unique in its layout.
        dtype: torch.int32 or torch.float32.
        shape: First dimension: rows, of which a step may use the first ones alone.
        offset: Bytes from the begin of the layout.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """From one row to the next."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Bytes from the begin of the layout to the end of the last row."""
        return self.offset + self.shape[0] * self.row_bytes


class Layout:
    """Where each field lies, side by side.

    Invariant: fields lie in order, apart, each at a multiple of ALIGNMENT; ``num_bytes`` is such a multiple too.

    Args:
        shapes: Name, dtype and shape of each field, in order.

    Attributes:
        fields: By name.
        num_bytes: Of all together.
    """

    def __init__(self, shapes: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        self.fields: dict[str, Field] = {}
        self.num_bytes = 0
        for name, dtype, shape in shapes:
            field = self.fields[name] = Field(name, dtype, shape, self.num_bytes)
            self.num_bytes = -(-field.end // ALIGNMENT) * ALIGNMENT

    def end_of(self, name: str, num_rows: int) -> int:
        """Return where the first ``num_rows`` rows of a field end, in bytes."""
        field = self.fields[name]
        return field.offset + num_rows * field.row_bytes

    def spans(self, used: Mapping[str, int]) -> list[slice]:
        """Return the bytes of the first rows of some fields, in order; what lies close together is one span.

        Args:
            used: Rows of each field; names of other layouts are ignored.
        """
        spans: list[slice] = []
        for field in self.fields.values():
            if num_rows := used.get(field.name, 0):
                begin, end = field.offset, field.offset + num_rows * field.row_bytes
                if spans and begin - spans[-1].stop <= _CLOSE_BYTES:
                    begin = spans.pop().start
                spans.append(slice(begin, end))
        return spans

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the fields as views of ``memory``, uint8 [num_bytes], by name."""
        return {
            field.name: memory[field.offset : field.end].view(field.dtype).view(field.shape)
            for field in self.fields.values()
        }

    def arrays(self, memory: Tensor) -> dict[str, Array]:
        """Return the fields as arrays on the host over ``memory``, uint8 [num_bytes], by name."""
        return {name: view.numpy() for name, view in self.views(memory).items()}
