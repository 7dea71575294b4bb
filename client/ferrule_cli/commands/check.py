"""``ferrule check``: whether a model loads, before its weights are fetched. The package of the server does the work."""

from __future__ import annotations

import argparse
import subprocess
import sys

from ferrule_cli.common import need_server
from ferrule_cli.waiting import Waiting

EXAMPLES = """\
examples:
  ferrule check demo --executor torch
  ferrule check Qwen/Qwen3-0.6B --max-context 8192    fetches the configuration alone
  ferrule check ~/models/Qwen3-0.6B --weights int8 --json
  ferrule check models/Qwen3-0.6B-Q4_K_M.gguf
  ferrule check Qwen/Qwen3-0.6B-GGUF:Q8_0             fetches the header of that file alone

Exit codes: 0 it loads, 1 it does not (the output says why, and what to try instead), 2 used wrongly.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    one = parser.add_mutually_exclusive_group(required=True)  # without a default it is not put in place of the option
    one.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="as of ferrule serve")
    one.add_argument("--model", metavar="MODEL", help="the same, as for ferrule serve")
    for flag in ("--activations", "--dtype", "--executor", "--max-context", "--weights"):
        parser.add_argument(flag, metavar="VALUE", help="as for ferrule serve")
    parser.add_argument("--ignore-config-key", metavar="NAME", action="append", help="as for ferrule serve")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def run(args: argparse.Namespace) -> int:
    """Let the server's package print what is asked for, and return its exit code."""
    need_server()
    given = {name: ",".join(value) if isinstance(value, list) else value for name, value in vars(args).items()}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if isinstance(value, str)]
    command = [sys.executable, "-m", "ferrule_server.model_check", *flags, *["--json"] * args.json]
    with Waiting(f"the check of {args.model}" if "model" in args else "the list of models"):
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - our own program
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode
