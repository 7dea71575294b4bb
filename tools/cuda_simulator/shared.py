"""Twins of the instructions that touch shared memory, and of those that only need to know the thread."""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from tools.cuda_simulator.errors import Misaligned, OutOfBounds, PromiseBroken
from tools.cuda_simulator.memory import F32, PAGE_BITS, U32, U64, Page
from tools.cuda_simulator.twins import MASK32, MASK64, SITE_BITS, Twin, fault, open_immutable, open_page

if TYPE_CHECKING:
    from tools.cuda_simulator.grid import Thread

__all__ = ["SHARED"]

_CYCLES_PER_LOOK = 256
"""Time is not simulated: a clock goes on whenever a thread of the launch looks at it."""
_UNKNOWN = b"\xff" * 16
"""Where a copy is under way."""


def _shared_fault(thread: Thread, offset: int, size: int, error: BaseException | None = None) -> NoReturn:
    place = f"{size} bytes at shared+{offset} of {len(thread.cta.shared)}"
    if offset < 0 or offset + size > len(thread.cta.shared):
        raise OutOfBounds(place)
    if offset & size - 1:
        raise Misaligned(place)
    raise PromiseBroken(f"{error}: {place}") from error


def _shared_loader(kind: int, size: int) -> Twin:
    shift, mask = size.bit_length() - 1, size - 1

    def load(thread: Thread, offset: int, site: int) -> object:
        if offset & mask or offset < 0:
            _shared_fault(thread, offset, size)
        thread.log(offset + thread.shared_base << SITE_BITS | site)
        try:
            return thread.shared[kind][offset >> shift]
        except IndexError as error:
            _shared_fault(thread, offset, size, error)

    return load


def _shared_vector_loader(pattern: str) -> Twin:
    unpack = struct.Struct(pattern).unpack_from

    def load(thread: Thread, offset: int, site: int) -> object:
        if offset & 15 or offset < 0:
            _shared_fault(thread, offset, 16)
        thread.log(offset + thread.shared_base << SITE_BITS | site)
        try:
            return unpack(thread.cta.shared, offset)
        except struct.error as error:
            _shared_fault(thread, offset, 16, error)

    return load


def _shared_storer(kind: int, size: int, keep: int = 0) -> Twin:
    shift, mask = size.bit_length() - 1, size - 1

    def store(thread: Thread, offset: int, value: int, site: int) -> None:
        if offset & mask or offset < 0:
            _shared_fault(thread, offset, size)
        thread.log(offset + thread.shared_base << SITE_BITS | site)
        try:
            thread.shared[kind][offset >> shift] = value & keep if keep else value
        except (IndexError, ValueError) as error:
            _shared_fault(thread, offset, size, error)

    return store


def _shared_v4_storer(kind: int) -> Twin:
    def store(thread: Thread, offset: int, value: tuple[int, int, int, int], site: int) -> None:
        if offset & 15 or offset < 0:
            _shared_fault(thread, offset, 16)
        thread.log(offset + thread.shared_base << SITE_BITS | site)
        words, place = thread.shared[kind], offset >> 2
        try:
            words[place], words[place + 1], words[place + 2], words[place + 3] = value
        except (IndexError, ValueError) as error:
            _shared_fault(thread, offset, 16, error)

    return store


def _shared_adder(kind: int, size: int, keep: int) -> Twin:
    shift, mask = size.bit_length() - 1, size - 1

    def add(thread: Thread, offset: int, value: int, site: int) -> int:
        if offset & mask or offset < 0 or offset + size > len(thread.cta.shared):
            _shared_fault(thread, offset, size)
        thread.log(offset + thread.shared_base << SITE_BITS | site)
        words = thread.shared[kind]
        before: int = words[offset >> shift]
        words[offset >> shift] = before + value & keep
        return before

    return add


def _copy_async_16(thread: Thread, offset: int, address: int, page: Page, site: int) -> None:
    """Begin a copy: bytes move at some time until the thread waits; here they are read now and land then."""
    place = address - page.base
    if place & 15 or place < 0 or place + 16 > len(page.bytes):
        fault(thread, address, 16)
    reads = (address << SITE_BITS | site,) if page.is_mutable else ()
    _begin_copy(thread, offset, page.bytes[place : place + 16], reads, site)


def _copy_async_16_or_zeros(thread: Thread, offset: int, address: int, num_bytes: int, site: int) -> None:
    """Begin a copy, or the writing of zeros."""
    if num_bytes not in {0, 16}:
        raise PromiseBroken(f"a copy of {num_bytes} bytes, neither 16 nor 0")
    if num_bytes:
        page = thread.loads.get(address >> PAGE_BITS) or open_page(thread, address)
        _copy_async_16(thread, offset, address, page, site)
    else:
        _begin_copy(thread, offset, bytearray(16), (), site)


def _copy_async_stream_16_or_zeros(thread: Thread, offset: int, address: int, num_bytes: int, site: int) -> None:
    """Begin a copy of immutable memory, which may stand above the wait, or the writing of zeros."""
    if num_bytes == 16:
        page = thread.cta.immutable.get(address >> PAGE_BITS) or open_immutable(thread, address)
        _copy_async_16(thread, offset, address, page, site)
    else:
        _copy_async_16_or_zeros(thread, offset, address, num_bytes, site)


def _begin_copy(thread: Thread, offset: int, data: bytearray, reads: tuple[int, ...], site: int) -> None:
    """Log a copy and put it into the open group; until the thread has waited for it, its target holds nothing."""
    if offset & 15 or offset < 0 or offset + 16 > len(thread.cta.shared):
        _shared_fault(thread, offset, 16)
    accesses = (*reads, (offset + thread.shared_base) << SITE_BITS | site)
    thread.clock.codes += accesses
    thread.open_copies.append((offset, data, accesses))
    thread.cta.shared[offset : offset + 16] = _UNKNOWN


def _copy_async_commit(thread: Thread, site: int) -> None:
    thread.groups.append(thread.open_copies)
    thread.open_copies = []


def _arrive(thread: Thread, site: int, *, keep: int) -> None:
    shared = thread.cta.shared
    while len(thread.groups) > keep:
        for offset, data, accesses in thread.groups.pop(0):
            thread.clock.codes += accesses
            shared[offset : offset + 16] = data


def _fence(thread: Thread, site: int) -> None:
    thread.cta.publish()
    thread.cta.grid.clocks.fence(thread.clock)


def _clock(thread: Thread, site: int) -> int:
    grid = thread.cta.grid
    grid.num_cycles += _CYCLES_PER_LOOK
    return grid.num_cycles


_load_v4 = _shared_vector_loader("<4I")


def _load_if_v4(thread: Thread, condition: int, offset: int, otherwise: object, site: int) -> object:
    return _load_v4(thread, offset, site) if condition else otherwise


SHARED: dict[str, Twin] = {
    "thread_id": lambda thread, site: thread.thread_id,
    "cta_id": lambda thread, site: thread.cta.x,
    "num_ctas": lambda thread, site: thread.cta.grid.num_ctas,
    "clock": _clock,
    "shared_load_if_v4": _load_if_v4,
    "shared_load_v4": _load_v4,
    "shared_load_u32": _shared_loader(U32, 4),
    "shared_load_u64": _shared_loader(U64, 8),
    "shared_load_f32": _shared_loader(F32, 4),
    "shared_load_f32x4": _shared_vector_loader("<4f"),
    "shared_store_v4": _shared_v4_storer(U32),
    "shared_store_u32": _shared_storer(U32, 4),
    "shared_store_u64": _shared_storer(U64, 8, MASK64),
    "shared_store_f32": _shared_storer(F32, 4),
    "shared_store_f32x4": _shared_v4_storer(F32),
    "shared_fetch_add_u32": _shared_adder(U32, 4, MASK32),
    "copy_async_16_or_zeros": _copy_async_16_or_zeros,
    "copy_async_stream_16_or_zeros": _copy_async_stream_16_or_zeros,
    "copy_async_commit": _copy_async_commit,
    **{f"copy_async_wait_{groups}": partial(_arrive, keep=groups) for groups in range(8)},
    "fence": _fence,
    "grid_launch_dependents": lambda thread, site: None,
}
"""Twins that need the thread but never lose the turn."""
