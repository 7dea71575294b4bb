"""The numbers of a packed matrix as formats yield them: codes, scales and offsets, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ferrule_server.kernels.matrix_kinds import MatrixKind

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Codes:
    """Some rows of a packed matrix.

    Attributes:
        kind: What the arrays mean.
        codes: [rows, inputs], uint8 from 0 to 15, or int8.
        scales: [rows, inputs / group], of the type that the kind says; float32 [rows, 1] for scales of rows.
        offsets: The same; None: there are none.
        shared_scales: float16 [rows, inputs / 256], which multiply int8 scales; else None.
        shared_offsets: The same for offsets.
    """

    kind: MatrixKind
    codes: Array
    scales: Array
    offsets: Array | None = None
    shared_scales: Array | None = None
    shared_offsets: Array | None = None

    def unpack(self) -> Float32Array:
        """Return the numbers, float32 [rows, inputs]: each is ``scale * level + offset``, rounded twice."""
        levels = np.array(self.kind.levels, np.float32)[self.codes] if self.kind.levels else self.codes
        num_rows, num_inputs = self.codes.shape
        values = levels.astype(np.float32).reshape(num_rows, self.scales.shape[1], -1)
        values *= _floats(self.kind, self.scales, self.shared_scales)[..., None]
        if self.offsets is not None:
            values += _floats(self.kind, self.offsets, self.shared_offsets)[..., None]
        return values.reshape(num_rows, num_inputs)


def _floats(kind: MatrixKind, values: Array, shared: Array | None) -> Float32Array:
    """Return scales or offsets as float32 [rows, groups]."""
    if kind.scale == "exponent":
        return np.ldexp(np.float32(1), values.astype(np.int32) - 128)
    floats = values.astype(np.float32)
    if shared is None:
        return floats
    return floats * np.repeat(shared.astype(np.float32), values.shape[1] // shared.shape[1], 1)
