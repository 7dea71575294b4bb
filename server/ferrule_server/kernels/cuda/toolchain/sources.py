"""What a kernel's machine code is made from, as one hash: the text of the files, not syntax trees or bytecode.

Unparsed trees and bytecode differ between versions of Python; text does not. So a kernel that one machine compiled is
found by another that holds the same sources, whatever it runs under.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ferrule_server.kernels.cuda.spec import KernelSpec

__all__ = ["parameters", "source_files", "source_key"]

_PACKAGE = "ferrule_server.kernels.cuda"
_TOOLCHAIN = f"{_PACKAGE}.toolchain"
_COMPILER = f"{_TOOLCHAIN}.compile"
_FORMAT = 1


def source_key(spec: KernelSpec, architecture: str) -> str:
    """Return the hash that names a kernel: its sources, the compiler's, the architecture and the constants.

    What a spec only promises (shared memory, vector loads) is not part of it: the machine code does not depend on it.
    """
    described = {
        "format": _FORMAT,
        "kernel": f"{spec.kernel.__module__}.{spec.kernel.__qualname__}",
        "constants": spec.constants,
        "architecture": architecture,
        "num_threads": spec.num_threads,
        "ctas_per_sm": spec.ctas_per_sm,
        "sources": {name: _file_hash(path) for name, path in source_files(spec.kernel).items()},
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


def source_files(kernel: Callable[..., None]) -> dict[str, Path]:
    """Return the modules a kernel and its compiler are made of: theirs, and all of this package that these import."""
    path = inspect.getsourcefile(kernel)
    assert path is not None, kernel
    return {**_closure(_COMPILER, _path_of(_COMPILER)), **_closure(kernel.__module__, Path(path))}


def parameters(kernel: Callable[..., None]) -> tuple[tuple[str, str], ...]:
    """Return name and kind (``Address``, ``I32``, ``F32``) of a kernel's runtime parameters, in order."""
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    return tuple((name, kernel.__annotations__[name]) for name in names)


@cache
def _closure(module: str, path: Path) -> dict[str, Path]:
    found = {module: path}
    waiting = [path]
    while waiting:
        for name in _imports(waiting.pop()) - set(found):
            found[name] = _path_of(name)
            waiting.append(found[name])
    return found


def _imports(path: Path) -> set[str]:
    """Return the modules of this package that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            if node.module in {_PACKAGE, _TOOLCHAIN}:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in names if name.startswith(_PACKAGE + ".")}


def _path_of(module: str) -> Path:
    found = importlib.util.find_spec(module)
    assert found is not None, module
    assert found.origin is not None, module
    return Path(found.origin)


@cache
def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
