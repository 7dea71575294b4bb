"""What a machine does while a figure is taken: cores that others use, its read rate, and peak memory.

Standard library and numpy only, because the environments of peers import it too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "DISTURBED_CORES",
    "OtherCores",
    "ReadRate",
    "busy_neighbour",
    "busy_ticks",
    "peak_rss_bytes",
    "tree_of",
    "tree_peak_rss_bytes",
]

DISTURBED_CORES = 0.2
"""Cores that other processes used on average, above which a figure is marked."""

PROBE_BYTES = 512 << 20
_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Reader = Callable[[Any], object]
"""Reads every byte of an int64 array once, without holding the GIL."""


class OtherCores:
    """Counts the processor time that processes outside this one's tree use while figures are taken."""

    def __init__(self) -> None:
        self._other_ticks = 0
        self._elapsed_s = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count during the body."""
        begin_s, begin = time.perf_counter(), _other_ticks()
        yield
        self._other_ticks += _other_ticks() - begin
        self._elapsed_s += time.perf_counter() - begin_s

    @property
    def cores(self) -> float:
        """Cores used by others, the mean over everything counted."""
        return max(0.0, self._other_ticks / _TICKS_PER_S / self._elapsed_s) if self._elapsed_s else 0.0


def _other_ticks() -> int:
    return busy_ticks((_PROC / "stat").read_text()) - _tree_ticks(os.getpid())


def busy_ticks(stat: str) -> int:
    """Return the ticks that all processors were busy, or held by the host, by the text of ``/proc/stat``."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.splitlines()[0].split()[1:9])
    return user + nice + system + irq + softirq + steal


def _tree_ticks(root: int) -> int:
    """Return the processor time of a process, its descendants, and those of their children that have ended."""
    stats = _process_stats()
    tree = tree_of(root, {pid: int(fields[1]) for pid, fields in stats.items()})
    return sum(int(ticks) for pid in tree if pid in stats for ticks in stats[pid][11:15])


def _process_stats() -> dict[int, list[str]]:
    """Return the fields of ``/proc/PID/stat`` after the name, by process."""
    stats = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                stats[int(folder.name)] = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
    return stats


def tree_of(root: int, parents: Mapping[int, int]) -> set[int]:
    """Return a process and all its descendants, given the parent of every process."""
    children = defaultdict(list)
    for pid, parent in parents.items():
        children[parent].append(pid)
    tree, left = {root}, [root]
    while left:
        found = children[left.pop()]
        tree.update(found)
        left += found
    return tree


class ReadRate:
    """Probes how fast the processor reads memory, with one thread on each core.

    Args:
        reader: Reads one thread's part of the buffer; numpy's maximum by default.
        num_bytes: Size of the buffer, several times that of the caches.
        num_passes: Passes over the buffer in a probe.
    """

    def __init__(self, reader: Reader = np.max, num_bytes: int = PROBE_BYTES, num_passes: int = 5) -> None:
        num_threads = len(os.sched_getaffinity(0))
        self._parts = np.array_split(np.ones(num_bytes // 8, np.int64), num_threads)
        self._threads = ThreadPoolExecutor(num_threads)
        self._reader, self._num_passes = reader, num_passes
        self._pass_s()  # the threads start now, on the cores that this thread may use now

    def gbs(self) -> float:
        """Return the rate in GB/s: the median pass over the buffer."""
        num_bytes = sum(part.nbytes for part in self._parts)
        return float(np.median([num_bytes * 1e-9 / self._pass_s() for _ in range(self._num_passes)]))

    def _pass_s(self) -> float:
        begin = time.perf_counter()
        for _ in self._threads.map(self._reader, self._parts):
            pass
        return time.perf_counter() - begin


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Keep one core busy during the body, by a process in a session of its own."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        time.sleep(0.2)  # it has started to spin
        yield
    finally:
        process.kill()
        process.wait()


def peak_rss_bytes(pid: int | str = "self") -> int:
    """Return the most memory that a process has had resident."""
    status = (_PROC / str(pid) / "status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def tree_peak_rss_bytes() -> int:
    """Return the sum of the peaks of this process and its descendants that run now."""
    tree = tree_of(os.getpid(), {pid: int(fields[1]) for pid, fields in _process_stats().items()})
    return sum(peak_rss_bytes(pid) for pid in tree)
