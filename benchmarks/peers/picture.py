"""A picture of ours beside the peers: a group of bars for each cell, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.cpu.cells import Cell
from benchmarks.cpu.rounds import Record
from benchmarks.peers.table import OURS_BY_BITS, weight_bits
from benchmarks.svg import document

__all__ = ["draw"]

_BAR, _GAP, _LEFT, _LENGTH, _TOP = 13, 14, 150, 430, 62
_OURS, _OTHERS = "#0b6fb8", "#b9c2cb"


def draw(records: Sequence[Record], cells: Sequence[Cell], title: str) -> str:
    """Return an SVG of the rates of all sides that have results; each group is scaled by its longest bar.

    Args:
        records: As of ``table.lines_of``.
        cells: Groups, in their order; those that are not rates are left out.
        title: Above it, such as the machine and the model.
    """
    found = {(record["cell"], record["side"]): float(record["median"]) for record in records}
    bits_of = {**{side: bits for bits, side in OURS_BY_BITS.items()}, **weight_bits()}
    sides = sorted((side for side in bits_of if side in {side for _, side in found}), key=lambda side: -bits_of[side])
    body = [_text(12, 24, title, size=15, weight="bold"), _legend()]
    y = _TOP
    for cell in cells:
        rates = {side: found[cell.name, side] for side in sides if (cell.name, side) in found}
        if cell.is_lower_better or not rates:
            continue
        y += _GAP
        body.append(_text(12, y, f"{cell.name}, {cell.unit}", size=12, weight="bold"))
        y += 6
        for side, rate in rates.items():
            body += _bar(y, side, rate, max(rates.values()), is_ours=side in OURS_BY_BITS.values())
            y += _BAR + 2
    return document(_LEFT + _LENGTH + 90, y + 12, body)


def _legend() -> str:
    return _text(12, 44, "blue: Ferrule; grey: others; bars of a group are to one scale, longer is faster", size=11)


def _bar(y: int, side: str, rate: float, most: float, *, is_ours: bool) -> list[str]:
    length = max(1.0, _LENGTH * rate / most)
    color = _OURS if is_ours else _OTHERS
    name = side.replace("numba-cpu-", "Ferrule ").replace("numba-cpu", "Ferrule bf16")
    return [
        _text(_LEFT - 6, y + _BAR - 3, name, size=11, anchor="end"),
        f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR}" fill="{color}"/>',
        _text(_LEFT + round(length) + 5, y + _BAR - 3, f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}", size=11),
    ]


def _text(x: float, y: float, text: str, *, size: int, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="#222"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
