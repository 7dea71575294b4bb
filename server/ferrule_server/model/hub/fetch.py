"""Fetches one file of the hub over HTTP, going on where an earlier attempt was cut off, and checks its digest.

huggingface_hub's own download begins a file anew in every process, and its Xet transfer too: minutes of a shard are
lost at each Ctrl-C. Here the bytes that came stay, under the digest that names the file, so that they cannot belong to
another one.

Servers on several hosts may share the cache, over a network file system whose locks fail, or hold on one host only. So
nothing depends on locks: each fetch writes to a partial file of its own, and before that file gets the name that
everybody reads, its digest is computed from what lies on the disk. A lock only saves work: those who wait for it find
the file complete. What an ended fetch left is continued by renaming it, if its owner is known to be gone: it was on
this host and the lock is ours, or nothing was written for minutes. A fetch that finds its file renamed starts again.
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
"""Called with the number of bytes that came, negative where bytes turned out to be useless."""

_CHUNK_BYTES: Final = 1 << 20
_ETAG: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MAX_ATTEMPTS: Final = 6
_MAX_RENEWALS: Final = 3
_FIRST_PAUSE_S: Final = 0.2
_LOCK_PAUSE_S: Final = 0.2
_ABANDONED_S: Final = 300.0
"""A fetch that wrote nothing for so long is taken for ended; a connection that brings nothing fails much sooner."""
_PARTIAL_CONTENT: Final = 206
_LOG: Final = logging.getLogger(__name__)


class Stopped(Exception):
    """Another file failed, so this one was not finished."""


class CutOff(Exception):
    """The connection ended before the file did, or the hub is out of order; it may go better next time."""


class _Renamed(Exception):
    """Another server took the partial file over."""


class Response(Protocol):
    """What is used of an answer."""

    status_code: int

    def iter_bytes(self, chunk_size: int) -> Iterator[bytes]:
        """Yield the body."""
        ...


Get = Callable[[int], AbstractContextManager[Response]]
"""Asks for a file from an offset on; raises CutOff, or ModelError where asking again is no use, in its body too."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        path: In the repository.
        num_bytes: Its size.
        etag: SHA-256 of its bytes (64 digits), or what git calls it (SHA-1 of a header and its bytes).

    Raises:
        ModelError: The etag is neither, so it could not be checked.
    """

    path: str
    num_bytes: int
    etag: str

    def __post_init__(self) -> None:
        if not _ETAG.fullmatch(self.etag) or self.num_bytes < 0:
            raise ModelError(f"the hub gives {self.path} no digest that is known here, but {self.etag!r}")


def fetch_file(file: RemoteFile, cache: HubCache, *, get: Get, on_bytes: OnBytes, stopping: threading.Event) -> None:
    """Have the bytes of a file in the cache, as a blob; of several processes that want the same file one fetches it.

    Args:
        file: Which.
        cache: Where its bytes are gathered, and where they are in the end; what is there already is used.
        get: Asks the hub.
        on_bytes: Called with the bytes that were there too.
        stopping: Once set, the rest is left.

    Raises:
        ModelError: The hub refuses it, or what it sends is not the file.
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
    """Gather a file in a partial file of this fetch and publish it."""
    with part.open("ab") as handle:
        gathered = _Gathered(part, handle, file, on_bytes)
        was_begun = gathered.num_bytes > 0
        try:
            _fill(gathered, get, stopping)
            if was_begun and not gathered.is_right():
                gathered.reset()
                _fill(gathered, get, stopping)
            gathered.check()
            part.rename(cache.blob(file.etag))
        except _Renamed:
            on_bytes(-gathered.num_bytes)
            raise
        finally:
            if not gathered.num_bytes:
                part.unlink(missing_ok=True)


def _own_part(file: RemoteFile, cache: HubCache, is_locked: bool) -> Path:
    """Return a partial file that no other fetch writes to, with the bytes that an ended one left, if there are any."""
    part = cache.new_part(file.etag)
    part.touch(exist_ok=False)
    for left in sorted(_abandoned(file, cache, is_locked, part), key=size_of, reverse=True):
        with contextlib.suppress(FileNotFoundError):  # another fetch took it first
            left.rename(part)
            break
    return part


def _abandoned(file: RemoteFile, cache: HubCache, is_locked: bool, newest: Path) -> list[Path]:
    """Return the partial files whose fetch has ended; ``newest`` was just written, by the clock of the disk."""
    now_s = _changed_s(newest)
    return [
        part
        for part in cache.parts(file.etag)
        if part != newest and ((is_locked and cache.is_of_this_host(part)) or _is_old(_changed_s(part), now_s))
    ]


def _is_old(changed_s: float | None, now_s: float | None) -> bool:
    """Return whether a file has not been written for long; False where one of the files is gone."""
    return changed_s is not None and now_s is not None and now_s - changed_s > _ABANDONED_S


def _changed_s(path: Path) -> float | None:
    """Return when a file was written last, None for one that is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _lock(path: Path, stopping: threading.Event) -> Iterator[bool]:
    """Wait until no other process holds the lock, and hold it in the body; give whether there is a lock at all.

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
    """Return whether the file is locked now; None while another process holds it, False where the disk has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:  # ENOSYS, ENOLCK, EOPNOTSUPP, ...: network file systems differ
        _LOG.info("the cache has no locks path=%s error=%r", handle.name, error.strerror)
        return False
    return True


def _fill(gathered: _Gathered, get: Get, stopping: threading.Event) -> None:
    """Ask until nothing is missing; a pause after each attempt that brought nothing, longer every time."""
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
    """The bytes of a file as far as they came, in a partial file that this fetch alone writes to."""

    def __init__(self, part: Path, handle: BinaryIO, file: RemoteFile, on_bytes: OnBytes) -> None:
        self._part, self._handle, self._file, self._on_bytes = part, handle, file, on_bytes
        self.num_bytes = 0
        self._count(os.fstat(handle.fileno()).st_size)
        if self.num_missing < 0:
            self.reset()

    @property
    def num_missing(self) -> int:
        """Bytes that have still to come."""
        return self._file.num_bytes - self.num_bytes

    def is_right(self) -> bool:
        """Return whether the bytes on the disk are those that the digest names."""
        self._check_own()
        self._handle.flush()
        os.fsync(self._handle.fileno())
        digest = _digest_of(self._file)
        with self._part.open("rb") as written:
            while chunk := written.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest() == self._file.etag

    def take(self, response: Response, stopping: threading.Event) -> None:
        """Append what an answer brings; one that begins at the beginning, though asked otherwise, replaces all."""
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

    def check(self) -> None:
        """Compare what lies on the disk with the digest.

        Raises:
            ModelError: They are other bytes; they are dropped.
        """
        if not self.is_right():
            self.reset()
            raise ModelError(f"{self._file.path} arrived damaged: its digest is not {self._file.etag}; start again")

    def _check_own(self) -> None:
        """Refuse to go on with a file that another server, which took this fetch for ended, has renamed.

        Raises:
            _Renamed: It has.
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
    """Return what makes the etag of a file: large files have their SHA-256, others what git makes of them."""
    if len(file.etag) == 64:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.num_bytes}\0".encode(), usedforsecurity=False)
