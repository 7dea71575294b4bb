"""Pieces of the screen of ``ferrule top``: numbers for people, bars, tables that fit, the picture of the pool."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from ferrule_client.views import BlockMap

__all__ = [
    "ASCII",
    "UNICODE",
    "Column",
    "Glyphs",
    "bar",
    "block_lines",
    "clean",
    "glyphs_of",
    "legend",
    "print_lines",
    "short",
    "span",
    "spark",
    "table",
    "write_svg",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters that pictures are made of; ``points`` is a scale for sparklines."""

    empty: str
    cached: str
    part: str
    own: str
    many: str
    dot: str
    rule: str
    points: str
    levels: str


UNICODE = Glyphs("·", "░", "▄", "█", "+", "●", "─", "▁▂▃▄▅▆▇█", "█▓░·")
ASCII = Glyphs(".", ":", "o", "O", "+", "*", "-", "_.-=*#", "#%:.")

_SHARED = ((2, "cyan"), (4, "green"), (8, "yellow"), (255, "bright_red"))  # colours by owners: up to so many
_ELSEWHERE = re.compile(r"\s*@font-face \{\{.*?\n\s*\}\}|\s*<!--.*?-->", re.DOTALL)
"""Fonts of the template of pictures that would be fetched, and who made it."""


def clean(text: str) -> str:
    """Return what somebody else wrote without anything that a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in text)


def short(number: float) -> str:
    """Return a number in about four characters, such as 12, 3.4, 56k, 7.8M."""
    if number < 10 and number != int(number):
        return f"{number:.1f}"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 10 * size or (number >= size and unit != "k"):
            value = number / size
            return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"
    return f"{number:.0f}"


def span(seconds: float) -> str:
    """Return a duration for people, such as 4.2s, 58s, 12m, 3h, 2d."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    for unit, size in (("s", 1), ("m", 60), ("h", 3600)):
        if seconds < 120 * size or (unit == "h" and seconds < 48 * size):
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def bar(parts: Sequence[tuple[float, str, str]], width: int) -> Text:
    """Return a bar of shares that add up to 1 at most, each with its character and style; none above 0 vanishes."""
    room = min(width, round(min(1.0, sum(share for share, _, _ in parts)) * width))
    sizes = [max(int(share > 0.0), round(share * width)) for share, _, _ in parts]
    while sizes and sum(sizes) != room and max(sizes) > 0:
        sizes[sizes.index(max(sizes))] += 1 if sum(sizes) < room else -1
    return Text.assemble(*((glyph * size, style) for size, (_, glyph, style) in zip(sizes, parts, strict=True)))


def spark(points: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """Return the last points as a line of small columns; the highest one fills its column."""
    points = points[-width:] if width > 0 and len(points) > 1 else ()
    most, scale = max(points, default=0.0), glyphs.points
    if most <= 0.0:
        return scale[0] * len(points)
    return "".join(scale[min(len(scale) - 1, int(point / most * len(scale)))] for point in points)


@dataclass(frozen=True, slots=True)
class Column(Generic[_T]):
    """A column of a table."""

    title: str
    width: int  # cells
    value: Callable[[_T], str]  # what it says of an entry
    rank: int = 0  # where there is no room, columns of higher rank are left out first
    is_left: bool = False  # text begins at the left; numbers end at the right
    style: Callable[[_T], str] = lambda _: ""  # of its text, for each entry


def table(columns: Sequence[Column[_T]], entries: Iterable[_T], width: int, height: int) -> list[Text]:
    """Return a head and as many entries as fit into ``height`` lines of ``width`` cells."""
    chosen = list(columns)
    while len(chosen) > 1 and sum(column.width + 2 for column in chosen) - 2 > width:
        chosen.remove(max(chosen, key=lambda column: column.rank))
    lines = [_row(chosen, [(column.title, "dim") for column in chosen])]
    for entry in entries:
        if len(lines) >= height:
            break
        lines.append(_row(chosen, [(clean(column.value(entry)), column.style(entry)) for column in chosen]))
    return lines[: max(0, height)]


def _row(columns: Sequence[Column[_T]], cells: Sequence[tuple[str, str]]) -> Text:
    line = Text()
    for index, (column, (value, style)) in enumerate(zip(columns, cells, strict=True)):
        whole = cell_len(value) <= column.width
        shown = value if whole else set_cell_size(value, column.width - 1) + "~"
        pad = " " * (column.width - cell_len(shown))
        line.append("  " if index else "").append(shown + pad if column.is_left else pad + shown, style)
    line.rstrip()
    return line


def block_lines(block_map: BlockMap, width: int, height: int, glyphs: Glyphs) -> tuple[list[Text], int]:
    """Return the picture of the pool in at most ``height`` lines of ``width`` cells, and the blocks in one cell."""
    merged = max(1, -(-len(block_map.cells) // max(1, width * height)))
    starts = range(0, len(block_map.cells), merged)
    # One cell of several has the largest mark and the mean fill, which is above 0 where one of them is.
    cells = [max(block_map.cells[start : start + merged]) for start in starts]
    parts = [block_map.fill[start : start + merged] for start in starts]
    fill = [-(-sum(part) // len(part)) if part else 0 for part in parts]
    drawn = [_cell(mark, share, glyphs) for mark, share in zip(cells, fill, strict=True)]
    lines = [Text.assemble(*drawn[start : start + width]) for start in range(0, len(drawn), width)]
    return lines, merged * block_map.cell_blocks


def _cell(mark: int, fill: int, glyphs: Glyphs) -> tuple[str, str]:
    """Return the character and the style of a cell: digits are owners, so that it is told without colour too."""
    if mark <= 1:
        return (glyphs.cached if mark else glyphs.empty), "bright_black"
    if mark == 2:
        return (glyphs.own if fill == 255 else glyphs.part), "blue"
    owners = mark - 1
    colour = next(colour for most, colour in _SHARED if owners <= most)
    return str(owners) if owners <= 9 else glyphs.many, f"black on {colour}"


def legend(cell_blocks: int, glyphs: Glyphs, width: int) -> Text:
    """Return what the characters of the picture mean, as much of it as there is room for, the unit first."""
    owners = Text.assemble(("2", _cell(3, 255, glyphs)[1]), ("-", "dim"), ("9", _cell(10, 255, glyphs)[1]))
    known = ((0, 0, "empty"), (1, 0, "cached"), (2, 255, "one owner"))
    parts = [_meaning(_cell(mark, fill, glyphs), text) for mark, fill, text in known]
    parts += [owners.append(" owners", "dim"), _meaning(_cell(200, 255, glyphs), "more")]
    if cell_blocks > 1:
        parts.insert(0, Text(f"{cell_blocks} a cell", "dim"))
        parts.append(_meaning(_cell(2, 1, glyphs), "part"))
    text, gap = Text(), "   " if sum(cell_len(part.plain) + 3 for part in parts) <= width else "  "
    for part in parts:
        between = gap if text.plain else ""
        if cell_len(text.plain + between + part.plain) > width:
            break
        text.append(between).append_text(part)
    return text


def _meaning(cell: tuple[str, str], meaning: str) -> Text:
    return Text.assemble(cell, (f" {meaning}", "dim"))


def glyphs_of(console: Console) -> Glyphs:
    """Return characters that the console can show."""
    return UNICODE if console.encoding.lower().startswith("utf") else ASCII


def print_lines(console: Console, lines: Sequence[Text]) -> None:
    """Print lines, none of which is broken; without colours where the console has none."""
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def write_svg(path: Path, lines: Sequence[Text], width: int) -> None:
    """Write lines as a picture of a terminal, ``width`` cells wide, in whatever fixed-width font the reader has."""
    from rich._export_format import CONSOLE_SVG_FORMAT  # no public name: here it can only keep a picture from being

    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    print_lines(console, lines)
    template = _ELSEWHERE.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code", "monospace")
    path.write_text(console.export_svg(title="ferrule top", code_format=template, unique_id="ferrule"), "utf-8")
