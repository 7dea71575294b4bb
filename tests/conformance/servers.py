"""The servers that cases talk to: ``ferrule serve --executor paged-reference`` and others, with different settings."""

from __future__ import annotations

import hashlib
import re
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.api.certificates import Authority, ServerFiles
from tests.model.small_model import write_windowed_model

_REFERENCE: Final = ("--executor", "paged-reference", "--instance", "conformance", "--drain-grace", "0s")
_SHIPPED: Final = ("--kv-memory", "16MiB", "--drain-grace", "0s")
_TLS: Final = ("--tls-cert", "{folder}/cert.pem", "--tls-key", "{folder}/key.pem")
TOKENS: Final = {name: f"ferrule_conformance_{name}" for name in ("alice", "bob", "ops")}
"""Bearer tokens of the guarded server, by principal; they open nothing else."""
_TOKEN_LINES: Final = {"alice": "alice handles=3 kv_tokens=128 mask_bytes=1KiB", "bob": "bob", "ops": "ops admin"}

PROFILES: Final[Mapping[str, tuple[str, ...]]] = {
    "plain": _REFERENCE,
    "small": (*_REFERENCE, "--kv-memory", "128KiB", "--max-waiting-jobs", "4"),
    "guarded": (*_REFERENCE, "--token-file", "{folder}/tokens"),
    "windowed": ("--model", "{folder}/windowed", "--executor", "torch", "--kv-memory", "1MiB", "--drain-grace", "0s"),
    "shipped": _SHIPPED,
    "secured": (*_SHIPPED, "--token-file", "{folder}/tokens", *_TLS),
}
"""Flags of each kind of server."""

_START_S = 300.0
_STOP_S = 20.0


class Servers:
    """Starts a server when the first case asks for it. Leave it to end them all.

    Args:
        folder: For logs, the token file, a model with a window, and the certificates of the server with TLS
            (``ca.pem``: who signs them).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, tuple[subprocess.Popen[str], str]] = {}
        self._ending: list[subprocess.Popen[str]] = []
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{hashlib.sha256(TOKENS[name].encode()).hexdigest()} {line}\n" for name, line in _TOKEN_LINES.items()]
        path = folder / "tokens"
        path.touch(mode=0o600)
        path.write_text("".join(lines), "utf-8")
        authority = Authority()
        ServerFiles(folder).write(authority.server(), authority.cert)
        write_windowed_model(folder / "windowed", window=3)

    def __enter__(self) -> Servers:
        """Return itself; nothing is started yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End every server; each gets its time to close the connections of its clients."""
        for name in list(self._running):
            self.end(name)
        for process in self._ending:
            _reap(process)

    def target(self, profile: str) -> str:
        """Return the address of a server that is ready."""
        if profile not in self._running:
            self._running[profile] = self._start(profile, PROFILES[profile])
        return self._running[profile][1]

    def own(self, *flags: str) -> str:
        """Return the address of a server made for one case, which may end it."""
        self._running["own"] = self._start("own", (*_REFERENCE, *flags))
        return self._running["own"][1]

    def named(self, instance: str) -> str:
        """Return the address of a server with the model that ships and a name of its own."""
        self._running[instance] = self._start(instance, (*PROFILES["shipped"], "--instance", instance))
        return self._running[instance][1]

    def end(self, name: str) -> None:
        """Ask a server to end, if it still runs; leaving waits for it."""
        if name in self._running:
            process, _ = self._running.pop(name)
            process.terminate()
            self._ending.append(process)

    def wait(self, name: str) -> int:
        """Return the exit code of a server that was asked to end."""
        process, _ = self._running.pop(name)
        return _reap(process)

    def _start(self, name: str, flags: tuple[str, ...]) -> tuple[subprocess.Popen[str], str]:
        filled = [flag.format(folder=self.folder) for flag in flags]
        command = [sys.executable, "-m", "ferrule_server", *filled, "--listen", "127.0.0.1:0"]
        log = self.folder / f"{name}.log"
        with log.open("a") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert process.stdout is not None
        is_ready, _, _ = select.select([process.stdout], [], [], _START_S)
        line = process.stdout.readline() if is_ready else ""
        found = re.search(r"^ready .*\blisten=(127\.0\.0\.1:\d+)", line)
        if found is None:
            process.kill()
            process.communicate()
            raise RuntimeError(f"the server {name} did not become ready: {line!r}\n{log.read_text()[-2000:]}")
        return process, found[1]


def _reap(process: subprocess.Popen[str]) -> int:
    """Return the exit code of a process that is ending, or ends it the hard way."""
    with process:
        try:
            return process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
