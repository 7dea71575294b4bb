"""The numbers of blocks are those of the package ``gguf``, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from benchmarks.random_gguf import random_blocks
from ferrule_server.model.gguf.blocks import BLOCKS, dequantise
from ferrule_server.model.stored import LAYOUTS

_ROW = 4096
_AT_ONCE = 256
"""Rows, so that the memory of the long test is bounded."""


def check(name: str, num_rows: int, seed: int) -> None:
    """Compare bits, so that 0.0 and -0.0 differ."""
    rows = random_blocks(name, num_rows, _ROW, seed)
    with np.errstate(over="ignore"):  # MXFP4 has every exponent
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
        found = dequantise(name, rows)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", BLOCKS)
def test_numbers_are_those_of_the_library(name: str) -> None:
    """For 100 000 of them: every bit of a block, and zeros of both signs."""
    assert LAYOUTS[name] == gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    check(name, 25, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_ten_million_numbers_are_those_of_the_library(name: str) -> None:
    """Every type, ten million numbers."""
    for seed in range(10):
        check(name, _AT_ONCE, seed)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_read_row_by_row(name: str) -> None:
    """Codes and scales of a row are those of the row alone."""
    rows = random_blocks(name, 3, 512)
    codes = BLOCKS[name].codes(rows)
    assert codes.kind is BLOCKS[name].kind
    assert codes.codes.shape == (3, 512)
    assert codes.scales.shape == (3, 512 // codes.kind.group)
    alone = np.concatenate([dequantise(name, row[None]) for row in rows])
    np.testing.assert_array_equal(codes.unpack().view(np.uint32), alone.view(np.uint32))
