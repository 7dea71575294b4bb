"""Writes the bundle of a run on a machine without a compiler: the kernels of the models and the probes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import attention, ceilings, models
from ferrule_server.executor.cuda.choice_launches import ChoiceSpecs
from ferrule_server.executor.cuda.kernel_choice import specs_needed
from ferrule_server.kernels.cuda.spec import KernelSpec
from tools.kernels.build import build_with_progress


def every_spec(names: Sequence[str]) -> list[KernelSpec]:
    """Return all kernels that a run over some models launches."""
    found = ceilings.specs()
    for name in names:
        shape = models.shape_of(name)
        found += [*specs_needed(shape, is_deterministic=False), *ChoiceSpecs.of(shape)]
        found += attention.specs(shape)
    return list(dict.fromkeys(found))


def build_bundle(path: Path, architecture: str, names: Sequence[str]) -> None:
    """Compile everything and write the bundle."""
    build_with_progress(every_spec(names), {architecture: path})
