"""A server of a command's own: a process on a local socket, which does not outlive the command."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from ferrule_cli.common import CommandError
from ferrule_cli.demo import guardian
from ferrule_cli.waiting import Waiting
from ferrule_client.errors import FerruleError
from ferrule_client.sync.client import Client
from ferrule_client.types import Status

__all__ = ["ServerProcess", "own_server"]

_LOAD_S = 900.0
_STOP_S = 15.0  # more than the guardian itself waits
_MAX_PLACE_BYTES = 68  # the path of a socket has at most 103 bytes on macOS, 107 on Linux; the rest is ours
_ACCESS = (
    "FERRULE_CONFIG",
    "FERRULE_TOKEN_FILE",
    "FERRULE_TLS_CERT",
    "FERRULE_TLS_KEY",
    "FERRULE_TLS_CLIENT_CA",
    "FERRULE_ADMINS",
)


class ServerProcess:
    """A server that lives as long as the ``with`` around it; its output goes to a log file in a temporary folder.

    Between the two stands a guardian, see ``demo.guardian``: it ends the server and removes the folder also when this
    process is killed and can do neither. If a call or the server fails, the last lines of the log are shown.
    ``arguments`` are those of ``python -m ferrule_server``, without ``--listen``.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ferrule-demo-", dir=_place())
        self._log_path = Path(self._folder.name) / "server.log"
        self.target = f"unix:{self._folder.name}/ferrule.sock"
        command = [sys.executable, "-I", "-S", guardian.__file__, self._folder.name]
        command += [sys.executable, "-m", "ferrule_server", "--listen", self.target]
        command += ["--drain-grace", "0s", *arguments]  # all handles are the demo's: nobody is waited for
        # What would have the server ask for credentials is left out.
        environment = {name: value for name, value in os.environ.items() if name not in _ACCESS}
        with self._log_path.open("wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches the demo only, which then ends the server in order.
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=environment
            )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, (CommandError, FerruleError)):
            print(*self._log_path.read_text(errors="replace").splitlines()[-15:], sep="\n", file=sys.stderr)
        self.stop()
        self._folder.cleanup()

    def wait_until_ready(self, client: Client, show: Callable[[Status | None], object], timeout_s: float) -> None:
        """Return when the server is ready, as the method of the client does; a server that has ended is an error."""

        def look(status: Status | None) -> None:
            if (code := self._process.poll()) is not None:
                raise CommandError(f"the server ended with exit code {code}", "SERVER_ENDED")
            show(status)

        client.wait_until_ready(on_progress=look, timeout=timeout_s)

    def stop(self) -> int:
        """End the server with SIGTERM and return its exit code; stopping twice changes nothing."""
        assert self._process.stdin is not None  # it is a pipe
        self._process.stdin.close()  # the guardian sees it and ends the server
        try:
            return self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@contextlib.contextmanager
def own_server(arguments: Sequence[str]) -> Iterator[tuple[str, Client]]:
    """Start a server, show how far it has loaded, and yield its address and a client of it; end it with the body."""
    with ServerProcess(arguments) as server, Client(server.target, max_retries=0, timeout=600.0) as client:
        with Waiting("a server that starts") as waiting:

            def show(loading: Status | None) -> None:
                if loading is not None:
                    waiting.show(loading.load_stage or "a server that starts", loading.load_progress)

            server.wait_until_ready(client, show, _LOAD_S)
        yield server.target, client


def _place() -> str | None:
    """Return where to make the folder; None: in the usual place, unless a socket there would have too long a path."""
    return None if len(os.fsencode(tempfile.gettempdir())) <= _MAX_PLACE_BYTES else "/tmp"  # noqa: S108
