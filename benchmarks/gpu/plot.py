"""The plot: share of the read ceiling by batch, a panel per model and context, ours and peers, as an SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.gpu.timing import Row

_COLOURS = {
    "ferrule": "#0b6e4f",
    "transformers static": "#c1440e",
    "gpt-fast style": "#6a4c93",
    "torch in a graph": "#1f77b4",
    "transformers batching": "#b8860b",
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 230, 170, 60, 70, 46
_TICKS = (0, 25, 50, 75, 100)


def plot(rows: Sequence[Row], ceiling_gbs: float, title: str) -> str:
    """Return an SVG.

    Args:
        rows: Of kind ``decode``, each with ``model``; where an arm has a cell twice, the first counts.
        ceiling_gbs: What is 100 %.
        title: Device, date and versions.
    """
    shares = shares_of(rows, ceiling_gbs)
    panels = sorted({(context, model) for model, context, _, _ in shares})
    columns = sorted({model for _, model in panels})
    lines = sorted({context for context, _ in panels})
    width = _LEFT + max(3, len(columns)) * (_WIDTH + _GAP)
    height = _TOP + len(lines) * (_HEIGHT + _GAP + 14) + 20
    body = [f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>', *_legend(shares)]
    for context, model in panels:
        x = _LEFT + columns.index(model) * (_WIDTH + _GAP)
        y = _TOP + lines.index(context) * (_HEIGHT + _GAP + 14)
        inside = {key[2:]: value for key, value in shares.items() if key[:2] == (model, context)}
        body += _panel(x, y, f"{model}, context {context}", inside)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *body, "</svg>"]) + "\n"


def shares_of(rows: Sequence[Row], ceiling_gbs: float) -> dict[tuple[str, int, str, int], float]:
    """Return percent of the ceiling by (model, context, arm, batch)."""
    shares: dict[tuple[str, int, str, int], float] = {}
    for row in rows:
        if row.get("kind") == "decode" and row.get("status") == "ok":
            key = (row["model"], row["context"], row["arm"], row["batch"])
            shares.setdefault(key, 100 * row["gbs"] / ceiling_gbs)
    return shares


def _legend(shares: dict[tuple[str, int, str, int], float]) -> Iterator[str]:
    present = {arm for _, _, arm, _ in shares}
    for index, arm in enumerate(name for name in _COLOURS if name in present):
        x = _LEFT + 165 * index
        yield f'<rect x="{x}" y="34" width="12" height="12" fill="{_COLOURS[arm]}"/>'
        yield f'<text x="{x + 17}" y="45" font-size="12">{escape(arm)}</text>'


def _panel(x: int, y: int, title: str, shares: dict[tuple[str, int], float]) -> Iterator[str]:
    """Yield one panel: percent upwards, batches to the right at even distances."""
    batches = sorted({batch for _, batch in shares})
    yield f'<text x="{x}" y="{y + 10}" font-size="12" font-weight="bold">{escape(title)}</text>'
    for tick in _TICKS:
        at = _up(y, tick)
        yield f'<line x1="{x}" y1="{at}" x2="{x + _WIDTH}" y2="{at}" stroke="#ddd"/>'
        yield f'<text x="{x - 6}" y="{at + 4}" font-size="10" text-anchor="end">{tick} %</text>'
    for batch in batches:
        across = _across(x, batches, batch)
        yield f'<text x="{across}" y="{y + _HEIGHT + 32}" font-size="10" text-anchor="middle">batch {batch}</text>'
    for arm in sorted({arm for arm, _ in shares}):
        points = [
            (_across(x, batches, batch), _up(y, shares[arm, batch])) for batch in batches if (arm, batch) in shares
        ]
        yield from _line(points, _COLOURS.get(arm, "#555"), f"{title}: {arm}")


def _line(points: Sequence[tuple[float, float]], colour: str, name: str) -> Iterator[str]:
    path = " ".join(f"{across},{up}" for across, up in points)
    drawn = f'fill="none" stroke="{colour}" stroke-width="2"'
    yield f'<polyline points="{path}" {drawn}><title>{escape(name)}</title></polyline>'
    for across, up in points:
        yield f'<circle cx="{across}" cy="{up}" r="3.5" fill="{colour}"/>'


def _up(y: int, percent: float) -> float:
    return round(y + 18 + _HEIGHT * (1 - min(percent, 110) / 100), 1)


def _across(x: int, batches: Sequence[int], batch: int) -> float:
    return round(x + _WIDTH * (batches.index(batch) + 0.5) / len(batches), 1)
