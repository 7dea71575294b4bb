"""Kernel and constants become a cubin: numba writes PTX, ptxas assembles it. Needs no GPU and no driver.

numba is the compiler only: nothing of its launch path, its types for arrays or its device management is used. It runs
once for each kernel, which takes a second or more; every architecture is assembled from the same PTX, in some 50 ms.
"""

from __future__ import annotations

import gc
import importlib.metadata
import multiprocessing
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ferrule_server.kernels.cuda.intrinsics import INTRINSICS, Intrinsic
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec
from ferrule_server.kernels.cuda.specialise import specialise


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """The resources of one multiprocessor.

    Source: NVIDIA, "CUDA C++ Programming Guide", technical specifications per compute capability; for the pieces in
    which registers are given out, the occupancy calculator of Nsight Compute.

    Attributes:
        shared_bytes: Shared memory of all its CTAs together; the system takes 1 KiB of each, so one may have that less.
        num_threads: Resident at a time.
        num_ctas: Resident at a time, however small.
    """

    shared_bytes: int
    num_threads: int
    num_ctas: int

    @property
    def max_shared_bytes_per_cta(self) -> int:
        """Most dynamic shared memory of one CTA."""
        return self.shared_bytes - 1024

    def ctas(self, num_threads: int, num_registers: int, shared_bytes: int) -> int:
        """Return how many CTAs fit together.

        Args:
            num_threads: Per CTA.
            num_registers: Per thread.
            shared_bytes: Dynamic shared memory per CTA.
        """
        warps = -(-num_threads // 32)
        registers_of_warp = -(-num_registers * 32 // 256) * 256
        warps_by_registers = 65536 // registers_of_warp // 4 * 4
        by_shared = self.shared_bytes // (-(-(shared_bytes + 1024) // 128) * 128)
        return min(warps_by_registers // warps, by_shared, self.num_threads // (32 * warps), self.num_ctas)


ARCHITECTURES: dict[str, Multiprocessor] = {
    "sm_80": Multiprocessor(164 << 10, 2048, 32),
    "sm_86": Multiprocessor(100 << 10, 1536, 16),
    "sm_89": Multiprocessor(100 << 10, 1536, 24),
    "sm_90a": Multiprocessor(228 << 10, 2048, 32),
    "sm_100": Multiprocessor(228 << 10, 2048, 32),
    "sm_120": Multiprocessor(100 << 10, 1536, 24),
}
"""What kernels are built for. A cubin also runs on a higher minor version, but for ``sm_90a``."""

_WRITTEN_FOR = "sm_90a"
_PTX_VERSION = "8.7"
"""Of the PTX that ptxas reads: the lowest with ``sm_120``. NVVM 13 writes 9.0, which ptxas of CUDA 12 refuses."""
_SHARED_MEMORY = "ferrule_shared"
_COMPILER = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm")
_INSTALL = "pip install 'ferrule-server[cuda]'"
_SIZES = {"Address": "64", "I32": "32", "F32": "32"}


class CompileError(Exception):
    """A kernel could not be compiled or assembled, or does not fit; carries the tool's message."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        spec: What was compiled.
        architecture: A key of :data:`ARCHITECTURES`.
        starts_early: Lets the next kernel start as soon as it has started itself.
        cubin: For the driver.
        ptx: What it was assembled from.
        num_registers: Per thread.
        num_spilled_bytes: Spill stores and loads.
        num_stack_bytes: Local memory frame.
    """

    spec: KernelSpec
    architecture: str
    starts_early: bool
    cubin: Cubin
    ptx: str
    num_registers: int
    num_spilled_bytes: int
    num_stack_bytes: int

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that fit one multiprocessor."""
        whole = ARCHITECTURES[self.architecture]
        return whole.ctas(self.spec.num_threads, self.num_registers, self.spec.shared_bytes)

    def unfit(self, times: int = 1) -> Iterator[str]:
        """Yield what does not fit a multiprocessor: nothing, if the CTAs do that are planned for it, so many times."""
        spec, whole = self.spec, ARCHITECTURES[self.architecture]
        subject = f"{spec.name} for {self.architecture}"
        if spec.num_threads % 32:
            yield f"{subject}: {spec.num_threads} threads are not whole warps"
        if spec.shared_bytes > whole.max_shared_bytes_per_cta:
            yield f"{subject}: {spec.shared_bytes} bytes of shared memory, a CTA has {whole.max_shared_bytes_per_cta}"
            return
        needed = times * spec.ctas_on(whole.shared_bytes)
        if self.ctas_per_sm < needed:
            yield (
                f"{subject}: {self.ctas_per_sm} CTAs of {spec.num_threads} threads, {self.num_registers} registers and "
                f"{spec.shared_bytes} bytes of shared memory fit a multiprocessor, {needed} must"
            )


def has_dependent_launch(architecture: str) -> bool:
    """Return whether kernels may start while the one before them runs: from compute capability 9.0 on."""
    return capability_of(architecture) >= (9, 0)


def has_room_for_two(architecture: str) -> bool:
    """Return whether the CTAs of a kernel and of its successor are planned to live side by side."""
    return has_dependent_launch(architecture) and ARCHITECTURES[architecture].shared_bytes >= 228 << 10


def versions() -> str:
    """Return the versions of everything that decides the PTX, as one line.

    Raises:
        CompileError: A package is missing; the message says how to install it.
    """
    try:
        return " ".join(f"{name}={importlib.metadata.version(name)}" for name in _COMPILER)
    except importlib.metadata.PackageNotFoundError as error:
        raise CompileError(f"the compiler of GPU kernels is not installed ({error}); {_INSTALL}") from error


@cache
def toolkit() -> tuple[int, int]:
    """Return the version of CUDA that ptxas is of.

    Raises:
        CompileError: It is not installed.
    """
    said = subprocess.run([str(tool("ptxas")), "--version"], capture_output=True, text=True, check=True)
    major, minor = re.search(r"release (\d+)\.(\d+)", said.stdout).groups()  # type: ignore[union-attr]
    return int(major), int(minor)


def tool(name: str) -> Path:
    """Return the path of a tool of the CUDA packages (``ptxas``, ``nvdisasm``); that of CUDA 12 if there are two.

    Raises:
        CompileError: It is not installed.
    """
    for folder in ("cuda_nvcc", "cu13"):
        path = Path(sysconfig.get_paths()["purelib"], "nvidia", folder, "bin", name)
        if path.exists():
            return path
    raise CompileError(f"{name} is not installed; {_INSTALL}")


def compile_spec(spec: KernelSpec, architecture: str, *, starts_early: bool = True) -> Compiled:
    """Compile one kernel for one architecture; as :func:`write_ptx` and :func:`assemble`."""
    return assemble(spec, write_ptx(spec), architecture, starts_early=starts_early)


def compile_all(specs: Iterable[KernelSpec], architecture: str) -> dict[KernelSpec, Cubin]:
    """Compile several kernels for one architecture, in memory; as :func:`compile_ptx` and :func:`cubins_of`."""
    return {made.spec: cubin for made, cubin in cubins_of(compile_ptx(specs), architecture)}


def cubins_of(ptx: Mapping[KernelSpec, str], architecture: str) -> list[tuple[Compiled, Cubin]]:
    """Return what :func:`assemble` makes of PTX, and the cubin, with late code if that is different."""
    late = has_dependent_launch(architecture)
    jobs = [(spec, text, architecture, early) for early in (True, False)[: 1 + late] for spec, text in ptx.items()]
    made = assemble_all(jobs)
    codes = {it.spec: it.cubin.code for it in made[len(ptx) :]}
    return [(it, Cubin(it.cubin.name, it.cubin.code, codes.get(it.spec, b""))) for it in made[: len(ptx)]]


def compile_ptx(
    specs: Iterable[KernelSpec], num_workers: int | None = None, on_done: Callable[[], None] = lambda: None
) -> dict[KernelSpec, str]:
    """Return the PTX of several kernels, written by several processes.

    Args:
        specs: Kernels.
        num_workers: Processes; None: one per core that this process may use.
        on_done: Called for each kernel that is done.

    Raises:
        KernelError: A kernel's source leaves the language.
        CompileError: numba is missing, or refuses a kernel.
    """
    specs = list(dict.fromkeys(specs))
    num_workers = min(num_workers or len(os.sched_getaffinity(0)), len(specs))
    if num_workers < 2:
        return {spec: write_ptx(spec) for spec in specs}
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of other threads
    # numba's garbage is large and short-lived: collecting it while it grows costs a tenth of the time.
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=gc.disable) as pool:
        waiting = {pool.submit(write_ptx, spec): spec for spec in specs}
        try:
            for done in as_completed(waiting):
                done.result()
                on_done()
        finally:
            pool.shutdown(cancel_futures=True)
    return {spec: done.result() for done, spec in waiting.items()}


def assemble_all(jobs: Sequence[tuple[KernelSpec, str, str, bool]]) -> list[Compiled]:
    """Return what :func:`assemble` makes of each job: kernel, PTX, architecture, whether it starts early."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda job: assemble(*job[:3], starts_early=job[3]), jobs))


def write_ptx(spec: KernelSpec) -> str:
    """Return the PTX of a kernel, with registers for at most half a multiprocessor: the next one starts beside it.

    Raises:
        KernelError: Its source leaves the language.
        CompileError: numba is missing, or refuses it.
    """
    versions()
    from numba import cuda, types

    kinds = {"Address": types.int64, "I32": types.int32, "F32": types.float32}
    made = specialise(spec.kernel, dict(spec.constants))
    signature = tuple(kinds[kind] for _, kind in made.parameters)
    _leave_out_passes()
    try:
        ptx, _ = cuda.compile_ptx(
            made.function(_device_names()),
            signature,
            cc=(9, 0, "a"),
            fastmath=True,
            launch_bounds=(spec.num_threads, 2 * spec.ctas_per_sm),
        )
    except Exception as error:  # numba says what it cannot type with many classes, TypeError among them
        raise CompileError(f"numba refuses {spec.name}: {error}") from error
    entry = re.search(r"\.entry\s+([\w$]+)", ptx)
    if entry is None:
        raise CompileError(f"{spec.name}: no entry point in the PTX")
    name = spec.kernel.__name__
    # numba's own bookkeeping, unused here; its name counts what the process has compiled before.
    text = re.sub(r"^\.common .*NumbaEnv.*\n", "", ptx.replace(entry.group(1), name), flags=re.MULTILINE)
    sizes = re.findall(rf"\.param \.[a-z](\d+) {name}_param_\d+", text)
    if sizes != [_SIZES[kind] for _, kind in made.parameters]:  # a float would be read as half an address
        raise CompileError(f"{spec.name}: numba passes its parameters in {sizes} bits")
    return text


_NEEDLESS_PASSES = {"DeadBranchPrune", "InlineClosureLikes", "InlineOverloads", "NopythonRewrites"}
_NEEDLESS_PASSES |= {"PreLowerStripPhis", "ReconstructSSA"}
"""Passes of numba that take half of its time and change nothing that matters in the machine code: a kernel has no
closures, overloads or array expressions, constant branches are gone already, and LLVM finds the SSA form by itself."""


@cache
def _leave_out_passes() -> None:
    """Have numba compile without them from now on."""
    from numba.cuda.compiler import CUDACompiler

    define = CUDACompiler.define_pipelines

    def define_shorter(self: Any) -> Any:
        managers = define(self)
        for manager in managers:
            manager.passes = [(it, why) for it, why in manager.passes if it.__name__ not in _NEEDLESS_PASSES]
        return managers

    CUDACompiler.define_pipelines = define_shorter


def assemble(spec: KernelSpec, ptx: str, architecture: str, *, starts_early: bool = True) -> Compiled:
    """Return the kernel that ptxas makes of PTX. If it would spill, it gets more registers where none need stay free.

    Args:
        spec: The kernel.
        ptx: What :func:`write_ptx` made of it.
        architecture: A key of :data:`ARCHITECTURES`.
        starts_early: False leaves out ``griddepcontrol.launch_dependents``: the next kernel starts at this one's end.

    Raises:
        CompileError: There is no such architecture, or ptxas is missing or refuses the code.
    """
    if architecture not in ARCHITECTURES:
        raise CompileError(f"no kernels for {architecture!r}; there are some for {', '.join(ARCHITECTURES)}")
    ptx = _retarget(ptx, architecture, starts_early=starts_early)
    made = Compiled(spec, architecture, starts_early, *_assembled(spec, ptx, architecture))
    if made.num_spilled_bytes and not has_room_for_two(architecture):
        ptx = re.sub(r"(\.minnctapersm) (\d+)", lambda it: f"{it[1]} {int(it[2]) // 2}", ptx)
        made = Compiled(spec, architecture, starts_early, *_assembled(spec, ptx, architecture))
    return made


def _assembled(spec: KernelSpec, ptx: str, architecture: str) -> tuple[Cubin, str, int, int, int]:
    """Return the last fields of what ptxas makes of PTX."""
    name = spec.kernel.__name__
    with tempfile.TemporaryDirectory(prefix="ferrule-") as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [str(tool("ptxas")), "-v", "-O3", f"-arch={architecture}", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"ptxas refuses {name} for {architecture}:\n{done.stderr}")
        return Cubin(name, target.read_bytes()), ptx, *_resources(done.stderr)


def _retarget(ptx: str, architecture: str, *, starts_early: bool) -> str:
    """Return PTX for another architecture, without the instructions it does not have.

    Nothing else of it depends on the architecture: the layer-2 tests assemble and check every kernel for each.
    """
    left_out = [it.ptx for it in INTRINSICS.values() if divmod(it.since, 10) > capability_of(architecture)]
    for instruction in left_out if starts_early else [*left_out, "griddepcontrol.launch_dependents;"]:
        ptx = re.sub(rf"^\s*{re.escape(instruction)}\n", "", ptx, flags=re.MULTILINE)
    ptx = re.sub(r"^\.version .*", f".version {_PTX_VERSION}", ptx, flags=re.MULTILINE)
    return ptx.replace(f".target {_WRITTEN_FOR}", f".target {architecture}")


def capability_of(architecture: str) -> tuple[int, int]:
    """Return the compute capability of an architecture."""
    return divmod(int(re.sub(r"\D", "", architecture)), 10)


def _resources(report: str) -> tuple[int, int, int]:
    registers = re.search(r"Used (\d+) registers", report)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert registers, report
    assert frame, report
    return int(registers[1]), int(frame[2]) + int(frame[3]), int(frame[1])


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

    def typed(context: Any, value: Any) -> Any:
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

    def typed(context: Any, *arguments: Any) -> Any:
        if len(arguments) != len(declared.arguments):
            return None
        return returned(*arguments), _code_generator(declared)

    names = ", ".join(f"a{i}" for i in range(len(declared.arguments)))
    scope: dict[str, Any] = {"typed": typed}
    exec(f"def {declared.name}(context, {names}):\n    return typed(context, {names})", scope)
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
