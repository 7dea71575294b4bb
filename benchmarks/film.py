"""Makes the film of ``ferrule demo`` in the README: an animated SVG of what one run wrote to a terminal.

    python -m benchmarks.film [--output docs/images/demo.svg]

It runs the command on a terminal of its own and reads what the screen shows at the end. The film shows these lines in
their order. It is slower than the run, which is over before a person has read a line: lines come one by one, and
the texts in panels from left to right.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from pathlib import Path

__all__ = ["Cell", "Screen", "film", "main"]

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "demo.svg"
COMMAND = [sys.executable, "-m", "ferrule_cli.app", "demo"]
COLUMNS, LINES = 104, 32

_CELL_W, _CELL_H, _SIZE, _PAD, _BAR = 8.4, 18, 14, 18, 34
_LINE_S, _HEADING_S, _ROW_S, _POOL_S, _END_S = 0.06, 0.9, 0.32, 1.6, 5.0
_BACKGROUND, _INK, _FRAME = "#16181d", "#d6d9de", "#3a3f4b"
_COLOURS = ("#3b4048", "#f07178", "#8fce7e", "#e6b450", "#6cb6ff", "#d59df6", "#5fd1c9", "#d6d9de")
_BRIGHT = ("#7d8590", "#ff9ba0", "#b4e6a5", "#ffd580", "#9ecbff", "#e5c3fb", "#8ee8e1", "#ffffff")
_BELOW = 2  # an underscore reaches into the line below
_FAMILY = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_CSI = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


@dataclass(frozen=True, slots=True)
class Style:
    """How a cell looks."""

    colour: str = _INK
    is_bold: bool = False
    is_dim: bool = False

    def after(self, codes: Sequence[int]) -> Style:
        """Return the style after a sequence of SGR codes; backgrounds are ignored."""
        style, rest = self, list(codes or [0])
        while rest:
            code = rest.pop(0)
            if code == 0:
                style = Style()
            elif code in (1, 2):
                style = replace(style, is_bold=code == 1 or style.is_bold, is_dim=code == 2 or style.is_dim)
            elif code == 22:
                style = replace(style, is_bold=False, is_dim=False)
            elif code in range(30, 38):
                style = replace(style, colour=_COLOURS[code - 30])
            elif code in range(90, 98):
                style = replace(style, colour=_BRIGHT[code - 90])
            elif code == 39:
                style = replace(style, colour=_INK)
            elif code in (38, 48):
                raise ValueError("the film knows the 16 colours only")
        return style


@dataclass(frozen=True, slots=True)
class Cell:
    """A character of the screen."""

    text: str
    style: Style = Style()


@dataclass(slots=True)
class Screen:
    """The lines that a program has written, as a terminal of any height would show them.

    Attributes:
        lines: From the first one that was written; each a list of cells.
    """

    lines: list[list[Cell]] = field(default_factory=lambda: [[]])
    _row: int = 0
    _column: int = 0
    _style: Style = Style()

    def write(self, text: str) -> None:
        """Take output of a program; it may not end within a control sequence.

        Raises:
            ValueError: It has a control sequence that is not known here.
        """
        place = 0
        while place < len(text):
            if (found := _CSI.match(text, place)) is not None:
                self._control(found[1], found[2])
                place = found.end()
            else:
                self._put(text[place])
                place += 1

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
            self.lines += [[] for _ in range(self._row + 1 - len(self.lines))]
        elif character < " ":
            raise ValueError(f"the film does not know the control character {character!r}")
        else:
            line = self.lines[self._row]
            line += [Cell(" ")] * (self._column + 1 - len(line))
            line[self._column] = Cell(character, self._style)
            self._column += 1

    def _control(self, arguments: str, name: str) -> None:
        if name == "m":
            self._style = self._style.after([int(code or 0) for code in arguments.split(";")])
        elif name == "A":
            self._row = max(0, self._row - int(arguments or 1))
        elif (name, arguments) == ("K", "2"):
            self.lines[self._row] = []
        elif not arguments.startswith("?"):  # those show and hide the cursor
            raise ValueError(f"the film does not know the control sequence {arguments}{name}")


def main() -> int:
    """Run the demo and write the film."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    screen = Screen()
    screen.write(run(COMMAND))
    args.output.write_text(film(screen.lines), "utf-8")
    return 0


def run(command: Sequence[str]) -> str:
    """Return what a command writes to a terminal of 16 colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLORTERM", "NO_COLOR")}
    environment |= {"TERM": "xterm-16color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        written = b"".join(_read(ours))
    os.close(ours)
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with exit code {process.returncode}: {written!r}")
    return written.decode()


def _read(descriptor: int) -> Iterator[bytes]:
    """Yield what comes until the other end is closed, which a terminal reports as an error."""
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:
            return
        if not chunk:
            return
        yield chunk


@dataclass(frozen=True, slots=True)
class Cover:
    """A part of a line that is hidden and then shown from left to right."""

    row: int
    begin: int
    end: int
    from_s: float
    to_s: float


def film(lines: Sequence[Sequence[Cell]]) -> str:
    """Return an animated SVG that shows lines one after the other and begins again at the end."""
    prompt = [Cell(character, Style(is_bold=True)) for character in "$ ferrule demo"]
    shown = [prompt, *lines]
    while not "".join(cell.text for cell in shown[-1]).strip():
        shown.pop()
    times_s, covers, total_s = _timeline(["".join(cell.text for cell in line) for line in shown])
    width, height = 2 * _PAD + COLUMNS * _CELL_W, _BAR + LINES * _CELL_H + _PAD
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FAMILY}" font-size="{_SIZE}">',
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="{_BACKGROUND}" stroke="{_FRAME}"/>',
        *(f'<circle cx="{20 + 18 * n}" cy="18" r="5.5" fill="{_COLOURS[n + 1]}"/>' for n in range(3)),
        f'<clipPath id="window"><rect x="0" y="{_BAR}" width="{width:g}" height="{LINES * _CELL_H + 4}"/></clipPath>',
        f'<g clip-path="url(#window)"><g>{_scrolling(times_s, total_s)}',
        *(_line(row, line, times_s[row], total_s) for row, line in enumerate(shown)),
        *(_cover(cover, total_s) for cover in covers),
        "</g></g></svg>",
    ]
    return "\n".join(filter(None, body)) + "\n"


def _timeline(texts: Sequence[str]) -> tuple[list[float], list[Cover], float]:
    """Return when each line is shown, which parts of lines are revealed when, and when the film ends."""
    now, row = _HEADING_S, 1
    times_s: list[float] = [0.0]
    covers: list[Cover] = []
    while row < len(texts):
        text = texts[row]
        now += _HEADING_S if re.match(r"\d  \w", text) else _LINE_S
        if text.startswith("╭") and "done" not in text:
            end = next(below for below in range(row, len(texts)) if texts[below].startswith("╰")) + 1
            times_s += [now] * (end - row)
            edges = [(found.start() + 1, found.end() - 1) for found in re.finditer(r"╭[^╮]*╮", text)]
            for inside in range(row + 1, end - 1):
                begin_s = now + (inside - row - 1) * _ROW_S
                covers += [Cover(inside, begin, stop, begin_s, begin_s + _ROW_S) for begin, stop in edges]
            now += (end - row - 2) * _ROW_S
            row = end
        else:
            times_s.append(now)
            now += _POOL_S if text.startswith("pool") else 0.0
            row += 1
    return times_s, covers, now + _END_S


def _scrolling(times_s: Sequence[float], total_s: float) -> str:
    """Return the animation that keeps the newest line at the bottom of the window."""
    steps = [(0.0, 0)]
    for time_s, group in groupby(enumerate(times_s, 1), key=lambda numbered: numbered[1]):
        hidden = max(0, max(count for count, _ in group) - LINES)
        if hidden > steps[-1][1]:
            steps.append((time_s, hidden))
    values = ";".join(f"0 {-hidden * _CELL_H}" for _, hidden in steps)
    times = ";".join(f"{time_s / total_s:.4f}" for time_s, _ in steps)
    return (
        f'<animateTransform attributeName="transform" type="translate" calcMode="discrete" dur="{total_s:.1f}s"'
        f' repeatCount="indefinite" values="{values}" keyTimes="{times}"/>'
    )


def _line(row: int, line: Sequence[Cell], time_s: float, total_s: float) -> str:
    """Return a line that is there from a time on; a blank one is nothing."""
    runs: list[str] = []
    column = 0
    for style, cells in groupby(line, key=lambda cell: cell.style):
        text = "".join(cell.text for cell in cells)
        if text.strip():
            runs.append(_run(column, row, text, style))
        column += len(text)
    if not runs:
        return ""
    show = ""
    if time_s > 0:
        show = (
            f'<animate attributeName="opacity" calcMode="discrete" dur="{total_s:.1f}s" repeatCount="indefinite"'
            f' values="0;1" keyTimes="0;{time_s / total_s:.4f}"/>'
        )
    return f"<g>{show}{''.join(runs)}</g>"


def _run(column: int, row: int, text: str, style: Style) -> str:
    """Return cells of one style, as wide as a terminal would show them whatever the font is."""
    begin = len(text) - len(text.lstrip())
    text = text.strip()
    look = f' fill="{style.colour}"' + ' font-weight="bold"' * style.is_bold + ' opacity=".62"' * style.is_dim
    x, y = _PAD + (column + begin) * _CELL_W, _BAR + row * _CELL_H + 13
    return (
        f'<text x="{x:.1f}" y="{y}" textLength="{len(text) * _CELL_W:.1f}" lengthAdjust="spacingAndGlyphs"'
        f' xml:space="preserve"{look}>{escape(text, quote=False)}</text>'
    )


def _cover(cover: Cover, total_s: float) -> str:
    """Return a piece of background that shrinks towards the right."""
    right, top = _PAD + cover.end * _CELL_W, _BAR + cover.row * _CELL_H - 1
    width, height = (cover.end - cover.begin) * _CELL_W, _CELL_H + _BELOW
    times = ";".join(f"{time_s / total_s:.4f}" for time_s in (0.0, cover.from_s, cover.to_s, total_s))
    return (
        f'<g transform="translate({right:.1f} {top})"><rect x="{-width:.1f}" width="{width:.1f}" height="{height}"'
        f' fill="{_BACKGROUND}" transform="scale(0 1)"><animateTransform attributeName="transform" type="scale"'
        f' dur="{total_s:.1f}s" repeatCount="indefinite" values="1 1;1 1;0 1;0 1" keyTimes="{times}"/></rect></g>'
    )


if __name__ == "__main__":
    sys.exit(main())
