"""The writer: what it reported is on the disk after any crash, and what failed is never trusted."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from ferrule_server.durability import writer as writers
from ferrule_server.durability.directory import DurableDirectory, OwnerReplaced, segment_path
from ferrule_server.durability.frames import MAX_PAYLOAD_BYTES, Tail, scan
from ferrule_server.durability.reader import JournalDamaged
from ferrule_server.durability.writer import JournalWriter
from tests.durability.fault_files import Call, FaultFiles, Survival, everything, nothing, some_sectors, torn_at
from tests.durability.journals import PATH, WANTED, read_journal, record

SEGMENT_BYTES = 2500


class Client:
    """Holds a writer as the engine does, and what it was told.

    Attributes:
        reported: The newest group that was reported.
        failures: The errors that were reported.
    """

    def __init__(self, files: FaultFiles) -> None:
        self.reported = 0
        self.failures: list[OSError] = []
        self.directory = DurableDirectory.open(PATH, WANTED, files)
        self._changed = threading.Condition()
        self.writer = JournalWriter(
            self.directory,
            last_frame=read_journal(files).last_frame,
            segment_bytes=SEGMENT_BYTES,
            on_synced=self._synced,
            on_failed=self._failed,
        )

    def _synced(self, group: int) -> None:
        with self._changed:
            assert group > self.reported
            self.reported = group
            self._changed.notify_all()

    def _failed(self, error: OSError) -> None:
        with self._changed:
            self.failures.append(error)
            self._changed.notify_all()

    def give(self, *records: bytes) -> int:
        """Give a group away and return its number."""
        for each in records:
            self.writer.append(each)
        return self.writer.close_group()

    def wait(self, group: int) -> None:
        """Wait until a group is reported."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.reported >= group, 20)

    def write(self, *records: bytes) -> int:
        """Give a group away and wait for it."""
        group = self.give(*records)
        self.wait(group)
        return group

    def wait_failure(self, number: int = 1) -> None:
        """Wait until so many failures were reported."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.failures) >= number, 20)

    def close(self) -> None:
        """End the writer and give up the directory."""
        self.writer.close(20)
        self.directory.close()


@pytest.fixture
def files() -> FaultFiles:
    """Return an empty disk."""
    return FaultFiles()


@pytest.fixture
def client(files: FaultFiles) -> Iterator[Client]:
    """Yield a client of an empty disk."""
    one = Client(files)
    yield one
    files.is_flowing.set()
    one.close()


# ---- what is reported is there ---------------------------------------------------------------------------------------


def test_groups_are_read_as_they_were_written(files: FaultFiles, client: Client) -> None:
    """Over several segments, in order, and reported one by one."""
    sizes = [12, 2000, 600, 12, 3000, 12, 12, 400]
    for number, size in enumerate(sizes):
        assert client.write(record(number, size)) == number + 1 == client.writer.synced
    journal = read_journal(files.crash())
    assert journal.numbers == list(range(len(sizes)))
    assert journal.segments == [1, 2, 3, 4]


def survivals(random: Random) -> list[Survival]:
    """Return ways in which writes survive a crash."""
    tears = [torn_at(size) for size in (1, 4, 8, 9, 20, random.randrange(2000), random.randrange(2000))]
    return [nothing, everything, *tears, *(some_sectors(random, share) for share in (0.2, 0.5, 0.5, 0.8))]


def check_crashes(seed: int) -> int:
    """Assert for a crash before each call, in each way: all that was reported is there, in order, and nothing else.

    Returns:
        How many disks were checked.
    """
    random = Random(seed)
    files = FaultFiles()
    client = Client(files)
    disks: list[tuple[int, FaultFiles]] = []
    num_records: dict[int, int] = {0: 0}

    def crash(call: Call) -> None:
        kept = [(survival, random.random() < 0.5) for survival in survivals(random)]
        disks.extend((client.reported, files.crash(survival, keeps_names=keeps)) for survival, keeps in kept)

    files.before_call = crash
    total = 0
    for _ in range(10):
        count = random.randrange(1, 4)
        if random.random() < 0.15:
            client.writer.start_segment()
        sizes = [random.choice((12, 60, 500, 1500)) for _ in range(count)]
        group = client.write(*(record(total + index, size) for index, size in enumerate(sizes)))
        total += count
        num_records[group] = total
    client.close()
    for reported, disk in disks:
        check_disk(disk, num_records[reported], total)
    return len(disks)


def check_disk(disk: FaultFiles, num_reported: int, num_written: int) -> None:
    """Assert that a disk has what was reported, and that a new writer can go on with it."""
    found = read_journal(disk).numbers
    assert num_reported <= len(found) <= num_written
    assert found == list(range(len(found)))
    client = Client(disk)
    client.write(record(len(found)))
    assert read_journal(disk.crash()).numbers == list(range(len(found) + 1))
    client.close()


@pytest.mark.parametrize("seed", range(3))
def test_crash_at_any_call_keeps_what_was_reported(seed: int) -> None:
    """Whatever else is on the disk, torn or whole; and the next server goes on from there."""
    assert check_crashes(seed) > 300


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_crash_at_any_call_keeps_what_was_reported_at_length(seed: int) -> None:
    """More of the same."""
    assert check_crashes(seed) > 300


def read_end(files: FaultFiles, number: int) -> int:
    """Return where the frames of a segment end."""
    return scan(files.read_bytes(segment_path(PATH, number)), number).end


def test_end_of_a_segment_that_is_gone_is_damage(files: FaultFiles, client: Client) -> None:
    """A header says how much of the segment before it was confirmed, so zeros there are no end."""
    client.write(record(0))
    client.write(record(1))
    client.writer.start_segment()
    client.write(record(2))
    path = segment_path(PATH, 1)
    files.damage(path, read_end(files, 1) - 21, bytes(21))
    assert scan(files.read_bytes(path), 1).tail is Tail.CLEAN
    with pytest.raises(JournalDamaged, match="were confirmed"):
        read_journal(files)


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("survival", [nothing, everything, torn_at(5)])
def test_poisoned_segment_is_never_written_again(
    files: FaultFiles, client: Client, call: str, code: int, survival: Survival
) -> None:
    """After one error that does not come again, nothing after the last confirmed frame is trusted."""
    client.write(record(0))
    files.fail(call, code)
    lost = client.give(record(1))
    client.wait_failure()
    assert (client.writer.is_failed, client.writer.synced) == (True, lost - 1)
    num_writes = files.writes_to(segment_path(PATH, 1))
    client.give(record(2))
    time.sleep(0.01)
    assert read_journal(files.crash(survival)).numbers == [0]

    client.wait(client.writer.restart())
    client.write(record(3))
    assert not client.writer.is_failed
    assert [error.errno for error in client.failures] == [code]
    for disk in (files.crash(survival), files.kill()):
        assert read_journal(disk).numbers == [0, 3]
        assert read_journal(disk).segments == [1, 2]
    assert files.writes_to(segment_path(PATH, 1)) == num_writes


def test_failing_sync_loses_nothing_that_was_reported(files: FaultFiles, client: Client) -> None:
    """What is reported after a failure is on the disk, whatever became of the frame that has failed."""
    client.write(record(0))
    files.fail("sync", errno.EIO)
    client.give(record(1, 1500))
    client.wait_failure()
    client.wait(client.writer.restart())
    client.write(record(2, 700))
    client.writer.close(20)
    for disk in (files.crash(), files.kill()):
        assert read_journal(disk).numbers == [0, 2]


@pytest.mark.parametrize("call", ["open_new", "write", "sync", "sync_directory"])
def test_restart_that_fails_is_reported_and_can_be_repeated(files: FaultFiles, client: Client, call: str) -> None:
    """Numbers of segments are not used twice, and those that came to nothing are not in the way."""
    client.write(record(0))
    files.fail("sync", errno.EIO)
    client.give(record(1))
    client.wait_failure(1)
    for number in (2, 3):
        files.fail(call, errno.ENOSPC)
        client.writer.restart()
        client.wait_failure(number)
        assert client.writer.is_failed
    client.wait(client.writer.restart())
    client.write(record(2))
    assert read_journal(files.crash()).numbers == [0, 2]
    assert client.directory.segments() == [1, 4]
    assert [error.errno for error in client.failures] == [errno.EIO, errno.ENOSPC, errno.ENOSPC]
    assert client.writer.counters.num_failures == 3


def test_segment_whose_creation_failed_is_not_in_the_way(files: FaultFiles, client: Client) -> None:
    """Even if it cannot be removed, and its header is on the disk."""
    client.write(record(0))
    files.fail("sync_directory", errno.EIO)
    files.fail("unlink", errno.EIO)
    client.writer.start_segment()
    client.give(record(1))
    client.wait_failure()
    assert client.directory.segments() == [1, 2]
    client.wait(client.writer.restart())
    client.write(record(2))
    journal = read_journal(files.crash(everything, keeps_names=True))
    assert (journal.numbers, journal.segments) == ([0, 2], [1, 3])


def test_no_room_for_the_next_segment_loses_nothing(files: FaultFiles, client: Client) -> None:
    """The full segment stays as it is, and the next restart goes on after it."""
    client.write(record(0, 2000))
    files.fail("write", errno.ENOSPC)
    client.give(record(1, 2000))
    client.wait_failure()
    assert read_journal(files.crash(everything)).numbers == [0]
    client.wait(client.writer.restart())
    client.write(record(1))
    assert read_journal(files.crash()).numbers == [0, 1]


def test_open_records_are_dropped_by_a_restart(files: FaultFiles, client: Client) -> None:
    """They continue a state that is not on the disk."""
    files.fail("sync", errno.EIO)
    client.give(record(0))
    client.wait_failure()
    client.writer.append(record(1))
    client.wait(client.writer.restart())
    client.write(record(2))
    assert read_journal(files).numbers == [2]


def test_bug_in_the_thread_is_a_failure(
    files: FaultFiles, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Replies do not wait for ever."""
    monkeypatch.setattr(writers, "encode_frame", lambda *arguments: 1 // 0)
    client.give(record(0))
    client.wait_failure()
    assert "ZeroDivisionError" in caplog.text


def test_owner_that_was_replaced_stops(files: FaultFiles, client: Client) -> None:
    """It finds out when it begins a segment, and its restarts fail; the journal of the new owner is not touched."""
    client.write(record(0))
    files._locked.clear()
    fresh = Client(files)
    fresh.write(record(1))
    client.writer.start_segment()
    client.give(record(7))
    client.wait_failure(1)
    client.writer.restart()
    client.wait_failure(2)
    assert all(isinstance(error, OwnerReplaced) for error in client.failures)
    fresh.write(record(2))
    assert read_journal(files.crash()).numbers == [0, 1, 2]
    fresh.close()


def test_late_frames_of_a_replaced_owner_do_not_count(files: FaultFiles, client: Client) -> None:
    """Those that it writes to its last segment after the new owner has read it."""
    client.write(record(0))
    files._locked.clear()
    fresh = Client(files)
    client.write(record(7))
    fresh.write(record(1))
    assert read_journal(files.crash()).numbers == [0, 1]
    fresh.close()


# ---- starts ---------------------------------------------------------------------------------------------------------


def test_last_frame_is_confirmed_by_a_start(files: FaultFiles, client: Client) -> None:
    """The sync of the process that died may have failed, and the kernel has forgotten that."""
    client.write(record(0))
    files.fail("sync", errno.EIO)
    client.give(record(1))
    client.wait_failure()
    killed = files.kill()
    assert read_journal(killed).numbers == [0, 1]
    Client(killed).close()
    assert read_journal(killed.crash()).numbers == [0, 1]


@pytest.mark.parametrize("call", ["open_new", "write", "sync", "sync_directory"])
def test_start_that_fails_raises(files: FaultFiles, call: str) -> None:
    """There is no writer without a segment, and what was there is still there."""
    first = Client(files)
    first.write(record(0))
    first.close()
    directory = DurableDirectory.open(PATH, WANTED, files)
    files.fail(call, errno.ENOSPC, after=call == "write")
    with pytest.raises(OSError, match="No space"):
        JournalWriter(
            directory, last_frame=read_journal(files).last_frame, on_synced=lambda group: None, on_failed=_raise
        )
    assert read_journal(files.crash()).numbers == [0]


def _raise(error: OSError) -> None:
    raise error


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_slow_disk_merges_groups(files: FaultFiles, client: Client) -> None:
    """What comes while a sync takes its time is one frame, and nothing of it is reported before."""
    files.is_flowing.clear()
    client.give(record(0))
    while files.writes_to(segment_path(PATH, 1)) != 3:
        time.sleep(0.001)
    last = [client.give(record(number)) for number in range(1, 9)][-1]
    assert (client.reported, client.writer.synced) == (0, 0)
    files.is_flowing.set()
    client.wait(last)
    client.writer.close(20)
    counters = client.writer.counters
    assert (counters.num_groups, counters.num_syncs) == (9, 2)
    assert read_journal(files).numbers == list(range(9))


def payloads(*groups: Sequence[bytes]) -> list[tuple[bytes, int | None]]:
    """Return the payloads of groups, numbered from 1."""
    made = (writers._Group(number + 1, [*each], False, False) for number, each in enumerate(groups))
    return list(writers._payloads(made))


def test_groups_are_split_only_if_they_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each payload is reported with the newest group that it completes."""
    monkeypatch.setattr(writers, "LARGEST_FRAME_BYTES", 10)
    assert payloads([b"123"], [b"4567", b"890"]) == [(b"1234567890", 2)]
    assert payloads([b"123"], [b"4567", b"8901"]) == [(b"123", 1), (b"45678901", 2)]
    assert payloads([b"12345", b"67890", b"1"]) == [(b"1234567890", None), (b"1", 1)]
    assert payloads([b"1"], [b"x" * 30], [b"2"]) == [(b"1", 1), (b"x" * 30, 2), (b"2", 3)]
    assert payloads([], [b"1"], []) == [(b"1", 3)]
    assert payloads([]) == [(b"", 1)]


def test_large_group_is_several_frames_and_reported_once(
    files: FaultFiles, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is synced before the next, so one at most is torn."""
    monkeypatch.setattr(writers, "LARGEST_FRAME_BYTES", 1000)
    files.before_call = lambda call: disks.append((client.reported, read_journal(files.crash(torn_at(700))).numbers))
    disks: list[tuple[int, list[int]]] = []
    client.write(*(record(number, 600) for number in range(5)))
    assert all(numbers == list(range(len(numbers))) for _, numbers in disks)
    assert {len(numbers) for _, numbers in disks} >= {0, 1, 2, 3, 4}
    assert {reported for reported, _ in disks} == {0}
    assert read_journal(files.crash()).numbers == [0, 1, 2, 3, 4]


def test_group_without_records_is_reported_in_its_turn(files: FaultFiles, client: Client) -> None:
    """Without a sync of its own."""
    client.write(record(0))
    client.write()
    assert client.writer.counters.num_syncs == 1
    assert client.writer.next_group == 3


def test_start_segment_closes_the_open_group(files: FaultFiles, client: Client) -> None:
    """What was added before belongs to the old segment."""
    client.writer.append(record(0))
    had_open = client.writer.has_open
    client.writer.start_segment()
    assert (had_open, client.writer.has_open) == (True, False)
    client.write(record(1))
    assert client.writer.size_bytes == 12 + 9
    assert scan(files.read_bytes(segment_path(PATH, 1)), 1).frames[-1].payload == record(0)
    assert read_journal(files).segments == [1, 2]


def test_record_that_fits_in_no_frame_is_refused(client: Client) -> None:
    """Before the group is given away."""
    with pytest.raises(ValueError, match="16777216"):
        client.writer.append(bytes(MAX_PAYLOAD_BYTES + 1))
    assert not client.writer.has_open


def test_syncs_are_counted_by_how_long_they_took(files: FaultFiles, client: Client) -> None:
    """Every frame is in one bucket."""
    for number in range(5):
        client.write(record(number))
    client.writer.close(20)
    counters = client.writer.counters
    assert sum(counters.sync_counts) == counters.num_syncs == counters.num_groups == 5
    assert counters.num_bytes == client.writer.size_bytes == 5 * (12 + 9)
    assert counters.sum_sync_ns > 0
    slow = writers.JournalCounters()
    for took_s in (50e-6, 100e-6, 101e-6, 11.0):
        slow.count_sync(1, round(took_s * 1e9))
    assert (slow.sync_counts[0], slow.sync_counts[1], slow.sync_counts[-1]) == (2, 1, 1)


def test_close_waits_for_groups_but_not_for_a_dead_disk(files: FaultFiles, client: Client) -> None:
    """With a time limit, a sync that never returns does not keep the process."""
    files.is_flowing.clear()
    client.give(record(0))
    client.writer.close(0.01)
    assert client.reported == 0
    files.is_flowing.set()
    client.writer.close(20)
    assert client.reported == 1
    assert not client.writer._thread.is_alive()
