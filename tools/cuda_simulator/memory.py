"""Global memory as kernels address it: allocations far apart in 64 bits, made of pages that exist once touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from tools.cuda_simulator.errors import OutOfBounds

__all__ = ["F32", "I32", "PAGE_BITS", "U16", "U32", "U64", "Allocation", "Memory", "Page", "views"]

PAGE_BITS = 16
_PAGE_BYTES = 1 << PAGE_BITS
_REGION_BITS = 40
_POISON_FLOAT, _POISON_INT = 0xFF, 0xA5

U16, U32, I32, F32, U64 = range(5)
_FORMATS: tuple[Literal["H", "I", "i", "f", "Q"], ...] = ("H", "I", "i", "f", "Q")


def views(whole: memoryview) -> tuple[memoryview[Any], ...]:
    """Return typed views of bytes, in the order U16, U32, I32, F32, U64; what does not fill an element is left out."""
    sizes = zip(_FORMATS, (2, 4, 4, 4, 8), strict=True)
    made: list[memoryview[Any]] = [whole[: len(whole) & -size].cast(code) for code, size in sizes]
    return tuple(made)


class Page:
    """Bytes of one allocation within one page: ``base`` is the address of the first, ``views`` are typed.

    The bytes are its own, or those of an array that somebody else holds.
    """

    __slots__ = ("base", "bytes", "is_mutable", "views")

    def __init__(self, base: int, data: bytearray | memoryview, is_mutable: bool) -> None:
        self.base = base
        self.bytes: Any = data  # both slice and take slices; they have no common type
        self.is_mutable = is_mutable
        whole = memoryview(data)
        self.views = views(whole)

    def copy(self) -> Page:
        """Return a page of the same bytes at the same place."""
        return Page(self.base, bytearray(self.bytes), self.is_mutable)


Fill = Callable[[int, int], ArrayLike]


@dataclass(slots=True, eq=False)
class Allocation:
    """A range of addresses.

    Attributes:
        name: For messages.
        base: Address of the first byte.
        num_bytes: Length.
        is_mutable: Kernels may write it.
        dtype: Of its elements.
        shape: Of the whole; None for a sparse pool.
        fill: Gives the bytes of a page at first touch, from (offset, count).
        is_tracked: Reading what nobody wrote is an error.
        written: One flag per two bytes, where tracked.
        shared: The bytes of an array of :meth:`Memory.share`.
    """

    name: str
    base: int
    num_bytes: int
    is_mutable: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None
    fill: Fill
    is_tracked: bool
    written: NDArray[np.bool_]
    shared: memoryview | None = None


class Memory:
    """The global memory of a device.

    Addresses of different allocations differ in the upper bits, so that no overrun reaches a neighbour.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Allocation] = {}
        self._by_region: dict[int, Allocation] = {}
        self._pages: dict[int, Page] = {}

    def put(self, name: str, array: ArrayLike, *, mutable: bool = False, offset: int = 0) -> int:
        """Place a copy of an array and return its address, which is ``offset`` beyond a multiple of 64 KiB."""
        values = np.ascontiguousarray(array)
        flat = values.reshape(-1).view(np.uint8).copy()
        allocation = self._allocate(name, flat.size, values.dtype, shape=values.shape, mutable=mutable, offset=offset)
        allocation.fill = lambda start, count: flat[start : start + count]
        self._touch_all(allocation)
        return allocation.base

    def empty(self, name: str, shape: int | tuple[int, ...], dtype: DTypeLike, *, offset: int = 0) -> int:
        """Allocate poisoned, mutable memory that must be written before it is read; return its address."""
        kind = np.dtype(dtype)
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = int(np.prod(sizes, dtype=np.int64)) * kind.itemsize
        allocation = self._allocate(name, num_bytes, kind, shape=sizes, mutable=True, offset=offset)
        allocation.is_tracked = True
        allocation.written = np.zeros(num_bytes // 2 + 1, bool)
        self._touch_all(allocation)
        return allocation.base

    def reset(self, *names: str) -> None:
        """Give allocations of ``put`` and ``empty`` what they began with, poison and nobody's writing included."""
        for name in names:
            allocation = self._by_name[name]
            assert allocation.shape is not None, f"{name} is sparse"
            assert allocation.shared is None, f"{name} belongs to somebody else"
            allocation.written[:] = False
            self._touch_all(allocation)

    def sparse(
        self, name: str, num_bytes: int, init: Fill | None = None, *, mutable: bool = True, offset: int = 0
    ) -> int:
        """Allocate memory of any size, NaN or ``init(offset, count)`` at first touch; return its address.

        Use :meth:`write` and :meth:`read` for its parts. Reading what nobody wrote gives the poison, and no error.
        """
        allocation = self._allocate(name, num_bytes, np.dtype(np.uint16), shape=None, mutable=mutable, offset=offset)
        if init is not None:
            allocation.fill = init
        return allocation.base

    def share(self, name: str, array: NDArray[Any], *, mutable: bool, offset: int = 0) -> int:
        """Let kernels use an array where it is, contiguous: what either side writes, the other reads.

        All of it counts as written: what its owner does to it is not seen here.

        Returns:
            Its address, which is ``offset`` beyond a multiple of 64 KiB.
        """
        assert array.flags.c_contiguous, f"{name} is not contiguous"
        flat = array.reshape(-1).view(np.uint8)
        allocation = self._allocate(name, flat.size, array.dtype, shape=array.shape, mutable=mutable, offset=offset)
        allocation.shared = memoryview(flat)  # type: ignore[arg-type]  # numpy's arrays are buffers
        return allocation.base

    def get(self, name: str) -> NDArray[Any]:
        """Return a copy of an allocation, with the shape and dtype it was made with."""
        allocation = self._by_name[name]
        assert allocation.shape is not None, "a sparse pool is read in parts: memory.read"
        data = self.read(allocation.base, allocation.num_bytes, np.uint8)
        return data.view(allocation.dtype).reshape(allocation.shape)

    def address(self, name: str) -> int:
        """Return where an allocation begins."""
        return self._by_name[name].base

    def write(self, address: int, array: ArrayLike) -> None:
        """Write an array from an address on, as the host does between kernels."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for page, start, place, count in self._spans(address, flat.size):
            page.bytes[place : place + count] = flat[start : start + count].tobytes()
        allocation = self.allocation(address)
        if allocation.is_tracked:
            first = address - allocation.base
            allocation.written[first // 2 : (first + flat.size + 1) // 2] = True

    def read(self, address: int, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a copy of what lies at an address."""
        kind = np.dtype(dtype)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        parts = [page.bytes[place : place + count] for page, _, place, count in self._spans(address, num_bytes)]
        return np.frombuffer(b"".join(parts), kind).reshape(shape).copy()

    def allocation(self, address: int) -> Allocation:
        """Return the allocation that an address lies in.

        Raises:
            OutOfBounds: None.
        """
        found = self._by_region.get(address >> _REGION_BITS)
        if found is None or not found.base <= address < found.base + found.num_bytes:
            near = f"; {found.name} is {found.base:#x} + {found.num_bytes}" if found else ""
            raise OutOfBounds(f"address {address:#x} lies in no allocation{near}")
        return found

    def allocations(self) -> list[Allocation]:
        """Return all allocations."""
        return list(self._by_name.values())

    def page(self, address: int) -> Page:
        """Return the page of an address, made now if it is touched first.

        Raises:
            OutOfBounds: The address lies in no allocation.
        """
        page = self._pages.get(address >> PAGE_BITS)
        if page is None or not page.base <= address < page.base + len(page.bytes):
            page = self._make(self.allocation(address), address >> PAGE_BITS)
        return page

    def describe(self, address: int) -> str:
        """Return an address as name and offset."""
        found = self._by_region.get(address >> _REGION_BITS)
        return f"{found.name}+{address - found.base}" if found else f"{address:#x}"

    def _allocate(
        self,
        name: str,
        num_bytes: int,
        dtype: np.dtype[Any],
        *,
        shape: tuple[int, ...] | None,
        mutable: bool,
        offset: int,
    ) -> Allocation:
        assert name not in self._by_name, name
        assert num_bytes > 0, name
        assert offset % 16 == 0, offset
        region = 1 + max(self._by_region, default=0)
        base = (region << _REGION_BITS) + (1 << 32) + offset
        poison = _POISON_INT if dtype.kind in "iu" and dtype.itemsize != 2 else _POISON_FLOAT
        fill: Fill = lambda start, count: np.full(count, poison, np.uint8)  # noqa: E731
        made = Allocation(name, base, num_bytes, mutable, dtype, shape, fill, False, np.zeros(0, bool))
        self._by_name[name] = made
        for covered in range(base >> _REGION_BITS, (base + num_bytes >> _REGION_BITS) + 1):
            self._by_region[covered] = made
        return made

    def _touch_all(self, allocation: Allocation) -> None:
        last = allocation.base + allocation.num_bytes - 1
        for index in range(allocation.base >> PAGE_BITS, (last >> PAGE_BITS) + 1):
            self._make(allocation, index)

    def _make(self, allocation: Allocation, index: int) -> Page:
        first = max(allocation.base, index << PAGE_BITS)
        end = min(allocation.base + allocation.num_bytes, index + 1 << PAGE_BITS)
        data = self._bytes(allocation, first - allocation.base, end - first)
        page = self._pages[index] = Page(first, data, allocation.is_mutable)
        return page

    def _bytes(self, allocation: Allocation, start: int, count: int) -> bytearray | memoryview:
        if allocation.shared is not None:
            return allocation.shared[start : start + count]
        data = np.ascontiguousarray(allocation.fill(start, count)).view(np.uint8)
        assert data.size == count, (allocation.name, data.size, count)
        return bytearray(data.tobytes())

    def _spans(self, address: int, num_bytes: int) -> list[tuple[Page, int, int, int]]:
        spans, done = [], 0
        while done < num_bytes:
            page = self.page(address + done)
            place = address + done - page.base
            count = min(num_bytes - done, len(page.bytes) - place)
            spans.append((page, done, place, count))
            done += count
        return spans
