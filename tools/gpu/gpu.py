"""The GPU under test, or its double of a dry run: cubins from a bundle or the compiler, ready to launch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ferrule_server.executor.cuda.bundle import Bundle, architectures_for
from ferrule_server.executor.cuda.driver import Device, Function, Launch
from ferrule_server.kernel_builder.compile import ARCHITECTURES, capability_of, compile_all
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec, parameters
from tools.gpu.recorded_driver import RecordedDriver

CELLS: dict[str, type[Any]] = {"Address": ctypes.c_int64, "I32": ctypes.c_int32, "F32": ctypes.c_float}


@dataclass(frozen=True)
class Call:
    """One kernel with what it is launched with.

    Attributes:
        spec: Of the kernel.
        arguments: By parameter name; tensors stand for their addresses.
        grid: CTAs.
        shared_bytes: Dynamic shared memory per CTA; None: what the spec is planned for.
    """

    spec: KernelSpec
    arguments: Mapping[str, Any]
    grid: int
    shared_bytes: int | None = None


class Gpu:
    """One GPU and its loaded kernels.

    Args:
        bundle: Kernels that are compiled already, if there is one; what it lacks is compiled in memory.
        dry_architecture: Of what a dry run compiles; None: use the GPU.
        is_late: Use the code that lets the next kernel start at the end.

    Attributes:
        starts_early: False: kernels follow one another, whatever :meth:`prepare` is told.
        bundle: The open bundle, or None.
        architecture: That kernels are compiled for.
        num_chains: Launched by tests of layer 1.
        num_without_room: Tests of layer 1 whose memory does not fit the GPU.
    """

    def __init__(
        self, bundle: Path | None = None, dry_architecture: str | None = None, *, is_late: bool = False
    ) -> None:
        self.is_dry = dry_architecture is not None
        self._recorded: RecordedDriver | None = None
        if dry_architecture is None:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self.device = Device.open(torch.cuda.current_device())
        else:
            self._recorded = RecordedDriver(capability=capability_of(dry_architecture))
            self.device = Device.open(0, self._recorded)
        self.torch_device = torch.device("cpu" if self.is_dry else "cuda")
        self.num_sms = self.device.info.num_sms
        self.architecture = next(it for it in architectures_for(self.device.info.capability) if it in ARCHITECTURES)
        self.bundle = Bundle.open(bundle) if bundle else None
        self._is_late = is_late
        self.starts_early = True
        self._functions: dict[KernelSpec, Function] = {}
        self.num_chains = 0
        self.num_without_room = 0

    def load(self, specs: Sequence[KernelSpec]) -> None:
        """Load kernels, each once."""
        made = self.cubins([spec for spec in specs if spec not in self._functions])
        for spec, cubin in made.items():
            self._functions[spec] = self.device.load(spec, cubin.late if self._is_late else cubin)

    def cubins(self, specs: Sequence[KernelSpec]) -> dict[KernelSpec, Cubin]:
        """Return kernels from the bundle; what it lacks is compiled, all of it at once."""
        made = self.bundle.read(specs) if self.bundle else {}
        if lacking := [spec for spec in specs if spec not in made]:
            made |= compile_all(lacking, self.architecture)
        return made

    def prepare(self, calls: Sequence[Call], *, starts_early: bool = True) -> list[Launch]:
        """Return the launches of several calls, all arguments packed."""
        self.load([call.spec for call in calls])
        return [
            self._functions[call.spec].prepare(
                [_value(call.arguments[name]) for name, _ in parameters(call.spec.kernel)],
                grid=call.grid,
                shared_bytes=call.shared_bytes,
                starts_early=starts_early and self.starts_early,
            )
            for call in calls
        ]

    def launch(self, launches: Sequence[Launch]) -> None:
        """Put launches into torch's current stream; in a dry run, into the record."""
        stream = 0 if self.is_dry else torch.cuda.current_stream().cuda_stream
        for launch in launches:
            if self._recorded:
                self._recorded.kinds = [CELLS[kind] for _, kind in parameters(launch.spec.kernel)]
            launch(stream)

    def synchronize(self) -> None:
        """Wait for everything; faults of kernels show here."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def function(self, spec: KernelSpec) -> Function:
        """Return a loaded kernel."""
        self.load([spec])
        return self._functions[spec]


def _value(argument: Any) -> int | float:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
