"""``ferrule caches``: what lives in the server's KV pool."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from ferrule_cli.common import add_connection_options, connect, print_json
from ferrule_client.types import CacheSummary

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule caches                                    a table of live handles
  ferrule caches --json | jq '.caches[].length'

Ids are the loggable ones, the same as in the server's logs; they cannot be used as handles.
"""

_HEADINGS = ("handle", "tokens", "blocks", "shared", "lease", "age")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the live handles and return 0.

    Raises:
        FerruleError: The server does not answer.
    """
    with connect(args) as client:
        caches = list(client.list_caches())
        free, total = client.status().free_blocks, client.capabilities().total_blocks
    if args.json:
        print_json({"caches": [_as_dict(cache) for cache in caches], "free_blocks": free, "total_blocks": total})
    elif sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _print_table(caches, free, total)
    else:
        _print_columns(caches, free, total)
    return 0


def _as_dict(cache: CacheSummary) -> dict[str, object]:
    return {
        "handle_id": cache.handle_id,
        "length": cache.length,
        "num_blocks": cache.num_blocks,
        "num_shared_blocks": cache.num_shared_blocks,
        "expires_in_s": round(cache.lease.expires_in_s, 3),
        "create_time": None if cache.create_time is None else cache.create_time.isoformat(),
    }


def _row(cache: CacheSummary) -> tuple[str, ...]:
    blocks = (str(cache.num_blocks), str(cache.num_shared_blocks))
    return (cache.handle_id, str(cache.length), *blocks, f"{cache.lease.expires_in_s:.0f} s", _age(cache))


def _total(caches: Sequence[CacheSummary], free: int, total: int) -> str:
    return f"{len(caches)} live handles, {free} of {total} blocks free"


def _print_columns(caches: Sequence[CacheSummary], free: int, total: int) -> None:
    """Print the table for pipes, and where rich is not installed."""
    rows = [_HEADINGS, *map(_row, caches)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        print("  ".join(cells))
    print(_total(caches, free, total))


def _print_table(caches: Sequence[CacheSummary], free: int, total: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, caption=_total(caches, free, total), caption_justify="left")
    first, *others = _HEADINGS
    table.add_column(first, style="cyan", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    for cache in caches:
        table.add_row(*_row(cache))
    Console().print(table)


def _age(cache: CacheSummary) -> str:
    if cache.create_time is None:
        return "-"
    return f"{max(0.0, (datetime.now(UTC) - cache.create_time).total_seconds()):.0f} s"
