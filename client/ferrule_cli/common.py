"""What the commands share: settings from the environment, errors of their own, and waiting for a server to load."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
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
    "DEFAULT_TARGET",
    "CommandError",
    "add_connection_options",
    "connect",
    "draw_seed",
    "ending_in_order",
    "number",
    "print_json",
    "wait_for_model",
]

_TRUE = ("1", "true", "yes", "on")
_ENDINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


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


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Leave the body by SystemExit when SIGTERM or SIGHUP comes, so that everything it holds is given back.

    The exit code is 128 + N. Further ones are ignored meanwhile; one that was ignored before (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # Python lets no other one set handlers
        yield
        return
    before = {one: signal.getsignal(one) for one in _ENDINGS}
    caught = [one for one, handler in before.items() if handler is not signal.SIG_IGN]

    def end(number: int, _: FrameType | None) -> NoReturn:
        for one in caught:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for one in caught:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in caught:
            signal.signal(one, before[one])


def number(
    kind: type[int] | type[float], low: float, high: float | None = None, *, above_low: bool = False
) -> Callable[[str], float]:
    """Return a parser of option values within a range, for argparse; ``above_low`` leaves the lower end itself out."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= (float("inf") if high is None else high) or (above_low and value == low):
            least = f"more than {_plain(low)}" if above_low else f"at least {_plain(low)}"
            bounds = least if high is None else f"{least} and at most {_plain(high)}"
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {bounds}")
        return value

    return parse


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def draw_seed(args: argparse.Namespace) -> int | None:
    """Return ``--seed``, or a random one of at most 52 bits: every reader of JSON keeps such a number, and those after.

    Returns:
        None: nothing is drawn, because the temperature is 0.
    """
    if args.seed is not None or args.temperature == 0:
        return None if args.seed is None else int(args.seed)
    return secrets.randbits(52)


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
    parser.add_argument(
        "--timeout",
        type=number(float, 0.001),
        default=os.environ.get("FERRULE_TIMEOUT", "60"),
        metavar="SECONDS",
        help="longest wait for an answer (default: $FERRULE_TIMEOUT or 60)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
    parser.add_argument("--instance", metavar="NAME", help="behind a proxy: the one of several servers to ask")
    _add_tls_options(parser)


def _add_tls_options(parser: argparse.ArgumentParser) -> None:
    tls = parser.add_argument_group("secured servers", "The token to send is taken from $FERRULE_TOKEN.")
    tls.add_argument(
        "--tls",
        action="store_true",
        default=os.environ.get("FERRULE_TLS", "").lower() in _TRUE,
        help="use TLS and trust the system's authorities (default: $FERRULE_TLS)",
    )
    for flag, variable, text in (
        ("--tls-ca", "FERRULE_TLS_CA", "use TLS and trust the authorities in this PEM file"),
        ("--tls-cert", "FERRULE_CLIENT_CERT", "certificate chain to show to the server, PEM"),
        ("--tls-key", "FERRULE_CLIENT_KEY", "private key of --tls-cert, PEM"),
    ):
        default = os.environ.get(variable)
        tls.add_argument(flag, metavar="FILE", default=default, help=f"{text} (default: ${variable})")
    tls.add_argument(
        "--tls-server-name",
        metavar="NAME",
        default=os.environ.get("FERRULE_TLS_SERVER_NAME"),
        help="name in the server's certificate, if it is not the target's (default: $FERRULE_TLS_SERVER_NAME)",
    )


def connect(args: argparse.Namespace) -> Client:
    """Return a client by the connection options; a token comes from ``FERRULE_TOKEN`` only, out of sight of ``ps``.

    Raises:
        CommandError: The target, the instance or the token is malformed, or a file of TLS is unusable.
    """
    token, tls = _token(), _tls_config(args)
    try:
        return Client(args.target, token=token, tls=tls, timeout=args.timeout, instance=args.instance)
    except ValueError as error:
        raise CommandError(str(error), "TARGET_INVALID", exit_code=2) from None


def _token() -> str | None:
    """Return what ``FERRULE_TOKEN`` holds, without the line's end that a file adds."""
    token = os.environ.get("FERRULE_TOKEN", "").strip()
    if not all("!" <= one <= "~" for one in token):
        raise CommandError("FERRULE_TOKEN: a token is printable ASCII without spaces", "TOKEN_MALFORMED", exit_code=2)
    return token or None


def _tls_config(args: argparse.Namespace) -> TlsConfig | None:
    """Return the certificates that the options name; None: plain text."""
    if not (args.tls or args.tls_ca or args.tls_cert or args.tls_key or args.tls_server_name):
        return None
    if bool(args.tls_cert) != bool(args.tls_key):
        raise CommandError("--tls-cert and --tls-key go together", "TLS_INCOMPLETE", exit_code=2)
    return TlsConfig(_pem(args.tls_ca), _pem(args.tls_key), _pem(args.tls_cert), args.tls_server_name)


def _pem(path: str | None) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", "TLS_FILE_UNREADABLE", exit_code=2) from None


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
        done = status.load_progress
        bar = ("=" * round(20 * done)).ljust(20)
        print(f"\r\x1b[Kloading [{bar}] {done:4.0%} {status.load_stage}", end="", file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """Print one JSON value on a line of its own."""
    print(json.dumps(value, default=str), flush=True)
