"""What ``ferrule bench`` shows of a load: a table, and what is to be known of its figures."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Column, Table

from ferrule_cli.load.command import Level, Result, counts
from ferrule_cli.load.records import Quantiles
from ferrule_cli.load.requests import LEASE_S

__all__ = ["draw"]


def draw(console: Console, result: Result, model: str) -> None:
    """Print the figures of a load."""
    low, high = result.prompt_tokens
    prompt = f"{low}" if low == high else f"{low} to {high}"
    branches = f" in each of {result.shape.num_branches} branches" if result.shape.num_branches > 1 else ""
    request = f"{result.shape.mode}, prompts of {prompt} tokens, {result.shape.new_tokens} new{branches}"
    console.print(f"{model}: {request}", highlight=False)
    titles = ("load", "tokens/s", "requests/s", "ms", "first token", "between tokens", "request")
    columns = [Column(title, justify="left" if title in ("load", "ms") else "right", no_wrap=True) for title in titles]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for level in result.levels:
        figures = level.figures
        latencies = (figures.first_token_ms, figures.inter_token_ms, figures.end_to_end_ms)
        rates = (_short(figures.tokens_per_s), _short(figures.requests_per_s))
        table.add_row(level.name, *rates, "p50\np90\np99", *map(_lines, latencies))
    if result.levels:
        console.print(table)
    for level in result.levels:
        for note in _notes(level):
            console.print(f"{level.name}: {note}", highlight=False)
    if result.signal is not None:
        until = "the figures are those of the time until then" if result.levels else "nothing was measured yet"
        console.print(f"interrupted: {until}", highlight=False)
    if result.num_unreleased:
        text = f"{result.num_unreleased} handles could not be released: their leases end in {LEASE_S:.0f} s"
        console.print(text, highlight=False)


def _notes(level: Level) -> Iterator[str]:
    figures = level.figures
    if figures.errors:
        yield f"failed: {counts(figures.errors)}; succeeded: {figures.num_ok}"
    if level.retries:
        yield f"tried again: {counts(level.retries)}"
    if figures.num_unfinished:
        requests = "request" if figures.num_unfinished == 1 else "requests"
        yield f"{figures.num_unfinished} {requests} had not finished, so the latencies are underestimated"
    if level.watch.limit:
        yield f"the generator was the limit: {level.watch.limit}"


def _lines(quantiles: Quantiles) -> str:
    return "\n".join(map(_short, (quantiles.p50, quantiles.p90, quantiles.p99)))


def _short(value: float) -> str:
    if value != value:  # noqa: PLR0124 - NaN: nothing was measured
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
