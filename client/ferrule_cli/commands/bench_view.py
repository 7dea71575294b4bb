"""What ``ferrule bench`` shows: a table with a bar for each figure."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferrule_cli.commands.bench_measure import Figure, Run

__all__ = ["draw"]

_BAR = 18
_BLOCKS = " ▏▎▍▌▋▊▉█"


def draw(console: Console, run: Run) -> None:
    """Print the figures of a run."""
    size = f", {run.parameter_bytes / 2**20:,.0f} MiB of weights" if run.parameter_bytes else ""
    console.print(f"{run.model}: {run.dtype}{size}; {run.device}; executor {run.executor}", highlight=False)
    if run.read_bytes_per_s:
        console.print(f"memory reads {run.read_bytes_per_s / 1e9:.1f} GB/s here", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for title in ("median", "range"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    if has_share := bool(run.read_bytes_per_s):
        table.add_column("of memory", justify="right", no_wrap=True)
    most = max((figure.median for figure in run.figures if figure.unit == "tokens/s"), default=1.0)
    for figure in run.figures:
        share = figure.share(run.read_bytes_per_s)
        low, high = min(figure.samples), max(figure.samples)
        row: list[str | Text] = [
            figure.name,
            _short(figure.median),
            f"{_short(low)}-{_short(high)}",
            figure.unit,
            _bar(figure, most),
        ]
        table.add_row(*row, *([f"{share:.0%}" if share is not None else ""] if has_share else []))
    console.print(table)


def _bar(figure: Figure, most: float) -> Text:
    """Return a bar as long as a rate is beside the largest one."""
    if figure.unit != "tokens/s":
        return Text("")
    eighths = max(1, round(8 * _BAR * figure.median / most))
    return Text("█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else ""), style="cyan")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
