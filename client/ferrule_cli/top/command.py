"""``ferrule top``: a server while it works."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from ferrule_cli import common
from ferrule_cli.connection import add_connection_options, connect
from ferrule_cli.top.figures import Figures, History, as_dict
from ferrule_cli.top.source import Source
from ferrule_cli.waiting import Waiting

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule top                                       tokens/s, steps, queue, blocks, leases, principals; q ends it
  ferrule top --once                                one picture, as text
  ferrule top --json | jq .rates.generated_tokens   one object, for scripts
  ferrule top --once --svg top.svg                  one picture, as a file; COLUMNS and LINES set its size

On a server with credentials the token should have the admin role; without it there is less to see.
"""

_MAX_WAIT_S = 5.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_connection_options(parser)
    common.add_numbers(
        parser, ("--interval", common.number(float, 0.1, 3600), 1.0, "SECONDS", "between two looks (default: 1)")
    )
    parser.add_argument("--once", action="store_true", help="look twice, print one picture and end")
    parser.add_argument("--svg", metavar="FILE", help="with --once: write the picture to this file instead")


def run(args: argparse.Namespace) -> int:
    """Show the server until it is ended, or once, and return 0."""
    if not args.json:
        common.need_rich("ferrule top", ", or use --json")
    if args.svg and not args.once:
        raise common.misuse("--svg goes with --once", "OPTION_ALONE")
    has_terminal = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    with common.ending_in_order(), connect(args) as client:
        source = Source(client, min(args.timeout, _MAX_WAIT_S))
        if args.json:
            common.print_json(as_dict(_twice(source, args.interval, 1)))
        elif args.once or not has_terminal:
            _print_once(source, args)
        else:
            from rich.console import Console

            from ferrule_cli.top.screen import Screen

            Screen(Console(highlight=False), source, args.interval).run()
    return 0


def _twice(source: Source, interval_s: float, max_cells: int) -> Figures:
    """Look twice, so that there are rates."""
    history = History()
    history.add(source.look(max_cells))
    with Waiting("a second look"):
        time.sleep(interval_s)
    return history.add(source.look(max_cells))


def _print_once(source: Source, args: argparse.Namespace) -> None:
    from rich.console import Console

    from ferrule_cli.top.frame import Frame, map_cells
    from ferrule_cli.top.parts import UNICODE, glyphs_of, print_lines, write_svg

    console = Console(highlight=False)
    width, height = console.size
    if args.svg:  # of a large terminal, unless the environment says otherwise
        sizes = [os.environ.get(name, "") for name in ("COLUMNS", "LINES")]
        width, height = (int(size) if size.isdecimal() else 0 for size in sizes)
        width, height = width or 120, height or 36
    figures = _twice(source, args.interval, map_cells(width, height))
    lines = Frame(width, height, UNICODE if args.svg else glyphs_of(console)).lines(figures)
    if not args.svg:
        print_lines(console, lines)
        return
    try:
        write_svg(Path(args.svg), lines, width)
    except OSError as error:
        raise common.CommandError(f"{args.svg}: {error.strerror}", "FILE_UNWRITABLE") from None
