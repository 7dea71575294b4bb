"""Decides when kernels start: by the setting, and by the verdict of the litmus on this kind of GPU.

early   each kernel lets the next one start in its first lines; the next one's wait is all that keeps it from stale data
late    the next one starts when the last CTA ends: its launch overlaps, and none of the work
off     kernels follow each other whole
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ferrule_server.executor.cuda import litmus
from ferrule_server.executor.cuda.gpu import Gpu
from ferrule_server.executor.cuda.kernel_set import Trigger

_LIMIT_S: Final = 60.0
"""A test takes so long at most, the start of its process included."""
_TRIGGERS: Final[dict[str, Trigger]] = {"on": "early", "passed": "early", "failed": "off", "off": "off", "none": "off"}
_TRIGGERS["inconclusive"] = "late"
"""By setting or outcome; without one it is late. A GPU that breaks the promise is trusted with no part of it."""

_log = logging.getLogger(__name__)


class EarlyLaunch:
    """The choice for one GPU, made before the weights are read, so that a test runs beside that.

    Args:
        setting: ``auto``, ``on`` or ``off``.
        gpu: The GPU; one that is not CUDA's is not tested.
        folder: Where verdicts are kept; None: in the user's cache folder.
        bundle: The file that has the kernels of the GPU.

    Attributes:
        notice: Behind :meth:`decide`, what the status says of kernels that do not start early although they might.
    """

    notice = ""

    def __init__(self, setting: str, gpu: Gpu, folder: Path | None, bundle: Path) -> None:
        folder = folder or litmus.default_folder()
        self._outcome, self._reason = setting, f"--early-launch {setting}"
        self._process: subprocess.Popen[str] | None = None
        if gpu.info.capability < (9, 0):
            self._outcome, self._reason = "none", "this GPU has no early launch"
        elif setting == "auto":
            verdict = litmus.find_verdict(gpu.info, folder)
            self._outcome = "has not run" if verdict is None else verdict.outcome
            self._reason = "the litmus {}"
            if self._outcome not in _TRIGGERS and gpu.torch_device.type == "cuda":
                self._start(gpu.torch_device.index or 0, folder, bundle)

    def _start(self, index: int, folder: Path, bundle: Path) -> None:
        command = [sys.executable, "-P", "-m", litmus.__name__, "--device", str(index), "--cache", str(folder)]
        command += ["--bundle", str(bundle)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._deadline = time.monotonic() + _LIMIT_S
        with suppress(OSError):
            self._process = subprocess.Popen(command, stdin=null, stdout=pipe, stderr=pipe, text=True)  # noqa: S603

    def decide(self, on_wait: Callable[[str], None] = lambda _: None) -> Trigger:
        """Return when kernels start, and log why; a test that runs is waited for until its time is over."""
        if self._process is not None:
            on_wait("testing early launch")
            self._outcome = "did not end"
            with suppress(subprocess.TimeoutExpired):
                printed, errors = self._process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
                last = errors.strip().rpartition("\n")[2] or f"exit status {self._process.returncode}"
                self._outcome = printed.partition(" ")[0] or f"gave no verdict: {last}"
            self.close()
        trigger = _TRIGGERS.get(self._outcome, "late")
        level = logging.WARNING if self._outcome in ("failed", "off") else logging.INFO
        reason = self._reason.format(self._outcome)
        _log.log(level, "event=early_launch mode=%s reason=%r", trigger, reason)
        if trigger != "early" and self._reason.startswith("the litmus"):
            self.notice = f"kernels start {'late' if trigger == 'late' else 'one behind the other'}: {reason}"
        return trigger

    def close(self) -> None:
        """End a test that runs."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver does not end
                self._process.communicate(timeout=5)
            self._process = None
