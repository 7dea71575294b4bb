"""A double of ``cuda.bindings.driver``: structures and enumerations are the real ones, functions are recorded."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as real

from ferrule_server.executor.cuda.bundle import architectures_for
from ferrule_server.kernel_builder.compile import ARCHITECTURES, Multiprocessor

CONTEXT, LIBRARY, KERNEL, FUNCTION = 1001, 1002, 1003, 1004


@dataclass(frozen=True)
class RecordedLaunch:
    """What the driver was asked to launch, read from the structures at the moment of the call."""

    function: object
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    starts_early: bool
    arguments: tuple[float, ...]


@dataclass
class RecordedDriver:
    """Answers as a driver with one GPU of the given compute capability would.

    Attributes:
        capability: Of the GPU.
        version: Of CUDA, as the driver gives it.
        max_ctas_per_sm: That fit a multiprocessor; None: as threads and shared memory allow on that capability.
        kinds: ctypes of the parameters of the kernel that is launched next.
        failures: By function name: the error to answer with.
        calls: Names and arguments, in order.
        launches: Successful launches, in order.
    """

    capability: tuple[int, int] = (9, 0)
    kinds: Sequence[type[Any]] = ()
    num_devices: int = 1
    version: int = 13000
    max_ctas_per_sm: int | None = None
    failures: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    launches: list[RecordedLaunch] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(real, name)
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            if name in self.failures:
                return (getattr(real.CUresult, self.failures[name]),)
            answer: Callable[..., tuple[Any, ...]] = getattr(self, f"_{name}", lambda *_: ())
            return (real.CUresult.CUDA_SUCCESS, *answer(*arguments))

        return call

    @property
    def multiprocessor(self) -> Multiprocessor:
        """The limits of its compute capability; those of 9.0 for one without kernels."""
        known = [name for name in architectures_for(self.capability) if name in ARCHITECTURES]
        return ARCHITECTURES[known[0] if known else "sm_90a"]

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of every call of one function."""
        return [arguments for called, arguments in self.calls if called == name]

    def _cuDriverGetVersion(self) -> tuple[int]:  # noqa: N802
        return (self.version,)

    def _cuDeviceGetCount(self) -> tuple[int]:  # noqa: N802
        return (self.num_devices,)

    def _cuDeviceGet(self, index: int) -> tuple[int]:  # noqa: N802
        return (index,)

    def _cuDeviceGetName(self, length: int, device: int) -> tuple[bytes]:  # noqa: N802
        return (b"Recorded GPU".ljust(length, b"\0"),)

    def _cuDeviceGetAttribute(self, kind: Any, device: int) -> tuple[int]:  # noqa: N802
        name = kind.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        values = {
            "COMPUTE_CAPABILITY_MAJOR": self.capability[0],
            "COMPUTE_CAPABILITY_MINOR": self.capability[1],
            "MULTIPROCESSOR_COUNT": 132,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": self.multiprocessor.shared_bytes,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": self.multiprocessor.max_shared_bytes_per_cta,
        }
        return (values[name],)

    def _cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int]:  # noqa: N802
        return (CONTEXT,)

    def _cuLibraryLoadData(self, code: bytes, *options: Any) -> tuple[int]:  # noqa: N802
        assert options == (None, None, 0, None, None, 0)
        return (LIBRARY,)

    def _cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[int]:  # noqa: N802
        return (KERNEL,)

    def _cuKernelGetFunction(self, kernel: int) -> tuple[int]:  # noqa: N802
        return (FUNCTION,)

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(  # noqa: N802
        self, function: int, num_threads: int, shared_bytes: int
    ) -> tuple[int]:
        if self.max_ctas_per_sm is not None:
            return (self.max_ctas_per_sm,)
        return (self.multiprocessor.ctas(num_threads, 1, shared_bytes),)

    def _cuLaunchKernelEx(self, config: Any, function: object, arguments: int, extra: int) -> tuple[Any, ...]:  # noqa: N802
        early = real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert [attribute.id for attribute in config.attrs] in ([], [early])
        assert config.numAttrs == len(config.attrs)
        addresses = (ctypes.c_void_p * len(self.kinds)).from_address(arguments)
        values = tuple(kind.from_address(at).value for kind, at in zip(self.kinds, addresses, strict=True))
        self.launches.append(
            RecordedLaunch(
                function,
                (config.gridDimX, config.gridDimY, config.gridDimZ),
                (config.blockDimX, config.blockDimY, config.blockDimZ),
                config.sharedMemBytes,
                int(config.hStream),
                any(attribute.value.programmaticStreamSerializationAllowed for attribute in config.attrs),
                values,
            )
        )
        return ()
