"""The directory: one owner, an identity that is never mixed up, segments that exist whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import stat
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from ferrule_server.durability.directory import (
    DurableDirectory,
    Identity,
    OwnerReplaced,
    Wanted,
    check_directory,
    read_identity,
    segment_path,
)
from ferrule_server.durability.files import OwnedElsewhere
from ferrule_server.durability.frames import Previous, SegmentHeader, scan
from ferrule_server.errors import ConfigError
from tests.durability.fault_files import Call, FaultFiles, everything, nothing, torn_at
from tests.durability.journals import PATH, WANTED

SIZE = 4096


def open_one(files: FaultFiles) -> DurableDirectory:
    """Open the directory of these tests."""
    return DurableDirectory.open(PATH, WANTED, files)


# ---- identity -------------------------------------------------------------------------------------------------------


def test_identity_stays_and_the_generation_grows() -> None:
    """Epoch and key are those of the directory at every start."""
    files = FaultFiles()
    first = open_one(files)
    first.close()
    second = open_one(files)
    assert second.identity == dataclasses.replace(first.identity, generation=2)
    assert (first.identity.generation, len(first.identity.epoch), len(first.identity.seed_key)) == (1, 12, 16)
    assert open_one(FaultFiles()).identity.epoch != first.identity.epoch


def test_key_is_not_shown() -> None:
    """Logs and errors may show an identity."""
    identity = Identity.create(WANTED)
    assert identity.seed_key.hex() not in repr(identity)
    assert repr(identity.seed_key) not in repr(identity)


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [
        (dataclasses.replace(WANTED, instance="west-1"), "instance east-1 (not west-1)"),
        (dataclasses.replace(WANTED, fingerprint=b"\xff"), "fingerprint 0102 (not ff)"),
        (dataclasses.replace(WANTED, dtype="bfloat16"), "dtype float32 (not bfloat16)"),
        (dataclasses.replace(WANTED, block_size=32), "block_size 16 (not 32)"),
    ],
)
def test_directory_of_another_server_is_refused(wanted: Wanted, shown: str) -> None:
    """Both values are named, nothing is written, and the lock is free again."""
    files = FaultFiles()
    open_one(files).close()
    with pytest.raises(ConfigError) as caught:
        DurableDirectory.open(PATH, wanted, files)
    assert shown in str(caught.value)
    assert open_one(files).identity.generation == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"{", b'{"format": 2}', b"\xff", b"[" * 100_000])
def test_malformed_identity_is_refused(content: bytes) -> None:
    """It is never replaced by a new one, whose epoch would make all handles unknown."""
    files = FaultFiles()
    fd = files.open_new(PATH / "identity.json")
    files.write(fd, content, 0)
    with pytest.raises(ConfigError, match=r"identity\.json"):
        open_one(files)
    assert files.read_bytes(PATH / "identity.json") == content


@pytest.mark.parametrize(
    "change", [{"epoch": "x"}, {"epoch": 1}, {"seed_key": "00"}, {"generation": -1}, {"block_size": "16"}, {"more": 1}]
)
def test_identity_with_other_values_is_refused(change: dict[str, object]) -> None:
    """Each value has its type and length."""
    with pytest.raises(ValueError):  # noqa: PT011 - what it says is not promised
        Identity.decode(changed_json(Identity.create(WANTED).encode(), change))


def changed_json(content: bytes, change: dict[str, object]) -> bytes:
    """Return an object in JSON with other values."""
    return json.dumps(json.loads(content) | change).encode()


def test_segments_without_identity_are_refused() -> None:
    """Their handles would all be unknown under a new epoch."""
    files = FaultFiles()
    directory = open_one(files)
    directory.create_segment(1, SIZE, None)
    directory.close()
    files.unlink(PATH / "identity.json")
    with pytest.raises(ConfigError, match="restore"):
        open_one(files)


def test_crash_at_any_call_keeps_an_identity() -> None:
    """Also if the rename is lost; a generation under which a segment was written is never used again."""
    files = FaultFiles()
    first = open_one(files)
    first.close()
    disks: list[FaultFiles] = []

    def crash(call: Call) -> None:
        for survival, keeps_names in product((nothing, everything, torn_at(20)), (False, True)):
            disks.append(files.crash(survival, keeps_names=keeps_names))

    files.before_call = crash
    second = open_one(files)
    num_before = len(disks)
    second.create_segment(1, SIZE, None)
    assert 0 < num_before < len(disks)
    for index, disk in enumerate(disks):
        again = open_one(disk).identity
        assert again.epoch == first.identity.epoch
        assert again.generation in ({2, 3} if index < num_before else {3})


@pytest.mark.parametrize("call", ["lock", "open_new", "write", "sync", "rename", "sync_directory"])
def test_directory_that_cannot_be_written_is_a_config_error(call: str) -> None:
    """The start ends with the message of the system, and the lock is free."""
    files = FaultFiles()
    files.fail(call, errno.ENOSPC)
    with pytest.raises(ConfigError, match="No space left"):
        open_one(files)
    open_one(files)


# ---- segments -------------------------------------------------------------------------------------------------------


def test_segment_has_its_header_and_zeros() -> None:
    """What is created is preallocated, on the disk, and listed."""
    files = FaultFiles()
    directory = open_one(files)
    _, offset = directory.create_segment(3, SIZE, Previous(1, 500))
    data = files.crash().read_bytes(segment_path(PATH, 3))
    found = scan(data, 3)
    header = SegmentHeader(3, directory.identity.epoch, 1, Previous(1, 500), is_named=True)
    assert (len(data), found.end) == (SIZE, offset)
    assert [SegmentHeader.decode(frame.payload) for frame in found.frames] == [header]
    assert directory.segments() == [3]


def test_other_files_are_no_segments() -> None:
    """Only names of the right length count."""
    files = FaultFiles()
    directory = open_one(files)
    for name in (
        "1.segment",
        "99999999999999999999.segment",
        "00000000000000000001.segment.new",
        "0000000000000000000x.segment",
    ):
        files.open_new(PATH / name)
    for number in (12, 9, 10):
        directory.create_segment(number, SIZE, None)
    assert directory.segments() == [9, 10, 12]


@pytest.mark.parametrize("call", ["open_new", "write", "sync", "sync_directory"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_segment_that_cannot_be_created_leaves_nothing(call: str, code: int) -> None:
    """Neither a file nor an open descriptor."""
    files = FaultFiles()
    directory = open_one(files)
    num_open = len(files._open)
    files.fail(call, code)
    with pytest.raises(OSError, match=os.strerror(code)):
        directory.create_segment(1, SIZE, None)
    assert directory.segments() == []
    assert len(files._open) == num_open


def test_deleted_segment_is_gone_after_a_crash() -> None:
    """A name that came back would be read again."""
    files = FaultFiles()
    directory = open_one(files)
    directory.create_segment(1, SIZE, None)
    directory.delete_segment(1)
    assert open_one(files.crash()).segments() == []


# ---- owners ---------------------------------------------------------------------------------------------------------


def test_second_owner_is_refused() -> None:
    """As long as the first has the lock."""
    files = FaultFiles()
    first = open_one(files)
    with pytest.raises(OwnedElsewhere):
        open_one(files)
    first.close()
    open_one(files)


def test_owner_that_was_replaced_creates_and_deletes_no_segment() -> None:
    """It has lost its lock without noticing, as on a shared file system, and stops at the next segment."""
    files = FaultFiles()
    stale = open_one(files)
    assert stale.still_owner()
    files._locked.clear()
    fresh = open_one(files)
    assert (stale.still_owner(), fresh.still_owner()) == (False, True)
    with pytest.raises(OwnerReplaced):
        stale.create_segment(1, SIZE, None)
    assert fresh.segments() == []
    fresh.create_segment(1, SIZE, None)
    with pytest.raises(OwnerReplaced):
        stale.delete_segment(1)
    assert fresh.segments() == [1]


def test_directory_that_is_gone_has_no_owner() -> None:
    """Nothing is created where the identity cannot be read."""
    files = FaultFiles()
    directory = open_one(files)
    files.unlink(PATH / "identity.json")
    assert not directory.still_owner()


OWNER = """
import sys, pathlib
from ferrule_server.durability.directory import DurableDirectory, Wanted
from ferrule_server.errors import ConfigError
try:
    directory = DurableDirectory.open(pathlib.Path(sys.argv[1]), Wanted("east-1", b"", "float32", 16))
except ConfigError as error:
    print("refused", error, flush=True)
else:
    print("owner", directory.identity.generation, flush=True)
    sys.stdin.read()
"""


def start_owner(path: Path) -> subprocess.Popen[str]:
    """Start a process that opens a directory and keeps it until its input ends."""
    command = [sys.executable, "-c", OWNER, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    """Return what a process printed first."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    """End a process as a crash does."""
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_of_owners_that_start_at_once_one_gets_the_lock(tmp_path: Path) -> None:
    """The others name its process; when it is killed, the next one gets the lock, and the generation shows it."""
    path = tmp_path / "journal"
    processes = [start_owner(path) for _ in range(4)]
    try:
        lines = {process: first_line(process) for process in processes}
        (owner,) = [process for process, line in lines.items() if line == "owner 1"]
        refused = [line for process, line in lines.items() if process is not owner]
        assert all(line.startswith("refused") for line in refused)
        assert all(f"process {owner.pid} on" in line or "another process" in line for line in refused)
        late = start_owner(path)
        processes.append(late)
        assert f"in use by process {owner.pid} on" in first_line(late)
        end(owner)
        processes.append(start_owner(path))
        assert first_line(processes[-1]) == "owner 2"
    finally:
        for process in processes:
            end(process)


def test_real_directory_is_private_and_preallocated(tmp_path: Path) -> None:
    """It contains tokens and secrets: modes 0700 and 0600, also with an open umask."""
    path = tmp_path / "a" / "journal"
    before = os.umask(0)
    try:
        directory = DurableDirectory.open(path, WANTED)
        fd, _ = directory.create_segment(1, 3 << 20, None)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    assert modes == dict.fromkeys(("lock", "identity.json", "1-1.newest", segment_path(path, 1).name), 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert os.fstat(fd).st_size == 3 << 20
    assert os.fstat(fd).st_blocks * 512 >= 3 << 20
    directory.files.close(fd)
    directory.delete_segment(1)
    assert directory.segments() == []
    assert read_identity(path, directory.files) == directory.identity
    directory.close()


def test_confirm_leaves_a_real_segment_as_it_is(tmp_path: Path) -> None:
    """The same bytes are written again."""
    directory = DurableDirectory.open(tmp_path, WANTED)
    fd, offset = directory.create_segment(1, SIZE, None)
    directory.files.close(fd)
    content = segment_path(tmp_path, 1).read_bytes()
    directory.confirm(1, 0, offset)
    assert segment_path(tmp_path, 1).read_bytes() == content
    directory.close()


def test_real_directory_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    """The path is named."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/journal cannot be used"):
        DurableDirectory.open(tmp_path / "file" / "journal", WANTED)


# ---- before anything is loaded --------------------------------------------------------------------------------------


def test_a_usable_directory_passes_and_is_not_changed(tmp_path: Path) -> None:
    """One that is new, one that is missing, one of an earlier start, and one whose owner is still ending."""
    check_directory(tmp_path, "east-1")
    assert list(tmp_path.iterdir()) == []
    check_directory(tmp_path / "new" / "journal", "east-1")
    assert list((tmp_path / "new" / "journal").iterdir()) == []
    journal = tmp_path / "journal"
    directory = DurableDirectory.open(journal, WANTED)
    before = {path.name: path.read_bytes() for path in journal.iterdir()}
    check_directory(journal, WANTED.instance)
    directory.close()
    check_directory(journal, WANTED.instance)
    assert {path.name: path.read_bytes() for path in journal.iterdir()} == before


@pytest.mark.parametrize("name", ["file", "file/journal", "file/a/b"])
def test_a_file_is_no_directory(name: str, tmp_path: Path) -> None:
    """Nor is anything below it."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{name} cannot be used for durable handles: .*Not a directory"):
        check_directory(tmp_path / name, "east-1")


def test_a_directory_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    """Somebody who names /tmp by mistake must not take it from everybody else."""
    tmp_path.chmod(0o751)
    check_directory(tmp_path, WANTED.instance)
    DurableDirectory.open(tmp_path, WANTED).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o751


@pytest.mark.parametrize("path", ["/proc", "/proc/journal", "/proc/a/b"])
def test_a_directory_that_cannot_be_written_to_is_refused(path: str) -> None:
    """Also for root, who may write to it by its mode."""
    with pytest.raises(ConfigError, match=f"{path} cannot be used for durable handles: "):
        check_directory(Path(path), "east-1")


def test_an_identity_that_cannot_be_used_is_refused_early(tmp_path: Path) -> None:
    """Another instance, another format, and segments without an identity."""
    DurableDirectory.open(tmp_path, WANTED).close()
    with pytest.raises(ConfigError, match=r"instance east-1 \(not west-1\): start the server with these"):
        check_directory(tmp_path, "west-1")
    (tmp_path / "identity.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match=r"identity\.json cannot be read: the format is not 1"):
        check_directory(tmp_path, "east-1")
    (tmp_path / "identity.json").rename(segment_path(tmp_path, 1))
    with pytest.raises(ConfigError, match=r"has a journal and no identity\.json"):
        check_directory(tmp_path, "east-1")
