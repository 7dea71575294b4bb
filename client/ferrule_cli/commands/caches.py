"""``ferrule caches``: what lives in the server's KV pool."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from ferrule_cli.common import print_json
from ferrule_cli.connection import add_connection_options, connect, wait_for_model
from ferrule_cli.waiting import Waiting
from ferrule_client.types import CacheSummary

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule caches                                    a table of live handles
  ferrule caches --json | jq '.caches[].length'

Ids are the loggable ones, the same as in the server's logs; they cannot be used as handles.
"""

_HEADINGS = ("handle", "tokens", "blocks", "shared", "durable", "to run", "lease", "age")

add_options = add_connection_options


def run(args: argparse.Namespace) -> int:
    """Print the live handles and return 0."""
    with connect(args) as client:
        wait_for_model(client, args)
        with Waiting("the list of handles"):
            caches = list(client.list_caches())
        free, total = client.status().free_blocks, client.capabilities().total_blocks
    rows = list(map(_row, caches))
    caption = f"{len(rows)} live handle{'s' * (len(rows) != 1)}, {free} of {total} blocks free"
    if args.json:
        print_json({"caches": [_as_dict(cache) for cache in caches], "free_blocks": free, "total_blocks": total})
    elif sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _print_table(rows, caption)
    else:
        widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
        for first, *others in (_HEADINGS, *rows):
            print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
        print(caption)
    return 0


def _as_dict(cache: CacheSummary) -> dict[str, object]:
    return {
        "handle_id": cache.handle_id,
        "length": cache.length,
        "num_blocks": cache.num_blocks,
        "num_shared_blocks": cache.num_shared_blocks,
        "durability": cache.durability,
        "tokens_to_recompute": cache.tokens_to_recompute,
        "expires_in_s": round(cache.lease.expires_in_s, 3),
        "create_time": None if cache.create_time is None else cache.create_time.isoformat(),
    }


def _row(cache: CacheSummary) -> tuple[str, ...]:
    age = "-"
    if cache.create_time is not None:
        age = f"{max(0.0, (datetime.now(UTC) - cache.create_time).total_seconds()):.0f} s"
    numbers = map(str, (cache.length, cache.num_blocks, cache.num_shared_blocks))
    durable = ("yes" if cache.durability == "journaled" else "no", str(cache.tokens_to_recompute))
    return (cache.handle_id, *numbers, *durable, f"{cache.lease.expires_in_s:.0f} s", age)


def _print_table(rows: Sequence[Sequence[str]], caption: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    first, *others = _HEADINGS
    columns = [Column(first, style="cyan", no_wrap=True)]
    columns += [Column(name, justify="right", no_wrap=True) for name in others]
    table = Table(*columns, box=SIMPLE_HEAD, caption=caption, caption_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
