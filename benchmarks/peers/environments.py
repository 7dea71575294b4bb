"""One virtual environment for each peer, in a folder of the user's cache; made once and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.catalog import PeerSpec

__all__ = ["Environment", "NotInstalled", "last_line"]

_LIMIT_S = 3600.0


class NotInstalled(Exception):
    """A peer's environment cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment of a peer.

    Attributes:
        spec: The peer.
        folder: Holds the environment, its log, and models in the peer's own format.
    """

    spec: PeerSpec
    folder: Path

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        """What the installation and the runs wrote to their standard error."""
        return self.folder / "log.txt"

    @property
    def is_ready(self) -> bool:
        """Whether exactly these packages were installed."""
        return self._stamp.exists() and self._stamp.read_text(encoding="utf-8") == self._wanted

    def make(self) -> None:
        """Install the packages, unless they are there.

        Raises:
            NotInstalled: A command failed.
        """
        if self.is_ready:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stamp.unlink(missing_ok=True)
        self._run([sys.executable, "-m", "venv", str(self.folder)])
        for command in self.install_commands():
            self._run(command)
        self._stamp.write_text(self._wanted, encoding="utf-8")

    def install_commands(self) -> list[list[str]]:
        """Return the commands that fill the environment; a file of constraints is written."""
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check"]
        constraints = self.folder / "constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in self.spec.constraints), encoding="utf-8")
        install = [*pip, "install", "--quiet", "-c", str(constraints), *self.spec.packages]
        uninstall = [*pip, "uninstall", "--quiet", "--yes", *self.spec.unwanted]
        return [install, uninstall] if self.spec.unwanted else [install]

    def variables(self, root: Path, num_threads: int) -> dict[str, str]:
        """Return the variables of a run.

        Args:
            root: Of this repository: the modules of peers are found there, and none of the project's environment.
            num_threads: Threads of OpenMP; without the variable vLLM computes with one.
        """
        made = {**peer_variables(root, num_threads), **self.spec.environment}
        libraries = sorted(self.folder.glob(self.spec.preload)) if self.spec.preload else []
        return made | ({"LD_PRELOAD": str(libraries[0])} if libraries else {})

    def _run(self, command: Sequence[str]) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            try:
                environment = {**os.environ, **self.spec.install_environment}
                subprocess.run(command, check=True, stdout=log, stderr=log, env=environment, timeout=_LIMIT_S)
            except (OSError, subprocess.SubprocessError) as error:
                raise NotInstalled(f"{error.__class__.__name__}: {last_line(self.log)}") from error

    @property
    def _stamp(self) -> Path:
        return self.folder / "installed.txt"

    @property
    def _wanted(self) -> str:
        return "\n".join([*self.spec.packages, *self.spec.constraints, *(f"not {name}" for name in self.spec.unwanted)])


def peer_variables(root: Path, num_threads: int) -> dict[str, str]:
    """Return the variables of a process of a peer: those of ours, but how our threads wait is not how its own should.

    Args:
        root: Of this repository.
        num_threads: Threads of OpenMP.
    """
    ours = ("PYTHON", "OMP_", "KMP_", "GOMP_")
    made = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return made | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads)}


def last_line(log: Path) -> str:
    """Return the last line of a log that says something; lines with errors come first."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-40:] if "error" in line.lower()]
    return (errors or lines or ["it wrote nothing"])[-1][:300]
