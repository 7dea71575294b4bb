"""``ferrule bench``: how fast a model runs on a machine, beside what its memory allows."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ferrule_cli import common
from ferrule_cli.commands.bench_measure import Run, measure, read_rate
from ferrule_cli.connection import add_connection_options, connect, wait_for_model
from ferrule_cli.demo.server import ServerProcess
from ferrule_client.sync.client import Client
from ferrule_client.types import Status

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule bench                                     the small model that ships, on a server of its own
  ferrule bench --model /path/to/Qwen3-0.6B         a model of yours
  ferrule bench --model Qwen/Qwen3-0.6B --weights int8
  ferrule bench --target 127.0.0.1:50051            a server that runs already; others should not use it meanwhile
  ferrule bench --json | jq '.figures[] | {name, median}'
  ferrule bench --plot bench.svg                    keep the table and the bars as a picture

A decode step reads all weights and the KV of its sequences, so the read rate of memory limits it on a processor. The
last column is the share of that limit that was reached; it is what can be compared between machines. With many
sequences the limit is arithmetic, and the share falls.
"""

_LOAD_S = 900.0
_SERVER_OPTIONS = ("weights", "activations", "threads")
_LOOPBACK = ("127.", "localhost", "[::1]", "unix:")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--model", metavar="MODEL", help="demo (default), a folder, or org/name on the hub")
    parser.add_argument("--weights", choices=("float", "int8", "int4"), help="as of ferrule serve")
    parser.add_argument("--activations", choices=("int16", "int8"), help="as of ferrule serve")
    common.add_numbers(
        parser,
        ("--threads", common.number(int, 1, 256), None, "N", "as of ferrule serve"),
        ("--seconds", common.number(float, 0.1, 600), 6.0, "S", "time for each figure (6)"),
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write the table and the bars to a picture too")
    add_connection_options(parser, without_target="start one, and end it")


def run(args: argparse.Namespace) -> int:
    """Measure, show the figures and return 0."""
    own = [f"--{name}" for name in ("model", *_SERVER_OPTIONS) if getattr(args, name) is not None]
    if args.target is not None and own:
        raise common.misuse(f"{own[0]} is for a server of our own, not for --target", "USED_WRONGLY")
    common.need_rich("ferrule bench")
    from rich.console import Console

    from ferrule_cli.commands.bench_view import draw

    err = Console(stderr=True)
    with common.ending_in_order(), _client(args, err) as client:
        is_local = args.target is None or args.target.startswith(_LOOPBACK)
        with err.status("read rate of memory") as status:
            rate = read_rate() if is_local else None
            result = measure(client, args.seconds, rate, on_figure=status.update)
    if args.json:
        common.print_json(_as_json(result))
        if args.plot is None:
            return 0
    keeps = args.plot is not None
    console = Console(record=True, file=io.StringIO(), width=90) if args.json else Console(record=keeps)
    draw(console, result)
    if keeps:
        try:
            console.save_svg(str(args.plot), title="ferrule bench")
        except OSError as error:
            raise common.CommandError(f"--plot {args.plot}: {error.strerror}", "FILE_UNWRITABLE") from None
    return 0


@contextlib.contextmanager
def _client(args: argparse.Namespace, err: Console) -> Iterator[Client]:
    """Yield a client of the server to measure, when that is ready."""
    if args.target is not None:
        with connect(args) as client:
            wait_for_model(client, args)
            yield client
        return
    arguments = ["--model", args.model or "demo", "--log-level", "info"]
    for name in _SERVER_OPTIONS:
        if (value := getattr(args, name)) is not None:
            arguments += [f"--{name}", str(value)]
    with ServerProcess(arguments) as server, Client(server.target, max_retries=0, timeout=600.0) as client:
        with err.status("starting a server") as status:

            def show(loading: Status | None) -> None:
                if loading is not None:
                    share = f" {loading.load_progress:.0%}" if loading.load_progress < 1 else ""
                    status.update(f"{loading.load_stage}{share}")

            server.wait_until_ready(client, show, _LOAD_S)
        yield client


def _as_json(result: Run) -> dict[str, object]:
    rate = result.read_bytes_per_s
    figures = [asdict(one) | {"median": one.median, "share": one.share(rate)} for one in result.figures]
    return asdict(result) | {"figures": figures}
