"""``ferrule metrics``: what happened in the server's KV pool, to the caller's own sequences unless it is an admin."""

from __future__ import annotations

import argparse
import dataclasses

from ferrule_cli.common import show
from ferrule_cli.connection import add_connection_options, connect, wait_for_model
from ferrule_client.types import Status

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule metrics                                   counters of the KV pool and of the server, a line each
  ferrule metrics --json | jq .num_prefix_hit_tokens
  watch ferrule metrics

Counters are those of your own principal; with the role admin those of all. Counters of what several principals share,
such as steps, are 0 without the role. How many blocks are free and how many jobs wait is shown to everybody.
"""

_COUNTERS = [field.name for field in dataclasses.fields(Status) if field.name.startswith(("num_", "avg_"))]
_STATUS = ("queue_depth", "current_batch_size", "active_streams", *_COUNTERS, "live_sequences")

add_options = add_connection_options


def run(args: argparse.Namespace) -> int:
    """Print the counters and return 0."""
    with connect(args) as client:
        wait_for_model(client, args)
        metrics, status = client.admin.cache_metrics(), client.status()
    values = dataclasses.asdict(metrics) | {name: getattr(status, name) for name in _STATUS}
    width = max(map(len, values))
    show(args, values, "\n".join(f"{name:<{width}}  {value}" for name, value in values.items()))
    return 0
