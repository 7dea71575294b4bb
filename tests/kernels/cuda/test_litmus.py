"""The litmus of early launch in the simulator: nothing is stale with the wait, and the control is caught without it."""

from __future__ import annotations

import numpy as np
import pytest

from ferrule_server.kernels.cuda.litmus import CONTROL, ROW_BYTES, THREADS, WAITING, litmus
from ferrule_server.kernels.cuda.specialise import Specialised, specialise
from tests.kernels.cuda.mutation import check_mutants
from tools.cuda_simulator import Launch, Memory, ReadBeforeWait, run

GRID, LENGTH = 5, 3
ROW_WORDS = GRID * ROW_BYTES // 4


def _memory() -> Memory:
    memory = Memory()
    memory.put("rows", np.full((LENGTH, ROW_WORDS), 7, np.uint32), mutable=True)
    memory.put("stale", np.zeros(1, np.uint64), mutable=True)
    return memory


def _chain(memory: Memory, specialised: Specialised | None = None) -> list[Launch]:
    """Return a chain of three, the last of which reads what the first has written, too."""
    rows = [memory.address("rows") + i * ROW_WORDS * 4 for i in range(LENGTH)]
    arguments = [(0, 0, rows[0]), (rows[0], 0, rows[1]), (rows[1], rows[0], rows[2])]
    stale = memory.address("stale")
    return [
        Launch(litmus, dict(WAITING.constants), (*own, stale, 900), GRID, THREADS, specialised=specialised)
        for own in arguments
    ]


def test_a_chain_that_waits_finds_nothing_stale_however_often_it_is_replayed() -> None:
    """Each word of each row is one more after each chain; nothing else counts chains."""
    memory = _memory()
    for seed in range(3):
        run(memory, _chain(memory), seed=seed)
        assert memory.get("stale").tolist() == [0]
        assert (memory.get("rows") == 8 + seed).all()


@pytest.mark.parametrize(("launch", "row", "factor"), [(1, 0, 1), (2, 1, 1), (2, 0, 1), (0, 2, 0)])
def test_every_stale_word_of_the_rows_that_are_read_is_counted(launch: int, row: int, factor: int) -> None:
    """Wherever it lies: the grid reads whole rows. The first launch reads none but its own."""
    memory = _memory()
    rows = np.full((LENGTH, ROW_WORDS), 8, np.uint32)
    rows[launch] = 7
    places = np.random.default_rng(1).choice(ROW_WORDS, 50, replace=False)
    rows[row, places] = 7
    memory.write(memory.address("rows"), rows)
    run(memory, [_chain(memory)[launch]])
    assert memory.get("stale").tolist() == [factor * len(places)]


def test_the_control_reads_above_its_wait() -> None:
    """Which is all that it does otherwise; the simulator refuses it where a GPU gives it stale words."""
    memory = _memory()
    with pytest.raises(ReadBeforeWait):
        run(memory, _chain(memory, specialise(litmus, dict(CONTROL.constants))))


def test_the_wait_is_needed_and_the_trigger_is_not() -> None:
    """Without the wait the simulator refuses the kernel."""

    def attempt(specialised: Specialised) -> None:
        memory = _memory()
        run(memory, _chain(memory, specialised))
        assert memory.get("stale").tolist() == [0]

    assert [mutation.name for mutation in check_mutants(litmus, dict(WAITING.constants), attempt)] == ["grid_wait"]
