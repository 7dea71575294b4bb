"""A kernel becomes a cubin: what it takes is read from the assembler, and whatever refuses it says so."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    INTRINSICS,
    Address,
    Intrinsic,
    barrier,
    bits_float,
    float_bits,
    grid_launch_dependents,
    grid_wait,
    load_i32,
    load_u32,
    load_v4,
    shared_load_f32,
    shared_store_f32,
    store_f32,
    store_u32,
    store_u64,
    store_v4,
    thread_id,
)
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import KernelError, i32, registers, u32, unrolled
from ferrule_server.kernels.cuda.toolchain import compile as compiler
from ferrule_server.kernels.cuda.toolchain.compile import (
    ARCHITECTURES,
    CompileError,
    Cubin,
    compile_kernel,
    compile_spec,
    tool,
    toolkit,
)
from ferrule_server.kernels.cuda.toolchain.sass import MachineCode, disassemble


def scale(x: Address, out: Address, factor: F32, *, count: int) -> None:
    """Multiply by a factor and a half."""
    grid_launch_dependents()
    grid_wait()
    for i in unrolled(count):
        place = i32((thread_id() * count + i) * 4)
        store_f32(out + place, bits_float(load_u32(x + place)) * factor * 1.5)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def scaled(request: pytest.FixtureRequest) -> Cubin:
    """Return that kernel for one architecture."""
    return compile_kernel(scale, {"count": 2}, architecture=request.param, num_threads=96, ctas_per_sm=3)


def test_cubin_is_an_elf_image_with_the_kernel_under_its_name(scaled: Cubin) -> None:
    """What the driver is asked for."""
    assert scaled.code[:4] == b"\x7fELF"
    assert scaled.name == "scale"
    assert b"\0.text.scale\0" in scaled.code
    assert b"NumbaEnv" not in scaled.code


def test_ptx_names_architecture_and_bounds(scaled: Cubin) -> None:
    """The bounds are what ptxas shares registers out by."""
    assert f".target {scaled.architecture}\n" in scaled.ptx
    assert ".maxntid 96, 1, 1\n.minnctapersm 3\n" in scaled.ptx


def test_parameters_are_passed_as_what_they_are(scaled: Cubin) -> None:
    """Addresses in 64 bits, floats in 32: the layout that the launch path packs."""
    assert re.findall(r"\.param \.(\w+) scale_param_\d", scaled.ptx) == ["u64", "u64", "f32"]


def test_arithmetic_is_float32(scaled: Cubin) -> None:
    """A Python literal does not make it double precision."""
    assert "f64" not in scaled.ptx
    assert not any("F64" in it.modifiers or it.base.startswith("D") for it in disassemble(scaled).instructions)


def test_nothing_spills(scaled: Cubin) -> None:
    """A small kernel takes few registers."""
    assert 4 < scaled.num_registers < 32
    assert (scaled.num_spilled_bytes, scaled.num_stack_bytes) == (0, 0)


def test_before_sm_90_there_is_no_wait() -> None:
    """Nothing else differs between the architectures before the assembler."""
    new, old = (
        compile_kernel(scale, {"count": 1}, architecture=name, num_threads=32).ptx for name in ("sm_90a", "sm_80")
    )
    missing = [line for line in new.splitlines() if line not in old.splitlines()]
    assert [line.strip() for line in missing] == [
        ".target sm_90a",
        "griddepcontrol.launch_dependents;",
        "griddepcontrol.wait;",
    ]
    assert "griddepcontrol" not in old


def test_a_spec_leaves_half_of_the_multiprocessor_free() -> None:
    """Twice the CTAs that are planned bound the registers."""
    spec = KernelSpec(scale, (("count", 1),), num_threads=128, shared_bytes=0, ctas_per_sm=2)
    assert ".maxntid 128, 1, 1\n.minnctapersm 4\n" in compile_spec(spec, "sm_80").ptx


def hoards(values: Address, out: Address) -> None:
    """Hold 40 values at a time."""
    held = registers(40, init=0)
    for i in unrolled(40):
        held[i] = load_u32(values + i32(thread_id() * 4 + i * 4096))
    barrier()
    for i in unrolled(40):
        store_u32(out + i32(thread_id() * 4 + i * 4096), held[i] ^ held[39 - i])


def test_bounds_decide_the_registers_and_spills_are_counted() -> None:
    """Two CTAs of 1024 threads leave 32 registers to each."""
    roomy, tight = (
        compile_kernel(hoards, {}, architecture="sm_80", num_threads=1024, ctas_per_sm=ctas) for ctas in (1, 2)
    )
    assert 40 <= roomy.num_registers <= 64
    assert (roomy.num_spilled_bytes, roomy.num_stack_bytes) == (0, 0)
    assert tight.num_registers == 32
    assert tight.num_spilled_bytes > 0
    assert tight.num_stack_bytes > 0


def test_resources_are_read_from_the_assemblers_report() -> None:
    """Stores and loads of spills are added up."""
    report = (
        "ptxas info    : Function properties for f\n"
        "    72 bytes stack frame, 100 bytes spill stores, 28 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 1 barriers, 72 bytes cumulative stack size\n"
    )
    assert compiler._resources(report) == (32, 128, 72)


def test_compiling_again_gives_the_same_bytes() -> None:
    """Whatever the process compiled in between."""
    first = compile_kernel(scale, {"count": 1}, architecture="sm_80", num_threads=64)
    compile_kernel(scale, {"count": 3}, architecture="sm_80", num_threads=64)
    compiler._write_ptx.cache_clear()
    assert compile_kernel(scale, {"count": 1}, architecture="sm_80", num_threads=64) == first


def test_compiling_leaves_the_garbage_collector_as_it_was() -> None:
    """It is off meanwhile."""
    compiler._write_ptx.cache_clear()
    compile_kernel(scale, {"count": 1}, architecture="sm_80", num_threads=32)
    assert gc.isenabled()


def casts(x: Address, out: Address, n: I32) -> None:
    """Widen 32 bits with and without their sign."""
    value = load_u32(x)
    store_u64(out, u32(value + n))
    store_u64(out + 8, i32(value + n))
    store_u64(out + 16, load_i32(x + 4))


def test_casts_say_how_32_bits_are_widened() -> None:
    """u32 with zeros, i32 and signed loads with the sign."""
    ptx = compile_kernel(casts, {}, architecture="sm_80", num_threads=32).ptx
    stored = [re.escape(value) for value in re.findall(r"st\.global\.u64 \[%rd\d+\], (%rd\d+)", ptx)]
    kinds = [re.findall(rf"cvt\.(\w+\.\w+)\s+{value}, ", ptx) for value in stored]
    assert kinds == [["u64.u32"], ["s64.s32"], ["s64.s32"]]


def shares(x: Address, out: Address) -> None:
    """Turn values around in shared memory."""
    shared_store_f32(i32(thread_id() * 4), bits_float(load_u32(x + thread_id() * 4)))
    barrier()
    store_u32(out + thread_id() * 4, float_bits(shared_load_f32(i32(124 - thread_id() * 4))))


def test_shared_memory_is_dynamic() -> None:
    """The launch says how much; the code holds one symbol without a size."""
    ptx = compile_kernel(shares, {}, architecture="sm_90a", num_threads=32).ptx
    assert re.findall(r"^.*\.shared .*\[.*$", ptx, re.MULTILINE) == [".extern .shared .align 16 .b8 ferrule_shared[];"]


ARGUMENTS = {"l": "{a}", "s": "t", "r": "u32(t)", "i": "t", "f": "f"}


def _call(intrinsic: Intrinsic, number: int) -> list[str]:
    """Return lines that call an intrinsic and keep its results alive."""

    def written(kinds: tuple[str, ...]) -> str:
        values = [ARGUMENTS[kind].format(a=f"a + {64 * number}") for kind in kinds]
        return values[0] if len(values) == 1 else f"({', '.join(values)})"

    call = f"{intrinsic.name}({', '.join(written(kinds) for kinds in intrinsic.arguments)})"
    store = {"r": "store_u32", "i": "store_i32", "l": "store_u64", "f": "store_f32"}
    if not intrinsic.results:
        return [call]
    parts = [f"r{number}[{i}]" if len(intrinsic.results) > 1 else f"r{number}" for i in range(len(intrinsic.results))]
    stores = [
        f"{store[kind]}(a + {64 * number + 8 * i}, {part})"
        for i, (kind, part) in enumerate(zip(intrinsic.results, parts, strict=True))
    ]
    return [f"r{number} = {call}", *stores]


@pytest.fixture(scope="module")
def all_intrinsics(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Return a kernel that uses every intrinsic once."""
    lines = [line for number, it in enumerate(INTRINSICS.values()) for line in _call(it, number)]
    names = ", ".join(sorted(INTRINSICS))
    path = tmp_path_factory.mktemp("kernel") / "everything.py"
    path.write_text(
        f"from ferrule_server.kernels.cuda.intrinsics import F32, Address, {names}\n"
        "from ferrule_server.kernels.cuda.specialise import i32, u32\n\n\n"
        "def everything(a: Address, f: F32) -> None:\n    t = i32(thread_id() * 16)\n    " + "\n    ".join(lines) + "\n"
    )
    spec = importlib.util.spec_from_file_location("everything", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel: Callable[..., None] = module.everything
    return kernel


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_intrinsic_is_an_instruction(all_intrinsics: Callable[..., None], architecture: str) -> None:
    """Each is accepted by the assembler, with operands of the kinds that are declared, and none is lost."""
    cubin = compile_kernel(all_intrinsics, {}, architecture=architecture, num_threads=32)
    number = int(re.findall(r"\d+", architecture)[0])
    for intrinsic in INTRINSICS.values():
        opcode = re.findall(r"[a-z][\w.:]*\.\w+", re.sub(r"\.reg [^;]*;", "", intrinsic.ptx))[0]
        assert (opcode in cubin.ptx) == (intrinsic.since <= number), intrinsic.name


def _opcodes(code: MachineCode) -> set[str]:
    return {instruction.opcode for instruction in code.instructions}


def test_intrinsics_become_the_instructions_they_are_meant_to_be(all_intrinsics: Callable[..., None]) -> None:
    """The ones whose machine code the design rests on."""
    found = _opcodes(disassemble(compile_kernel(all_intrinsics, {}, architecture="sm_90a", num_threads=32)))
    expected = {"ACQBULK", "PREEXIT", "LDG.E.NA.128", "LDG.E.128", "LDG.E.128.STRONG.GPU", "STG.E.128", "LDS.128"}
    expected |= {"HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128", "ATOMG.E.INC.STRONG.GPU", "MEMBAR.ALL.GPU", "MUFU.EX2"}
    assert expected <= found, sorted(found)


def wrong_kind(out: Address) -> None:
    """Store a number where a tuple belongs."""
    store_v4(out, 1)  # type: ignore[arg-type]


def two_kinds(out: Address) -> None:
    """Let a variable be a tuple and a number."""
    value = load_v4(out)
    while load_u32(out) > 3:
        value = load_u32(out)  # type: ignore[assignment]
    store_v4(out, value)


@pytest.mark.parametrize("kernel", [wrong_kind, two_kinds], ids=lambda it: it.__name__)
def test_what_numba_refuses_is_one_error_with_the_kernels_name(kernel: Callable[..., None]) -> None:
    """Whatever it raised."""
    with pytest.raises(CompileError, match=kernel.__name__):
        compile_kernel(kernel, {}, architecture="sm_80", num_threads=32)


def test_what_leaves_the_language_is_named_with_its_line() -> None:
    """By the specialiser, before numba sees it."""

    def divides(out: Address, n: I32) -> None:
        for i in range(n):
            store_u32(out + i, 1)

    with pytest.raises(KernelError, match=r"test_compile\.py:\d+: write `for i in unrolled"):
        compile_kernel(divides, {}, architecture="sm_80", num_threads=32)


def test_what_ptxas_refuses_is_an_error_with_its_words(scaled: Cubin) -> None:
    """And the name of kernel and architecture."""
    with pytest.raises(CompileError, match=rf"(?s)ptxas refuses scale for {scaled.architecture}:.*nonsense"):
        compiler._assemble(scaled.ptx.replace("ret;", "nonsense.u32 %r1, %r2;"), "scale", scaled.architecture)


def test_an_unknown_architecture_names_those_there_are() -> None:
    """Before anything is compiled."""
    with pytest.raises(CompileError, match=r"sm_70.*sm_80, sm_90a"):
        compile_kernel(scale, {"count": 1}, architecture="sm_70", num_threads=32)


def test_a_cubin_of_another_kernel_is_not_taken_apart(scaled: Cubin) -> None:
    """The name is part of the cubin."""
    with pytest.raises(
        CompileError, match=f"the cubin of other for {scaled.architecture} holds no kernel of that name"
    ):
        disassemble(replace(scaled, name="other"))


def test_toolkit_names_every_version_that_shapes_machine_code() -> None:
    """One line, part of the key of every cached kernel."""
    assert re.fullmatch(r"(\S+=[\d.]+ ?)+", toolkit())
    assert [part.partition("=")[0] for part in toolkit().split()] == list(compiler._PACKAGES)


def test_a_missing_toolkit_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server runs without it on cubins made elsewhere."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(CompileError, match=r"not installed .*pip install 'ferrule\[cuda\]'"):
        toolkit.__wrapped__()


def test_a_missing_tool_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both come with the CUDA packages."""
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    with pytest.raises(CompileError, match=r"ptxas is not installed; pip install 'ferrule\[cuda\]'"):
        tool("ptxas")
