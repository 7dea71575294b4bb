"""The simulator's interface on a GPU: what the tests of the kernels put, launch and get happens on the device.

The tests of layer 1 then check the same kernels with the same numbers where they are meant to run. Around every
allocation lies a guard that no kernel may touch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import Tensor

from ferrule_server.kernels.cuda.spec import KernelSpec, parameters
from ferrule_server.kernels.cuda.specialise import Constant
from tools.cuda_simulator.launch import Launch
from tools.gpu.gpu import Call, Gpu

GUARD_BYTES = 1 << 16
GUARD = 0x5A
_LARGEST_FILL = 1 << 30


@dataclass(frozen=True)
class _Allocation:
    whole: Tensor
    base: int
    num_bytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None
    first: NDArray[np.uint8] | None

    def part(self, offset: int, num_bytes: int) -> Tensor:
        assert 0 <= offset <= offset + num_bytes <= self.num_bytes
        begin = self.base - self.whole.data_ptr() + offset
        return self.whole[begin : begin + num_bytes]


class DeviceMemory:
    """Memory of the GPU with the methods of the simulator's."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._by_name: dict[str, _Allocation] = {}

    def put(self, name: str, array: ArrayLike, *, mutable: bool = False, offset: int = 0) -> int:
        """Place a copy of an array and return its address."""
        values = np.ascontiguousarray(array)
        first = values.reshape(-1).view(np.uint8).copy()
        address = self._allocate(name, values.nbytes, values.dtype, values.shape, offset, first=first)
        self.write(address, values)
        return address

    def empty(self, name: str, shape: int | tuple[int, ...], dtype: DTypeLike, *, offset: int = 0) -> int:
        """Allocate poisoned memory and return its address."""
        kind, sizes = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = int(np.prod(sizes, dtype=np.int64)) * kind.itemsize
        address = self._allocate(name, num_bytes, kind, sizes, offset)
        self._by_name[name].part(0, num_bytes).fill_(0xFF)
        return address

    def reset(self, *names: str) -> None:
        """Give allocations of ``put`` and ``empty`` what they began with."""
        for name in names:
            found = self._by_name[name]
            assert found.shape is not None, f"{name} is sparse"
            if found.first is None:
                found.part(0, found.num_bytes).fill_(0xFF)
            else:
                self.write(found.base, found.first)

    def sparse(
        self,
        name: str,
        num_bytes: int,
        init: Callable[[int, int], ArrayLike] | None = None,
        *,
        mutable: bool = True,
        offset: int = 0,
    ) -> int:
        """Allocate memory of any size, if the GPU has so much, and return its address."""
        free = 1 << 28 if self._gpu.is_dry else torch.cuda.mem_get_info()[0]
        if num_bytes > 0.9 * free:
            self._gpu.num_without_room += 1
            pytest.skip(f"a pool of {num_bytes >> 30} GiB does not fit into {free >> 30} GiB")
        if init is not None and num_bytes > _LARGEST_FILL:
            pytest.skip(f"filling {num_bytes >> 30} GiB from the host takes too long")
        address = self._allocate(name, num_bytes, np.dtype(np.uint16), None, offset)
        if init is not None:
            self.write(address, np.asarray(init(0, num_bytes)))
        elif num_bytes <= _LARGEST_FILL or not self._gpu.is_dry:
            self._by_name[name].part(0, num_bytes).fill_(0xFF)
        return address

    def get(self, name: str) -> NDArray[Any]:
        """Return a copy of an allocation."""
        found = self._by_name[name]
        assert found.shape is not None
        return self.read(found.base, found.shape, found.dtype)

    def address(self, name: str) -> int:
        """Return where an allocation begins."""
        return self._by_name[name].base

    def write(self, address: int, array: ArrayLike) -> None:
        """Write an array from an address on."""
        data = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
        found = self._find(address)
        found.part(address - found.base, data.numel()).copy_(data)

    def read(self, address: int, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a copy of what lies at an address."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        found = self._find(address)
        data: NDArray[Any] = found.part(address - found.base, num_bytes).cpu().numpy()
        return data.view(dtype).reshape(shape).copy()

    def check_guards(self) -> None:
        """Raise where a kernel wrote beside an allocation."""
        for name, found in self._by_name.items():
            begin = found.base - found.whole.data_ptr()
            for guard in (found.whole[:begin], found.whole[begin + found.num_bytes :]):
                assert bool((guard == GUARD).all()), f"something was written beside {name}"

    def _allocate(
        self,
        name: str,
        num_bytes: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...] | None,
        offset: int,
        *,
        first: NDArray[np.uint8] | None = None,
    ) -> int:
        assert name not in self._by_name, name
        size = num_bytes + 2 * GUARD_BYTES + offset
        whole = torch.empty(size, dtype=torch.uint8, device=self._gpu.torch_device)
        begin = GUARD_BYTES + offset
        whole[:begin].fill_(GUARD)
        whole[begin + num_bytes :].fill_(GUARD)
        base = whole.data_ptr() + begin
        self._by_name[name] = _Allocation(whole, base, num_bytes, dtype, shape, first)
        return base

    def _find(self, address: int) -> _Allocation:
        for found in self._by_name.values():
            if found.base <= address < found.base + found.num_bytes:
                return found
        raise AssertionError(f"{address:#x} lies in no allocation")


def run_on_device(gpu: Gpu, memory: DeviceMemory, launches: Sequence[Launch]) -> None:
    """Run launches as one chain; a dry run ends here, having packed all arguments."""
    if any(launch.specialised is not None for launch in launches):
        pytest.skip("mutants are for the simulator")
    calls = [_call(launch) for launch in launches]
    gpu.launch(gpu.prepare(calls))
    gpu.num_chains += 1
    if gpu.is_dry:
        pytest.skip("dry run: stopped at the driver")
    gpu.synchronize()
    memory.check_guards()


def spec_of(
    kernel: Callable[..., None], constants: Mapping[str, Constant], num_threads: int, shared_bytes: int
) -> KernelSpec:
    """Return the spec of a launch of a test; what it does not promise is left out."""
    return KernelSpec(kernel, tuple(sorted(constants.items())), num_threads, shared_bytes)


def _call(launch: Launch) -> Call:
    spec = spec_of(launch.kernel, launch.constants, launch.num_threads, launch.shared_bytes)
    names = [name for name, _ in parameters(launch.kernel)]
    values = [_plain(value) for value in launch.args]
    return Call(spec, dict(zip(names, values, strict=True)), _grid(launch), launch.shared_bytes)


def _grid(launch: Launch) -> int:
    assert isinstance(launch.grid, int), f"kernels of steps have grids of one dimension, not {launch.grid}"
    return launch.grid


def _plain(value: Any) -> int | float:
    return float(value) if isinstance(value, float | np.floating) else int(value)
