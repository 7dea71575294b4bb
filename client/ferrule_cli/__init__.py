"""Where the command ``ferrule`` begins: what gRPC reads once, as it is imported, is set before that.

Of a handshake that failed gRPC would write six lines above our one. What the environment says wins; the library itself
changes nothing, and a server sets its own.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command that the process was started with and return its exit code."""
    if sys.argv[1:2] != ["serve"]:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from ferrule_cli import app as cli

    return cli.main()
