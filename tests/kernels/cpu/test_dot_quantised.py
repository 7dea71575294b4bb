"""The product of integers, in every form that runs here, against exact sums of numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numba import njit

from ferrule_server.executor.cpu.layout import lay_out
from ferrule_server.kernels.cpu.activations import SCALE_BYTES, SUMS_BYTES, SUMS_OFFSET
from ferrule_server.kernels.cpu.dot import dot_group
from ferrule_server.kernels.cpu.plan import Instructions, Plan
from ferrule_server.kernels.matrix_kinds import INT8, MatrixKind
from ferrule_server.model.gguf.blocks import BLOCKS
from ferrule_server.model.packed import Codes
from tests.executor.cpu.models import QUANTISED_SETS, kernel_set_name
from tests.executor.cpu.unpacking import unpack_rows
from tests.model.gguf.random_blocks import random_codes

KINDS = {"rows of int8": INT8, **{block.kind.name: block.kind for block in BLOCKS.values()}}
SOME_KINDS = (
    "rows of int8", "codes4/32", "codes4/32+offset", "codes8/32+offset", "codes8/16/256", "table4/32/256", "fp4/32",
)  # fmt: skip
"""A kind for each path of the code: bytes, codes of 4 bits with and without a sign or by a table, scales of rows, of
groups of 16 and of 32, as float16, int8 and exponents, and offsets."""
Case = tuple[tuple[Instructions, bool], str, bool]


def _cases() -> Iterator[Case]:
    """Yield instructions, kinds and whether inputs are int8: all kinds only with the best instructions that run here.

    To compile a kind takes seconds, and instructions differ in products and in how many sums there are, not in kinds.
    """
    for kernels in sorted({*QUANTISED_SETS, ("avx512-vnni", True)}):
        is_best = kernels == max(each for each in QUANTISED_SETS if not each[1])
        for name in KINDS if is_best else SOME_KINDS:
            yield kernels, name, False
            if kernels[0] == "avx512-vnni" and KINDS[name].bits == 8:
                yield kernels, name, True


def _case_name(case: Case) -> str:
    """Return the id of a test."""
    return f"{kernel_set_name(case[0])} {case[1]}{' int8 inputs' if case[2] else ''}"


@njit
def _dot(plan, weight, num_tiles, num_rows, inputs, row_bytes, scales, out, out_row_bytes):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    dot_group(plan, weight, num_tiles, num_rows, inputs, row_bytes, scales, out, out_row_bytes, weight, 5)


def _aligned(num_bytes: int) -> torch.Tensor:
    room = torch.zeros(num_bytes + 64, dtype=torch.uint8)
    begin = -room.data_ptr() % 64
    return room[begin : begin + num_bytes]


def _weights(kind: MatrixKind, num_tiles: int) -> tuple[torch.Tensor, npt.NDArray[np.float64]]:
    """Return a packed group of 64 outputs, with the lowest integers among them, and what it stands for."""
    packed = _aligned(kind.packed_bytes(64, 32 * num_tiles))
    if kind.is_grouped:
        codes = random_codes(kind, 64, 32 * num_tiles)
        lay_out(codes, packed.numpy())
        return packed, codes.unpack().astype(np.float64)
    packed.copy_(torch.randint(0, 256, packed.shape, generator=torch.Generator().manual_seed(5), dtype=torch.uint8))
    packed[:256] = 0x80
    packed[-256:] = torch.ones(64).view(torch.uint8)
    return packed, unpack_rows(kind, packed, 32 * num_tiles).double().numpy()


@pytest.mark.parametrize("case", list(_cases()), ids=_case_name)
def test_sums_are_exact(case: Case) -> None:
    """For each number of rows that there is code for, with the largest integers among them; other rows stay."""
    kernels, name, has_int8_inputs = case
    kind = KINDS[name]
    plan = Plan(*kernels, is_bfloat16=True, head_dim=0, packed=kind, has_int8_inputs=has_int8_inputs)
    for num_tiles in (8, 16) if kind.super_tiles > 1 else (1, 3, 16):
        _check(plan, num_tiles)


@pytest.mark.parametrize("kernels", sorted({*QUANTISED_SETS, ("avx512-vnni", True)}), ids=kernel_set_name)
def test_every_exponent_is_a_power_of_two(kernels: tuple[Instructions, bool]) -> None:
    """The lowest ones too, which float32 holds without a leading bit, and the highest."""
    kind = KINDS["fp4/32"]
    plan = Plan(*kernels, is_bfloat16=True, head_dim=0, packed=kind, has_int8_inputs=False)
    rows = _aligned(plan.input_tile_bytes + SCALE_BYTES + SUMS_OFFSET + SUMS_BYTES)
    rows.view(torch.int16)[5] = 1
    for first in range(0, 256, 64):
        exponents = np.arange(first, first + 64, dtype=np.uint8)[:, None]
        packed, out = _aligned(kind.packed_bytes(64, 32)), torch.zeros(1, 80)
        lay_out(Codes(kind, np.ones((64, 32), np.uint8), exponents), packed.numpy())
        scale = rows.data_ptr() + plan.input_tile_bytes
        rows[plan.input_tile_bytes :][:4] = torch.ones(1).view(torch.uint8)
        _dot(plan, packed.data_ptr(), 1, 1, rows.data_ptr(), len(rows), scale, out.data_ptr(), 320)
        np.testing.assert_array_equal(out[0, :64].double().numpy(), 2.0 ** (exponents[:, 0].astype(float) - 128))


def _check(plan: Plan, num_tiles: int) -> None:
    kind, most = plan.kind, plan.rows_at_once
    packed, weight = _weights(kind, num_tiles)
    generator = torch.Generator().manual_seed(num_tiles)
    limit, kind_of_input = (127, torch.int8) if plan.has_int8_inputs else (32767, torch.int16)
    inputs = torch.randint(-limit, limit + 1, (most, 32 * num_tiles), generator=generator, dtype=kind_of_input)
    inputs[:, :16] = -limit
    row_scales = torch.rand(most, generator=generator)
    width = plan.input_tile_bytes * num_tiles
    rows = _aligned(most * (width + SCALE_BYTES + 48)).view(most, -1)
    stored = inputs.view(most, -1, 2, 2).transpose(2, 3).flatten(1) if plan.has_int8_inputs else inputs
    rows[:, :width] = stored.contiguous().view(torch.uint8)
    rows[:, width : width + 4] = row_scales.unsqueeze(1).view(torch.uint8)
    rows[:, width + 4 : width + 8] = (-128 * inputs.sum(1, dtype=torch.int32)).unsqueeze(1).view(torch.uint8)
    halves = inputs.float().view(most, num_tiles, 2, 16).sum(3)
    sums = torch.cat((halves, halves.sum(2, keepdim=True), torch.zeros(most, num_tiles, 1)), 2).flatten(1)
    rows[:, width + SUMS_OFFSET :][:, : num_tiles * SUMS_BYTES] = sums.view(torch.uint8)
    exact = inputs.double().numpy() @ weight.T
    total = exact if kind.is_grouped else exact.astype(np.float32)  # the sum of integers is rounded once
    expected = (total * row_scales.double().unsqueeze(1).numpy() + 7).astype(np.float32)
    for num_rows in range(1, most + 1):
        out = torch.full((most, 80), 7.0)
        _dot(
            plan, packed.data_ptr(), num_tiles, num_rows, rows.data_ptr(), rows.stride(0),
            rows.data_ptr() + width, out.data_ptr(), out.stride(0) * 4,
        )  # fmt: skip
        found = out[:num_rows, :64].numpy()
        if kind.is_grouped:
            np.testing.assert_allclose(found, expected[:num_rows], rtol=0, atol=4e-6 * np.abs(expected).max())
        else:
            np.testing.assert_array_equal(found, expected[:num_rows])
        assert (out[num_rows:] == 7).all()
        assert (out[:, 64:] == 7).all()
