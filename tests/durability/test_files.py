"""The files of the operating system, where those in memory cannot stand for them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ferrule_server.durability.files import Files
from tests.durability.fault_files import FaultFiles


def test_write_that_the_system_cuts_short_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal or a nearly full disk may end a call early."""
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:3], offset))
    files = Files()
    fd = files.open_new(tmp_path / "file")
    files.preallocate(fd, 20)
    files.write(fd, b"0123456789", 5)
    files.close(fd)
    assert files.read_bytes(tmp_path / "file") == bytes(5) + b"0123456789" + bytes(5)


def test_full_disk_is_an_error() -> None:
    """As of any other call."""
    files = Files()
    fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        files.write(fd, b"records", 0)
    files.close(fd)


def test_new_file_must_not_exist(tmp_path: Path) -> None:
    """Two owners cannot write to one segment."""
    files = Files()
    files.close(files.open_new(tmp_path / "file"))
    with pytest.raises(FileExistsError):
        files.open_new(tmp_path / "file")


def test_names_of_new_directories_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each directory that got a new one, and none if there was nothing to do."""
    synced: list[Path] = []
    monkeypatch.setattr(Files, "sync_directory", lambda self, path: synced.append(path))
    files = Files()
    for _ in range(2):
        files.make_directory(tmp_path / "a" / "b")
    assert synced == [tmp_path / "a", tmp_path]


def test_descriptors_are_not_inherited(tmp_path: Path) -> None:
    """A child that outlives the server must not keep its lock."""
    files = Files()
    lock, new = files.lock(tmp_path / "lock"), files.open_new(tmp_path / "file")
    existing = files.open_existing(tmp_path / "file")
    assert not any(map(os.get_inheritable, (lock, new, existing)))
    for fd in (lock, new, existing):
        files.close(fd)


def test_files_in_memory_make_no_system_call() -> None:
    """They replace every method, so that a new one cannot reach the disk unnoticed."""
    assert [name for name in vars(Files) if not name.startswith("_") and name not in vars(FaultFiles)] == []
