"""Files in memory that lose, tear and refuse what a disk may lose, tear and refuse.

Three layers, as in a kernel: *content* is what processes read (the page cache); *pending* are the writes that no sync
has confirmed; *durable* is what is left after a power loss. A crash makes a new object, the disk of the next boot; the
old one goes on, unnoticed, so that the threads that use it need not be stopped.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

from ferrule_server.durability.files import Files, OwnedElsewhere
from ferrule_server.durability.frames import SECTOR_BYTES


class Write(NamedTuple):
    """A part of a file that was written."""

    offset: int
    data: bytes


class Call(NamedTuple):
    """A system call that was made, failed ones included."""

    name: str
    file: str


Survival = Callable[[list[Write]], list[Write]]
"""Which of the pending writes of a file, in order, are on the disk after a crash."""


def nothing(writes: list[Write]) -> list[Write]:
    """Lose every write that was not synced."""
    return []


def everything(writes: list[Write]) -> list[Write]:
    """Keep every write, as a disk may."""
    return writes


def torn_at(num_bytes: int) -> Survival:
    """Keep this much of the last write, and all before it."""
    return lambda writes: [*writes[:-1], *(Write(offset, data[:num_bytes]) for offset, data in writes[-1:])]


def some_sectors(random: Random, share: float = 0.5) -> Survival:
    """Keep some sectors of each write."""
    return lambda writes: [part for write in writes for part in sectors_of(write) if random.random() < share]


def sectors_of(write: Write) -> list[Write]:
    """Split a write where the sectors of the disk begin."""
    stop = write.offset + len(write.data)
    cuts = range(write.offset // SECTOR_BYTES * SECTOR_BYTES, stop, SECTOR_BYTES)
    bounds = [(max(cut, write.offset), min(cut + SECTOR_BYTES, stop)) for cut in cuts]
    return [Write(begin, write.data[begin - write.offset : end - write.offset]) for begin, end in bounds]


class _Inode:
    def __init__(self, durable: bytes | bytearray = b"") -> None:
        self.content = bytearray(durable)
        self.durable = bytearray(durable)
        self.pending: list[Write] = []

    def copy(self) -> _Inode:
        other = _Inode(self.durable)
        other.content, other.pending = bytearray(self.content), list(self.pending)
        return other


def _put(target: bytearray, write: Write) -> None:
    target.extend(bytes(max(0, write.offset - len(target))))
    target[write.offset : write.offset + len(write.data)] = write.data


class FaultFiles(Files):
    """The files of one boot; no method of the real ones is left.

    Attributes:
        calls: Every call so far that writes, syncs or names a file.
        before_call: Called before each of them takes effect, on the thread that makes it.
        is_flowing: Syncs wait while it is not set.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.before_call: Callable[[Call], None] = lambda call: None
        self.is_flowing = threading.Event()
        self.is_flowing.set()
        self._names: dict[Path, _Inode] = {}
        self._durable_names: dict[Path, _Inode] = {}
        self._open: dict[int, tuple[Path, _Inode]] = {}
        self._locked: dict[int, _Inode] = {}
        self._next_fd = 3
        self._failures: defaultdict[str, deque[OSError | None]] = defaultdict(deque)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def fail(self, name: str, code: int, *, after: int = 0) -> None:
        """Let a call of a method fail once: the next one, or a later one."""
        self._failures[name] += [*[None] * after, OSError(code, os.strerror(code))]

    def crash(self, survival: Survival = nothing, *, keeps_names: bool = False) -> FaultFiles:
        """Return the disk after a power loss at this moment.

        Args:
            survival: What is left of writes that were not synced.
            keeps_names: Whether names that were not synced are on the disk.
        """
        after = FaultFiles()
        for path, inode in (self._names if keeps_names else self._durable_names).items():
            after._names[path] = _Inode(inode.durable)
            for write in survival(inode.pending):
                _put(after._names[path].durable, write)
            after._names[path].content = bytearray(after._names[path].durable)
        after._durable_names = dict(after._names)
        return after

    def kill(self) -> FaultFiles:
        """Return the disk after the death of the process alone: nothing is lost, locks are free."""
        after = FaultFiles()
        copies = {id(inode): inode.copy() for inode in [*self._names.values(), *self._durable_names.values()]}
        after._names = {path: copies[id(inode)] for path, inode in self._names.items()}
        after._durable_names = {path: copies[id(inode)] for path, inode in self._durable_names.items()}
        return after

    def damage(self, path: Path, offset: int, data: bytes) -> None:
        """Change bytes on the disk."""
        inode = self._names[path]
        for content in (inode.content, inode.durable):
            _put(content, Write(offset, data))

    def lose(self, path: Path) -> None:
        """Lose a name, or all names in a directory, on the disk and for the process."""
        for names in (self._names, self._durable_names):
            for name in [each for each in names if path in (each, each.parent)]:
                del names[name]

    def writes_to(self, path: Path) -> int:
        """Return how often a file was written to."""
        return self.calls.count(Call("write", path.name))

    def _call(self, name: str, path: Path) -> OSError | None:
        call = Call(name, path.name)
        self.before_call(call)
        self.calls.append(call)
        return self._failures[name].popleft() if self._failures[name] else None

    def _check(self, name: str, path: Path) -> None:
        if error := self._call(name, path):
            raise error

    def _new_fd(self, path: Path, inode: _Inode) -> int:
        self._next_fd += 1
        self._open[self._next_fd] = (path, inode)
        return self._next_fd

    def _inode(self, path: Path) -> _Inode:
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return self._names[path]

    def _at(self, fd: int) -> tuple[Path, _Inode]:
        if fd not in self._open:
            raise OSError(errno.EBADF, "not open")
        return self._open[fd]

    # ---- Files ------------------------------------------------------------------------------------------------------

    def make_directory(self, path: Path) -> None:
        """Every directory exists."""

    def lock(self, path: Path) -> int:
        """Lock a file, unless it is locked."""
        self._check("lock", path)
        inode = self._names.setdefault(path, _Inode())
        if inode in self._locked.values():
            raise OwnedElsewhere(f"{path.parent} is in use")
        fd = self._new_fd(path, inode)
        self._locked[fd] = inode
        return fd

    def open_new(self, path: Path) -> int:
        """Create a file."""
        self._check("open_new", path)
        if path in self._names:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        self._names[path] = _Inode()
        return self._new_fd(path, self._names[path])

    def open_existing(self, path: Path) -> int:
        """Open a file."""
        return self._new_fd(path, self._inode(path))

    def preallocate(self, fd: int, size: int) -> None:
        """Write zeros."""
        self.write(fd, bytes(size), 0)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Write to the page cache; a call that fails has written the first half."""
        path, inode = self._at(fd)
        error = self._call("write", path)
        write = Write(offset, data[: len(data) // 2] if error else data)
        _put(inode.content, write)
        inode.pending.append(write)
        if error:
            raise error

    def sync(self, fd: int) -> None:
        """Write pending writes to the disk; a call that fails drops them, and the page cache still has them."""
        path, inode = self._at(fd)
        error = self._call("sync", path)
        self.is_flowing.wait()
        if not error:
            for write in inode.pending:
                _put(inode.durable, write)
        inode.pending.clear()
        if error:
            raise error

    def close(self, fd: int) -> None:
        """Close a file and end its lock."""
        self._at(fd)
        del self._open[fd]
        self._locked.pop(fd, None)

    def read_bytes(self, path: Path) -> bytes:
        """Return what is in the page cache."""
        return bytes(self._inode(path).content)

    def is_at(self, fd: int, path: Path) -> bool:
        """Return whether an open file still has that name."""
        return self._names.get(path) is self._at(fd)[1]

    def size(self, path: Path) -> int:
        """Return the size of a file, 0 if there is none."""
        return len(self._names[path].content) if path in self._names else 0

    def list_names(self, path: Path) -> list[str]:
        """Return the names in a directory."""
        return [name.name for name in self._names if name.parent == path]

    def rename(self, source: Path, target: Path) -> None:
        """Change a name, which a crash undoes until the directory is synced."""
        self._check("rename", target)
        self._names[target] = self._inode(source)
        del self._names[source]

    def unlink(self, path: Path) -> None:
        """Remove a name, which a crash undoes until the directory is synced."""
        self._check("unlink", path)
        self._inode(path)
        del self._names[path]

    def sync_directory(self, path: Path) -> None:
        """Write the names in a directory to the disk."""
        self._check("sync_directory", path)
        elsewhere = {name: inode for name, inode in self._durable_names.items() if name.parent != path}
        here = {name: inode for name, inode in self._names.items() if name.parent == path}
        self._durable_names = elsewhere | here
