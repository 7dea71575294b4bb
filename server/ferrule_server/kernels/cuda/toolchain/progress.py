"""What the commands that compile kernels show meanwhile: a bar with its times, sizes that can be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ferrule_server.kernels.cuda.toolchain.cubins import Progress

__all__ = ["progress_bar", "size"]

_ESTIMATE_S = 600.0
_MEGABYTE = 1e6


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Draw how far a build is, how long it has taken and will take: on a terminal, elsewhere nothing."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("passed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=_ESTIMATE_S) as bar:
        task = bar.add_task("compiling", total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name.partition("[")[0])

        yield show


def size(num_bytes: int) -> str:
    """Return a number of bytes for people: ``37 kB``, ``2.3 MB``."""
    return f"{num_bytes / _MEGABYTE:.1f} MB" if num_bytes >= _MEGABYTE else f"{num_bytes / 1e3:.0f} kB"
