"""Kernels compiled, or found compiled, on a thread of its own while torch serves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ferrule_server.executor.cuda.gpu import GpuError
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.toolchain.build import load_all
from ferrule_server.kernels.cuda.toolchain.bundle import Bundle
from ferrule_server.kernels.cuda.toolchain.compile import Cubin
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
    """The cubins of a model, being made. Started once; everything else may be called from any thread.

    Invariant: ``is_done`` turns true once, and what ``result`` returns or raises is settled from then on.

    Args:
        specs: What is wanted.
        architecture: Of the GPU.
        cache: Where compiled kernels are kept; None keeps none.
        bundle: File that is asked first; a bad one is a failure of the build.
        num_workers: Processes that compile; None: by the cores that this process may use, some of which are left to
            who serves, and by memory: some 400 MB each.
        load: Stands for ``toolchain.build.load_all``.
    """

    def __init__(
        self,
        specs: Iterable[KernelSpec],
        architecture: str,
        *,
        cache: CubinCache | None = None,
        bundle: Path | None = None,
        num_workers: int | None = None,
        load: Callable[..., dict[KernelSpec, Cubin]] = load_all,
    ) -> None:
        self._specs = list(specs)
        self._architecture = architecture
        self._cache = cache
        self._bundle = bundle
        self._num_workers = num_workers or max(1, min(_MOST_WORKERS, usable_cpus() - _SERVING_CPUS))
        self._load = load
        self._num_ready = 0
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
    def has_succeeded(self) -> bool:
        """Whether :meth:`result` returns cubins, at once."""
        return self._cubins is not None

    @property
    def failure(self) -> str:
        """Why there will be no kernels, in one line; empty as long as there may be some."""
        return "" if self._error is None else _sentence(self._error)

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
        except Exception as error:  # noqa: BLE001 - whatever it is, torch serves; whoever asks for the result is told
            self._error = error
        else:
            _log.info("event=kernels_ready num=%d seconds=%.1f", len(self._cubins), time.monotonic() - begun)
        self._done.set()

    def _build(self) -> dict[KernelSpec, Cubin]:
        return self._load(
            self._specs,
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
        self._num_ready = num_ready
        now = time.monotonic()
        if now - self._said_at >= _SAY_S:
            _log.info("event=kernels_compiling ready=%d wanted=%d latest=%s", num_ready, num_wanted, name)
            self._said_at = now


def _sentence(error: Exception) -> str:
    """Return the first line of what an error says: tools add pages of their own output."""
    lines = str(error).splitlines()
    return lines[0].rstrip(":") if lines else type(error).__name__
