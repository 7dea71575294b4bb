"""How the demo looks: in colour on a terminal, in plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Panels", "PlainView", "PoolRow", "RichView", "View", "select_view"]

_COLOURS = {"trunk": "cyan", "branch 1": "green", "branch 2": "yellow", "branch 3": "magenta"}
_MAX_CELLS = 40


@dataclass(frozen=True, slots=True)
class PoolRow:
    """The blocks of one handle, in token order.

    Attributes:
        name: Whose blocks they are.
        block_ids: Ids of the blocks; equal ids in two rows are one shared block.
        ref_counts: Number of handles that hold each.
    """

    name: str
    block_ids: tuple[int, ...]
    ref_counts: tuple[int, ...]


class Panels(Protocol):
    """Text that grows in several places at once."""

    def add(self, place: int, piece: str) -> None:
        """Put a piece of text at the end of one place."""
        ...


class View(Protocol):
    """What the demo tells, in order."""

    def loading(self, progress: float, stage: str) -> None:
        """Show how far the server is; 1.0 is the end of it."""
        ...

    def heading(self, title: str, text: str) -> None:
        """Begin a part."""
        ...

    def code(self, text: str) -> None:
        """Show a prompt."""
        ...

    def note(self, text: str) -> None:
        """Say one thing."""
        ...

    def panels(self, titles: Sequence[str], beginnings: Sequence[str]) -> AbstractContextManager[Panels]:
        """Open places for texts, side by side, each with a title and the text it begins with."""
        ...

    def pool(self, rows: Sequence[PoolRow], free_blocks: int, total_blocks: int) -> None:
        """Draw which handle holds which block."""
        ...

    def summary(self, lines: Sequence[tuple[str, str]], *, is_good: bool) -> None:
        """Show the figures at the end."""
        ...


def select_view(*, as_json: bool) -> View:
    """Return the view for standard output, or for standard error when output is to be JSON only."""
    if as_json or not sys.stdout.isatty():
        return PlainView(sys.stderr if as_json else sys.stdout)
    return RichView()


def _pool_line(rows: Sequence[PoolRow], free_blocks: int, total_blocks: int) -> str:
    if not rows:
        return f"all {free_blocks} blocks free" if free_blocks == total_blocks else f"{total_blocks - free_blocks} used"
    held = sum(len(row.block_ids) for row in rows)
    used = len({block for row in rows for block in row.block_ids})
    line = f"{used} blocks used, {free_blocks} of {total_blocks} free"
    return line if held == used else f"{line}; without sharing it would be {held}"


def _cells(row: PoolRow, shared: str, own: str) -> list[str]:
    cells = [shared if count > 1 else own for count in row.ref_counts]
    return cells if len(cells) <= _MAX_CELLS else [*cells[: _MAX_CELLS - 1], "…"]


def _counts(row: PoolRow) -> str:
    num_shared = sum(count > 1 for count in row.ref_counts)
    return f"{num_shared} shared + {len(row.ref_counts) - num_shared} own"


class PlainView:
    """Lines of text without control codes, for pipes, logs and simple terminals.

    Args:
        out: Where to write.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._stage = ""

    def loading(self, progress: float, stage: str) -> None:
        """Show how far the server is: a line per stage."""
        if stage != self._stage:
            self._stage = stage
            self._print(f"loading {progress:4.0%} {stage}".rstrip())

    def heading(self, title: str, text: str) -> None:
        """Begin a part."""
        self._print(f"\n== {title} ==\n{text}")

    def code(self, text: str) -> None:
        """Show a prompt."""
        self._print("\n".join(f"  | {line}" for line in text.splitlines()))

    def note(self, text: str) -> None:
        """Say one thing."""
        self._print(text)

    @contextmanager
    def panels(self, titles: Sequence[str], beginnings: Sequence[str]) -> Iterator[Panels]:
        """Collect the texts and print them one below the other."""
        texts = _Texts(beginnings)
        try:
            yield texts
        finally:
            for title, text in zip(titles, texts.values, strict=True):
                self._print(f"-- {title}")
                self.code(text)

    def pool(self, rows: Sequence[PoolRow], free_blocks: int, total_blocks: int) -> None:
        """Draw which handle holds which block: # is shared, o is its own."""
        for row in rows:
            self._print(f"  {row.name:<9} {' '.join(_cells(row, '#', 'o'))}   {_counts(row)}")
        legend = "   (# shared, o own)" if rows else ""
        self._print(f"  {'pool':<9} {_pool_line(rows, free_blocks, total_blocks)}{legend}")

    def summary(self, lines: Sequence[tuple[str, str]], *, is_good: bool) -> None:
        """Show the figures at the end."""
        self._print(f"\n== {'Done' if is_good else 'FAILED'} ==")
        for name, value in lines:
            self._print(f"  {name:<28} {value}")

    def _print(self, text: str) -> None:
        encoding = self._out.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=self._out, flush=True)


class _Texts:
    def __init__(self, beginnings: Sequence[str]) -> None:
        self.values = list(beginnings)

    def add(self, place: int, piece: str) -> None:
        self.values[place] += piece


class RichView:
    """Colours, panels side by side that fill while the model speaks, and a progress bar; drawn with rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(highlight=False)
        columns = (
            TextColumn("[bold]loading"),
            BarColumn(30),
            TextColumn("{task.percentage:3.0f}%  {task.fields[stage]}"),
        )
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=1.0, stage="")

    def loading(self, progress: float, stage: str) -> None:
        """Move the progress bar; at the end it goes."""
        self._progress.start()
        self._progress.update(self._task, completed=progress, stage=stage, refresh=True)
        if progress >= 1.0:
            self._progress.stop()

    def heading(self, title: str, text: str) -> None:
        """Begin a part."""
        from rich.rule import Rule

        self._console.print()
        self._console.print(Rule(f"[bold]{title}", align="left", style="dim"))
        self._console.print(text, style="dim")

    def code(self, text: str) -> None:
        """Show a prompt, as Python."""
        from rich.padding import Padding

        self._console.print(Padding(_as_code(text), (1, 2)))

    def note(self, text: str) -> None:
        """Say one thing."""
        self._console.print(text, markup=False)

    @contextmanager
    def panels(self, titles: Sequence[str], beginnings: Sequence[str]) -> Iterator[Panels]:
        """Open panels side by side and redraw them as their texts grow."""
        from rich.live import Live

        texts = _Texts(beginnings)
        with Live(console=self._console, auto_refresh=False, vertical_overflow="visible") as live:
            panels = _LivePanels(live, titles, texts)
            try:
                yield panels
            finally:
                panels.draw()

    def pool(self, rows: Sequence[PoolRow], free_blocks: int, total_blocks: int) -> None:
        """Draw which handle holds which block, one colour per handle, shared ones hollow."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for row in rows:
            colour = _COLOURS.get(row.name, "blue")
            cells = Text()
            for cell in _cells(row, "▣", "■"):
                cells.append(f"{cell} ", style="white" if cell == "▣" else f"bold {colour}")
            table.add_row(Text(row.name, style=colour), cells, Text(_counts(row), style="dim"))
        self._console.print(table)
        legend = "  [dim]▣ shared  ■ own[/dim]" if rows else ""
        self._console.print(f"[bold]pool[/bold]  {_pool_line(rows, free_blocks, total_blocks)}{legend}")

    def summary(self, lines: Sequence[tuple[str, str]], *, is_good: bool) -> None:
        """Show the figures at the end."""
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, value in lines:
            table.add_row(f"[dim]{name}", value)
        colour, title = ("green", "done") if is_good else ("red", "failed")
        self._console.print()
        self._console.print(Panel(table, title=f"[bold {colour}]{title}", border_style=colour, expand=False))


class _LivePanels:
    """Panels that are redrawn at most 15 times a second."""

    def __init__(self, live: object, titles: Sequence[str], texts: _Texts) -> None:
        from rich.live import Live

        assert isinstance(live, Live)
        self._live = live
        self._titles = titles
        self._texts = texts
        self._drawn_at = 0.0

    def add(self, place: int, piece: str) -> None:
        self._texts.add(place, piece)
        if time.monotonic() - self._drawn_at > 1 / 15:
            self.draw()

    def draw(self) -> None:
        """Draw them as they are now, all as high as the highest."""
        from rich.table import Table

        grid = Table.grid(expand=True, padding=(0, 1))
        for _ in self._titles:
            grid.add_column(ratio=1)
        codes = [_as_code(text) for text in self._texts.values]
        width = self._live.console.width // len(codes) - 6  # borders and padding
        options = self._live.console.options.update(width=width)
        height = 2 + max(len(self._live.console.render_lines(code, options)) for code in codes)
        grid.add_row(*(self._panel(*cell, height) for cell in zip(self._titles, codes, strict=True)))
        self._live.update(grid, refresh=True)
        self._drawn_at = time.monotonic()

    @staticmethod
    def _panel(title: str, code: RenderableType, height: int) -> RenderableType:
        from rich.panel import Panel

        colour = next((colour for name, colour in _COLOURS.items() if title.startswith(name)), "blue")
        return Panel(code, title=f"[{colour}]{title}", title_align="left", border_style=colour, height=height)


def _as_code(text: str) -> RenderableType:
    from rich.syntax import Syntax

    return Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True)
