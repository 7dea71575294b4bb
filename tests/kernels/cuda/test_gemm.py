"""The skinny GEMM in the simulator: against the reference, and a token's bits whoever stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda import gemm
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from tests.kernels.cuda.mutation import check_mutants
from tools.cuda_simulator import Launch, Memory, from_bf16, run, to_bf16

SMALL: dict[str, Constant] = {
    "TILES": 1,
    "ROW_TILES": 1,
    "ROW_WARPS": 1,
    "K_WARPS": 2,
    "SLABS": 1,
    "DEPTH": 1,
    "STAGES": 2,
    "EPILOGUE": "store",
    "BIAS": False,
}
"""Two warps, tiles of 64 values of K: all that orders is there, and little else."""

AGAIN = (1, 2, 3)
"""Seeds of runs in the same memory."""

Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Case:
    """Operands as bf16 bits: x [tokens, size], weight [rows, size], bias [rows], old [tokens, num_rows]."""

    x: Bits
    weight: Bits
    bias: Bits
    old: Bits

    def first(self, num_tokens: int) -> Case:
        """Return the case of the first tokens alone."""
        return Case(self.x[:num_tokens], self.weight, self.bias, self.old[:num_tokens])


def whole_numbers(tokens: int, num_rows: int, size: int, *, epilogue: str = "store", seed: int = 0) -> Case:
    """Return a case whose sums are exact in float32, whatever their order."""
    rng = np.random.default_rng(seed)
    return _case(tokens, num_rows, size, epilogue, lambda *shape: rng.integers(-3, 4, shape).astype(np.float32))


def cancelling_numbers(tokens: int, num_rows: int, size: int, *, epilogue: str = "store") -> Case:
    """Return a case whose sums are 0 but for rounding errors, which show the order of the sums."""
    case, half = normal_numbers(tokens, num_rows, size, epilogue=epilogue), size // 2
    case.x[:, half:] = case.x[:, :half]
    case.weight[:, half:] = case.weight[:, :half] ^ 0x8000
    case.old[:] = 0
    return case


def normal_numbers(tokens: int, num_rows: int, size: int, *, epilogue: str = "store", seed: int = 0) -> Case:
    """Return a case of numbers as they come."""
    rng = np.random.default_rng(seed)
    return _case(tokens, num_rows, size, epilogue, lambda *shape: rng.standard_normal(shape).astype(np.float32))


def _case(tokens: int, num_rows: int, size: int, epilogue: str, draw: Callable[..., NDArray[np.float32]]) -> Case:
    rows = 2 * num_rows if epilogue == "swiglu" else num_rows
    parts = draw(tokens, size), draw(rows, size) / 4, draw(rows), draw(tokens, num_rows)
    return Case(*(to_bf16(part) for part in parts))


def simulate(
    case: Case,
    constants: dict[str, Constant],
    *,
    num_ctas: int = 2,
    seeds: Iterable[int] = (0,),
    offset: int = 0,
    specialised: Specialised | None = None,
) -> NDArray[np.float32]:
    """Return what the kernel makes of a case, as float32 [tokens, num_rows].

    With several seeds it runs as often in the same memory, of which only the output is put back to what it was, and
    must give the same bits each time.
    """
    (tokens, size), num_rows = case.x.shape, case.old.shape[1]
    memory = Memory()
    x = memory.put("x", case.x, mutable=True, offset=offset)
    weight = memory.put("weight", case.weight, offset=offset)
    bias = memory.put("bias", case.bias, offset=offset)
    if constants["EPILOGUE"] == "residual":
        out = memory.put("out", case.old, mutable=True, offset=offset)
    else:
        kind = np.float32 if constants["EPILOGUE"] == "logits" else np.uint16
        out = memory.empty("out", (tokens, num_rows), kind, offset=offset)
    launch = Launch(
        gemm.gemm,
        constants,
        (x, weight, bias, out, tokens, num_rows, size),
        grid=num_ctas,
        num_threads=32 * int(constants["ROW_WARPS"]) * int(constants["K_WARPS"]),  # type: ignore[arg-type]
        shared_bytes=gemm.shared_bytes(constants),
        specialised=specialised,
    )
    before = memory.get("out")
    results = []
    for seed in seeds:
        memory.write(out, before)
        run(memory, [launch], seed=seed)
        results.append(memory.get("out"))
    assert len({result.tobytes() for result in results}) == 1
    return results[0] if results[0].dtype == np.float32 else from_bf16(results[0])


def expected(case: Case, constants: dict[str, Constant]) -> NDArray[np.float32]:
    """Return what the reference makes of a case."""
    x, weight, bias, old = (_tensor(part) for part in (case.x, case.weight, case.bias, case.old))
    wide = reference.linear(x.double(), weight.double(), bias.double() if constants["BIAS"] else None)
    y = wide.float().bfloat16()
    if constants["EPILOGUE"] == "swiglu":
        y = reference.swiglu(y)
    if constants["EPILOGUE"] == "residual":
        y = old + y
    return y.float().numpy()


def _tensor(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(from_bf16(bits)).bfloat16()


@pytest.mark.parametrize("epilogue", ["store", "residual", "swiglu", "logits"])
def test_epilogue_equals_the_reference_on_exact_sums(epilogue: str) -> None:
    """Three tokens, an odd number of rows, two tiles of K and a tail: the very bits, whatever the threads' order."""
    constants = {**SMALL, "EPILOGUE": epilogue, "BIAS": True}
    case = whole_numbers(3, 35, 136, epilogue=epilogue)
    np.testing.assert_allclose(
        simulate(case, constants, seeds=AGAIN), expected(case, constants), rtol=2**-7 if epilogue == "swiglu" else 0
    )


@pytest.mark.parametrize(
    ("tokens", "num_rows", "size", "sizes"),
    [
        (1, 16, 8, {}),
        (8, 33, 72, {"DEPTH": 2}),
        (9, 16, 64, {"TILES": 2, "SLABS": 2}),
        (17, 50, 136, {"TILES": 4, "ROW_WARPS": 2}),
        (17, 15, 328, {"TILES": 4, "DEPTH": 4, "STAGES": 3}),
        (40, 20, 136, {"TILES": 8, "ROW_TILES": 2, "K_WARPS": 4, "SLABS": 2}),
    ],
)
def test_sizes_equal_the_reference_on_exact_sums(
    tokens: int, num_rows: int, size: int, sizes: dict[str, Constant]
) -> None:
    """Every constant that shapes the loops, at sizes that cross their borders."""
    constants = {**SMALL, **sizes}
    case = whole_numbers(tokens, num_rows, size)
    assert (simulate(case, constants, seeds=AGAIN) == expected(case, constants)).all()


def test_swiglu_rounds_where_the_reference_does() -> None:
    """Normal numbers, a bias and rows of gate and up that fill a tile in part."""
    constants = {**SMALL, "EPILOGUE": "swiglu", "BIAS": True, "ROW_TILES": 2}
    case = normal_numbers(5, 27, 136, epilogue="swiglu")
    np.testing.assert_allclose(simulate(case, constants), expected(case, constants), rtol=2**-6, atol=2**-12)


@pytest.mark.parametrize("epilogue", ["residual", "swiglu"])
def test_token_has_the_same_bits_alone_and_among_64(epilogue: str) -> None:
    """No order of sums depends on the number of tokens, the grid, or on any constant but K_WARPS."""
    case = cancelling_numbers(64, 10, 328, epilogue=epilogue)
    small = {**SMALL, "EPILOGUE": epilogue}
    alone = simulate(case.first(3), small, num_ctas=1)
    among_17 = simulate(case.first(17), {**small, "TILES": 4, "SLABS": 2, "DEPTH": 2, "ROW_WARPS": 2}, num_ctas=3)
    among_64 = simulate(case, {**small, "TILES": 8, "ROW_TILES": 2, "STAGES": 3})
    assert (alone == among_17[:3]).all()
    assert (among_17 == among_64[:17]).all()


def test_sums_depend_on_the_split_of_k() -> None:
    """The numbers of the test above are able to show a difference."""
    case = cancelling_numbers(3, 10, 328)
    assert (simulate(case, SMALL) != simulate(case, {**SMALL, "K_WARPS": 4})).mean() > 0.5


def test_one_weight_has_one_split_of_k_for_any_number_of_tokens() -> None:
    """What specs gives for 8 and for 64 tokens sums in the same order."""
    for shape in MODEL_SHAPES.values():
        for num_rows in (shape.qkv_size, shape.hidden_size, shape.vocab_size):
            assert len({gemm.sizes_for(num_rows, tiles, "store")["K_WARPS"] for tiles in gemm.TILES_BUILT}) == 1


def test_more_ctas_than_groups_of_rows_change_nothing() -> None:
    """A CTA without work waits for the grid and leaves."""
    case = whole_numbers(3, 16, 72)
    assert (simulate(case, SMALL, num_ctas=3) == expected(case, SMALL)).all()


def test_operands_may_begin_at_any_multiple_of_16_bytes() -> None:
    """No address is assumed to be more aligned than that."""
    case = whole_numbers(3, 16, 72)
    assert (simulate(case, SMALL, offset=48) == expected(case, SMALL)).all()


@pytest.mark.parametrize("sizes", [{}, {"STAGES": 3, "DEPTH": 2}])
def test_no_synchronisation_is_superfluous(sizes: dict[str, Constant]) -> None:
    """Without any one barrier, wait or commit the result is wrong or the simulator objects."""
    constants = {**SMALL, **sizes}
    case = whole_numbers(3, 40, 264)

    def check(specialised: Specialised) -> None:
        for seed in range(3):
            got = simulate(case, constants, num_ctas=2, seeds=[seed], specialised=specialised)
            assert (got == expected(case, constants)).all()

    assert len(check_mutants(gemm.gemm, constants, check)) >= 5


def test_shared_memory_leaves_half_a_multiprocessor_free() -> None:
    """Every kernel of every model fits in half of 228 KiB, with the 1 KiB that each CTA costs."""
    for shape in MODEL_SHAPES.values():
        for spec in gemm.specs(shape):
            assert spec.ctas_per_sm * (spec.shared_bytes + 1024) <= 114 * 1024, spec.name


def test_biases_are_added_where_the_model_has_them() -> None:
    """One kernel more for each number of tokens: the output projection and the down projection then differ."""
    plain = MODEL_SHAPES["Qwen3-0.6B"]
    biased = [dict(spec.constants) for spec in gemm.specs(replace(plain, has_attention_bias=True))]
    assert len(gemm.specs(plain)) == 4 * len(gemm.TILES_BUILT)
    assert {str(spec["EPILOGUE"]) for spec in biased if spec["BIAS"]} == {"store", "residual"}
    assert len(biased) == 5 * len(gemm.TILES_BUILT)


def test_more_than_64_tokens_are_refused() -> None:
    """The message says how many one launch takes."""
    assert [gemm.tiles_for(tokens) for tokens in (1, 8, 9, 17, 33, 64)] == [1, 1, 2, 4, 8, 8]
    with pytest.raises(ValueError, match="1 to 64"):
        gemm.tiles_for(65)


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", ["store", "residual", "swiglu", "logits"])
@pytest.mark.parametrize("tokens", [3, 8, 17, 33])
def test_default_sizes_equal_the_reference(tokens: int, epilogue: str) -> None:
    """The kernels as they are launched, with several groups of rows for each CTA and tails everywhere."""
    for num_rows in (1000, 40000, 200000):
        constants: dict[str, Constant] = dict(
            gemm.spec(num_rows, TILES=gemm.tiles_for(tokens), EPILOGUE=epilogue).constants
        )
        case = normal_numbers(tokens, 70, 584, epilogue=epilogue)
        np.testing.assert_allclose(
            simulate(case, constants, seeds=AGAIN), expected(case, constants), rtol=2**-6, atol=2**-6
        )
