"""Reserves a unix socket path for one server: gRPC itself would silently take over the path of a running one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path

from ferrule_server.addresses import cannot_listen
from ferrule_server.errors import ConfigError


class SocketPath:
    """A socket path held by this process, through a lock file ``PATH.lock`` beside it.

    Invariant: only the process that holds the lock removes and creates the socket file. The lock ends with the process,
    however that ends, so the files that it leaves behind are recognised as stale.

    Args:
        path: The path of the socket.

    Raises:
        ConfigError: Another server holds the path, the path is not a socket, or the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock_path = path.with_name(f"{path.name}.lock")
        try:
            self._lock_fd = self._lock()
            try:
                self._remove_stale()
            except BaseException:
                self._unlock()
                raise
        except OSError as error:
            raise cannot_listen(f"unix:{path}", error) from error

    def release(self) -> None:
        """Remove the socket and the lock file; the path is free again."""
        self._path.unlink(missing_ok=True)
        self._unlock()

    def _lock(self) -> int:
        """Return the locked file, after checking that it is still the one at the path."""
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise self._in_use() from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), self._lock_path.stat()):
                    return fd
            os.close(fd)  # its owner removed it between our open and our lock: take the new one

    def _unlock(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock_fd)

    def _remove_stale(self) -> None:
        """Remove a socket file on which no process listens."""
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(f"cannot listen on unix:{self._path}: the path exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink()
                return
        raise self._in_use()

    def _in_use(self) -> ConfigError:
        return ConfigError(
            f"cannot listen on unix:{self._path}: another server uses it; stop it or choose another path"
        )
