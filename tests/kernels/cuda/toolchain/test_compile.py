"""A kernel becomes a cubin: what it takes is read from the assembler, and whatever refuses it says so."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ferrule_server.kernel_builder import compile as compiler
from ferrule_server.kernel_builder.compile import (
    ARCHITECTURES,
    Compiled,
    CompileError,
    assemble,
    compile_all,
    compile_ptx,
    compile_spec,
    has_dependent_launch,
    tool,
    toolkit,
    versions,
    write_ptx,
)
from ferrule_server.kernels.cuda import embed
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
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec
from ferrule_server.kernels.cuda.specialise import KernelError, i32, registers, u32, unrolled
from tools.kernels.sass import MachineCode, disassemble_all


def scale(x: Address, out: Address, factor: F32, *, count: int) -> None:
    """Multiply by a factor and a half."""
    grid_launch_dependents()
    grid_wait()
    for i in unrolled(count):
        place = i32((thread_id() * count + i) * 4)
        store_f32(out + place, bits_float(load_u32(x + place)) * factor * 1.5)


def planned(kernel: Callable[..., None], num_threads: int = 32, ctas_per_sm: int = 1, **constants: int) -> KernelSpec:
    """Return a kernel as it is planned."""
    return KernelSpec(kernel, tuple(constants.items()), num_threads, 0, ctas_per_sm)


SCALE = planned(scale, 96, 2, count=2)


@pytest.fixture(scope="module")
def scale_ptx() -> str:
    """Return the PTX of that kernel."""
    return write_ptx(SCALE)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def scaled(request: pytest.FixtureRequest, scale_ptx: str) -> Compiled:
    """Return that kernel for one architecture."""
    return assemble(SCALE, scale_ptx, request.param)


def disassemble(compiled: Compiled) -> MachineCode:
    """Return the machine code of a kernel."""
    (code,) = disassemble_all([compiled])
    return code


def test_cubin_is_an_elf_image_with_the_kernel_under_its_name(scaled: Compiled) -> None:
    """What the driver is asked for."""
    assert scaled.cubin.code[:4] == b"\x7fELF"
    assert scaled.cubin.name == "scale"
    assert b"\0.text.scale\0" in scaled.cubin.code
    assert b"NumbaEnv" not in scaled.cubin.code


def test_parameters_are_passed_as_what_they_are(scaled: Compiled) -> None:
    """Addresses in 64 bits, floats in 32: the layout that the launch path packs."""
    assert re.findall(r"\.param \.(\w+) scale_param_\d", scaled.ptx) == ["u64", "u64", "f32"]


def test_architectures_differ_in_the_wait_only(scale_ptx: str) -> None:
    """And in the trigger of late code; the version of the PTX is one that ptxas of CUDA 12 reads."""
    assert scale_ptx.count(".version 9.0\n.target sm_90a\n") == 1
    assert ".maxntid 96, 1, 1\n.minnctapersm 4\n" in scale_ptx, "ptxas shares registers out by twice the CTAs planned"
    wait, trigger = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
    for architecture in ARCHITECTURES:
        for starts_early in (True, False):
            ptx = assemble(SCALE, scale_ptx, architecture, starts_early=starts_early).ptx
            assert (wait in ptx) == has_dependent_launch(architecture)
            assert (trigger in ptx) == (has_dependent_launch(architecture) and starts_early)
            added = {".version 8.7", f".target {architecture}"}
            given, made = ([line.strip() for line in text.splitlines()] for text in (scale_ptx, ptx))
            assert set(made) - set(given) == added - {".target sm_90a"}
            assert {*given} - {*made} <= {".version 9.0", ".target sm_90a", wait, trigger}


def hoards(values: Address, out: Address) -> None:
    """Hold 40 values at a time."""
    held = registers(40, init=0)
    for i in unrolled(40):
        held[i] = load_u32(values + i32(thread_id() * 4 + i * 4096))
    barrier()
    for i in unrolled(40):
        store_u32(out + i32(thread_id() * 4 + i * 4096), held[i] ^ held[39 - i])


def test_bounds_decide_the_registers_and_spills_are_counted() -> None:
    """Two CTAs of 1024 threads leave 32 registers to each; on a GPU without room for two, one CTA has them all."""
    roomy, tight = planned(hoards, 512), planned(hoards, 1024)
    made = compile_spec(roomy, "sm_90a")
    assert 40 <= made.num_registers <= 64
    assert (made.num_spilled_bytes, made.num_stack_bytes) == (0, 0)
    ptx = write_ptx(tight)
    made = assemble(tight, ptx, "sm_90a")
    assert made.num_registers == 32
    assert made.num_spilled_bytes > 0
    assert made.num_stack_bytes > 0
    made = assemble(tight, ptx, "sm_86")
    assert 40 <= made.num_registers <= 64
    assert made.num_spilled_bytes == 0


def test_what_does_not_fit_is_named(scaled: Compiled) -> None:
    """A CTA on each architecture, and the CTAs that are planned where there is room for them."""

    def unfit(times: int = 1, **changes: Any) -> list[str]:
        return list(replace(scaled, spec=replace(SCALE, **changes)).unfit(times))

    name, has_much = f"scale[count=2] for {scaled.architecture}", scaled.architecture in ("sm_80", "sm_90a", "sm_100")
    assert unfit(2, shared_bytes=24 << 10) == unfit(shared_bytes=99 << 10) == []
    too_large = [f"{name}: 101377 bytes of shared memory, a CTA has 101376"]
    assert unfit(shared_bytes=(99 << 10) + 1) == ([] if has_much else too_large)
    found = unfit(2, shared_bytes=50 << 10)
    assert [message.partition(" CTAs of 96 threads, ")[0] for message in found] == (
        [] if scaled.architecture in ("sm_90a", "sm_100") else [f"{name}: {3 if has_much else 1}"]
    )
    assert unfit(num_threads=100) == [f"{name}: 100 threads are not whole warps"]


def test_resources_are_read_from_the_assemblers_report() -> None:
    """Stores and loads of spills are added up."""
    report = (
        "ptxas info    : Function properties for f\n"
        "    72 bytes stack frame, 100 bytes spill stores, 28 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 1 barriers, 72 bytes cumulative stack size\n"
    )
    assert compiler._resources(report) == (32, 128, 72)


def test_compiling_again_gives_the_same_bytes() -> None:
    """Whatever the process compiled in between, and in another process too."""
    first = compile_spec(planned(scale, count=1), "sm_80")
    write_ptx(planned(scale, count=3))
    assert compile_spec(planned(scale, count=1), "sm_80") == first
    specs = [planned(embed.embed, 64, WARPS=2, X=1), embed.spec()]
    done: list[None] = []
    assert compile_ptx(specs, 2, lambda: done.append(None)) == {spec: write_ptx(spec) for spec in specs}
    assert len(done) == 2


def test_kernels_are_compiled_in_memory_where_there_is_a_compiler() -> None:
    """For one architecture; late code only where it differs."""
    spec = planned(scale, count=1)
    early, late = (compile_spec(spec, "sm_90a", starts_early=starts_early).cubin for starts_early in (True, False))
    assert compile_all([spec], "sm_90a") == {spec: Cubin("scale", early.code, late.code)}
    assert compile_all([spec], "sm_80") == {spec: compile_spec(spec, "sm_80").cubin}


def casts(x: Address, out: Address, n: I32) -> None:
    """Widen 32 bits with and without their sign."""
    value = load_u32(x)
    store_u64(out, u32(value + n))
    store_u64(out + 8, i32(value + n))
    store_u64(out + 16, load_i32(x + 4))


def test_casts_say_how_32_bits_are_widened() -> None:
    """u32 with zeros, i32 and signed loads with the sign."""
    ptx = compile_spec(planned(casts), "sm_80").ptx
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
    ptx = compile_spec(planned(shares), "sm_90a").ptx
    assert re.findall(r"^.*\.shared .*\[.*$", ptx, re.MULTILINE) == [".extern .shared .align 16 .b8 ferrule_shared[];"]


ARGUMENTS = {"l": "{a}", "s": "t", "r": "u32(t)", "i": "t", "f": "f"}


def _call(intrinsic: Intrinsic, number: int) -> list[str]:
    """Return lines that call an intrinsic and keep its results alive."""

    def written(kinds: tuple[str, ...]) -> str:
        values = [ARGUMENTS[kind].format(a=f"a + {64 * number}") for kind in kinds]
        return values[0] if len(values) == 1 else f"({', '.join(values)})"

    name, _, constant = intrinsic.name.rpartition("_")
    if name == "copy_async_wait":  # its argument is a part of the instruction
        return [f"{name}({constant})"]
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
def all_intrinsics(tmp_path_factory: pytest.TempPathFactory) -> tuple[KernelSpec, str]:
    """Return a kernel that uses every intrinsic once, and its PTX."""
    lines = [line for number, it in enumerate(INTRINSICS.values()) for line in _call(it, number)]
    names = ", ".join(sorted(re.sub(r"(copy_async_wait)_\d", r"\1", name) for name in INTRINSICS))
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
    everything = planned(module.everything)
    return everything, write_ptx(everything)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_intrinsic_is_an_instruction(all_intrinsics: tuple[KernelSpec, str], architecture: str) -> None:
    """Each is accepted by the assembler, with operands of the kinds that are declared, and none is lost."""
    made = assemble(*all_intrinsics, architecture)
    number = int(re.findall(r"\d+", architecture)[0])
    for intrinsic in INTRINSICS.values():
        opcode = re.findall(r"[a-z][\w.:]*\.\w+(?: \d)?", re.sub(r"\.reg [^;]*;", "", intrinsic.ptx))[0]
        assert (opcode in made.ptx) == (intrinsic.since <= number), intrinsic.name


def _opcodes(code: MachineCode) -> set[str]:
    return {instruction.opcode for instruction in code.instructions}


def test_intrinsics_become_the_instructions_they_are_meant_to_be(all_intrinsics: tuple[KernelSpec, str]) -> None:
    """The ones whose machine code the design rests on."""
    found = _opcodes(disassemble(assemble(*all_intrinsics, "sm_90a")))
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
        compile_spec(planned(kernel), "sm_80")


def test_what_leaves_the_language_is_named_with_its_line() -> None:
    """By the specialiser, before numba sees it."""

    def divides(out: Address, n: I32) -> None:
        for i in range(n):
            store_u32(out + i, 1)

    with pytest.raises(KernelError, match=r"test_compile\.py:\d+: write `for i in unrolled"):
        compile_spec(planned(divides), "sm_80")


def test_what_ptxas_refuses_is_an_error_with_its_words(scaled: Compiled) -> None:
    """And the name of kernel and architecture."""
    with pytest.raises(CompileError, match=rf"(?s)ptxas refuses scale for {scaled.architecture}:.*nonsense"):
        assemble(SCALE, scaled.ptx.replace("ret;", "nonsense.u32 %r1, %r2;"), scaled.architecture)


def test_an_unknown_architecture_names_those_there_are() -> None:
    """Before anything is compiled."""
    with pytest.raises(CompileError, match=r"sm_70.*sm_80, sm_86"):
        assemble(SCALE, "", "sm_70")


def test_a_cubin_of_another_kernel_is_not_taken_apart(scaled: Compiled) -> None:
    """The name is part of the cubin."""
    with pytest.raises(
        CompileError, match=f"the cubin of other for {scaled.architecture} holds no kernel of that name"
    ):
        disassemble(replace(scaled, cubin=replace(scaled.cubin, name="other")))


def test_versions_of_all_that_shapes_machine_code_are_known() -> None:
    """Of the packages that write PTX, and of the assembler: that of CUDA 12 is taken if there are two."""
    assert re.fullmatch(r"(\S+=[\d.]+ ?)+", versions())
    assert toolkit() >= (12, 8), "older ones do not know sm_120"
    folder = Path(sysconfig.get_paths()["purelib"], "nvidia", "cuda_nvcc")
    assert (toolkit()[0] == 12) == folder.is_dir()


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whichever part of it is missing."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(CompileError, match=r"not installed .*pip install 'ferrule-server\[cuda\]'"):
        write_ptx(SCALE)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    with pytest.raises(CompileError, match=r"ptxas is not installed; pip install 'ferrule-server\[cuda\]'"):
        tool("ptxas")


def test_parameters_that_numba_passes_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch packs them by their kinds: a float would be read as the half of an address."""
    monkeypatch.setattr(compiler, "_SIZES", {"Address": "64", "I32": "32", "F32": "64"})
    with pytest.raises(
        CompileError, match=r"scale\[count=2\]: numba passes its parameters in \['64', '64', '32'\] bits"
    ):
        write_ptx(SCALE)
