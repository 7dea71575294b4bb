"""Installs what the runners need and is not there: Debian's packages when it may, the packages of Node by name.

Go with its modules, and the crates of Rust, are those of a newer Debian, unpacked into a cache: they change nothing of
the system. Rust's compiler is not installed: a toolchain of rustup serves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from tests.conformance.languages import DEBIAN, EXAMPLES, Missing, node_modules

PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "node": ("nodejs",),
    "npm": ("npm",),
    "protoc": ("protobuf-compiler", "libprotobuf-dev"),
    "g++": ("g++",),
    "grpc_cpp_plugin": ("protobuf-compiler-grpc", "libgrpc++-dev"),
    "jq": ("jq",),
}
"""Debian packages, by the program whose absence says that they are missing."""

NEWER_SUITE: Final = "forky"
NEWER: Final = (
    "golang-go",
    "golang-github-golang-protobuf-1-5-dev",
    "golang-golang-x-net-dev",
    "golang-golang-x-sys-dev",
    "golang-golang-x-text-dev",
    "golang-google-genproto-dev",
    "golang-google-grpc-dev",
    "golang-google-protobuf-dev",
    "protoc-gen-go-1-5",
    "protoc-gen-go-grpc",
    "librust-prost-reflect-dev",
    "librust-tokio-dev",
    "librust-tonic-build-dev",
    "librust-tonic-dev",
)
"""Packages of a newer Debian to unpack; of what they depend on, the compiler of Go and the crates come along."""
_COME_ALONG: Final = re.compile(r"golang-\d|librust-")


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
        if shutil.which("apt-get"):
            unpack_newer()
        for example in ("node", "typescript"):
            install_node_modules(example)
    except subprocess.CalledProcessError as failed:
        sys.stdout.write(f"failed: {' '.join(failed.cmd[:8])}\n")
        return 1
    return 0


def install_node_modules(example: str) -> None:
    """Install the packages of an example, if they are missing and npm is there."""
    try:
        node_modules(example)
    except Missing:
        npm = shutil.which("npm")
        if npm is not None:
            command = [npm, "install", "--prefix", str(EXAMPLES / example), "--no-audit", "--no-fund"]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def unpack_newer() -> None:
    """Unpack the packages of the newer Debian into the cache, unless these are there; needs no root."""
    done, names = DEBIAN / "done", "\n".join((NEWER_SUITE, *NEWER))
    if done.exists() and done.read_text("utf-8") == names:
        return
    targets = ("indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian")
    mirror = _run("apt-get", *targets).partition("\n")[0]
    if not mirror:
        sys.stdout.write("no mirror of Debian is known here: Go and Rust are left out\n")
        return
    shutil.rmtree(DEBIAN, ignore_errors=True)
    apt, archives = _newer_apt(mirror), DEBIAN / "apt" / "cache" / "archives"
    simulated = _run(*apt, "install", "--simulate", "--no-install-recommends", *NEWER)
    found = re.findall(r"^Inst (\S+)", simulated, re.MULTILINE)
    wanted = [name for name in found if name in NEWER or _COME_ALONG.match(name)]
    sys.stdout.write(f"unpacking {len(wanted)} packages of {NEWER_SUITE}, 100 MB, into {DEBIAN}\n")
    sys.stdout.flush()
    _run(*apt, "download", *wanted, folder=str(archives))
    for package in archives.glob("*.deb"):
        _run("dpkg-deb", "--extract", str(package), str(DEBIAN))
    shutil.rmtree(DEBIAN / "apt")
    done.write_text(names, "utf-8")


def _newer_apt(mirror: str) -> list[str]:
    """Return apt-get with lists of the newer suite alone."""
    folder = DEBIAN / "apt"
    for each in ("lists/partial", "cache/archives/partial"):
        (folder / each).mkdir(parents=True)
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "sources").write_text(f"deb [signed-by={keys}] {mirror} {NEWER_SUITE} main\n", "utf-8")
    (folder / "status").touch()
    places = {"Etc::sourcelist": "sources", "State::lists": "lists", "State::status": "status", "Cache": "cache"}
    settings = [f'Dir::{name} "{folder / place}";' for name, place in places.items()]
    lines = [*settings, 'Dir::Etc::sourceparts "-";', 'APT::Sandbox::User "";', ""]
    (folder / "config").write_text("\n".join(lines), "utf-8")
    apt = ["apt-get", "--config-file", str(folder / "config"), "-q"]
    _run(*apt, "update")
    return apt


def _run(*command: str, folder: str | None = None) -> str:
    """Return what a command prints; it must end well."""
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
