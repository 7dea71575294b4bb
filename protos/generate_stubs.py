"""Regenerates the Python stubs of `ferrule.v1` beside their protos, or checks that they are up to date.

The generator's version is pinned (pyproject.toml, extra `dev`): the stubs refuse to load under an older grpcio and
protobuf than it, so it is the floor of every user.

    python protos/generate_stubs.py            writes the stubs
    python protos/generate_stubs.py --check    exits 1 with the names of the stubs that differ from a fresh run
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
PACKAGE = Path("ferrule", "v1")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def proto_files() -> list[str]:
    """The contract's files, relative to `protos/`, sorted."""
    return sorted(path.relative_to(PROTOS).as_posix() for path in (PROTOS / PACKAGE).glob("*.proto"))


def has_service(proto: str) -> bool:
    """Whether the file declares a service; the others get no `_pb2_grpc.py`."""
    return any(line.startswith("service ") for line in (PROTOS / proto).read_text("utf-8").splitlines())


def run_protoc(*arguments: str) -> None:
    """Runs the bundled protoc with the contract's include paths.

    Raises:
        RuntimeError: protoc refused the files; its own words went to stderr.
    """
    import grpc_tools
    from grpc_tools import protoc

    bundled = Path(grpc_tools.__file__).parent / "_proto"
    includes = [f"-I{PROTOS}", f"-I{PROTOS / 'third_party'}", f"-I{bundled}"]
    code = protoc.main(["protoc", *includes, *arguments])
    if code != 0:
        raise RuntimeError(f"protoc ended with code {code}")


def generate(out: Path) -> None:
    """Writes fresh stubs of all files under `out`, in the same folders as their protos."""
    files = proto_files()
    run_protoc(f"--python_out={out}", f"--pyi_out={out}", *files)
    run_protoc(f"--grpc_python_out={out}", *filter(has_service, files))


def stub_files(root: Path) -> dict[str, bytes]:
    """The stubs under `root`, by path relative to it."""
    found = (path for path in (root / PACKAGE).glob("*") if path.name.endswith(SUFFIXES))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def drifted() -> list[str]:
    """Names of stubs that are missing, left over or different from a fresh run, sorted."""
    with tempfile.TemporaryDirectory() as fresh_root:
        generate(Path(fresh_root))
        fresh = stub_files(Path(fresh_root))
    present = stub_files(PROTOS)
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def main() -> int:
    """Returns the exit code: 1 when `--check` finds drift, else 0."""
    parser = argparse.ArgumentParser(description="Regenerates the Python stubs of ferrule.v1.")
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 with the names of drifted stubs")
    if not parser.parse_args().check:
        generate(PROTOS)
        return 0
    names = drifted()
    for name in names:
        print(f"protos/{name} differs from its proto; run `python protos/generate_stubs.py`", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
