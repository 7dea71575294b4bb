"""Attention on tensor cores in the simulator, against plain torch with every query row on its own.

The tolerance is the one that the kernel states: one rounding of the output, and what rounding the weights to bf16 adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ferrule_server.kernels.cuda.attention_mma import ROWS, attention_mma, shared_bytes, specs
from ferrule_server.kernels.cuda.partials import partial_bytes
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from ferrule_server.kernels.cuda.work_list import WorkList, make_work_list
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
        work = self.work = self._work_list(split)
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
        floats = partial_bytes(rows=ROWS, head_dim=shape.head_dim) // 4
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
            memory.empty("partials", max(work.num_partials, 1) * floats, np.float32, offset=16),
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

    def _work_list(self, split: int) -> WorkList:
        step = self.step
        return make_work_list(
            cu_seqlens_q=step.cu_seqlens_q,
            kv_lens=step.kv_lens,
            num_new=step.num_new,
            positions=step.positions,
            num_kv_heads=step.shape.num_kv_heads,
            rows_per_tile=ROWS // step.shape.group,
            num_ctas=self.num_ctas,
            split=split,
            is_tree=self.is_tree,
        )

    def run(self, *, seed: int = 1, specialised: Specialised | None = None) -> Bits:
        """Run the kernel once; return the bits of the output."""
        launch = Launch(
            attention_mma,
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
    step = Step(shape, seqs, seed=group)
    check(step, Simulation(step).run_again_and_again())


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_lengths_around_a_tile(block_size: int) -> None:
    """One row each, its token new; without norms of query and key (Llama)."""
    shape = Shape(num_kv_heads=1, block_size=block_size, has_qk_norm=False)
    step = Step(shape, tuple(Seq(kv_len) for kv_len in (1, 15, 16, 17, 33, 65)))
    check(step, Simulation(step).run_again_and_again())


@pytest.mark.parametrize(("group", "head_dim"), [(2, 64), (3, 128)])
def test_a_tree_is_attended_along_its_branches(group: int, head_dim: int) -> None:
    """Several tiles of rows, old rows and new ones in one sequence, and a sequence with nothing else."""
    step = TreeStep(
        Shape(num_kv_heads=1, group=group, head_dim=head_dim), (Seq(75, rows=18, new=17), Seq(2, rows=2, new=2))
    )
    check(step, Simulation(step, num_ctas=2).run_again_and_again())


def test_as_many_new_tokens_as_fit() -> None:
    """Sixty-four of them, from the last slot of a tile on: the tail is full."""
    step = TreeStep(Shape(num_kv_heads=1, group=1), (Seq(79, rows=64, new=64),))
    check(step, Simulation(step, num_ctas=2).run())


def test_rows_that_are_not_new_see_no_further_than_they_stand() -> None:
    """Nothing new, all K and V in the pool; and a sequence with old and new rows."""
    step = Step(Shape(num_kv_heads=1), (Seq(40, rows=10, new=0), Seq(35, rows=5, new=2)))
    check(step, Simulation(step).run())


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_as_launched_for_a_model(head_dim: int) -> None:
    """Four warps and splits of 128 tokens, three of them."""
    step = Step(Shape(num_kv_heads=1, head_dim=head_dim), (Seq(270, rows=4, new=4),))
    first = Simulation(step, split=128, warps=4, num_ctas=1).run()
    check(step, first)
    assert np.array_equal(Simulation(step, split=128, warps=4, num_ctas=3).run_again_and_again(), first)


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


def test_new_tokens_are_appended_once() -> None:
    """K normalised and rotated, V as it came, in their slots; a row with slot -1 and all other slots stay as they were.

    The new tokens lie in two splits, the rows in two tiles, so several CTAs compute each K.
    """
    shape = Shape(group=4)
    step = Step(shape, (Seq(67, rows=6, new=6),), without_slot=(4,))
    simulation = Simulation(step, num_ctas=6)
    check(step, simulation.run())
    _, keys, values = step.prepared()
    for row, token in enumerate(range(61, 67)):
        if row == 4:
            assert np.isnan(from_bf16(simulation.in_pool(0, token, 0))).all()
            assert np.isnan(from_bf16(simulation.in_pool(0, token, 1))).all()
            continue
        off = simulation.in_pool(0, token, 0).astype(np.int64) - bits(keys[row])
        assert np.abs(off).max() <= 1
        assert np.array_equal(simulation.in_pool(0, token, 1), bits(values[row]))
    for token in range(61):
        assert np.array_equal(simulation.in_pool(0, token, 0), bits(step.keys[0][token]))
    for token in range(67, 80):
        assert np.isnan(from_bf16(simulation.in_pool(0, token, 1))).all()


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
        assert simulation.work.num_partials == 3
        check(met, simulation.run(specialised=specialised))
        check(alone, Simulation(alone, num_ctas=1).run(specialised=specialised))

    found = check_mutants(attention_mma, Simulation(met).constants, attempt)
    assert {mutation.name for mutation in found} == {"barrier", "fence", "grid_wait"}


def test_specs_fit_half_a_multiprocessor() -> None:
    """Shared memory of all CTAs that are planned together; unique names."""
    for shape in MODEL_SHAPES.values():
        found = specs(shape)
        assert len({spec.name for spec in found}) == len(found)
        for spec in found:
            assert spec.ctas_per_sm * (spec.shared_bytes + 1024) <= 114 * 1024, spec.name
            assert spec.ctas_per_sm * spec.num_threads <= 1024, spec.name
