"""The options of the gateway beside this file, and how it reaches the server of Ferrule."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
from pathlib import Path
from typing import Any

from ferrule import Client, FerruleError
from ferrule.errors import UnavailableError
from ferrule.types import TlsConfig


def parser() -> argparse.ArgumentParser:
    """Return the parser of the gateway's options."""
    options = argparse.ArgumentParser(description="Serve OpenAI's chat completions from a server of Ferrule.")
    options.add_argument("--target", default="127.0.0.1:50051", help="the server of Ferrule")
    options.add_argument("--listen", type=address, default="127.0.0.1:8000", help="where to serve HTTP")
    options.add_argument("--token-file", type=Path, help="file with the bearer token for the server")
    options.add_argument("--tls-ca", type=Path, help="file with the authorities of the server's certificate; uses TLS")
    options.add_argument(
        "--api-keys", type=Path, help="file with an API key per line; without it, any key, or none, is accepted"
    )
    options.add_argument(
        "--insecure",
        action="store_true",
        help="accept any key, or none, from other machines too, if the network is safe",
    )
    options.add_argument("--max-conversations", type=count, default=256, help="most answers whose KV is kept")
    options.add_argument("--ttl", type=count, default=600, help="seconds that one is kept after its last use")
    return options


def address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``HOST:PORT``."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def api_keys(args: argparse.Namespace) -> set[str]:
    """Return the API keys. Raises SystemExit if a line is not one key, or if there are none where others can call."""
    if args.api_keys is None:
        host, port = args.listen
        if not (args.insecure or is_local(f"{host}:{port}")):
            text = f"--listen {host}:{port} can be reached from other machines, and without keys everyone is served"
            raise SystemExit(f"{text}: give --api-keys, or --insecure if the network is safe")
        return set()
    lines = [line.strip() for line in args.api_keys.read_text("utf-8").splitlines()]
    for number, line in enumerate(lines, 1):
        if len(line.split()) > 1 and not line.startswith("#"):
            raise SystemExit(f"{args.api_keys}, line {number}: a line is one key, or a comment after #")
    if not (keys := {line for line in lines if line and not line.startswith("#")}):
        raise SystemExit(f"{args.api_keys} holds no key")
    return keys


def connection(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a client for the server. Raises SystemExit if a token would travel in plain text."""
    if args.token_file and not args.tls_ca and not is_local(args.target):
        text = f"the token would travel to {args.target} in plain text"
        raise SystemExit(f"{text}; name its authority with --tls-ca")
    token = args.token_file.read_text().strip() if args.token_file else None
    return {"token": token, "tls": TlsConfig(args.tls_ca.read_bytes()) if args.tls_ca else None}


def check_server(args: argparse.Namespace) -> None:
    """Raise SystemExit with one line if no server can be reached; if one refuses, ``/healthz`` says why."""
    with Client(args.target, **connection(args)) as client, contextlib.suppress(FerruleError):
        try:
            client.status(timeout=5)
        except UnavailableError as error:
            if error.reason == "CONNECTION_FAILED":
                raise SystemExit(str(error)) from None


def is_local(target: str) -> bool:
    """Return whether a target is on this machine: a socket in the file system, or an address of the loopback."""
    host = target.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or target.startswith("unix:")
