"""Reads files again when they change, so that secrets can be replaced while a server runs."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from ferrule_server.errors import ConfigError

_LOG = logging.getLogger(__name__)

_SETTLED_S: Final = 2.0
"""A file written this recently may change again without a visible trace: clocks of file systems are coarse."""

_Stamp = tuple[int, ...] | None
_Contents = TypeVar("_Contents")


class FileWatch(Generic[_Contents]):
    """Reads some files again when one of them has changed; symbolic links are followed.

    It notices every kind of replacement: written in place, renamed, or a changed symbolic link as in Kubernetes.

    Args:
        paths: Paths of the files; a missing file counts as changed when it appears. Create the watch before you read
            them for the first time.
        read: Returns their contents, or raises ConfigError if they are unusable.
        refusal: What the log says if they are unusable.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], _Contents], refusal: str) -> None:
        self._paths = paths
        self._read = read
        self._refusal = refusal
        self._last_fault = ""
        self._seen: list[_Stamp] | None = None
        self._poll()

    def read_if_changed(self) -> _Contents | None:
        """Return the new contents; None: there is no change, or an unusable one, which is logged once."""
        if not self._poll():
            return None
        try:
            contents = self._read()
        except ConfigError as error:
            if str(error) != self._last_fault:
                _LOG.error("%s: %s", self._refusal, error)
            self._last_fault = str(error)
            return None
        self._last_fault = ""
        return contents

    def _poll(self) -> bool:
        """Note the state of the files; return whether they should be read again."""
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
