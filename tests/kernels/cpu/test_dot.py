"""The product of rows and a group of 64 outputs, in every form that runs here, against sums in the promised order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numba import njit

from ferrule_server.kernels.cpu.dot import GROUP, LINES_OF_TILES, dot_group
from ferrule_server.kernels.cpu.plan import Plan
from tests.executor.cpu.models import KERNEL_SETS, kernel_set_name

Array = npt.NDArray[np.float32]

PLANS = [Plan("fma", is_emulated=False, is_bfloat16=False, head_dim=0)] + [
    Plan(instructions, is_emulated, is_bfloat16=True, head_dim=0)
    for instructions, is_emulated in sorted({*KERNEL_SETS, ("avx512-bf16", True)})
]


@njit
def _dot(plan, weight, num_tiles, num_rows, inputs, row_bytes, out, out_row_bytes):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    dot_group(plan, weight, num_tiles, num_rows, inputs, row_bytes, 0, out, out_row_bytes, weight, LINES_OF_TILES)


def _aligned(values: torch.Tensor) -> torch.Tensor:
    """Return a copy that begins at a multiple of 64 bytes."""
    room = torch.zeros(values.numel() + 64 // values.itemsize, dtype=values.dtype)
    begin = -room.data_ptr() % 64 // values.itemsize
    copy = room[begin : begin + values.numel()].view(values.shape)
    return copy.copy_(values)


def _packed(plan: Plan, weight: torch.Tensor) -> torch.Tensor:
    """Return a group [64, inputs] as ``dot`` describes it."""
    return weight.T if not plan.is_bfloat16 else weight.view(64, -1, 2).transpose(0, 1)


def _fma(x: Array, y: Array, z: Array) -> Array:
    return (np.multiply(x, y, dtype=np.longdouble) + z).astype(np.float32)


def _expected(plan: Plan, inputs: Array, weight: Array) -> Array:
    """Return 7 plus the products, summed in the order that ``dot`` promises: float32 [rows, 64]."""
    total = np.full((len(inputs), GROUP), 7, np.float32)

    def products(k: int, sums: Array) -> Array:
        return _fma(inputs[:, k, None], weight[None, :, k], sums)

    for tile in range(0, inputs.shape[1], 32):
        if plan.instructions == "amx-bf16":
            even, odd = np.zeros_like(total), np.zeros_like(total)
            for k in range(tile, tile + 32, 2):
                even, odd = products(k, even), products(k + 1, odd)
            total += even + odd
            continue
        for k in range(tile, tile + 32, 2):
            total = products(k, products(k + 1, total))
    return total


def _name(plan: Plan) -> str:
    return kernel_set_name((plan.instructions, plan.is_emulated)) + ("" if plan.is_bfloat16 else " float32")


@pytest.mark.parametrize("plan", PLANS, ids=_name)
@pytest.mark.parametrize("num_tiles", [1, 2, 5])
def test_every_sum_has_its_order(plan: Plan, num_tiles: int) -> None:
    """For each number of rows that there is code for, added to 7; sums of other rows and outputs are left alone."""
    generator = torch.Generator().manual_seed(num_tiles)
    dtype = torch.bfloat16 if plan.is_bfloat16 else torch.float32
    most = plan.rows_at_once
    weight = torch.randn(GROUP, 32 * num_tiles, generator=generator).to(dtype)
    inputs = torch.randn(most, 32 * num_tiles, generator=generator).to(dtype)
    expected = _expected(plan, inputs.float().numpy(), weight.float().numpy())
    packed = _aligned(_packed(plan, weight))
    rows = _aligned(inputs.float() if plan.has_wide_inputs else inputs)
    for num_rows in range(1, most + 1):
        out = _aligned(torch.full((most, GROUP + 16), 7.0))
        _dot(
            plan, packed.data_ptr(), num_tiles, num_rows, rows.data_ptr(), rows.stride(0) * rows.itemsize,
            out.data_ptr(), out.stride(0) * 4,
        )  # fmt: skip
        np.testing.assert_array_equal(out[:num_rows, :GROUP].numpy(), expected[:num_rows])
        assert (out[num_rows:] == 7).all()
        assert (out[:, GROUP:] == 7).all()
