"""The state that the records of a journal describe.

Each record must fit the state before it, so a journal that was written wrongly or read wrongly is noticed.

A snapshot repeats everything that is live between SNAPSHOT_BEGIN and SNAPSHOT_END, while changes go on::

    ... | BEGIN  seq 1  seq 7  append 7  end 1  seq 2 ...  END | append 2 ...
          ^ from here on a sequence is only changed, forked or named by a creation after it was written again

So the records from BEGIN on describe the same state with and without those before it. Tombstones, creations and masks
end without a record: END removes those that were not written again. A sequence that was not written again is an error.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from ferrule_server.durability.decoder import NUMBER_BYTES, Cursor, Definitions, decode, read_numbers
from ferrule_server.durability.records import (
    STEP,
    STEP_SEEDED,
    UINT64,
    Answer,
    BadRecord,
    Creation,
    End,
    Row,
    SequenceState,
    Tag,
    Truncation,
    left_out,
    pack_numbers,
)

_MAX_UINT32: Final = (1 << 32) - 1
_UNKNOWN: Final = "sequence {} is not known, or was not written since the snapshot began"

CreationKey = tuple[str, str]
MaskKey = tuple[str, bytes]
_Key = TypeVar("_Key", CreationKey, MaskKey, bytes)
_Value = TypeVar("_Value")


class _Tip:
    """A sequence, and what its next step may leave out: the reader's side of :class:`~.records.Tip`.

    Steps only change the tip. ``settle`` makes the last one the answer of the sequence.
    """

    __slots__ = ("add", "numbers", "policy", "seed", "settled_length", "shape", "size", "state", "token", "token_ids")

    def __init__(self, state: SequenceState) -> None:
        self.state = state
        self.token_ids = state.token_ids
        self.add = state.token_ids.append
        self.note(state.answer)

    def note(self, answer: Answer | None) -> None:
        """Take over what the answer to an append has."""
        self.token, self.policy, self.seed = left_out(answer)
        self.shape, self.numbers, self.size = 0, b"", -1
        self.settled_length = len(self.token_ids)

    def measure(self) -> None:
        """Find out what numbers the first step after an answer has."""
        answer = self.state.answer
        self.shape = pack_numbers(answer.rows[-1][2:6])[0] if answer is not None and answer.rows else 0
        self.size = NUMBER_BYTES[self.shape]

    def settle(self) -> None:
        """Give the sequence the answer to its last step."""
        length = len(self.token_ids)
        if length != self.settled_length:
            self.settled_length = length
            row = Row(length, self.token, *read_numbers(Cursor(self.numbers), self.shape))
            self.state.answer = Answer(length - 1, 1, self.policy, self.seed, (row,))
            self.state.truncation = None


class JournalState:
    """What is live at a place of the journal.

    Attributes:
        definitions: The numbers that are valid there.
        creations: By principal and request_id; those whose sequences have all ended in the order of their ends.
        tombstones: Principals by secret, the oldest first.
        masks: Packed bits by principal and fingerprint, in the order in which they were registered.
        is_in_snapshot: A snapshot has begun and has not ended.
        num_snapshots: Snapshots that have ended.
        num_records: Records so far.
    """

    def __init__(self) -> None:
        self.definitions = Definitions()
        self.creations: dict[CreationKey, Creation] = {}
        self.tombstones: dict[bytes, str] = {}
        self.masks: dict[MaskKey, bytes] = {}
        self.is_in_snapshot = False
        self.num_snapshots = 0
        self.num_records = 0
        self._sequences: dict[int, SequenceState] = {}
        self._secrets: dict[bytes, int] = {}
        self._makers: dict[int, CreationKey] = {}  # by number of each live sequence
        self._tips: dict[int, _Tip] = {}  # of the sequences written since the snapshot began
        self._fresh: set[CreationKey | MaskKey | bytes] = set()  # the rest that was written since then
        self._appliers: Mapping[int, Callable[..., None]] = {
            Tag.SEQUENCE: self._add_sequence,
            Tag.APPEND: self._append,
            Tag.TRUNCATE: self._truncate,
            Tag.RESERVE: self._reserve,
            Tag.LEASE: self._lease,
            Tag.END: self._end,
            Tag.CREATION: self._add_creation,
            Tag.TOMBSTONE: self._add_tombstone,
            Tag.MASK: self._add_mask,
            Tag.SNAPSHOT_BEGIN: self._begin_snapshot,
            Tag.SNAPSHOT_END: self._end_snapshot,
        }

    @property
    def sequences(self) -> Mapping[int, SequenceState]:
        """The live sequences by number, in the order in which they were first written."""
        for tip in self._tips.values():
            tip.settle()
        return self._sequences

    def read(self, payload: bytes) -> None:
        """Apply the records of a frame.

        Raises:
            BadRecord: One is malformed or does not fit; the records before it are applied.
        """
        at = 0
        while at < len(payload):
            if payload[at] < STEP:
                tag, fields, at = decode(payload, at, self.definitions)
                self.num_records += 1
                if tag in self._appliers:
                    self._appliers[tag](*fields)
            else:
                at = self._read_steps(payload, at)

    def _read_steps(self, payload: bytes, at: int) -> int:
        """Apply the steps from ``at`` on, and return where they end. Written out in place: most records are steps."""
        try:
            num_steps, at = _read_steps(self._tips, payload, at)
        except IndexError:
            raise BadRecord("the payload ends inside a step") from None
        except KeyError as error:
            raise BadRecord(_UNKNOWN.format(error.args[0])) from None
        self.num_records += num_steps
        return at

    def _add_sequence(self, state: SequenceState, prefix_no: int, prefix_length: int) -> None:
        known = self._sequences.get(state.no)
        if self._secrets.get(state.secret, state.no) != state.no or state.secret in self.tombstones:
            raise BadRecord(f"sequence {state.no} has the secret of another one")
        if known is not None and (known.secret, known.principal) != (state.secret, state.principal):
            raise BadRecord(f"sequence {state.no} was another one before")
        if prefix_no:
            state.token_ids = self._prefix(prefix_no, prefix_length) + state.token_ids
        self._sequences[state.no] = state
        self._secrets[state.secret] = state.no
        self._tips[state.no] = _Tip(state)

    def _prefix(self, no: int, length: int) -> array[int]:
        token_ids = self._tip(no).token_ids
        if not 0 < length <= len(token_ids):
            raise BadRecord(f"a prefix of {length} tokens of sequence {no}, which has {len(token_ids)}")
        return token_ids[:length]

    def _tip(self, no: int) -> _Tip:
        tip = self._tips.get(no)
        if tip is None:
            raise BadRecord(_UNKNOWN.format(no))
        return tip

    def _append(
        self, no: int, rewind_to: int | None, new_ids: array[int], ttl_s: float | None, answer: Answer | None
    ) -> None:
        tip = self._tip(no)
        state, token_ids = tip.state, tip.token_ids
        start = len(token_ids) if rewind_to is None else rewind_to
        if start > len(token_ids):
            raise BadRecord(f"sequence {no} is rewound to {start}, beyond its length {len(token_ids)}")
        if answer is not None and (answer.start, answer.num_tokens) != (start, len(new_ids)):
            raise BadRecord(f"the answer to an append of {len(new_ids)} tokens at {start} is to another one")
        del token_ids[start:]
        token_ids.extend(new_ids)
        state.answer, state.truncation = answer, None
        tip.note(answer)
        if ttl_s is not None:
            state.ttl_s = ttl_s

    def _truncate(self, no: int, truncation: Truncation) -> None:
        tip = self._tip(no)
        tip.settle()
        if truncation.new_length > min(len(tip.token_ids), truncation.handle_length):
            raise BadRecord(f"sequence {no} is truncated to {truncation.new_length}, beyond its length")
        del tip.token_ids[truncation.new_length :]
        tip.settled_length = truncation.new_length
        tip.state.truncation = truncation

    def _reserve(self, no: int, length: int) -> None:
        self._tip(no).state.reserved_length = length

    def _lease(self, no: int, ttl_s: float) -> None:
        self._tip(no).state.ttl_s = ttl_s

    def _end(self, no: int, how: End) -> None:
        state = self._tip(no).state
        del self._tips[no], self._sequences[no], self._secrets[state.secret]
        if how is End.EXPIRED:
            self._add_tombstone(state.principal, state.secret)
        key = self._makers.pop(no, None)
        if key is not None:
            creation = self.creations[key]
            members = tuple(state.secret if member == no else member for member in creation.members)
            if not any(isinstance(member, int) for member in members):
                del self.creations[key]  # to the end: the dead are in the order of their ends
                members = members[:1]
            self.creations[key] = creation._replace(members=members)

    def _add_creation(self, creation: Creation) -> None:
        key = (creation.principal, creation.request_id)
        live = [member for member in creation.members if isinstance(member, int)]
        known = self.creations.get(key)
        # A version with other digests of requests writes it again without them.
        is_other = known is not None and known._replace(content=creation.content, loop=creation.loop) != creation
        if known is not None and is_other and any(isinstance(member, int) for member in known.members):
            raise BadRecord("a request_id was used twice")
        if len(set(live)) != len(live) or (not live and len(creation.members) > 1):
            raise BadRecord("a creation names a sequence twice, or several that have ended")
        for no in live:
            if self._tip(no).state.principal != creation.principal or self._makers.get(no, key) != key:
                raise BadRecord(f"sequence {no} was not created by this request of {creation.principal!r}")
        self._makers.update((no, key) for no in live)
        self._put_last(self.creations, key, creation)

    def _add_tombstone(self, principal: str, secret: bytes) -> None:
        if secret in self._secrets:
            raise BadRecord("a tombstone of a live sequence")
        self._put_last(self.tombstones, secret, principal)

    def _add_mask(self, principal: str, bits: bytes) -> None:
        key = (principal, hashlib.blake2b(bits, digest_size=16).digest())
        self._put_last(self.masks, key, bits)

    def _put_last(self, table: dict[_Key, _Value], key: _Key, value: _Value) -> None:
        """Put what was written since the snapshot began at the end of a table."""
        table.pop(key, None)
        table[key] = value
        self._fresh.add(key)

    def _begin_snapshot(self) -> None:
        for tip in self._tips.values():
            tip.settle()
        self._tips.clear()
        self._fresh.clear()
        self.definitions = Definitions()
        self.is_in_snapshot = True

    def _end_snapshot(self) -> None:
        if not self.is_in_snapshot:
            raise BadRecord("a snapshot ends that has not begun")
        missing = self._sequences.keys() - self._tips.keys()
        if missing:
            raise BadRecord(f"a snapshot ends without {len(missing)} sequences, one is {min(missing)}")
        fresh = self._fresh
        self.creations = {key: each for key, each in self.creations.items() if key in fresh}
        self.tombstones = {secret: each for secret, each in self.tombstones.items() if secret in fresh}
        self.masks = {key: each for key, each in self.masks.items() if key in fresh}
        self._makers = {no: key for no, key in self._makers.items() if key in fresh}
        self.is_in_snapshot = False
        self.num_snapshots += 1


def _read_steps(tips: Mapping[int, _Tip], payload: bytes, at: int) -> tuple[int, int]:
    """Apply steps until another record or the end, and return how many these are, and where that is.

    Raises:
        BadRecord: A step does not fit.
        IndexError: The payload ends inside a step.
        KeyError: A step is of an unknown sequence.
    """
    num_steps, end = 0, len(payload)
    while at < end and (tag := payload[at]) >= STEP:
        no, at = payload[at + 1], at + 2
        if no >= 0x80:
            no, at = no + (payload[at] << 7) - 0x80, at + 1
            if no >= 0x4000:
                no, at = _rest(payload, at, no)
        tip = tips[no]
        if tag != STEP:
            tip.seed, at = _seed(payload, at, tag)
        token, at = payload[at], at + 1
        if token >= 0x80:
            token, at = token + (payload[at] << 7) - 0x80, at + 1
            if token >= 0x4000:
                token, at = token + (payload[at] << 14) - 0x4000, at + 1
                if token >= 0x200000:
                    token, at = _rest(payload, at - 1, token - (payload[at - 1] << 14) + 0x4000)
        if tip.size:
            if tip.size < 0:
                tip.measure()
            numbers, at = payload[at : at + tip.size], at + tip.size
            if at > end:
                raise IndexError
            tip.numbers = numbers
        if tip.token < 0:
            raise BadRecord(f"a step of sequence {no}, whose last answer chose no token")
        tip.add(tip.token)
        tip.token = token
        num_steps += 1
    return num_steps, at


def _rest(payload: bytes, at: int, value: int) -> tuple[int, int]:
    """Return a varint whose first two bytes have been read into ``value``, and where it ends."""
    value, shift, more = value & 0x3FFF, 14, True
    while more:
        byte, at = payload[at], at + 1
        value, shift, more = value | (byte & 0x7F) << shift, shift + 7, byte >= 0x80
        if value > _MAX_UINT32 or shift > 35:
            raise BadRecord("a varint of a step is above 2**32")
    return value, at


def _seed(payload: bytes, at: int, tag: int) -> tuple[int, int]:
    """Return the seed of a step, and where it ends."""
    if tag != STEP_SEEDED:
        raise BadRecord(f"unknown record {tag}")
    if at + 8 > len(payload):
        raise IndexError
    return UINT64.unpack_from(payload, at)[0], at + 8
