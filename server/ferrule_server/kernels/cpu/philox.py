"""The random number of a draw, as ``executor.sampling.philox`` defines it."""

from __future__ import annotations

from typing import Final

from ferrule_server.kernels.cpu.kernel import kernel

SAMPLE: Final = 0
ACCEPT: Final = 2
RESIDUAL: Final = 3
_WORD: Final = 0xFFFFFFFF


@kernel
def uniform(seed: int, position: int, purpose: int) -> float:
    """Return the random number of one draw by Philox4x32-10; integers wrap at 64 bits."""
    x0, x1, x2, x3 = position & _WORD, purpose, 0, 0
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1 = (product_1 >> 32 & _WORD) ^ x1 ^ k0, product_1 & _WORD
        x2, x3 = (product_0 >> 32 & _WORD) ^ x3 ^ k1, product_0 & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return (x0 + 0.5) * 2.0**-32
