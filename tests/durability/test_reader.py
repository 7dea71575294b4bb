"""A whole directory: what survives, what is torn, and what is damaged."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.durability.__main__ import main
from ferrule_server.durability.directory import DurableDirectory, segment_path
from ferrule_server.durability.files import Files
from ferrule_server.durability.frames import Previous, Tail, encode_frame
from ferrule_server.durability.reader import Damage, Journal, JournalDamaged, Role, read_directory, survey
from ferrule_server.durability.records import Encoder, End, Tag
from ferrule_server.durability.writer import JournalWriter, LastFrame
from ferrule_server.kv.handle import handle_id_of
from tests.durability.journal_model import JournalModel, view
from tests.durability.journals import WANTED
from tests.durability.stored import IDENTITY, PATH, Segments, StoredFiles, segment_of, split, store, store_parts
from tests.durability.test_replay import a_sequence


def read(segments: Segments) -> Journal:
    """Return what the segments contain."""
    return survey(PATH, StoredFiles(segments))


def two_snapshots() -> tuple[list[bytes], list[bytes]]:
    """Return the groups of two segments: sequences 1 and 2, then a snapshot of both and an append to each."""
    encoder = Encoder()
    first = [
        encoder.snapshot_begin() + encoder.snapshot_end(),
        encoder.sequence(a_sequence(1)),
        encoder.sequence(a_sequence(2)),
    ]
    second = [
        encoder.snapshot_begin() + encoder.sequence(a_sequence(1)),
        encoder.sequence(a_sequence(2)) + encoder.snapshot_end(),
        encoder.append(1, None, (5,), None, None),
        encoder.append(2, None, (6,), None, None),
    ]
    return first, second


def handle_id(no: int) -> str:
    """Return the handle_id of a sequence of :func:`a_sequence`."""
    return Journal(IDENTITY).handle_id(bytes((no,)) * 16)


@given(st.integers(0, 2**32), st.integers(300, 3000))
@settings(max_examples=40)
def test_a_directory_contains_what_was_written(seed: int, segment_bytes: int) -> None:
    """However it is split into segments, and whether or not a snapshot has ended."""
    model = JournalModel(Random(seed))
    for _ in range(30):
        model.add_group()
    segments = store(model.groups, segment_bytes=segment_bytes)
    journal = read(segments)
    assert (journal.damage, view(journal.state)) == (None, model.state())
    assert [each.tail for each in journal.segments] == [Tail.CLEAN] * len(segments)
    newest = max(segments)
    last = [group for group in model.groups if group][-1]
    end = len(segments[newest]) - 100
    assert journal.last_frame == LastFrame(newest, end - len(last) - 9, end)


def test_the_handle_id_is_that_of_the_handle() -> None:
    """So what a journal contains can be compared with lists and logs."""
    cache_id = "east-1.0123456789ab.AQEBAQEBAQEBAQEBAQEBAQ"
    assert handle_id(1) == handle_id_of(cache_id)


def test_segments_before_a_complete_snapshot_are_not_needed() -> None:
    """Neither whole nor damaged nor at all."""
    first, second = two_snapshots()
    segments = store_parts([first, second])
    whole = read(segments)
    assert [each.role for each in whole.segments] == [Role.SUPERSEDED, Role.BASE]
    assert [each.num_records for each in whole.segments] == [0, 7]
    bad = read(segments | {1: segments[1][:130] + b"?" + segments[1][131:]})
    assert [each.tail for each in bad.segments] == [Tail.DAMAGED, Tail.CLEAN]
    for other in (bad, read({2: segments[2]})):
        assert (other.damage, view(other.state)) == (None, view(whole.state))


def test_an_incomplete_snapshot_is_read_with_what_precedes_it() -> None:
    """The server died while it wrote the snapshot."""
    first, second = two_snapshots()
    journal = read(store_parts([first, second[:1]]))
    assert [each.role for each in journal.segments] == [Role.BASE, Role.READ]
    assert set(journal.state.sequences) == {1, 2}
    assert journal.damage is None


def test_an_incomplete_snapshot_alone_is_damage() -> None:
    """Sequences that it had not reached would be lost silently."""
    first, second = two_snapshots()
    segments = store_parts([first, second[:1]])
    assert read({2: segments[2]}).damage is not None
    with pytest.raises(JournalDamaged, match="what precedes it is missing"):
        read_directory(PATH, StoredFiles({2: segments[2]}))


def test_an_incomplete_snapshot_does_not_hide_damage_before_it() -> None:
    """Found by test_mutations: the damage left only a header of the segment before."""
    first, second = two_snapshots()
    segments = store_parts([first, second[:1]])
    damage = read(segments | {1: segments[1][:90] + b"?" + segments[1][91:]}).damage
    assert damage is not None
    assert damage.segment == 1


def test_a_new_directory_may_die_in_its_first_snapshot() -> None:
    """The first segment has only its header, since each snapshot begins a segment."""
    _, second = two_snapshots()
    journal = read(store_parts([[], second[:1]]))
    assert (journal.damage, set(journal.state.sequences)) == (None, {1})


@pytest.mark.parametrize("segments", [{}, {4: bytes(500)}, {4: segment_of(4, [], None)[:40] + bytes(500)}])
def test_a_directory_without_records_is_empty(segments: Segments) -> None:
    """A segment whose creation was interrupted is not in use, and a directory of this version says that none is."""
    files = StoredFiles(segments)
    if not segments:
        files.contents[PATH / "0-0.newest"] = b""
    journal = survey(PATH, files)
    assert (journal.damage, journal.last_frame, dict(journal.state.sequences)) == (None, None, {})
    assert [each.role for each in journal.segments] == [Role.UNUSED] * len(segments)


def test_a_segment_with_a_torn_header_is_skipped() -> None:
    """The server died while it created the segment; the next one names the segment before it."""
    first, second = two_snapshots()
    segments = store_parts([first, second])
    torn = segments[2][:40] + bytes(500)
    assert read(segments | {3: torn}).last_frame == LastFrame(2, *_last_of(segments[2], second))
    later = segment_of(4, [second[0]], Previous(2, len(segments[2]) - 100))
    journal = read(segments | {3: torn, 4: later})
    assert [each.role for each in journal.segments] == [Role.SUPERSEDED, Role.BASE, Role.UNUSED, Role.READ]
    assert journal.damage is None


def _last_of(data: bytes, payloads: list[bytes]) -> tuple[int, int]:
    end = len(data) - 100
    return end - len(payloads[-1]) - 9, end


def test_a_torn_frame_is_ignored() -> None:
    """It was never confirmed."""
    first, second = two_snapshots()
    segments = store_parts([first, second])
    end = len(segments[2]) - 100
    journal = read(segments | {2: segments[2][: end - 3] + bytes(100)})
    assert journal.damage is None
    assert journal.segments[-1].tail is Tail.TORN
    assert journal.state.sequences[1].token_ids.tolist() == [0, 1, 2, 3, 5]
    assert journal.state.sequences[2].token_ids.tolist() == [0, 1, 2, 3]
    start = end - len(second[-1]) - 9
    assert journal.last_frame == LastFrame(2, start - len(second[-2]) - 9, start)


def test_only_what_the_next_header_confirms_is_read_of_a_segment() -> None:
    """A failed write may have reached the disk nevertheless; the server went on without it."""
    first, second = two_snapshots()
    data = segment_of(1, first, None)
    confirmed = len(data) - 100
    frame = encode_frame(b"\x06\x01\x05", 1, confirmed)
    poisoned = data[:confirmed] + frame + bytes(100)
    journal = read({1: poisoned, 2: segment_of(2, second[:1], Previous(1, confirmed))})
    assert journal.damage is None
    assert journal.state.sequences[1].reserved_length == 0
    assert read({1: poisoned}).state.sequences[1].reserved_length == 5


def test_damage_is_named() -> None:
    """Where, why, and what would be lost."""
    error = JournalDamaged(Damage(7, 4096, "its checksum is wrong", ("ab", "cd"), 3))
    place = "segment 7, offset 4096: its checksum is wrong; 3 frames after it change 2 sequences (ab, cd)"
    assert str(error).startswith(f"the journal is damaged: {place} and would be lost; ")


def test_damage_names_what_would_be_lost() -> None:
    """The sequences that later records touch, by handle_id."""
    first, second = two_snapshots()
    segments = store_parts([first, second])
    offset = len(segments[2]) - 100 - len(second[-1]) - len(second[-2]) - 18
    bad = segments | {2: segments[2][: offset + 9] + b"?" + segments[2][offset + 10 :]}
    with pytest.raises(JournalDamaged) as caught:
        read_directory(PATH, StoredFiles(bad))
    assert caught.value.damage[:2] == (2, offset)
    assert caught.value.damage.lost == f"1 frames after it change 1 sequences ({handle_id(2)}) and would be lost"
    assert read(bad).state.sequences[2].token_ids.tolist() == [0, 1, 2, 3]


def test_damage_in_an_early_segment_names_the_sequences_of_later_ones() -> None:
    """Also those that were created or ended after it."""
    encoder = Encoder()
    first = [encoder.snapshot_begin() + encoder.snapshot_end(), encoder.sequence(a_sequence(1)), encoder.lease(1, 2.0)]
    second = [encoder.end(1, End.RELEASED), encoder.sequence(a_sequence(3))]
    segments = store_parts([first, second])
    at = len(segments[1]) - 100 - len(first[-1]) - 1
    damage = read(segments | {1: segments[1][:at] + b"?" + segments[1][at + 1 :]}).damage
    assert damage is not None
    assert damage.touched == tuple(sorted((handle_id(1), handle_id(3))))
    assert damage.num_frames_after == 2


def test_a_wrong_record_in_a_whole_frame_is_damage() -> None:
    """The checksum cannot find what was written wrongly."""
    first, _ = two_snapshots()
    damage = read(store_parts([[*first, b"\x07\x09" + bytes(8)]])).damage
    assert damage is not None
    assert "a record in it is wrong: a lease of 0.0 s" in damage.reason
    assert damage.lost == "nothing readable follows; the records from there on would be lost"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"{}", "malformed"),
        (
            b'{"segment": 2, "epoch": "ffffffffffff", "generation": 1, "previous": null, "digests": ""}',
            "epoch ffffffffffff",
        ),
        (
            b'{"segment": 3, "epoch": "0123456789ab", "generation": 1, "previous": null, "digests": ""}',
            "says segment 3",
        ),
    ],
)
def test_a_wrong_header_is_damage(header: bytes, reason: str) -> None:
    """The segment is of another directory, or was written by something else."""
    first, _ = two_snapshots()
    damage = read({**store_parts([first]), 2: encode_frame(header, 2, 0) + bytes(100)}).damage
    assert damage is not None
    assert reason in damage.reason


class GrowingFiles(StoredFiles):
    """Files of a server that writes a frame whenever a segment is read."""

    def read_bytes(self, path: Path) -> bytes:
        """Return the content of a file, and let the last segment grow."""
        data = super().read_bytes(path)
        if path == segment_path(PATH, 2):
            end = len(data.rstrip(b"\0"))
            self.contents[path] = data[:end] + encode_frame(b"\x06\x01\x09", 2, end) + bytes(100)
        return data


def test_a_segment_that_grows_is_read_as_far_as_it_was() -> None:
    """A running server is inspected without its help, also where a segment is read again."""
    first, second = two_snapshots()
    journal = survey(PATH, GrowingFiles(store_parts([first, second[:1]])))
    assert journal.damage is None
    assert journal.state.sequences[1].reserved_length == 0


def test_progress_ends_at_one() -> None:
    """It never moves back."""
    shown: list[float] = []
    survey(PATH, StoredFiles(store_parts(list(two_snapshots()))), shown.append)
    assert shown == sorted(shown)
    assert shown[-1] == 1.0


def test_groups_are_split_at_snapshots() -> None:
    """What the other tests rely on."""
    first, second = two_snapshots()
    assert split([*first, *second]) == [first, second]


def write(path: Path, model: JournalModel, first_group: int) -> None:
    """Write the groups of a model from one on as a server does that is started on the directory."""
    directory = DurableDirectory.open(path, WANTED)
    try:
        last_frame = read_directory(path, directory.files).last_frame
        failures: list[OSError] = []
        writer = JournalWriter(
            directory,
            last_frame=last_frame,
            segment_bytes=3000,
            on_synced=lambda _: None,
            on_failed=failures.append,
        )
        for group in filter(None, model.groups[first_group:]):
            if group[0] == Tag.SNAPSHOT_BEGIN:
                writer.start_segment()
            writer.append(group)
            writer.close_group()
        writer.close()
        assert failures == []
        assert main(["verify", str(path)]) == 0
    finally:
        directory.close()


def test_servers_continue_from_what_others_have_written(tmp_path: Path) -> None:
    """Several starts on one directory, some of which die in a snapshot; each is verified while the server owns it."""
    model, written = JournalModel(Random(7)), 0
    for _ in range(6):
        for _ in range(15):
            model.add_group()
        write(tmp_path / "journal", model, written)
        written = len(model.groups)
        journal = read_directory(tmp_path / "journal", Files())
        assert view(journal.state) == model.state()
        model.restart()
    assert journal.identity.generation == 6
