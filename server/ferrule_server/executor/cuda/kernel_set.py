"""The kernels of a model on a GPU: all loaded at once, launched with arguments by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from ferrule_server.executor.cuda.gpu import Gpu, GpuError, Launch
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec, parameters

Arguments = Mapping[str, int | float | Tensor]
"""The runtime parameters of a kernel by name; a tensor stands for its address."""

Trigger = Literal["early", "late", "off"]
"""When a kernel lets the next one start: in its first lines, when its last CTA ends, or when all of it is done."""


class KernelSet:
    """Kernels by name, loaded when the set is made: no step waits for one, and none finds one that does not load.

    Args:
        gpu: That they run on.
        cubins: Of every kernel that may be launched.
        trigger: When they let each other start; late is other code than early.

    Attributes:
        gpu: As given.

    Raises:
        GpuError: The GPU refuses one.
    """

    def __init__(self, gpu: Gpu, cubins: Mapping[KernelSpec, Cubin], trigger: Trigger = "early") -> None:
        self.gpu = gpu
        self._trigger = trigger
        self._kernels = {
            spec.name: gpu.load(spec, cubin.late if trigger == "late" else cubin) for spec, cubin in cubins.items()
        }

    def prepare(self, spec: KernelSpec, arguments: Arguments, grid: int, starts_early: bool = True) -> Launch:
        """Return a launch with the shared memory that ``spec`` says.

        Args:
            spec: Of the kernel; what was built of the same name may be planned for more shared memory.
            arguments: All runtime parameters by name, and no others.
            grid: CTAs.
            starts_early: As :meth:`~ferrule_server.executor.cuda.gpu.Kernel.prepare` says.

        Raises:
            GpuError: The kernel is not in the set.
            ValueError: It was built for less shared memory, or takes other arguments.
        """
        if spec.name not in self._kernels:
            raise GpuError(f"{spec.name} was not built; it is not among the {len(self._kernels)} kernels there are")
        names = [name for name, _ in parameters(spec.kernel)]
        assert arguments.keys() == set(names), f"{spec.name} takes {names}, is given {sorted(arguments)}"
        values = [self._value(arguments[name]) for name in names]
        starts_early = starts_early and self._trigger != "off"
        kernel = self._kernels[spec.name]
        return kernel.prepare(values, grid=grid, shared_bytes=spec.shared_bytes, starts_early=starts_early)

    def _value(self, argument: float | Tensor) -> int | float:
        return self.gpu.address(argument) if isinstance(argument, Tensor) else argument
