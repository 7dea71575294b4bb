"""Fetch one file of the hub over HTTP: resume an earlier attempt that was cut off, and check the digest.

The download of huggingface_hub starts each file again in every process, and so does its Xet transfer: each Ctrl-C loses
minutes of a shard. Here the bytes that arrived are kept under the digest that names the file, so that they cannot be
taken for another file.

Servers on several hosts may share the cache over a network file system, whose locks fail or hold on one host only. So
nothing depends on locks. Each fetch writes to its own partial file. The digest is computed from the disk before
the file gets its final name. A lock only saves work: a process that waits for it finds the file complete. A fetch
resumes a partial file by renaming it if the owner is known to be gone: either it was on this host and this fetch holds
the lock, or nothing was written for minutes. A fetch that finds its own file renamed starts again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from ferrule_server.errors import ModelError
from ferrule_server.model.hub.cache import HubCache, size_of

OnBytes = Callable[[int], None]
"""Called with the number of bytes that arrived; negative if bytes proved useless."""

_CHUNK_BYTES: Final = 1 << 20
_ETAG: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MAX_ATTEMPTS: Final = 6
_MAX_RENEWALS: Final = 3
_FIRST_PAUSE_S: Final = 0.2
_LOCK_PAUSE_S: Final = 0.2
_ABANDONED_S: Final = 300.0
"""A fetch that wrote nothing for this long has ended; an idle connection fails much sooner."""
_PARTIAL_CONTENT: Final = 206
_LOG: Final = logging.getLogger(__name__)


class Stopped(Exception):
    """The fetch ended early because another file failed."""


class CutOff(Exception):
    """The connection ended before the file did, or the hub reported a fault; a later attempt may succeed."""


class _Renamed(Exception):
    """Another server took the partial file over."""


class Response(Protocol):
    """The parts of an HTTP response that are used."""

    status_code: int

    def iter_bytes(self, chunk_size: int) -> Iterator[bytes]:
        """Yield the body."""
        ...


Get = Callable[[int], AbstractContextManager[Response]]
"""Requests a file from an offset on. Raises CutOff, or ModelError if a retry is useless, also inside its body."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        path: Its path in the repository.
        num_bytes: Its size.
        etag: SHA-256 of its bytes (64 digits), or its name in git (SHA-1 of a header and its bytes).

    Raises:
        ModelError: The etag is neither, so the bytes could not be checked.
    """

    path: str
    num_bytes: int
    etag: str

    def __post_init__(self) -> None:
        if not _ETAG.fullmatch(self.etag) or self.num_bytes < 0:
            raise ModelError(f"the hub gives {self.path} no digest that is known here, but {self.etag!r}")


def fetch_file(file: RemoteFile, cache: HubCache, *, get: Get, on_bytes: OnBytes, stopping: threading.Event) -> None:
    """Fetch a file into the cache as a blob. If several processes need the same file, one of them fetches it.

    Args:
        file: The file.
        cache: Takes the bytes; those that it already has are used.
        get: Requests bytes from the hub.
        on_bytes: Called with the bytes that arrive and those that were already there.
        stopping: Ends the fetch early once it is set.

    Raises:
        ModelError: The hub refuses the file, or sends other bytes.
        CutOff: Several attempts in a row brought nothing.
        Stopped: ``stopping`` was set.
        OSError: The disk is full, or the cache cannot be written.
    """
    blob = cache.blob(file.etag)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with _lock(cache.lock(file.etag), stopping) as is_locked:
        for _ in range(_MAX_RENEWALS):
            if blob.exists():  # another server was faster
                on_bytes(file.num_bytes)
                break
            with contextlib.suppress(_Renamed):
                _gather(file, cache, _own_part(file, cache, is_locked), get=get, on_bytes=on_bytes, stopping=stopping)
                break
        else:
            raise CutOff(f"other servers took the partial file of {file.path} over {_MAX_RENEWALS} times")
        for part in _abandoned(file, cache, is_locked, blob):
            part.unlink(missing_ok=True)


def _gather(
    file: RemoteFile, cache: HubCache, part: Path, *, get: Get, on_bytes: OnBytes, stopping: threading.Event
) -> None:
    """Gather the bytes in a partial file of this fetch, and publish it.

    Raises:
        ModelError: The bytes do not match the digest; they are dropped.
        _Renamed: Another server took the partial file over.
    """
    with part.open("ab") as handle:
        gathered = _Gathered(part, handle, file, on_bytes)
        was_begun = gathered.num_bytes > 0
        try:
            for _ in range(1 + was_begun):  # bytes that an earlier fetch left may be wrong
                _fill(gathered, get, stopping)
                if gathered.is_right():
                    part.rename(cache.blob(file.etag))
                    return
                gathered.reset()
            raise ModelError(f"{file.path} arrived damaged: its digest is not {file.etag}; start again")
        except _Renamed:
            on_bytes(-gathered.num_bytes)
            raise
        finally:
            if not gathered.num_bytes:
                part.unlink(missing_ok=True)


def _own_part(file: RemoteFile, cache: HubCache, is_locked: bool) -> Path:
    """Return a partial file that no other fetch writes to, with the bytes that an ended fetch left."""
    part = cache.new_part(file.etag)
    part.touch(exist_ok=False)
    for left in sorted(_abandoned(file, cache, is_locked, part), key=size_of, reverse=True):
        with contextlib.suppress(FileNotFoundError):  # another fetch took it first
            left.rename(part)
            break
    return part


def _abandoned(file: RemoteFile, cache: HubCache, is_locked: bool, newest: Path) -> list[Path]:
    """Return the partial files whose fetch has ended; the timestamp of ``newest``, just written, is its clock."""
    now_s = _changed_s(newest)
    return [
        part
        for part in cache.parts(file.etag)
        if part != newest and ((is_locked and cache.is_of_this_host(part)) or _is_old(_changed_s(part), now_s))
    ]


def _is_old(changed_s: float | None, now_s: float | None) -> bool:
    """Return whether a file has not been written for long; False if one of the files is gone."""
    return changed_s is not None and now_s is not None and now_s - changed_s > _ABANDONED_S


def _changed_s(path: Path) -> float | None:
    """Return the time of the last write to a file; None if the file is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _lock(path: Path, stopping: threading.Event) -> Iterator[bool]:
    """Wait for the lock and hold it during the body; yield whether the file system has locks.

    Raises:
        Stopped: ``stopping`` was set meanwhile.
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as handle:
        while (is_locked := _try_lock(handle)) is None:
            if stopping.wait(_LOCK_PAUSE_S):
                raise Stopped
        yield is_locked


def _try_lock(handle: BinaryIO) -> bool | None:
    """Try to lock a file. Return None while another process holds the lock, False if the disk has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:  # ENOSYS, ENOLCK, EOPNOTSUPP, ...: network file systems differ
        _LOG.info("the cache has no locks path=%s error=%r", handle.name, error.strerror)
        return False
    return True


def _fill(gathered: _Gathered, get: Get, stopping: threading.Event) -> None:
    """Request bytes until none is missing, with a longer pause after each attempt that brought nothing."""
    num_failed = 0
    while gathered.num_missing:
        before = gathered.num_bytes
        try:
            with get(before) as response:
                gathered.take(response, stopping)
            if gathered.num_missing:
                raise CutOff(f"{gathered.num_missing} bytes were not sent")
        except CutOff:
            num_failed = 1 if gathered.num_bytes > before else num_failed + 1
            if num_failed == _MAX_ATTEMPTS:
                raise
            if stopping.wait(_FIRST_PAUSE_S * 2 ** (num_failed - 1)):
                raise Stopped from None


class _Gathered:
    """The bytes of a file that have arrived, in a partial file that only this fetch writes to."""

    def __init__(self, part: Path, handle: BinaryIO, file: RemoteFile, on_bytes: OnBytes) -> None:
        self._part, self._handle, self._file, self._on_bytes = part, handle, file, on_bytes
        self.num_bytes = 0
        self._count(os.fstat(handle.fileno()).st_size)
        if self.num_missing < 0:
            self.reset()

    @property
    def num_missing(self) -> int:
        """The number of bytes that are missing."""
        return self._file.num_bytes - self.num_bytes

    def is_right(self) -> bool:
        """Return whether the bytes on the disk match the digest."""
        self._check_own()
        self._handle.flush()
        os.fsync(self._handle.fileno())
        with self._part.open("rb") as written:
            digest = hashlib.file_digest(written, lambda: _digest_of(self._file))
        return digest.hexdigest() == self._file.etag

    def take(self, response: Response, stopping: threading.Event) -> None:
        """Append the bytes of a response; a response that ignores the requested offset replaces all bytes."""
        if self.num_bytes and response.status_code != _PARTIAL_CONTENT:
            self.reset()
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            if len(chunk) > self.num_missing:
                self.reset()
                raise ModelError(
                    f"the hub sends more of {self._file.path} than the {self._file.num_bytes} bytes it has"
                )
            self._check_own()
            self._handle.write(chunk)
            self._handle.flush()
            self._count(len(chunk))
            if stopping.is_set():
                raise Stopped

    def reset(self) -> None:
        """Drop all bytes."""
        self._check_own()
        self._handle.truncate(0)
        self._count(-self.num_bytes)

    def _check_own(self) -> None:
        """Check that no other server has taken the partial file over.

        Raises:
            _Renamed: One has, because it considered this fetch ended.
        """
        try:
            is_own = os.path.samestat(self._part.stat(), os.fstat(self._handle.fileno()))
        except FileNotFoundError:
            is_own = False
        if not is_own:
            raise _Renamed

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._on_bytes(num_bytes)


def _digest_of(file: RemoteFile) -> hashlib._Hash:
    """Return the hash that gives the etag of a file: SHA-256 for large files, git's hash for others."""
    if len(file.etag) == 64:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.num_bytes}\0".encode(), usedforsecurity=False)
