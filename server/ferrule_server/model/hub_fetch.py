"""Fetches one file of the hub over HTTP, going on where an earlier attempt was cut off, and checks its digest.

huggingface_hub's own download begins a file anew in every process, and its Xet transfer too: minutes of a shard are
lost at each Ctrl-C. Here the bytes that came stay, under the digest that names the file, so that they cannot belong to
another one, and the whole is compared with that digest before anybody sees it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from ferrule_server.errors import ModelError

OnBytes = Callable[[int], None]
"""Called with the number of bytes that came, negative where bytes turned out to be useless."""

_CHUNK_BYTES: Final = 1 << 20
_ETAG: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MAX_ATTEMPTS: Final = 6
_FIRST_PAUSE_S: Final = 0.2
_LOCK_PAUSE_S: Final = 0.2
_PARTIAL_CONTENT: Final = 206


class Stopped(Exception):
    """Another file failed, so this one was not finished."""


class CutOff(Exception):
    """The connection ended before the file did, or the hub is out of order; it may go better next time."""


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


def fetch_file(
    file: RemoteFile, part: Path, blob: Path, *, get: Get, on_bytes: OnBytes, stopping: threading.Event
) -> None:
    """Have the bytes of a file at ``blob``; several processes may want the same file, one of them fetches it.

    Args:
        file: Which.
        part: Where its bytes are gathered; what is there already is kept.
        blob: Where they are in the end.
        get: Asks the hub.
        on_bytes: Called with the bytes that were there too.
        stopping: Once set, the rest is left.

    Raises:
        ModelError: The hub refuses it, or what it sends is not the file.
        CutOff: Several attempts in a row brought nothing.
        Stopped: ``stopping`` was set.
        OSError: The disk is full, or the cache cannot be written.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab+") as handle:
        _lock(handle, stopping)
        if blob.exists():  # another process was faster
            on_bytes(file.num_bytes)
            _remove_leftover(part)
            return
        gathered = _Gathered(handle, file, on_bytes)
        was_begun = gathered.num_bytes > 0
        _fill(gathered, get, stopping)
        if was_begun and not gathered.is_right:
            gathered.reset()
            _fill(gathered, get, stopping)
        gathered.check()
        os.fsync(handle.fileno())
        part.rename(blob)


def _lock(handle: BinaryIO, stopping: threading.Event) -> None:
    """Wait until no other process gathers this file. Where a disk knows no locks the digest finds what got mixed."""
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if stopping.wait(_LOCK_PAUSE_S):
                raise Stopped from None
        else:
            return


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
    """The bytes of a file as far as they came: what is on disk is what the digest has seen."""

    def __init__(self, handle: BinaryIO, file: RemoteFile, on_bytes: OnBytes) -> None:
        self._handle, self._file, self._on_bytes = handle, file, on_bytes
        self.num_bytes = 0
        self._digest = _digest_of(file)
        self._read()

    @property
    def num_missing(self) -> int:
        """Bytes that have still to come."""
        return self._file.num_bytes - self.num_bytes

    @property
    def is_right(self) -> bool:
        """Whether they are the bytes that the digest names."""
        return self._digest.hexdigest() == self._file.etag

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
            self._handle.write(chunk)
            self._handle.flush()
            self._count(chunk)
            if stopping.is_set():
                raise Stopped

    def reset(self) -> None:
        """Drop all bytes."""
        self._handle.truncate(0)
        self._on_bytes(-self.num_bytes)
        self.num_bytes = 0
        self._digest = _digest_of(self._file)

    def check(self) -> None:
        """Compare with the digest.

        Raises:
            ModelError: They are other bytes; they are dropped.
        """
        if not self.is_right:
            self.reset()
            raise ModelError(f"{self._file.path} arrived damaged: its digest is not {self._file.etag}; start again")

    def _read(self) -> None:
        self._handle.seek(0)
        while chunk := self._handle.read(_CHUNK_BYTES):
            self._count(chunk)
        if self.num_missing < 0:
            self.reset()

    def _count(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self.num_bytes += len(chunk)
        self._on_bytes(len(chunk))


def _digest_of(file: RemoteFile) -> hashlib._Hash:
    """Return what makes the etag of a file: large files have their SHA-256, others what git makes of them."""
    if len(file.etag) == 64:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.num_bytes}\0".encode(), usedforsecurity=False)


def _remove_leftover(part: Path) -> None:
    """Remove the file that was opened behind a fetch that had just ended."""
    if part.exists() and part.stat().st_size == 0:
        part.unlink()
