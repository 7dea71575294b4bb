"""The options of the gateway beside this file, and how it reaches the server of Ferrule."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
from pathlib import Path
from typing import Any

from ferrule.types import TlsConfig


def parser() -> argparse.ArgumentParser:
    """Return the parser of the gateway's options."""
    options = argparse.ArgumentParser(description="Serve OpenAI's chat completions from a server of Ferrule.")
    options.add_argument("--target", default="127.0.0.1:50051", help="the server of Ferrule")
    options.add_argument("--listen", default="127.0.0.1:8000", help="where to serve HTTP")
    options.add_argument("--token-file", type=Path, help="file with the bearer token for the server")
    options.add_argument("--tls-ca", type=Path, help="file with the authorities of the server's certificate; uses TLS")
    options.add_argument(
        "--api-keys", type=Path, help="file with an API key per line; without it, any key, or none, is accepted"
    )
    options.add_argument("--max-conversations", type=int, default=256, help="most answers whose KV is kept")
    options.add_argument("--ttl", type=float, default=600.0, help="seconds that one is kept after its last use")
    return options


def connection(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a client for the server. Raises SystemExit if a token would travel in plain text."""
    if args.token_file and not args.tls_ca and not is_local(args.target):
        text = f"the token would travel to {args.target} in plain text"
        raise SystemExit(f"{text}; name its authority with --tls-ca")
    token = args.token_file.read_text().strip() if args.token_file else None
    return {"token": token, "tls": TlsConfig(args.tls_ca.read_bytes()) if args.tls_ca else None}


def is_local(target: str) -> bool:
    """Return whether a target is on this machine: a socket in the file system, or an address of the loopback."""
    host = target.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or target.startswith("unix:")
