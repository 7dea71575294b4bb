"""Which linears run a step of some rows, and the products that torch computes."""

from __future__ import annotations

import pytest
import torch

from ferrule_server.executor.cuda import linears
from ferrule_server.executor.cuda.linears import linear_out
from ferrule_server.kernels import reference
from tests.executor.cuda.fake_gpu import FakeLaunch
from tests.executor.cuda.test_chain import Bench


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


@pytest.mark.parametrize("most", [2, 16, 64])
def test_the_border_to_torch_is_one_number(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of more rows are multiplied by torch, but for those that promise bits."""
    monkeypatch.setattr(linears, "GEMM_ROWS", {9: most})
    bench = Bench(max_rows=72, num_layers=1, simulate=False)
    step = {"stores_logits": True}
    for num_rows in (1, 2, 3, 16, 17, 64, 65):
        kernels = {it.kernel for it in bench.chain.operations(num_rows, **step) if isinstance(it, FakeLaunch)}
        assert ("gemm" in kernels, "gemv" in kernels) == (2 < num_rows <= most, num_rows <= 2)
    promised = bench.chain.operations(64, **step, is_deterministic=True)
    assert "gemm" in {it.kernel for it in promised if isinstance(it, FakeLaunch)}


@pytest.mark.parametrize("norm", ["attention_norm", "mlp_norm"])
@pytest.mark.parametrize("num_rows", [1, 3, 72])
def test_a_norm_that_is_missing_is_an_error(num_rows: int, norm: str) -> None:
    """Without it every logit would be wrong, and nothing would say so."""
    bench = Bench(max_rows=72, num_layers=1, simulate=False)
    del bench.weights.layers[0][norm]
    with pytest.raises(KeyError, match=norm):
        bench.chain.operations(num_rows, stores_logits=True)
