"""Cubins: compiled once per machine, kept on disk, found again by what they are made from.

A bundle (``bundle.py``) brings cubins from another machine; it is asked first, by the sources alone, so that a machine
needs neither the compiler nor its versions. Then the cache of this machine (``cubin_cache.py``), by sources and
versions; what is in neither is compiled.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import platform
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.toolchain.bundle import Bundle
from ferrule_server.kernels.cuda.toolchain.compile import CompileError, Cubin, compile_spec, toolkit
from ferrule_server.kernels.cuda.toolchain.cpus import usable_cpus
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache
from ferrule_server.kernels.cuda.toolchain.sources import source_key

__all__ = ["Job", "Progress", "build", "load_all"]

Job = tuple[KernelSpec, str]
"""What to compile, and for which architecture."""

Progress = Callable[[int, int, str], None]
"""Called with kernels that are ready, kernels in all, and the name of the latest."""

_NICENESS = 10
"""Of a compiler beside a server."""

_log = logging.getLogger(__name__)


def load_all(
    specs: Iterable[KernelSpec],
    architecture: str,
    *,
    cache: CubinCache | None = None,
    bundle: Bundle | None = None,
    num_workers: int | None = None,
    is_serving: bool = False,
    progress: Progress | None = None,
) -> dict[KernelSpec, Cubin]:
    """Return the cubin of every spec for one architecture; like :func:`build`."""
    jobs = [(spec, architecture) for spec in specs]
    made = build(jobs, cache=cache, bundle=bundle, num_workers=num_workers, is_serving=is_serving, progress=progress)
    return {spec: cubin for (spec, _), cubin in made.items()}


def build(
    jobs: Iterable[Job],
    *,
    cache: CubinCache | None = None,
    bundle: Bundle | None = None,
    num_workers: int | None = None,
    is_serving: bool = False,
    progress: Progress | None = None,
) -> dict[Job, Cubin]:
    """Return the cubin of every job: from the bundle, else from the cache, else compiled and cached.

    Args:
        jobs: What is wanted; the order of the result.
        cache: None compiles all that the bundle lacks. One that cannot be written costs one warning only.
        bundle: Made by :func:`ferrule_server.kernels.cuda.toolchain.bundle.write_bundle`, perhaps elsewhere. What it
            lacks is said in one warning.
        num_workers: Processes that compile, at least one; None: one per core that this process may use.
        is_serving: This process has better things to do: even a single kernel is compiled in a process of its own,
            because the compiler would take turns with every other thread here, and at a lower priority.
        progress: Told of each kernel that is ready.

    Raises:
        BundleError: The bundle is of another architecture, or damaged.
        KernelError: A kernel's source leaves the language.
        CompileError: Kernels are missing and the toolkit is too, or it refuses one.
    """
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}, must be at least 1")
    jobs = list(dict.fromkeys(jobs))
    if bundle:
        _check_bundle(bundle, jobs)
    report = progress or _no_progress
    made: dict[Job, Cubin] = {}
    missing: dict[str, list[Job]] = {}
    for job in jobs:
        found = _find(job, cache, bundle)
        if found is None:
            missing.setdefault(source_key(*job), []).append(job)
            continue
        made[job] = found
        report(len(made), len(jobs), job[0].name)
    if missing:
        _check_toolkit(missing)
    for job, cubin in _compile_all([same[0] for same in missing.values()], num_workers, is_serving):
        if cache and not _keep(job, cubin, cache):
            cache = None
        made.update(dict.fromkeys(missing[source_key(*job)], cubin))
        report(len(made), len(jobs), job[0].name)
    return {job: made[job] for job in jobs}


def _no_progress(done: int, total: int, name: str) -> None:
    pass


def _check_bundle(bundle: Bundle, jobs: list[Job]) -> None:
    if not jobs:
        return
    bundle.check_architecture(list(dict.fromkeys(architecture for _, architecture in jobs)))
    lacking = [spec.name for spec, architecture in jobs if source_key(spec, architecture) not in bundle.records]
    if lacking:
        _log.warning(
            "event=bundle_lacks_kernels bundle=%s lacking=%d wanted=%d first=%s",
            bundle.path,
            len(lacking),
            len(jobs),
            lacking[0],
        )


def _find(job: Job, cache: CubinCache | None, bundle: Bundle | None) -> Cubin | None:
    found = bundle.find(source_key(*job)) if bundle else None
    if found is None and cache is not None and _has_toolkit():
        found = cache.find(_cache_key(job))
    return found


def _has_toolkit() -> bool:
    try:
        return bool(toolkit())
    except CompileError:
        return False


def _check_toolkit(missing: Mapping[str, list[Job]]) -> None:
    try:
        toolkit()
    except CompileError as error:
        (spec, architecture), *_ = next(iter(missing.values()))
        raise CompileError(
            f"{len(missing)} kernels are in no bundle, the first is {spec.name} for {architecture}, and {error}"
        ) from error


def _cache_key(job: Job) -> str:
    return hashlib.sha256(f"{source_key(*job)} {_versions()}".encode()).hexdigest()[:32]


def _versions() -> str:
    """Return what decides the machine code besides sources: numba compiles bytecode, which Python's version shapes."""
    return f"python={'.'.join(platform.python_version_tuple()[:2])} {toolkit()}"


def _keep(job: Job, cubin: Cubin, cache: CubinCache) -> bool:
    """Return whether the cache took it."""
    spec, architecture = job
    description = {
        "spec": spec.name,
        "source_key": source_key(spec, architecture),
        "versions": _versions(),
        "num_threads": spec.num_threads,
        "ctas_per_sm": spec.ctas_per_sm,
    }
    try:
        cache.store(_cache_key(job), cubin, description)
    except OSError as error:
        _log.warning("event=cubin_not_cached folder=%s error=%r", cache.folder, error)
        return False
    return True


def _compile_all(jobs: list[Job], num_workers: int | None, is_serving: bool) -> Iterable[tuple[Job, Cubin]]:
    """Yield each job with its cubin as it is done; those of one spec share the PTX, so one process does them all."""
    by_spec: dict[KernelSpec, list[str]] = {}
    for spec, architecture in jobs:
        by_spec.setdefault(spec, []).append(architecture)
    num_workers = min(num_workers or usable_cpus(), len(by_spec))
    if num_workers < (1 if is_serving else 2):
        for job in jobs:
            yield job, compile_spec(*job)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of torch's and gRPC's threads
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin, initargs=(is_serving,)) as pool:
        waiting = {pool.submit(_compile, spec, names): spec for spec, names in by_spec.items()}
        try:
            for done in as_completed(waiting):
                for cubin in done.result():
                    yield (waiting[done], cubin.architecture), cubin
        except BrokenProcessPool as error:
            raise CompileError("a process that compiled kernels died; is there enough memory?") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(is_background: bool) -> None:
    """Prepare a process that compiles."""
    _end_with_parent()
    if is_background and hasattr(os, "nice"):
        os.nice(_NICENESS)


def _end_with_parent() -> None:
    """End this process when the one that started it ends, however: else it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _compile(spec: KernelSpec, architectures: list[str]) -> list[Cubin]:
    return [compile_spec(spec, architecture) for architecture in architectures]
