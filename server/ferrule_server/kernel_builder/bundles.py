"""Compile kernels, and write the bundles that servers load them from."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ferrule_server.executor.cuda.bundle import FORMAT, INDEX, kernel_key, source_hash
from ferrule_server.kernel_builder.compile import compile_ptx, cubins_of, toolkit, versions
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec

_EPOCH = (1980, 1, 1, 0, 0, 0)


def build_bundles(
    specs: Iterable[KernelSpec],
    paths: Mapping[str, Path],
    num_workers: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> None:
    """Compile kernels and write a bundle for each architecture, without those that do not fit it.

    Args:
        specs: Kernels.
        paths: Where the bundle of each architecture goes; the folders exist.
        num_workers: Processes that compile; None: one per core.
        on_progress: Called with the parts done and all parts: kernels, and then architectures.
        note: Called for each kernel that does not fit an architecture.

    Raises:
        KernelError: A kernel's source leaves the language.
        CompileError: The compiler is missing or refuses a kernel.
    """
    specs, done = list(specs), 0

    def one_more() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, len(specs) + len(paths))

    ptx = compile_ptx(specs, num_workers, one_more)
    for architecture, path in paths.items():
        made = cubins_of(ptx, architecture)
        for compiled, _ in made:
            if note is not None:
                for message in compiled.unfit():
                    note(f"{architecture} is without a kernel: {message}")
        write_bundle(path, architecture, {it.spec: cubin for it, cubin in made if not list(it.unfit())})
        one_more()


def write_bundle(
    path: Path,
    architecture: str,
    cubins: Mapping[KernelSpec, Cubin],
    cuda: tuple[int, int] | None = None,
    sources: str | None = None,
) -> None:
    """Write a bundle in place of what is at ``path``; the same kernels give the same bytes.

    Args:
        path: The file.
        architecture: Of all cubins.
        cubins: What it holds.
        cuda: Version of the toolkit; None: the one that is installed.
        sources: Hash of the kernels' sources; None: that of this checkout.
    """
    contents: dict[str, bytes] = {}
    kernels = {kernel_key(spec): list(filter(None, (it.code, it.late_code))) for spec, it in cubins.items()}
    index = {
        "format": FORMAT,
        "architecture": architecture,
        "toolkit": cuda or toolkit(),
        "versions": versions() if cuda is None else "",
        "sources": sources or source_hash(),
        "kernels": {key: [_digest(contents, code) for code in codes] for key, codes in kernels.items()},
    }
    write_zip(path, {INDEX: json.dumps(index, indent=1).encode(), **dict(sorted(contents.items()))})


def _digest(contents: dict[str, bytes], code: bytes) -> str:
    """Return the name of a member of a bundle, and add it to the contents."""
    name = hashlib.sha256(code).hexdigest()
    contents[name] = code
    return name


def write_zip(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a zip file whole, then put it in place."""
    written = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # servers that start together write apart
    with zipfile.ZipFile(written, "w") as file:
        for name, content in files.items():
            member = zipfile.ZipInfo(name, _EPOCH)
            member.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(member, content)
    written.replace(path)
