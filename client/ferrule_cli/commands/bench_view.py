"""What ``ferrule bench`` shows: a table with a bar for each figure."""

from __future__ import annotations

from rich.bar import Bar
from rich.console import Console
from rich.table import Column, Table

from ferrule_cli.commands.bench_measure import Run

__all__ = ["draw"]

_BAR = 12


def draw(console: Console, run: Run) -> None:
    """Print the figures of a run."""
    size = f", {run.parameter_bytes / 2**20:,.0f} MiB of weights" if run.parameter_bytes else ""
    console.print(f"{run.model}: {run.dtype}{size}; {run.device}; executor {run.executor}", highlight=False)
    titles = ["", "median", "range", "", "", "of memory"]
    if run.read_bytes_per_s:
        console.print(f"memory reads {run.read_bytes_per_s / 1e9:.1f} GB/s here", highlight=False)
    else:
        del titles[-1]
    columns = [Column(title, justify="right" if title else "left", no_wrap=True) for title in titles]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    most = max((figure.median for figure in run.figures if figure.unit == "tokens/s"), default=1.0)
    for figure in run.figures:
        median, low, high = map(_short, (figure.median, min(figure.samples), max(figure.samples)))
        eighths = max(1, round(8 * _BAR * figure.median / most)) if figure.unit == "tokens/s" else 0
        bar = Bar(8 * _BAR, 0, eighths, width=_BAR, color="cyan")
        share = figure.share(run.read_bytes_per_s)
        words = (figure.name, median, f"{low}-{high}", figure.unit)
        table.add_row(*words, bar, *(["" if share is None else f"{share:.0%}"] if run.read_bytes_per_s else []))
    console.print(table)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
