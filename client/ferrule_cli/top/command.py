"""``ferrule top``: a server while it works."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ferrule_cli.common import CommandError, add_connection_options, connect, ending_in_order, number, print_json
from ferrule_cli.top.figures import Figures, History, as_dict
from ferrule_cli.top.source import Source

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
_JSON_CELLS = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_connection_options(parser)
    parser.add_argument(
        "--interval",
        type=number(float, 0.1, 3600),
        default=1.0,
        metavar="SECONDS",
        help="between two looks (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="look twice, print one picture and end")
    parser.add_argument("--svg", metavar="FILE", help="with --once: write the picture to this file instead")


def run(args: argparse.Namespace) -> int:
    """Show the server until it is ended, or once, and return 0.

    Raises:
        FerruleError: The server does not answer the first look.
        CommandError: rich is not installed, or the file cannot be written.
    """
    if not args.json and importlib.util.find_spec("rich") is None:
        raise CommandError("ferrule top needs rich: pip install 'ferrule[cli]', or use --json", "RICH_MISSING")
    if args.svg and not args.once:
        raise CommandError("--svg goes with --once", "OPTION_ALONE", exit_code=2)
    with ending_in_order(), connect(args) as client:
        source = Source(client, min(args.timeout, _MAX_WAIT_S))
        if args.json:
            print_json(as_dict(_twice(source, args.interval, lambda: _JSON_CELLS)))
        elif args.once or not _is_terminal():
            _print_once(source, args)
        else:
            _show(source, args.interval)
    return 0


def _twice(source: Source, interval_s: float, max_cells: Callable[[], int]) -> Figures:
    """Look twice, so that there are rates."""
    history = History()
    history.add(source.look(max_cells()))
    time.sleep(interval_s)
    return history.add(source.look(max_cells()))


def _print_once(source: Source, args: argparse.Namespace) -> None:
    from rich.console import Console

    from ferrule_cli.top.frame import Frame, map_cells
    from ferrule_cli.top.parts import UNICODE
    from ferrule_cli.top.picture import glyphs_of, print_lines, write_svg

    console = Console(highlight=False)
    width, height = _picture_size() if args.svg else console.size
    figures = _twice(source, args.interval, lambda: map_cells(width, height))
    lines = Frame(width, height, UNICODE if args.svg else glyphs_of(console)).lines(figures)
    if not args.svg:
        print_lines(console, lines)
        return
    try:
        write_svg(Path(args.svg), lines, width)
    except OSError as error:
        raise CommandError(f"{args.svg}: {error.strerror}", "FILE_UNWRITABLE") from None


def _picture_size() -> tuple[int, int]:
    """Return the size of a picture: that of a large terminal, unless the environment says otherwise."""
    sizes = [os.environ.get(name, "") for name in ("COLUMNS", "LINES")]
    width, height = (int(size) if size.isdecimal() else 0 for size in sizes)
    return width or 120, height or 36


def _is_terminal() -> bool:
    """Whether there is a terminal that a screen can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _show(source: Source, interval_s: float) -> None:
    from rich.console import Console

    from ferrule_cli.top.screen import Screen

    Screen(Console(highlight=False), source, interval_s).run()
