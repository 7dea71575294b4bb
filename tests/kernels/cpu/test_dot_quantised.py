"""The product of integers, in every form that runs here, against exact sums of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from ferrule_server.executor.cpu.quantised import unpack_quantised
from ferrule_server.kernels.cpu.dot import dot_group
from ferrule_server.kernels.cpu.plan import Plan, WeightKind
from tests.executor.cpu.models import QUANTISED_SETS, kernel_set_name


@njit
def _dot(plan, weight, num_tiles, num_rows, inputs, row_bytes, scales, out, out_row_bytes):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    dot_group(plan, weight, num_tiles, num_rows, inputs, row_bytes, scales, out, out_row_bytes, weight, 5)


def _aligned(num_bytes: int) -> torch.Tensor:
    room = torch.zeros(num_bytes + 64, dtype=torch.uint8)
    begin = -room.data_ptr() % 64
    return room[begin : begin + num_bytes]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("kernels", sorted({*QUANTISED_SETS, ("avx512-vnni", True)}), ids=kernel_set_name)
@pytest.mark.parametrize("num_tiles", [1, 3, 16])
def test_sums_are_exact(kernels: tuple[str, bool], kind: WeightKind, num_tiles: int) -> None:
    """For each number of rows that there is code for, with the largest integers among them; other rows stay."""
    plan = Plan(kernels[0], kernels[1], is_bfloat16=True, head_dim=0, weights=kind)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(num_tiles)
    packed = _aligned(num_tiles * plan.tile_bytes + plan.group_end_bytes)
    packed.copy_(torch.randint(0, 256, packed.shape, generator=generator, dtype=torch.uint8))
    packed[:256] = 0x80 if kind == "int8" else 0x88  # the lowest integers
    if kind == "int4":
        scales = 0.5 + torch.rand(num_tiles, 64, generator=generator)
        packed.view(num_tiles, -1)[:, 1024:] = scales.bfloat16().view(torch.uint8)
    else:
        packed[-256:] = torch.ones(64).view(torch.uint8)
    weight = unpack_quantised(plan, packed, 32 * num_tiles).double()
    most = plan.rows_at_once
    inputs = torch.randint(-32767, 32768, (most, 32 * num_tiles), generator=generator, dtype=torch.int16)
    inputs[:, :16] = -32767
    row_scales = torch.rand(most, generator=generator)
    rows = _aligned(most * (64 * num_tiles + 64)).view(most, -1)
    rows[:, : 64 * num_tiles] = inputs.view(torch.uint8)
    rows[:, 64 * num_tiles : 64 * num_tiles + 4] = row_scales.unsqueeze(1).view(torch.uint8)
    exact = inputs.double() @ weight.T
    total = exact if kind == "int4" else exact.float().double()  # the sum of integers is rounded once
    expected = (total * row_scales.double().unsqueeze(1) + 7).float().numpy()
    for num_rows in range(1, most + 1):
        out = torch.full((most, 80), 7.0)
        _dot(
            plan, packed.data_ptr(), num_tiles, num_rows, rows.data_ptr(), rows.stride(0),
            rows.data_ptr() + 64 * num_tiles, out.data_ptr(), out.stride(0) * 4,
        )  # fmt: skip
        found = out[:num_rows, :64].numpy()
        if kind == "int8":
            np.testing.assert_array_equal(found, expected[:num_rows])
        else:
            np.testing.assert_allclose(found, expected[:num_rows], rtol=0, atol=4e-6 * np.abs(expected).max())
        assert (out[num_rows:] == 7).all()
        assert (out[:, 64:] == 7).all()
