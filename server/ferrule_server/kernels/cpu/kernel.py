"""The decorator of functions that kernels are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])

# Numba's types exist only while it compiles (Any is its edge).
Lanes = Any
"""16 float32 lanes."""
Record = Any
"""A record of ``records``."""

if TYPE_CHECKING:

    def kernel(function: Function) -> Function:
        """Compile a function for other kernels to call."""
        return function

else:
    # Python never calls these functions: without the wrappers for it they are compiled in half the time.
    kernel = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
