"""Where kernels find tensors of the CPU: each memory has an address of its own in the simulator's space."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.cuda_simulator.errors import OutOfBounds
from tools.cuda_simulator.memory import Memory

__all__ = ["FakeMemory"]

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Range:
    name: str
    host: int
    address: int
    data: Tensor
    is_mutable: bool


class FakeMemory:
    """Tensors and their addresses; all are kept alive, so no address on the host means two of them.

    Attributes:
        simulated: The same bytes, for the simulator.
        num_bytes: Of all tensors that kernels know.
    """

    def __init__(self) -> None:
        self.simulated = Memory()
        self.num_bytes = 0
        self._ranges: list[_Range] = []
        self._by_name: dict[str, _Range] = {}
        self._pinned: list[Tensor] = []

    def __contains__(self, tensor: Tensor) -> bool:
        near = self._near(tensor.data_ptr()) if tensor.numel() else None
        return near is not None and tensor.data_ptr() < near.host + near.data.numel()

    def add(self, name: str, tensor: Tensor, *, is_mutable: bool) -> None:
        """Give a tensor an address; one that has it already keeps it, as tied weights do."""
        data = _bytes(tensor)
        near = self._near(data.data_ptr())
        if near and data.data_ptr() < near.host + near.data.numel():
            is_same = (near.host, near.data.numel(), near.is_mutable) == (data.data_ptr(), data.numel(), is_mutable)
            assert is_same, f"{name} overlaps {near.name}"
            return
        if name in self._by_name:
            name = f"{name}#{len(self._by_name)}"
        offset = int(tensor.storage_offset()) * tensor.dtype.itemsize % _ALIGNMENT
        assert offset % 16 == 0, f"{name} begins {offset} bytes beyond a multiple of {_ALIGNMENT}"
        address = self.simulated.share(name, data.numpy(), mutable=is_mutable, offset=offset)
        added = self._by_name[name] = _Range(name, data.data_ptr(), address, data, is_mutable)
        self._ranges.append(added)
        self._ranges.sort(key=lambda one: one.host)
        self.num_bytes += data.numel()

    def add_pinned(self, tensor: Tensor) -> None:
        """Let a tensor be the host's side of copies."""
        self._pinned.append(tensor)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in memory of :meth:`add_pinned`."""
        return any(one.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for one in self._pinned)

    def address(self, tensor: Tensor) -> int:
        """Return where kernels find a tensor or a view of one.

        Raises:
            AssertionError: It was neither allocated nor adopted, or begins where kernels cannot load 16 bytes.
        """
        found = self._find(tensor)
        address = found.address + tensor.data_ptr() - found.host
        assert address % 16 == 0, f"{address - found.address} bytes into {found.name}: no multiple of 16"
        return address

    def name(self, tensor: Tensor) -> str:
        """Return what a tensor, or what it is a view of, is called."""
        return self._find(tensor).name

    def tensor(self, name: str) -> Tensor:
        """Return the bytes of the memory of a name: uint8 [num_bytes]."""
        return self._by_name[name].data

    def is_valid(self, address: int) -> bool:
        """Return whether an address lies in the memory of a tensor, or is 0: none."""
        try:
            return not address or bool(self.simulated.allocation(address))
        except OutOfBounds:
            return False

    def at(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor over the memory at an address."""
        found = self._by_name[self.simulated.allocation(address).name]
        first = address - found.address
        return found.data[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _find(self, tensor: Tensor) -> _Range:
        near = self._near(tensor.data_ptr())
        message = f"a tensor of shape {tuple(tensor.shape)} is neither allocated nor adopted"
        assert near, message
        assert tensor.data_ptr() + _bytes(tensor).numel() <= near.host + near.data.numel(), message
        return near

    def _near(self, host: int) -> _Range | None:
        """Return the last memory that begins at or before a place of the host."""
        index = bisect_right(self._ranges, host, key=lambda one: one.host)
        return self._ranges[index - 1] if index else None


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory from the first to the last element of a tensor: uint8 [n]."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.dtype.itemsize
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(tensor.untyped_storage(), tensor.storage_offset() * size, ((last + 1) * size,), (1,))
