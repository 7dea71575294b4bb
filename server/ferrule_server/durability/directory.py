"""The directory of a journal: one owner, an identity that never changes, and segments.

    lock                           locked by the owner for as long as it lives
    identity.json                  what the journal belongs to, and how often a server was started on it
    00000000000000000007.segment   frames (frames.py), preallocated
    3-7.newest                     empty; its name says that generation 3 has named segment 7 as the newest

An owner may lose its lock without noticing, if the directory is on a shared file system. So each start increments the
generation, and an owner reads it again before it creates a segment: one that was replaced writes to its last segment
at most, and the header of the new owner's first segment says how much of that one counts.

A segment is named when it is on the disk with its header, and before anything else is written to it::

    segment 8 created, synced      3-7.newest renamed to 3-8.newest, synced      frames in 8
                             ^ a crash here leaves 8 unnamed: it was never used
                                                                           ^ from here on 8 must be there

The rename compares and swaps: each owner knows the name that it replaces, so of two owners that replace the same name
one fails, and a segment that the failed one has created is never read. The file is made before the identity and before
the first segment, so its loss is noticed. A version that knows no such file leaves it alone, and the headers of its
segments say so: a name of an earlier generation than theirs does not count any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ferrule_server.durability.files import Files
from ferrule_server.durability.frames import Previous, SegmentHeader, encode_frame
from ferrule_server.errors import ConfigError

FORMAT: Final = 1
_SEGMENT: Final = re.compile(r"(0[0-9]{19})\.segment")
_NEWEST: Final = re.compile(r"([0-9]{1,19})-([0-9]{1,19})\.newest")
_EPOCH: Final = re.compile(r"[0-9a-f]{12}")
_KEY_BYTES: Final = 16


class OwnerReplaced(OSError):
    """Another server was started on the directory since; this one must not write to it any more."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The properties of a server that the identity of its directory must have.

    Attributes:
        instance: The name of the server to its clients.
        fingerprint: The digest of the model.
        dtype: The dtype of its computation.
        block_size: The number of tokens in a block.
    """

    instance: str
    fingerprint: bytes
    dtype: str
    block_size: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What a directory belongs to.

    Attributes:
        instance: As in :class:`Wanted`.
        epoch: Part of the cache_id of each durable handle: 12 hexadecimal digits, made with the directory.
        fingerprint: As in :class:`Wanted`.
        dtype: As in :class:`Wanted`.
        block_size: As in :class:`Wanted`.
        seed_key: 16 bytes from which seeds of Generate are derived, made with the directory; secret.
        generation: How often a server was started on the directory.
    """

    instance: str
    epoch: str
    fingerprint: bytes
    dtype: str
    block_size: int
    seed_key: bytes = dataclasses.field(repr=False)
    generation: int

    @classmethod
    def create(cls, wanted: Wanted) -> Identity:
        """Return the identity of a new directory, before its first start."""
        return cls(
            **dataclasses.asdict(wanted),
            epoch=secrets.token_hex(6),
            seed_key=secrets.token_bytes(_KEY_BYTES),
            generation=0,
        )

    def encode(self) -> bytes:
        """Return the content of ``identity.json``."""
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        values |= {"fingerprint": self.fingerprint.hex(), "seed_key": self.seed_key.hex()}
        return json.dumps(values, indent=2).encode() + b"\n"

    @classmethod
    def decode(cls, content: bytes) -> Identity:
        """Read the content of ``identity.json``.

        Raises:
            ValueError: It is malformed, or its format is another one.
        """
        try:
            values = json.loads(content)
            if values.pop("format") != FORMAT:
                raise ValueError(f"the format is not {FORMAT}")
            for name in ("fingerprint", "seed_key"):
                values[name] = bytes.fromhex(values[name])
            identity = cls(**values)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is malformed: {error}") from None
        identity._check()
        return identity

    def _check(self) -> None:
        texts = (self.instance, self.epoch, self.dtype)
        numbers = (self.block_size, self.generation)
        if not all(type(text) is str for text in texts) or not all(type(it) is int and it >= 0 for it in numbers):
            raise ValueError("it has values of other types")
        if not _EPOCH.fullmatch(self.epoch) or len(self.seed_key) != _KEY_BYTES:
            raise ValueError("epoch or seed_key has another length")

    def difference(self, wanted: Wanted) -> str:
        """Return a phrase for each value that differs from that of a server, or an empty text."""
        fields = [field.name for field in dataclasses.fields(wanted)]
        pairs = [(name, getattr(self, name), getattr(wanted, name)) for name in fields]
        return ", ".join(
            f"{name} {_text(ours)} (not {_text(theirs)})" for name, ours, theirs in pairs if ours != theirs
        )


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


class Newest(NamedTuple):
    """The name of the newest segment in use.

    Attributes:
        generation: That of the server which named it.
        segment: Its number; 0: no segment is in use yet.
    """

    generation: int
    segment: int

    @property
    def file_name(self) -> str:
        """The name of the file that says it."""
        return f"{self.generation}-{self.segment}.newest"

    @classmethod
    def find(cls, directory: Path, files: Files) -> Newest | None:
        """Return what the file in a directory says; None: there is no such file."""
        matches = map(_NEWEST.fullmatch, files.list_names(directory))
        return max((cls(int(match[1]), int(match[2])) for match in matches if match), default=None)


_NONE_USED: Final = Newest(0, 0)


class DurableDirectory:
    """A directory that this process owns.

    Invariant: until :meth:`close`, the lock is held, and ``identity`` is what the disk had when it was opened.

    Attributes:
        path: The directory.
        files: The system calls.
        identity: With the generation of this owner.
        newest: What the file says that names the newest segment, as this owner has found or written it.
        digests: The version of the digests of requests that this owner writes; set by the caller of :meth:`open`.
    """

    def __init__(self, path: Path, files: Files, lock: int, identity: Identity) -> None:
        self.path = path
        self.files = files
        self.identity = identity
        self.newest = Newest.find(path, files) or _NONE_USED
        self.digests = ""
        self._lock = lock
        self._is_closed = False

    @classmethod
    def open(cls, path: Path, wanted: Wanted, files: Files | None = None) -> DurableDirectory:
        """Lock a directory, created if it is missing, and begin a generation.

        Raises:
            ConfigError: Another process owns it, it belongs to another kind of server, or it cannot be written to.
        """
        files = files or Files()
        with contextlib.ExitStack() as undo:
            try:
                files.make_directory(path)
                lock = files.lock(path / "lock")
                undo.callback(files.close, lock)
                directory = cls(path, files, lock, _begin_generation(path, wanted, files))
            except OSError as error:
                raise ConfigError(cannot_write(path, error)) from error
            undo.pop_all()
        return directory

    def still_owner(self) -> bool:
        """Whether the directory is there and not closed, and no other server was started on it since."""
        with contextlib.suppress(OSError, ConfigError):
            return not self._is_closed and read_identity(self.path, self.files).generation == self.identity.generation
        return False

    def size_bytes(self) -> int:
        """Return the size of all segments, preallocated room included, 0 if they are gone; from any thread."""
        with contextlib.suppress(FileNotFoundError):
            return sum(self.files.size(segment_path(self.path, number)) for number in self.segments())
        return 0

    def segments(self) -> list[int]:
        """Return the numbers of all segments, ascending."""
        return list_segments(self.path, self.files)

    def create_segment(self, number: int, size: int, previous: Previous | None) -> tuple[int, int]:
        """Create a segment with its header, on the disk and named as the newest when this returns.

        Args:
            number: A number that no segment has.
            size: Its preallocated size in bytes; more if its header needs it.
            previous: For its header.

        Returns:
            A descriptor that the caller closes, and the offset of the first frame after the header.

        Raises:
            OwnerReplaced: This process is not the owner any more.
            OSError: The segment could not be created, and nothing in it will be used.
        """
        self._check_owner()
        if self.newest == _NONE_USED:
            _name_none(self.path, self.files)
        generation = self.identity.generation
        header = SegmentHeader(number, self.identity.epoch, generation, previous, self.digests, is_named=True)
        frame = encode_frame(header.encode(), number, 0)
        path = segment_path(self.path, number)
        fd = self.files.open_new(path)
        try:
            self.files.preallocate(fd, max(size, len(frame)))
            self.files.write(fd, frame, 0)
            self.files.sync(fd)
            self.files.sync_directory(self.path)
            self.name_newest(Newest(generation, number))
        except OSError:
            self.files.close(fd)
            with contextlib.suppress(OSError):
                if self.newest.segment != number:
                    self.files.unlink(path)
            raise
        return fd, len(frame)

    def name_newest(self, newest: Newest) -> None:
        """Name another segment as the newest; on the disk when this returns.

        Raises:
            OwnerReplaced: This process is not the owner any more.
            OSError: ``newest`` has been named if it is in the attribute, but perhaps not on the disk.
        """
        self._check_owner()
        try:
            self.files.rename(self.path / self.newest.file_name, self.path / newest.file_name)
        except OSError:  # over a network it may have been done all the same
            if Newest.find(self.path, self.files) != newest:
                raise
        self.newest = newest
        self.files.sync_directory(self.path)

    def holds(self, fd: int, number: int) -> bool:
        """Return whether an open segment is still in the directory."""
        return self.files.is_at(fd, segment_path(self.path, number))

    def _check_owner(self) -> None:
        if not self.still_owner():
            raise OwnerReplaced(errno.EPERM, "the directory is gone, or another server has taken it", str(self.path))

    def confirm(self, number: int, start: int, end: int) -> None:
        """Write part of a segment again as it is read, and sync it.

        What is read after a process has died may be in memory only, and a sync alone would not find out: the kernel
        drops pages whose write has failed, and reports that once, perhaps to the process that died.
        """
        path = segment_path(self.path, number)
        content = self.files.read_bytes(path)[start:end]
        fd = self.files.open_existing(path)
        try:
            self.files.write(fd, content, start)
            self.files.sync(fd)
        finally:
            self.files.close(fd)

    def delete_segment(self, number: int) -> None:
        """Remove a segment, and return when it is gone from the disk.

        Raises:
            OwnerReplaced: This process is not the owner any more.
        """
        self._check_owner()
        self.files.unlink(segment_path(self.path, number))
        self.files.sync_directory(self.path)

    def close(self) -> None:
        """Give up the lock."""
        self._is_closed = True
        self.files.close(self._lock)


def check_directory(path: Path, instance: str) -> None:
    """Refuse early what :meth:`DurableDirectory.open` would refuse later. Nothing is locked.

    The lock is left out because its owner may be a server that is still ending. What is known only with the weights,
    such as the model's fingerprint, is left out too.

    Args:
        path: The directory; created if it is missing.
        instance: The name of the server to its clients.

    Raises:
        ConfigError: It is not a directory, no file can be created in it, or it belongs to another server.
    """
    files = Files()
    try:
        identity = _read_or_none(path, files) if os.path.exists(path) else None  # noqa: PTH110  (Path.exists may raise)
        if identity is not None:
            _check_identity(path, identity, Wanted(instance, identity.fingerprint, identity.dtype, identity.block_size))
        files.make_directory(path)
        tempfile.TemporaryFile(dir=path).close()  # whether this is possible only the system knows, above all for root
    except OSError as error:
        raise ConfigError(cannot_write(path, error)) from error


def cannot_write(path: Path, error: OSError) -> str:
    """Return the message of a start that cannot write its journal."""
    if error.errno == errno.ENOSPC:
        return f"--durable {path} is full ({error.strerror}): make room there, a start writes all durable state again"
    reason = error.strerror or error
    return f"--durable {path} cannot be used for durable handles: {reason}; name a folder that can be written"


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of a segment."""
    return directory / f"{number:020}.segment"


def list_segments(directory: Path, files: Files) -> list[int]:
    """Return the numbers of all segments in a directory, ascending."""
    matches = map(_SEGMENT.fullmatch, files.list_names(directory))
    return sorted(int(match[1]) for match in matches if match)


def read_identity(directory: Path, files: Files) -> Identity:
    """Read the identity of a directory.

    Raises:
        FileNotFoundError: There is none.
        ConfigError: It is malformed.
    """
    path = directory / "identity.json"
    try:
        return Identity.decode(files.read_bytes(path))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _begin_generation(path: Path, wanted: Wanted, files: Files) -> Identity:
    """Check the identity of a locked directory, or make one, and write it with the next generation."""
    identity = _read_or_none(path, files)
    if identity is None:
        _name_none(path, files)
        identity = Identity.create(wanted)
    _check_identity(path, identity, wanted)
    identity = dataclasses.replace(identity, generation=identity.generation + 1)
    _replace(path, identity.encode(), files)
    return identity


def _read_or_none(path: Path, files: Files) -> Identity | None:
    """Return the identity of a directory; None: it is new."""
    try:
        return read_identity(path, files)
    except FileNotFoundError:
        if list_segments(path, files) or (Newest.find(path, files) or _NONE_USED).segment:
            raise ConfigError(f"{path} has a journal and no identity.json: restore the file from a backup") from None
        return None


def _check_identity(path: Path, identity: Identity, wanted: Wanted) -> None:
    if difference := identity.difference(wanted):
        raise ConfigError(f"{path} has {difference}: start the server with these, or use another directory")


def _name_none(directory: Path, files: Files) -> None:
    """Make the file that will name the newest segment, unless it is there."""
    with contextlib.suppress(FileExistsError):
        files.close(files.open_new(directory / _NONE_USED.file_name))
    files.sync_directory(directory)


def _replace(directory: Path, content: bytes, files: Files) -> None:
    """Write ``identity.json`` so that a crash leaves the old content or the new one."""
    new = directory / "identity.json.new"
    with contextlib.suppress(FileNotFoundError):
        files.unlink(new)
    fd = files.open_new(new)
    try:
        files.write(fd, content, 0)
        files.sync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(new)
        raise
    finally:
        files.close(fd)
    files.rename(new, directory / "identity.json")
    files.sync_directory(directory)
