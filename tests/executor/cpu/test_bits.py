"""The same tokens give the same bits, whatever shares a step and however a sequence came about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest

from ferrule_server.executor.base import Float32Array
from ferrule_server.executor.cpu.executor import NumbaCpuExecutor
from ferrule_server.kernels.cpu.plan import Instructions, WeightKind
from tests.executor.cpu.models import KERNEL_SETS, QUANTISED_SETS, kernel_set_name, running, write_tiny
from tests.model.stepping import Piece, PooledSequence, Stepper

LENGTH = 530
"""Beyond two tiles of attention and beyond the rows of a step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


class KernelSet(TypedDict):
    """What ``running`` needs to know."""

    kernels: tuple[Instructions, bool]
    weights: WeightKind


SETS = [
    *(KernelSet(kernels=kernels, weights="float") for kernels in KERNEL_SETS),
    KernelSet(kernels=QUANTISED_SETS[-1], weights="int8"),
    KernelSet(kernels=QUANTISED_SETS[-1], weights="int4"),
]


def set_name(chosen: KernelSet) -> str:
    """Return the id of a test that runs a kernel set."""
    name = kernel_set_name(chosen["kernels"])
    return name if chosen["weights"] == "float" else f"{chosen['weights']} {name}"


@pytest.fixture(scope="module", params=SETS, ids=set_name)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    """A kernel set, emulated if the processor may lack it."""
    chosen: KernelSet = request.param
    return chosen


@pytest.fixture(scope="module")
def executor(folder: Path, kernels: KernelSet) -> Iterator[NumbaCpuExecutor]:
    """An executor with two threads."""
    with running(folder, **kernels) as made:
        yield made


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """The tokens of the sequence that all tests run."""
    return [int(token) for token in np.random.default_rng(1).integers(0, 1024, LENGTH)]


@pytest.fixture(scope="module")
def alone(executor: NumbaCpuExecutor, tokens: list[int]) -> Float32Array:
    """The logits of every position, from steps that hold nothing else, a few rows at a time."""
    stepper, seq = Stepper(executor), PooledSequence()
    parts = [stepper.logits(Piece(seq, tokens[begin : begin + 53], num_outputs=53)) for begin in range(0, LENGTH, 53)]
    return np.concatenate(parts)


def check(found: Float32Array, expected: Float32Array) -> None:
    """Compare bits, so that 0.0 and -0.0 differ."""
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("size", [1, 4, 5, 6, 15, 16, 17, 31, 32, 33, 255, 256, 257, 511, 512])
def test_chunks_of_any_size(executor: NumbaCpuExecutor, tokens: list[int], alone: Float32Array, size: int) -> None:
    """A prompt in chunks around every internal threshold; single tokens only at the end, to save time."""
    stepper, seq = Stepper(executor, seed=size), PooledSequence()
    if size < 15:
        stepper.run(Piece(seq, tokens[: LENGTH - 60]))
    begin = seq.length
    while begin < LENGTH:
        count = min(size, LENGTH - begin)
        check(
            stepper.logits(Piece(seq, tokens[begin : begin + count], num_outputs=count)), alone[begin : begin + count]
        )
        begin += count


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 6, 16, 17, 33, 64])
def test_any_batch_mates(executor: NumbaCpuExecutor, tokens: list[int], alone: Float32Array, batch_size: int) -> None:
    """Decodes of sequences of many lengths in one step, the one that is looked at in the middle."""
    stepper = Stepper(executor, seed=batch_size)
    mates = [PooledSequence() for _ in range(batch_size - 1)]
    for i, mate in enumerate(mates):
        stepper.run(Piece(mate, tokens[5 : 6 + i % 40]))
    seq = PooledSequence()
    stepper.run(Piece(seq, tokens[:300]))
    for position in (300, 301):
        pieces = [Piece(mate, [position % 7]) for mate in mates]
        pieces.insert(batch_size // 2, Piece(seq, [tokens[position]]))
        check(stepper.logits(*pieces)[batch_size // 2], alone[position])


def test_a_prefill_beside_decodes_and_a_verify(
    executor: NumbaCpuExecutor, tokens: list[int], alone: Float32Array
) -> None:
    """A mixed step: a chunk, a decode and eight rows of a verify, all of the same tokens."""
    stepper = Stepper(executor, seed=3)
    one, two, three = (PooledSequence() for _ in range(3))
    stepper.run(Piece(two, tokens[:100]))
    stepper.run(Piece(three, tokens[:250]))
    logits = stepper.logits(
        Piece(one, tokens[:333], num_outputs=10),
        Piece(two, [tokens[100]]),
        Piece(three, tokens[250:258], num_outputs=8),
    )
    check(logits, np.concatenate((alone[323:333], alone[100:101], alone[250:258])))


def test_forks_and_queries(executor: NumbaCpuExecutor, tokens: list[int], alone: Float32Array) -> None:
    """A branch that shares blocks, and a row that is run again without writing."""
    stepper, trunk = Stepper(executor, seed=4), PooledSequence()
    stepper.run(Piece(trunk, tokens[:290]))
    branch = stepper.fork(trunk)
    stepper.run(Piece(branch, [1, 2, 3]))
    check(stepper.logits(Piece(trunk, [tokens[290]]))[0], alone[290])
    check(stepper.logits(Piece(trunk, tokens[289:291], is_query=True, num_outputs=2)), alone[289:291])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_any_number_of_threads_and_a_restart(
    folder: Path,
    kernels: KernelSet,
    tokens: list[int],
    alone: Float32Array,
    num_threads: int,
) -> None:
    """Another executor with other threads, whose long contexts are shared out differently, computes the same."""
    with running(folder, **kernels, num_threads=num_threads) as other:
        other._threads.at = lambda now: num_threads  # type: ignore[method-assign]
        stepper, seq = Stepper(other, seed=9), PooledSequence()
        check(stepper.logits(Piece(seq, tokens[:500], num_outputs=40)), alone[460:500])
        for position in range(500, 504):
            check(stepper.logits(Piece(seq, [tokens[position]]))[0], alone[position])


def test_threads_that_come_and_go(folder: Path, kernels: KernelSet, tokens: list[int], alone: Float32Array) -> None:
    """Steps of one executor with other numbers of threads, as beside busy processes."""
    with running(folder, **kernels, num_threads=3) as other:
        stepper, seq = Stepper(other, seed=9), PooledSequence()
        counts = iter([2, 3, 1, 1, 2, 3, 2, 1])
        other._threads.at = lambda now: next(counts)  # type: ignore[method-assign]
        check(stepper.logits(Piece(seq, tokens[:300], num_outputs=40)), alone[260:300])
        for position in range(300, 307):
            check(stepper.logits(Piece(seq, [tokens[position]]))[0], alone[position])


def test_avx512_and_fma_give_the_same_bits(folder: Path, tokens: list[int]) -> None:
    """``vdpbf16ps`` fuses the odd product first, then the even one, as the portable kernels do."""
    found = []
    for kernels in KERNEL_SETS[:-1]:
        with running(folder, kernels=kernels) as executor:
            found.append(Stepper(executor).logits(Piece(PooledSequence(), tokens[:70], num_outputs=70)))
    for other in found[1:]:
        check(found[0], other)


def test_threads_that_are_slow_to_leave_a_step(folder: Path) -> None:
    """More threads than cores: some leave a step without outputs when the next one, which has some, has begun."""
    tokens = list(range(3, 40))
    with running(folder, num_threads=6) as executor:
        executor._threads.at = lambda now: 6  # type: ignore[method-assign]
        stepper = Stepper(executor, seed=2)
        expected = stepper.logits(Piece(PooledSequence(), tokens))
        for _ in range(80):
            seq = PooledSequence()
            stepper.run(Piece(seq, tokens[:-1], num_outputs=0))
            check(stepper.logits(Piece(seq, tokens[-1:])), expected)
