"""What the commands share: settings from the environment, errors of their own, and waiting for a server to load."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable

from ferrule_client.client import Client
from ferrule_client.types import Status

__all__ = [
    "DEFAULT_TARGET",
    "CommandError",
    "add_connection_options",
    "connect",
    "number",
    "print_json",
    "require_rich",
    "wait_for_model",
]

DEFAULT_TARGET = "127.0.0.1:50051"


class CommandError(Exception):
    """A command cannot do its work for a reason that is not a call's.

    Args:
        message: What happened and what to do.
        reason: Machine-readable name in upper case.
        exit_code: Exit code of the command.
    """

    def __init__(self, message: str, reason: str, exit_code: int = 1) -> None:
        super().__init__(f"{message} ({reason})")
        self.reason = reason
        self.exit_code = exit_code


def number(kind: type[int] | type[float], low: float, high: float | None = None) -> Callable[[str], float]:
    """Return a parser of option values within a range, for argparse."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= (float("inf") if high is None else high):
            bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {bounds}")
        return value

    return parse


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--target``, ``--timeout`` and ``--json``, with their defaults from the environment."""
    parser.add_argument(
        "--target",
        default=os.environ.get("FERRULE_TARGET", DEFAULT_TARGET),
        help="the server, host:port or unix:PATH (default: $FERRULE_TARGET or %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=number(float, 0.001),
        default=os.environ.get("FERRULE_TIMEOUT", "60"),
        metavar="SECONDS",
        help="longest wait for an answer (default: $FERRULE_TIMEOUT or 60)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def connect(args: argparse.Namespace) -> Client:
    """Return a client by the connection options; a token comes from ``FERRULE_TOKEN`` only, out of sight of ``ps``."""
    return Client.connect(args.target, token=os.environ.get("FERRULE_TOKEN"), timeout=args.timeout)


def wait_for_model(client: Client, args: argparse.Namespace) -> None:
    """Return when the server accepts requests; while it loads, say so on stderr if that is a terminal.

    Raises:
        UnavailableError: Nobody listens, or it is not ready in time.
    """
    if client.status().is_ready:
        return
    client.wait_until_ready(on_progress=_show_loading if sys.stderr.isatty() else None, timeout=args.timeout)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _show_loading(status: Status | None) -> None:
    if status is not None:
        done = 0.0 if status.load_progress is None else status.load_progress
        bar = ("=" * round(20 * done)).ljust(20)
        print(f"\r\x1b[Kloading [{bar}] {done:4.0%} {status.load_stage}", end="", file=sys.stderr, flush=True)


def require_rich(what: str) -> None:
    """Make sure that rich can be imported.

    Raises:
        CommandError: It is not installed.
    """
    if importlib.util.find_spec("rich") is None:
        raise CommandError(f"{what} needs rich: pip install 'ferrule[cli]', or use --json", "RICH_MISSING")


def print_json(value: object) -> None:
    """Print one JSON value on a line of its own."""
    print(json.dumps(value, default=str), flush=True)
