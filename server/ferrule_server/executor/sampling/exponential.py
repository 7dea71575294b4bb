"""exp in float64, as the kernels of processors compute it: what a token weighs is the same everywhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt


def exp_of(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the exponentials of numbers of at most 0: float64, contiguous; 0 instead of less than 1e-300."""
    out = np.empty_like(x, order="C")
    _machine_code()(np.ascontiguousarray(x).ctypes.data, out.ctypes.data, x.size)
    return out


@cache
def _machine_code() -> Any:
    """Return compiled code, made in half a second: Numba is imported only where tokens are drawn."""
    from numba import cfunc, types

    from ferrule_server.kernels.cpu.doubles import exponentials

    return cfunc(types.void(*[types.int64] * 3))(exponentials.py_func).ctypes  # type: ignore[attr-defined]
