"""Norms, rotations, embeddings and lanes against ``kernels/reference.py``, torch and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from ferrule_server.kernels import reference
from ferrule_server.kernels.cpu.activations import (
    add_normed,
    layer_norm_row,
    norm_head,
    norm_row,
    rotate_head,
    rotation_row,
)
from ferrule_server.kernels.cpu.lanes import exp, load, max_of, round_to_bfloat16, splat, store, sum_of, tanh
from ferrule_server.kernels.cpu.linear import gelu
from ferrule_server.kernels.cpu.plan import Plan

EPS = np.float32(1e-6)
FLOAT32 = Plan("fma", is_emulated=False, is_bfloat16=False, head_dim=0)


@njit
def _norm_row(plan, row, weight, size, eps, out):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    norm_row(plan, row, weight, size, eps, out)


@njit
def _layer_norm_row(plan, row, weight, bias, size, eps, out):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    layer_norm_row(plan, row, weight, bias, size, eps, out)


@njit
def _add_normed(row, source, weight, size, eps, factor):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    add_normed(row, source, weight, size, eps, factor)


@njit
def _finish_head(head, weight, size, eps, position, table, rotation, scale):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    norm_head(head, weight, size, eps)
    rotation_row(position, table, size, rotation)
    rotate_head(head, size, rotation, rotation + 2 * size, scale)


@njit
def _exp(source, target):  # type: ignore[no-untyped-def]
    store(target, exp(load(source)))


@njit
def _tanh(source, target):  # type: ignore[no-untyped-def]
    store(target, tanh(load(source)))


@njit
def _gelu(source, target):  # type: ignore[no-untyped-def]
    store(target, gelu(load(source)))


@njit
def _round(source, target):  # type: ignore[no-untyped-def]
    store(target, round_to_bfloat16(load(source)))


@njit
def _fold(source, target):  # type: ignore[no-untyped-def]
    store(target, splat(sum_of(load(source))))
    store(target + 64, splat(max_of(load(source))))


@pytest.mark.parametrize("size", [16, 48, 144, 1024])
@pytest.mark.parametrize("scale", [3.0, 1e-3])
def test_norm_of_a_row(size: int, scale: float) -> None:
    """RMSNorm in float32, of rows so small that epsilon decides, too."""
    row, weight, out = torch.randn(size) * scale, torch.randn(size), torch.empty(size)
    _norm_row(FLOAT32, row.data_ptr(), weight.data_ptr(), size, EPS, out.data_ptr())
    torch.testing.assert_close(out, reference.rms_norm(row, weight, float(EPS)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_of_a_row(*, has_bias: bool) -> None:
    """LayerNorm of numbers far from 0, against float64: it is off by two roundings of float32 at most.

    Roundings are those of the row, which a weight multiplies, of the normed value and of the result.
    """
    row, weight, bias, out = torch.randn(144) * 3 + 20, torch.randn(144), torch.randn(144), torch.empty(144)
    bias_address = bias.data_ptr() if has_bias else 0
    _layer_norm_row(FLOAT32, row.data_ptr(), weight.data_ptr(), bias_address, 144, EPS, out.data_ptr())
    normed = torch.nn.functional.layer_norm(row.double(), (144,), weight.double(), eps=float(EPS))
    expected = normed + bias if has_bias else normed
    rounding = 2.0**-24 * (row.abs().max() * weight.abs() + normed.abs() + expected.abs())
    assert ((out - expected).abs() <= 2 * rounding).all()


def test_addition_of_a_norm() -> None:
    """What a part of a layer returns is normed and multiplied, then added to the residual stream."""
    row, source, weight = torch.randn(144), torch.randn(144) * 3, torch.randn(144)
    expected = row + 0.3 * reference.rms_norm(source, weight, float(EPS))
    _add_normed(row.data_ptr(), source.data_ptr(), weight.data_ptr(), 144, EPS, np.float32(0.3))
    torch.testing.assert_close(row, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [32, 48, 80, 96, 128])
@pytest.mark.parametrize("position", [0, 1, 511, 40959])
def test_norm_and_rotation_of_a_head(size: int, position: int) -> None:
    """As queries are finished: normalised, rotated by their position, and scaled."""
    head, weight, rotation = torch.randn(size), torch.randn(size), torch.empty(size)
    frequencies = 1e6 ** -(torch.arange(0, size, 2) / size)
    table = torch.stack((frequencies, torch.linspace(0.5, 1.5, size // 2)))
    cos, sin = (part * table[1] for part in reference.rope_angles(torch.tensor([position]), frequencies))
    expected = reference.qk_norm_rope(head.view(1, 1, size), weight, float(EPS), cos, sin).flatten() * 0.25
    _finish_head(
        head.data_ptr(), weight.data_ptr(), size, EPS, position, table.data_ptr(), rotation.data_ptr(),
        np.float32(0.25),
    )  # fmt: skip
    torch.testing.assert_close(head, expected, atol=2e-6, rtol=1e-5)


def test_exp() -> None:
    """Within 3e-7 of the true value from -87 to 88, limited beyond, and NaN stays NaN."""
    values = np.concatenate((np.linspace(-87, 88, 16000), np.linspace(-1e-3, 1e-3, 1600))).astype(np.float32)
    found = np.empty_like(values)
    for i in range(0, len(values), 16):
        _exp(values[i:].ctypes.data, found[i:].ctypes.data)
    true = np.exp(values.astype(np.float64))
    assert np.max(np.abs(found - true) / true) <= 3e-7
    special = np.array([np.nan, -np.inf, np.inf, -1e30, 1e30, 0.0, -0.0, -88.0] * 2, np.float32)
    out = np.empty_like(special)
    _exp(special.ctypes.data, out.ctypes.data)
    assert np.isnan(out[0])
    assert (out[[1, 3, 7]] < 2e-38).all()
    assert (out[[2, 4]] > 1e38).all()
    assert (out[[5, 6]] == 1).all()


def test_tanh() -> None:
    """Within 3e-7 of the true value, also of small numbers; NaN stays NaN."""
    values = np.concatenate((np.linspace(-12, 12, 16000), np.geomspace(1e-30, 1, 1600))).astype(np.float32)
    found = np.empty_like(values)
    for i in range(0, len(values), 16):
        _tanh(values[i:].ctypes.data, found[i:].ctypes.data)
    true = np.tanh(values.astype(np.float64))
    assert (np.abs(found - true) <= 3e-7 * np.abs(true)).all()
    special = np.array([np.nan, -np.inf, np.inf, -1e30, 1e30, 0.0, -0.0, 100.0] * 2, np.float32)
    out = np.empty_like(special)
    _tanh(special.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out, np.tanh(special))


def test_gelu() -> None:
    """The approximation by a tanh, written with an exponential; NaN stays NaN, and infinities have their limits."""
    values = np.linspace(-12, 12, 16000).astype(np.float32)
    found = np.empty_like(values)
    for i in range(0, len(values), 16):
        _gelu(values[i:].ctypes.data, found[i:].ctypes.data)
    true = torch.nn.functional.gelu(torch.from_numpy(values).double(), approximate="tanh").numpy()
    np.testing.assert_allclose(found, true, rtol=1e-6, atol=1e-7)
    special = np.array([np.nan, np.inf, -1e30, 1e30, 0.0, -100.0, 100.0, -0.0] * 2, np.float32)
    out = np.empty_like(special)
    _gelu(special.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(special))
    assert (out[[1, 3, 6]] == special[[1, 3, 6]]).all()
    assert (np.abs(out[[2, 4, 5, 7]]) < 1e-7).all()


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    """To the nearest, to even between two; also of infinities, NaN and the largest numbers."""
    bits = np.random.default_rng(2).integers(0, 2**32, 16000, dtype=np.uint32)
    bits[:48:3] = (bits[:48:3] & 0xFFFF0000) | 0x8000  # halfway between two
    values = bits.view(np.float32)
    found = np.empty_like(values)
    for i in range(0, len(values), 16):
        _round(values[i:].ctypes.data, found[i:].ctypes.data)
    np.testing.assert_array_equal(found, torch.from_numpy(values).bfloat16().float().numpy())


def test_the_order_of_a_sum() -> None:
    """Halves first, so that it is the same on every processor."""
    values = (np.random.default_rng(3).standard_normal(16) * 10.0 ** np.arange(-8, 8)).astype(np.float32)
    out = np.empty(32, np.float32)
    _fold(values.ctypes.data, out.ctypes.data)
    expected = values
    while len(expected) > 1:
        expected = expected[: len(expected) // 2] + expected[len(expected) // 2 :]
    assert (out[:16] == expected[0]).all()
    assert (out[16:] == values.max()).all()
