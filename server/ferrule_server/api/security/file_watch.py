"""Notices changed files, so that secrets can be replaced while a server runs."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Final

_SETTLED_S: Final = 2.0
"""A file written this recently may change again without a visible trace: clocks of file systems are coarse."""

_Stamp = tuple[int, ...] | None


class FileWatch:
    """Notices whether any of some files has changed since the last :meth:`poll`; symbolic links are followed.

    It notices every kind of replacement: written in place, renamed, or a changed symbolic link as in Kubernetes.

    Args:
        paths: Paths of the files; a missing file counts as changed when it appears.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen: list[_Stamp] | None = None

    def poll(self) -> bool:
        """Note the state of the files; return whether they should be read again. Call it before reading them."""
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
        OSError: The file cannot be read, is too large, or is not a regular file: a pipe would block.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "is not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(0, f"holds more than {max_bytes} bytes")
    return data
