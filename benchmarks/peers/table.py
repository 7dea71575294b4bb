"""The table of ours beside the peers, with the ratio to the best of them in each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.cpu.cells import Cell
from benchmarks.cpu.report import format_figure
from benchmarks.cpu.rounds import Record
from benchmarks.peers.catalog import PEERS

__all__ = ["OURS", "OURS_BY_BITS", "best_ratio", "lines_of", "side_of", "weight_bits"]

OURS = "numba-cpu"
OURS_BY_BITS: Mapping[int, str] = {16: OURS, 8: f"{OURS}-int8", 4: f"{OURS}-int4"}
"""Our executor with weights of so many bits."""
_WIDTH = 24
NOTES = (
    "median (min-max) over rounds; * other processes used more than 0.2 cores meanwhile",
    "ratio: ours / best peer, both with weights of so many bits; of memory, less than 1 is better",
    "GB/s: read rate around our own figure, and around that of the best peer with weights of 16 bits",
)


def side_of(peer: str, variant: str) -> str:
    """Return the name that results of a variant are kept under."""
    return f"{peer} {variant}"


def weight_bits() -> dict[str, int]:
    """Return the bits of a weight on every side of a peer, in the order of the table."""
    return {side_of(peer.name, variant.name): variant.weight_bits for peer in PEERS for variant in peer.variants}


def lines_of(records: Sequence[Record], cells: Sequence[Cell]) -> list[str]:
    """Return a row for each cell, with ours, every side of a peer that has results, and the ratios."""
    found = {(record["cell"], record["side"]): record for record in records}
    sides = [
        side for side in (*OURS_BY_BITS.values(), *weight_bits()) if any(record["side"] == side for record in records)
    ]
    head = f"{'':<18}{'unit':<7}" + "".join(f"{side:>{_WIDTH}}" for side in sides)
    rows = []
    for cell in cells:
        mine = {side: found[cell.name, side] for side in sides if (cell.name, side) in found}
        figures = "".join(f"{format_figure(mine[side]) if side in mine else '-':>{_WIDTH}}" for side in sides)
        ratios = "".join(f"{_ratio_text(mine, cell, bits):>8}" for bits in OURS_BY_BITS)
        rows.append(f"{cell.name:<18}{cell.unit:<7}{figures}{ratios}{_rates_text(mine, cell):>12}")
    return [head + f"{'/16 bit':>8}{'/8 bit':>8}{'/4 bit':>8}{'GB/s':>12}", *rows, *NOTES]


def best_ratio(mine: Mapping[str, Record], cell: Cell, bits: int) -> float | None:
    """Return ours over the best peer with weights of some bits; None if either has no figure.

    Args:
        mine: The records of the cell, by side.
        cell: Says whether more is better.
        bits: Of a weight.
    """
    best = _best(mine, cell, bits)
    ours = mine.get(OURS_BY_BITS[bits])
    if best is None or ours is None:
        return None
    return float(ours["median"] / best["median"])


def _best(mine: Mapping[str, Record], cell: Cell, bits: int) -> Record | None:
    peers = [mine[side] for side, width in weight_bits().items() if side in mine and width == bits]
    choose = min if cell.is_lower_better else max
    return choose(peers, key=lambda record: float(record["median"])) if peers else None


def _ratio_text(mine: Mapping[str, Record], cell: Cell, bits: int) -> str:
    ratio = best_ratio(mine, cell, bits)
    return "-" if ratio is None else f"{ratio:.2f}"


def _rates_text(mine: Mapping[str, Record], cell: Cell) -> str:
    rates = [record["read_rate_gbs"] for record in (mine.get(OURS), _best(mine, cell, 16)) if record is not None]
    return " ".join(f"{rate:.0f}" for rate in rates if rate is not None) or "-"
