"""Envoy as the tests start it, but ending with this process."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from benchmarks.load import guarded
from tools.compose.envoy import EnvoyProcess


class GuardedEnvoy(EnvoyProcess):
    """Envoy in front of our own servers; it does not outlive us. Enter and leave it as the other."""

    def launch(self, command: list[str], log: IO[bytes]) -> guarded.Process:
        """Return it running."""
        return guarded.start(command, Path(self.log.parent), log, log)

    def stop(self) -> None:
        """End it."""
        guarded.end(self.process)
