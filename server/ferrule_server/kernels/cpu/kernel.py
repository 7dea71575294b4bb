"""The decorators of functions that kernels are made of: one of Python, one of those that write LLVM code."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from numba import njit, types
from numba.extending import intrinsic

from ferrule_server.kernels.cpu.plan import PlanType

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


def operation(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return what makes an operation, which kernels call, of a function that writes its LLVM code.

    The function gets LLVM's builder, then each argument: a plan as it is, any other as a value of LLVM. It returns the
    value of the result, if there is one. Others that write code call it as ``emit`` of the operation.

    Args:
        result: Numba's type of the result.
        kinds: Numba's type of each argument; ``PlanType``: that of whichever plan there is.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        @intrinsic
        @wraps(function)
        def define(_typing: Any, *given: Any) -> Any:
            actual = [own if kind is PlanType else kind for kind, own in zip(kinds, given, strict=True)]

            def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                values = (own.plan if isinstance(own, PlanType) else arg for own, arg in zip(given, args, strict=True))
                value = function(builder, *values)
                return context.get_dummy_value() if result is types.void else value

            return result(*actual), emit

        define.emit = function
        return define

    return decorate
