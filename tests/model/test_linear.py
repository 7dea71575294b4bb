"""Packed linears and the lookup in packed memory against the plain ones."""

from __future__ import annotations

import pytest
import torch

from ferrule_server.model import linear
from ferrule_server.model.linear import can_pack, packed_linear, plain_linear, tied_ends

needs_packing = pytest.mark.skipif(
    not can_pack(torch.zeros(1, 64, dtype=torch.bfloat16)), reason="oneDNN has no bfloat16 here"
)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (97, 48), (64, 33), (640, 256)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_linear_equals_the_plain_one(dtype: torch.dtype, shape: tuple[int, int], has_bias: bool) -> None:
    """For 1 to 65 rows and awkward sizes, to rounding."""
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for num_rows in (1, 2, 17, 65):
        x = torch.randn(num_rows, shape[1]).to(dtype)
        expected = plain_linear(weight, bias)(x)
        torch.testing.assert_close(packed_linear(weight, bias)(x), expected, rtol=tolerance, atol=tolerance)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(640, 96), (97, 48), (128, 50)])
@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["large", "small"])
def test_tied_ends_look_up_rows_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, int], small_bytes: int
) -> None:
    """Whether kept twice, packed only, or (an unexpected layout) plain only: the same rows and products."""
    monkeypatch.setattr(linear, "_SMALL_BYTES", small_bytes)
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    embed, head = tied_ends(weight.clone())
    token_ids = torch.tensor([0, shape[0] - 1, 63, 64, 5, 5])
    assert torch.equal(embed(token_ids), weight[token_ids])
    x = torch.randn(3, shape[1]).to(dtype)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(head(x), x @ weight.T, rtol=tolerance, atol=tolerance)
