"""Tells when files have changed, so that secrets can be replaced under a running server."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Final

_SETTLED_S: Final = 2.0
"""A file written this recently may be written again without a visible change: clocks of file systems are coarse."""

_Stamp = tuple[int, ...] | None


class FileWatch:
    """Whether any of some files has changed since it was last asked about; symbolic links are followed.

    Any replacement shows: written in place, renamed over, or swapped by a symbolic link as Kubernetes does it.

    Args:
        paths: Of the files; one that is missing is as good as any, until it appears.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen: list[_Stamp] | None = None

    def poll(self) -> bool:
        """Return whether the files should be read again. Ask before reading: what changes meanwhile shows next time."""
        stamps = [_stamp(path) for path in self._paths]
        if stamps == self._seen:
            return False
        self._seen = stamps if _are_settled(stamps) else None
        return True


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mode, status.st_mtime_ns, status.st_ctime_ns


def _are_settled(stamps: list[_Stamp]) -> bool:
    newest_ns = max((stamp[-1] for stamp in stamps if stamp is not None), default=0)
    return time.time_ns() - newest_ns > _SETTLED_S * 1e9


def read_small(path: Path, max_bytes: int = 1 << 24) -> bytes:
    """Return the contents of a regular file.

    Raises:
        OSError: It cannot be read, is no regular file (a pipe could be read only once, and would block) or too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "is no regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(0, f"holds more than {max_bytes} bytes")
    return data
