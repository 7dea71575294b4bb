"""The table of the processor's benchmark, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.cpu.rounds import Record

__all__ = ["format_figure", "lines_of", "memory_lines"]

NOTES = (
    "median (min-max) over rounds; * other processes used more than 0.2 cores meanwhile",
    "share: weights and KV that a step must read, per second, against the read rate probed around it",
)


def lines_of(records: Sequence[Record], sides: Sequence[str]) -> list[str]:
    """Return a row for each cell, with a column for each side and the ratio of the first two."""
    by_cell: dict[str, dict[str, Record]] = {}
    for record in records:
        by_cell.setdefault(record["cell"], {})[record["side"]] = record
    head = f"{'':<20}{'unit':<7}" + "".join(f"{side:>26}{'share':>7}" for side in sides) + f"{'ratio':>7}{'GB/s':>7}"
    return [head, *(_row(cell, found, sides) for cell, found in by_cell.items()), *NOTES]


def _row(cell: str, found: Mapping[str, Record], sides: Sequence[str]) -> str:
    columns = "".join(_column(found.get(side)) for side in sides)
    both = [found[side]["median"] for side in sides if side in found]
    ratio = f"{both[0] / both[1]:.2f}" if len(both) == 2 and both[1] > 0 else "-"
    first = next(iter(found.values()))
    rate = "-" if first.get("read_rate_gbs") is None else f"{first['read_rate_gbs']:.1f}"
    return f"{cell:<20}{first['unit']:<7}{columns}{ratio:>7}{rate:>7}"


def _column(record: Record | None) -> str:
    if record is None:
        return f"{'-':>26}{'-':>7}"
    share = f"{100 * record['read_share']:.0f} %" if "read_share" in record else "-"
    return f"{format_figure(record):>26}{share:>7}"


def memory_lines(records: Sequence[Record]) -> list[str]:
    """Return what the peak memory of each side consists of."""
    return [
        f"{record['side']}: peak {record['peak_mib']:.0f} MiB = weights {record['weights_mib']:.0f} + pool "
        f"{record['pool_mib']:.0f} + {record['overhead_mib']:.0f}"
        for record in records
        if "overhead_mib" in record
    ]


def format_figure(record: Record) -> str:
    """Return the median with its spread, and the mark of a disturbed figure."""
    median, low, high = (_short(record[name]) for name in ("median", "min", "max"))
    mark = "*" if record["is_disturbed"] else ""
    return f"{median} ({low}-{high}){mark}" if record["num_samples"] > 1 else f"{median}{mark}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
