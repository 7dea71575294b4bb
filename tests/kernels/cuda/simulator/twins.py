"""Twins of the instructions that touch memory. Each takes the thread first and the call site last."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from tests.kernels.cuda.simulator.errors import (
    Misaligned,
    OutOfBounds,
    PromiseBroken,
    ReadBeforeWait,
    ReadOnly,
    WroteBeforeWait,
)
from tests.kernels.cuda.simulator.memory import F32, I32, PAGE_BITS, U16, U32, U64, Page

if TYPE_CHECKING:
    from tests.kernels.cuda.simulator.grid import Thread

__all__ = ["ATOMIC", "GLOBAL", "SHARED", "SITE_BITS", "size_of"]

SITE_BITS = 12
Twin = Callable[..., object]

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1


def _fault(thread: Thread, address: int, size: int, error: BaseException | None = None) -> NoReturn:
    """Raise what is wrong with an access to global memory."""
    memory = thread.cta.grid.memory
    allocation = memory.allocation(address)
    place = f"{size} bytes at {memory.describe(address)}"
    if address & (size - 1):
        raise Misaligned(place)
    if address + size > allocation.base + allocation.num_bytes:
        raise OutOfBounds(f"{place}, which has {allocation.num_bytes}")
    if isinstance(error, ValueError):
        raise PromiseBroken(f"{error}: {place}") from error
    raise error or AssertionError(place)


def _open(thread: Thread, address: int) -> Page:
    """Return the page of a load that this thread's CTA has not touched yet."""
    cta = thread.cta
    memory = cta.grid.memory
    page = memory.page(address)
    if not page.is_mutable:
        cta.immutable[address >> PAGE_BITS] = cta.pages[address >> PAGE_BITS] = page
        return page
    if thread.loads is not cta.pages:
        raise ReadBeforeWait(f"mutable memory is read above grid_wait: {memory.describe(address)}")
    return cta.open(address >> PAGE_BITS, page)


def _open_to_store(thread: Thread, address: int) -> Page:
    cta = thread.cta
    memory = cta.grid.memory
    page = memory.page(address)
    if thread.loads is not cta.pages:
        raise WroteBeforeWait(f"a store above grid_wait: {memory.describe(address)}")
    if not page.is_mutable:
        raise ReadOnly(f"a store to immutable memory: {memory.describe(address)}")
    return cta.open(address >> PAGE_BITS, page)


def _loader(kind: int, size: int) -> Twin:
    shift, mask = size.bit_length() - 1, size - 1

    def load(thread: Thread, address: int, site: int) -> object:
        page = thread.loads.get(address >> PAGE_BITS) or _open(thread, address)
        place = address - page.base
        if place & mask or place < 0:
            _fault(thread, address, size)
        if page.is_mutable:
            thread.log(address << SITE_BITS | site)
        try:
            return page.views[kind][place >> shift]
        except IndexError as error:
            _fault(thread, address, size, error)

    return load


def _vector_loader(pattern: str, size: int, is_stream: bool) -> Twin:
    mask, unpack = size - 1, struct.Struct(pattern).unpack_from

    def load(thread: Thread, address: int, site: int) -> object:
        page = thread.loads.get(address >> PAGE_BITS) or _open(thread, address)
        place = address - page.base
        if place & mask or place < 0:
            _fault(thread, address, size)
        if page.is_mutable:
            if is_stream:
                raise ReadOnly(f"a streaming load of mutable memory: {thread.cta.grid.memory.describe(address)}")
            thread.log(address << SITE_BITS | site)
        try:
            return unpack(page.bytes, place)
        except struct.error as error:
            _fault(thread, address, size, error)

    return load


def _storer(kind: int, size: int, keep: int = 0) -> Twin:
    shift, mask = size.bit_length() - 1, size - 1

    def store(thread: Thread, address: int, value: int, site: int) -> None:
        page = thread.stores.get(address >> PAGE_BITS) or _open_to_store(thread, address)
        place = address - page.base
        if place & mask or place < 0:
            _fault(thread, address, size)
        try:
            page.views[kind][place >> shift] = value & keep if keep else value
        except (IndexError, ValueError) as error:
            _fault(thread, address, size, error)
        thread.log(address << SITE_BITS | site)
        thread.cta.pending[address] = size

    return store


def _vector_storer(pattern: str) -> Twin:
    pack = struct.Struct(pattern).pack_into

    def store(thread: Thread, address: int, value: tuple[int, int, int, int], site: int) -> None:
        page = thread.stores.get(address >> PAGE_BITS) or _open_to_store(thread, address)
        place = address - page.base
        if place & 15 or place < 0 or place + 16 > len(page.bytes):
            _fault(thread, address, 16)
        try:
            pack(page.bytes, place, *value)
        except struct.error as error:
            raise PromiseBroken(f"{error}: {value}") from error
        thread.log(address << SITE_BITS | site)
        thread.cta.pending[address] = 16

    return store


def _f32x4_storer() -> Twin:
    def store(thread: Thread, address: int, value: tuple[float, float, float, float], site: int) -> None:
        page = thread.stores.get(address >> PAGE_BITS) or _open_to_store(thread, address)
        place = address - page.base
        if place & 15 or place < 0 or place + 16 > len(page.bytes):
            _fault(thread, address, 16)
        floats, place = page.views[F32], place >> 2
        floats[place], floats[place + 1], floats[place + 2], floats[place + 3] = value
        thread.log(address << SITE_BITS | site)
        thread.cta.pending[address] = 16

    return store


def _strong_page(thread: Thread, address: int, size: int) -> tuple[Page, int]:
    """Return where a strong access works: in memory itself, where this CTA's own stores to the place come first."""
    cta = thread.cta
    if thread.loads is not cta.pages:
        raise ReadBeforeWait(f"a strong access above grid_wait: {cta.grid.memory.describe(address)}")
    page = cta.grid.memory.page(address)
    place = address - page.base
    if place & size - 1 or place + size > len(page.bytes):
        _fault(thread, address, size)
    if cta.pending:
        cta.publish_near(address)
    return page, place


def _strong_loader(kind: int, size: int) -> Twin:
    shift = size.bit_length() - 1

    def load(thread: Thread, address: int, site: int) -> object:
        page, place = _strong_page(thread, address, size)
        if page.is_mutable:
            thread.log(address << SITE_BITS | site)
            thread.cta.grid.clocks.observe(thread.clock, address)
        return page.views[kind][place >> shift]

    return load


def _load_relaxed_f32x4(thread: Thread, address: int, site: int) -> object:
    page, place = _strong_page(thread, address, 16)
    if page.is_mutable:
        thread.log(address << SITE_BITS | site)
        thread.cta.grid.clocks.observe(thread.clock, address)
    return struct.unpack_from("<4f", page.bytes, place)


def _atomic(kind: int, size: int, change: Callable[[int, int], int]) -> Twin:
    shift = size.bit_length() - 1

    def update(thread: Thread, address: int, value: int, site: int) -> int:
        page, place = _strong_page(thread, address, size)
        if not page.is_mutable:
            raise ReadOnly(f"an atomic on immutable memory: {thread.cta.grid.memory.describe(address)}")
        thread.log(address << SITE_BITS | site)
        old: int = page.views[kind][place >> shift]
        page.views[kind][place >> shift] = change(old, value)
        thread.cta.mirror(address, size, page)
        thread.cta.grid.clocks.exchange(thread.clock, address)
        return old

    return update


GLOBAL: dict[str, Twin] = {
    "load_stream_v4": _vector_loader("<4I", 16, True),
    "load_v4": _vector_loader("<4I", 16, False),
    "load_v2": _vector_loader("<2I", 8, False),
    "load_u32": _loader(U32, 4),
    "load_i32": _loader(I32, 4),
    "load_u64": _loader(U64, 8),
    "load_f32": _loader(F32, 4),
    "load_u16": _loader(U16, 2),
    "store_v4": _vector_storer("<4I"),
    "store_f32x4": _f32x4_storer(),
    "store_u32": _storer(U32, 4),
    "store_i32": _storer(I32, 4),
    "store_u64": _storer(U64, 8, _MASK64),
    "store_f32": _storer(F32, 4),
    "store_u16": _storer(U16, 2, 0xFFFF),
    "load_relaxed_f32x4": _load_relaxed_f32x4,
    "load_relaxed_f32": _strong_loader(F32, 4),
    "load_relaxed_u32": _strong_loader(U32, 4),
    "load_relaxed_u64": _strong_loader(U64, 8),
}
"""Twins of accesses to global memory: a thread may lose its turn before each."""

ATOMIC: dict[str, Twin] = {
    "atomic_increment_wrapping": _atomic(U32, 4, lambda old, last: 0 if old >= last else old + 1),
    "atomic_add_u32": _atomic(U32, 4, lambda old, value: old + value & _MASK32),
    "atomic_add_u64": _atomic(U64, 8, lambda old, value: old + value & _MASK64),
}
"""Twins that read and write global memory in one, strong; they too are preceded by a possible loss of turn."""


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

    def add(thread: Thread, offset: int, value: int, site: int) -> None:
        if offset & mask or offset < 0 or offset + size > len(thread.cta.shared):
            _shared_fault(thread, offset, size)
        thread.log(offset + thread.shared_base << SITE_BITS | site)
        words = thread.shared[kind]
        words[offset >> shift] = words[offset >> shift] + value & keep

    return add


def _copy_async_16(thread: Thread, offset: int, address: int, site: int) -> None:
    """Begin a copy; the bytes are read now and land when the thread waits."""
    if offset & 15 or offset < 0 or offset + 16 > len(thread.cta.shared):
        _shared_fault(thread, offset, 16)
    page = thread.loads.get(address >> PAGE_BITS) or _open(thread, address)
    place = address - page.base
    if place & 15 or place < 0 or place + 16 > len(page.bytes):
        _fault(thread, address, 16)
    if page.is_mutable:
        thread.log(address << SITE_BITS | site)
    write = (offset + thread.shared_base) << SITE_BITS | site
    thread.log(write)
    thread.open_copies.append((offset, page.bytes[place : place + 16], write))


def _copy_async_16_or_zeros(thread: Thread, offset: int, address: int, num_bytes: int, site: int) -> None:
    """Begin a copy, or the writing of zeros."""
    if num_bytes == 16:
        _copy_async_16(thread, offset, address, site)
        return
    if num_bytes:
        raise PromiseBroken(f"a copy of {num_bytes} bytes, neither 16 nor 0")
    if offset & 15 or offset < 0 or offset + 16 > len(thread.cta.shared):
        _shared_fault(thread, offset, 16)
    write = (offset + thread.shared_base) << SITE_BITS | site
    thread.log(write)
    thread.open_copies.append((offset, bytearray(16), write))


def _copy_async_commit(thread: Thread, site: int) -> None:
    thread.groups.append(thread.open_copies)
    thread.open_copies = []


def _arrive(thread: Thread, keep: int) -> None:
    shared = thread.cta.shared
    while len(thread.groups) > keep:
        for offset, data, write in thread.groups.pop(0):
            thread.log(write)
            shared[offset : offset + 16] = data


def _fence(thread: Thread, site: int) -> None:
    thread.cta.publish()
    thread.cta.grid.clocks.fence(thread.clock)


SHARED: dict[str, Twin] = {
    "thread_id": lambda thread, site: thread.thread_id,
    "cta_id": lambda thread, site: thread.cta.x,
    "cta_id_y": lambda thread, site: thread.cta.y,
    "num_ctas": lambda thread, site: thread.cta.grid.num_ctas,
    "shared_load_v4": _shared_vector_loader("<4I"),
    "shared_load_u32": _shared_loader(U32, 4),
    "shared_load_i32": _shared_loader(I32, 4),
    "shared_load_u64": _shared_loader(U64, 8),
    "shared_load_f32": _shared_loader(F32, 4),
    "shared_load_f32x4": _shared_vector_loader("<4f"),
    "shared_load_u16": _shared_loader(U16, 2),
    "shared_store_v4": _shared_v4_storer(U32),
    "shared_store_u32": _shared_storer(U32, 4),
    "shared_store_i32": _shared_storer(I32, 4),
    "shared_store_u64": _shared_storer(U64, 8, _MASK64),
    "shared_store_f32": _shared_storer(F32, 4),
    "shared_store_f32x4": _shared_v4_storer(F32),
    "shared_store_u16": _shared_storer(U16, 2, 0xFFFF),
    "shared_add_u32": _shared_adder(U32, 4, _MASK32),
    "shared_add_u64": _shared_adder(U64, 8, _MASK64),
    "copy_async_16": _copy_async_16,
    "copy_async_16_or_zeros": _copy_async_16_or_zeros,
    "copy_async_commit": _copy_async_commit,
    "copy_async_wait_all": lambda thread, site: _arrive(thread, 0),
    "copy_async_wait_1": lambda thread, site: _arrive(thread, 1),
    "fence": _fence,
    "grid_launch_dependents": lambda thread, site: None,
}
"""Twins that need the thread but never lose the turn."""

_SIZES = {"v4": 16, "f32x4": 16, "16": 16, "zeros": 16, "v2": 8, "u64": 8, "u16": 2}


def size_of(name: str) -> int:
    """Return how many bytes an instruction accesses, which the last part of its name tells."""
    return _SIZES.get(name.rsplit("_", 1)[-1], 4)
