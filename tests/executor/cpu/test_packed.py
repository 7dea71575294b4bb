"""Models whose matrices are packed in the file: the kernels compute with exactly its numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

from benchmarks.random_gguf import random_blocks
from ferrule_server.addresses import ListenAddress
from ferrule_server.config import ServerConfig
from ferrule_server.console import say_ready
from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import Float32Array
from ferrule_server.executor.cpu.executor import NumbaCpuExecutor
from ferrule_server.executor.cpu.layout import lay_out
from ferrule_server.kernels.cpu.compiled import Wanted
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.matrix_kinds import MatrixKind
from ferrule_server.loading import network_of
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.gguf.blocks import BLOCKS
from ferrule_server.model.weights import load_model
from tests.executor.cpu.models import QUANTISED_SETS, kernels_of, running
from tests.executor.cpu.packed_files import ALL_TYPES, MIXTURE, VOCAB, write_packed
from tests.executor.cpu.test_against_torch import all_logits, torch_executor
from tests.executor.cpu.test_bits import check
from tests.model.gguf.random_blocks import random_codes
from tests.model.stepping import Piece, PooledSequence, Stepper

LENGTH: Final = 97
PROMPTS: Final = [list(range(3, 203)), [9], list(range(40, 57))]
_LOOK_UP: Final = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 4)
KINDS: Final = tuple(dict.fromkeys(block.kind for block in BLOCKS.values()))


# ---- the layout -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def look_up() -> Mapping[MatrixKind, Callable[..., int]]:
    """What looks rows up, for every kind."""
    plan = Plan("fma", is_emulated=False, is_bfloat16=False, head_dim=64, packed=KINDS[0])
    found = kernels_of(plan, Wanted((), (), KINDS, ())).look_up
    return {kind: _LOOK_UP(address) for kind, address in found.items()}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_row_is_looked_up_as_it_is_in_the_file(name: str, look_up: Mapping[MatrixKind, Callable[..., int]]) -> None:
    """Every row of two groups of 64, bit for bit: random blocks, and the extreme codes and scales of the kind."""
    block = BLOCKS[name]
    for codes in (block.codes(random_blocks(name, 128, 512)), random_codes(block.kind, 128, 512)):
        with np.errstate(over="ignore"):  # of MXFP4, which has every exponent
            expected = codes.unpack()
        packed = np.empty(block.kind.packed_bytes(128, 512), np.uint8)
        lay_out(codes, packed)
        found = np.full((128, 512), np.nan, np.float32)
        for row in range(128):
            look_up[block.kind](None, packed.ctypes.data, row, found[row].ctypes.data, 512)
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with matrices of all types."""
    return write_packed(tmp_path_factory.mktemp("packed") / "all.gguf", ALL_TYPES)


@pytest.fixture(scope="module", params=["dense", "experts"])
def path(request: pytest.FixtureRequest, dense: Path) -> Path:
    """That model, or one with experts."""
    if request.param == "dense":
        return dense
    return write_packed(dense.with_name("experts.gguf"), MIXTURE, "Q8_0", is_mixture=True)


@pytest.fixture(scope="module")
def expected(path: Path) -> Float32Array:
    """Its logits by plain torch with the same numbers in float32."""
    return all_logits(torch_executor(path, "float32", is_plain=True), *PROMPTS)


@pytest.fixture(scope="module")
def executor(path: Path) -> Iterator[NumbaCpuExecutor]:
    """An executor with two threads."""
    with running(path, "float32") as made:
        yield made


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """The tokens of the sequence that is run in several ways."""
    return [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, LENGTH)]


@pytest.fixture(scope="module")
def alone(executor: NumbaCpuExecutor, tokens: list[int]) -> Float32Array:
    """The logits of every position, each from a step of one row."""
    stepper, seq = Stepper(executor), PooledSequence()
    return np.concatenate([stepper.logits(Piece(seq, [token])) for token in tokens])


def test_the_file_has_every_type(dense: Path) -> None:
    """So that no type is left out below."""
    types = read_config(dense).blocks
    assert set(types.values()) == set(BLOCKS)
    assert len(types) == len(ALL_TYPES) - 1  # one is F16


def test_logits_are_those_of_the_numbers_in_the_file(path: Path, expected: Float32Array) -> None:
    """Inputs are int16, a hundred times finer than bfloat16; all instructions give the same bits."""
    found = []
    for kernels in QUANTISED_SETS:
        with running(path, "float32", kernels) as executor:
            assert executor.info.kernel_set == "packed-f32/1"
            found.append(all_logits(executor, *PROMPTS))
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=3e-3 * float(expected.std()))
    for other in found[1:]:
        check(other, found[0])


@pytest.mark.parametrize("size", [2, 5, 6, 17, 33, 64, LENGTH])
def test_chunks_of_any_size(executor: NumbaCpuExecutor, tokens: list[int], alone: Float32Array, size: int) -> None:
    """A prompt in chunks gives the bits of single rows."""
    stepper, seq = Stepper(executor, seed=size), PooledSequence()
    for begin in range(0, LENGTH, size):
        part = tokens[begin : begin + size]
        check(stepper.logits(Piece(seq, part, num_outputs=len(part))), alone[begin : begin + size])


def test_forks_and_queries(executor: NumbaCpuExecutor, tokens: list[int], alone: Float32Array) -> None:
    """A branch that shares blocks, beside its trunk, and a row that is run again without writing."""
    stepper, trunk = Stepper(executor, seed=4), PooledSequence()
    stepper.run(Piece(trunk, tokens[:70]))
    branch, other = stepper.fork(trunk), stepper.fork(trunk)
    stepper.run(Piece(other, [1, 2, 3]))
    pieces = Piece(branch, tokens[70:80], num_outputs=10), Piece(trunk, [tokens[70]])
    check(stepper.logits(*pieces), np.concatenate((alone[70:80], alone[70:71])))
    check(stepper.logits(Piece(trunk, tokens[69:71], is_query=True, num_outputs=2)), alone[69:71])


def test_the_description_names_what_is_in_the_file(dense: Path, tmp_path: Path) -> None:
    """The most frequent type comes first, ``dtype`` is that of the rest; the same numbers in floats are another one."""
    with running(dense, "float32") as executor:
        model = executor.info.model
    assert set(model.packed_types) == set(BLOCKS)
    assert (model.packed_types[0], model.dtype) == ("IQ4_NL", "float32")
    plain = load_model(dense, dtype="float32")
    unpacked = load_model(write_packed(tmp_path / "f32.gguf", ALL_TYPES, is_unpacked=True), dtype="float32")
    pairs = zip(plain.take_weights().tensors(), unpacked.take_weights().tensors(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert len({model.fingerprint, plain.fingerprint, unpacked.fingerprint}) == 3
    assert not torch_executor(dense, "float32").info.model.packed_types


# ---- settings -------------------------------------------------------------------------------------------------------


def test_int8_inputs_of_some_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Matrices with codes of 8 bits read int8, those with 4 bits beside them int16, and one of floats floats.

    The line ``ready`` says what the weights are and which kernels run.
    """
    types = {"blk.0.attn_k": "Q8_0", "blk.1.ffn_up": "Q8_0", "blk.1.attn_v": "F16", "output": "Q8_0"}
    path = write_packed(tmp_path / "mixed.gguf", types, "Q4_0")
    expected = all_logits(torch_executor(path, "float32", is_plain=True), *PROMPTS)
    with running(path, "float32", QUANTISED_SETS[-1], has_int8_inputs=True) as executor:
        assert executor.info.kernel_set == "packed-a8-f32/1"
        assert (executor.info.model.dtype, executor.info.model.packed_types) == ("float32", ("Q4_0", "Q8_0"))
        say_ready({"listen": ListenAddress("::1", 7)}, executor.info, ServerConfig(), None)
        assert " dtype=float32 weights=Q4_0+Q8_0 kernel_set=packed-a8-f32/1 " in capsys.readouterr().out
        found = all_logits(executor, *PROMPTS)
    assert 1e-4 < np.abs(found - expected).max() < 0.1 * expected.std()


def test_a_packed_file_is_not_quantised_again(dense: Path) -> None:
    """It is packed as it is."""
    with pytest.raises(ConfigError, match=r"--weights int4: all\.gguf is quantised already"):
        network_of(ServerConfig(model=str(dense), weights="int4"), dense)


@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4", "F16"])
def test_int8_inputs_need_codes_of_8_bits(tmp_path: Path, kind: str) -> None:
    """Codes of 4 bits read int16, whatever the settings say, and floats no integers."""
    path = write_packed(tmp_path / "a.gguf", {}, kind)
    with pytest.raises(ConfigError, match="--activations int8 goes with --weights int8, or Q8_0"):
        network_of(ServerConfig(model=str(path), activations="int8"), path)


def test_int8_inputs_go_with_one_matrix_of_8_bits(tmp_path: Path) -> None:
    """The others read int16."""
    path = write_packed(tmp_path / "a.gguf", {"output": "Q6_K"}, "Q4_K")
    assert network_of(ServerConfig(model=str(path), activations="int8"), path).blocks
