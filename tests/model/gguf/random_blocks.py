"""Random matrices in every packed form."""

from __future__ import annotations

import numpy as np

from ferrule_server.kernels.matrix_kinds import MatrixKind
from ferrule_server.model.packed import Array, Codes


def random_codes(kind: MatrixKind, num_rows: int, num_inputs: int, seed: int = 7) -> Codes:
    """Return rows of a packed kind, with the extreme codes and scales among them."""
    generator = np.random.default_rng(seed)
    low, high = (0, 16) if kind.bits == 4 else (-128, 128)
    codes = generator.integers(low, high, (num_rows, num_inputs)).astype(np.uint8 if kind.bits == 4 else np.int8)
    codes[:, :16] = low

    def numbers() -> tuple[Array, Array | None]:
        shape = num_rows, num_inputs // kind.group
        if kind.scale == "float16":
            return generator.normal(0, 0.02, shape).astype(np.float16), None
        if kind.scale == "exponent":
            return generator.integers(115, 125, shape).astype(np.uint8), None
        shared = generator.normal(0, 0.001, (num_rows, num_inputs // 256)).astype(np.float16)
        return generator.integers(-128, 128, shape).astype(np.int8), shared

    scales, shared_scales = numbers()
    offsets, shared_offsets = numbers() if kind.has_offset else (None, None)
    return Codes(kind, codes, scales, offsets, shared_scales, shared_offsets)
