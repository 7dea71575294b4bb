"""exp of float64 numbers of at most 0, against extended precision, with the same bits however it is computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ferrule_server.executor.sampling.exponential import exp_of
from ferrule_server.kernels.cpu.doubles import LEAST


def numbers(most: float, count: int) -> npt.NDArray[np.float64]:
    """Return random numbers from ``-most`` to 0, and those at which the rest of the exponent is largest."""
    halves = -np.arange(0.5, min(most, 690.0), 1.0) * np.log(2)
    return np.concatenate([-most * np.random.default_rng(int(most)).random(count), halves, np.nextafter(halves, 0)])


@pytest.mark.parametrize("most", [1e-8, 0.35, 1.0, 40.0, 690.0])
def test_results_are_exact_to_one_unit_in_the_last_place(most: float) -> None:
    """64-bit mantissas tell the error of 53-bit ones; 0.88 was the most of 30 000 000."""
    x = numbers(most, 400_000)
    found = exp_of(x)
    expected = np.exp(x.astype(np.longdouble))
    assert np.finfo(np.longdouble).nmant >= 63
    assert np.abs((found - expected) / np.spacing(found)).max() < 0.95


def test_the_ends_are_zero_and_one() -> None:
    """What a mask forbids weighs nothing, and the largest logit 1; nothing overflows on the way."""
    x = np.array([0.0, -0.0, -np.inf, -1e308, -700.0, -691.0, -690.0, -5e-324])
    found = exp_of(x)
    assert found.tolist() == [1, 1, 0, 0, 0, 0, found[6], 1]
    assert LEAST < found[6] < 1.1 * np.exp(-690.0)


def test_shapes_and_strides_are_those_of_the_numbers() -> None:
    """Slices and matrices; the numbers themselves do not change."""
    x = -np.arange(24.0).reshape(4, 6)
    for each in (x, x[::2, 1::3], x.T, x[:0]):
        before = each.copy()
        assert exp_of(each) == pytest.approx(np.exp(before), rel=1e-15)
        assert np.array_equal(each, before)
