"""Rows of logits as awkward as they come, and what the kernels that choose from them are simulated with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ferrule_server.kernels.cuda.radix_select import select_shared_bytes
from ferrule_server.kernels.cuda.sample import BORDER_BYTES, RECORD, shape_and_select
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from tools.cuda_simulator import Launch, Memory

__all__ = [
    "SELECT_CONSTANTS",
    "SLICE",
    "THREADS",
    "VOCABULARIES",
    "WARPS",
    "Records",
    "Rows",
    "awkward_rows",
    "num_slices",
    "philox_seed",
    "place_choices",
    "select_launch",
]

WARPS = 2
THREADS = 32 * WARPS
SLICE = 256
SELECT_CONSTANTS: dict[str, Constant] = {"BITS": 8, "ROOM": 64, "SLICE": SLICE, "WARPS": WARPS}
"""Narrow digits, so that a simulated CTA has few bins to walk, and a list that some rows do not fit."""
VOCABULARIES = (97, 300, 517)
"""One slice and a piece of one, two, three; none a multiple of 4 but 300."""

Rows = npt.NDArray[np.float32]
Records = npt.NDArray[np.void]


def num_slices(vocab_size: int) -> int:
    """Return the slices of a row at the sizes above."""
    return -(-vocab_size // SLICE)


def philox_seed(number: int) -> int:
    """Return one of many 64-bit seeds."""
    return (number * 0x9E3779B97F4A7C15 + 0xDEADBEEF) % 2**64


def awkward_rows(vocab_size: int, seed: int) -> Rows:
    """Return rows without ties, with many, masked, of both zeros, all equal, very wide, one peak, scattered ties."""
    rng = np.random.default_rng(seed)
    plain = rng.normal(0, 3, vocab_size)
    tied = np.round(rng.normal(0, 1, vocab_size) * 2) / 2
    masked = np.where(rng.random(vocab_size) < 0.7, -np.inf, tied)
    masked[rng.integers(vocab_size)] = 1.5
    zeros = np.where(rng.random(vocab_size) < 0.5, -0.0, 0.0)
    zeros[::5] = -1.0
    equal = np.full(vocab_size, -7.25)
    wide = rng.normal(0, 1, vocab_size) * 10.0 ** rng.integers(-30, 30, vocab_size)
    peak = np.full(vocab_size, -np.inf)
    peak[-1] = -3.0
    scattered = np.full(vocab_size, -3.0)
    scattered[:: max(vocab_size // 20, 1)] = 4.0
    return np.stack([plain, tied, masked, zeros, equal, wide, peak, scattered]).astype(np.float32)


def place_choices(
    rows: Rows,
    records: Records,
    *,
    entries: Sequence[npt.NDArray[np.int32]] = (),
    masks: Sequence[npt.NDArray[np.uint8]] = (),
) -> Memory:
    """Return memory with rows of logits, one more for each record, to be shaped, and what is done with them."""
    memory, (num_rows, vocab_size) = Memory(), (len(records), rows.shape[1])
    memory.put("logits", np.concatenate([rows, np.full((num_rows, vocab_size), np.nan, np.float32)]), mutable=True)
    memory.put("records", records, mutable=True)
    memory.put("entries", np.concatenate([np.zeros((1, 4), np.int32), *entries]), mutable=True)
    memory.put("masks", np.concatenate([np.full(16, 0xA5, np.uint8), *masks]), mutable=True)
    memory.put("borders", np.full((num_rows, BORDER_BYTES), 0xA5, np.uint8), mutable=True)
    memory.empty("partials", (num_rows, num_slices(vocab_size), 16), np.uint8)
    memory.put("tickets", np.zeros(num_rows, np.int32), mutable=True)
    assert records.dtype == RECORD
    return memory


def select_launch(
    memory: Memory,
    grid: int,
    mutant: Specialised | None = None,
    *,
    constants: dict[str, Constant] = SELECT_CONSTANTS,
) -> Launch:
    """Return the launch that shapes and selects everything placed."""
    vocab_size, at = memory.get("logits").shape[1], memory.address
    names = ("logits", "logits", "records", "entries", "masks", "borders", "partials", "tickets")
    return Launch(
        shape_and_select,
        constants,
        (*map(at, names), len(memory.get("records")), vocab_size, num_slices(vocab_size)),
        grid=grid,
        num_threads=THREADS,
        shared_bytes=select_shared_bytes(int(str(constants["BITS"])), int(str(constants["ROOM"]))),
        specialised=mutant,
    )
