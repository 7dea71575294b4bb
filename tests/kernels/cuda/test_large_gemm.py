"""More rows than the kernels take: the library writes into the buffer that is there."""

import pytest
import torch

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda.gemm import MAX_TOKENS
from ferrule_server.kernels.cuda.large_gemm import linear_out


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_lands_in_the_buffer(has_bias: bool) -> None:
    """Values are those of the definition, up to the rounding of bfloat16; the buffer is the one passed."""
    torch.manual_seed(0)
    x, weight = torch.randn(65, 136).bfloat16(), torch.randn(97, 136).div(12).bfloat16()
    bias = torch.randn(97).bfloat16() if has_bias else None
    out = torch.full((65, 97), torch.nan, dtype=torch.bfloat16)
    place = out.data_ptr()

    linear_out(x, weight, out, bias)

    assert out.data_ptr() == place
    torch.testing.assert_close(out, reference.linear(x, weight, bias), rtol=0.01, atol=0.01)


def test_few_rows_are_left_to_the_kernel() -> None:
    """Who asks for the library by mistake would lose equal bits without noticing."""
    few = torch.zeros(MAX_TOKENS, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="64 rows are work for the kernel"):
        linear_out(few, torch.zeros(8, 8, dtype=torch.bfloat16), few.clone())
