"""The record of checked kernels, in ``kernels.json``: from what each was made, and the hash of its PTX.

A kernel whose sources, promises, rules and compiler are those of the record has been compiled and checked before, with
the same result. ``make test`` compiles one of each kind and what differs from the record; ``make test-kernels``
compiles all. A change that alters a kernel's PTX has to alter the record as well, so it cannot pass unnoticed::

    python -m tests.kernels.cuda.toolchain.records

compiles every kernel, checks every rule and writes the record.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ferrule_server.kernels.cuda import attention
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec
from ferrule_server.kernels.cuda.toolchain import addressing, machine_code, sass
from ferrule_server.kernels.cuda.toolchain.catalog import shipped_kernels
from ferrule_server.kernels.cuda.toolchain.compile import ARCHITECTURES, toolkit
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache, default_folder
from ferrule_server.kernels.cuda.toolchain.machine_code import Made, make_all
from ferrule_server.kernels.cuda.toolchain.progress import progress_bar
from ferrule_server.kernels.cuda.toolchain.sources import source_key

PATH = Path(__file__).with_name("kernels.json")
NEWEST = max(ARCHITECTURES)
"""The architecture that PTX is written for; that of the others is derived from it."""


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


def all_specs() -> list[KernelSpec]:
    """Return every kernel that is checked: those that ship, then those of other block sizes."""
    return [*shipped_kernels(), *other_blocks()]


def other_blocks() -> list[KernelSpec]:
    """Return the kernel that depends on the block size, for sizes other than the default."""
    shapes = (MODEL_SHAPES["Qwen3-0.6B"], MODEL_SHAPES["Llama-3.2-1B"])
    return [attention.spec(shape, BLOCK_SIZE=block_size) for block_size in (32, 64) for shape in shapes]


def versions() -> str:
    """Return the versions that decide the PTX besides the sources."""
    return f"python={'.'.join(platform.python_version_tuple()[:2])} {toolkit()}"


def made_from(spec: KernelSpec) -> str:
    """Return the hash of a kernel's sources, of what its spec promises, and of the rules."""
    promises = {each.name: getattr(spec, each.name) for each in fields(spec) if each.name != "kernel"}
    rules = [Path(module.__file__ or "").read_text() for module in (addressing, machine_code, sass)]
    described = json.dumps([source_key(spec, NEWEST), promises, rules], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def ptx_hashes(made: Sequence[Made]) -> dict[str, str]:
    """Return the hash of the PTX of each kernel, by name of its spec."""
    return {
        it.spec.name: hashlib.sha256(it.cubin.ptx.encode()).hexdigest()
        for it in made
        if it.cubin.architecture == NEWEST
    }


def main() -> None:
    """Compile and check every kernel, and write the record."""
    specs = all_specs()
    with progress_bar() as show:
        made = make_all(specs, cache=CubinCache(default_folder()), progress=show)
    if breaches := [str(breach) for it in made for breach in it.breaches()]:
        sys.exit("\n".join(breaches))
    record = {
        "versions": versions(),
        "made_from": {spec.name: made_from(spec) for spec in specs},
        "ptx": ptx_hashes(made),
    }
    PATH.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
