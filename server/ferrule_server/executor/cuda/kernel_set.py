"""The kernels of a model on a GPU: loaded when first asked for, launched with arguments by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from ferrule_server.executor.cuda.gpu import Gpu, GpuLost, Kernel, Launch, Refused
from ferrule_server.executor.fallback.fast_path import sentence
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec, parameters

__all__ = ["Arguments", "KernelMissing", "KernelSet", "Trigger"]

Arguments = Mapping[str, int | float | Tensor]
"""The runtime parameters of a kernel by name; a tensor stands for its address."""

Trigger = Literal["early", "late", "off"]
"""When a kernel lets the next one start: in its first lines, when its last CTA ends, or when all of it is done."""


class KernelMissing(Refused):
    """A kernel is needed that no bundle had."""


class KernelSet:
    """Kernels by name; what is not asked for takes no memory on the GPU.

    Invariant: no kernel is loaded twice.

    Args:
        gpu: That they run on.
        cubins: Of every kernel that may be asked for.
        trigger: When they let each other start; late is other code than early.
    """

    def __init__(self, gpu: Gpu, cubins: Mapping[KernelSpec, Cubin], trigger: Trigger = "early") -> None:
        self._gpu = gpu
        self._trigger = trigger
        self._cubins = {spec.name: (spec, cubin) for spec, cubin in cubins.items()}
        self._kernels: dict[str, Kernel] = {}

    @property
    def gpu(self) -> Gpu:
        """That the kernels run on."""
        return self._gpu

    def load(self, spec: KernelSpec) -> Kernel:
        """Return a kernel, loaded now if it is not yet: not while a graph is captured.

        Raises:
            KernelMissing: It is not among those that were built, or is built for less shared memory.
            Refused: The GPU refuses it.
        """
        kernel = self._kernels.get(spec.name)
        if kernel is None:
            with _refusing(spec):
                kernel = self._kernels[spec.name] = self._load(spec)
        return kernel

    def prepare(self, spec: KernelSpec, arguments: Arguments, grid: int, starts_early: bool = True) -> Launch:
        """Return a launch with the shared memory that ``spec`` says.

        Args:
            spec: Of the kernel; what was built of the same name may be planned for more shared memory.
            arguments: All runtime parameters by name, and no others.
            grid: CTAs.
            starts_early: As :meth:`~ferrule_server.executor.cuda.gpu.Kernel.prepare` says.

        Raises:
            KernelMissing: As :meth:`load`.
            Refused: The GPU refuses the kernel, or its launch cannot be made.
        """
        kernel = self.load(spec)
        names = [name for name, _ in parameters(spec.kernel)]
        assert arguments.keys() == set(names), f"{spec.name} takes {names}, is given {sorted(arguments)}"
        with _refusing(spec):
            values = [self._value(arguments[name]) for name in names]
            starts_early = starts_early and self._trigger != "off"
            return kernel.prepare(values, grid=grid, shared_bytes=spec.shared_bytes, starts_early=starts_early)

    def _value(self, argument: float | Tensor) -> int | float:
        return self._gpu.address(argument) if isinstance(argument, Tensor) else argument

    def _load(self, spec: KernelSpec) -> Kernel:
        if spec.name not in self._cubins:
            message = f"{spec.name} was not built; it is not among the {len(self._cubins)} kernels there are"
            raise KernelMissing(message, spec.kernel.__name__)
        built, cubin = self._cubins[spec.name]
        if spec.shared_bytes > built.shared_bytes:
            message = f"{spec.name} was built for {built.shared_bytes} bytes, not {spec.shared_bytes}"
            raise KernelMissing(message, spec.kernel.__name__)
        return self._gpu.load(built, cubin.late if self._trigger == "late" else cubin)


@contextmanager
def _refusing(spec: KernelSpec) -> Iterator[None]:
    """Raise Refused in place of any error, because it would be the same at every step that needs the kernel."""
    try:
        yield
    except (GpuLost, Refused):
        raise
    except Exception as error:
        raise Refused(sentence(error), spec.kernel.__name__) from error
