"""``ferrule metrics``: what happened in the server's KV pool, to the caller's own sequences unless it is an admin."""

from __future__ import annotations

import argparse
import dataclasses

from ferrule_cli.common import add_connection_options, connect, print_json

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule metrics                                   counters of the KV pool and of the server, a line each
  ferrule metrics --json | jq .num_prefix_hit_tokens
  watch ferrule metrics

Counters are those of your own principal; with the role admin those of all. Counters of what several principals share,
such as steps, are 0 without the role. How many blocks are free and how many jobs wait is shown to everybody.
"""

_STATUS = (
    "queue_depth",
    "current_batch_size",
    "active_streams",
    "num_steps",
    "num_prefills",
    "num_decodes",
    "num_verifies",
    "num_generates",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_errors",
    "avg_prefill_ns",
    "avg_decode_ns",
    "live_sequences",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the counters and return 0.

    Raises:
        FerruleError: The server does not answer, or keeps none.
    """
    with connect(args) as client:
        metrics, status = client.admin.cache_metrics(), client.status()
    values = dataclasses.asdict(metrics) | {name: getattr(status, name) for name in _STATUS}
    if args.json:
        print_json(values)
        return 0
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}}  {value}")
    return 0
