"""Attention in the simulator, against plain torch with every query row on its own.

The tolerance is the one that the kernel states: one rounding of the output, and what rounding the weights to bf16 adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ferrule_server.kernels.cuda.append import ROWS, shared_bytes
from ferrule_server.kernels.cuda.attention import attention, spec, specs
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from ferrule_server.kernels.cuda.work_list import SPLIT
from tests.kernels.cuda.attention_case import EPS, LAYER, Seq, Shape, Step, bits, pool_bytes
from tests.kernels.cuda.mutation import check_mutants
from tools.cuda_simulator import Launch, Memory, from_bf16, run

Bits = NDArray[np.uint16]


@dataclass
class TreeStep(Step):
    """A step whose new tokens are random trees; ``masks`` say which of them each row sees."""

    masks: NDArray[np.uint32] = field(init=False)

    def __post_init__(self) -> None:
        """Draw the trees: slots stay in a row, positions become depths."""
        super().__post_init__()
        random = np.random.default_rng(self.seed)
        self.masks = np.zeros((len(self.positions), 2), np.uint32)
        for seq, end in zip(self.seqs, self.cu_seqlens_q[1:].tolist(), strict=True):
            seen: list[int] = []
            for j in range(seq.new):
                parent = int(random.integers(-1, j)) if j else -1
                seen.append((seen[parent] if parent >= 0 else 0) | 1 << j)
                row = end - seq.new + j
                self.masks[row] = (seen[j] & 0xFFFFFFFF, seen[j] >> 32)
                self.positions[row] = seq.kv_len - seq.new + seen[j].bit_count() - 1


class Simulation:
    """A step in simulated memory; ``run`` may be called again and again on it."""

    def __init__(self, step: Step, *, num_ctas: int = 3, split: int = 32, warps: int = 2) -> None:
        self.step, self.num_ctas, self.warps, shape = step, num_ctas, warps, step.shape
        self.is_tree = isinstance(step, TreeStep)
        work = self.work = step.work_list(
            num_ctas, rows_per_tile=ROWS // shape.group, split=split, is_tree=self.is_tree
        )
        self.constants: dict[str, Constant] = {
            "BLOCK_SIZE": shape.block_size,
            "GROUP": shape.group,
            "HEAD_DIM": shape.head_dim,
            "QK_NORM": shape.has_qk_norm,
            "SPLIT_TOKENS": split,
            "TREE": self.is_tree,
            "WARPS": warps,
        }
        memory = self.memory = Memory()
        self.pool = memory.sparse("pool", pool_bytes())
        step.fill(memory, self.pool)
        floats = shape.group * (shape.head_dim + 4)
        num_heads = shape.group * shape.num_kv_heads
        masks = step.masks if isinstance(step, TreeStep) else np.zeros((1, 2), np.uint32)
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
            memory.empty("partials", max(work.num_places, 1) * floats, np.float32, offset=16),
            memory.empty("out", (len(step.qkv), num_heads, shape.head_dim), np.uint16, offset=16),
            self.pool,
            shape.block_stride,
            shape.layer_stride,
            LAYER,
            shape.num_kv_heads,
            step.block_tables.shape[1],
            EPS,
            memory.put("masks", masks, mutable=True),
        )

    def run(self, *, seed: int = 1, specialised: Specialised | None = None) -> Bits:
        """Run the kernel once; return the bits of the output."""
        launch = Launch(
            attention,
            self.constants,
            self.arguments,
            grid=self.num_ctas,
            num_threads=32 * self.warps,
            shared_bytes=shared_bytes(self.step.shape.head_dim, WARPS=self.warps),
            specialised=specialised,
        )
        run(self.memory, [launch], seed=seed)
        out: Bits = self.memory.get("out").copy()
        return out

    def run_again_and_again(self) -> Bits:
        """Run three times in the same memory, the output poisoned before each; return the bits, which are the same."""
        nothing = np.full_like(self.memory.get("out"), 0xFFFF)
        outs = []
        for seed in (1, 2, 3):
            self.memory.write(self.memory.address("out"), nothing)
            outs.append(self.run(seed=seed))
            assert np.array_equal(outs[-1], outs[0])
            assert not self.memory.get("tickets").any()
        return outs[0]

    def check(self, out: Bits) -> None:
        """Assert that the output and what the new tokens left in the pool are right."""
        check(self.step, out)
        _, keys, values = self.step.prepared()
        for index, seq in enumerate(self.step.seqs):
            for back in range(1, seq.new + 1):
                row = int(self.step.cu_seqlens_q[index + 1]) - back
                key, value = (self.in_pool(index, seq.kv_len - back, part) for part in range(2))
                if self.step.slots[row] < 0:
                    assert np.isnan(from_bf16(np.stack((key, value)))).all()
                else:
                    assert np.abs(key.astype(np.int64) - bits(keys[row])).max() <= 1
                    assert np.array_equal(value, bits(values[row]))

    def in_pool(self, index: int, token: int, part: int) -> Bits:
        """Return K (0) or V (1) of a token in the pool: bits [num_kv_heads, head_dim]."""
        shape = self.step.shape
        places = [self.pool + self.step.place(index, token, part, head) for head in range(shape.num_kv_heads)]
        return np.stack([self.memory.read(place, (shape.head_dim,), np.uint16) for place in places])


def answer(step: Step) -> tuple[Tensor, Tensor]:
    """Return the output before it is rounded and how far from it the kernel may be: float32 [rows, heads, head_dim]."""
    query, new_keys, new_values = step.prepared()
    out, bound = torch.empty(query.shape), torch.empty(query.shape)
    for index, seq in enumerate(step.seqs):
        begin, end = step.cu_seqlens_q[index : index + 2].tolist()
        key = torch.cat((step.keys[index], new_keys[end - seq.new : end])).float()
        value = torch.cat((step.values[index], new_values[end - seq.new : end])).float()
        for row in range(begin, end):
            sees = _sees(step, seq, row)
            for head in range(query.shape[1]):
                k, v = key[sees, head // step.shape.group], value[sees, head // step.shape.group]
                weights = torch.softmax(k @ query[row, head].float() * step.shape.head_dim**-0.5, 0)
                exact = weights @ v
                out[row, head] = exact
                bound[row, head] = 2**-8 * (weights @ (v - exact).abs()) + 2**-8 * exact.abs() + 1e-5
    return out, bound


def _sees(step: Step, seq: Seq, row: int) -> list[int]:
    if not isinstance(step, TreeStep):
        return list(range(int(step.positions[row]) + 1))
    word = int(step.masks[row, 0]) | int(step.masks[row, 1]) << 32
    old = seq.kv_len - seq.new
    return [*range(old), *(old + j for j in range(seq.new) if word >> j & 1)]


def check(step: Step, out: Bits) -> None:
    """Compare an output with the definition."""
    expected, bound = answer(step)
    excess = (torch.from_numpy(from_bf16(out)).reshape(expected.shape) - expected).abs() / bound
    assert excess.max() <= 1, f"{float(excess.max()):.2f} of what is allowed, at {divmod(int(excess.argmax()), 64)}"


SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 128), (2, 64), (4, 128))]


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 128), (4, 64), *SLOW])
def test_rows_attend_what_they_may(group: int, head_dim: int) -> None:
    """Few rows, and more than a tile holds, around the ends of tiles; three runs, seeds and tickets change no bit."""
    shape = Shape(num_kv_heads=1, group=group, head_dim=head_dim)
    seqs = (Seq(17, rows=3, new=3), Seq(33, rows=8, new=8), Seq(97, rows=17 // group, new=17 // group))
    simulation = Simulation(Step(shape, seqs, seed=group))
    torch.testing.assert_close(answer(simulation.step)[0], simulation.step.expected(), rtol=0, atol=1e-5)
    simulation.check(simulation.run_again_and_again())


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_lengths_around_a_tile(block_size: int) -> None:
    """One row each, its token new; without norms of query and key (Llama)."""
    shape = Shape(num_kv_heads=1, block_size=block_size, has_qk_norm=False)
    simulation = Simulation(Step(shape, tuple(Seq(kv_len) for kv_len in (1, 15, 16, 17, 33, 65))))
    simulation.check(simulation.run_again_and_again())


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 9, 16])
def test_every_group_decodes(group: int) -> None:
    """One query row, as many as one product takes, one more, and a whole tile; two KV heads."""
    simulation = Simulation(Step(Shape(group=group), (Seq(97), Seq(16)), seed=group))
    simulation.check(simulation.run())


@pytest.mark.parametrize(("group", "head_dim"), [(2, 64), (3, 128)])
def test_a_tree_is_attended_along_its_branches(group: int, head_dim: int) -> None:
    """Several tiles of rows, old rows and new ones in one sequence, and a sequence with nothing else."""
    step = TreeStep(
        Shape(num_kv_heads=1, group=group, head_dim=head_dim), (Seq(75, rows=18, new=17), Seq(2, rows=2, new=2))
    )
    check(step, Simulation(step, num_ctas=2).run_again_and_again())


def test_as_many_new_tokens_as_fit() -> None:
    """Sixty-four of them, from the last slot of a tile on: their room is full."""
    step = TreeStep(Shape(num_kv_heads=1, group=1), (Seq(79, rows=64, new=64),))
    check(step, Simulation(step, num_ctas=2).run())


def test_rows_that_are_not_new_see_no_further_than_they_stand() -> None:
    """Nothing new, all K and V in the pool; and a sequence with old and new rows."""
    simulation = Simulation(Step(Shape(num_kv_heads=1), (Seq(40, rows=10, new=0), Seq(35, rows=5, new=2))))
    simulation.check(simulation.run())


@pytest.mark.parametrize("seqs", [(Seq(16), Seq(270)), pytest.param((Seq(270, 5, 5),), marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODEL_SHAPES.values(), ids=MODEL_SHAPES)
def test_as_launched_for_a_model(model: ModelShape, seqs: tuple[Seq, ...]) -> None:
    """The very constants that a model gets, three splits."""
    shape = Shape(num_kv_heads=1, group=model.group, head_dim=model.head_dim, has_qk_norm=model.has_qk_norm)
    step = Step(shape, seqs)
    first = Simulation(step, split=SPLIT, warps=4, num_ctas=1)
    assert first.constants == dict(specs(model)[0].constants)
    simulation = Simulation(step, split=SPLIT, warps=4, num_ctas=3)
    out = simulation.run_again_and_again()
    simulation.check(out)
    assert np.array_equal(first.run(), out)


def test_splits_may_be_of_64_tokens() -> None:
    """Then one tile is all that each of four warps does of a split."""
    step = Step(Shape(num_kv_heads=1, group=4), (Seq(150), Seq(70)))
    simulation = Simulation(step, split=64, warps=4, num_ctas=4)
    out = simulation.run_again_and_again()
    simulation.check(out)
    assert np.array_equal(Simulation(step, split=64, warps=4, num_ctas=1).run(), out)


def test_bits_do_not_depend_on_the_grid() -> None:
    """Ten splits in three segments, dealt to 1 to 16 CTAs, among them cuts inside a segment and at its ends."""
    step = Step(Shape(num_kv_heads=1), (Seq(310, rows=3, new=3), Seq(50, rows=2, new=2)))
    first = Simulation(step, num_ctas=1).run()
    check(step, first)
    cuts = set()
    for num_ctas in (2, 3, 5, 16):
        simulation = Simulation(step, num_ctas=num_ctas)
        cuts |= {int(item[4]) % 4 for item in simulation.work.items if item[3] and item[4]}
        assert np.array_equal(simulation.run(), first)
    assert len(cuts) > 2


def test_bits_do_not_depend_on_neighbours() -> None:
    """A sequence gives the same bits alone, between others and in another tile of rows."""
    shape = Shape(num_kv_heads=1)
    seq = Seq(75, rows=5, new=5)
    alone = Simulation(Step(shape, (seq,))).run()
    among = Simulation(Step(shape, (Seq(40, rows=3, new=3), seq, Seq(130, rows=9, new=9)))).run()
    assert np.array_equal(among[3:8], alone)


def test_bits_do_not_depend_on_where_a_row_lies_in_its_tile() -> None:
    """A token asked for again, alone and without writing, gives what it gave among others."""
    step = Step(Shape(num_kv_heads=1), (Seq(75, rows=8, new=0),))
    together = Simulation(step).run()
    one = replace(step, seqs=(Seq(75, rows=3, new=0),), keys=[], values=[])
    one.qkv, one.keys, one.values = step.qkv[5:], step.keys, step.values
    assert np.array_equal(Simulation(one).run(), together[5:])


@pytest.mark.parametrize("group", [2, 4])
def test_a_verify_has_the_bits_of_decodes(group: int) -> None:
    """Token by token, each with the K and V that the one before it left in the pool, or all at once in one tile."""
    shape, count = Shape(num_kv_heads=1, group=group), 16 // group
    step = Step(shape, (Seq(66, rows=count, new=count),))
    simulation = Simulation(step)
    together = simulation.run()
    for row in range(count):
        old, decode = 66 - count + row, Step(shape, (Seq(67 - count + row),))
        decode.qkv = step.qkv[row : row + 1]
        for part, known in enumerate((decode.keys, decode.values)):
            made = [torch.from_numpy(from_bf16(simulation.in_pool(0, token, part))) for token in range(old)]
            known[0] = torch.stack(made).bfloat16()
        assert np.array_equal(Simulation(decode).run()[0], together[row])


def test_what_a_neighbour_holds_cannot_leak() -> None:
    """NaN in one sequence stays there, although the same CTA goes on with the next one and keeps its registers."""
    step = Step(Shape(num_kv_heads=1, group=1), (Seq(97), Seq(21)))
    expected, bound = answer(step)
    step.keys[0][:] = torch.nan
    step.values[0][:] = torch.nan
    out = torch.from_numpy(from_bf16(Simulation(step, num_ctas=1).run()))
    assert out[0].isnan().all()
    assert ((out[1] - expected[1]).abs() <= bound[1]).all()


def test_new_tokens_are_appended_once() -> None:
    """K normalised and rotated, V as it came, in their slots; one with slot -1 is seen but not written.

    The new tokens lie in two splits, the rows in two tiles, so several CTAs compute each K.
    """
    simulation = Simulation(Step(Shape(group=4), (Seq(67, rows=6, new=6),), without_slot=(4,)), num_ctas=6)
    simulation.check(simulation.run())


def test_only_the_slots_of_the_step_are_written() -> None:
    """Every other byte of the touched blocks, gaps between layers included, is what it was."""
    step = Step(Shape(), (Seq(34, 2, 2), Seq(16)))
    simulation = Simulation(step)

    def blocks() -> Bits:
        used = step.block_tables[step.block_tables > 0]
        strides = (int(block) * step.shape.block_stride for block in sorted(used))
        size = step.shape.block_stride // 2
        return np.stack([simulation.memory.read(simulation.pool + at, size, np.uint16) for at in strides])

    before = blocks()
    simulation.check(simulation.run())
    assert (blocks() != before).sum() == 2 * 3 * step.shape.num_kv_heads * step.shape.head_dim


def test_block_ids_reach_the_end_of_a_pool_beyond_32_bits() -> None:
    """The blocks of these tests lie near the end of 120 GiB, or of what a GPU has, more than 8 GiB anyway."""
    assert Step(Shape(), (Seq(17),)).place(0, 16, 1, 1) > max(8 << 30, pool_bytes() - (1 << 20))


def test_ctas_without_work_change_nothing() -> None:
    """More CTAs than splits: those left over execute the wait and end."""
    simulation = Simulation(Step(Shape(num_kv_heads=1, group=1), (Seq(9),)), num_ctas=4)
    simulation.check(simulation.run_again_and_again())


def test_weights_add_up_to_one() -> None:
    """Where all V are equal the output is that V, although weights are rounded to bf16."""
    step = Step(Shape(num_kv_heads=1), (Seq(170, rows=5, new=0),))
    step.values[0][:] = step.values[0][0]
    out = Simulation(step).run()
    assert np.array_equal(out, np.broadcast_to(bits(step.values[0][0]), out.shape))


def test_without_any_barrier_fence_or_wait_it_fails() -> None:
    """Two CTAs meet at a ticket with both kinds of partials; one CTA has several items of several splits."""
    shape = Shape(num_kv_heads=1, group=4)
    met = Step(shape, (Seq(170, rows=2, new=2),))
    alone = Step(shape, (Seq(70, rows=1, new=1), Seq(40)))

    def attempt(specialised: Specialised) -> None:
        simulation = Simulation(met, num_ctas=2)
        assert simulation.work.num_places == 3 * 2
        simulation.check(simulation.run(specialised=specialised))
        simulation = Simulation(alone, num_ctas=1)
        simulation.check(simulation.run(specialised=specialised))

    found = check_mutants(attention, Simulation(met).constants, attempt)
    assert {mutation.name for mutation in found} == {"barrier", "fence", "grid_wait"}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_memory_fits_every_gpu(head_dim: int) -> None:
    """All planned CTAs fit the 100 KiB of the smallest multiprocessor, twice as many 228 KiB, with 1 KiB more each."""
    made = spec(ModelShape(1024, 3072, 1, 16, 8, head_dim, 1000, has_qk_norm=True))
    assert made.shared_bytes <= 101_376
    assert made.ctas_per_sm * (made.shared_bytes + 1024) <= 100 * 1024
    assert 2 * made.ctas_per_sm * (made.shared_bytes + 1024) <= 228 * 1024
    assert made.ctas_per_sm == 128 // head_dim
