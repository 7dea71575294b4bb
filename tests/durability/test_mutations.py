"""Journals that were changed at random: never a crash, never a hang, never a state that has not been.

FERRULE_MUTATIONS=1000000 python -m pytest -m slow tests/durability/test_mutations.py runs the campaign.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from time import process_time

import pytest

from ferrule_server.durability.frames import Tail, scan
from ferrule_server.durability.reader import survey
from ferrule_server.durability.records import BadRecord, SequenceState
from ferrule_server.durability.replay import JournalState
from tests.durability.journal_model import JournalModel, view
from tests.durability.stored import PATH, Segments, StoredFiles, split, store, store_parts

PER_JOURNAL = 250
"""Mutations of one journal before the next is made."""
MOST_S = 1.0
"""Time to read a journal of at most 20 KiB."""
NUM_MUTATIONS = 3000


class Victim:
    """A journal, every state that it has described, and every state of each sequence.

    Args:
        seed: Decides what happened.
    """

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        model = JournalModel(random)
        for _ in range(random.randint(2, 12)):
            model.add_group()
        self.groups = list(filter(None, model.groups))
        state = JournalState()
        self.states = {fingerprint(state)}
        self.sequences: set[str] = set()
        for group in self.groups:
            state.read(group)
            self.states.add(fingerprint(state))
            self.sequences.update(map(repr_of, state.sequences.values()))
        self.segments = store(self.groups, segment_bytes=600)


def fingerprint(state: JournalState) -> int:
    """Return a number that differs for states that differ; the order in which sequences were written is none."""
    sequences, creations, ordered, masks = view(state)
    texts = sorted(map(repr_of, sequences.values()))
    return hash((*texts, repr(sorted(creations.items())), repr(ordered), repr(sorted(masks))))


def repr_of(state: SequenceState) -> str:
    """Return a text that differs for sequences that differ."""
    return repr((state.secret, state.token_ids, state.answer, state.truncation, state))


def flip_bits(random: Random, data: bytearray) -> None:
    """Flip a few bits."""
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def set_byte(random: Random, data: bytearray) -> None:
    """Set a byte to one that lengths and tags consist of."""
    data[random.randrange(len(data))] = random.choice((0, 1, 0x7F, 0x80, 0x81, 0xF5, 0xFF, random.randrange(256)))


def cut(random: Random, data: bytearray) -> None:
    """Remove the end, or a part in the middle."""
    begin = random.randrange(len(data))
    del data[begin : random.choice((len(data), begin + random.randint(1, 40)))]


def clear(random: Random, data: bytearray) -> None:
    """Set a part, perhaps a sector, to zero."""
    begin, size = random.randrange(len(data)), random.randint(1, 200)
    if random.random() < 0.5:
        begin, size = begin // 512 * 512, 512
    part = len(data[begin : begin + size])
    data[begin : begin + size] = bytes(part)


def insert(random: Random, data: bytearray) -> None:
    """Insert random bytes, or a copy of a part."""
    begin = random.randrange(len(data))
    part = data[begin : begin + random.randint(1, 60)] if random.random() < 0.5 else random.randbytes(4)
    at = random.randrange(len(data))
    data[at:at] = part


def overwrite(random: Random, data: bytearray) -> None:
    """Copy a part over another one."""
    begin, at, size = random.randrange(len(data)), random.randrange(len(data)), random.randint(1, 300)
    part = data[begin : begin + size]
    data[at : at + len(part)] = part


CHANGES: tuple[Callable[[Random, bytearray], None], ...] = (
    flip_bits,
    flip_bits,
    set_byte,
    cut,
    clear,
    insert,
    overwrite,
)


def change_files(random: Random, victim: Victim) -> Segments:
    """Return the segments after a change that an attacker without knowledge of the checksum could make."""
    segments = dict(victim.segments)
    number = random.choice(list(segments))
    data = bytearray(segments[number])
    kind = random.randrange(10)
    if kind < 6:
        random.choice(CHANGES)(random, data)
        segments[number] = bytes(data)
    elif kind < 8:
        segments[number] = _move_frames(random, segments[number], number)
    elif kind == 8:
        segments[random.choice(list(segments))] = segments[number]
    else:
        del segments[number]
    return segments


def _move_frames(random: Random, data: bytes, number: int) -> bytes:
    """Swap, repeat or remove frames, or change the length of one, as bytes."""
    frames = scan(data, number).frames
    parts = [data[frame.offset : frame.offset + len(frame.payload) + 9] for frame in frames]
    one, other = random.randrange(len(parts)), random.randrange(len(parts))
    kind = random.randrange(4)
    if kind == 0:
        parts[one], parts[other] = parts[other], parts[one]
    elif kind == 1:
        parts.insert(one, parts[other])
    elif kind == 2:
        del parts[one]
    else:
        length = int.from_bytes(parts[one][:3], "little") + random.choice((-1, 1, 256, -256, 65536))
        parts[one] = (length % (1 << 24)).to_bytes(3, "little") + parts[one][3:]
    return b"".join(parts) + bytes(100)


def change_payloads(random: Random, victim: Victim) -> list[bytes]:
    """Return the groups after a change that is followed by the right checksums."""
    groups = list(victim.groups)
    one, other = random.randrange(len(groups)), random.randrange(len(groups))
    kind = random.randrange(10)
    if kind < 7:
        data = bytearray(groups[one])
        random.choice(CHANGES)(random, data)
        groups[one] = bytes(data)
    elif kind == 7:
        groups[one], groups[other] = groups[other], groups[one]
    elif kind == 8:
        groups.insert(one, groups[other])
    else:
        del groups[one]
    return groups


def try_files(random: Random, victim: Victim) -> None:
    """Whatever is on the disk, what is read was once true; if more than the end is missing, that is noticed."""
    journal = survey(PATH, StoredFiles(change_files(random, victim)))
    if journal.damage is None:
        assert fingerprint(journal.state) in victim.states
    else:
        assert victim.sequences.issuperset(map(repr_of, journal.state.sequences.values()))


def try_checked(random: Random, victim: Victim) -> None:
    """A journal that was written wrongly, with right checksums, is refused or read; it may say anything."""
    segments = store_parts(split(change_payloads(random, victim), 600))
    journal = survey(PATH, StoredFiles(segments))
    assert all(each.tail is Tail.CLEAN for each in journal.segments)
    fingerprint(journal.state)


def try_records(random: Random, victim: Victim) -> None:
    """The same without files, which is faster."""
    state = JournalState()
    try:
        for payload in change_payloads(random, victim):
            state.read(payload)
    except BadRecord:
        pass
    fingerprint(state)


TRIALS = (try_files, try_files, try_checked, try_records, try_records)


def mutate(seed: int, num_mutations: int) -> None:
    """Read so many changed journals, each within MOST_S."""
    random = Random(seed)
    for begin in range(0, num_mutations, PER_JOURNAL):
        victim = Victim(seed * 1_000_003 + begin)
        for index in range(begin, min(begin + PER_JOURNAL, num_mutations)):
            random.seed(seed * 1_000_003 + index)
            began = process_time()
            try:
                random.choice(TRIALS)(random, victim)
            except Exception as error:
                raise AssertionError(f"mutation {index} of seed {seed}") from error
            assert process_time() - began < MOST_S, f"mutation {index} of seed {seed} took too long"


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_journal_is_never_believed(seed: int) -> None:
    """Neither a crash of the reader nor a false handle."""
    mutate(seed, NUM_MUTATIONS // 4)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_campaign_of_changed_journals() -> None:
    """The same at length."""
    mutate(int(os.environ.get("FERRULE_MUTATIONS_SEED", "99")), int(os.environ.get("FERRULE_MUTATIONS", "20000")))
