"""How many threads a step uses: one for each physical core that the process may use."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["count_cores", "usable_cores"]

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MOST_THREADS = 256
"""As many as ``kernels.cpu.sync`` has room for."""


def usable_cores() -> int:
    """Return the physical cores that this process may use, by its affinity and the quota of its control group."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return count_cores(set(processors), _CPUS, _QUOTA)


def count_cores(processors: set[int], cpus: Path, quota: Path) -> int:
    """Return how many cores some processors are, at most as many as a quota pays for, and at least 1.

    Args:
        processors: Numbers of logical processors.
        cpus: Folder with the topology of each.
        quota: File with the microseconds of processor time in a period, and the period; ``max``: no limit.
    """
    cores = {_core(number, cpus) for number in processors}
    return max(1, min(len(cores), _paid_cores(quota), _MOST_THREADS))


def _core(number: int, cpus: Path) -> str:
    """Return what names the core of a logical processor; the processor itself if the system does not say."""
    try:
        return (cpus / f"cpu{number}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(number)


def _paid_cores(quota: Path) -> int:
    try:
        microseconds, period = quota.read_text().split()
        return 1 << 16 if microseconds == "max" else max(1, round(int(microseconds) / int(period)))
    except (OSError, ValueError):
        return 1 << 16
