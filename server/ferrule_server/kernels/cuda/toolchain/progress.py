"""What the commands that compile kernels show meanwhile: a bar or lines with their times, sizes that can be read."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ferrule_server.kernels.cuda.toolchain.build import Progress

__all__ = ["BUILD_TIME", "progress_bar", "size"]

BUILD_TIME: Final = "some 80 s of processor time"
"""Of all kernels of one model, Qwen3-8B, with an empty cache; docs/performance.md has the measurement."""

_EVERY_S = 10.0
_ESTIMATE_S = 600.0
_MEGABYTE = 1e6


@contextmanager
def progress_bar(clock: Callable[[], float] = time.monotonic, unit: str = "kernels") -> Iterator[Progress]:
    """Show how far work is and how long it has taken: a bar on a terminal, elsewhere a line every ten seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(clock, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("passed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Bar(*columns, console=console, speed_estimate_period=_ESTIMATE_S) as bar:
        task = bar.add_task(unit, total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name.partition("[")[0])

        yield show


def _lines(clock: Callable[[], float], unit: str) -> Progress:
    """Return what writes a line where ten seconds have passed since the last one."""
    began = said = clock()

    def show(done: int, total: int, _: str) -> None:
        nonlocal said
        if (now := clock()) - said >= _EVERY_S:
            said = now
            print(f"{done} of {total} {unit}, {now - began:.0f} s passed", file=sys.stderr, flush=True)

    return show


def size(num_bytes: int) -> str:
    """Return a number of bytes for people: ``37 kB``, ``2.3 MB``."""
    return f"{num_bytes / _MEGABYTE:.1f} MB" if num_bytes >= _MEGABYTE else f"{num_bytes / 1e3:.0f} kB"
