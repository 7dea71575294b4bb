"""The product of integers, in every form that runs here, against exact sums of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from ferrule_server.kernels.cpu.dot import dot_group
from ferrule_server.kernels.cpu.plan import Instructions, Plan, WeightKind
from tests.executor.cpu.models import QUANTISED_SETS, kernel_set_name
from tests.executor.cpu.unpacking import unpack_rows


@njit
def _dot(plan, weight, num_tiles, num_rows, inputs, row_bytes, scales, out, out_row_bytes):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    dot_group(plan, weight, num_tiles, num_rows, inputs, row_bytes, scales, out, out_row_bytes, weight, 5)


def _aligned(num_bytes: int) -> torch.Tensor:
    room = torch.zeros(num_bytes + 64, dtype=torch.uint8)
    begin = -room.data_ptr() % 64
    return room[begin : begin + num_bytes]


@pytest.mark.parametrize("kind", ["int8", "int8 with int8", "int4"])
@pytest.mark.parametrize("kernels", sorted({*QUANTISED_SETS, ("avx512-vnni", True)}), ids=kernel_set_name)
@pytest.mark.parametrize("num_tiles", [1, 3, 16])
def test_sums_are_exact(kernels: tuple[Instructions, bool], kind: str, num_tiles: int) -> None:
    """For each number of rows that there is code for, with the largest integers among them; other rows stay."""
    has_int8_inputs = kind == "int8 with int8"
    if has_int8_inputs and kernels[0] == "fma":
        pytest.skip("int8 inputs need AVX512-VNNI")
    weights: WeightKind = "int4" if kind == "int4" else "int8"
    plan = Plan(*kernels, is_bfloat16=True, head_dim=0, weights=weights, has_int8_inputs=has_int8_inputs)
    generator = torch.Generator().manual_seed(num_tiles)
    packed = _aligned(num_tiles * plan.tile_bytes + plan.group_end_bytes)
    packed.copy_(torch.randint(0, 256, packed.shape, generator=generator, dtype=torch.uint8))
    packed[:256] = 0x80 if weights == "int8" else 0x88  # the lowest integers
    if kind == "int4":
        scales = 0.5 + torch.rand(num_tiles, 64, generator=generator)
        packed.view(num_tiles, -1)[:, 1024:] = scales.bfloat16().view(torch.uint8)
    else:
        packed[-256:] = torch.ones(64).view(torch.uint8)
    weight = unpack_rows(plan.kind, packed, 32 * num_tiles).double()
    most = plan.rows_at_once
    limit, kind_of_input = (127, torch.int8) if has_int8_inputs else (32767, torch.int16)
    inputs = torch.randint(-limit, limit + 1, (most, 32 * num_tiles), generator=generator, dtype=kind_of_input)
    inputs[:, :16] = -limit
    row_scales = torch.rand(most, generator=generator)
    begins = -128 * inputs.sum(1, dtype=torch.int32)
    width = plan.input_tile_bytes * num_tiles
    rows = _aligned(most * (width + 64)).view(most, -1)
    stored = inputs.view(most, -1, 2, 2).transpose(2, 3).flatten(1) if has_int8_inputs else inputs
    rows[:, :width] = stored.contiguous().view(torch.uint8)
    rows[:, width : width + 4] = row_scales.unsqueeze(1).view(torch.uint8)
    rows[:, width + 4 : width + 8] = begins.unsqueeze(1).view(torch.uint8)
    exact = inputs.double() @ weight.T
    total = exact if kind == "int4" else exact.float().double()  # the sum of integers is rounded once
    expected = (total * row_scales.double().unsqueeze(1) + 7).float().numpy()
    for num_rows in range(1, most + 1):
        out = torch.full((most, 80), 7.0)
        _dot(
            plan, packed.data_ptr(), num_tiles, num_rows, rows.data_ptr(), rows.stride(0),
            rows.data_ptr() + width, out.data_ptr(), out.stride(0) * 4,
        )  # fmt: skip
        found = out[:num_rows, :64].numpy()
        if weights == "int8":
            np.testing.assert_array_equal(found, expected[:num_rows])
        else:
            np.testing.assert_allclose(found, expected[:num_rows], rtol=0, atol=4e-6 * np.abs(expected).max())
        assert (out[num_rows:] == 7).all()
        assert (out[:, 64:] == 7).all()
