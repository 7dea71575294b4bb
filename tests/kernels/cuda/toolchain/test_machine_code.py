"""The checker of machine code reports what it must: one small kernel, and one that breaks each rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ferrule_server.kernel_builder.compile import ARCHITECTURES, Compiled, assemble, compile_spec, write_ptx
from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    Address,
    atomic_increment_wrapping,
    barrier,
    copy_async_16_or_zeros,
    copy_async_stream_16_or_zeros,
    copy_async_wait,
    cta_id,
    fence,
    float_of,
    grid_launch_dependents,
    grid_wait,
    load_f32,
    load_i32,
    load_relaxed_f32,
    load_stream_v4,
    load_v4,
    num_ctas,
    shared_load_u32,
    shared_store_u32,
    shuffle_xor_f32,
    store_f32,
    store_u32,
    store_v4,
    thread_id,
)
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import i32, registers, u32, unrolled
from tools.kernels.addressing import narrow_addresses
from tools.kernels.machine_code import RULES, Made, check, take_apart

Kernel = Callable[..., None]


def _spec(kernel: Kernel, HOW: str = "", **promises: object) -> KernelSpec:  # noqa: N803
    constants = (("HOW", HOW),) if HOW else ()
    plain = KernelSpec(kernel, constants, num_threads=128, shared_bytes=16, min_vector_loads=0)
    return replace(plain, **promises)  # type: ignore[arg-type]


def _made(compiled: Compiled) -> Made:
    (made,) = take_apart([compiled])
    return made


def _promising(compiled: Compiled, **promises: object) -> Compiled:
    return replace(compiled, spec=replace(compiled.spec, **promises))  # type: ignore[arg-type]


def good(  # noqa: PLR0917  (kernels take what they take)
    weights: Address, pool: Address, tables: Address, out: Address, ticket: Address, block_stride: Address
) -> None:
    """All that the rules are about, done right."""
    lane = i32(thread_id() * 16)
    w = load_stream_v4(weights + lane)
    grid_launch_dependents()
    grid_wait()
    slot = load_i32(tables + cta_id() * 4)
    block = i32(slot >> 4)
    x = load_v4(pool + block * block_stride + i32((slot & 15) * 2048 + lane))
    total = float_of(i32((x[0] ^ x[1] ^ x[2] ^ x[3] ^ w[0] ^ w[1] ^ w[2] ^ w[3]) & 255))
    store_f32(out + (cta_id() * 128 + thread_id()) * 4, total)
    barrier()
    if thread_id() == 0:
        fence()
        before = atomic_increment_wrapping(ticket, i32(num_ctas() - 1))
        fence()
        shared_store_u32(0, before)
    barrier()
    if shared_load_u32(0) == i32(num_ctas() - 1):
        total = 0.0
        cta = i32(0)
        while cta < num_ctas():
            total = total + load_relaxed_f32(out + (cta * 128 + thread_id()) * 4)
            cta = i32(cta + 1)
        store_f32(out + thread_id() * 4, total)


GOOD = _spec(good, prefetches=True, has_ticket=True, min_vector_loads=2)


@pytest.fixture(scope="module")
def good_ptx() -> str:
    """Return the PTX of the kernel that is right."""
    return write_ptx(GOOD)


def test_a_kernel_that_keeps_the_rules_passes(good_ptx: str) -> None:
    """Prefetch, block table, ticket: nothing is reported, for any architecture, early or late."""
    made = [assemble(GOOD, good_ptx, name, starts_early=early) for name in ARCHITECTURES for early in (True, False)]
    assert check(made) == []


def test_a_breach_names_kernel_architecture_rule_and_instruction(good_ptx: str) -> None:
    """So that one line of a long run is enough."""
    (breach,) = check([_promising(assemble(GOOD, good_ptx, "sm_80"), has_mma=True)])
    assert breach == "good[] sm_80: tensor cores: 0 HMMA instructions, has_mma is True"


def test_late_code_must_not_let_the_next_kernel_in(good_ptx: str) -> None:
    """And early code must."""
    early, late = (assemble(GOOD, good_ptx, "sm_90a", starts_early=starts) for starts in (True, False))
    (message,) = _made(replace(early, starts_early=False)).breaches()["wait"]
    assert message.startswith("lets the next kernel in early: ")
    (message,) = _made(replace(late, starts_early=True)).breaches()["wait"]
    assert message.startswith("no PREEXIT")


def _waits(out: Address) -> None:
    grid_launch_dependents()
    grid_wait()
    store_u32(out + thread_id() * 4, 1)


def spills(values: Address, out: Address) -> None:
    """Hold more values than its threads have registers for."""
    grid_launch_dependents()
    grid_wait()
    held = registers(40, init=0.0)
    for i in unrolled(40):
        held[i] = load_f32(values + i32(thread_id() * 4 + i * 512))
    barrier()
    for i in unrolled(40):
        store_f32(out + i32(thread_id() * 4 + i * 512), held[i] * held[39 - i])


def doubles(out: Address, value: I32) -> None:
    """Multiply a float by an integer: what numba means by it is double precision."""
    grid_launch_dependents()
    grid_wait()
    store_f32(out + thread_id() * 4, load_f32(out + thread_id() * 4) * value)


def wrong(x: Address, out: Address, num_rows: I32, *, HOW: str) -> None:  # noqa: N803
    """Do one thing around the wait that is wrong."""
    i = thread_id()
    if HOW == "loads above":
        chunk = load_v4(x + i * 16)
    if HOW == "copies above":
        copy_async_16_or_zeros(i32(0), x, 16)
    if HOW != "releases nobody":
        grid_launch_dependents()
    if HOW == "stores above":
        store_u32(out + i * 4, 1)
    if HOW == "adds above" and i == 0:
        atomic_increment_wrapping(out, 7)
    if HOW == "never waits":
        barrier()
    elif HOW == "may not wait":
        if cta_id() < num_rows:
            grid_wait()
            store_u32(out + cta_id() * 4, 1)
    else:
        grid_wait()
    if HOW == "releases nobody":
        store_u32(out + i * 4, 1)
    if HOW == "waits twice":
        store_u32(out + i * 4, 1)
        grid_wait()
    if HOW == "loads above":
        store_v4(out + i * 16, chunk)
    if HOW == "copies above":
        copy_async_wait(0)
        store_u32(out + i * 4, shared_load_u32(0))


def wraps_a_copied_row(weights: Address, row: I32, size: I32) -> None:
    """Multiply row and size of the immutable data of a copy in 32 bits."""
    copy_async_stream_16_or_zeros(i32(0), weights + i32(row * size), 16)
    grid_launch_dependents()
    grid_wait()


def ticket(out: Address, counter: Address, *, HOW: str) -> None:  # noqa: N803
    """Take a ticket, and read what other CTAs wrote, with one thing that is wrong."""
    grid_launch_dependents()
    grid_wait()
    store_f32(out + (cta_id() * 128 + thread_id()) * 4, 1.0)
    barrier()
    if thread_id() == 0:
        if HOW != "no fence before":
            fence()
        before = atomic_increment_wrapping(counter, i32(num_ctas() - 1))
        if HOW != "no fence behind":
            fence()
        shared_store_u32(0, before)
    barrier()
    if shared_load_u32(0) == i32(num_ctas() - 1):
        if HOW == "reads weakly":
            store_f32(out, load_f32(out + thread_id() * 4))
        elif HOW == "reads both ways":
            first = load_relaxed_f32(out + thread_id() * 4)
            store_f32(out, first + load_f32(out + (128 + thread_id()) * 4))
        else:
            store_f32(out, load_relaxed_f32(out + thread_id() * 4))


def strides(pool: Address, slots: Address, out: Address, block_stride: Address, *, HOW: str) -> None:  # noqa: N803
    """Multiply block and stride in too few bits, or the slot without its mask."""
    grid_launch_dependents()
    grid_wait()
    block = load_i32(slots + cta_id() * 4)
    place = i32(thread_id() * 16)
    if HOW == "wraps":
        offset = u32(block * block_stride)
    elif HOW == "cuts the stride":
        offset = block * u32(block_stride)
    elif HOW == "scales first":
        offset = u32(block * 36) * block_stride
    else:
        offset = (block >> 4) * block_stride
        place = i32(block * 2048 + thread_id() * 16)
    store_v4(out + thread_id() * 16, load_v4(pool + offset + place))


def forgets_the_stride(pool: Address, slots: Address, out: Address) -> None:
    """Take the pool for one array of slots."""
    grid_launch_dependents()
    grid_wait()
    slot = load_i32(slots + cta_id() * 4)
    store_v4(out + thread_id() * 16, load_v4(pool + i32(slot * 2048)))


def wraps_a_row(weights: Address, out: Address, size: I32) -> None:
    """Multiply row and length of a weight matrix in 32 bits."""
    chunk = load_stream_v4(weights + i32(cta_id() * size))
    grid_launch_dependents()
    grid_wait()
    store_v4(out + thread_id() * 16, chunk)


BROKEN: list[tuple[KernelSpec, str, str]] = [
    (_spec(spills, num_threads=1024), "local memory", "bytes spilled"),
    (_spec(doubles), "float64", "F64"),
    (_spec(_waits, min_vector_loads=1), "vector loads", "0 loads of 16 bytes, 1 are promised"),
    (_spec(wrong, HOW="never waits"), "wait", "ends without having waited"),
    (_spec(wrong, HOW="may not wait"), "wait", "ends without having waited"),
    (_spec(wrong, HOW="waits twice"), "wait", "may wait again"),
    (_spec(wrong, HOW="releases nobody"), "wait", "no PREEXIT"),
    (_spec(wrong, HOW="stores above"), "above the wait", "stores above the wait"),
    (_spec(wrong, HOW="adds above"), "above the wait", "stores above the wait"),
    (_spec(wrong, HOW="loads above"), "above the wait", "loads what others may write"),
    (_spec(wrong, HOW="copies above"), "above the wait", "loads what others may write"),
    (_spec(_waits, prefetches=True), "above the wait", "0 loads above the wait, prefetches is True"),
    (_spec(_waits, has_ticket=True), "ticket", "0 tickets, has_ticket is True"),
    (_spec(ticket, HOW="reads weakly"), "ticket", "1 tickets, has_ticket is False"),
    (_spec(ticket, HOW="no fence before", has_ticket=True), "ticket", "no fence before the ticket"),
    (_spec(ticket, HOW="no fence behind", has_ticket=True), "ticket", "no fence between the ticket and"),
    (_spec(ticket, HOW="reads weakly", has_ticket=True), "ticket", "nothing is read strongly"),
    (_spec(ticket, HOW="reads both ways", has_ticket=True), "ticket", "out is read weakly here: ld.global.f32"),
    (_spec(_waits, num_threads=96 + 16), "resources", "112 threads are not whole warps"),
    (_spec(_waits, num_threads=1024, ctas_per_sm=2), "resources", "2 CTAs of 1024 threads"),
    (_spec(_waits, shared_bytes=114 * 1024), "resources", "1 CTAs of 128 threads"),
    (_spec(strides, HOW="wraps"), "addressing", "no 64-bit product with block_stride"),
    (_spec(strides, HOW="wraps"), "addressing", "block_stride is cut to 32 bits"),
    (_spec(strides, HOW="cuts the stride"), "addressing", "block_stride is cut to 32 bits"),
    (_spec(strides, HOW="scales first"), "addressing", "scaled in 32 bits before it meets block_stride"),
    (_spec(strides, HOW="scales a part"), "addressing", "scaled in 32 bits in an address of the pool"),
    (_spec(forgets_the_stride), "addressing", "no 64-bit product with block_stride"),
    (_spec(wraps_a_row, prefetches=True), "addressing", "a 32-bit product of two runtime values"),
    (_spec(wraps_a_copied_row, prefetches=True), "addressing", "a 32-bit product of two runtime values"),
]


@pytest.fixture(scope="module")
def made() -> Callable[[KernelSpec], Made]:
    """Return a compiler that remembers, nvdisasm takes a third of a second."""
    known: dict[str, Made] = {}

    def make_once(spec: KernelSpec) -> Made:
        if spec.name not in known:
            known[spec.name] = _made(compile_spec(spec, "sm_90a"))
        made = known[spec.name]
        return replace(made, compiled=replace(made.compiled, spec=spec))

    return make_once


@pytest.mark.parametrize(("spec", "rule", "message"), BROKEN, ids=lambda it: getattr(it, "name", None))
def test_what_breaks_a_rule_is_reported(
    made: Callable[[KernelSpec], Made], spec: KernelSpec, rule: str, message: str
) -> None:
    """Under that rule and no other."""
    found = made(spec).breaches()
    assert any(message in reported for reported in found.get(rule, [])), found
    assert set(found) == {rule}


EDITS = [
    ("mul.lo.s64", "div.s64", "calls", "CALL"),
    ("ld.global.v4.u32", "ld.global.nc.v4.u32", "plain loads", "read-only cache: "),
    ("ld.global.v4.u32", "ld.v4.u32", "plain loads", "generic address: "),
    ("atom.relaxed.gpu.global.inc", "atom.relaxed.cta.global.inc", "atomics", "not strong at gpu scope: "),
    (".extern .shared", ".shared .align 4 .b8 more[64];\n.extern .shared", "resources", "the spec does not count"),
]


@pytest.mark.parametrize(("old", "new", "rule", "message"), EDITS, ids=lambda it: it)
def test_what_no_intrinsic_can_say_is_reported(good_ptx: str, old: str, new: str, rule: str, message: str) -> None:
    """The language has no word for these; the PTX of the right kernel is edited."""
    assert old in good_ptx
    found = _made(assemble(GOOD, good_ptx.replace(old, new), "sm_90a")).breaches()
    assert any(message in reported for reported in found[rule]), found


def test_adding_floats_is_reported() -> None:
    """Their sum would depend on who arrives first."""
    ptx = write_ptx(_spec(wrong, HOW="adds above")).replace("global.inc.u32", "global.add.f32")
    found = _made(assemble(_spec(wrong, HOW="adds above"), ptx, "sm_80")).breaches()
    assert any("order of arrival" in reported for reported in found["atomics"])


def test_sm_80_has_nothing_to_wait_for(good_ptx: str) -> None:
    """And a wait in it would be refused by the assembler, so the rule is tried on code of sm_90a."""
    made = _made(assemble(GOOD, good_ptx, "sm_90a"))
    found = replace(made, compiled=replace(made.compiled, architecture="sm_80")).breaches()
    assert any(message.startswith("sm_80 has no ") and "ACQBULK" in message for message in found["wait"])


def shuffles(out: Address, num_rows: I32) -> None:
    """Shuffle where ptxas cannot know that no lane has left."""
    grid_launch_dependents()
    grid_wait()
    row = i32(thread_id() >> 5)
    while row < num_rows:
        value = load_f32(out + (row * 32 + (thread_id() & 31)) * 4)
        for bit in unrolled(5):
            value = value + shuffle_xor_f32(value, 16 >> bit)
        store_f32(out + row * 4, value)
        row = i32(row + 4)


def test_a_shuffle_of_diverged_lanes_is_no_call() -> None:
    """On sm_80 ptxas calls a helper of its own there."""
    ptx = write_ptx(_spec(shuffles))
    assert check([assemble(_spec(shuffles), ptx, architecture) for architecture in ARCHITECTURES]) == []


def test_every_rule_is_broken_by_some_test() -> None:
    """A rule that nothing breaks may be one that reports nothing."""
    assert {rule for _, rule, _ in BROKEN} | {rule for _, _, rule, _ in EDITS} | {"tensor cores"} == set(RULES)


@pytest.mark.parametrize(
    ("architecture", "resources", "expected"),
    [
        ("sm_90a", (256, 128, 0), 2),
        ("sm_90a", (256, 129, 0), 1),
        ("sm_90a", (1024, 32, 0), 2),
        ("sm_90a", (32, 255, 0), 8),
        ("sm_90a", (32, 16, 0), 32),
        ("sm_80", (32, 16, 0), 32),
        ("sm_90a", (128, 32, 113 * 1024), 2),
        ("sm_90a", (128, 32, 113 * 1024 + 1), 1),
        ("sm_90a", (128, 32, 227 * 1024 + 1), 0),
        ("sm_80", (128, 32, 81 * 1024), 2),
        ("sm_80", (128, 32, 163 * 1024 + 1), 0),
        ("sm_86", (128, 32, 99 * 1024), 1),
        ("sm_89", (128, 32, 99 * 1024 + 1), 0),
        ("sm_86", (32, 16, 0), 16),
        ("sm_89", (512, 32, 0), 3),
        ("sm_100", (128, 32, 113 * 1024), 2),
        ("sm_120", (128, 32, 49 * 1024), 2),
        ("sm_120", (128, 32, 49 * 1024 + 1), 1),
    ],
)
def test_ctas_that_fit(architecture: str, resources: tuple[int, int, int], expected: int) -> None:
    """Registers go to whole warps in pieces of 256, shared memory has 1 KiB of the system's per CTA; 32 at most."""
    assert ARCHITECTURES[architecture].ctas(*resources) == expected


def test_an_address_from_nowhere_is_reported() -> None:
    """What cannot be followed is not taken for right."""
    ptx = ".visible .entry good()\n{\n\tmov.u64 \t%rd1, 4096;\n\tld.global.u32 %r1, [%rd1];\n\tret;\n}\n"
    (message,) = narrow_addresses(good, ptx)
    assert message.startswith("no parameter is found that this address begins at: ld.global.u32")
