"""``ferrule caches``: what lives in the server's KV pool."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime

from ferrule_client.cli_common import add_connection_options, connect, print_json, require_rich
from ferrule_client.types import CacheSummary, Status

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule caches                                    a table of live handles
  ferrule caches --json | jq '.caches[].length'

Ids are the loggable ones, the same as in the server's logs; they cannot be used as handles.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the live handles and return 0.

    Raises:
        CommandError: A table is wanted and rich is not installed.
        ExecutorError: The server does not answer.
    """
    if not args.json:
        require_rich("the table")
    with connect(args) as client:
        caches = list(client.list_caches())
        status = client.status()
    if args.json:
        print_json({"caches": [_as_dict(cache) for cache in caches], "free_blocks": status.free_blocks})
    else:
        _print_table(caches, status)
    return 0


def _as_dict(cache: CacheSummary) -> dict[str, object]:
    return {
        "handle_id": cache.handle_id,
        "length": cache.length,
        "num_blocks": cache.num_blocks,
        "num_shared_blocks": cache.num_shared_blocks,
        "ttl_s": round(cache.lease.ttl_s, 3),
        "create_time": None if cache.create_time is None else cache.create_time.isoformat(),
    }


def _print_table(caches: Sequence[CacheSummary], status: Status) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    pool = f"{status.free_blocks} of {status.total_blocks} blocks free"
    table = Table(box=SIMPLE_HEAD, caption=f"{len(caches)} live handles, {pool}", caption_justify="left")
    table.add_column("handle", style="cyan", no_wrap=True)
    for name in ("tokens", "blocks", "shared", "lease", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for cache in caches:
        blocks = (str(cache.num_blocks), str(cache.num_shared_blocks))
        table.add_row(cache.handle_id, str(cache.length), *blocks, f"{cache.lease.ttl_s:.0f} s", _age(cache))
    Console().print(table)


def _age(cache: CacheSummary) -> str:
    if cache.create_time is None:
        return "-"
    return f"{max(0.0, (datetime.now(UTC) - cache.create_time).total_seconds()):.0f} s"
