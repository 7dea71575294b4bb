"""``ferrule bench``: how fast a model runs on a machine, or what a load does to a server."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ferrule_cli import common
from ferrule_cli.commands.bench_measure import Run, measure, read_rate
from ferrule_cli.connection import add_connection_options, connect, connect_async, wait_for_model
from ferrule_cli.demo.server import own_server
from ferrule_cli.load import options as load
from ferrule_cli.waiting import Waiting
from ferrule_client.sync.client import Client

if TYPE_CHECKING:
    from rich.console import Console

    from ferrule_cli.load.command import Result
    from ferrule_client.aio.client import AsyncClient

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule bench                                     the small bundled model, on a server of its own
  ferrule bench --model /path/to/Qwen3-0.6B         a model of yours
  ferrule bench --model Qwen/Qwen3-0.6B --weights int8
  ferrule bench 127.0.0.1:50051                     a server that runs already; others should not use it meanwhile
  ferrule bench --json | jq '.figures[] | {name, median}'
  ferrule bench --plot bench.svg                    keep the table as a picture
  ferrule bench 127.0.0.1:50051 --concurrency 1,8,32          closed loop: so many requests at a time
  ferrule bench 127.0.0.1:50051 --rate 2 --prompt-tokens 16-1024     open loop: 2 requests per second
  ferrule bench 127.0.0.1:50051 --concurrency 4 --fork 8 --json | jq '.levels[].first_token_ms.p99'

A decode step reads all weights and the KV of its sequences, so the read rate of memory limits it on a processor. The
last column is the share of that limit that was reached; it is what can be compared between machines. With many
sequences the limit is arithmetic, and the share falls.

In a closed loop each user sends its next request when it has the last answer, so a slow server is asked less often. An
open loop does not wait: its latencies count from the moment at which a request was due, and show what callers wait.
Ctrl-C ends a load, shows what was measured and releases all handles; a second one leaves them to their leases. The
token is taken from $FERRULE_TOKEN.
"""

_SERVER_OPTIONS = ("weights", "activations", "threads")
_LOOPBACK = ("127.", "localhost", "[::1]", "unix:")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("server", nargs="?", metavar="TARGET", help="the same as --target")
    parser.add_argument("--model", metavar="MODEL", help="as of ferrule serve (demo)")
    parser.add_argument("--weights", choices=("float", "int8", "int4"), help="as of ferrule serve")
    parser.add_argument("--activations", choices=("int16", "int8"), help="as of ferrule serve")
    common.add_numbers(
        parser,
        ("--threads", common.number(int, 1, 256), None, "N", "as of ferrule serve"),
        ("--seconds", common.number(float, 0.1, 3600), None, "S", "time for each figure (6), or for each load (10)"),
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write the table to a picture too")
    load.add_options(parser)
    add_connection_options(parser, without_target="start one, and end it")


def run(args: argparse.Namespace) -> int:
    """Measure, show the figures and return 0, or 128 + N if a load was ended by signal N."""
    if args.server is not None:
        if args.target is not None:
            raise common.misuse("TARGET and --target are the same: give one of them", "USED_WRONGLY")
        args.target = args.server
    own = [f"--{name}" for name in ("model", *_SERVER_OPTIONS) if getattr(args, name) is not None]
    if args.target is not None and own:
        raise common.misuse(f"{own[0]} is for a server of our own, not for --target", "USED_WRONGLY")
    if not args.json or args.plot:
        common.need_rich("ferrule bench", ", or use --json")
    return (_load if load.is_wanted(args) else _figures)(args)


def _figures(args: argparse.Namespace) -> int:
    with common.ending_in_order(), _server(args) as (client, _), Waiting("the read rate of memory") as waiting:
        is_local = args.target is None or args.target.startswith(_LOOPBACK)
        rate = read_rate() if is_local else None
        result = measure(client, args.seconds or 6.0, rate, on_figure=waiting.show)
    _show(args, _as_json(result), lambda console: _draw_figures(console, result))
    return 0


def _load(args: argparse.Namespace) -> int:
    from ferrule_cli.load.command import measure as measure_load

    with common.ending_in_order(), _server(args) as (client, connect_again):
        info, status = client.model_info(), client.status()
        result = measure_load(args, info, connect_again)
    server = {
        "model": info.model_id,
        "executor": status.executor,
        "dtype": info.dtype,
        "device": info.device_name or info.device_type,
    }
    facts = {**server, "server_version": status.server_version, **result.as_json()}
    _show(args, facts, lambda console: _draw_load(console, result, info.model_id))
    result.check()
    return result.exit_code


def _draw_figures(console: Console, result: Run) -> None:
    from ferrule_cli.commands.bench_view import draw

    draw(console, result)


def _draw_load(console: Console, result: Result, model: str) -> None:
    from ferrule_cli.load.view import draw

    draw(console, result, model)


def _show(args: argparse.Namespace, facts: dict[str, object], draw: Callable[[Console], None]) -> None:
    """Print JSON or the table, and write the picture of the table."""
    if args.json:
        common.print_json(facts)
        if args.plot is None:
            return
    from rich.console import Console

    keeps = args.plot is not None
    console = Console(record=True, file=io.StringIO(), width=90) if args.json else Console(record=keeps)
    draw(console)
    if keeps:
        try:
            console.save_svg(str(args.plot), title="ferrule bench")
        except OSError as error:
            raise common.CommandError(f"--plot {args.plot}: {error.strerror}", "FILE_UNWRITABLE") from None


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[Client, Callable[[int], AsyncClient]]]:
    """Yield a client of the server to measure, when that is ready, and what makes an asyncio one by its retries."""
    if args.target is not None:
        with connect(args) as client:
            wait_for_model(client, args)
            yield client, lambda retries: connect_async(args, max_retries=retries)
        return
    arguments = ["--model", args.model or "demo", "--log-level", "info"]
    for name in _SERVER_OPTIONS:
        if (value := getattr(args, name)) is not None:
            arguments += [f"--{name}", str(value)]
    from ferrule_client.aio.client import AsyncClient

    with own_server(arguments) as (target, client):
        yield client, lambda retries: AsyncClient(target, max_retries=retries, timeout=600.0)


def _as_json(result: Run) -> dict[str, object]:
    rate = result.read_bytes_per_s
    figures = [asdict(one) | {"median": one.median, "share": one.share(rate)} for one in result.figures]
    return asdict(result) | {"figures": figures}
