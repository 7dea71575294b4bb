"""Runs parts: one process after the other, each killed with all its children at its limit; what it said stays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.parts import Part
from benchmarks.gpu.timing import Row

ROOT = Path(__file__).resolve().parents[2]
_FINE = ("ok", "left out", "stopped at the driver")


@dataclass(frozen=True, slots=True)
class Workplace:
    """What all parts of a run share.

    Attributes:
        output: Folder of results; those of earlier calls stay there.
        base: What every worker is told: ``dry``, ``bundle``, ``models``.
        identity: What results must have in common to stand beside each other: commit, device, dry or not.
    """

    output: Path
    base: Row
    identity: Row

    def folder(self) -> Path:
        """Return where the results of parts lie."""
        made = self.output / "parts"
        made.mkdir(parents=True, exist_ok=True)
        return made

    def kept(self, part: Part) -> Row | None:
        """Return the result of a part that an earlier call finished without a failure; None: there is none."""
        path = self.folder() / f"{_file(part)}.json"
        if not path.exists():
            return None
        result: Row = json.loads(path.read_text())
        return result if self.is_ours(result) and not result["failures"] else None

    def is_ours(self, result: Row) -> bool:
        """Return whether a result is of this commit, device and kind of run."""
        return all(result.get(key) == value for key, value in self.identity.items())

    def results(self) -> list[Row]:
        """Return the results of all parts that can stand beside each other, oldest first."""
        found = [json.loads(path.read_text()) for path in sorted(self.folder().glob("*.json"))]
        return sorted((one for one in found if self.is_ours(one)), key=lambda one: str(one["date"]))

    def run(self, part: Part) -> Row:
        """Run a part and write its result; rows that came before a failure count."""
        limit_s = part.limit_s
        task = {**self.base, **part.settings, "task": part.task, "model": part.model, "limit_s": limit_s}
        stem = self.folder() / _file(part)
        began = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(task)]
        ended = run_limited(command, stem.with_suffix(".jsonl"), stem.with_suffix(".log"), limit_s)
        told = {"part": part.name, "model": part.model, "is_dry": bool(self.base.get("dry"))}
        rows = [{**row, **told} for row in rows_in(stem.with_suffix(".jsonl"))]
        failures = ([f"{part.name}: {ended}; {last_line(stem.with_suffix('.log'))}"] if ended else []) + [
            f"{part.name}: {json.dumps(row)}" for row in rows if row.get("status") not in _FINE
        ]
        result = {
            **self.identity,
            "part": part.name,
            "stage": part.stage,
            "model": part.model,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - began, 1),
            "rows": rows,
            "failures": failures,
        }
        write(stem.with_suffix(".json"), json.dumps(result, indent=1) + "\n")
        return result


def _file(part: Part) -> str:
    return part.name.replace(":", "-")


def write(path: Path, text: str) -> None:
    """Write a file wholly or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def run_limited(command: Sequence[str], out: Path, log: Path, limit_s: float) -> str:
    """Run a process with its output in files and return what is wrong with its end; nothing: it ended well.

    It gets a process group of its own: at the limit, and where this process is interrupted, all of it is killed.
    """
    with out.open("w") as said, log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=said, stderr=errors, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
            return f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            return f"stopped after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "server"), str(ROOT / "client"), str(ROOT / "protos")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def rows_in(path: Path) -> list[Row]:
    """Return the rows a worker wrote; a line that was cut off by its end is left out."""
    rows = []
    for line in path.read_text().splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def last_line(path: Path) -> str:
    """Return the last line of a log."""
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "it said nothing"
