"""A file names the newest segment: the loss of either is an error, and no crash or failure looks like a loss."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from random import Random

import pytest

from ferrule_server.durability import writer as writers
from ferrule_server.durability.__main__ import main
from ferrule_server.durability.directory import (
    DurableDirectory,
    Newest,
    OwnerReplaced,
    Wanted,
    check_directory,
    list_segments,
    read_identity,
    segment_path,
)
from ferrule_server.durability.files import Files
from ferrule_server.durability.frames import Previous, SegmentHeader, encode_frame
from ferrule_server.durability.reader import JournalDamaged, read_directory, survey
from ferrule_server.durability.records import Tag
from ferrule_server.durability.writer import JournalWriter
from ferrule_server.engine.durable.opening import open_durability
from ferrule_server.errors import ConfigError
from tests.durability.fault_files import Call, FaultFiles, everything, nothing, torn_at
from tests.durability.journal_model import JournalModel
from tests.durability.journals import PATH, WANTED
from tests.durability.stored import IDENTITY, StoredFiles, segment_of

RECORDED = json.loads((Path(__file__).parent / "version1.json").read_text())
"""A directory as version 0.1 left it after kill -9, and what its sequences were; see test_a_directory_of_... below."""


FAILING = ["", "sync_directory", "rename", "sync", "write", "open_new"]


class Server:
    """Writes the groups of a model to a journal as a server does.

    Attributes:
        failures: Of the journal. synced: the newest group on the disk.
    """

    def __init__(self, files: FaultFiles, model: JournalModel) -> None:
        self.failures: list[OSError] = []
        self.synced = 0
        self._changed = threading.Condition()
        self._model = model
        self.directory = DurableDirectory.open(PATH, WANTED, files)
        self.writer = JournalWriter(
            self.directory,
            last_frame=read_directory(PATH, files).last_frame,
            segment_bytes=3000,
            on_synced=self._note,
            on_failed=self._fail,
        )

    def _note(self, group: int) -> None:
        with self._changed:
            self.synced = group
            self._changed.notify_all()

    def _fail(self, error: OSError) -> None:
        with self._changed:
            self.failures.append(error)
            self._changed.notify_all()

    def write(self, groups: list[bytes]) -> bool:
        """Write groups and wait; False: the journal has failed."""
        number, before = 0, len(self.failures)
        for group in filter(None, groups):
            if group[0] == Tag.SNAPSHOT_BEGIN:
                self.writer.start_segment()
            self.writer.append(group)
            number = self.writer.close_group(ends_snapshot=group[-1] == Tag.SNAPSHOT_END)
        self._wait(number, before)
        return len(self.failures) == before

    def recover(self) -> None:
        """Write everything again after a failure, until that succeeds."""
        while True:
            self._model.restart()
            self._model.finish_snapshot()
            before = len(self.failures)
            self._wait(self.writer.restart(), before)
            if len(self.failures) == before and self.write(self._model.groups[-2:]):
                return

    def _wait(self, group: int, num_failures: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.synced >= group or len(self.failures) > num_failures, 20)

    def close(self) -> None:
        """End it."""
        self.writer.close(20)
        self.directory.close()


def mixed(disk: FaultFiles, other: FaultFiles) -> FaultFiles:
    """Return a disk with the ``*.newest`` of another: names that were not synced come to the disk in any order."""
    mixture = FaultFiles()
    names = {path: inode for path, inode in disk._names.items() if path.suffix != ".newest"}
    mixture._names = names | {path: inode for path, inode in other._names.items() if path.suffix == ".newest"}
    mixture._durable_names = dict(mixture._names)
    return mixture


def disks_of(seed: int, failing: str, num_groups: int) -> list[FaultFiles]:
    """Let two servers write, while calls of a method fail, and return the disks after a crash before each call."""
    random, files, disks = Random(seed), FaultFiles(), []
    model = JournalModel(random)

    def crash(_: Call) -> None:
        survival = random.choice([nothing, everything, torn_at(random.randrange(600))])
        whole, synced = files.crash(survival, keeps_names=True), files.crash(survival)
        disks.append(random.choice([files.kill(), whole, synced, mixed(whole, synced), mixed(synced, whole)]))

    files.before_call = crash
    for _ in range(2):
        server, written = Server(files, model), len(model.groups) - 1
        for _ in range(num_groups):
            model.add_group()
            if failing:
                files.fail(failing, random.choice([errno.EIO, errno.ENOSPC]), after=random.randrange(6))
            if not server.write(model.groups[written:]):
                server.recover()
            written = len(model.groups)
        server.close()
        files._failures.clear()
        model.restart()
    return disks


@pytest.mark.parametrize("failing", FAILING)
def test_no_crash_looks_like_a_loss(failing: str) -> None:
    """At any call, also while the disk fails: a journal is read; and without its newest segment or name it never is."""
    check_disks(disks_of(1, failing, 5))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("seed", range(10, 40))
def test_no_crash_looks_like_a_loss_at_length(seed: int, failing: str) -> None:
    """More of the same."""
    check_disks(disks_of(seed, failing, 10))


def check_disks(disks: list[FaultFiles]) -> None:
    """Assert that each disk can be read, and not without the newest segment, nor without the file that names it."""
    num_named = 0
    for disk in disks:
        newest = Newest.find(PATH, disk)
        try:
            read_identity(PATH, disk)
        except FileNotFoundError:
            assert not list_segments(PATH, disk)
            continue
        assert newest is not None
        read_directory(PATH, disk)
        for lost in {PATH / newest.file_name, segment_path(PATH, newest.segment)} if newest.segment else ():
            num_named += 1
            without = disk.kill()
            without.lose(lost)
            with pytest.raises(JournalDamaged):
                read_directory(PATH, without)
    assert num_named > len(disks)


@pytest.mark.parametrize("failing", ["sync_directory", "rename", "sync", "write", "open_new"])
def test_a_segment_that_may_be_named_is_not_removed(failing: str) -> None:
    """Each call of a creation fails once; whatever is on the disk then, the journal before is read."""
    for after in range(4):
        files = FaultFiles()
        server = Server(files, JournalModel(Random(1)))
        server.write(JournalModel(Random(1)).groups)
        files.fail(failing, errno.EIO, after=after)
        with contextlib.suppress(OSError):
            server.directory.create_segment(
                9, 1000, Previous(server.writer._segment.number, server.writer._segment.end)
            )
        for disk in (
            files.kill(),
            files.crash(nothing),
            files.crash(nothing, keeps_names=True),
            files.crash(everything),
        ):
            assert read_directory(PATH, disk).state.num_snapshots == 1
        server.close()


class LateAnswers(FaultFiles):
    """Says of the next renaming that it failed, though it was done, as a file system over a network may."""

    is_late = False

    def rename(self, source: Path, target: Path) -> None:
        """Rename, and perhaps say otherwise."""
        super().rename(source, target)
        if self.is_late:
            self.is_late = False
            raise FileNotFoundError(errno.ENOENT, "sent again after it was done", str(source))


def test_a_renaming_that_is_said_to_have_failed_is_looked_up() -> None:
    """The segment that it named is in use."""
    files = LateAnswers()
    server = Server(files, JournalModel(Random(1)))
    files.is_late = True
    assert server.write(JournalModel(Random(1)).groups)
    assert not files.is_late
    server.close()
    assert read_directory(PATH, files.kill()).state.num_snapshots == 1


# ---- what a loss looks like, and what does not ----------------------------------------------------------------------


def journal_of(path: Path, *, seed: int = 3, num_groups: int = 12) -> Path:
    """Write a journal of some segments as a server does that is then killed."""
    model = JournalModel(Random(seed))
    for _ in range(num_groups):
        model.add_group()
    directory = DurableDirectory.open(path, WANTED)
    writer = JournalWriter(directory, segment_bytes=1500, on_synced=lambda _: None, on_failed=lambda _: None)
    for group in filter(None, model.groups):
        if group[0] == Tag.SNAPSHOT_BEGIN:
            writer.start_segment()
        writer.append(group)
        writer.close_group()
    writer.close()
    directory.close()
    return path


def newest_of(path: Path) -> Path:
    """Return the path of the newest segment."""
    return segment_path(path, list_segments(path, Files())[-1])


LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "below its header": lambda path: os.truncate(path, 20),
    "zeros": lambda path: path.write_bytes(bytes(1500)),
    "header torn": lambda path: path.write_bytes(path.read_bytes()[:50] + bytes(1000)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_newest_segment_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str) -> None:
    """The start fails and says which segment, and `verify` exits with 1; before, both found an older or empty state."""
    newest = newest_of(journal_of(tmp_path / "journal"))
    assert main(["verify", str(newest.parent)]) == 0
    LOSSES[loss](newest)
    with pytest.raises(JournalDamaged, match=f"segment {int(newest.stem)}, offset 0: .*newest.*restore a backup"):
        open_durability(newest.parent, WANTED)
    capsys.readouterr()
    assert main(["verify", "--json", str(newest.parent)]) == 1
    (damage,) = json.loads(capsys.readouterr().out)["damaged"]
    assert (damage["segment"], damage["offset"]) == (int(newest.stem), 0)


def test_an_only_segment_that_is_lost_is_no_empty_journal(tmp_path: Path) -> None:
    """A server would begin with nothing, and would answer every handle as unknown."""
    newest_of(journal_of(tmp_path / "journal", num_groups=0)).unlink()
    for other in tmp_path.glob("journal/*.segment"):
        other.unlink()
    with pytest.raises(JournalDamaged, match="is missing"):
        open_durability(tmp_path / "journal", WANTED)


@pytest.mark.parametrize("loss", ["name", "name and segments"])
def test_a_lost_name_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str) -> None:
    """Nobody could say any more whether the newest segment is there; nothing is written before that is mended."""
    path = journal_of(tmp_path / "journal")
    lost = [*path.glob("*.newest"), *(path.glob("*.segment") if loss != "name" else [])]
    contents = {file: file.read_bytes() for file in lost}
    for file in lost:
        file.unlink()
    assert main(["verify", str(path)]) == 1
    assert "the file that names the newest segment (*.newest) is missing" in capsys.readouterr().out
    for _ in range(2):
        with pytest.raises(JournalDamaged, match=r"the file that names the newest segment .* is missing"):
            open_durability(path, WANTED)
    for file, content in contents.items():
        file.write_bytes(content)
    assert main(["verify", str(path)]) == 0


def test_a_name_without_identity_is_no_new_directory(tmp_path: Path) -> None:
    """It says that there was a journal."""
    path = journal_of(tmp_path / "journal")
    for file in (path / "identity.json", *path.glob("*.segment")):
        file.unlink()
    for refused in (lambda: check_directory(path, WANTED.instance), lambda: open_durability(path, WANTED)):
        with pytest.raises(ConfigError, match=r"has a journal and no identity\.json"):
            refused()


def test_other_files_name_no_segment() -> None:
    """Only two numbers do; of several, that of the newest generation counts."""
    files = FaultFiles()
    for name in ("9.newest", "9-9.newest.new", "-1-9.newest", "9-x.newest", "٣-٩.newest", "9-9.segment"):
        files.open_new(PATH / name)
    assert Newest.find(PATH, files) is None
    for newest in (Newest(2, 30), Newest(10, 4), Newest(9, 50)):
        files.open_new(PATH / newest.file_name)
    assert Newest.find(PATH, files) == Newest(10, 4)


@pytest.mark.parametrize("before", [[], [Newest(3, 7)]])
def test_a_segment_deleted_beside_a_running_server_is_no_loss(before: list[Newest]) -> None:
    """The name is read first, and another segment may be the newest when the segments are; also the first one."""
    segments = {1: segment_of(1, JournalModel(Random(1)).groups[:1], None, is_named=True)}
    files = StoredFiles(segments)
    listed = iter([[each.file_name for each in before], list(files.list_names(PATH)), [Newest(3, 9).file_name]])
    files.list_names = lambda path: next(listed)  # type: ignore[method-assign]
    with pytest.raises(FileNotFoundError):
        survey(PATH, files)


# ---- a start that fails ---------------------------------------------------------------------------------------------


def start_again(files: FaultFiles) -> JournalWriter:
    """Return the writer of a second server."""
    server = Server(files, JournalModel(Random(1)))
    server.write(JournalModel(Random(1)).groups)
    server.close()
    return Server(files, JournalModel(Random(1))).writer


@pytest.mark.parametrize("failing", ["rename", "sync_directory", "unlink", "write"])
def test_a_start_that_fails_names_the_segment_before(failing: str) -> None:
    """Those that it has created are deleted, or stay and are ignored: the next start reads the journal before."""
    files = FaultFiles()
    writer = start_again(files)
    files.fail(failing, errno.EIO)
    writer.discard()
    for disk in (files.kill(), files.crash(nothing), files.crash(everything, keeps_names=True)):
        journal = read_directory(PATH, disk)
        assert journal.state.num_snapshots == 1


def test_a_start_that_fails_while_the_disk_is_late_keeps_what_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot of the failed start may come to the disk after all: then nothing deletes it, or what it replaces."""
    files = FaultFiles()
    writer = start_again(files)
    monkeypatch.setattr(writers, "_DISCARD_S", 0.05)
    files.is_flowing.clear()
    writer.append(JournalModel(Random(1)).groups[0])
    writer.close_group(ends_snapshot=True)
    writer.discard()
    files.is_flowing.set()
    writer._thread.join(10)
    assert read_directory(PATH, files.kill()).state.num_snapshots == 1


# ---- a directory that is lost while the server runs -----------------------------------------------------------------


@pytest.fixture
def running() -> Iterator[tuple[FaultFiles, Server]]:
    """Yield a server, and its disk."""
    files = FaultFiles()
    server = Server(files, JournalModel(Random(2)))
    server.write(JournalModel(Random(2)).groups)
    yield files, server
    server.close()


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("gone", ["directory", "segment", "renamed"])
def test_a_segment_that_vanishes_is_a_failure(
    running: tuple[FaultFiles, Server], monkeypatch: pytest.MonkeyPatch, gone: str, is_busy: bool
) -> None:
    """Within a second, whether or not anything is written; what it would have confirmed would be lost."""
    files, server = running
    monkeypatch.setattr(writers, "_CHECK_S", 0.05)
    path = segment_path(PATH, server.directory.newest.segment)
    if gone == "renamed":
        files.rename(path, PATH / "elsewhere")
    else:
        files.lose(PATH if gone == "directory" else path)
    with server._changed:
        while not server.failures:
            if is_busy:
                server.writer.append(b"record")
                server.writer.close_group()
            server._changed.wait(0.005)
    assert "not in its directory" in str(server.failures[0])


def test_a_journal_goes_on_when_its_directory_is_back(
    running: tuple[FaultFiles, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after any failure: with everything in a new segment."""
    files, server = running
    monkeypatch.setattr(writers, "_CHECK_S", 0.05)
    lost = {path: files._names.pop(path) for path in list(files._names)}
    with server._changed:
        assert server._changed.wait_for(lambda: server.failures, 10)
    server.writer.restart()
    with server._changed:
        assert server._changed.wait_for(lambda: len(server.failures) == 2, 10)
    files._names |= lost
    server._model.restart()
    server.recover()
    assert read_directory(PATH, files.kill()).state.num_snapshots == 1


# ---- folders of earlier versions ------------------------------------------------------------------------------------


def recorded(path: Path) -> Path:
    """Write the directory that an earlier version has left."""
    path.mkdir()
    (path / "identity.json").write_text(json.dumps(RECORDED["identity"]))
    for name, content in RECORDED["segments"].items():
        (path / name).write_bytes(base64.b64decode(content))
    return path


def test_a_directory_of_version_1_is_read_and_continued(tmp_path: Path) -> None:
    """A directory of the version before is read and continued; no file names a segment at first."""
    path = recorded(tmp_path / "journal")
    values = RECORDED["identity"]
    wanted = Wanted("test", bytes.fromhex(values["fingerprint"]), values["dtype"], values["block_size"])
    for _ in range(2):
        journal = read_directory(path, Files())
        found = [
            {
                "no": each.no,
                "principal": each.principal,
                "token_ids": list(each.token_ids),
                "ttl_s": each.ttl_s,
                "is_published": each.is_published,
                "reserved_length": each.reserved_length,
                "handle_id": journal.handle_id(each.secret),
            }
            for each in journal.state.sequences.values()
        ]
        assert found == RECORDED["sequences"]
        assert [(name, len(each.members)) for (_, name), each in journal.state.creations.items()] == [
            ("b", 2),
            ("a", 1),
        ]
        assert list(journal.state.masks.values()) == [b"\xff\x01\x00\x00"]
        assert main(["verify", str(path)]) == 0
        open_durability(path, wanted).journal._writer.close()
        newest = Newest.find(path, Files())
        assert newest is not None
        assert newest.segment == list_segments(path, Files())[-1]
        (path / "lock").unlink()  # the lock is held by this process


def test_the_version_before_reads_what_this_one_writes() -> None:
    """It refuses an identity with another key; of a header it reads the keys that it knows."""
    assert json.loads(IDENTITY.encode()).keys() == RECORDED["identity"].keys()
    header = json.loads(SegmentHeader(1, IDENTITY.epoch, 1, None, is_named=True).encode())
    assert header.keys() >= {"segment", "epoch", "generation", "previous", "digests"}


def earlier_version(files: FaultFiles, model: JournalModel, *, begins_at: int | None = None) -> None:
    """Go forward in a directory as the version before does: it knows no names, and deletes what it has replaced."""
    identity = read_identity(PATH, files)
    content = json.loads(identity.encode()) | {"generation": identity.generation + 1}
    files.unlink(PATH / "identity.json")
    put(files, "identity.json", json.dumps(content).encode())
    before = list_segments(PATH, files)
    number = begins_at or max(before, default=0) + 1
    data = encode_frame(SegmentHeader(number, identity.epoch, identity.generation + 1, None).encode(), number, 0)
    for group in filter(None, model.groups):
        data += encode_frame(group, number, len(data))
    for each in before:
        files.unlink(segment_path(PATH, each))
    put(files, segment_path(PATH, number).name, data + bytes(100))
    files.sync_directory(PATH)


def put(files: FaultFiles, name: str, content: bytes) -> None:
    """Write a file."""
    fd = files.open_new(PATH / name)
    files.write(fd, content, 0)
    files.sync(fd)
    files.close(fd)


@pytest.mark.parametrize("begins_at", [None, 1])
def test_a_version_before_may_go_forward_between_two_servers(begins_at: int | None) -> None:
    """What an earlier name says does not count then, at no crash point; a name of the next server does."""
    files = FaultFiles()
    writer = start_again(files)
    writer.close()
    files = files.kill()
    model = JournalModel(Random(5))
    earlier_version(files, model, begins_at=begins_at)
    num_before = len(files.calls)
    disks: list[FaultFiles] = []
    files.before_call = lambda _: disks.append(files.crash(everything, keeps_names=len(disks) % 2 == 0))
    server = Server(files, model)
    assert server.write(model.groups)
    server.close()
    assert len(disks) == len(files.calls) - num_before
    for disk in disks:
        assert read_directory(PATH, disk).state.num_snapshots >= 1
    last = files.kill()
    last.lose(segment_path(PATH, server.directory.newest.segment))
    with pytest.raises(JournalDamaged):
        read_directory(PATH, last)


# ---- two owners at once, after a shared file system has lost the lock -----------------------------------------------

NUM_CALLS = 12
"""At least as many as the creation of a segment makes."""


class Turns:
    """Lets two threads run in turn: the first for some calls, the second for some, then each to its end."""

    def __init__(self, files: FaultFiles, num_calls: tuple[int, int]) -> None:
        self._left = list(num_calls)
        self._has_ended = [False, False]
        self._events = (threading.Event(), threading.Event())
        self._threads: list[threading.Thread] = []
        self._files = files
        self.errors: dict[int, Exception] = {}
        self.disks: list[FaultFiles] = []

    def run(self, *parts: Callable[[], None]) -> None:
        """Run both parts."""
        self._threads = [threading.Thread(target=self._part, args=it) for it in enumerate(parts)]
        self._files.before_call = self._before
        for thread in self._threads:
            thread.start()
        self._events[0].set()
        for thread in self._threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self._threads)
        self._files.before_call = lambda _: None

    def _part(self, index: int, part: Callable[[], None]) -> None:
        self._events[index].wait(20)
        try:
            part()
        except (OSError, ConfigError) as error:
            self.errors[index] = error
        self._has_ended[index] = True
        self._events[1 - index].set()

    def _before(self, _: Call) -> None:
        index = self._threads.index(threading.current_thread())
        if len(self._files.calls) % 11 == 0:
            self.disks += (self._files.kill(), self._files.crash(nothing))
        self._left[index] -= 1
        if self._left[index] == -1 and not self._has_ended[1 - index]:
            self._events[index].clear()
            self._events[1 - index].set()
            self._events[index].wait(20)


def test_of_two_owners_one_goes_on() -> None:
    """The old one creates a segment while the new one starts, each stopped at any call: nothing that counts is lost."""
    outcomes = set()
    for num_calls in product(range(NUM_CALLS), range(NUM_CALLS + 8)):
        outcomes.add(two_owners(num_calls))
    assert outcomes == {(False, True), (True, False), (True, True)}


def two_owners(num_calls: tuple[int, int]) -> tuple[bool, bool]:
    """Return whether the old owner and the new one have created their segment."""
    files, model = FaultFiles(), JournalModel(Random(1))
    first = Server(files, model)
    first.write(model.groups)
    first.writer.close()
    files._locked.clear()
    old, last, created = first.directory, first.writer._segment, [False, False]
    payloads = [model.groups[0], model.groups[0]]

    def stale() -> None:
        fd, end = old.create_segment(last.number + 1, 600, Previous(last.number, last.end))
        created[0] = True
        files.write(fd, encode_frame(payloads[0], last.number + 1, end), end)
        files.sync(fd)

    def start() -> None:
        new = DurableDirectory.open(PATH, WANTED, files)
        journal = read_directory(PATH, files)
        assert journal.last_frame is not None
        new.confirm(*journal.last_frame)
        number = max(*new.segments(), new.newest.segment) + 1
        fd, end = new.create_segment(number, 600, Previous(journal.last_frame.segment, journal.last_frame.end))
        created[1] = True
        files.write(fd, encode_frame(payloads[1], number, end), end)
        files.sync(fd)

    turns = Turns(files, num_calls)
    turns.run(stale, start)
    assert not isinstance(turns.errors.get(1), OwnerReplaced)
    for disk in turns.disks:
        assert read_directory(PATH, disk).state.num_snapshots >= 1
    assert read_identity(PATH, files).generation == 2
    assert not old.still_owner()
    for disk in (files.kill(), files.crash(nothing), files.crash(everything, keeps_names=True)):
        newest = Newest.find(PATH, disk)
        assert newest is not None
        assert newest.generation == 2 or not created[1]
        journal = read_directory(PATH, disk)
        assert journal.last_frame is not None
        assert journal.last_frame.segment == newest.segment
        assert journal.state.num_snapshots >= 1
        DurableDirectory.open(PATH, WANTED, disk)
    return created[0], created[1]
