"""How the rows of a linear layer are shared out to calls of the product."""

from __future__ import annotations

import pytest

from ferrule_server.kernels.cpu.linear import MOST_BLOCK_ROWS
from ferrule_server.kernels.cpu.multiply import rows_of_part
from ferrule_server.kernels.cpu.plan import Instructions, Plan


@pytest.mark.parametrize("instructions", ["fma", "avx512-bf16", "amx-bf16"])
def test_no_part_stores_sums_of_the_next(instructions: Instructions) -> None:
    """Products are added to sums in memory: what a tile stores beyond its part would be counted twice."""
    plan = Plan(instructions, is_emulated=False, is_bfloat16=True, head_dim=0)
    for num_rows in range(1, MOST_BLOCK_ROWS + 1):
        num_parts = -(-num_rows // plan.rows_at_once)
        rows = rows_of_part.py_func(plan, num_rows, num_parts)  # type: ignore[attr-defined]
        assert rows <= plan.rows_at_once
        assert (num_parts - 1) * rows < num_rows <= num_parts * rows
        if num_parts > 1:
            stored = 16 if instructions == "amx-bf16" else 1
            assert rows % stored == 0
