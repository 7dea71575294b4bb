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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numba
from numba import cfunc, types
from numba.core import config

from ferrule_server.kernels.cpu.attention import attend, merge
from ferrule_server.kernels.cpu.choice import choose
from ferrule_server.kernels.cpu.linear import linear
from ferrule_server.kernels.cpu.pack import pack
from ferrule_server.kernels.cpu.plan import MatrixKind, Plan, PlanType
from ferrule_server.kernels.cpu.step import work

_log = logging.getLogger(__name__)

_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (a folder of its own is made there)
_SOURCES: Final = Path(__file__).parent
_WORK: Final = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
_PACK: Final = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 6)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The machine code of a plan.

    Attributes:
        work: Called with (null, address of THREAD); releases the GIL.
        pack: Called with null and what ``pack.pack`` takes; releases the GIL.
        linear: Address for each kind of matrix, for stages.
        attention: Addresses of ``attend`` and ``merge`` for each width of heads, for stages.
        choose: Address, for the last stage.
    """

    work: Callable[[None, int], int]
    pack: Callable[[None, int, int, int, int, int, int], int]
    linear: Mapping[MatrixKind, int]
    attention: Mapping[int, tuple[int, int]]
    choose: int
    owners: tuple[Any, ...]


def compile_kernels(
    plan: Plan, cache: Path | None, on_progress: Callable[[int, int, int], None], head_dims: Iterable[int] = ()
) -> Kernels:
    """Return the kernels of a plan; the first time this takes some seconds.

    Args:
        plan: How to compile them.
        cache: Folder in which machine code is kept; None: it is not kept.
        on_progress: Called with (kernels done, kernels in all, kernels that were compiled and not found in the cache).
        head_dims: Widths of heads beside that of the plan.
    """
    if cache is not None:
        config.CACHE_DIR = str(cache / _VERSION)
    general = PlanType(replace(plan, head_dim=0))
    wanted = [
        (linear, types.int64(general, types.int64, types.int64)),
        (choose, types.int64(general, types.int64, types.int64)),
        (work, types.int64(general, types.int64)),
        (pack, types.int64(general, *[types.int64] * 6)),
    ]
    widths = sorted({plan.head_dim, *head_dims})
    for width in widths:
        attention = PlanType(_attention_plan(plan, width))
        wanted += [(kernel, types.int64(attention, types.int64, types.int64)) for kernel in (attend, merge)]
    compiled: list[Any] = []
    num_new = 0
    for kernel, signature in wanted:
        on_progress(len(compiled), len(wanted), num_new)
        compiled.append(cfunc(signature, cache=cache is not None)(kernel.py_func))  # type: ignore[attr-defined]
        num_new += compiled[-1].cache_hits == 0
    on_progress(len(compiled), len(wanted), num_new)
    linear_code, choose_code, work_code, pack_code, *attention_code = (each.address for each in compiled)
    pairs = zip(attention_code[::2], attention_code[1::2], strict=True)
    by_width = dict(zip(widths, pairs, strict=True))
    kinds = {plan.kind: linear_code}
    return Kernels(_WORK(work_code), _PACK(pack_code), kinds, by_width, choose_code, tuple(compiled))


def _attention_plan(plan: Plan, head_dim: int) -> Plan:
    """Return the plan of attention with heads of a width; it is the same for all quantised weights."""
    changes = {"weights": "int8", "has_int8_inputs": False} if plan.is_quantised else {}
    return replace(plan, head_dim=head_dim, **changes)  # type: ignore[arg-type]


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
