"""Twins of the instructions that touch global memory. Each takes the thread first and the call site last."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from tools.cuda_simulator.errors import (
    Misaligned,
    OutOfBounds,
    PromiseBroken,
    ReadBeforeWait,
    ReadOnly,
    WroteBeforeWait,
)
from tools.cuda_simulator.memory import F32, I32, PAGE_BITS, U16, U32, U64, Page

if TYPE_CHECKING:
    from tools.cuda_simulator.grid import Thread

__all__ = [
    "ATOMIC",
    "GLOBAL",
    "MASK32",
    "MASK64",
    "SITE_BITS",
    "Twin",
    "fault",
    "open_immutable",
    "open_page",
    "size_of",
]

SITE_BITS = 12
Twin = Callable[..., object]

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def fault(thread: Thread, address: int, size: int, error: BaseException | None = None) -> NoReturn:
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


def open_page(thread: Thread, address: int) -> Page:
    """Return the page of a load that this thread's CTA has not touched yet."""
    cta = thread.cta
    page = cta.grid.memory.page(address)
    if not thread.has_waited:
        raise ReadBeforeWait(f"only load_stream_v4 may stand above grid_wait: {cta.grid.memory.describe(address)}")
    if not page.is_mutable:
        cta.immutable[address >> PAGE_BITS] = cta.pages[address >> PAGE_BITS] = page
        return page
    return cta.open(address >> PAGE_BITS, page)


def open_immutable(thread: Thread, address: int) -> Page:
    """Return the page of a streaming load, which may stand above the wait."""
    cta = thread.cta
    page = cta.grid.memory.page(address)
    if page.is_mutable:
        raise ReadOnly(f"a streaming load of mutable memory: {cta.grid.memory.describe(address)}")
    cta.immutable[address >> PAGE_BITS] = page
    return page


def _open_to_store(thread: Thread, address: int) -> Page:
    cta = thread.cta
    memory = cta.grid.memory
    page = memory.page(address)
    if not thread.has_waited:
        raise WroteBeforeWait(f"a store above grid_wait: {memory.describe(address)}")
    if not page.is_mutable:
        raise ReadOnly(f"a store to immutable memory: {memory.describe(address)}")
    return cta.open(address >> PAGE_BITS, page)


def _loader(kind: int, size: int) -> Twin:
    shift, mask = size.bit_length() - 1, size - 1

    def load(thread: Thread, address: int, site: int) -> object:
        page = thread.loads.get(address >> PAGE_BITS) or open_page(thread, address)
        place = address - page.base
        if place & mask or place < 0:
            fault(thread, address, size)
        if page.is_mutable:
            thread.log(address << SITE_BITS | site)
        try:
            return page.views[kind][place >> shift]
        except IndexError as error:
            fault(thread, address, size, error)

    return load


def _vector_loader(pattern: str, size: int) -> Twin:
    mask, unpack = size - 1, struct.Struct(pattern).unpack_from

    def load(thread: Thread, address: int, site: int) -> object:
        page = thread.loads.get(address >> PAGE_BITS) or open_page(thread, address)
        place = address - page.base
        if place & mask or place < 0:
            fault(thread, address, size)
        if page.is_mutable:
            thread.log(address << SITE_BITS | site)
        try:
            return unpack(page.bytes, place)
        except struct.error as error:
            fault(thread, address, size, error)

    return load


_FOUR_WORDS = struct.Struct("<4I")


def _load_stream_v4(thread: Thread, address: int, site: int) -> object:
    page = thread.cta.immutable.get(address >> PAGE_BITS) or open_immutable(thread, address)
    place = address - page.base
    if place & 15 or place < 0:
        fault(thread, address, 16)
    try:
        return _FOUR_WORDS.unpack_from(page.bytes, place)
    except struct.error as error:
        fault(thread, address, 16, error)


def _storer(kind: int, size: int, keep: int = 0) -> Twin:
    shift, mask = size.bit_length() - 1, size - 1

    def store(thread: Thread, address: int, value: int, site: int) -> None:
        page = thread.stores.get(address >> PAGE_BITS) or _open_to_store(thread, address)
        place = address - page.base
        if place & mask or place < 0:
            fault(thread, address, size)
        try:
            page.views[kind][place >> shift] = value & keep if keep else value
        except (IndexError, ValueError) as error:
            fault(thread, address, size, error)
        thread.log(address << SITE_BITS | site)
        pending = thread.cta.pending
        if pending.get(address, 0) < size:  # a wider store that began here is pending too
            pending[address] = size

    return store


def _vector_storer(pattern: str) -> Twin:
    pack = struct.Struct(pattern).pack_into

    def store(thread: Thread, address: int, value: tuple[int, int, int, int], site: int) -> None:
        page = thread.stores.get(address >> PAGE_BITS) or _open_to_store(thread, address)
        place = address - page.base
        if place & 15 or place < 0 or place + 16 > len(page.bytes):
            fault(thread, address, 16)
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
            fault(thread, address, 16)
        floats, place = page.views[F32], place >> 2
        floats[place], floats[place + 1], floats[place + 2], floats[place + 3] = value
        thread.log(address << SITE_BITS | site)
        thread.cta.pending[address] = 16

    return store


def _strong_page(thread: Thread, address: int, size: int) -> tuple[Page, int]:
    """Return where a strong access works: in memory itself, where this CTA's own stores to the place come first."""
    cta = thread.cta
    if not thread.has_waited:
        raise ReadBeforeWait(f"a strong access above grid_wait: {cta.grid.memory.describe(address)}")
    page = cta.grid.memory.page(address)
    place = address - page.base
    if place & size - 1 or place + size > len(page.bytes):
        fault(thread, address, size)
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


def _strong_vector_loader(pattern: str) -> Twin:
    def load(thread: Thread, address: int, site: int) -> object:
        page, place = _strong_page(thread, address, 16)
        if page.is_mutable:
            thread.log(address << SITE_BITS | site)
            thread.cta.grid.clocks.observe(thread.clock, address)
        return struct.unpack_from(pattern, page.bytes, place)

    return load


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


_load_v4 = _vector_loader("<4I", 16)


def _load_if_v4(thread: Thread, condition: int, address: int, otherwise: object, site: int) -> object:
    return _load_v4(thread, address, site) if condition else otherwise


GLOBAL: dict[str, Twin] = {
    "load_if_v4": _load_if_v4,
    "load_stream_v4": _load_stream_v4,
    "load_v4": _load_v4,
    "load_u32": _loader(U32, 4),
    "load_i32": _loader(I32, 4),
    "load_u64": _loader(U64, 8),
    "load_f32": _loader(F32, 4),
    "load_u16": _loader(U16, 2),
    "store_v4": _vector_storer("<4I"),
    "store_f32x4": _f32x4_storer(),
    "store_u32": _storer(U32, 4),
    "store_i32": _storer(I32, 4),
    "store_u64": _storer(U64, 8, MASK64),
    "store_f32": _storer(F32, 4),
    "store_u16": _storer(U16, 2, 0xFFFF),
    "load_relaxed_f32x4": _strong_vector_loader("<4f"),
    "load_relaxed_v4": _strong_vector_loader("<4I"),
    "load_relaxed_f32": _strong_loader(F32, 4),
    "load_relaxed_u32": _strong_loader(U32, 4),
    "load_relaxed_u64": _strong_loader(U64, 8),
}
"""Twins of accesses to global memory: a thread may lose its turn before each."""

ATOMIC: dict[str, Twin] = {
    "atomic_increment_wrapping": _atomic(U32, 4, lambda old, last: 0 if old >= last else old + 1),
    "atomic_add_u64": _atomic(U64, 8, lambda old, value: old + value & MASK64),
}
"""Twins that read and write global memory in one, strong; they too are preceded by a possible loss of turn."""


_SIZES = {"v4": 16, "f32x4": 16, "16": 16, "zeros": 16, "v2": 8, "u64": 8, "u16": 2}


def size_of(name: str) -> int:
    """Return how many bytes an instruction accesses, which the last part of its name tells."""
    return _SIZES.get(name.rsplit("_", 1)[-1], 4)
