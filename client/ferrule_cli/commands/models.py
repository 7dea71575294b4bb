"""``ferrule models``: the families that load, and the models in the cache of the hub."""

import argparse

from ferrule_cli.commands.check import run

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = "examples:\n  ferrule models\n  ferrule models --json\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
