"""Installs PyTorch, by far the largest requirement of the server, and for a CPU without CUDA.

    python deploy/install_torch.py                     for a CPU, beside the interpreter that runs this
    python deploy/install_torch.py --build cuda        the wheel that pip finds; on Linux that of PyPI brings CUDA
    python deploy/install_torch.py --index ADDRESS     from an index of your own, which is asked for PyTorch alone

For a CPU on Linux, a wheel that needs no CUDA is taken from pip's local places (``PIP_FIND_LINKS``, ``find-links`` of
``pip.conf``). If there is none, uv installs it: uv knows the address of PyTorch's wheels for processors. Elsewhere pip
finds wheels without CUDA. The version is that of constraints.txt; what PyTorch requires comes from pip's own index.
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
_INSTALLED = "import importlib.metadata as m, json; print(json.dumps([m.version('torch'), m.requires('torch')]))"
_OF_CUDA = ("nvidia-", "cuda-", "triton")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or the exit code of the installer that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", choices=["cpu", "cuda"], default="cpu", help="for processors, or what pip finds")
    parser.add_argument("--index", default="", metavar="ADDRESS", help="the index to ask for PyTorch, and only for it")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to install for")
    options = parser.parse_args(arguments)
    version = pinned_version(CONSTRAINTS.read_text(encoding="utf-8"))
    if sys.platform != "linux" or is_installed(options.python, version, options.build):
        return 0  # elsewhere there is one build, which the server requires anyway
    pip = [sys.executable, "-m", "pip", "--python", options.python, "--disable-pip-version-check", "install"]
    wanted = ["-c", str(CONSTRAINTS), f"torch=={version}"]
    alone = ["--force-reinstall", "--no-deps", *wanted]
    if options.index:
        code = subprocess.call([*pip, "--index-url", options.index, *alone])
    elif options.build == "cuda":
        code = subprocess.call([*pip, *alone])
    elif needs_cuda(found_locally(pip, wanted)):
        code = install_by_uv(options.python, wanted)
    else:
        code = subprocess.call([*pip, "--no-index", *alone])
    return code or subprocess.call([*pip, *wanted])


def pinned_version(constraints: str) -> str:
    """Return the version of PyTorch in the text of constraints.txt."""
    (line,) = [line for line in constraints.splitlines() if line.startswith("torch==")]
    return line.removeprefix("torch==")


def is_installed(python: str, version: str, build: str) -> bool:
    """Return whether an interpreter has the version in the build that is wanted."""
    done = subprocess.run([python, "-c", _INSTALLED], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return False
    found, requirements = json.loads(done.stdout)
    return str(found).partition("+")[0] == version and needs_cuda(requirements) == (build == "cuda")


def found_locally(pip: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the requirements of the wheel that pip finds without an index; one of CUDA's where it finds none."""
    command = [*pip, "--dry-run", "--no-index", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return ["nvidia-cuda-runtime"]
    found: list[str] = json.loads(done.stdout)["install"][0]["metadata"].get("requires_dist", [])
    return found


def needs_cuda(requirements: Sequence[str]) -> bool:
    """Return whether a wheel brings packages of CUDA."""
    return any(line.startswith(_OF_CUDA) for line in requirements)


def install_by_uv(python: str, wanted: Sequence[str]) -> int:
    """Install the wheel for processors, and only it, with a uv that stays nowhere; returns its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(CONSTRAINTS)]
        if code := subprocess.call([*pip, "--target", folder, "uv"]):
            return code
        uv = [str(Path(folder, "bin", "uv")), "pip", "install", "--python", python, "--torch-backend", "cpu"]
        return subprocess.call([*uv, "--reinstall", "--no-deps", *wanted], env=os.environ | {"PYTHONPATH": folder})


if __name__ == "__main__":
    sys.exit(main())
