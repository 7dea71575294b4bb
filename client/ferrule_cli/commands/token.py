"""``ferrule token``: a new bearer token, and the line that lets a server accept it. Needs no server."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import secrets

from ferrule_cli.common import CommandError, misuse, show

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule token alice                                 print a token, and the line for the server's --token-file
  ferrule token alice --append tokens > alice.token   add the line to a file, keep the token in another
  ferrule token ops --admin --quota handles=8 --quota kv_tokens=100000

The server keeps the token's SHA-256 only, so a lost token cannot be recovered: make a new one, and remove the old line.
A running server reads its file again automatically.
"""

_PREFIX = "ferrule_"  # lets scanners for leaked secrets know what they have found
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/+-]{0,127}")
_COUNT = re.compile(r"[0-9]*[1-9][0-9]*|none")
_SIZE = re.compile(r"[0-9]+(\.[0-9]+)?[KMGT]iB|none")
_QUOTAS = {
    "handles": _COUNT,
    "kv_tokens": _COUNT,
    "queued_rows": _COUNT,
    "prefill_rate": _COUNT,
    "retained": _SIZE,
    "mask_bytes": _SIZE,
    "call_rate": _COUNT,
    "request_bytes": _SIZE,
    "text_rate": _SIZE,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    about = "principal that the token stands for; owns the handles made with it"
    parser.add_argument("name", metavar="NAME", help=about)
    parser.add_argument("--admin", action="store_true", help="give it the role that AdminService needs")
    about = f"limit of the principal instead of the server's own: {', '.join(_QUOTAS)}; none lifts it"
    parser.add_argument("--quota", action="append", default=[], metavar="KEY=VALUE", help=about)
    parser.add_argument("--append", metavar="FILE", help="append the line to this file and print the token alone")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def run(args: argparse.Namespace) -> int:
    """Print a token and its line, or append the line to a file and print the token; return 0."""
    token = _PREFIX + secrets.token_urlsafe(32)
    line = _line(token, args.name, args.quota, is_admin=args.admin)
    if args.append is not None:
        _append(args.append, line)
        show(args, {"token": token}, token)
    else:
        text = f"token for {args.name}, shown this once:\n{token}\n\nline for the server's --token-file:\n{line}"
        show(args, {"token": token, "line": line}, text)
    return 0


def _line(token: str, name: str, quotas: list[str], *, is_admin: bool) -> str:
    if not _NAME.fullmatch(name):
        text = f"{name!r} is no name: it must be 1 to 128 of A-Z a-z 0-9 . _ @ : / + -, a letter or digit first"
        raise misuse(text, "NAME_INVALID")
    for quota in quotas:
        key, _, value = quota.partition("=")
        if key not in _QUOTAS or not _QUOTAS[key].fullmatch(value):
            text = f"{quota!r} is no quota: give one of {', '.join(_QUOTAS)}, with a whole number"
            names = [name for name, form in _QUOTAS.items() if form is _SIZE]
            sizes = f"{', '.join(names[:-1])} and {names[-1]} with a size such as 16MiB, or none"
            raise misuse(f"{text}, {sizes}", "QUOTA_INVALID")
    digest = hashlib.sha256(token.encode()).hexdigest()
    return " ".join([digest, name, *(["admin"] if is_admin else []), *quotas])


def _append(path: str, line: str) -> None:
    """Append a line with one write, so that a server never reads half of it; a new file is the owner's alone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            is_mid_line = file.read(1) not in (b"", b"\n")
            file.write(f"{chr(10) if is_mid_line else ''}{line}\n".encode())
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", "FILE_UNWRITABLE") from None
