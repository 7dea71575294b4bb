"""The machine: its processor, and the cores and memory that this process may use, by control groups and what is free.

Control groups are followed from that of the process up to the root of the hierarchy, in version 1, version 2, or both;
the tightest limit counts. Whatever cannot be read limits nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_MOST_THREADS: Final = 256
"""As many as ``kernels.cpu.sync`` has room for."""
_ALL_ABOVE: Final = "hierarchical_memory_limit"
"""Version 1 says in a group's statistics what the groups above it allow, even those that a container does not see."""
_BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_NO_LIMIT_BYTES: Final = 1 << 60
"""Version 1 writes the largest number of pages where there is no limit."""
_MEMORY_FILES: Final = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ("memory.max", "memory.current", ""),
)
"""Of version 1 and 2: the limit, the usage, and what the totals of a group and those below it begin with."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A bound on the memory of this process.

    Attributes:
        name: What sets it, for people.
        total_bytes: The bound.
        free_bytes: What is left of it for this process, the memory that it holds already included.
    """

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that this process runs on.

    Attributes:
        root: Where its file system begins; tests use folders.
    """

    root: Path = Path("/")

    def num_threads(self, processors: set[int] | None = None) -> int:
        """Return how many threads compute: one per physical core that may be used, at most what the quota pays for.

        Half a core rounds up. Two threads on a quota of 1.5 pause for a quarter of the time, and still do half as much
        again as one.

        Args:
            processors: Numbers of logical processors; None: those of the affinity of this process.
        """
        if processors is None:
            has_affinity = hasattr(os, "sched_getaffinity")
            processors = os.sched_getaffinity(0) if has_affinity else set(range(os.cpu_count() or 1))
        cores = {self._core(number) for number in processors}
        paid = [int(quota + 0.5) for group in self._groups("cpu") if (quota := _quota(group)) is not None]
        return max(1, min(len(cores), _MOST_THREADS, *paid))

    def memory_limits(self) -> list[MemoryLimit]:
        """Return what bounds the memory of this process: the machine and its control groups, the tightest first.

        Swap is not counted, and neither is a limit on address space, which refuses allocations one by one.
        """
        status = self.own_sizes()
        own = status["RssAnon"] + status.get("RssShmem", 0) if "RssAnon" in status else status.get("VmRSS", 0)
        limits = [limit for group in self._groups("memory") if (limit := self._limit(group, own)) is not None]
        machine = sizes_in(self.root / "proc/meminfo")
        if "MemAvailable" in machine and "MemTotal" in machine:
            zfs = sizes_in(self.root / "proc/spl/kstat/zfs/arcstats")  # a cache that the kernel does not count
            cache = max(0, zfs.get("size", 0) - zfs.get("c_min", 0))
            total = machine["MemTotal"]
            limits.append(MemoryLimit("this machine", total, min(total, machine["MemAvailable"] + cache + own)))
        return sorted(limits, key=lambda limit: limit.free_bytes)

    def has_bfloat16(self) -> bool:
        """Return whether the flags of the processor say that it multiplies bfloat16 in hardware."""
        return any(_BFLOAT16_FLAGS & set(value.split()) for value in self._processors("flags", "Features"))

    def processor_name(self) -> str:
        """Return the name of the processor as the system reports it; ``cpu`` if it reports none."""
        return next(self._processors("model name"), "cpu")

    def own_sizes(self) -> dict[str, int]:
        """Return what the system says of this process, such as ``VmRSS``, in bytes; empty if it says nothing."""
        return sizes_in(self.root / "proc/self/status")

    def _processors(self, *names: str) -> Iterator[str]:
        """Yield what the system says of each processor under one of these names."""
        for line in lines_of(self.root / "proc/cpuinfo"):
            name, _, value = line.partition(":")
            if name.strip() in names:
                yield value.strip()

    def _core(self, number: int) -> str:
        """Return what names the core of a logical processor; the processor itself if the system does not say."""
        siblings = lines_of(self.root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        return siblings[0] if siblings else str(number)

    def _groups(self, controller: str) -> Iterator[Path]:
        """Yield the folders of the control groups that this process is in, each with those above it.

        A mount may show a part of the hierarchy, such as that of a container. If the group of the process is not in any
        such part, the top of the first mount is what is known.
        """
        mounts = list(_mounts(self.root / "proc/self/mountinfo"))
        for line in lines_of(self.root / "proc/self/cgroup"):
            names, _, path = line.partition(":")[2].partition(":")
            if names and controller not in names.split(","):
                continue
            tops = [(point, top) for point, held, top in mounts if (controller in held if names else not held)]
            inside = [(point, below) for point, top in tops if (below := _below(path, top)) is not None]
            for point, below in inside or [(point, PurePosixPath()) for point, _ in tops[:1]]:
                yield from (self.root / point / part for part in (below, *below.parents))

    def _limit(self, group: Path, own_bytes: int) -> MemoryLimit | None:
        """Return the limit of a control group; what its other processes use is not free, but for caches of files."""
        for limit_name, usage_name, prefix in _MEMORY_FILES:
            statistics = sizes_in(group / "memory.stat")
            total = min(_number(group / limit_name, _NO_LIMIT_BYTES), statistics.get(_ALL_ABOVE, _NO_LIMIT_BYTES))
            if total >= _NO_LIMIT_BYTES:
                continue
            caches = (f"{prefix}active_file", f"{prefix}inactive_file", "slab_reclaimable")
            cache = sum(statistics.get(name, 0) for name in caches)
            others = max(0, _number(group / usage_name, 0) - cache - own_bytes)
            return MemoryLimit(f"/{(group / limit_name).relative_to(self.root)}", total, max(0, total - others))
        return None


def _mounts(path: Path) -> Iterator[tuple[str, set[str], PurePosixPath]]:
    """Yield the mounted hierarchies: their point, controllers (empty: version 2), and what they show as their top."""
    for line in lines_of(path):
        before, _, after = line.partition(" - cgroup")
        fields = [_unescaped(field) for field in before.split()[3:5]]
        if after and len(fields) == 2:
            controllers = set() if after[0] == "2" else set(after.split()[-1].split(","))
            yield fields[1].lstrip("/"), controllers, PurePosixPath(fields[0])


def _below(path: str, top: PurePosixPath) -> PurePosixPath | None:
    """Return where a group lies below the top of a mount; None: outside it, as far as is known."""
    below = PurePosixPath(path).relative_to(top) if PurePosixPath(path).is_relative_to(top) else None
    return None if below is None or ".." in below.parts else below


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file of the system; none if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except (OSError, ValueError):  # a path may hold a zero byte
        return []


def sizes_in(path: Path) -> dict[str, int]:
    """Return the numbers of a file of the system by name: those with the unit kB in bytes, others as they are.

    Files of ZFS have a type, 4, before each number.
    """
    found = (re.fullmatch(r"(\w+):?\s+(?:4\s+)?(\d{1,19})( kB)?", line) for line in lines_of(path))
    return {match[1]: int(match[2]) << (10 if match[3] else 0) for match in found if match}


def _number(path: Path, default: int) -> int:
    """Return the number in a file; the default if there is none, as in the ``max`` of no limit."""
    text = "".join(lines_of(path))
    return int(text) if re.fullmatch(r"\d{1,19}", text) else default


def _quota(group: Path) -> float | None:
    """Return the processors whose time a control group may use; None: as many as there are."""
    values = lines_of(group / "cpu.max") or lines_of(group / "cpu.cfs_quota_us") + lines_of(group / "cpu.cfs_period_us")
    match = re.fullmatch(r"([1-9]\d{0,18}) ([1-9]\d{0,18})", " ".join(values))
    return int(match[1]) / int(match[2]) if match else None


def _unescaped(field: str) -> str:
    """Return a field of ``mountinfo``, in which octal numbers stand for blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
