"""Writes the bundle of a run on a machine without a compiler: the kernels of the models and the probes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import attention, ceilings, models
from ferrule_server.executor.cuda.choice_launches import ChoiceSpecs
from ferrule_server.executor.cuda.kernel_choice import specs_needed
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.toolchain.build import load_all
from ferrule_server.kernels.cuda.toolchain.bundle import write_bundle
from ferrule_server.kernels.cuda.toolchain.compile import toolkit
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache
from ferrule_server.kernels.cuda.toolchain.progress import progress_bar, size
from ferrule_server.kernels.cuda.toolchain.sources import source_key


def every_spec(names: Sequence[str]) -> list[KernelSpec]:
    """Return all kernels that a run over some models launches."""
    found = ceilings.specs()
    for name in names:
        shape = models.shape_of(name)
        found += [*specs_needed(shape, is_deterministic=False), *ChoiceSpecs.of(shape).all]
        found += attention.specs(shape)
    return list(dict.fromkeys(found))


def build_bundle(path: Path, architecture: str, cache: Path, names: Sequence[str]) -> str:
    """Compile what the cache lacks, write the bundle and return what is in it, for people."""
    specs = every_spec(names)
    print(f"compiling {len(specs)} kernels for {architecture}, as far as the cache lacks them", flush=True)
    with progress_bar() as show:
        made = load_all(specs, architecture, cache=CubinCache(cache), progress=show)
    kernels = {source_key(spec, architecture): (spec.name, cubin) for spec, cubin in made.items()}
    write_bundle(path, architecture, toolkit(), kernels)
    return f"{path}: {len(kernels)} kernels, {size(path.stat().st_size)}"
