"""``ferrule admin``: warm a server up, drain it, end it."""

from __future__ import annotations

import argparse
import dataclasses

from ferrule_cli.common import add_numbers, number, show
from ferrule_cli.connection import add_connection_options, connect, wait_for_model
from ferrule_cli.waiting import Waiting
from ferrule_client.sync.client import Client
from ferrule_client.types import Drained, Warmed

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule admin warmup --timeout 600                before the first request; waits for GPU kernels
  ferrule admin warmup --batch-sizes 1 8 32
  ferrule admin drain --grace 60                    no new prompts; live handles for a minute
  ferrule admin shutdown                            drain, then end the process

A drained server takes no prompts until it is restarted.
On a server with credentials the token must have the admin role.
"""

_ACTIONS = {
    "warmup": "run steps of real shapes before the first request",
    "drain": "take no new prompts; live handles are served, and only a restart of the server ends this",
    "shutdown": "drain, then end the process",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the actions, each with the options that it knows."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for name, text in _ACTIONS.items():
        action = actions.add_parser(name, help=text.partition(";")[0], description=text[0].upper() + text[1:] + ".")
        if name == "warmup":
            about = "sizes to warm up (its own choice)"
            action.add_argument("--batch-sizes", type=number(int, 1), nargs="+", default=[], metavar="N", help=about)
        else:
            about = "time for what is alive (the server's setting)"
            add_numbers(action, ("--grace", number(float, 0), None, "SECONDS", about))
        add_connection_options(action)


def run(args: argparse.Namespace) -> int:
    """Have it done, print what the server says, and return 0."""
    with connect(args) as client:
        wait_for_model(client, args)
        done = _do(client, args)
    show(args, dataclasses.asdict(done), _sentence(args.action, done))
    return 0


def _do(client: Client, args: argparse.Namespace) -> Warmed | Drained:
    with Waiting("steps of real shapes" if args.action == "warmup" else "the server to begin"):
        if args.action == "warmup":
            return client.admin.warmup(args.batch_sizes)
        if args.action == "drain":
            return client.admin.drain(args.grace)
        return client.admin.shutdown(args.grace)


def _sentence(action: str, done: Warmed | Drained) -> str:
    if isinstance(done, Warmed):
        sizes = ", ".join(map(str, done.batch_sizes))
        run_ms = sum(step.run_ns for step in done.steps) / 1e6
        return f"warm for batches of {sizes or 'no size'}: {len(done.steps)} steps in {run_ms:.0f} ms"
    if action == "drain":
        return f"draining: {done.live_sequences} live handles, {done.pending_jobs} requests under way"
    return f"ending: {done.live_sequences} live handles, served until the grace ends"
