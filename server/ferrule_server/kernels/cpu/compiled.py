"""Compile the kernels of a plan to machine code, each by itself, and keep it for the next start.

A kernel that calls another one through its address is compiled in a fraction of the time, and its machine code does not
depend on how LLVM inlines the other. Numba keeps the machine code on disk, in a folder for each version of these
sources: Numba itself would miss a change in a file other than the kernel's own.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numba
from numba import cfunc, types
from numba.core import config

from ferrule_server.kernels.cpu.activations import look_up
from ferrule_server.kernels.cpu.attention import attend, merge
from ferrule_server.kernels.cpu.choice import choose
from ferrule_server.kernels.cpu.linear import linear
from ferrule_server.kernels.cpu.multiply import multiply
from ferrule_server.kernels.cpu.pack import pack
from ferrule_server.kernels.cpu.plan import Plan, PlanType
from ferrule_server.kernels.cpu.step import work
from ferrule_server.kernels.matrix_kinds import INT8, MatrixKind

_log = logging.getLogger(__name__)

_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (a folder of its own is made there)
_SOURCES: Final = Path(__file__).parent
_WORK: Final = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
_PACK: Final = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 6)


_ANY_PLAN: Final = Plan("fma", is_emulated=False, is_bfloat16=False, head_dim=0)
"""For kernels that do not depend on it."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The machine code of a plan.

    Attributes:
        plan: How a model is run; each kernel is compiled for what it reads of it.
        work: Called with (null, address of THREAD); releases the GIL.
        pack: For each kind that floats are packed in: called with null and what ``pack.pack`` takes; releases the GIL.
        linear: Address, for stages.
        multiply: Address for each kind of matrix, for stages.
        look_up: Address for each kind of packed embedding.
        attention: Addresses of ``attend`` and ``merge`` for each width of heads, for stages.
        choose: Address, for the last stage.
    """

    plan: Plan
    work: Callable[[None, int], int]
    pack: Mapping[MatrixKind, Callable[..., int]]
    linear: int
    multiply: Mapping[MatrixKind, int]
    look_up: Mapping[MatrixKind, int]
    attention: Mapping[int, tuple[int, int]]
    choose: int
    owners: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which kernels a model needs.

    Attributes:
        kinds: Of its matrices.
        packed: Those that floats are packed in.
        looked_up: Of its packed embeddings.
        head_dims: Widths of its heads.
    """

    kinds: Collection[MatrixKind]
    packed: Collection[MatrixKind]
    looked_up: Collection[MatrixKind]
    head_dims: Collection[int]


def compile_kernels(
    plan: Plan, cache: Path | None, on_progress: Callable[[int, int, int], None], wanted: Wanted
) -> Kernels:
    """Return the kernels of a plan; the first time this takes some seconds.

    Args:
        plan: How to compile them.
        cache: Folder in which machine code is kept; None: it is not kept.
        on_progress: Called with (kernels done, kernels in all, kernels that were compiled and not found in the cache).
        wanted: Which of them.
    """
    if cache is not None:
        config.CACHE_DIR = str(cache / _VERSION)
    general = replace(plan, head_dim=0)
    shared = _shared_plan(plan)
    jobs = [
        *((multiply, general.of(kind), 8) for kind in wanted.kinds),
        *((pack, general.of(kind), 6) for kind in wanted.packed),
        *((look_up, general.of(kind), 4) for kind in wanted.looked_up),
        *((each, _shared_plan(plan, width), 2) for width in wanted.head_dims for each in (attend, merge)),
        (linear, shared, 2),
        (choose, _ANY_PLAN, 2),
        (work, shared, 1),
    ]
    compiled: list[Any] = []
    num_new = 0
    for kernel, own, num_arguments in jobs:
        on_progress(len(compiled), len(jobs), num_new)
        signature = types.int64(PlanType(own), *[types.int64] * num_arguments)
        compiled.append(cfunc(signature, cache=cache is not None)(kernel.py_func))  # type: ignore[attr-defined]
        num_new += compiled[-1].cache_hits == 0
    on_progress(len(compiled), len(jobs), num_new)
    codes = iter(each.address for each in compiled)
    return Kernels(
        plan=plan, owners=tuple(compiled),
        multiply={kind: next(codes) for kind in wanted.kinds},
        pack={kind: _PACK(next(codes)) for kind in wanted.packed},
        look_up={kind: next(codes) for kind in wanted.looked_up},
        attention={width: (next(codes), next(codes)) for width in wanted.head_dims},
        linear=next(codes), choose=next(codes), work=_WORK(next(codes)),
    )  # fmt: skip


def _shared_plan(plan: Plan, head_dim: int = 0) -> Plan:
    """Return the plan of what does not read matrices; it is the same for all quantised ones."""
    plan = replace(plan, packed=INT8, has_int8_inputs=False) if plan.is_quantised else plan
    return replace(plan, head_dim=head_dim)


def usable_cache(folder: Path | None) -> Path | None:
    """Return a folder for machine code that can be written, by default in the user's cache.

    If that is read-only, as a home or an image may be, what it holds is copied into memory (or where the system keeps
    temporary files), and what it lacks is compiled there: another processor than that of the image needs other code.

    Returns:
        None: there is no folder to write to; kernels are compiled at every start.
    """
    parent = folder or Path("~/.cache/ferrule")
    try:
        parent = parent.expanduser()
        (parent / "cpu").mkdir(parents=True, exist_ok=True)
        if os.access(parent / "cpu", os.W_OK | os.X_OK):
            return parent / "cpu"
    except (OSError, RuntimeError) as error:
        _log.debug("event=kernel_cache folder=%s error=%r", parent, error)
    for place in (_MEMORY, Path(tempfile.gettempdir())):
        if copied := _copied(parent / "cpu", place):
            _log.warning("event=kernels_not_kept folder=%s: what is compiled now is lost; see --kernel-cache", parent)
            return copied
    _log.warning("event=kernels_not_kept folder=%s: kernels are compiled at every start; see --kernel-cache", parent)
    return None


def _copied(kept: Path, place: Path) -> Path | None:
    """Return a new folder of this process alone, with the machine code of a folder; None: it cannot be written."""
    try:
        copied = Path(tempfile.mkdtemp(prefix="ferrule-kernels-", dir=place))
    except OSError:
        return None
    atexit.register(shutil.rmtree, copied, ignore_errors=True)
    try:
        if (kept / _VERSION).is_dir():
            shutil.copytree(kept / _VERSION, copied / _VERSION)
    except (OSError, shutil.Error) as error:
        _log.debug("event=kernel_cache folder=%s error=%r", kept, error)
    return copied


def _version() -> str:
    """Return a name for this version of the kernels and of the compiler."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(_SOURCES.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


_VERSION: Final = _version()
"""That of the sources as they were imported: they may change on disk while this process runs."""
