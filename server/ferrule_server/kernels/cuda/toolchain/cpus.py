"""How many processors this process may use: what the machine has says little in a container."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["usable_cpus"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cpus(cgroups: Path = _CGROUPS, own_cgroups: Path = _OWN_CGROUPS) -> int:
    """Return how many processors this process gets at most, at least 1: by its affinity and by the quotas of cgroups.

    Args:
        cgroups: Where they are mounted, either version.
        own_cgroups: Says in which ones this process is.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _quotas(cgroups, own_cgroups)]
    return max(1, min([allowed, *quotas]))


def _quotas(cgroups: Path, own_cgroups: Path) -> Iterator[float]:
    """Yield processors of every quota that holds for this process: those of the groups around its own do too."""
    for line in _text(own_cgroups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        group = Path(path.lstrip("/"))
        for folder in (root / group, *(root / parent for parent in group.parents), root):
            yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    """Yield what one group may use, if it is limited: ``cpu.max`` in version 2, two files in version 1."""
    words = _text(folder / "cpu.max").split() or [
        *_text(folder / "cpu.cfs_quota_us").split(),
        *_text(folder / "cpu.cfs_period_us").split(),
    ]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", or no such group
        return
    if quota > 0 and period > 0:
        yield quota / period


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
