"""Token masks on the GPU: what is uploaded, where it lies, what is given up, and when staging is written again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from ferrule_server.executor.base import TokenMask
from ferrule_server.executor.cuda.masks import DeviceMasks
from ferrule_server.kernels.cuda.sample import mask_bytes
from tests.executor.cuda.fake_gpu import FakeGpu

VOCAB, NUM_SLOTS = 300, 4
ROW = mask_bytes(VOCAB)


def make_mask(seed: int) -> TokenMask:
    """Return one of many masks."""
    is_allowed = np.random.default_rng(seed).random(VOCAB) < 0.5
    return TokenMask(seed.to_bytes(16, "little"), np.packbits(is_allowed, bitorder="little"))


MASKS = [make_mask(seed) for seed in range(20)]


class Bench:
    """Masks on a GPU whose stream runs when somebody waits."""

    def __init__(self) -> None:
        self.gpu = FakeGpu()
        self.tensor = self.gpu.allocate("device_masks", (NUM_SLOTS, ROW), torch.uint8)
        self.masks = DeviceMasks(self.gpu, self.tensor)

    def use(self, *indices: int) -> dict[int, int]:
        """Ask for masks; return their places by index."""
        slots = self.masks.slots_for([MASKS[i] for i in indices])
        return {i: slots[MASKS[i].fingerprint] for i in indices}

    def uploads(self) -> list[int]:
        """Return the rows of every upload so far."""
        return [call.num_bytes // ROW for call in self.gpu.calls("upload")]

    def read(self, slots: Iterable[int]) -> list[bytes]:
        """Return what lies at places once the stream has run."""
        self.gpu.synchronize()
        return [self.tensor[slot].numpy().tobytes() for slot in slots]


def _packed(index: int) -> bytes:
    return MASKS[index].bits.tobytes().ljust(ROW, b"\0")


def test_a_mask_is_uploaded_once() -> None:
    """New ones together, in one copy where their places follow one another; equal ones once; none where none is."""
    bench = Bench()
    first = bench.use(0, 1, 0)
    again = bench.use(1, 2, 0)

    assert bench.use() == {}
    assert bench.uploads() == [2, 1]
    assert {**first, **again} == again
    assert sorted(again.values()) == [0, 1, 2]
    assert bench.read([again[i] for i in range(3)]) == [_packed(i) for i in range(3)]


def test_the_mask_least_recently_used_gives_up_its_place() -> None:
    """One used again stays, also where it is used in the very step that needs room."""
    bench = Bench()
    slots = bench.use(0, 1, 2, 3)
    bench.use(1)
    later = bench.use(4, 0)

    assert later == {0: slots[0], 4: slots[2]}
    assert bench.use(1, 3) == {1: slots[1], 3: slots[3]}
    assert bench.uploads() == [4, 1]
    assert bench.masks.has_all([MASKS[i] for i in (0, 1, 3, 4)])
    assert not bench.masks.has_all([MASKS[0], MASKS[2]])
    assert bench.masks.has_all([])


def test_places_given_up_in_any_order_are_written_in_one_copy() -> None:
    """The order of use is not that of the places."""
    bench = Bench()
    bench.use(0, 1, 2, 3)
    for index in (2, 3, 0, 1):
        bench.use(index)
    slots = bench.use(4, 5, 6, 7)

    assert list(slots.values()) == [2, 3, 0, 1]
    assert bench.uploads() == [4, 4]
    assert bench.read(slots.values()) == [_packed(i) for i in range(4, 8)]


def test_a_step_before_reads_its_own_masks_though_they_are_given_up() -> None:
    """Copies lie in the stream behind those who read the place before, and no staging changes before its copy ran."""
    bench = Bench()
    steps = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 0, 1), (2, 3, 4, 5))
    seen = [bench.gpu.allocate_pinned("seen", NUM_SLOTS * ROW) for _ in steps]
    for indices, target in zip(steps, seen, strict=True):
        slots = bench.use(*indices)
        for row, i in zip(target.view(NUM_SLOTS, ROW), indices, strict=True):
            bench.gpu.download(row, bench.tensor[slots[i]])
    bench.gpu.synchronize()

    for indices, target in zip(steps, seen, strict=True):
        assert target.numpy().tobytes() == b"".join(_packed(i) for i in indices)


def test_many_steps_with_all_masks_changing() -> None:
    """A random walk: what a step is told lies where it is told, whatever was given up before."""
    bench, rng = Bench(), np.random.default_rng(1)
    for _ in range(60):
        indices = rng.choice(len(MASKS), rng.integers(1, NUM_SLOTS + 1), replace=False).tolist()
        slots = bench.use(*indices)
        assert len(set(slots.values())) == len(indices)
        if rng.random() < 0.5:
            assert bench.read(slots.values()) == [_packed(i) for i in indices]


def test_more_masks_than_places_is_the_callers_mistake() -> None:
    """Such a step is torch's."""
    with pytest.raises(AssertionError, match="5 masks of one step, room for 4"):
        Bench().use(0, 1, 2, 3, 4)


def test_a_mask_is_not_kept_alive() -> None:
    """Its place is known by its fingerprint, and serves an equal mask that comes later."""
    bench, mask = Bench(), make_mask(99)
    slots = bench.masks.slots_for([mask])
    dead = weakref.ref(mask)
    del mask
    gc.collect()

    assert dead() is None
    assert bench.masks.slots_for([make_mask(99)]) == slots
    assert bench.uploads() == [1]
