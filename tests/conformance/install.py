"""Installs what the runners need and is not there: Debian's packages when it may, the packages of Node by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from tests.conformance.languages import EXAMPLES, Missing, node_modules

PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "node": ("nodejs",),
    "npm": ("npm",),
    "go": ("golang-go", "golang-google-grpc-dev", "golang-github-golang-protobuf-1-5-dev"),
    "protoc-gen-go": ("protoc-gen-go-1-5",),
    "protoc-gen-go-grpc": ("protoc-gen-go-grpc",),
    "protoc": ("protobuf-compiler",),
    "g++": ("g++",),
    "grpc_cpp_plugin": ("protobuf-compiler-grpc", "libgrpc++-dev"),
    "jq": ("jq",),
}
"""Debian packages, by the program whose absence says that they are missing."""


def main() -> int:
    """Install; return 1 where an installer fails. What may not be installed is named, and the run after this judges."""
    wanted = [package for program, some in PACKAGES.items() if shutil.which(program) is None for package in some]
    command = ["apt-get", "install", "-y", "--no-install-recommends", *wanted]
    if wanted and os.geteuid() == 0 and shutil.which("apt-get"):
        sys.stdout.write(f"{' '.join(command)}\n")
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            return 1
    elif wanted:
        sys.stdout.write(f"missing, and not root: sudo {' '.join(command)}\n")
    try:
        node_modules()
    except Missing:
        npm = shutil.which("npm")
        if npm is not None:
            install = [npm, "install", "--prefix", str(EXAMPLES / "node"), "--no-audit", "--no-fund"]
            return subprocess.run(install, stdout=subprocess.DEVNULL, check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
