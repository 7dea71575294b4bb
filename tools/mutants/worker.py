"""A worker: one copy of the tree in a temporary folder, in which tests run with a mutant and without.

Three caches could hide a mutant, and each is dealt with:

* The virtual environment has an editable install of another tree. PYTHONPATH names the copy, and :meth:`Worker.check`
  makes sure that it precedes the install.
* Bytecode is compiled once, before the first mutant, and never written again. A mutated source has another time of
  change than its bytecode, so Python compiles it again; the original gets its old time back.
* The product keeps the machine code of CPU kernels in a folder for each version of their sources, so a mutant of a
  kernel never meets other code. It has a home of its own, so that its machine code does not stay in the user's cache.
"""

from __future__ import annotations

import compileall
import enum
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from tools.mutants.catalogue import Mutant, StaleMutant

__all__ = ["Outcome", "Worker"]

ROOT: Final = Path(__file__).resolve().parents[2]
ROOTS: Final = ("server", "client", "protos")
"""Import roots of the product."""

_KERNELS: Final = "server/ferrule_server/kernels/cpu/"
_FAILED: Final = 1
"""pytest's exit status if tests ran and some failed; others mean that something is wrong with the run."""
_FAILURE: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_IMPORTED: Final = """
import importlib
for name in ("ferrule", "ferrule.v1", "ferrule_server", "ferrule_client", "ferrule_cli"):
    print(importlib.import_module(name).__file__)
"""


class Outcome(enum.Enum):
    """What became of a mutant."""

    KILLED = "killed"
    """A test failed, or the process crashed."""
    SURVIVED = "survived"
    """All named tests passed."""
    STALE = "stale"
    """Its old text does not occur exactly once."""
    HUNG = "hung"
    """The run exceeded its time limit, and the mutant does not declare that it hangs."""
    BROKEN = "broken"
    """The tests could not be run."""


class Worker:
    """A copy of the tree; between runs its sources are those of the tree.

    Args:
        limit_s: Time limit of the run of a mutant that has none of its own.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._temporary = tempfile.TemporaryDirectory(prefix="mutants-")
        self._folder = Path(self._temporary.name)
        self.tree = self._folder / "tree"
        self.tree.mkdir()
        self.output = ""
        for path in _files():
            (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, self.tree / path)
        for root in ROOTS:
            compileall.compile_dir(self.tree / root, quiet=2)

    def check(self) -> None:
        """Check that Python imports the product from the copy.

        Raises:
            RuntimeError: It imports another tree.
        """
        command = [sys.executable, "-c", _IMPORTED]
        found = subprocess.run(
            command, cwd=self.tree, env=self._environment(), check=True, capture_output=True, text=True
        )
        for name in found.stdout.splitlines():
            if not Path(name).is_relative_to(self.tree):
                raise RuntimeError(f"{name} is imported, which is not in the copy {self.tree}")

    def passes(self, tests: Iterable[str]) -> bool:
        """Return whether the tests pass without a mutant."""
        return self._run(tests, self._environment(), None) == 0

    def judge(self, mutant: Mutant) -> Outcome:
        """Run the tests of a mutant with it; the source is as before when this returns."""
        self.output = ""
        source = self.tree / mutant.file
        original, times = source.read_bytes(), source.stat()
        try:
            mutated = mutant.apply(original.decode())
        except StaleMutant:
            return Outcome.STALE
        try:
            source.write_text(mutated)
            os.utime(source, (times.st_atime + 60, times.st_mtime + 60))
            status = self._run(mutant.tests, self._environment(mutant), mutant.limit_s or self._limit_s)
        finally:
            source.write_bytes(original)
            os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
        if status is None:
            return Outcome.KILLED if mutant.hangs else Outcome.HUNG
        if status == _FAILED or status < 0:
            return Outcome.KILLED
        return Outcome.BROKEN if status else Outcome.SURVIVED

    @property
    def killer(self) -> str:
        """The first test that failed in the last run; empty: none, or the process crashed."""
        failed = _FAILURE.search(self.output)
        return failed[1] if failed else ""

    def close(self) -> None:
        """Delete the copy."""
        self._temporary.cleanup()

    def _environment(self, mutant: Mutant | None = None) -> Mapping[str, str]:
        paths = os.pathsep.join(str(self.tree / root) for root in ROOTS)
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        if mutant is not None and mutant.file.startswith(_KERNELS):
            home = self._folder / "homes" / mutant.id
            home.mkdir(parents=True, exist_ok=True)
            environment["HOME"] = str(home)
        return environment

    def _run(self, tests: Iterable[str], environment: Mapping[str, str], limit_s: float | None) -> int | None:
        """Return pytest's exit status, None if the run exceeded its limit; keep what it printed."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
        command += ["--timeout=0", "--tb=line", *tests]
        with tempfile.TemporaryFile("w+", dir=self._folder) as output:
            run = subprocess.Popen(
                command,
                cwd=self.tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return run.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end_session(run)
                output.seek(0)
                self.output = output.read()


def _end_session(run: subprocess.Popen[bytes]) -> None:
    """End what is left of a run: the run itself, and servers that its tests have started."""
    try:
        os.killpg(run.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        run.wait()


def _files() -> list[str]:
    """Return the files of the tree that git knows or would add, and that exist."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
