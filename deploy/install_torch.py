"""Installs PyTorch, by far the largest requirement of the server, and for a CPU without CUDA.

    python deploy/install_torch.py                     for a CPU, beside the interpreter that runs this
    python deploy/install_torch.py --build cuda        the wheel that pip finds; on Linux that of PyPI brings CUDA
    python deploy/install_torch.py --index ADDRESS     from an index of your own, which is asked for PyTorch alone

For a CPU, what pip finds is taken if it needs no CUDA: on a Mac, or where a wheel for processors lies in one of pip's
own places (``PIP_FIND_LINKS``, ``pip.conf``). Otherwise uv installs it, which knows the address of PyTorch's wheels for
processors. The version is that of constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
_INSTALLED = "import importlib.metadata as m; print(m.version('torch').partition('+')[0], end='')"
_OF_CUDA = ("nvidia-", "cuda-", "triton")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or the exit code of the installer that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", choices=["cpu", "cuda"], default="cpu", help="for processors, or what pip finds")
    parser.add_argument("--index", default="", metavar="ADDRESS", help="the index to ask for PyTorch, and only for it")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to install for")
    options = parser.parse_args(arguments)
    version = pinned_version(CONSTRAINTS.read_text(encoding="utf-8"))
    if installed_version(options.python) == version:
        return 0
    pip = [sys.executable, "-m", "pip", "--python", options.python, "--disable-pip-version-check"]
    wanted = ["-c", str(CONSTRAINTS), f"torch=={version}"]
    if options.index:
        return subprocess.call([*pip, "install", "--index-url", options.index, *wanted])
    if options.build == "cuda" or not needs_cuda(found_by_pip(pip, wanted)):
        return subprocess.call([*pip, "install", *wanted])
    return install_by_uv(options.python, wanted)


def pinned_version(constraints: str) -> str:
    """Return the version of PyTorch in the text of constraints.txt."""
    (line,) = [line for line in constraints.splitlines() if line.startswith("torch==")]
    return line.removeprefix("torch==")


def installed_version(python: str) -> str:
    """Return the version that an interpreter has, without its build; empty where it has none."""
    return subprocess.run([python, "-c", _INSTALLED], capture_output=True, text=True, check=False).stdout


def found_by_pip(pip: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the requirements of the wheel that pip would install, from its metadata; nothing on a Mac."""
    if sys.platform != "linux":
        return []
    command = [*pip, "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", *wanted]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    found: list[str] = report["install"][0]["metadata"].get("requires_dist", [])
    return found


def needs_cuda(requirements: Sequence[str]) -> bool:
    """Return whether a wheel brings packages of CUDA."""
    return any(line.startswith(_OF_CUDA) for line in requirements)


def install_by_uv(python: str, wanted: Sequence[str]) -> int:
    """Install the wheel for processors with a uv that is installed for this alone; returns its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", folder, "uv"],
            check=True,
        )
        uv = Path(folder, "bin", "uv")
        command = [str(uv), "pip", "install", "--python", python, "--torch-backend", "cpu", *wanted]
        return subprocess.call(command, env=os.environ | {"PYTHONPATH": folder})


if __name__ == "__main__":
    sys.exit(main())
