"""How the demo looks: in colour on a terminal, in plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["PlainView", "PoolRow", "RichView", "View"]

_COLOURS = {"trunk": "cyan", "branch 1": "green", "branch 2": "yellow", "branch 3": "magenta"}
_MAX_CELLS = 40
_FRAME_S = 1 / 15

Add = Callable[[int, str], None]  # puts a piece of text at the end of one of several places


@dataclass(frozen=True, slots=True)
class PoolRow:
    """The blocks of one handle, in token order."""

    name: str  # whose blocks they are
    block_ids: tuple[int, ...]  # equal ids in two rows are one shared block
    ref_counts: tuple[int, ...]  # number of handles that hold each

    @property
    def counts(self) -> str:
        """How many blocks are shared and how many are not."""
        num_shared = sum(count > 1 for count in self.ref_counts)
        return f"{num_shared} shared + {len(self.ref_counts) - num_shared} own"

    def cells(self, shared: str, own: str) -> list[str]:
        """Return a mark for each block, as many as there is room for."""
        cells = [shared if count > 1 else own for count in self.ref_counts]
        return cells if len(cells) <= _MAX_CELLS else [*cells[: _MAX_CELLS - 1], "…"]


def _pool_line(rows: Sequence[PoolRow], free_blocks: int, total_blocks: int) -> str:
    if not rows:
        return f"all {free_blocks} blocks free" if free_blocks == total_blocks else f"{total_blocks - free_blocks} used"
    held = sum(len(row.block_ids) for row in rows)
    used = len({block for row in rows for block in row.block_ids})
    line = f"{used} blocks used, {free_blocks} of {total_blocks} free"
    return line if held == used else f"{line}; without sharing it would be {held}"


class PlainView:
    """Lines of text without control codes, for pipes, logs and simple terminals."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._stage = ""

    def loading(self, progress: float, stage: str) -> None:
        """Show how far the server is, a line per stage; progress 1.0 is the end of it."""
        if stage != self._stage:
            self._stage = stage
            self.note(f"loading {progress:4.0%} {stage}".rstrip())

    def heading(self, title: str, text: str) -> None:
        """Begin a part."""
        self.note(f"\n== {title} ==\n{text}")

    def code(self, text: str) -> None:
        """Show a prompt."""
        self.note("\n".join(f"  | {line}" for line in text.splitlines()))

    def note(self, text: str) -> None:
        """Say one thing."""
        encoding = self._out.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=self._out, flush=True)

    @contextmanager
    def panels(self, titles: Sequence[str], beginnings: Sequence[str]) -> Iterator[Add]:
        """Open places for texts, each with a title and the text it begins with; print them at the end."""
        texts = list(beginnings)

        def add(place: int, piece: str) -> None:
            texts[place] += piece

        try:
            yield add
        finally:
            for title, text in zip(titles, texts, strict=True):
                self.note(f"-- {title}")
                self.code(text)

    def pool(self, rows: Sequence[PoolRow], free_blocks: int, total_blocks: int) -> None:
        """Draw which handle holds which block: # is shared, o is its own."""
        for row in rows:
            self.note(f"  {row.name:<9} {' '.join(row.cells('#', 'o'))}   {row.counts}")
        legend = "   (# shared, o own)" if rows else ""
        self.note(f"  {'pool':<9} {_pool_line(rows, free_blocks, total_blocks)}{legend}")

    def summary(self, lines: Sequence[tuple[str, str]], *, is_good: bool) -> None:
        """Show the figures at the end."""
        self.note(f"\n== {'Done' if is_good else 'FAILED'} ==")
        for name, value in lines:
            self.note(f"  {name:<28} {value}")


class RichView:
    """The same in colour, with panels side by side that fill while the model speaks; drawn with rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(highlight=False)
        stage = TextColumn("{task.percentage:3.0f}%  {task.fields[stage]}")
        columns = (TextColumn("[bold]loading"), BarColumn(30), stage)
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
    def panels(self, titles: Sequence[str], beginnings: Sequence[str]) -> Iterator[Add]:
        """Open panels side by side and redraw them as their texts grow, 15 times a second at most."""
        from rich.live import Live

        texts = list(beginnings)
        with Live(console=self._console, auto_refresh=False, vertical_overflow="visible") as live:
            live.update(self._grid(titles, texts), refresh=True)  # the first drawing takes long: before tokens come
            drawn_at = time.monotonic()

            def add(place: int, piece: str) -> None:
                nonlocal drawn_at
                texts[place] += piece
                if time.monotonic() - drawn_at > _FRAME_S:
                    live.update(self._grid(titles, texts), refresh=True)
                    drawn_at = time.monotonic()

            try:
                yield add
            finally:
                live.update(self._grid(titles, texts), refresh=True)

    def _grid(self, titles: Sequence[str], texts: Sequence[str]) -> RenderableType:
        """Return panels that are all as high as the highest."""
        from rich.panel import Panel
        from rich.table import Table

        grid = Table.grid(expand=True, padding=(0, 1))
        codes = [_as_code(text) for text in texts]
        options = self._console.options.update(width=self._console.width // len(codes) - 6)  # borders and padding
        height = 2 + max(len(self._console.render_lines(code, options)) for code in codes)
        panels = []
        for title, code in zip(titles, codes, strict=True):
            grid.add_column(ratio=1)
            colour = next((colour for name, colour in _COLOURS.items() if title.startswith(name)), "blue")
            name = f"[{colour}]{title}"
            panels.append(Panel(code, title=name, title_align="left", border_style=colour, height=height))
        grid.add_row(*panels)
        return grid

    def pool(self, rows: Sequence[PoolRow], free_blocks: int, total_blocks: int) -> None:
        """Draw which handle holds which block, one colour per handle, shared ones hollow."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for row in rows:
            colour = _COLOURS.get(row.name, "blue")
            cells = Text()
            for cell in row.cells("▣", "■"):
                cells.append(f"{cell} ", style="white" if cell == "▣" else f"bold {colour}")
            table.add_row(Text(row.name, style=colour), cells, Text(row.counts, style="dim"))
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


View = PlainView | RichView
"""What the demo tells, in order."""


def _as_code(text: str) -> RenderableType:
    from rich.syntax import Syntax

    return Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True)
