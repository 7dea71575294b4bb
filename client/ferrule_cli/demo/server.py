"""The demo's server: a process on a local socket of its own, which does not outlive the demo."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ferrule_cli.common import CommandError

__all__ = ["ServerProcess"]

_STOP_S = 15.0  # more than the guardian itself waits
_GUARDIAN = Path(__file__).with_name("guardian.py")
_TAIL_LINES = 15
_ACCESS = ("FERRULE_TOKEN_FILE", "FERRULE_TLS_CERT", "FERRULE_TLS_KEY", "FERRULE_TLS_CLIENT_CA", "FERRULE_ADMINS")


class ServerProcess:
    """A server that lives as long as the ``with`` around it; its output goes to a log file in a temporary folder.

    Between the two stands a guardian, see ``demo_guardian``: it ends the server and removes the folder also when this
    process is killed and can do neither.

    Args:
        arguments: Arguments of ``python -m ferrule_server``, without ``--listen``.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._folder = tempfile.TemporaryDirectory(prefix="ferrule-demo-")
        self._log_path = Path(self._folder.name) / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.target = f"unix:{self._folder.name}/ferrule.sock"

    def __enter__(self) -> ServerProcess:
        guardian = [sys.executable, "-I", "-S", str(_GUARDIAN), self._folder.name]
        command = [*guardian, sys.executable, "-m", "ferrule_server", "--listen", self.target]
        command += ["--drain-grace", "0s", *self._arguments]  # all handles are the demo's: nobody is waited for
        with self._log_path.open("wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches the demo only, which then ends the server in order.
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=_environment()
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        self._folder.cleanup()

    def check(self) -> None:
        """Make sure that the server still runs.

        Raises:
            CommandError: It has ended; ``log_tail`` says why.
        """
        code = None if self._process is None else self._process.poll()
        if code is not None:
            raise CommandError(f"the server ended with exit code {code}", "SERVER_ENDED")

    def stop(self) -> int:
        """End the server with SIGTERM and return its exit code; stopping twice changes nothing."""
        if self._process is None:
            return 0
        assert self._process.stdin is not None  # it is a pipe
        self._process.stdin.close()  # the guardian sees it and ends the server
        try:
            return self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def log_tail(self) -> str:
        """Return the last lines that the server wrote."""
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def _environment() -> dict[str, str]:
    """Return our environment without what would have the demo's own server ask for credentials."""
    return {name: value for name, value in os.environ.items() if name not in _ACCESS}
