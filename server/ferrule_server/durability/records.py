"""The records of the journal: what they hold, and how they are written.

A record is a tag byte and fields, which :class:`Tag` names. Tags from :data:`STEP` on are decoded tokens, the only
record that is written for each step of each sequence, so it has a layout of its own::

    tag 0x80 or 0x81   no: varint   [seed: uint64, if the tag is 0x81]   chosen token: varint   numbers

It appends the token that the previous answer of the sequence chose. Its own answer has one row, and the policy, the
kinds of numbers and (tag 0x80) the seed of the previous answer.

What a record means for the state before it is in ``replay.py``; how records are read is in ``decoder.py``.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import copysign
from struct import Struct
from typing import Final, NamedTuple

DIGEST_BYTES: Final = 16
"""Size of secrets, lineages, and digests of requests."""
UINT32: Final = Struct("<I")
UINT64: Final = Struct("<Q")
FLOAT32: Final = Struct("<f")
FLOAT64: Final = Struct("<d")
_MAX_SINGLE: Final = 3.4028234663852886e38
_SHAPE: Final = Struct("<H")
SMALL: Final = tuple(bytes((n,)) if n < 0x80 else bytes((n & 0x7F | 0x80, n >> 7)) for n in range(1 << 14))
"""The varints of one and two bytes."""


# Bound once: each step of each sequence packs numbers.
_pack_single, _unpack_single, _pack_double = FLOAT32.pack, FLOAT32.unpack, FLOAT64.pack


class Tag(enum.IntEnum):
    """The first byte of a record, with the fields that follow it."""

    PRINCIPAL = 1
    """Gives a principal a number, until the next snapshot: number, name."""
    POLICY = 2
    """Gives the digest of an output request a number, until the next snapshot: number, digest."""
    SEQUENCE = 3
    """A whole sequence: state with only the tokens after a prefix, number of the sequence that has that, its length."""
    APPEND = 4
    """Tokens after the tip, or after an earlier length: number, that length or None, tokens, TTL or None, answer."""
    TRUNCATE = 5
    """A truncate: number, truncation."""
    RESERVE = 6
    """Slots are reserved up to a length: number, length; 0: no longer."""
    LEASE = 7
    """A new TTL: number, seconds."""
    END = 8
    """The end of a sequence: number, how."""
    CREATION = 9
    """What one request with a request_id has created: creation."""
    TOMBSTONE = 10
    """A sequence that has expired and is still answered with HANDLE_EXPIRED: principal, secret."""
    MASK = 11
    """A registered token mask: principal, packed bits."""
    SNAPSHOT_BEGIN = 12
    """From here on everything that is live is written once more. Numbers of principals and policies begin again."""
    SNAPSHOT_END = 13
    """Everything that was live at the matching SNAPSHOT_BEGIN has been written."""


STEP: Final = 0x80
STEP_SEEDED: Final = 0x81

# Flags of a sequence.
IS_PUBLISHED, HAS_PREFIX, HAS_ANSWER, HAS_TRUNCATION, HAS_PARENT = 1, 2, 4, 8, 16
# Flags of an append.
IS_REWIND, HAS_TTL, APPEND_HAS_ANSWER = 1, 2, 4
# Flags of an answer.
HAS_SEED, IS_PARTIAL, HAS_DRAFTS = 1, 2, 4
# Flags of a creation.
HAS_LOOP, CREATION_HAS_SEED, HAS_VERIFIED = 1, 2, 4
# The shape of a row: two bits for each number, then these.
HAS_TOKEN, HAS_POSITION, WAS_REJECTED, WAS_ACCEPTED = 0x100, 0x200, 0x400, 0x800
# The two bits of a number.
ZERO, SINGLE, DOUBLE = 1, 2, 3


class End(enum.IntEnum):
    """How a sequence has ended."""

    RELEASED = 1
    EXPIRED = 2
    LOST = 3


class BadRecord(Exception):
    """A record is malformed, or does not fit the state before it; the message says what is wrong."""


Numbers = tuple[float | None, float | None, float | None, float | None]
"""The numbers of a row, in the order of its fields."""


class Row(NamedTuple):
    """One row of an answer, without arrays: see ``RowOutput``."""

    position: int
    token: int | None = None
    model_logprob: float | None = None
    sampled_logprob: float | None = None
    target_logprob: float | None = None
    entropy: float | None = None
    is_accepted: bool | None = None


class DraftsAnswer(NamedTuple):
    """What the answer to a verify has besides rows.

    Attributes:
        digest: 16 bytes over the drafts as requested.
        num_certain: Tokens before the drafts.
        draft_ids: The drafts.
        accepted_count: How many of them were accepted.
        next_token: The token after them; None: nothing was chosen.
    """

    digest: bytes
    num_certain: int
    draft_ids: tuple[int, ...]
    accepted_count: int
    next_token: int | None


class Answer(NamedTuple):
    """The answer to the last append of a sequence.

    Attributes:
        start: Length before the append. num_tokens: how many were appended.
        policy: 16 bytes, digest of the output request.
        seed: The seed that was used, below 2**64; None if nothing was drawn.
        rows: The rows, without their arrays.
        is_whole: False: the answer also had arrays, which are computed again for a replay.
        drafts: Set for a verify.
    """

    start: int
    num_tokens: int
    policy: bytes
    seed: int | None = None
    rows: tuple[Row, ...] = ()
    is_whole: bool = True
    drafts: DraftsAnswer | None = None


class Truncation(NamedTuple):
    """The last truncate of a sequence: the handle of the request, and the answer."""

    handle_length: int
    handle_lineage: bytes
    new_length: int
    freed_blocks: int


@dataclass(slots=True)
class SequenceState:
    """Everything of a sequence that survives a restart.

    Attributes:
        no: Its number in the journal: from 1, below 2**32, never used for another sequence.
        secret: 16 bytes, the secret part of its cache_id; never logged.
        principal: The owner.
        ttl_s: Length of its lease.
        is_published: Its full blocks are registered in the prefix cache.
        reserved_length: Length up to which slots are reserved; 0: none.
        parent_handle_id: 16 hex digits, the sequence that it was branched from; empty when it was prefilled.
        token_ids: array("I"); owned by the state.
        answer: The answer to the last append; None: it cannot be repeated.
        truncation: Set by a truncate, cleared when tokens are appended.
        window: Tokens that a row attends to, if blocks outside are given back; 0: all are kept.
    """

    no: int
    secret: bytes = field(repr=False)
    principal: str
    ttl_s: float
    is_published: bool
    reserved_length: int = 0
    parent_handle_id: str = ""
    token_ids: array[int] = field(default_factory=lambda: array("I"), repr=False)
    answer: Answer | None = field(default=None, repr=False)
    truncation: Truncation | None = field(default=None, repr=False)
    window: int = 0


class Creation(NamedTuple):
    """What one request with a request_id has created.

    Attributes:
        principal, request_id: Its name.
        content: 16 bytes, digest of the rest of the request.
        loop: Digest (16 bytes) of the Generate that it belongs to; empty: none.
        start: Length before the tokens of the request.
        length, lineage: Of the answered handles, at the time of the request.
        seed: The seed of its rows; None if nothing was drawn.
        verified: Of a verify: the accepted count and the next token.
        members: Its sequences in order: the number of each live one, the secret of each ended one. When all have ended
            only the first one is kept.
    """

    principal: str
    request_id: str
    content: bytes
    loop: bytes
    start: int
    length: int
    lineage: bytes
    seed: int | None
    verified: tuple[int, int | None] | None
    members: tuple[int | bytes, ...]


def pack_varint(value: int) -> bytes:
    """Return ``value``, at least 0, as unsigned LEB128."""
    if value < 0x4000:
        return SMALL[value]
    if value < 0x200000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def pack_numbers(numbers: tuple[float | None, ...]) -> tuple[int, bytes]:
    """Return four optional numbers as two bits of kind for each, and their bytes: exact in as few as possible."""
    shape, shift, packed = 0, 0, b""
    for number in numbers:
        if number is None:
            pass
        elif number == 0.0 and copysign(1.0, number) > 0.0:
            shape |= ZERO << shift
        else:
            data = _pack_single(number) if -_MAX_SINGLE <= number <= _MAX_SINGLE else b""
            if data and _unpack_single(data)[0] == number:
                shape |= SINGLE << shift
                packed += data
            else:
                shape |= DOUBLE << shift
                packed += _pack_double(number)
        shift += 2
    return shape, packed


def left_out(answer: Answer | None) -> tuple[int, bytes, int | None]:
    """Return what the next step may leave out: token (-1: there can be no step), policy, seed."""
    if answer is None or not answer.rows:
        return -1, b"", None
    token = answer.rows[-1].token
    return -1 if token is None else token, answer.policy, answer.seed


class Tip:
    """What the next step of a sequence may leave out, since the previous answer had it too.

    Attributes:
        token: The token that the last row chose; -1: none, so the next append cannot be a step.
        policy, seed: Of the answer.
        shape: The kinds of the numbers of its last row.
        no: The bytes of its number. heads: the first bytes of a step, without and with a seed.
    """

    __slots__ = ("heads", "no", "policy", "seed", "shape", "token")

    def __init__(self, no: int) -> None:
        self.no = pack_varint(no)
        self.heads = (bytes((STEP,)) + self.no, bytes((STEP_SEEDED,)) + self.no)
        self.note(None, 0)

    def note(self, answer: Answer | None, shape: int) -> None:
        """Take over what the answer to an append has."""
        self.token, self.policy, self.seed = left_out(answer)
        self.shape = shape


class Encoder:
    """Writes records, and knows what the records since the last snapshot have defined.

    Called from one thread, in the order in which the records are journaled. Each method returns bytes, which begin with
    the definitions of the principal and the policy if these are used for the first time since the snapshot began.
    """

    def __init__(self) -> None:
        self._principals: dict[str, bytes] = {}
        self._policies: dict[bytes, bytes] = {}
        self._tips: dict[int, Tip] = {}

    def knows(self, no: int) -> bool:
        """Return whether the sequence was written since the snapshot began, so that its changes can be written."""
        return no in self._tips

    def append(
        self, no: int, rewind_to: int | None, token_ids: Sequence[int], ttl_s: float | None, answer: Answer | None
    ) -> bytes:
        """Return tokens after the tip, or after the earlier length ``rewind_to``; a new TTL if it is set; the answer.

        If an answer is given, its start must be ``rewind_to`` or the length before, and its ``num_tokens`` the number
        of tokens.

        Raises:
            KeyError: The sequence was not written since the snapshot began.
        """
        tip = self._tips[no]
        if answer is not None and rewind_to is None and ttl_s is None:
            step = _pack_step(tip, token_ids, answer)
            if step is not None:
                return step
        flags = (rewind_to is not None) * IS_REWIND | (ttl_s is not None) * HAS_TTL
        parts = [b"\4", tip.no, SMALL[flags | (answer is not None) * APPEND_HAS_ANSWER]]
        if rewind_to is not None:
            parts.append(pack_varint(rewind_to))
        if ttl_s is not None:
            parts.append(FLOAT64.pack(ttl_s))
        parts.append(_pack_tokens(token_ids) if len(token_ids) != 1 else b"\1" + UINT32.pack(token_ids[0]))
        tip.note(answer, 0 if answer is None else self._add_answer(parts, answer))
        return b"".join(parts)

    def sequence(self, state: SequenceState, prefix_no: int = 0, prefix_length: int = 0) -> bytes:
        """Return a whole sequence.

        Args:
            state: The sequence, with all its tokens. Not changed, and not kept.
            prefix_no: A sequence whose first tokens are the same; 0: none. It must have been written since the
                snapshot began.
            prefix_length: How many tokens are the same.
        """
        has_prefix = prefix_no and prefix_length
        assert not has_prefix or prefix_no in self._tips, f"sequence {prefix_no} was not written before its fork"
        truncation, answer = state.truncation, state.answer
        flags = (
            state.is_published * IS_PUBLISHED
            | bool(has_prefix) * HAS_PREFIX
            | (answer is not None) * HAS_ANSWER
            | (truncation is not None) * HAS_TRUNCATION
            | bool(state.parent_handle_id) * HAS_PARENT
        )
        parts: list[bytes] = []
        principal = self._principal(parts, state.principal)
        parts += (b"\3", pack_varint(state.no), SMALL[flags], state.secret, principal, FLOAT64.pack(state.ttl_s))
        parts += (pack_varint(state.reserved_length), pack_varint(state.window), bytes.fromhex(state.parent_handle_id))
        if has_prefix:
            parts += (pack_varint(prefix_no), pack_varint(prefix_length))
        parts.append(_pack_tokens(state.token_ids[prefix_length:] if has_prefix else state.token_ids))
        shape = 0 if answer is None else self._add_answer(parts, answer)
        if truncation is not None:
            parts.append(_pack_truncation(truncation))
        tip = self._tips[state.no] = Tip(state.no)
        tip.note(answer, shape)
        return b"".join(parts)

    def truncate(self, no: int, truncation: Truncation) -> bytes:
        """Return a truncate."""
        return self._of(b"\5", no) + _pack_truncation(truncation)

    def reserve(self, no: int, length: int) -> bytes:
        """Return a reservation of slots."""
        return self._of(b"\6", no) + pack_varint(length)

    def lease(self, no: int, ttl_s: float) -> bytes:
        """Return a new TTL."""
        return self._of(b"\7", no) + FLOAT64.pack(ttl_s)

    def end(self, no: int, how: End) -> bytes:
        """Return the end of a sequence, and forget it."""
        return b"\x08" + self._tips.pop(no).no + SMALL[how]

    def creation(self, creation: Creation) -> bytes:
        """Return what a request has created; its live sequences must have been written since the snapshot began."""
        seed, verified = creation.seed, creation.verified
        flags = bool(creation.loop) * HAS_LOOP | (seed is not None) * CREATION_HAS_SEED
        flags |= (verified is not None) * HAS_VERIFIED
        fields = [SMALL[flags], _pack_text(creation.request_id), creation.content, creation.loop]
        fields += (pack_varint(creation.start), pack_varint(creation.length), creation.lineage, _pack_seed(seed))
        if verified is not None:
            fields += (pack_varint(verified[0]), _pack_optional(verified[1]))
        fields.append(pack_varint(len(creation.members)))
        fields += [pack_varint(each) if isinstance(each, int) else b"\0" + each for each in creation.members]
        return self._of_principal(b"\x09", creation.principal, *fields)

    def tombstone(self, principal: str, secret: bytes) -> bytes:
        """Return a tombstone; only for snapshots, since the end of an expired sequence implies one."""
        return self._of_principal(b"\x0a", principal, secret)

    def mask(self, principal: str, bits: bytes) -> bytes:
        """Return a registered mask."""
        return self._of_principal(b"\x0b", principal, pack_varint(len(bits)), bits)

    def snapshot_begin(self) -> bytes:
        """Return the begin of a snapshot, and forget all definitions."""
        for each in (self._principals, self._policies, self._tips):
            each.clear()
        return b"\x0c"

    def snapshot_end(self) -> bytes:
        """Return the end of a snapshot."""
        return b"\x0d"

    def _of(self, tag: bytes, no: int) -> bytes:
        """Return the first bytes of a record about a sequence, which must have been written."""
        return tag + self._tips[no].no

    def _of_principal(self, tag: bytes, name: str, *fields: bytes) -> bytes:
        """Return a record that begins with a principal, after the definition of its number if that is new."""
        parts: list[bytes] = []
        index = self._principal(parts, name)
        return b"".join((*parts, tag, index, *fields))

    def _principal(self, parts: list[bytes], name: str) -> bytes:
        """Return the number of a principal, and add its definition to ``parts`` if it is new."""
        index = self._principals.get(name)
        if index is None:
            index = self._principals[name] = pack_varint(len(self._principals))
            parts += (b"\1", index, _pack_text(name))
        return index

    def _add_answer(self, parts: list[bytes], answer: Answer) -> int:
        """Add an answer to ``parts``, and in front of them the definition of its policy if that is new.

        Returns:
            The kinds of the numbers of its last row.
        """
        start, num_tokens, policy, seed, rows, is_whole, drafts = answer
        index = self._policies.get(policy)
        if index is None:
            index = self._policies[policy] = pack_varint(len(self._policies))
            parts[:0] = (b"\2", index, policy)
        flags = (seed is not None) * HAS_SEED | (not is_whole) * IS_PARTIAL | (drafts is not None) * HAS_DRAFTS
        parts += (SMALL[flags], pack_varint(start), pack_varint(num_tokens), index, _pack_seed(seed))
        if drafts is not None:
            parts += (drafts.digest, pack_varint(drafts.num_certain), _pack_tokens(drafts.draft_ids))
            parts += (pack_varint(drafts.accepted_count), _pack_optional(drafts.next_token))
        parts.append(pack_varint(len(rows)))
        shape, position = 0, start + num_tokens - len(rows)
        for row in rows:
            position += 1
            shape = _add_row(parts, row, position)
        return shape


def _pack_step(tip: Tip, token_ids: Sequence[int], answer: Answer) -> bytes | None:
    """Return an append as a step, and take over its choice; None if it is more than that."""
    start, num_tokens, policy, seed, rows, is_whole, drafts = answer
    if len(token_ids) != 1 or token_ids[0] != tip.token or policy != tip.policy:
        return None
    if len(rows) != 1 or drafts is not None or not is_whole or num_tokens != 1:
        return None
    position, token, model, sampled, target, entropy, is_accepted = rows[0]
    if token is None or position != start + 1 or is_accepted is not None:
        return None
    if model is sampled is target is entropy is None:
        shape, numbers = 0, b""
    elif target is entropy is None:
        shape, numbers = pack_numbers((model, sampled))
    else:
        shape, numbers = pack_numbers((model, sampled, target, entropy))
    if shape != tip.shape:
        return None
    chosen = SMALL[token] if token < 0x4000 else pack_varint(token)
    if seed == tip.seed:
        head = tip.heads[0]
    elif seed is None:
        return None
    else:
        tip.seed = seed
        head = tip.heads[1] + UINT64.pack(seed)
    tip.token = token
    return head + chosen + numbers


def _add_row(parts: list[bytes], row: Row, position: int) -> int:
    """Add a row to ``parts``, without its position if it is the expected one, and return the kinds of its numbers."""
    kinds, numbers = pack_numbers(row[2:6])
    shape = kinds
    if row.is_accepted is not None:
        shape |= WAS_ACCEPTED if row.is_accepted else WAS_REJECTED
    token = b"" if row.token is None else pack_varint(row.token)
    if token:
        shape |= HAS_TOKEN
    if row.position == position:
        parts += (_SHAPE.pack(shape), token, numbers)
    else:
        parts += (_SHAPE.pack(shape | HAS_POSITION), pack_varint(row.position), token, numbers)
    return kinds


def _pack_tokens(token_ids: Sequence[int]) -> bytes:
    packed = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    return pack_varint(len(packed)) + packed.tobytes()


def _pack_text(text: str) -> bytes:
    data = text.encode()
    return pack_varint(len(data)) + data


def _pack_seed(seed: int | None) -> bytes:
    return b"" if seed is None else UINT64.pack(seed)


def _pack_optional(value: int | None) -> bytes:
    return b"\0" if value is None else pack_varint(value + 1)


def _pack_truncation(truncation: Truncation) -> bytes:
    handle_length, lineage, new_length, freed_blocks = truncation
    return pack_varint(handle_length) + lineage + pack_varint(new_length) + pack_varint(freed_blocks)
