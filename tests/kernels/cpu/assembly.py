"""Print the assembly of kernels: ``python -m tests.kernels.cpu.assembly INSTRUCTIONS KERNEL ...``.

Run as a program of its own, because Numba reads its target, NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, once.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, get_args

from numba import cfunc, types

from ferrule_server.kernels.cpu.attention import attend
from ferrule_server.kernels.cpu.dot import LINES_OF_TILES, dot_group
from ferrule_server.kernels.cpu.kernel import kernel
from ferrule_server.kernels.cpu.multiply import multiply
from ferrule_server.kernels.cpu.plan import Instructions, Plan, PlanType
from ferrule_server.kernels.cpu.step import work


@kernel
def product(  # noqa: PLR0917
    plan: Plan, weight: int, num_tiles: int, num_rows: int, rows: int, row_bytes: int, out: int, size: int
) -> int:
    """Add the product of rows and a group of weights to sums."""
    dot_group(plan, weight, num_tiles, num_rows, rows, row_bytes, 0, out, size, weight, LINES_OF_TILES)
    return 0


KERNELS: dict[str, tuple[Any, int]] = {
    "product": (product, 7),
    "multiply": (multiply, 8),
    "attend": (attend, 2),
    "work": (work, 1),
}


def main() -> None:
    """Compile each kernel that the command line names, and print its assembly."""
    instructions: Instructions = next(each for each in get_args(Instructions) if each == sys.argv[1])
    plan = Plan(instructions, is_emulated=False, is_bfloat16=True, head_dim=32)
    for name in sys.argv[2:]:
        kernel, num_arguments = KERNELS[name]
        plan_of_kernel = plan if name == "attend" else replace(plan, head_dim=0)
        compiled = cfunc(types.int64(PlanType(plan_of_kernel), *[types.int64] * num_arguments))(kernel.py_func)
        print(f"== {name}")
        print(compiled._library.get_asm_str())


if __name__ == "__main__":
    main()
