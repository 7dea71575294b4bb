"""The one way kernels are launched: cubins through the CUDA driver API of ``cuda.bindings``.

The driver API and not numba's launcher, because programmatic dependent launch, more than 48 KiB of shared memory and
launches prepared ahead are needed. The context is the device's primary one, which torch uses too: addresses and stream
handles of torch are valid here. Importing this module needs neither the package nor a GPU; :meth:`Device.open` does.

Source: NVIDIA, "CUDA Driver API", chapters "Library Management" and "Execution Control"; "CUDA C++ Programming Guide",
"Programmatic Dependent Launch".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec, parameters

_DEFAULT_SHARED_BYTES = 48 << 10
"""Dynamic shared memory a function may have without being asked for more."""

_MAX_SHARED_CARVEOUT = 100
"""Percent of the L1 that is shared memory. All kernels ask for the same: a change of the split drains the SM."""

_LOST = frozenset({4, 46, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 911, 999})
"""Numbers of the errors that end the context; torch knows no more, and may run without the package. They are faults of
a kernel (700 to 719, 721), of memory and links (214, 220, 226), and a device or context that is gone."""

_CELLS: dict[str, type[Any]] = {"Address": ctypes.c_int64, "I32": ctypes.c_int32, "F32": ctypes.c_float}
_BOUNDS = {"Address": (0, 1 << 63), "I32": (-(1 << 31), 1 << 31)}
_Driver = Any  # the module cuda.bindings.driver, which is not typed, or a double of it


class DriverError(Exception):
    """The driver refused a call, or reports what an earlier one broke.

    Attributes:
        code: Number of the error, such as 700 for an illegal address; 0: it is not an error of the driver.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class NoDevice(DriverError):
    """Nothing here can run the kernels: a package, the driver or a fitting GPU is missing; the message says which."""


def is_context_lost(code: int) -> bool:
    """Return whether an error, of the driver or of the runtime, which number theirs alike, ends the context.

    Every further call of this process on this device fails then too: only a new process helps.
    """
    return code in _LOST


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """What is known of a GPU.

    Attributes:
        name: As the driver says it.
        capability: Compute capability.
        cuda_version: The newest CUDA that its driver knows.
        num_sms: Multiprocessors.
        shared_bytes_per_sm: Shared memory of a multiprocessor.
        shared_bytes_per_cta: Most dynamic shared memory of one CTA.
    """

    name: str
    capability: tuple[int, int]
    cuda_version: tuple[int, int]
    num_sms: int
    shared_bytes_per_sm: int
    shared_bytes_per_cta: int

    def wave(self, spec: KernelSpec) -> int:
        """Return how many CTAs of a kernel are planned to run at a time."""
        return self.num_sms * spec.ctas_on(self.shared_bytes_per_sm)


class Device:
    """One GPU, its primary context current in the thread that opened it.

    Attributes:
        info: What is known of it.
    """

    def __init__(self, driver: _Driver, index: int) -> None:
        self._driver = driver
        self._handle = _call(driver, "cuDeviceGet", index)
        kinds = driver.CUdevice_attribute
        major = self._attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.info = GpuInfo(
            name=_call(driver, "cuDeviceGetName", 256, self._handle).split(b"\0")[0].decode(),
            capability=(major, minor),
            cuda_version=divmod(int(_call(driver, "cuDriverGetVersion")) // 10, 100),
            num_sms=self._attribute(kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            shared_bytes_per_sm=self._attribute(kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
            shared_bytes_per_cta=self._attribute(kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        )
        self._context = _call(driver, "cuDevicePrimaryCtxRetain", self._handle)
        self.make_current()

    @classmethod
    def open(cls, index: int = 0, driver: _Driver | None = None) -> Device:
        """Return a GPU, ready to load kernels.

        Args:
            index: Of the GPU.
            driver: Stands for ``cuda.bindings.driver``.

        Raises:
            NoDevice: The package, the driver or the GPU is missing.
            DriverError: The driver refuses.
        """
        driver = driver or _import_driver()
        try:
            _call(driver, "cuInit", 0)
            count = int(_call(driver, "cuDeviceGetCount"))
        except DriverError as error:
            raise NoDevice(f"the CUDA driver does not start: {error}", error.code) from error
        except (OSError, RuntimeError) as error:  # the bindings look for the driver's library at the first call
            raise NoDevice(f"no CUDA driver is installed: {error}") from error
        if index >= count:
            raise NoDevice(f"there is no GPU {index}, the driver sees {count}")
        return cls(driver, index)

    def make_current(self) -> None:
        """Make the context current in this thread: every thread that launches needs it once.

        Raises:
            DriverError: The driver refuses.
        """
        _call(self._driver, "cuCtxSetCurrent", self._context)

    def load(self, spec: KernelSpec, cubin: Cubin) -> Function:
        """Load a kernel, wholly: nothing is left to its first launch, which may stand in a capture.

        Raises:
            DriverError: The driver refuses the code.
            ValueError: The spec takes more shared memory than there is.
        """
        name, limit = self.info.name, self.info.shared_bytes_per_cta
        if spec.shared_bytes > limit:
            taken = f"{spec.name} takes {spec.shared_bytes} bytes of shared memory"
            raise ValueError(f"{taken}, {name} gives one CTA {limit}")
        return Function(self, self._driver, spec, cubin)

    def synchronize(self, stream: int) -> None:
        """Wait until a stream is idle.

        Args:
            stream: Its handle (``torch.cuda.Stream.cuda_stream``), 0 for the default one.

        Raises:
            DriverError: Something in it failed, perhaps long ago.
        """
        _call(self._driver, "cuStreamSynchronize", self._driver.CUstream(stream))

    def upload(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Put a copy from page-locked memory of the host to the device into a stream.

        Args:
            target: Address on the device.
            source: Address on the host, read when the stream gets there.
            num_bytes: Length.
            stream: Its handle.

        Raises:
            DriverError: The driver refuses, or reports an earlier fault.
        """
        _call(self._driver, "cuMemcpyHtoDAsync", target, source, num_bytes, self._driver.CUstream(stream))

    def download(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Put a copy from the device to page-locked memory of the host into a stream; as :meth:`upload`."""
        _call(self._driver, "cuMemcpyDtoHAsync", target, source, num_bytes, self._driver.CUstream(stream))

    def close(self) -> None:
        """Give the context back; functions loaded by this device must not be used any more.

        Raises:
            DriverError: The driver refuses.
        """
        _call(self._driver, "cuDevicePrimaryCtxRelease", self._handle)

    def _attribute(self, kind: object) -> int:
        return int(_call(self._driver, "cuDeviceGetAttribute", kind, self._handle))


class Function:
    """A loaded kernel.

    Attributes:
        spec: What it was made from.
    """

    def __init__(self, device: Device, driver: _Driver, spec: KernelSpec, cubin: Cubin) -> None:
        self.spec = spec
        self._device = device
        self._driver = driver
        self._code = cubin.code  # the library may read it as long as it lives
        self._library = _call(driver, "cuLibraryLoadData", self._code, None, None, 0, None, None, 0)
        kernel = _call(driver, "cuLibraryGetKernel", self._library, cubin.name.encode())
        self._handle = _call(driver, "cuKernelGetFunction", kernel)
        with suppress(RuntimeError):  # drivers before CUDA 12.4 lack it: the launch before a capture loads the kernel
            _call(driver, "cuFuncLoad", self._handle)
        kinds = driver.CUfunction_attribute
        if spec.shared_bytes > _DEFAULT_SHARED_BYTES:
            self._set(kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, spec.shared_bytes)
        self._set(kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, _MAX_SHARED_CARVEOUT)

    def prepare(
        self,
        arguments: Sequence[int | float],
        *,
        grid: int,
        shared_bytes: int | None = None,
        starts_early: bool = True,
    ) -> Launch:
        """Return a launch that can be made any number of times.

        Args:
            arguments: One value per parameter.
            grid: CTAs.
            shared_bytes: Dynamic shared memory per CTA; None: what the spec is planned for.
            starts_early: The kernel may start while the one before it in the stream still runs, up to its
                ``grid_wait`` (programmatic dependent launch); without effect before sm_90. False for the first kernel
                of a chain behind anything in the stream that wrote weights or tables: ``load_stream_v4`` reads them
                above the wait, when such a write need not be seen yet.

        Raises:
            ValueError: An argument does not fit its kind, their number is wrong, the shared memory is more than the
                spec is planned for, or a grid that starts early is more than one wave of what it is planned for: the
                rest would start behind the next kernel of the chain.
        """
        shared_bytes = self.spec.shared_bytes if shared_bytes is None else shared_bytes
        if shared_bytes > self.spec.shared_bytes:
            raise ValueError(f"{self.spec.name} is planned for {self.spec.shared_bytes} bytes, not {shared_bytes}")
        config = self._driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = self.spec.num_threads, 1, 1
        config.sharedMemBytes = shared_bytes
        if starts_early and self._device.info.capability >= (9, 0):
            config.attrs = [_dependent_launch(self._driver)]
            config.numAttrs = 1
        wave = self._device.info.wave(self.spec) if starts_early else None
        if wave is not None and grid > wave:
            raise ValueError(f"{self.spec.name}: a grid of {grid} CTAs that start early, one wave is {wave}")
        if grid < 1:
            raise ValueError(f"{self.spec.name}: a grid of {grid} CTAs")
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        if len(arguments) != (count := len(parameters(self.spec.kernel))):
            raise ValueError(f"{self.spec.name} takes {count} arguments, was given {len(arguments)}")
        return Launch(self._driver, self._handle, self.spec, config, arguments)

    def max_ctas_per_sm(self, shared_bytes: int) -> int:
        """Return how many CTAs fit one multiprocessor at a time.

        Raises:
            DriverError: The driver refuses.
        """
        threads = self.spec.num_threads
        return int(
            _call(self._driver, "cuOccupancyMaxActiveBlocksPerMultiprocessor", self._handle, threads, shared_bytes)
        )

    def unload(self) -> None:
        """Give the code's memory on the device back; launches of this function must not be made any more.

        Raises:
            DriverError: The driver refuses.
        """
        _call(self._driver, "cuLibraryUnload", self._library)

    def _set(self, kind: object, value: int) -> None:
        _call(self._driver, "cuFuncSetAttribute", self._handle, kind, value)


class Launch:
    """A prepared launch: call, call again. Not for two threads at a time.

    Attributes:
        spec: Of the kernel.
    """

    def __init__(
        self, driver: _Driver, function: object, spec: KernelSpec, config: Any, arguments: Sequence[float]
    ) -> None:
        self.spec = spec
        self._driver, self._function, self._config = driver, function, config
        named = zip(parameters(spec.kernel), arguments, strict=True)
        self._cells = [_cell(f"{spec.name}: {name}", kind, value) for (name, kind), value in named]
        self._addresses = (ctypes.c_void_p * len(self._cells))(*map(ctypes.addressof, self._cells))
        self._arguments = ctypes.addressof(self._addresses)
        self._stream: int | None = None

    def __call__(self, stream: int) -> None:
        """Put the kernel into a stream; faults of the kernel itself show at later calls.

        Args:
            stream: Its handle (``torch.cuda.Stream.cuda_stream``), 0 for the default one.

        Raises:
            DriverError: The driver refuses, or reports an earlier fault.
        """
        if stream != self._stream:
            self._config.hStream = self._driver.CUstream(stream)
            self._stream = stream
        code = self._driver.cuLaunchKernelEx(self._config, self._function, self._arguments, 0)[0]
        if code:
            raise _error("cuLaunchKernelEx", code, self.spec.name)


def _cell(name: str, kind: str, value: float) -> Any:
    """Return the memory of an argument; one that would wrap is refused."""
    bounds = _BOUNDS.get(kind)
    if bounds and not (isinstance(value, int) and bounds[0] <= value < bounds[1]):
        raise ValueError(f"{name} = {value!r} is no {kind}")
    return _CELLS[kind](value)


def _import_driver() -> _Driver:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoDevice(f"the package cuda-bindings is missing ({error}); pip install 'ferrule-server[cuda]'") from error
    return driver


def _dependent_launch(driver: _Driver) -> object:
    value = driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = value
    return attribute


def _call(driver: _Driver, name: str, *arguments: object) -> Any:
    code, *values = getattr(driver, name)(*arguments)
    if code:
        raise _error(name, code)
    return values[0] if values else None


def _error(call: str, code: Any, subject: str = "") -> DriverError:
    name = getattr(code, "name", f"CUDA error {int(code)}")
    advice = "; the context is lost, only a new process can use this GPU again" if is_context_lost(int(code)) else ""
    return DriverError(f"{call}{f' of {subject}' if subject else ''} failed: {name}{advice}", int(code))
