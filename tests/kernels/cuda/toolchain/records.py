"""The record of checked kernels, in ``kernels.json``: from what each was made, and the hash of its PTX.

A kernel whose sources, promises, rules and compiler are those of the record has been compiled and checked before, with
the same result. ``make test`` compiles one of each kind and what differs from the record; ``make test-kernels``
compiles all. A change that alters a kernel's PTX has to alter the record as well, so it cannot pass unnoticed::

    python -m tests.kernels.cuda.toolchain.records

compiles every kernel, checks every rule for every architecture, and writes the record and the table of
``tools/kernels/machine_code.md``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from ferrule_server.kernel_builder import compile as compiler
from ferrule_server.kernel_builder.compile import (
    ARCHITECTURES,
    assemble_all,
    compile_ptx,
    has_dependent_launch,
    toolkit,
)
from ferrule_server.kernels.cuda import attention
from ferrule_server.kernels.cuda.catalog import kernels_of, merged
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec
from tools.kernels import machine_code
from tools.kernels.machine_code import Made, take_apart
from tools.kernels.report import SHOWN, table, written_into

PATH = Path(__file__).with_name("kernels.json")
PAGE = Path(__file__).resolve().parents[4] / "tools" / "kernels" / "machine_code.md"
PACKAGE = "ferrule_server.kernels.cuda"
COMPILER = Path(compiler.__file__)
RULES = [Path(machine_code.__file__).with_name(name) for name in ("addressing.py", "machine_code.py", "sass.py")]
VARIANTS = [(name, early) for name in ARCHITECTURES for early in (True, False) if early or has_dependent_launch(name)]
"""What is assembled of each kernel: architecture, and whether it starts early."""
SOME_VARIANTS = [("sm_80", True), ("sm_90a", True), ("sm_90a", False), ("sm_120", True)]
"""What ``make test`` checks of them."""


@dataclass(frozen=True, slots=True)
class Record:
    """What was checked, by name of the spec.

    Attributes:
        versions: Of Python and the compiler; with others nothing counts as checked.
        made_from: Hash of everything that decides whether a kernel keeps the rules.
        ptx: Hash of the PTX.
    """

    versions: str
    made_from: dict[str, str]
    ptx: dict[str, str]

    def has_checked(self, spec: KernelSpec) -> bool:
        """Return whether compiling and checking a kernel would give what it gave when the record was made."""
        return self.versions == versions() and self.made_from.get(spec.name) == made_from(spec)


def read() -> Record:
    """Return the committed record."""
    return Record(**json.loads(PATH.read_text()))


def to_compile(specs: Sequence[KernelSpec], record: Record) -> list[KernelSpec]:
    """Return what the record does not answer for, and the first spec of each kernel so that the record is tested."""
    first = {spec.kernel: spec for spec in reversed(specs)}
    return [spec for spec in specs if spec is first[spec.kernel] or not record.has_checked(spec)]


def shipped_kernels() -> list[KernelSpec]:
    """Return the kernels of all :data:`~ferrule_server.kernels.cuda.spec.MODEL_SHAPES`, each once."""
    return merged(spec for shape in MODEL_SHAPES.values() for spec in kernels_of(shape))


def all_specs() -> list[KernelSpec]:
    """Return every kernel that is checked: those that ship, then those of other block sizes."""
    return [*shipped_kernels(), *other_blocks()]


def other_blocks() -> list[KernelSpec]:
    """Return the kernel that depends on the block size, for sizes other than the default."""
    shapes = (MODEL_SHAPES["Qwen3-0.6B"], MODEL_SHAPES["Llama-3.2-1B"])
    return [attention.spec(shape, BLOCK_SIZE=block_size) for block_size in (32, 64) for shape in shapes]


def versions() -> str:
    """Return the versions that decide the PTX besides the sources."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"python={python} {compiler.versions()}"


def made_from(spec: KernelSpec) -> str:
    """Return the hash of all that decides a kernel's PTX, of what its spec promises, and of the rules."""
    promises = {each.name: getattr(spec, each.name) for each in fields(spec) if each.name != "kernel"}
    return _hash([ptx_key(spec), toolkit(), promises, [_text(path) for path in RULES]])


def ptx_key(spec: KernelSpec) -> str:
    """Return the hash of all that decides a kernel's PTX: its sources, constants and bounds, and the compiler."""
    path = inspect.getsourcefile(spec.kernel)
    assert path is not None, spec
    sources = [_text(file) for file in (*sorted(closure(Path(path))), COMPILER)]
    return _hash([spec.name, spec.num_threads, spec.ctas_per_sm, versions(), sources])


def _hash(described: object) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


@cache
def closure(path: Path) -> frozenset[Path]:
    """Return a file of kernels and all of their package that it imports, wherever in it."""
    found, waiting = {path}, [path]
    while waiting:
        added = {_path_of(name) for name in _imports(waiting.pop())} - found
        found |= added
        waiting += added
    return frozenset(found)


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(_text(path))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == PACKAGE)
            names.add(node.module)
    return {name for name in names if name.startswith(f"{PACKAGE}.")}


@cache
def _path_of(module: str) -> Path:
    found = importlib.util.find_spec(module)
    assert found is not None, module
    assert found.origin is not None, module
    return Path(found.origin)


@cache
def _text(path: Path) -> str:
    return path.read_text()


def written(specs: Iterable[KernelSpec], folder: Path | None = None) -> dict[KernelSpec, str]:
    """Return the PTX of kernels.

    Args:
        specs: Each once.
        folder: Where PTX is found again the next time.
    """
    specs = list(specs)
    files = {} if folder is None else {spec: folder / ptx_key(spec) for spec in specs}
    known = {spec: file.read_text() for spec, file in files.items() if file.exists()}
    new = compile_ptx([spec for spec in specs if spec not in known])
    for spec, file in files.items():
        if spec in new:
            file.with_suffix(f".{os.getpid()}").write_text(new[spec])
            file.with_suffix(f".{os.getpid()}").replace(file)
    return {spec: known.get(spec) or new[spec] for spec in specs}


def assembled(ptx: Mapping[KernelSpec, str], variants: Sequence[tuple[str, bool]] = VARIANTS) -> list[Made]:
    """Return kernels as they are shipped, taken apart, spec by spec."""
    return take_apart(assemble_all([(spec, text, *variant) for spec, text in ptx.items() for variant in variants]))


def ptx_hashes(ptx: Mapping[KernelSpec, str]) -> dict[str, str]:
    """Return the hash of the PTX of each kernel, by name of its spec."""
    return {spec.name: hashlib.sha256(text.encode()).hexdigest() for spec, text in ptx.items()}


def shown(made: Iterable[Made]) -> str:
    """Return the table of the page: of kernels that ship, as they are written."""
    others = other_blocks()
    early = (it for it in made if it.compiled.starts_early and it.compiled.spec not in others)
    return table(it for it in early if it.compiled.architecture in SHOWN)


def main() -> None:
    """Compile and check every kernel; write the record and the table."""
    specs = all_specs()
    ptx = written(specs)
    made = assembled(ptx)
    if breaches := [line for it in made for line in it.lines()]:
        sys.exit("\n".join(breaches))
    record = {
        "versions": versions(),
        "made_from": {spec.name: made_from(spec) for spec in specs},
        "ptx": ptx_hashes(ptx),
    }
    PATH.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(written_into(PAGE.read_text(), shown(made)))


if __name__ == "__main__":
    main()
