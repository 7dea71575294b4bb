"""``ferrule health``: is the server up and its model loaded?"""

from __future__ import annotations

import argparse
import contextlib

from ferrule_cli.common import print_json, show
from ferrule_cli.connection import add_connection_options, connect
from ferrule_cli.waiting import Waiting
from ferrule_client.errors import FerruleError, WrongInstanceError
from ferrule_client.sync.client import Client
from ferrule_client.types import ModelInfo, Status

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule health                                    exit code 0: serving, 1: not
  ferrule health --target unix:/run/ferrule.sock
  ferrule health --probe                            for a container's health check
  until ferrule health; do sleep 1; done            wait for a server to load
"""

_MODEL = {"model_id": "model_id", "device": "device_type", "device_name": "device_name", "dtype": "dtype"}
_STATUS = (
    "state",
    "load_progress",
    "executor",
    "fallback_reason",
    "instance",
    "server_version",
    "live_sequences",
    "free_blocks",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_connection_options(parser)
    text = "ask the health service alone: needs no token and leaves no line in the server's log"
    parser.add_argument("--probe", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Print the server's state and return 0 if it serves, 1 if it does not; that much needs no token."""
    is_serving: bool | None = None
    facts: dict[str, object] = {}
    try:
        with connect(args) as client, Waiting(f"an answer from {args.target}"):
            is_serving = client.admin.health()
            text = "serving" if is_serving else "not serving"
            if not args.probe:
                facts, text = _state(client, is_serving)
    except FerruleError as error:
        if is_serving is None or error.reason != "TOKEN_MISSING":  # what was asked for would not work either
            if args.json:
                is_meant = bool(is_serving) and not isinstance(error, WrongInstanceError)
                print_json({"serving": is_meant, "reason": error.reason})
            raise
        told = "which instance it is, and more, is told" if args.instance else "more is told"
        facts, text = {"reason": error.reason}, f"{text}; {told} with a token only ({error.reason})"
    show(args, {"serving": is_serving} | facts, text)
    return 0 if is_serving else 1


def _state(client: Client, is_serving: bool) -> tuple[dict[str, object], str]:
    """Return the state for scripts and for people; of the model only what a server that serves says."""
    status, model = client.status(), None
    if is_serving:
        with contextlib.suppress(FerruleError):
            model = client.model_info()
    facts = {name: getattr(model, field, None) for name, field in _MODEL.items()}
    facts |= {name: getattr(status, name) for name in _STATUS} | {"debug": dict(status.debug)}
    return facts, _sentence(is_serving, status, model)


def _sentence(is_serving: bool, status: Status, model: ModelInfo | None) -> str:
    if not is_serving:
        progress = f" {status.load_progress:.0%}" if status.load_progress < 1 else ""
        state = f"{status.state}{progress} {status.load_stage}".rstrip()
        return f"not serving: {state}, instance {status.instance}"
    place = ""
    if model is not None:  # beside a GPU that is not used, nobody should have to guess
        place = " on the processor" if model.device_type == "cpu" else f" on {model.device_name or model.device_type}"
    pool = f"{status.live_sequences} live handles, {status.free_blocks} blocks free"
    lines = [f"serving: {status.executor}{place}, {pool}, instance {status.instance}"]
    lines += [f"preparing: {preparation}"] if (preparation := status.debug.get("preparation")) else []
    lines += [f"fallback: {status.fallback_reason}"] if status.fallback_reason else []
    is_lost = status.debug.get("journal") == "lost"
    lines += ["journal: lost, calls on durable handles get DURABILITY_LOST"] if is_lost else []
    return "\n".join(lines)
