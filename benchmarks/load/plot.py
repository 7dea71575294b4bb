"""The plot: throughput, time to the first token and between tokens over the number of sequences, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from benchmarks.svg import document

_COLOURS = {"direct": "#0b6e4f", "envoy": "#c1440e", "target": "#1f77b4"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 250, 150, 70, 78, 62
_PANELS = ("tokens/s", "first token, ms", "between tokens, ms")
Points = dict[str, list[tuple[int, float]]]


def plot(cells: Sequence[dict[str, Any]], title: str) -> str:
    """Return an SVG: a row of panels for each mode; of latencies the median is drawn through, the 99th dashed.

    Args:
        cells: Of closed runs, each with ``mode``, ``path``, ``level`` and ``figures``.
        title: Machine, date and model.
    """
    modes = sorted({cell["mode"] for cell in cells}, reverse=True)
    width, height = _LEFT + 3 * (_WIDTH + _GAP), _TOP + len(modes) * (_HEIGHT + _GAP + 10) + 10
    body = [f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>', *_legend(cells)]
    for row, mode in enumerate(modes):
        of_mode = [cell for cell in cells if cell["mode"] == mode]
        for column, name in enumerate(_PANELS):
            x, y = _LEFT + column * (_WIDTH + _GAP), _TOP + row * (_HEIGHT + _GAP + 10)
            body += _panel(x, y, f"{mode}: {name}", _lines(of_mode, column), sorted({c["level"] for c in of_mode}))
    return document(width, height, body)


def _lines(cells: Sequence[dict[str, Any]], column: int) -> Points:
    """Return the lines of a panel by name; a name that ends in ``p99`` is drawn dashed."""
    lines: Points = {}
    for cell in sorted(cells, key=lambda cell: int(cell["level"])):
        figures, path = cell["figures"], cell["path"]
        if column == 0:
            values = {path: figures["tokens_per_s"]}
        else:
            latency = figures["first_token" if column == 1 else "inter_token"]
            values = {path: latency["p50"], f"{path} p99": latency["p99"]}
        for name, value in values.items():
            if value is not None:
                lines.setdefault(name, []).append((cell["level"], value))
    return lines


def _legend(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    for index, path in enumerate(sorted({cell["path"] for cell in cells})):
        x = _LEFT + 110 * index
        yield f'<rect x="{x}" y="36" width="12" height="12" fill="{_COLOURS.get(path, "#555")}"/>'
        yield f'<text x="{x + 17}" y="47" font-size="12">{escape(path)}</text>'
    yield f'<text x="{_LEFT + 340}" y="47" font-size="12">latencies: line p50, dashed p99</text>'


def _panel(x: int, y: int, title: str, lines: Points, levels: Sequence[int]) -> Iterator[str]:
    """Yield one panel: values upwards on a logarithmic scale, numbers of sequences to the right."""
    values = [value for points in lines.values() for _, value in points if value > 0]
    low, high = _decades(values)
    yield f'<text x="{x}" y="{y + 4}" font-size="12" font-weight="bold">{escape(title)}</text>'
    for tick in _ticks(low, high):
        at = _up(y, tick, low, high)
        yield f'<line x1="{x}" y1="{at}" x2="{x + _WIDTH}" y2="{at}" stroke="#ddd"/>'
        yield f'<text x="{x - 6}" y="{at + 4}" font-size="10" text-anchor="end">{tick:g}</text>'
    for level in levels:
        across = _across(x, levels, level)
        yield f'<text x="{across}" y="{y + _HEIGHT + 28}" font-size="10" text-anchor="middle">{level}</text>'
    for name, points in sorted(lines.items()):
        drawn = [(_across(x, levels, level), _up(y, value, low, high)) for level, value in points if value > 0]
        yield from _line(drawn, name, f"{title}: {name}")


def _line(points: Sequence[tuple[float, float]], name: str, title: str) -> Iterator[str]:
    colour, dashes = (
        _COLOURS.get(name.removesuffix(" p99"), "#555"),
        ' stroke-dasharray="5 4"' if name.endswith(" p99") else "",
    )
    path = " ".join(f"{across},{up}" for across, up in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}>'
    yield f"<title>{escape(title)}</title></polyline>"
    for across, up in points:
        yield f'<circle cx="{across}" cy="{up}" r="3.5" fill="{colour}"/>'


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten around values."""
    if not values:
        return 0, 1
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _ticks(low: int, high: int) -> list[float]:
    steps = (1,) if high - low > 2 else (1, 2, 5)
    return [step * 10.0**power for power in range(low, high) for step in steps] + [10.0**high]


def _up(y: int, value: float, low: int, high: int) -> float:
    share = (math.log10(value) - low) / (high - low)
    return round(y + 14 + _HEIGHT * (1 - share), 1)


def _across(x: int, levels: Sequence[int], level: int) -> float:
    return round(x + _WIDTH * (levels.index(level) + 0.5) / len(levels), 1)
