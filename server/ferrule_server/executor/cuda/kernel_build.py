"""Compiles kernels, or finds them compiled, on a thread of its own while torch serves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ferrule_server.executor.cuda.gpu import GpuError
from ferrule_server.executor.cuda.parts import specs_by_part
from ferrule_server.executor.fallback.fast_path import sentence
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import KernelError
from ferrule_server.kernels.cuda.toolchain.build import load_all
from ferrule_server.kernels.cuda.toolchain.bundle import Bundle
from ferrule_server.kernels.cuda.toolchain.compile import CompileError, Cubin
from ferrule_server.kernels.cuda.toolchain.cpus import usable_cpus
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache

__all__ = ["KernelBuild"]

_log = logging.getLogger(__name__)

_SAY_S = 10.0
"""The log says so often how far a build is."""

_MOST_WORKERS = 8
"""More would want gigabytes of memory at once, while the weights are read, to save seconds."""

_SERVING_CPUS = 2
"""Left to the engine and to calls."""


class _Closed(Exception):
    """Nobody wants the kernels any more."""


class KernelBuild:
    """Builds the cubins of a model. Started once; everything else may be called from any thread.

    Invariant: ``is_done`` turns true once, and what ``result`` returns or raises is settled from then on.

    If a kernel does not compile, its part of the path is left out; see :mod:`ferrule_server.executor.cuda.parts`.

    Args:
        specs: The kernels to build.
        architecture: Of the GPU.
        cache: Where compiled kernels are kept; None keeps none.
        bundle: File that is asked first; a bad one is a failure of the build.
        needs_all: If any kernel does not compile, the build fails.
        num_workers: Processes that compile; None: by the cores that this process may use, some of which are left to
            who serves, and by memory: some 400 MB each.
        load: Stands for ``toolchain.build.load_all``.

    Attributes:
        part_failures: The parts whose kernels do not compile, with the reasons; complete once it is done.
    """

    def __init__(
        self,
        specs: Iterable[KernelSpec],
        architecture: str,
        *,
        cache: CubinCache | None = None,
        bundle: Path | None = None,
        needs_all: bool = False,
        num_workers: int | None = None,
        load: Callable[..., dict[KernelSpec, Cubin]] = load_all,
    ) -> None:
        self._specs = list(specs)
        self._architecture = architecture
        self._cache = cache
        self._bundle = bundle
        self._num_workers = num_workers or max(1, min(_MOST_WORKERS, usable_cpus() - _SERVING_CPUS))
        self._needs_all = needs_all
        self._load = load
        self._num_ready = self._num_before = 0
        self.part_failures: dict[str, str] = {}
        self._said_at = 0.0
        self._cubins: dict[KernelSpec, Cubin] | None = None
        self._error: Exception | None = None
        self._is_closed = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._main, name="ferrule-kernels", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def progress(self) -> str:
        """What is being done, for people: ``compiling kernels, 23 of 42``; empty once it is done."""
        return "" if self.is_done else f"compiling kernels, {self._num_ready} of {len(self._specs)}"

    @property
    def is_done(self) -> bool:
        """Whether :meth:`result` returns, or raises, at once."""
        return self._done.is_set()

    @property
    def failure(self) -> str:
        """Why there will be no kernels, in one line; empty as long as there may be some."""
        return "" if self._error is None else sentence(self._error)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, for so long at most; return whether it is."""
        return self._done.wait(timeout_s)

    def result(self) -> Mapping[KernelSpec, Cubin]:
        """Return every cubin; waits for them.

        Raises:
            GpuError: There will be none; the message, one line, says why.
        """
        self._done.wait()
        if self._cubins is None:
            raise GpuError(self.failure) from self._error
        return self._cubins

    def close(self) -> None:
        """Begin no further kernel; those that are being compiled are not waited for."""
        self._is_closed = True

    def _main(self) -> None:
        begun = self._said_at = time.monotonic()
        try:
            self._cubins = self._build()
        except Exception as error:  # noqa: BLE001 - whatever it is, torch serves, and ``result`` raises it
            self._error = error
        else:
            _log.info("event=kernels_ready num=%d seconds=%.1f", len(self._cubins), time.monotonic() - begun)
        self._done.set()

    def _build(self) -> dict[KernelSpec, Cubin]:
        try:
            return self._build_of(self._specs)
        except (CompileError, KernelError) as error:
            if self._needs_all:
                raise
            return self._build_by_part(error)

    def _build_by_part(self, refused: Exception) -> dict[KernelSpec, Cubin]:
        """Build the kernels of each part by themselves, so that only those parts fail that must; raises ``refused``."""
        essential, *parts = specs_by_part(self._specs).items()
        try:
            cubins = self._build_of(essential[1])
        except (CompileError, KernelError):
            raise refused from None
        for part, specs in parts:
            self._num_before = len(cubins)
            try:
                cubins |= self._build_of(specs)
            except (CompileError, KernelError) as error:
                self.part_failures[part] = sentence(error)
        return cubins

    def _build_of(self, specs: list[KernelSpec]) -> dict[KernelSpec, Cubin]:
        return self._load(
            specs,
            self._architecture,
            cache=self._cache,
            bundle=None if self._bundle is None else Bundle.open(self._bundle),
            num_workers=self._num_workers,
            is_serving=True,
            progress=self._told,
        )

    def _told(self, num_ready: int, num_wanted: int, name: str) -> None:
        if self._is_closed:
            raise _Closed("the server ends")
        self._num_ready = self._num_before + num_ready
        now = time.monotonic()
        if now - self._said_at >= _SAY_S:
            _log.info("event=kernels_compiling ready=%d wanted=%d latest=%s", num_ready, num_wanted, name)
            self._said_at = now
