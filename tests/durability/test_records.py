"""Each record is read as it was written."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_server.durability.decoder import Definitions, Fields, decode
from ferrule_server.durability.records import (
    Answer,
    BadRecord,
    Creation,
    DraftsAnswer,
    Encoder,
    End,
    Row,
    SequenceState,
    Tag,
    Truncation,
    pack_varint,
)

UINT32 = st.integers(0, 2**32 - 1)
NO = st.integers(1, 2**32 - 1)
DIGEST = st.binary(min_size=16, max_size=16)
SECONDS = st.floats(min_value=0, exclude_min=True, allow_nan=False)
TOKENS = st.lists(UINT32, max_size=20).map(lambda token_ids: array("I", token_ids))
SEED = st.none() | st.integers(0, 2**64 - 1)
NUMBER = st.none() | st.floats(allow_nan=False) | st.floats(width=32, allow_nan=False) | st.just(0.0)
ROW = st.builds(Row, UINT32, st.none() | UINT32, NUMBER, NUMBER, NUMBER, NUMBER, st.sampled_from((None, True, False)))
DRAFTS = st.lists(UINT32, max_size=5).flatmap(
    lambda drafts: st.builds(
        DraftsAnswer, DIGEST, UINT32, st.just(tuple(drafts)), st.integers(0, len(drafts)), st.none() | UINT32
    )
)
ROWS = st.lists(ROW, max_size=4).map(tuple)
ANSWER = st.builds(Answer, UINT32, UINT32, DIGEST, SEED, ROWS, st.booleans(), st.none() | DRAFTS)
TRUNCATION = st.builds(Truncation, UINT32, DIGEST, UINT32, UINT32)
PARENT = st.just("") | st.binary(min_size=8, max_size=8).map(bytes.hex)
NAME = st.text(max_size=20)
STATE = st.builds(
    SequenceState, NO, DIGEST, NAME, SECONDS, st.booleans(), UINT32, PARENT, TOKENS, st.none() | ANSWER,
    st.none() | TRUNCATION,
)  # fmt: skip
MEMBERS = st.lists(NO | DIGEST, min_size=1, max_size=4).map(tuple)
CREATION = st.builds(
    Creation, NAME, NAME, DIGEST, st.just(b"") | DIGEST, UINT32, UINT32, DIGEST, SEED,
    st.none() | st.tuples(UINT32, st.none() | UINT32), MEMBERS,
)  # fmt: skip


def decoded(payload: bytes, *principals: str) -> list[tuple[int, Fields]]:
    """Return tag and fields of each record of a payload, except definitions, if these principals are defined before."""
    definitions, records, at = Definitions(list(principals)), list[tuple[int, Fields]](), 0
    while at < len(payload):
        tag, fields, at = decode(payload, at, definitions)
        records.append((tag, fields))
    return [(tag, fields) for tag, fields in records if tag not in (Tag.PRINCIPAL, Tag.POLICY)]


def known(no: int) -> Encoder:
    """Return an encoder that has written a sequence of that number."""
    encoder = Encoder()
    encoder.sequence(SequenceState(no, b"s" * 16, "alice", 1.0, False))
    return encoder


@given(STATE)
def test_sequences_are_read_as_written(state: SequenceState) -> None:
    """With all that they have, numbers bit by bit."""
    ((tag, fields),) = decoded(Encoder().sequence(state))
    assert (tag, fields) == (Tag.SEQUENCE, (state, 0, 0))
    assert repr(fields) == repr((state, 0, 0))
    assert isinstance(fields[0], SequenceState)
    assert repr(fields[0].answer) == repr(state.answer)


@given(STATE, NO, st.integers(1, 20))
def test_forks_are_read_as_written(state: SequenceState, source: int, length: int) -> None:
    """With only the tokens after the prefix."""
    ((tag, (read, *prefix)),) = decoded(known(source).sequence(state, source, length), "alice")
    assert (tag, prefix) == (Tag.SEQUENCE, [source, length])
    assert isinstance(read, SequenceState)
    assert read.token_ids == state.token_ids[length:]


@given(NO, st.none() | UINT32, TOKENS, st.none() | SECONDS, st.none() | ANSWER)
def test_appends_are_read_as_written(
    no: int, rewind_to: int | None, token_ids: array[int], ttl_s: float | None, answer: Answer | None
) -> None:
    """All but steps: those are decoded by the replay."""
    (record,) = decoded(known(no).append(no, rewind_to, token_ids, ttl_s, answer))
    written = (int(Tag.APPEND), (no, rewind_to, token_ids, ttl_s, answer))
    assert record == written
    assert repr(record) == repr(written)


@given(NO, TRUNCATION, UINT32, SECONDS, st.sampled_from(End))
def test_small_changes_are_read_as_written(
    no: int, truncation: Truncation, length: int, ttl_s: float, how: End
) -> None:
    """Those of one or two numbers."""
    encoder = known(no)
    written = encoder.truncate(no, truncation) + encoder.reserve(no, length) + encoder.lease(no, ttl_s)
    records = [(Tag.TRUNCATE, (no, truncation)), (Tag.RESERVE, (no, length)), (Tag.LEASE, (no, ttl_s))]
    assert decoded(written + encoder.end(no, how)) == [*records, (Tag.END, (no, how))]
    assert not encoder.knows(no)


@given(CREATION, NAME, DIGEST, st.binary(max_size=300))
def test_what_is_not_a_sequence_is_read_as_written(creation: Creation, name: str, secret: bytes, bits: bytes) -> None:
    """Creations, tombstones and masks."""
    encoder = Encoder()
    begin = encoder.snapshot_begin()
    written = encoder.creation(creation) + encoder.tombstone(name, secret) + encoder.mask(name, bits)
    records = [(Tag.CREATION, (creation,)), (Tag.TOMBSTONE, (name, secret)), (Tag.MASK, (name, bits))]
    snapshot = [(Tag.SNAPSHOT_BEGIN, ()), *records, (Tag.SNAPSHOT_END, ())]
    assert decoded(begin + written + encoder.snapshot_end()) == snapshot


def test_names_are_defined_once_in_each_snapshot() -> None:
    """A journal must be readable from each snapshot on, and is small."""
    encoder = Encoder()
    first, second = (encoder.tombstone("a principal", bytes((n,)) * 16) for n in range(2))
    assert (b"a principal" in first, b"a principal" in second) == (True, False)
    encoder.snapshot_begin()
    assert b"a principal" in encoder.tombstone("a principal", b"3" * 16)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16383, 16384, 2**21 - 1, 2**21, 2**32 - 1, 2**63 - 1])
def test_varints_are_those_of_leb128(value: int) -> None:
    """Seven bits in each byte, the lowest first."""
    data = pack_varint(value)
    assert sum((byte & 0x7F) << 7 * index for index, byte in enumerate(data)) == value
    assert [byte >= 0x80 for byte in data] == [True] * (len(data) - 1) + [False]
    assert len(data) == max(1, -(-value.bit_length() // 7))


@given(st.binary(max_size=80), st.sampled_from(range(14)))
def test_random_bytes_are_records_or_refused(data: bytes, tag: int) -> None:
    """No other exception."""
    definitions = Definitions(["alice"], [b"p" * 16])
    try:
        *_, at = decode(bytes((tag,)) + data, 0, definitions)
    except BadRecord:
        return
    assert 0 < at <= len(data) + 1


def _written() -> list[bytes]:
    rows = (Row(2, 7, -1.25, -0.1, 0.0, 3e300, True), Row(9))
    answer = Answer(1, 1, b"p" * 16, 2**64 - 1, rows, False, DraftsAnswer(b"d" * 16, 1, (1, 2, 3), 2, 300))
    truncation = Truncation(9, b"L" * 16, 1, 0)
    tokens = array("I", [1, 2])
    state = SequenceState(300, b"s" * 16, "alice", 1.0, True, 99999, "ab" * 8, tokens, answer, truncation)
    creation = Creation("alice", "id", b"c" * 16, b"l" * 16, 1, 2, b"L" * 16, 1, (1, 2), (300, b"m" * 16))
    makers: tuple[Callable[[Encoder], bytes], ...] = (
        lambda encoder: encoder.sequence(state, 300, 1),
        lambda encoder: encoder.append(300, 1, tokens, 2.0, answer),
        lambda encoder: encoder.truncate(300, truncation),
        lambda encoder: encoder.lease(300, 1.0),
        lambda encoder: encoder.end(300, End.LOST),
        lambda encoder: encoder.creation(creation),
        lambda encoder: encoder.tombstone("alice", b"s" * 16),
        lambda encoder: encoder.mask("alice", b"bits"),
    )
    records = []
    for make in makers:
        encoder = Encoder()
        encoder.sequence(state)
        records.append(make(encoder))
    return records


@pytest.mark.parametrize("record", _written())
def test_a_record_that_is_cut_anywhere_is_refused(record: bytes) -> None:
    """No field is taken for a shorter one."""
    for size in range(1, len(record)):
        with pytest.raises(BadRecord):
            decode(record[:size], 0, Definitions(["alice"], [b"p" * 16]))
