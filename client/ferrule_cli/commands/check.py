"""``ferrule check``: whether a model loads, before its weights are fetched. The package of the server does the work."""

from __future__ import annotations

import argparse
import subprocess
import sys

from ferrule_cli.common import need_server
from ferrule_cli.waiting import Waiting

EXAMPLES = """\
examples:
  ferrule check demo
  ferrule check Qwen/Qwen3-0.6B --max-context 8192    fetches the configuration alone
  ferrule check ~/models/Qwen3-0.6B --weights int8 --json

Exit codes: 0 it loads, 1 it does not (the output says why, and what to try instead), 2 used wrongly.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("model", metavar="MODEL", help="demo, a folder, or org/name on the hub")
    for flag in ("--dtype", "--max-context", "--weights"):
        parser.add_argument(flag, metavar="VALUE", help="as for ferrule serve")
    parser.add_argument("--ignore-config-key", metavar="NAME", action="append", default=[], help="as for ferrule serve")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def run(args: argparse.Namespace) -> int:
    """Let the server's package print what is asked for, and return its exit code."""
    need_server()
    values = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if isinstance(value, str)}
    flags = [f"{flag}={value}" for flag, value in values.items()] + ["--json"] * args.json
    if names := getattr(args, "ignore_config_key", None):
        flags.append(f"--ignore-config-key={','.join(names)}")
    command = [sys.executable, "-m", "ferrule_server.model_check", *flags]
    with Waiting(f"the check of {args.model}" if "model" in args else "the list of models"):
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - our own program
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode
