"""What the commands share: settings from the environment, errors of their own, and waiting for a server to load."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ferrule_client.sync.client import DEFAULT_TARGET, Client
from ferrule_client.types import Status, TlsConfig

__all__ = [
    "CommandError",
    "add_connection_options",
    "add_numbers",
    "add_sampling_options",
    "connect",
    "ending_in_order",
    "misuse",
    "need_rich",
    "number",
    "print_json",
    "show",
    "wait_for_model",
]

_ENDINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class CommandError(Exception):
    """A command cannot do its work for a reason that is not a call's; ``reason`` is its name in upper case."""

    def __init__(self, message: str, reason: str, exit_code: int = 1) -> None:
        super().__init__(f"{message} ({reason})")
        self.exit_code = exit_code


def misuse(message: str, reason: str) -> CommandError:
    """Return the error of a command that is used wrongly."""
    return CommandError(message, reason, exit_code=2)


def need_rich(command: str, otherwise: str = "") -> None:
    """Raise CommandError where rich is not installed; ``otherwise`` says what works without it."""
    if importlib.util.find_spec("rich") is None:
        raise CommandError(f"{command} needs rich: pip install 'ferrule[cli]'{otherwise}", "RICH_MISSING")


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Leave the body by SystemExit when SIGTERM or SIGHUP comes, so that everything it holds is given back.

    The exit code is 128 + N. Further ones are ignored meanwhile; one that was ignored before (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # Python lets no other one set handlers
        yield
        return
    before = {one: old for one in _ENDINGS if (old := signal.getsignal(one)) is not signal.SIG_IGN}

    def end(number: int, _: FrameType | None) -> NoReturn:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for one in before:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


def number(
    kind: type[int] | type[float], low: float, high: float = math.inf, *, above_low: bool = False
) -> Callable[[str], float]:
    """Return a parser of option values within a range, for argparse; ``above_low`` leaves the lower end itself out."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high or (above_low and value == low):
            least = f"{'more than' if above_low else 'at least'} {low}"
            bounds = least if high == math.inf else f"{least} and at most {high}"
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {bounds}")
        return value

    return parse


def add_numbers(
    parser: argparse.ArgumentParser, *options: tuple[str, Callable[[str], float], object, str, str]
) -> None:
    """Add options with a number each: flag, parser of the value, default, name of the value, help."""
    for flag, kind, default, metavar, text in options:
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)


def add_sampling_options(parser: argparse.ArgumentParser, *, about_seed: str = "") -> None:
    """Add the options of the distribution that tokens are drawn from; ``about_seed`` is added to what --seed says."""
    add_numbers(
        parser,
        ("--temperature", number(float, 0), 0.7, "T", "0 is greedy, 1 as the model is (0.7)"),
        ("--top-k", number(int, 0), None, "K", "draw from the K most likely tokens"),
        ("--top-p", number(float, 0, 1, above_low=True), None, "P", "draw from the tokens that make up P"),
        ("--min-p", number(float, 0, 1), None, "P", "draw from tokens at least P times the most likely one"),
        ("--seed", number(int, 0, 2**64 - 1), None, "S", f"seed of the draws (random){about_seed}"),
    )


def add_connection_options(parser: argparse.ArgumentParser, *, without_target: str = "") -> None:
    """Add ``--target``, ``--timeout``, ``--json`` and those of TLS, with their defaults from the environment.

    ``without_target`` says what happens without ``--target``, for a command that needs none.
    """
    default = f"$FERRULE_TARGET or {DEFAULT_TARGET}"
    parser.add_argument(
        "--target",
        default=None if without_target else os.environ.get("FERRULE_TARGET", DEFAULT_TARGET),
        help=f"the server, host:port or unix:PATH (default: {without_target or default})",
    )
    timeout = os.environ.get("FERRULE_TIMEOUT", "60")
    about = "longest wait for an answer (default: $FERRULE_TIMEOUT or 60)"
    add_numbers(parser, ("--timeout", number(float, 0.001), timeout, "SECONDS", about))
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
    parser.add_argument("--instance", metavar="NAME", help="behind a proxy: the one of several servers to ask")
    tls = parser.add_argument_group("secured servers", "The token to send is taken from $FERRULE_TOKEN.")
    tls.add_argument(
        "--tls",
        action="store_true",
        default=os.environ.get("FERRULE_TLS", "").lower() in ("1", "true", "yes", "on"),
        help="use TLS and trust the system's authorities (default: $FERRULE_TLS)",
    )
    name = "name in the server's certificate, if it is not the target's"
    for flag, variable, metavar, text in (
        ("--tls-ca", "FERRULE_TLS_CA", "FILE", "use TLS and trust the authorities in this PEM file"),
        ("--tls-cert", "FERRULE_CLIENT_CERT", "FILE", "certificate chain to show to the server, PEM"),
        ("--tls-key", "FERRULE_CLIENT_KEY", "FILE", "private key of --tls-cert, PEM"),
        ("--tls-server-name", "FERRULE_TLS_SERVER_NAME", "NAME", name),
    ):
        help_text = f"{text} (default: ${variable})"
        tls.add_argument(flag, metavar=metavar, default=os.environ.get(variable), help=help_text)


def connect(args: argparse.Namespace) -> Client:
    """Return a client by the connection options; a token comes from ``FERRULE_TOKEN`` only, out of sight of ``ps``.

    Raises:
        CommandError: The target, the instance or the token is malformed, or a file of TLS is unusable.
    """
    token = os.environ.get("FERRULE_TOKEN", "").strip()  # a file adds a line's end
    if not all("!" <= one <= "~" for one in token):
        raise misuse("FERRULE_TOKEN: a token is printable ASCII without spaces", "TOKEN_MALFORMED")
    if bool(args.tls_cert) != bool(args.tls_key):
        raise misuse("--tls-cert and --tls-key go together", "TLS_INCOMPLETE")
    tls = None
    if args.tls or args.tls_ca or args.tls_cert or args.tls_server_name:
        tls = TlsConfig(_pem(args.tls_ca), _pem(args.tls_key), _pem(args.tls_cert), args.tls_server_name)
    try:
        return Client(args.target, token=token or None, tls=tls, timeout=args.timeout, instance=args.instance)
    except ValueError as error:
        raise misuse(str(error), "TARGET_INVALID") from None


def _pem(path: str | None) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise misuse(f"{path}: {error.strerror}", "TLS_FILE_UNREADABLE") from None


def wait_for_model(client: Client, args: argparse.Namespace) -> None:
    """Return when the server accepts requests; while it loads, say so on stderr if that is a terminal."""
    if not client.status().is_ready:
        is_seen = sys.stderr.isatty()
        client.wait_until_ready(on_progress=_show_loading if is_seen else None, timeout=args.timeout)
        if is_seen:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _show_loading(status: Status | None) -> None:
    if status is not None:
        bar = ("=" * round(20 * status.load_progress)).ljust(20)
        text = f"\r\x1b[Kloading [{bar}] {status.load_progress:4.0%} {status.load_stage}"
        print(text, end="", file=sys.stderr, flush=True)


def show(args: argparse.Namespace, facts: object, text: str) -> None:
    """Print the facts as JSON where that is wanted, else the text."""
    if args.json:
        print_json(facts)
    else:
        print(text)


def print_json(value: object) -> None:
    """Print one JSON value on a line of its own."""
    print(json.dumps(value, default=str), flush=True)
