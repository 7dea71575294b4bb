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

Both only read. They also work on a copy, and beside a server that runs. Exit codes: 0 the journal was read, by `verify`
without damage; 1 `verify` found damage; 2 the directory is not a journal, or has another format version.

role of a segment:
  base        begins with the snapshot from which the state is read
  read        follows the base, and is read after it
  superseded  precedes the base, and is not needed; the server would have deleted it next
  unused      has no header, or no later segment refers to it; it is ignored

tail, after the last valid frame of a segment:
  clean       there are only zeros, or the next segment says that this one ends before what is there
  torn        there is a frame that was never confirmed; it is ignored
  damaged     there is a frame that was confirmed, or something that no crash leaves
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
