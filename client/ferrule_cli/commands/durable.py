"""``ferrule durable``: what a journal of durable handles contains. The package of the server reads it."""

from __future__ import annotations

import argparse
import subprocess
import sys

from ferrule_cli.common import need_server

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule durable inspect /var/lib/ferrule/journal  segments, records and live sequences
  ferrule durable verify /backup/journal            reads every frame; exit code 1 if one is damaged

Both only read. They also work on a copy, and beside a server that runs.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("action", choices=("inspect", "verify"), help="print what is there, or check every frame")
    parser.add_argument("directory", metavar="DIR", help="as for ferrule serve --durable")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def run(args: argparse.Namespace) -> int:
    """Let the server's package print what is asked for, and return its exit code."""
    need_server()
    flags = ["--json"] * args.json
    command = [sys.executable, "-m", "ferrule_server.durability", args.action, args.directory, *flags]
    return subprocess.run(command, check=False).returncode  # noqa: S603 - our own program, no shell
