"""The skinny GEMM in the simulator: against the reference, and a token's bits whoever stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda import gemm
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, LinearShape
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.replay import without_wrapping
from tools.cuda_simulator import Launch, Memory, from_bf16, run, to_bf16

WHOLE = (1 << 20, 0)
"""K in one part."""

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


def constants_of(
    epilogue: str = "store", *, tiles: int = 1, has_bias: bool = False, stages: int = 4
) -> dict[str, Constant]:
    """Return the constants of a kernel."""
    return dict(gemm.spec(TILES=tiles, EPILOGUE=epilogue, BIAS=has_bias, STAGES=stages).constants)


def simulate(
    case: Case,
    constants: dict[str, Constant],
    *,
    split: tuple[int, int] = WHOLE,
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
    tiles, stages = int(constants["TILES"]), int(constants["STAGES"])  # type: ignore[arg-type]
    num_groups = -(-len(case.weight) // 64)
    memory = Memory()
    x = memory.put("x", case.x, mutable=True, offset=offset)
    weight = memory.put("weight", case.weight, offset=offset)
    bias = memory.put("bias", case.bias, offset=offset)
    if constants["EPILOGUE"] == "residual":
        out = memory.put("out", case.old, mutable=True, offset=offset)
    else:
        kind = np.float32 if constants["EPILOGUE"] == "logits" else np.uint16
        out = memory.empty("out", (tokens, num_rows), kind, offset=offset)
    partials = memory.empty("partials", (num_groups << split[1], 1024 * gemm.PAIRS[tiles]), np.float32, offset=16)
    tickets = memory.put("tickets", np.zeros(num_groups, np.uint32), mutable=True)
    launch = Launch(
        gemm.gemm,
        constants,
        (x, weight, bias, out, partials, tickets, tokens, num_rows, size, *split),
        grid=num_ctas,
        num_threads=256 // gemm.ROW_TILES[tiles],
        shared_bytes=gemm.shared_bytes(tiles, stages),
        specialised=specialised,
    )
    before = memory.get("out")
    results = []
    for seed in seeds:
        memory.write(out, before)
        memory.write(partials, np.full_like(memory.get("partials"), np.nan))
        run(memory, [launch], seed=seed)
        assert not memory.get("tickets").any()
        results.append(memory.get("out"))
    assert len({result.tobytes() for result in results}) == 1
    return results[0] if results[0].dtype == np.float32 else from_bf16(results[0])


def expected(case: Case, constants: dict[str, Constant]) -> NDArray[np.float32]:
    """Return what the reference makes of a case."""
    x, weight, bias, old = (_tensor(part) for part in (case.x, case.weight, case.bias, case.old))
    wide = reference.linear(x.double(), weight.double(), bias.double() if constants["BIAS"] else None)
    y = wide.float().bfloat16()
    if constants["EPILOGUE"] == "swiglu":
        y = reference.activate(y, "silu", is_gated=True)
    if constants["EPILOGUE"] == "residual":
        y = old + y
    return y.float().numpy()


def _tensor(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(from_bf16(bits)).bfloat16()


@pytest.mark.parametrize("epilogue", ["store", "residual", "swiglu", "logits"])
def test_epilogue_equals_the_reference_on_exact_sums(epilogue: str) -> None:
    """Three tokens, an odd number of rows, two tiles of K and a tail: the very bits, whatever the threads' order."""
    constants = constants_of(epilogue, has_bias=True)
    case = whole_numbers(3, 67, 520, epilogue=epilogue)
    split = WHOLE if epilogue == "logits" else (384, 1)
    np.testing.assert_allclose(
        simulate(case, constants, split=split, seeds=AGAIN),
        expected(case, constants),
        rtol=2**-7 if epilogue == "swiglu" else 0,
    )


@pytest.mark.parametrize(
    ("tokens", "tiles", "num_rows", "size", "options"),
    [
        (1, 1, 16, 8, {}),
        (8, 1, 70, 264, {}),
        (9, 2, 16, 256, {"split": (128, 1)}),
        (17, 4, 100, 648, {}),
        (26, 4, 64, 904, {"split": (256, 2)}),
        (40, 8, 70, 400, {}),
        (64, 8, 20, 904, {"split": (128, 3)}),
        pytest.param(3, 1, 16, 72, {"num_ctas": 3}, id="a CTA without work"),
        pytest.param(3, 1, 16, 72, {"offset": 48}, id="operands at a multiple of 16 bytes"),
    ],
)
def test_sizes_equal_the_reference_on_exact_sums(
    tokens: int, tiles: int, num_rows: int, size: int, options: dict[str, Any]
) -> None:
    """Sizes that cross the borders of groups, tiles and parts."""
    constants = constants_of(tiles=tiles)
    case = whole_numbers(tokens, num_rows, size)
    assert (simulate(case, constants, seeds=AGAIN[:2], **options) == expected(case, constants)).all()


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_buffers_go_round(stages: int) -> None:
    """More tiles than buffers, in several items of a CTA."""
    constants = constants_of(stages=stages)
    case = whole_numbers(3, 130, 1288)
    assert (simulate(case, constants, num_ctas=1) == expected(case, constants)).all()


def test_swiglu_rounds_where_the_reference_does() -> None:
    """Normal numbers, a bias and rows of gate and up that fill a tile in part."""
    constants = constants_of("swiglu", has_bias=True)
    case = normal_numbers(5, 27, 136, epilogue="swiglu")
    np.testing.assert_allclose(simulate(case, constants), expected(case, constants), rtol=2**-6, atol=2**-12)


@pytest.mark.parametrize(("epilogue", "split"), [("residual", WHOLE), ("residual", (128, 2)), ("swiglu", (256, 1))])
def test_token_has_the_same_bits_alone_and_among_64(epilogue: str, split: tuple[int, int]) -> None:
    """No order of sums depends on the number of tokens, the grid or the buffers."""
    case = cancelling_numbers(64, 10, 328 if split == (256, 1) else 472, epilogue=epilogue)
    alone = simulate(case.first(3), constants_of(epilogue), split=split, num_ctas=1)
    among_17 = simulate(case.first(17), constants_of(epilogue, tiles=4, stages=2), split=split, num_ctas=3)
    among_64 = simulate(case, constants_of(epilogue, tiles=8), split=split)
    assert (alone == among_17[:3]).all()
    assert (among_17 == among_64[:17]).all()


def test_sums_depend_on_the_split_of_k() -> None:
    """The numbers of the test above are able to show a difference."""
    case = cancelling_numbers(3, 10, 472)
    assert (simulate(case, constants_of()) != simulate(case, constants_of(), split=(128, 2))).mean() > 0.5


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_the_split_follows_from_the_shape_alone(name: str) -> None:
    """No part is empty; the linears of small models find work for most multiprocessors, the output head is whole."""
    shape = MODEL_SHAPES[name]
    assert gemm.split(shape.head) == (shape.hidden_size, 0)
    num_partials, num_tickets = gemm.scratch(shape)
    for linear in shape.linears.values():
        part_size, part_bits = gemm.split(linear)
        assert part_size % 128 == 0
        assert ((1 << part_bits) - 1) * part_size < linear.size <= part_size << part_bits
        items = gemm.num_ctas_needed(linear)
        assert items >= 80
        assert not part_bits or (items * 64 * 64 <= num_partials and items >> part_bits <= num_tickets)


def test_small_linears_are_not_split_further_than_they_go() -> None:
    """A K of one tile is one part, whatever the number of rows."""
    for size in (8, 128):
        assert gemm.split(LinearShape(64, size, "store", False, size)) == (128, 0)
    assert gemm.split(LinearShape(64, 136, "store", False, 136))[1] <= 1


@pytest.mark.parametrize(
    ("epilogue", "stages", "split"), [("logits", 4, WHOLE), ("store", 2, (640, 1)), ("store", 4, (256, 2))]
)
def test_no_synchronisation_is_superfluous(epilogue: str, stages: int, split: tuple[int, int]) -> None:
    """Without any one barrier, wait, fence or commit, or waiting for less, a run is wrong or the simulator objects."""
    constants = constants_of(epilogue, stages=stages)
    case = whole_numbers(3, 130, 904 if split[1] == 2 else 1096)

    def check(specialised: Specialised) -> None:
        for seed in range(2):
            got = simulate(case, constants, split=split, num_ctas=2, seeds=[seed], specialised=specialised)
            assert (got == expected(case, constants)).all()

    found = [str(mutation).partition(" on")[0] for mutation in check_mutants(gemm.gemm, constants, check)]
    assert f"copy_async_wait_{stages - 2} (as copy_async_wait_{stages - 1})" in found
    assert (found.count("barrier"), found.count("fence")) == ((4, 2) if split[1] else (2, 0))


def test_tickets_wrap() -> None:
    """A ticket that counts on and on is right once, and is noticed."""
    case = whole_numbers(3, 16, 256)
    made = without_wrapping(gemm.gemm, constants_of())
    with pytest.raises(AssertionError):
        simulate(case, constants_of(), split=(128, 1), specialised=made)


def test_kernels_fit_the_smallest_gpu_and_two_of_them_an_h100() -> None:
    """All of them, with the 1 KiB that each CTA costs; few are shared by all models."""
    found = {spec for shape in MODEL_SHAPES.values() for spec in gemm.specs(shape)}
    assert len(found) == 4 * len(gemm.TILES_BUILT)
    for spec in found:
        assert spec.shared_bytes <= 99 << 10
        assert 2 * (spec.shared_bytes + 1024) <= 228 << 10


def test_biases_are_added_where_the_model_has_them() -> None:
    """One kernel more for each number of tokens: the output projection and the down projection then differ."""
    plain = MODEL_SHAPES["Qwen3-0.6B"]
    biased = [
        dict(spec.constants) for spec in gemm.specs(replace(plain, has_qkv_bias=True, has_attention_out_bias=True))
    ]
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
def test_normal_numbers_are_close_to_the_reference(tokens: int, epilogue: str) -> None:
    """Several items for each CTA and tails everywhere, in one part and in four."""
    constants = constants_of(epilogue, tiles=gemm.tiles_for(tokens))
    case = normal_numbers(tokens, 150, 904, epilogue=epilogue)
    for split in (WHOLE,) if epilogue == "logits" else (WHOLE, (256, 2)):
        np.testing.assert_allclose(
            simulate(case, constants, split=split, seeds=AGAIN), expected(case, constants), rtol=2**-6, atol=2**-6
        )
