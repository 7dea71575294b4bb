"""The system calls of the journal, in one class.

Tests replace every method of it by one for files in memory, which lose, tear and refuse writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Final

from ferrule_server.errors import ConfigError

_CHUNK_BYTES: Final = 1 << 20
_OWNER_BYTES: Final = 256
MAX_FILE_BYTES: Final = (16 << 20) + 1024
"""No file of a journal is larger: a segment has room for its header and one frame of any length."""


class OwnedElsewhere(ConfigError):
    """Another process holds the lock of the directory."""


class Files:
    """Files and directories of the operating system; each method raises OSError if the system refuses."""

    def make_directory(self, path: Path) -> None:
        """Create a directory with mode 0700, and its parents, unless it exists; their names are on the disk then."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in missing:
            self.sync_directory(folder.parent)

    def lock(self, path: Path) -> int:
        """Lock a file, created if it is missing, for as long as the descriptor is open, and write the owner into it.

        Raises:
            OwnedElsewhere: Another process holds the lock; the message has what that process wrote.
        """
        fd = _open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            self.write(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BlockingIOError:
            owner = os.pread(fd, _OWNER_BYTES, 0).decode(errors="replace")
            os.close(fd)
            raise OwnedElsewhere(f"{path.parent} is in use by {owner or 'another process'}") from None
        except OSError:
            os.close(fd)
            raise
        return fd

    def open_new(self, path: Path) -> int:
        """Create a file with mode 0600, which must not exist, and return its descriptor."""
        return _open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open_existing(self, path: Path) -> int:
        """Open a file to write to it, and return its descriptor."""
        return _open_regular(path, os.O_RDWR)

    def preallocate(self, fd: int, size: int) -> None:
        """Write `size` zeros: with a hole or an unwritten extent each later sync would change metadata."""
        zeros = bytes(min(size, _CHUNK_BYTES))
        for offset in range(0, size, _CHUNK_BYTES):
            self.write(fd, zeros[: size - offset], offset)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of `data`, with more than one call if the system takes less."""
        done = os.pwrite(fd, data, offset)
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)

    def sync(self, fd: int) -> None:
        """Return when all that was written to the file, and its size, is on the disk."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor, which ends its lock."""
        os.close(fd)

    def read_bytes(self, path: Path) -> bytes:
        """Return the content of a regular file of at most MAX_FILE_BYTES, as it was when it was opened."""
        with os.fdopen(_open_regular(path, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise OSError(
                    errno.EFBIG, f"{size} bytes are more than any file of a journal has: restore a backup", str(path)
                )
            return file.read(size)

    def is_at(self, fd: int, path: Path) -> bool:
        """Return whether an open file still has that name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), path.lstat())
        return False

    def size(self, path: Path) -> int:
        """Return the size of a file in bytes, 0 if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_size
        return 0

    def list_names(self, path: Path) -> list[str]:
        """Return the names of the files in a directory."""
        return [entry.name for entry in path.iterdir()]

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name; a file that had it is replaced in the same moment."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Return when all files created, renamed and removed in a directory are so on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _open_regular(path: Path, flags: int) -> int:
    """Open a file, without following a link or waiting for the other end of a FIFO."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    else:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file: move it away, and restore the file from a backup", str(path))
