"""Kernel and constants become a cubin: numba writes PTX, ptxas assembles it. Needs no GPU and no driver.

numba is the compiler only: nothing of its launch path, its types for arrays or its device management is used.
"""

from __future__ import annotations

import gc
import importlib.metadata
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ferrule_server.kernels.cuda.intrinsics import INTRINSICS, Intrinsic
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import Constant, specialise

__all__ = ["ARCHITECTURES", "CompileError", "Cubin", "compile_kernel", "compile_spec", "tool", "toolkit"]

ARCHITECTURES: dict[str, tuple[Any, ...]] = {"sm_80": (8, 0), "sm_90a": (9, 0, "a")}
"""What kernels are built for, and how numba names it."""

_NEWEST = "sm_90a"
_SHARED_MEMORY = "ferrule_shared"
_PACKAGES = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-cuda-nvcc")


class CompileError(Exception):
    """A kernel could not be compiled or assembled; carries the tool's message."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled kernel.

    Attributes:
        name: Entry point.
        architecture: ``sm_80``, ``sm_90a``.
        code: The ELF image the driver loads.
        ptx: What it was assembled from.
        num_registers: Per thread.
        num_spilled_bytes: Spill stores and loads.
        num_stack_bytes: Local memory frame.
    """

    name: str
    architecture: str
    code: bytes
    ptx: str
    num_registers: int
    num_spilled_bytes: int
    num_stack_bytes: int


@cache
def toolkit() -> str:
    """Return the versions of everything that decides the machine code, as one line.

    Raises:
        CompileError: A package is missing; the message says how to install it.
    """
    try:
        return " ".join(f"{name}={importlib.metadata.version(name)}" for name in _PACKAGES)
    except importlib.metadata.PackageNotFoundError as error:
        raise CompileError(
            f"the compiler of GPU kernels is not installed ({error}); pip install 'ferrule[cuda]'"
        ) from error


def compile_kernel(
    kernel: Callable[..., None],
    constants: Mapping[str, Constant],
    *,
    architecture: str,
    num_threads: int,
    ctas_per_sm: int = 1,
) -> Cubin:
    """Compile one kernel for one set of constants.

    Args:
        kernel: A function in the language of :mod:`ferrule_server.kernels.cuda.specialise`.
        constants: Its keyword-only parameters.
        architecture: A key of :data:`ARCHITECTURES`.
        num_threads: Threads per CTA it will be launched with.
        ctas_per_sm: How many CTAs must fit a multiprocessor at a time: bounds the registers.

    Raises:
        KernelError: The source leaves the language.
        CompileError: The toolkit is missing or refuses the code.
    """
    if architecture not in ARCHITECTURES:
        raise CompileError(f"no kernels for {architecture!r}; there are some for {', '.join(ARCHITECTURES)}")
    bounds = (num_threads, ctas_per_sm)
    ptx = _retarget(_write_ptx(kernel, tuple(sorted(constants.items())), bounds), architecture)
    return _assemble(ptx, kernel.__name__, architecture)


def compile_spec(spec: KernelSpec, architecture: str) -> Cubin:
    """Compile what a spec says, with registers for at most half a multiprocessor: the next kernel starts beside it."""
    return compile_kernel(
        spec.kernel,
        dict(spec.constants),
        architecture=architecture,
        num_threads=spec.num_threads,
        ctas_per_sm=2 * spec.ctas_per_sm,
    )


@lru_cache(maxsize=8)
def _write_ptx(
    kernel: Callable[..., None], constants: tuple[tuple[str, Constant], ...], bounds: tuple[int, int]
) -> str:
    """Return the PTX of a kernel for the newest architecture; nearly all the time of a compilation is spent here.

    numba's garbage is large and short-lived: collecting it while it grows costs a tenth of the time.
    """
    toolkit()
    from numba import cuda, types

    kinds = {"Address": types.int64, "I32": types.int32, "F32": types.float32}
    made = specialise(kernel, dict(constants))
    signature = tuple(kinds[kind] for _, kind in made.parameters)
    with _without_collections(), _without_needless_passes():
        try:
            ptx, _ = cuda.compile_ptx(
                made.function(_device_names()),
                signature,
                cc=ARCHITECTURES[_NEWEST],
                fastmath=True,
                launch_bounds=bounds,
            )
        except Exception as error:  # numba says what it cannot type with many classes, TypeError among them
            raise CompileError(f"numba refuses {kernel.__name__} with {dict(constants)}: {error}") from error
    entry = re.search(r"\.entry\s+([\w$]+)", ptx)
    if entry is None:
        raise CompileError(f"{kernel.__name__}: no entry point in the PTX")
    text: str = ptx.replace(entry.group(1), kernel.__name__)
    # numba's own bookkeeping, unused here; its name counts what the process has compiled before.
    return re.sub(r"^\.common .*NumbaEnv.*\n", "", text, flags=re.MULTILINE)


@contextmanager
def _without_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_NEEDLESS_PASSES = frozenset(
    {
        "DeadBranchPrune",
        "InlineClosureLikes",
        "InlineOverloads",
        "NopythonRewrites",
        "PreLowerStripPhis",
        "ReconstructSSA",
    }
)
"""Passes of numba that take half of its time and change nothing that matters in the machine code: a kernel has no
closures, overloads or array expressions, constant branches are gone already, and LLVM finds the SSA form by itself."""


@contextmanager
def _without_needless_passes() -> Iterator[None]:
    from numba.cuda import compiler

    define = compiler.CUDACompiler.define_pipelines

    def define_shorter(self: Any) -> Any:
        managers = define(self)
        for manager in managers:
            manager.passes = [(it, why) for it, why in manager.passes if it.__name__ not in _NEEDLESS_PASSES]
        return managers

    compiler.CUDACompiler.define_pipelines = define_shorter
    try:
        yield
    finally:
        compiler.CUDACompiler.define_pipelines = define


def _retarget(ptx: str, architecture: str) -> str:
    """Return PTX of the newest architecture for another one, without the instructions it does not have.

    Nothing else of it depends on the architecture: the layer-2 tests assemble and check every kernel for each.
    """
    number = _compute_capability(architecture)
    for intrinsic in INTRINSICS.values():
        if intrinsic.since > number:
            ptx = re.sub(rf"^\s*{re.escape(intrinsic.ptx)}\n", "", ptx, flags=re.MULTILINE)
    return ptx.replace(f".target {_NEWEST}", f".target {architecture}")


def _compute_capability(architecture: str) -> int:
    major, minor, *_ = ARCHITECTURES[architecture]
    return int(10 * major + minor)


def _assemble(ptx: str, name: str, architecture: str) -> Cubin:
    with tempfile.TemporaryDirectory(prefix="ferrule-") as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [str(tool("ptxas")), "-v", "-O3", f"-arch={architecture}", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise CompileError(f"ptxas refuses {name} for {architecture}:\n{done.stderr}")
        return Cubin(name, architecture, target.read_bytes(), ptx, *_resources(done.stderr))


def _resources(report: str) -> tuple[int, int, int]:
    registers = re.search(r"Used (\d+) registers", report)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert registers, report
    assert frame, report
    return int(registers[1]), int(frame[2]) + int(frame[3]), int(frame[1])


def tool(name: str) -> Path:
    """Return the path of a tool of the CUDA packages (``ptxas``, ``nvdisasm``).

    Raises:
        CompileError: It is not installed.
    """
    path = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin", name)
    if not path.exists():
        raise CompileError(f"{name} is not installed; pip install 'ferrule[cuda]'")
    return path


@cache
def _device_names() -> dict[str, object]:
    """Return what a kernel's names mean to numba; made once, because numba keeps what it has seen of each."""
    from numba.core import types

    names: dict[str, object] = {name: _numba_intrinsic(declared) for name, declared in INTRINSICS.items()}
    names.update(f32=types.float32, i32=types.int32, u32=_numba_u32())
    return names


def _numba_u32() -> object:
    """Return a cast that keeps the lower 32 bits as a positive 64-bit integer: numba mixes no signs that way."""
    from llvmlite import ir
    from numba.core import types
    from numba.cuda.extending import intrinsic

    def typed(context: Any, value: Any) -> Any:  # noqa: ARG001
        def build(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            wide = target.cast(builder, arguments[0], signature.args[0], types.int64)
            return builder.zext(builder.trunc(wide, ir.IntType(32)), ir.IntType(64))

        return types.int64(value), build

    return intrinsic(typed)


def _numba_intrinsic(declared: Intrinsic) -> object:
    """Return the numba intrinsic of a declaration; integers are int64 on the outside, registers inside."""
    from numba.core import types
    from numba.cuda.extending import intrinsic

    tuple_of: Any = getattr(types, "UniTuple")  # noqa: B009  (numba fills this module at run time)
    outer = {"r": types.int64, "i": types.int64, "l": types.int64, "f": types.float32}
    results = [outer[kind] for kind in declared.results]
    returned = types.void if not results else results[0] if len(results) == 1 else tuple_of(results[0], len(results))

    def typed(context: Any, *arguments: Any) -> Any:  # noqa: ARG001
        if len(arguments) != len(declared.arguments):
            return None
        return returned(*arguments), _code_generator(declared)

    names = ", ".join(f"a{i}" for i in range(len(declared.arguments)))
    scope: dict[str, Any] = {"typed": typed}
    exec(f"def {declared.name}(context, {names}):\n    return typed(context, {names})", scope)  # noqa: S102
    return intrinsic(scope[declared.name])


def _code_generator(declared: Intrinsic) -> Callable[..., Any]:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda import cgutils

    word, wide, single = ir.IntType(32), ir.IntType(64), ir.FloatType()
    register = {"r": word, "i": word, "l": wide, "f": single, "s": word}
    constraint = {"r": "r", "i": "r", "l": "l", "f": "f", "s": "r"}
    flat = [kind for argument in declared.arguments for kind in argument]
    constraints = [f"={constraint[kind]}" for kind in declared.results] + [constraint[kind] for kind in flat]
    if not declared.is_pure:
        constraints.append("~{memory}")
    outputs = [register[kind] for kind in declared.results]
    output = ir.VoidType() if not outputs else outputs[0] if len(outputs) == 1 else ir.LiteralStructType(outputs)

    def narrow(context: Any, builder: Any, value: Any, numba_type: Any, kind: str) -> Any:
        if kind == "f":
            return context.cast(builder, value, numba_type, types.float32)
        value = context.cast(builder, value, numba_type, types.int64)
        if kind == "l":
            return value
        value = builder.trunc(value, word)
        return builder.add(value, _shared_base(builder, word)) if kind == "s" else value

    def widen(builder: Any, value: Any, kind: str) -> Any:
        return builder.zext(value, wide) if kind == "r" else builder.sext(value, wide) if kind == "i" else value

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scalars = []
        for value, numba_type, kinds in zip(arguments, signature.args, declared.arguments, strict=True):
            if len(kinds) == 1:
                scalars.append(narrow(context, builder, value, numba_type, kinds[0]))
                continue
            for index, kind in enumerate(kinds):
                part = builder.extract_value(value, index)
                scalars.append(narrow(context, builder, part, numba_type.types[index], kind))
        code = ir.InlineAsm(
            ir.FunctionType(output, [register[kind] for kind in flat]),
            declared.ptx,
            ",".join(constraints),
            side_effect=not declared.is_pure,
        )
        # Convergent: never copied into the branches of a condition, or the threads of a warp would meet in two places.
        result = builder.call(code, scalars, attrs=() if declared.is_pure else ("convergent",))
        if not outputs:
            return context.get_dummy_value()
        if len(outputs) == 1:
            return widen(builder, result, declared.results[0])
        parts = [widen(builder, builder.extract_value(result, i), kind) for i, kind in enumerate(declared.results)]
        return cgutils.pack_array(builder, parts)

    return build


def _shared_base(builder: Any, word: Any) -> Any:
    """Return where the CTA's dynamic shared memory starts in the shared window, a constant of the kernel."""
    from llvmlite import ir

    module = builder.module
    symbol = module.globals.get(_SHARED_MEMORY)
    if symbol is None:
        symbol = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), _SHARED_MEMORY, addrspace=3)
        symbol.linkage, symbol.align = "external", 16
    return builder.ptrtoint(symbol, word)
