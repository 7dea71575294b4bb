"""Attention of few rows on CUDA cores in the simulator, against plain torch.

The kernel keeps everything in float32 and rounds once, so it is half a bf16 ulp of the output away, and float32 noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ferrule_server.kernels.cuda.attention import PADDED, attention, shared_bytes, specs
from ferrule_server.kernels.cuda.partials import partial_bytes
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, Specialised, specialise
from tests.kernels.cuda.attention_case import EPS, LAYER, Seq, Shape, Step, bits, pool_bytes
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.replay import replay
from tools.cuda_simulator import Launch, Memory, from_bf16

Bits = NDArray[np.uint16]


@dataclass(frozen=True)
class Build:
    """The constants of the kernel that the model does not fix."""

    rows: int = 1
    tile: int = 32
    warps: int = 1
    split: int = 32
    max_new: int = 8

    def sizes(self, shape: Shape) -> dict[str, int]:
        """Return the constants that decide shared memory."""
        return {
            "GROUP": shape.group,
            "HEAD_DIM": shape.head_dim,
            "MAX_NEW_TOKENS": self.max_new,
            "ROWS": self.rows,
            "SPLIT_TOKENS": self.split,
            "TILE": self.tile,
            "WARPS": self.warps,
        }

    def constants(self, shape: Shape) -> Mapping[str, Constant]:
        """Return all constants."""
        return {**self.sizes(shape), "BLOCK_SIZE": shape.block_size, "QK_NORM": shape.has_qk_norm}


class Simulation:
    """A step in simulated memory; ``run`` may be called again and again on it."""

    def __init__(self, step: Step, build: Build, *, num_ctas: int = 3) -> None:
        self.step, self.build, shape = step, build, step.shape
        self.num_ctas = num_ctas
        work = step.work_list(num_ctas, rows_per_tile=build.rows, split=build.split)
        self.work = work
        self.memory = memory = Memory()
        self.pool = memory.sparse("pool", pool_bytes())
        step.fill(memory, self.pool)
        rows = PADDED[shape.group * build.rows]
        floats = partial_bytes(rows=rows, head_dim=shape.head_dim) // 4
        self.arguments = (
            memory.put("qkv", bits(step.qkv), mutable=True, offset=16),
            memory.put("q_norm", bits(step.q_norm), offset=16),
            memory.put("k_norm", bits(step.k_norm), offset=48),
            memory.put("rope", step.rope.numpy(), offset=16),
            memory.put("positions", step.positions, mutable=True),
            memory.put("slot_mapping", step.slots, mutable=True),
            memory.put("block_tables", step.block_tables, mutable=True),
            memory.put("items", work.items, mutable=True, offset=16),
            memory.put("tickets", np.zeros(work.num_tiles, np.uint32), mutable=True),
            memory.empty("partials", max(work.num_partials, 1) * floats, np.float32, offset=16),
            memory.empty(
                "out", (len(step.qkv), shape.group * shape.num_kv_heads, shape.head_dim), np.uint16, offset=16
            ),
            self.pool,
            shape.block_stride,
            shape.layer_stride,
            LAYER,
            shape.num_kv_heads,
            step.block_tables.shape[1],
            EPS,
        )

    def run(self, *, seed: int = 0, times: int = 1, mutant: Specialised | None = None) -> Bits:
        """Launch, in memory as the run before left it but for the output; return the bits of the output."""
        launch = Launch(
            attention,
            self.build.constants(self.step.shape),
            self.arguments,
            grid=self.num_ctas,
            num_threads=32 * self.build.warps,
            shared_bytes=shared_bytes(**self.build.sizes(self.step.shape)),
            specialised=mutant,
        )
        replay(self.memory, [launch] * times, outputs=("out",), counters=("tickets",), seed=seed)
        return self.memory.get("out")

    def check(self, out: Bits) -> None:
        """Assert that the output, the appended tokens and the tickets are right."""
        expected = self.step.expected().numpy()
        np.testing.assert_allclose(from_bf16(out), expected, rtol=2**-8, atol=1e-5)
        _, key, value = self.step.prepared()
        for index, seq in enumerate(self.step.seqs):
            for back in range(1, seq.new + 1):
                row = int(self.step.cu_seqlens_q[index + 1]) - back
                for head in range(self.step.shape.num_kv_heads):
                    wanted = (bits(key)[row, head], bits(value)[row, head])
                    for part in range(2):
                        place = self.pool + self.step.place(index, seq.kv_len - back, part, head)
                        got = self.memory.read(place, self.step.shape.head_dim, np.uint16)
                        if self.step.slots[row] < 0:
                            assert np.isnan(from_bf16(got)).all()
                        else:
                            np.testing.assert_allclose(from_bf16(got), from_bf16(wanted[part]), rtol=2**-8 * (1 - part))
        assert not self.memory.get("tickets").any()


LENGTHS = tuple(Seq(kv_len) for kv_len in (1, 15, 16, 17, 97))
HEADS = {f"{shape.group}-to-1-of-{shape.head_dim}": shape for shape in MODEL_SHAPES.values()}
"""The models by what decides their attention."""


@pytest.mark.parametrize(
    ("shape", "build", "seqs"),
    [
        pytest.param(Shape(group=1), Build(split=64), LENGTHS, id="group-1"),
        pytest.param(Shape(group=2, block_size=32), Build(), (Seq(97), Seq(130)), id="group-2-split"),
        pytest.param(Shape(group=4, num_kv_heads=1), Build(warps=2, split=64), LENGTHS, id="group-4"),
        pytest.param(
            Shape(group=4, num_kv_heads=1, head_dim=128, block_size=64, has_qk_norm=False),
            Build(tile=16, warps=4, split=64),
            (Seq(97),),
            id="group-4-wide",
        ),
        pytest.param(
            Shape(group=1, num_kv_heads=1, head_dim=128),
            Build(tile=16, split=32),
            (Seq(17), Seq(97)),
            id="group-1-wide",
        ),
        pytest.param(
            Shape(group=2, num_kv_heads=1, head_dim=128), Build(tile=16, warps=2), (Seq(17), Seq(97)), id="group-2-wide"
        ),
        pytest.param(
            Shape(group=4, num_kv_heads=1, head_dim=128), Build(tile=8, warps=4), (Seq(40),), id="group-4-short-tile"
        ),
        pytest.param(
            Shape(group=2, num_kv_heads=1, head_dim=128), Build(tile=8, warps=2), (Seq(40),), id="group-2-short-tile"
        ),
        pytest.param(Shape(group=1, num_kv_heads=1, head_dim=128), Build(tile=8), (Seq(40),), id="group-1-short-tile"),
        pytest.param(Shape(group=3, num_kv_heads=1), Build(warps=2, tile=16), (Seq(40),), id="group-3"),
        pytest.param(
            Shape(group=2, num_kv_heads=1),
            Build(rows=2, warps=2, split=64),
            (Seq(70, 3, 3), Seq(33, 5, 2), Seq(9, 2, 0)),
            id="rows",
        ),
        pytest.param(Shape(group=1, num_kv_heads=1), Build(rows=4, warps=2, split=64), (Seq(70, 6, 6),), id="rows-4"),
        pytest.param(Shape(group=1, num_kv_heads=1), Build(tile=16), (Seq(300), Seq(2, 2, 2)), id="segments"),
    ],
)
def test_attention_is_that_of_plain_torch(shape: Shape, build: Build, seqs: tuple[Seq, ...]) -> None:
    """Output, appended K and V and tickets, three times on the same memory in different orders."""
    simulation = Simulation(Step(shape, seqs), build)
    first = simulation.run(seed=1)
    simulation.check(first)
    for seed in (2, 3):
        assert np.array_equal(simulation.run(seed=seed), first)
    simulation.check(first)


@pytest.mark.parametrize("lengths", [(1, 15, 16, 17, 97), pytest.param((270,), marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", HEADS.values(), ids=HEADS)
def test_attention_as_launched_for_a_model(model: ModelShape, lengths: tuple[int, ...]) -> None:
    """The very constants of every kernel that a model gets, at lengths around a block, and three splits."""
    shape = Shape(num_kv_heads=1, group=model.group, head_dim=model.head_dim, has_qk_norm=model.has_qk_norm)
    for made in specs(model):
        found = {name: value for name, value in made.constants if isinstance(value, int)}
        build = Build(*(found[name] for name in ("ROWS", "TILE", "WARPS", "SPLIT_TOKENS", "MAX_NEW_TOKENS")))
        assert build.constants(shape) == dict(made.constants)
        rows = [min(build.rows, length) for length in lengths]
        seqs = tuple(Seq(length, new, new) for length, new in zip(lengths, rows, strict=True))
        simulation = Simulation(Step(shape, seqs), build, num_ctas=2)
        first = simulation.run(seed=1)
        simulation.check(first)
        for seed in (2, 3):
            assert np.array_equal(simulation.run(seed=seed), first)
        simulation.check(first)


SPLIT_SEQS = (Seq(97), Seq(16), Seq(300))
ONE_HEAD = Shape(group=1, num_kv_heads=1)


def test_the_grid_and_the_dealing_of_splits_change_no_bit() -> None:
    """Whoever computes a split, its place in the sum is the same; one CTA leaves no partial at all."""
    step = Step(ONE_HEAD, SPLIT_SEQS)
    outs, shared = [], []
    for num_ctas in (1, 3, 5, 13):
        simulation = Simulation(step, Build(tile=16), num_ctas=num_ctas)
        outs.append(simulation.run())
        shared.append(simulation.work.num_partials)
    assert shared[0] == 0
    assert len(set(shared)) == len(shared)
    for out in outs[1:]:
        assert np.array_equal(out, outs[0])


def test_neighbours_in_the_batch_change_no_bit() -> None:
    """A sequence alone gives what it gives among others, wherever it stands."""
    together = Simulation(Step(ONE_HEAD, SPLIT_SEQS), Build(tile=16)).run()
    for index, seq in enumerate(SPLIT_SEQS):
        assert np.array_equal(Simulation(Step(ONE_HEAD, (seq,)), Build(tile=16)).run()[0], together[index])


def test_rows_of_a_tile_change_no_bit_of_each_other() -> None:
    """The first of two rows gives what it gives when the second is not there: as in plain decoding."""
    shape, build = Shape(group=2, num_kv_heads=1), Build(rows=2, warps=2, split=64)
    both = Step(shape, (Seq(70, 2, 2),))
    first = Step(shape, (Seq(69, 1, 1),))
    first.keys, first.values, first.qkv = both.keys, both.values, both.qkv[:1]
    assert np.array_equal(Simulation(first, build).run()[0], Simulation(both, build).run()[0])


def test_what_a_neighbour_holds_cannot_leak() -> None:
    """NaN in one sequence stays there, although the same CTA goes on with the next one and keeps its registers."""
    step = Step(ONE_HEAD, (Seq(97), Seq(16)))
    step.keys[0][:] = torch.nan
    step.values[0][:] = torch.nan
    out = from_bf16(Simulation(step, Build(tile=16), num_ctas=1).run())
    assert np.isnan(out[0]).all()
    np.testing.assert_allclose(out[1], step.expected().numpy()[1], rtol=2**-8, atol=1e-5)


def test_new_rows_without_a_slot_are_seen_but_not_written() -> None:
    """Slot -1 keeps the pool as it is; the row's K and V count all the same."""
    simulation = Simulation(Step(ONE_HEAD, (Seq(34, 3, 3), Seq(5)), without_slot=(1, 3)), Build(warps=2, split=64))
    simulation.check(simulation.run())


def test_only_the_slots_of_the_step_are_written() -> None:
    """Every other byte of the touched blocks, gaps between layers included, is what it was."""
    step = Step(Shape(), (Seq(34, 2, 2), Seq(16)))
    simulation = Simulation(step, Build())

    def blocks() -> Bits:
        used = step.block_tables[step.block_tables > 0]
        strides = (int(block) * step.shape.block_stride for block in sorted(used))
        size = step.shape.block_stride // 2
        return np.stack([simulation.memory.read(simulation.pool + at, size, np.uint16) for at in strides])

    before = blocks()
    simulation.run()
    changed = (blocks() != before).sum()
    assert changed == 2 * 3 * step.shape.num_kv_heads * step.shape.head_dim


def test_block_ids_reach_the_end_of_a_pool_beyond_32_bits() -> None:
    """The blocks of these tests lie near the end of 120 GiB, or of what a GPU has, more than 8 GiB anyway."""
    step = Step(Shape(), (Seq(17),))
    assert step.place(0, 16, 1, 1) > max(8 << 30, pool_bytes() - (1 << 20))


def test_ctas_without_work_change_nothing() -> None:
    """More CTAs than splits: those left over execute the wait and end."""
    simulation = Simulation(Step(ONE_HEAD, (Seq(9),)), Build(), num_ctas=4)
    simulation.check(simulation.run(times=2))


def test_attention_needs_all_its_synchronisation() -> None:
    """Without any one barrier, fence or wait a step fails in which CTAs share a sequence and one of them goes on."""
    step, build = Step(ONE_HEAD, (Seq(200), Seq(40))), Build(tile=16, warps=2)

    def check(mutant: Specialised) -> None:
        simulation = Simulation(step, build, num_ctas=2)
        assert simulation.work.num_partials > 0
        assert simulation.work.items[:, -1].any()
        simulation.check(simulation.run(times=2, mutant=mutant))

    assert len(check_mutants(attention, build.constants(ONE_HEAD), check)) > 7


@pytest.mark.parametrize("shape", MODEL_SHAPES.values(), ids=MODEL_SHAPES)
def test_what_models_get_fits_half_a_multiprocessor(shape: ModelShape) -> None:
    """Shared memory of all CTAs together, and at most four rows of a KV head."""
    for made in specs(shape):
        assert dict(made.constants)["GROUP"] == shape.group
        assert made.ctas_per_sm * (made.shared_bytes + 1024) <= 114 * 1024
        assert specialise(made.kernel, dict(made.constants)).parameters
    assert len(specs(shape)) == 4 // shape.group
