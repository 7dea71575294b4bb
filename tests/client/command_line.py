"""Commands of ``ferrule`` in the process of a test."""

from __future__ import annotations

from ferrule_cli import app

__all__ = ["run"]


def run(*arguments: str) -> int:
    """Return the exit code of a command."""
    try:
        return app.main(arguments)
    except SystemExit as leaving:  # argparse
        return int(leaving.code or 0)
