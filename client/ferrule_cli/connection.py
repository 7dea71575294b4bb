"""How a command reaches its server: options, ``FERRULE_*`` variables, a file, and waiting until the model is loaded.

Flags win over variables, variables over the table ``[client]`` of the TOML file of ``--config``, that over defaults.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ferrule_cli.common import add_numbers, misuse, number
from ferrule_cli.waiting import Waiting
from ferrule_client.sync.client import DEFAULT_TARGET, Client
from ferrule_client.types import Status, TlsConfig

if TYPE_CHECKING:
    from ferrule_client.aio.client import AsyncClient

__all__ = ["add_connection_options", "connect", "connect_async", "wait_for_model"]

_C = TypeVar("_C")

_TABLE = "client"
_YES = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting of the connection: its key in the file is its flag without dashes."""

    key: str
    variable: str | None = None
    default: object = None
    read: Callable[[str], object] = str  # makes the value of the text of a variable; may raise ArgumentTypeError
    types: tuple[type, ...] = (str,)  # of the value in the file
    words: str = "a text in quotes"  # what those types are called

    @property
    def name(self) -> str:
        """The name in the namespace of argparse."""
        return self.key.replace("-", "_")


_SECONDS = number(float, 0.001)
_SETTINGS = {
    setting.key: setting
    for setting in (
        _Setting("target", "FERRULE_TARGET", DEFAULT_TARGET),
        _Setting("timeout", "FERRULE_TIMEOUT", 60.0, _SECONDS, (int, float), "a number of seconds"),
        _Setting("instance"),
        _Setting("tls", "FERRULE_TLS", False, lambda text: text.lower() in _YES, (bool,), "true or false"),
        _Setting("tls-ca", "FERRULE_TLS_CA"),
        _Setting("tls-cert", "FERRULE_CLIENT_CERT"),
        _Setting("tls-key", "FERRULE_CLIENT_KEY"),
        _Setting("tls-server-name", "FERRULE_TLS_SERVER_NAME"),
    )
}


def add_connection_options(parser: argparse.ArgumentParser, *, without_target: str = "") -> None:
    """Add ``--target``, ``--timeout``, ``--json``, ``--config`` and those of TLS; what is not given is None.

    ``without_target`` says what happens without ``--target``, for a command that needs none.
    """
    default = f"$FERRULE_TARGET or {DEFAULT_TARGET}"
    about = f"the server, host:port or unix:PATH (default: {without_target or default})"
    parser.add_argument("--target", help=about)
    about = "longest wait for an answer (default: $FERRULE_TIMEOUT or 60)"
    add_numbers(parser, ("--timeout", _SECONDS, None, "SECONDS", about))
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
    parser.add_argument("--instance", metavar="NAME", help="behind a proxy: the one of several servers to ask")
    about = "take what is not given from the table [client] of this TOML file (default: $FERRULE_CONFIG)"
    parser.add_argument("--config", metavar="FILE", help=about)
    tls = parser.add_argument_group("secured servers", "The token to send is taken from $FERRULE_TOKEN.")
    about = "use TLS and trust the system's authorities (default: $FERRULE_TLS)"
    tls.add_argument("--tls", action="store_true", default=None, help=about)
    name = "name in the server's certificate, if it is not the target's"
    for key, metavar, text in (
        ("tls-ca", "FILE", "use TLS and trust the authorities in this PEM file"),
        ("tls-cert", "FILE", "certificate chain to show to the server, PEM"),
        ("tls-key", "FILE", "private key of --tls-cert, PEM"),
        ("tls-server-name", "NAME", name),
    ):
        tls.add_argument(f"--{key}", metavar=metavar, help=f"{text} (default: ${_SETTINGS[key].variable})")


def connect(args: argparse.Namespace) -> Client:
    """Return a client by the connection options, and put the settings that were not given into ``args``.

    A token comes from ``FERRULE_TOKEN`` only, out of sight of ``ps``.

    Raises:
        CommandError: A setting, the file of settings or the token is malformed, or a file of TLS is unusable.
    """
    return _connected(Client, args)


def connect_async(args: argparse.Namespace, *, max_retries: int) -> AsyncClient:
    """Return an asyncio client, as ``connect`` does.

    Args:
        args: The connection options.
        max_retries: Times that a call is tried again.

    Raises:
        CommandError: As in ``connect``.
    """
    from ferrule_client.aio.client import AsyncClient  # not at the start of every command

    return _connected(AsyncClient, args, max_retries=max_retries)


def _connected(kind: Callable[..., _C], args: argparse.Namespace, **settings: int) -> _C:
    _complete(args)
    token = os.environ.get("FERRULE_TOKEN", "").strip()  # a file adds a line's end
    if not all("!" <= one <= "~" for one in token):
        raise misuse("FERRULE_TOKEN: a token is printable ASCII without spaces", "TOKEN_MALFORMED")
    if bool(args.tls_cert) != bool(args.tls_key):
        raise misuse("--tls-cert and --tls-key go together", "TLS_INCOMPLETE")
    tls = None
    if args.tls or args.tls_ca or args.tls_cert or args.tls_server_name:
        tls = TlsConfig(_pem(args.tls_ca), _pem(args.tls_key), _pem(args.tls_cert), args.tls_server_name)
    try:
        return kind(args.target, token=token or None, tls=tls, timeout=args.timeout, instance=args.instance, **settings)
    except ValueError as error:
        raise misuse(str(error), "TARGET_INVALID") from None


def _pem(path: str | None) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise misuse(f"{path}: {error.strerror}", "TLS_FILE_UNREADABLE") from None


def _complete(args: argparse.Namespace) -> None:
    """Put a value for each setting that no flag gives: from its variable, else from the file, else its default."""
    path = args.config or os.environ.get("FERRULE_CONFIG")
    in_file = _read(Path(path).expanduser()) if path else {}
    for setting in _SETTINGS.values():
        if getattr(args, setting.name) is not None:
            continue
        value = in_file.get(setting.key, setting.default)
        if setting.variable is not None and (text := os.environ.get(setting.variable)):
            try:
                value = setting.read(text)
            except argparse.ArgumentTypeError as error:
                raise misuse(f"{setting.variable}: {error}", "USED_WRONGLY") from None
        setattr(args, setting.name, value)


def _read(path: Path) -> dict[str, object]:
    """Return the settings of a file by their keys; what the file holds besides the table is the server's."""
    try:
        table = tomllib.loads(path.read_text("utf-8")).get(_TABLE, {})
    except OSError as error:
        raise misuse(f"{path}: cannot be read: {error.strerror}", "CONFIG_INVALID") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise misuse(f"{path}: not TOML: {error}", "CONFIG_INVALID") from None
    if not isinstance(table, dict):
        raise misuse(f"{path}: {_TABLE} must be a table", "CONFIG_INVALID")
    return {key: _checked(path, key, value) for key, value in table.items()}


def _checked(path: Path, key: str, value: object) -> object:
    """Return a value of the file if its key is known and its type and range are right."""
    if (setting := _SETTINGS.get(key)) is None:
        near = difflib.get_close_matches(key, _SETTINGS, 1)
        meant = f", did you mean {near[0]}?" if near else ""
        raise misuse(f"{path}: unknown setting {key!r} in [{_TABLE}]{meant}", "CONFIG_INVALID")
    if not isinstance(value, setting.types) or (isinstance(value, bool) and bool not in setting.types):
        given = json.dumps(value, ensure_ascii=False, default=str)
        raise misuse(f"{path}: {key} in [{_TABLE}] must be {setting.words}, not {given}", "CONFIG_INVALID")
    if isinstance(value, bool):
        return value
    try:
        return setting.read(str(value))
    except argparse.ArgumentTypeError as error:
        raise misuse(f"{path}: {key} in [{_TABLE}]: {error}", "CONFIG_INVALID") from None


def wait_for_model(client: Client, args: argparse.Namespace) -> None:
    """Return when the server has loaded its model; meanwhile say on a terminal how far it is."""
    with Waiting(f"an answer from {args.target}") as waiting:

        def show(status: Status | None) -> None:
            if status is not None:
                waiting.show(status.load_stage or "the model", status.load_progress)

        if client.status().state == "starting":
            client.wait_until_ready(on_progress=show, timeout=args.timeout)
