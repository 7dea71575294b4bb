"""Command ``ferrule``: ``serve``, which becomes the server, and the commands of :data:`_COMMANDS`.

Settings come from flags, then from ``FERRULE_*`` environment variables, then from the table ``[client]`` of the file
of ``--config``, then from defaults. Exit codes: 0 done, 1 failed (one line ``error: ... (REASON)`` on standard error,
with ``--json`` one JSON object), 2 used wrongly, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ferrule import __version__
from ferrule_cli.commands import (
    admin,
    bench,
    caches,
    chat,
    check,
    completion,
    durable,
    generate,
    health,
    metrics,
    models,
    token,
)
from ferrule_cli.common import CommandError, need_server
from ferrule_cli.demo import story
from ferrule_cli.parser import Parser
from ferrule_cli.top import command as top
from ferrule_client.errors import FerruleError

__all__ = ["build_parser", "main"]

_EPILOG = """\
first steps:
  ferrule demo                                      see it work: starts a server of its own, ends it again
  ferrule serve --model demo                        run a server on 127.0.0.1:50051
  ferrule generate "def read_file(path):"           use it from another terminal

environment:
  FERRULE_CONFIG    TOML file whose table [client] has target, timeout, tls-ca, ... for what is not set otherwise
  FERRULE_TARGET    server to use (127.0.0.1:50051)
  FERRULE_TIMEOUT   longest wait for an answer, in seconds (60)
  FERRULE_TOKEN     bearer token to send
  FERRULE_TLS_CA    PEM authority of a server with TLS (FERRULE_TLS=1: one that the system trusts)
"""

_COMMANDS = {
    "demo": (story, "show what Ferrule does, in a few seconds"),
    "models": (models, "list the families that load, and the models in the cache of the hub"),
    "check": (check, "say whether a model loads, in how much memory, and what runs it"),
    "generate": (generate, "continue a prompt"),
    "chat": (chat, "talk to a model"),
    "bench": (bench, "measure how fast a model runs, or what a load does to a server"),
    "health": (health, "report whether the server serves"),
    "caches": (caches, "list the live handles"),
    "metrics": (metrics, "show the counters of a server"),
    "top": (top, "watch a server while it works"),
    "durable": (durable, "show or verify a journal of durable handles"),
    "admin": (admin, "warm a server up, drain it, end it"),
    "token": (token, "make a bearer token and its line for the server's token file"),
    "completion": (completion, "print a script with which a shell completes commands and options"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` is without the program's name, None: that of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_json = "--json" in arguments
    try:
        if arguments[:1] == ["serve"]:
            _serve(arguments[1:])
        if not arguments:
            build_parser().print_help()
            return 2
        args = build_parser().parse_args(arguments)
        code: int = args.run(args)
        sys.stdout.flush()
    except (CommandError, FerruleError) as error:
        print(_line_of(error, is_json=is_json), file=sys.stderr)
        return error.exit_code if isinstance(error, CommandError) else 1
    except KeyboardInterrupt:
        if not is_json:
            print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has left; nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="ferrule",
        description="Run a language model as a gRPC service and work with handles to its KV cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ferrule {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser("serve", help="run a server; its flags: ferrule serve --help", add_help=False)
    for name, (module, help_text) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=help_text,
            description=help_text[0].upper() + help_text[1:] + ".",
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_options(command)
        command.set_defaults(run=module.run)
    return parser


def _serve(arguments: Sequence[str]) -> NoReturn:
    """Become the server, so that its signals, ``--help`` and exit codes are its own."""
    need_server()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "ferrule_server", *arguments])  # noqa: S606 - no shell wanted


def _line_of(error: CommandError | FerruleError, *, is_json: bool) -> str:
    """Return the one line that standard error gets: for people, or for scripts as a JSON object."""
    message = " ".join((error.message if isinstance(error, CommandError) else _for_users(error)).split())
    if not is_json:
        return f"error: {message} ({error.reason})"
    facts: dict[str, object] = {"error": message, "reason": error.reason}
    if isinstance(error, FerruleError):
        facts |= {"code": error.code.name, "metadata": error.metadata}
    return json.dumps(facts)


def _for_users(error: FerruleError) -> str:
    """Return the message of an error, with the advice in words of the command line."""
    if error.reason == "TOKEN_MISSING":
        return "the server requires a token: set FERRULE_TOKEN"
    if error.reason == "PERMISSION_DENIED":  # our servers have reasons of their own
        return f"the proxy refuses it ({error.message}): say --instance NAME, one that it knows"
    if error.reason != "CONNECTION_FAILED" or "target" not in error.metadata or "advice" in error.metadata:
        return error.message
    advice = 'start one with "ferrule serve", or name another with --target'
    return f"no server at {error.metadata['target']} ({error.metadata['cause']}); {advice}"


if __name__ == "__main__":
    sys.exit(main())
