"""Every instruction that Python has no word for, in one place: a port to another compiler touches this file alone.

An intrinsic is declared as a plain function whose signature gives the register kinds and whose decorator gives the PTX.
It has no body: ``kernel_builder/compile.py`` turns declarations into numba intrinsics, the simulator of the tests has a
twin of each. Importing this module needs neither numba nor a GPU.

Addresses are byte addresses (``Address``, 64 bits, global memory) or byte offsets into the dynamic shared memory of the
CTA (``Offset``, 32 bits); there is no other shared memory. ``Vec4`` is four 32-bit words, 16 bytes; addresses of vector
accesses are multiples of 16. bf16 values travel as raw bits, two to a word, the lower address in the lower half.

Memory model (PTX ISA, chapter "Memory Consistency Model"): ``load_*`` and ``store_*`` are weak: only what barriers, a
fence with a ticket, or ``grid_wait`` put before a load is certain to be seen by it. ``*_relaxed`` are strong at gpu
scope. Source of the instructions: NVIDIA, "Parallel Thread Execution ISA", version 9.0.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import NoReturn, TypeVar, cast

__all__ = ["INTRINSICS", "Address", "F32x4", "Intrinsic", "Offset", "Vec4", "device"]

Address = int
Offset = int
U32 = int
I32 = int
U64 = int
F32 = float
Vec2 = tuple[int, int]
Vec4 = tuple[int, int, int, int]
F32x4 = tuple[float, float, float, float]

_KINDS = {"Address": "l", "U64": "l", "Offset": "s", "U32": "r", "I32": "i", "F32": "f"}
_TUPLES = {"Vec2": ("r",) * 2, "Vec4": ("r",) * 4, "F32x4": ("f",) * 4}


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """What an intrinsic compiles to.

    Attributes:
        name: Of the function.
        ptx: One or more instructions; ``$0``, ``$1``, ... are the results, then the arguments, tuples laid out flat.
        results: Register kinds of the results: r (u32), i (i32), l (64 bits), f (f32).
        arguments: One tuple of register kinds per argument; kind s is an offset into shared memory.
        is_pure: Neither reads nor writes memory and synchronises nothing: may be moved, merged and dropped.
        since: First compute capability that has it, times 10; on older ones it is left out.
    """

    name: str
    ptx: str
    results: tuple[str, ...]
    arguments: tuple[tuple[str, ...], ...]
    is_pure: bool
    since: int


INTRINSICS: dict[str, Intrinsic] = {}
"""All declarations, by name; filled once, while this module is imported."""

_Function = TypeVar("_Function", bound=Callable[..., object])


def device(function: _Function) -> _Function:
    """Mark a function made of intrinsics as one that kernels may call; it is inlined.

    Keyword-only parameters are compile-time constants, as in kernels.
    """
    function.__ferrule_device__ = True  # type: ignore[attr-defined]
    return function


def _ptx(ptx: str, *, is_pure: bool = False, since: int = 80) -> Callable[[_Function], _Function]:
    def declare(function: _Function) -> _Function:
        annotations = dict(function.__annotations__)
        results = _kinds(annotations.pop("return"))
        arguments = tuple(_kinds(annotation) for annotation in annotations.values())
        name = function.__name__
        INTRINSICS[name] = Intrinsic(name, ptx, results, arguments, is_pure, since)
        return _compiled_only(function)

    return declare


def _compiled_only(function: _Function) -> _Function:
    """Return what raises in place of a declaration that is called in Python, where it means nothing."""

    @wraps(function)
    def refuse(*_: object) -> NoReturn:
        raise RuntimeError(f"{function.__name__} runs on a device or in the simulator of the tests, not in Python")

    return cast("_Function", refuse)


def _kinds(annotation: str) -> tuple[str, ...]:
    if annotation == "None":
        return ()
    return _TUPLES.get(annotation) or (_KINDS[annotation],)


# Threads. All but the clock are constant during a kernel.


@_ptx("mov.u32 $0, %tid.x;", is_pure=True)
def thread_id() -> I32:
    """Return the index of this thread in its CTA."""


@_ptx("mov.u32 $0, %ctaid.x;", is_pure=True)
def cta_id() -> I32:
    """Return the index of this CTA in the grid."""


@_ptx("mov.u32 $0, %nctaid.x;", is_pure=True)
def num_ctas() -> I32:
    """Return the number of CTAs of the grid."""


@_ptx("mov.u64 $0, %clock64;")
def clock() -> U64:
    """Return the cycles that this thread's multiprocessor has counted; compare those of one thread only."""


# Global memory.


@_ptx("ld.global.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];")
def load_stream_v4(address: Address) -> Vec4:
    """Load 16 bytes that nobody writes while the model lives (weights): may stand above ``grid_wait``.

    Not ``.nc``: with it ptxas sinks the load below the wait, and the prefetch is lost.
    """


@_ptx("ld.global.v4.u32 {$0, $1, $2, $3}, [$4];")
def load_v4(address: Address) -> Vec4:
    """Load 16 bytes, weak."""


_LOAD_IF = (
    "{{ .reg .pred p; .reg .b32 x0, x1, x2, x3; setp.ne.s32 p, $4, 0; "
    "mov.b32 x0, $6; mov.b32 x1, $7; mov.b32 x2, $8; mov.b32 x3, $9; @p ld.{}.v4.u32 {{x0, x1, x2, x3}}, [$5]; "
    "mov.b32 $0, x0; mov.b32 $1, x1; mov.b32 $2, x2; mov.b32 $3, x3; }}"
)


@_ptx(_LOAD_IF.format("global"))
def load_if_v4(condition: I32, address: Address, otherwise: Vec4) -> Vec4:
    """Load 16 bytes, weak, where the condition is not 0; elsewhere return ``otherwise``, and nothing is read."""


@_ptx("ld.global.u32 $0, [$1];")
def load_u32(address: Address) -> U32:
    """Load 32 bits, weak."""


@_ptx("ld.global.s32 $0, [$1];")
def load_i32(address: Address) -> I32:
    """Load a signed 32-bit integer, weak."""


@_ptx("ld.global.u64 $0, [$1];")
def load_u64(address: Address) -> U64:
    """Load 64 bits, weak."""


@_ptx("ld.global.f32 $0, [$1];")
def load_f32(address: Address) -> F32:
    """Load a float32, weak."""


@_ptx("{ .reg .b16 h; ld.global.u16 h, [$1]; cvt.u32.u16 $0, h; }")
def load_u16(address: Address) -> U32:
    """Load 16 bits (the raw bits of one bf16), zero-extended, weak."""


@_ptx("ld.relaxed.gpu.global.v4.u32 {$0, $1, $2, $3}, [$4];")
def load_relaxed_v4(address: Address) -> Vec4:
    """Load 16 bytes that another CTA of this grid wrote, strong at gpu scope."""


@_ptx("ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];")
def load_relaxed_f32x4(address: Address) -> F32x4:
    """Load four float32 that another CTA of this grid wrote, strong at gpu scope."""


@_ptx("ld.relaxed.gpu.global.f32 $0, [$1];")
def load_relaxed_f32(address: Address) -> F32:
    """Load a float32 that another CTA of this grid wrote, strong at gpu scope."""


@_ptx("ld.relaxed.gpu.global.u32 $0, [$1];")
def load_relaxed_u32(address: Address) -> U32:
    """Load 32 bits that another CTA of this grid wrote, strong at gpu scope."""


@_ptx("ld.relaxed.gpu.global.u64 $0, [$1];")
def load_relaxed_u64(address: Address) -> U64:
    """Load 64 bits that another CTA of this grid wrote, strong at gpu scope."""


@_ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};")
def store_v4(address: Address, value: Vec4) -> None:
    """Store 16 bytes, weak."""


@_ptx("st.global.v4.f32 [$0], {$1, $2, $3, $4};")
def store_f32x4(address: Address, value: F32x4) -> None:
    """Store four float32, weak."""


@_ptx("st.global.u32 [$0], $1;")
def store_u32(address: Address, value: U32) -> None:
    """Store 32 bits, weak."""


@_ptx("st.global.s32 [$0], $1;")
def store_i32(address: Address, value: I32) -> None:
    """Store a signed 32-bit integer, weak."""


@_ptx("st.global.u64 [$0], $1;")
def store_u64(address: Address, value: U64) -> None:
    """Store 64 bits, weak."""


@_ptx("st.global.f32 [$0], $1;")
def store_f32(address: Address, value: F32) -> None:
    """Store a float32, weak."""


@_ptx("{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.u16 [$0], h; }")
def store_u16(address: Address, value: U32) -> None:
    """Store the low 16 bits (the raw bits of one bf16), weak."""


# Global memory, atomic: relaxed at gpu scope, order comes from fences.


@_ptx("atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;")
def atomic_increment_wrapping(address: Address, last: U32) -> U32:
    """Add 1, or go back to 0 from ``last``; return the value before: a ticket counter that resets itself."""


@_ptx("red.relaxed.gpu.global.add.u64 [$0], $1;")
def atomic_add_u64(address: Address, value: U64) -> None:
    """Add to a 64-bit counter."""


# Shared memory: offsets in bytes from the start of the CTA's dynamic shared memory.


@_ptx("ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];")
def shared_load_v4(offset: Offset) -> Vec4:
    """Load 16 bytes from shared memory."""


@_ptx(_LOAD_IF.format("shared"))
def shared_load_if_v4(condition: I32, offset: Offset, otherwise: Vec4) -> Vec4:
    """Load 16 bytes from shared memory where the condition is not 0; elsewhere return ``otherwise``."""


@_ptx("ld.shared.u32 $0, [$1];")
def shared_load_u32(offset: Offset) -> U32:
    """Load 32 bits from shared memory."""


@_ptx("ld.shared.u64 $0, [$1];")
def shared_load_u64(offset: Offset) -> U64:
    """Load 64 bits from shared memory."""


@_ptx("ld.shared.f32 $0, [$1];")
def shared_load_f32(offset: Offset) -> F32:
    """Load a float32 from shared memory."""


@_ptx("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];")
def shared_load_f32x4(offset: Offset) -> F32x4:
    """Load four float32 from shared memory."""


@_ptx("st.shared.v4.u32 [$0], {$1, $2, $3, $4};")
def shared_store_v4(offset: Offset, value: Vec4) -> None:
    """Store 16 bytes to shared memory."""


@_ptx("st.shared.u32 [$0], $1;")
def shared_store_u32(offset: Offset, value: U32) -> None:
    """Store 32 bits to shared memory."""


@_ptx("st.shared.u64 [$0], $1;")
def shared_store_u64(offset: Offset, value: U64) -> None:
    """Store 64 bits to shared memory."""


@_ptx("st.shared.f32 [$0], $1;")
def shared_store_f32(offset: Offset, value: F32) -> None:
    """Store a float32 to shared memory."""


@_ptx("st.shared.v4.f32 [$0], {$1, $2, $3, $4};")
def shared_store_f32x4(offset: Offset, value: F32x4) -> None:
    """Store four float32 to shared memory."""


@_ptx("atom.shared.add.u32 $0, [$1], $2;")
def shared_fetch_add_u32(offset: Offset, value: U32) -> U32:
    """Add atomically to 32 bits of shared memory, which wraps; return the value before."""


@_ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;")
def copy_async_16_or_zeros(offset: Offset, address: Address, num_bytes: I32) -> None:
    """Begin to copy 16 bytes if ``num_bytes`` is 16; if it is 0 read nothing and write zeros instead."""


@_ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;")
def copy_async_stream_16_or_zeros(offset: Offset, address: Address, num_bytes: I32) -> None:
    """Begin such a copy of bytes that nobody writes while the model lives: may stand above ``grid_wait``.

    The hint asks for whole lines of 128 bytes, which is what warps read anyway; machine code shows by it which copy
    this is.
    """


@_ptx("cp.async.commit_group;")
def copy_async_commit() -> None:
    """Close the group of this thread's copies begun since the last commit."""


@_compiled_only
def copy_async_wait(groups: I32) -> None:
    """Wait until all of this thread's groups but the last ``groups`` have arrived; others see them after a barrier.

    ``groups`` is a compile-time constant from 0 to 7, and a part of the instruction: ``copy_async_wait(2)`` is
    ``copy_async_wait_2``.
    """


INTRINSICS |= {
    name: Intrinsic(name, f"cp.async.wait_group {groups};", (), (), is_pure=False, since=80)
    for groups in range(8)
    for name in [f"copy_async_wait_{groups}"]
}


# Order.


@_ptx("bar.sync 0;")
def barrier() -> None:
    """Wait for all threads of the CTA; what any of them did before is seen by all after."""


@_ptx("bar.warp.sync 0xffffffff;")
def warp_barrier() -> None:
    """Wait for all threads of the warp; what any of them did before is seen by all after."""


@_ptx("fence.acq_rel.gpu;")
def fence() -> None:
    """Order this thread's accesses, and those it has observed, before and after it for the whole GPU."""


@_ptx("griddepcontrol.wait;", since=90)
def grid_wait() -> None:
    """Wait until the kernels before this one are complete and seen; every kernel of the chain executes it.

    Before sm_90 there is nothing to wait for: kernels of one stream follow each other whole.
    """


@_ptx("griddepcontrol.launch_dependents;", since=90)
def grid_launch_dependents() -> None:
    """Let the next kernel of the chain start what it does before its own ``grid_wait``."""


# Warps. All 32 lanes take part; nobody else's memory accesses are ordered by them.


@_ptx("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;")
def shuffle_xor_f32(value: F32, lane_mask: I32) -> F32:
    """Return the value of the lane whose index differs in the bits of ``lane_mask``."""


@_ptx("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;")
def shuffle_xor_u32(value: U32, lane_mask: I32) -> U32:
    """Return the value of the lane whose index differs in the bits of ``lane_mask``."""


@_ptx("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;")
def shuffle_u32(value: U32, lane: I32) -> U32:
    """Return the value of ``lane``."""


_MMA_BF16 = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


@_ptx(_MMA_BF16)
def mma_bf16(a: Vec4, b: Vec2, c: F32x4) -> F32x4:
    """Return ``a @ b + c`` over the warp: a is 16 x 16 (rows x k), b is 16 x 8 (k x columns), float32 sums.

    Fragments of lane ``4 g + t``: a = (row g, k 2t..2t+1), (row g+8, k 2t..), (row g, k 2t+8..), (row g+8, k 2t+8..);
    b = (k 2t..2t+1, column g), (k 2t+8.., column g); c = (row g, columns 2t, 2t+1), (row g+8, columns 2t, 2t+1).
    """


# Numbers. Approximations follow the PTX ISA: ex2, rcp and rsqrt err by at most 2 ulp in float32, lg2 by 2^-22 between
# 0.5 and 2 and by 2 ulp elsewhere.


@_ptx("mov.b32 $0, $1;", is_pure=True)
def float_bits(value: F32) -> U32:
    """Return the bits of a float32."""


@_ptx("mov.b32 $0, $1;", is_pure=True)
def bits_float(bits: U32) -> F32:
    """Return the float32 of these bits."""


@_ptx("shl.b32 $0, $1, 16;", is_pure=True)
def bf16_low(word: U32) -> F32:
    """Return the lower bf16 of a word."""


@_ptx("and.b32 $0, $1, 0xffff0000;", is_pure=True)
def bf16_high(word: U32) -> F32:
    """Return the upper bf16 of a word."""


@_ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", is_pure=True)
def pack_bf16(low: F32, high: F32) -> U32:
    """Return two values rounded to bf16, to nearest even."""


@_ptx("{ .reg .b32 w; cvt.rn.bf16x2.f32 w, 0f00000000, $1; shl.b32 $0, w, 16; }", is_pure=True)
def round_bf16(value: F32) -> F32:
    """Return the value rounded to bf16, as a float32."""


@_ptx("fma.rn.ftz.f32 $0, $1, $2, $3;", is_pure=True)
def fma(a: F32, b: F32, c: F32) -> F32:
    """Return ``a * b + c``, rounded once."""


def _dot_bf16() -> str:
    lines = [".reg .b32 s, left, right; mov.b32 s, $1;"]
    for word in range(4):
        a, b = f"${2 + word}", f"${6 + word}"
        lines.append(f"shl.b32 left, {a}, 16; shl.b32 right, {b}, 16; fma.rn.ftz.f32 s, left, right, s;")
        lines.append(f"and.b32 left, {a}, 0xffff0000; and.b32 right, {b}, 0xffff0000;")
        lines.append("fma.rn.ftz.f32 s, left, right, s;")
    return f"{{ {' '.join(lines)} mov.b32 $0, s; }}"


@_ptx(_dot_bf16(), is_pure=True)
def dot_bf16(total: F32, a: Vec4, b: Vec4) -> F32:
    """Return ``total`` plus eight products of bf16 values, in order, rounded to float32 after each."""


@_ptx("ex2.approx.ftz.f32 $0, $1;", is_pure=True)
def exp2(value: F32) -> F32:
    """Return 2 to the power of the value."""


@_ptx("lg2.approx.ftz.f32 $0, $1;", is_pure=True)
def log2(value: F32) -> F32:
    """Return the binary logarithm."""


@_ptx("rcp.approx.ftz.f32 $0, $1;", is_pure=True)
def reciprocal(value: F32) -> F32:
    """Return 1 / value."""


@_ptx("rsqrt.approx.ftz.f32 $0, $1;", is_pure=True)
def reciprocal_sqrt(value: F32) -> F32:
    """Return 1 / sqrt(value)."""


@_ptx("{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.b32 $0, $2, $3, p; }", is_pure=True)
def select_f32(condition: I32, chosen: F32, otherwise: F32) -> F32:
    """Return ``chosen`` where the condition is not 0: what ``if`` says too, but cheaper to compile."""


@_ptx("max.f32 $0, $1, $2;", is_pure=True)
def max_f32(a: F32, b: F32) -> F32:
    """Return the larger; of a number and NaN the number."""


@_ptx("prmt.b32 $0, $1, $2, $3;", is_pure=True)
def permute_bytes(a: U32, b: U32, selector: U32) -> U32:
    """Return four of the eight bytes of (a, b), chosen by the four nibbles of the selector; 4..7 are b's."""


@_ptx("cvt.rn.f32.s32 $0, $1;", is_pure=True)
def float_of(value: I32) -> F32:
    """Return the integer as a float32, rounded to nearest."""


@_ptx("cvt.rni.u64.f32 $0, $1;", is_pure=True)
def round_u64(value: F32) -> U64:
    """Return the nearest unsigned 64-bit integer; values below 0 give 0."""


@_ptx("cvt.rn.f32.u64 $0, $1;", is_pure=True)
def float_of_u64(value: U64) -> F32:
    """Return the unsigned integer as a float32, rounded to nearest."""


@_ptx("mul.hi.u32 $0, $1, $2;", is_pure=True)
def multiply_high(a: U32, b: U32) -> U32:
    """Return the upper 32 bits of the product."""


@_ptx("mul.lo.u32 $0, $1, $2;", is_pure=True)
def multiply_low(a: U32, b: U32) -> U32:
    """Return the lower 32 bits of the product: wraps on purpose."""


@_ptx("mul.hi.u64 $0, $1, $2;", is_pure=True)
def multiply_high_u64(a: U64, b: U64) -> U64:
    """Return the upper 64 bits of the product."""


@_ptx("add.u32 $0, $1, $2;", is_pure=True)
def add_wrapping(a: U32, b: U32) -> U32:
    """Return the lower 32 bits of the sum: wraps on purpose."""


@_ptx(
    "{ .reg .pred p; .reg .b32 k; shr.s32 k, $1, 31; or.b32 k, k, 0x80000000; xor.b32 k, k, $1; "
    "setp.eq.u32 p, k, 0x7fffffff; selp.b32 $0, 0x80000000, k, p; }",
    is_pure=True,
)
def order_key(bits: U32) -> U32:
    """Return a key that rises with the float of these bits; -0 and 0 have the same."""
