"""``ferrule health``: is the server up and its model loaded?"""

from __future__ import annotations

import argparse

from ferrule_cli.common import add_connection_options, connect, print_json
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_connection_options(parser)
    text = "ask the health service alone: needs no token and leaves no line in the server's log"
    parser.add_argument("--probe", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Print the server's state and return 0 if it serves, 1 if it does not; that much needs no token.

    Raises:
        FerruleError: No server answers, or another instance does, or the token is not accepted.
    """
    with connect(args) as client:
        try:
            is_serving = client.admin.health()
        except FerruleError as error:
            if args.json:
                print_json({"serving": False, "reason": error.reason})
            raise
        if args.probe:
            return _probed(is_serving, is_json=args.json)
        try:
            status = client.status()
        except FerruleError as error:
            return _without_status(is_serving, error, args)
        model = _model(client) if is_serving else None
    if args.json:
        print_json({"serving": is_serving} | _values(status, model))
    else:
        print(_sentence(is_serving, status, model))
    return 0 if is_serving else 1


def _model(client: Client) -> ModelInfo | None:
    """Return what is served, and on which device; None from a server that says nothing of it any more."""
    try:
        return client.model_info()
    except FerruleError:
        return None


def _values(status: Status, model: ModelInfo | None) -> dict[str, object]:
    return {
        "model_id": None if model is None else model.model_id,
        "device": None if model is None else model.device_type,
        "device_name": None if model is None else model.device_name,
        "dtype": None if model is None else model.dtype,
        "state": status.state,
        "load_progress": status.load_progress,
        "executor": status.executor,
        "fallback_reason": status.fallback_reason,
        "instance": status.instance,
        "server_version": status.server_version,
        "live_sequences": status.live_sequences,
        "free_blocks": status.free_blocks,
        "debug": dict(status.debug),
    }


def _probed(is_serving: bool, *, is_json: bool) -> int:
    if is_json:
        print_json({"serving": is_serving})
    else:
        print("serving" if is_serving else "not serving")
    return 0 if is_serving else 1


def _without_status(is_serving: bool, error: FerruleError, args: argparse.Namespace) -> int:
    """Print what is known where the status is refused; return 0 if that is for want of a token alone, and it serves.

    Raises:
        FerruleError: ``error``, if it is about something else: what was asked for would not work either.
    """
    is_untold = error.reason == "TOKEN_MISSING"
    if args.json:
        print_json({"serving": is_serving and not isinstance(error, WrongInstanceError), "reason": error.reason})
    if not is_untold:
        raise error
    if not args.json:
        told = "which instance it is, and more, is told" if args.instance else "more is told"
        print(f"{'serving' if is_serving else 'not serving'}; {told} with a token only ({error.reason})")
    return 0 if is_serving else 1


def _place(model: ModelInfo | None) -> str:
    """Say where the model runs: beside a GPU that is not used, nobody should have to guess."""
    if model is None:
        return ""
    return " on the processor" if model.device_type == "cpu" else f" on {model.device_name or model.device_type}"


def _sentence(is_serving: bool, status: Status, model: ModelInfo | None) -> str:
    if is_serving:
        pool = f"{status.free_blocks} blocks free"
        where = f"{status.executor}{_place(model)}"
        lines = [f"serving: {where}, {status.live_sequences} live handles, {pool}, instance {status.instance}"]
        lines += [f"preparing: {preparation}"] if (preparation := status.debug.get("preparation")) else []
        lines += [f"fallback: {status.fallback_reason}"] if status.fallback_reason else []
        return "\n".join(lines)
    progress = f" {status.load_progress:.0%}" if status.load_progress < 1 else ""
    state = f"{status.state}{progress} {status.load_stage}".rstrip()
    return f"not serving: {state}, instance {status.instance}"
