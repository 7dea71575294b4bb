"""What the records of a journal describe."""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.durability.records import (
    Answer,
    BadRecord,
    Creation,
    Encoder,
    End,
    Numbers,
    Row,
    SequenceState,
    Truncation,
)
from ferrule_server.durability.replay import JournalState
from tests.durability.journal_model import JournalModel, view

SEEDS = st.integers(0, 2**32)


def read(*payloads: bytes) -> JournalState:
    """Return the state that the payloads describe."""
    state = JournalState()
    for payload in payloads:
        state.read(payload)
    return state


def a_sequence(no: int = 1, num_tokens: int = 4, answer: Answer | None = None) -> SequenceState:
    """Return a sequence of some tokens."""
    return SequenceState(
        no, bytes((no,)) * 16, "alice", 60.0, True, token_ids=array("I", range(num_tokens)), answer=answer
    )


@given(SEEDS)
@settings(max_examples=25)
def test_a_journal_describes_what_happened_after_every_group(seed: int) -> None:
    """So a server that dies between any two groups continues from the first of them."""
    model = JournalModel(Random(seed))
    state, num_read = JournalState(), 0
    for _ in range(40):
        model.add_group()
        while len(model.groups) > num_read:
            state.read(model.groups[num_read])
            num_read += 1
        assert view(state) == model.state()


@given(SEEDS)
@settings(max_examples=25)
def test_a_snapshot_describes_the_same_alone(seed: int) -> None:
    """So the segments before it can be deleted."""
    model = JournalModel(Random(seed))
    for _ in range(60):
        model.add_group()
    model.finish_snapshot()
    for first in model.snapshots:
        assert view(read(*model.groups[first:])) == model.state()


STEP_ROW = Row(5, 150_000, -1.25, 0.0)
STEP = Answer(4, 1, b"p" * 16, None, (STEP_ROW,))
FIRST = Answer(0, 4, b"p" * 16, None, (Row(4, 7, -0.5, 0.0),))


def begun(*sequences: SequenceState) -> tuple[Encoder, JournalState]:
    """Return an encoder and the state of a reader, both after an empty snapshot and some sequences."""
    encoder = Encoder()
    records = [encoder.snapshot_begin(), encoder.snapshot_end(), *map(encoder.sequence, sequences)]
    return encoder, read(b"".join(records))


@pytest.mark.parametrize(
    ("numbers", "size"),
    [
        ((None, None, None, None), 7),
        ((-1.25, None, None, None), 11),
        ((-1.25, 0.0, None, None), 11),
        ((-0.1, 0.0, None, None), 15),
        ((-1.25, 0.0, -2.5, 0.5), 19),
    ],
)
def test_a_decoded_token_is_small(numbers: Numbers, size: int) -> None:
    """The smallest are written for each token; a sequence number below 2**21 is assumed, and a token id as large."""
    first = Answer(0, 4, b"p" * 16, None, (Row(4, 7, *numbers),))
    state = a_sequence(1, answer=first)
    state.no = 2_000_000
    encoder, reader = begun(state)
    answer = Answer(4, 1, b"p" * 16, None, (Row(5, 2_000_000, *numbers),))
    record = encoder.append(state.no, None, (7,), None, answer)
    assert len(record) == size
    reader.read(record)
    assert reader.sequences[state.no].answer == answer
    assert reader.sequences[state.no].token_ids.tolist() == [0, 1, 2, 3, 7]


def test_each_token_may_have_a_seed_of_its_own() -> None:
    """It takes 8 bytes, unless it is that of the token before."""
    encoder, reader = begun(a_sequence(answer=FIRST._replace(seed=1)))
    sizes = []
    for index, seed in enumerate((1, 2**64 - 1, 2**64 - 1, 1, 1)):
        answer = Answer(4 + index, 1, b"p" * 16, seed, (Row(5 + index, 7, -0.5, 0.0),))
        record = encoder.append(1, None, (7,), None, answer)
        sizes.append(len(record))
        reader.read(record)
        assert reader.sequences[1].answer == answer
    assert sizes == [7, 15, 7, 15, 7]


def test_a_step_clears_the_truncation() -> None:
    """As every append does: the truncate cannot be repeated any more."""
    encoder, reader = begun(a_sequence(answer=FIRST))
    reader.read(encoder.truncate(1, Truncation(4, b"L" * 16, 4, 0)))
    assert reader.sequences[1].truncation is not None
    reader.read(encoder.append(1, None, (7,), None, STEP))
    assert reader.sequences[1].truncation is None


def test_the_truncation_after_a_step_leaves_its_answer() -> None:
    """A replay finds it although the tip has moved back."""
    encoder, reader = begun(a_sequence(answer=FIRST))
    reader.read(encoder.append(1, None, (7,), None, STEP))
    reader.read(encoder.truncate(1, Truncation(5, b"L" * 16, 2, 0)))
    assert reader.sequences[1].answer == STEP
    assert reader.sequences[1].token_ids.tolist() == [0, 1]


def test_a_creation_keeps_the_secrets_of_sequences_that_have_ended() -> None:
    """A repeated request gets the same handles while one of them lives, then the reason why the first is gone."""
    encoder, reader = begun(a_sequence(1), a_sequence(2))
    creation = Creation("alice", "r", b"c" * 16, b"", 0, 4, b"L" * 16, None, None, (1, 2))
    reader.read(encoder.creation(creation))
    for no, how, members in ((2, End.RELEASED, (1, b"\2" * 16)), (1, End.EXPIRED, (b"\1" * 16,))):
        reader.read(encoder.end(no, how))
        assert reader.creations["alice", "r"].members == members
    assert reader.tombstones == {b"\1" * 16: "alice"}


def test_what_a_snapshot_does_not_repeat_is_forgotten() -> None:
    """Tombstones, dead creations and masks end without a record."""
    encoder, reader = begun(a_sequence(1))
    reader.read(encoder.end(1, End.EXPIRED) + encoder.mask("alice", b"\1"))
    reader.read(encoder.snapshot_begin() + encoder.tombstone("bob", b"b" * 16))
    assert set(reader.tombstones) == {b"\1" * 16, b"b" * 16}
    reader.read(encoder.snapshot_end())
    assert (reader.tombstones, reader.masks) == ({b"b" * 16: "bob"}, {})


def test_a_snapshot_must_repeat_every_sequence() -> None:
    """Otherwise a server would delete the only segment that has it."""
    encoder, reader = begun(a_sequence(1), a_sequence(2))
    reader.read(encoder.snapshot_begin() + encoder.sequence(a_sequence(1)))
    with pytest.raises(BadRecord, match="without 1 sequences, one is 2"):
        reader.read(encoder.snapshot_end())


def _refused() -> dict[str, tuple[str, bytes]]:
    """Return records that do not fit a journal with the sequences 1 (4 tokens) and 2, and what is said of them."""
    encoder, _ = begun(a_sequence(1, answer=FIRST), a_sequence(2))
    encoder.sequence(a_sequence(7, 6))
    again = replace(a_sequence(4), secret=b"\1" * 16)
    other = replace(a_sequence(1), secret=b"x" * 16)
    creation = Creation("alice", "r", b"c" * 16, b"", 0, 4, b"L" * 16, None, None, (1, 2))
    return {
        "append to an unknown sequence": ("7 is not known", encoder.append(7, None, (1,), None, None)),
        "fork of an unknown sequence": ("7 is not known", encoder.sequence(a_sequence(3), 7, 1)),
        "rewind beyond the length": ("beyond its length 4", encoder.append(1, 5, (1,), None, None)),
        "answer to an append elsewhere": ("is to another one", encoder.append(1, None, (3,), None, FIRST)),
        "truncate beyond the length": ("beyond its length", encoder.truncate(1, Truncation(9, b"L" * 16, 5, 0))),
        "truncate beyond the handle": ("beyond its length", encoder.truncate(1, Truncation(2, b"L" * 16, 3, 0))),
        "prefix beyond the length": ("a prefix of 5", encoder.sequence(a_sequence(3, 6), 1, 5)),
        "secret of another": ("the secret of another", encoder.sequence(again)),
        "another secret": ("was another one", encoder.sequence(other)),
        "no time": ("a lease of 0.0 s", encoder.lease(1, 0.0)),
        "tombstone of a live one": ("of a live sequence", encoder.tombstone("alice", b"\1" * 16)),
        "member twice": ("names a sequence twice", encoder.creation(creation._replace(members=(1, 1)))),
        "two dead members": ("that have ended", encoder.creation(creation._replace(members=(b"d" * 16, b"e" * 16)))),
        "no member": ("of no sequence", encoder.creation(creation._replace(members=()))),
        "unknown member": ("7 is not known", encoder.creation(creation._replace(members=(7,)))),
        "member of a stranger": ("not created by", encoder.creation(creation._replace(principal="bob"))),
        "end of a snapshot": ("has not begun", encoder.snapshot_end()),
        "token that was not chosen": ("chose no token", b"\x80\2\5"),
        "step of an unknown sequence": ("7 is not known", b"\x80\7\5"),
        "unknown step": ("unknown record 130", b"\x82\1\5"),
        "cut step": ("ends inside a step", b"\x80\1"),
        "cut seed": ("ends inside a step", b"\x81\1\0\0"),
        "cut numbers": ("ends inside a step", b"\x80\1\5\0\0"),
        "long token": ("is above 2", b"\x80\1\xff\xff\xff\xff\xff\x01"),
        "long number": ("is above 2", b"\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
        "row before the first": ("a row at position -1", b"\2\1" + bytes(16) + b"\4\1\4\0\0\0\0\1\2" + bytes(4)),
        "row of unknown shape": ("a row of shape 0x1000", b"\4\1\4\0\0\4\0\0\1\0\x10"),
        "accepted drafts": ("1 of 0 drafts were accepted", b"\4\1\4\0\4\4\0\0" + bytes(16) + b"\0\0\1\0\0"),
        "number 0": ("the number 0", b"\6\0\0"),
        "unknown tag": ("unknown record 0", b"\0"),
        "unknown end": ("in an unknown way", b"\x08\1\4"),
        "unknown flags": ("unknown flags 0x8", b"\4\1\x08"),
        "unknown principal": ("is used and not defined", b"\x0b\5\0"),
        "second definition": ("definition 0 follows 1 others", b"\1\0\0"),
        "not UTF-8": ("not UTF-8", b"\1\1\1\xff"),
        "cut text": ("ends inside a field of 9", b"\1\1\x09ab"),
        "endless varint": ("more than 8 bytes", b"\6" + b"\xff" * 12),
        "huge varint": ("is above 4294967295", b"\6" + b"\xff" * 6 + b"\1"),
        "cut record": ("ends inside a record", b"\6"),
        "cut varint": ("ends inside a record", b"\6\1\x80"),
        "many tokens": ("ends inside a field of 17179869180", b"\4\1\0\xff\xff\xff\xff\x0f"),
    }


@pytest.mark.parametrize(("said", "record"), _refused().values(), ids=_refused())
def test_a_record_that_does_not_fit_is_refused(said: str, record: bytes) -> None:
    """A journal that was written wrongly is noticed, and the error says how."""
    _, reader = begun(a_sequence(1, answer=FIRST), a_sequence(2))
    with pytest.raises(BadRecord, match=said):
        reader.read(record)


def test_a_live_request_id_is_not_used_twice() -> None:
    """Only after its sequences have ended; then it means the new ones."""
    encoder, reader = begun(a_sequence(1), a_sequence(2))
    first = Creation("alice", "r", b"c" * 16, b"", 0, 4, b"L" * 16, None, None, (1,))
    second = first._replace(members=(2,))
    reader.read(encoder.creation(first))
    with pytest.raises(BadRecord, match="used twice"):
        reader.read(encoder.creation(second))
    other_digests = first._replace(content=bytes(16), loop=b"")
    reader.read(encoder.creation(other_digests))  # a server of another version has begun a snapshot and died
    assert reader.creations == {("alice", "r"): other_digests}
    reader.read(encoder.end(1, End.RELEASED) + encoder.creation(second))
    assert reader.creations == {("alice", "r"): second}


def test_a_sequence_must_be_written_again_before_its_change_in_a_snapshot() -> None:
    """The encoder does not write the change, and a reader does not take it, since a snapshot must be complete alone."""
    encoder, reader = begun(a_sequence(1), a_sequence(2))
    change = encoder.lease(1, 5.0)
    reader.read(encoder.snapshot_begin())
    assert not encoder.knows(1)
    with pytest.raises(KeyError):
        encoder.lease(1, 5.0)
    with pytest.raises(BadRecord, match="was not written since the snapshot began"):
        reader.read(change)
