"""A plain model of durable state that makes random journals: what was written, and what is true after each group."""

from __future__ import annotations

import hashlib
from array import array
from copy import deepcopy
from itertools import takewhile
from random import Random
from typing import Any

from ferrule_server.durability.records import (
    Answer,
    Creation,
    DraftsAnswer,
    Encoder,
    End,
    Row,
    SequenceState,
    Truncation,
)
from ferrule_server.durability.replay import JournalState

PRINCIPALS = ("alice", "bob", "zoë")
POLICIES = tuple(bytes((n,)) * 16 for n in range(3))
NUMBERS = (None, 0.0, -0.0, -1.5, -0.1, 1e300, float("-inf"), -1e-45)
State = tuple[dict[int, SequenceState], dict[Any, Creation], list[Any], dict[Any, bytes]]


def view(state: JournalState) -> State:
    """Return what a journal has described, in a form that can be compared: the order of what has an order."""
    dead = [each for each in state.creations.items() if not any(isinstance(no, int) for no in each[1].members)]
    tombstones = dict(state.tombstones)
    return dict(state.sequences), dict(state.creations), [dead, list(tombstones.items())], dict(state.masks)


class JournalModel:
    """Random operations on sequences, and their records.

    Args:
        random: Decides everything.
        has_snapshots: Whether the journal is compacted now and then.
    """

    def __init__(self, random: Random, *, has_snapshots: bool = True) -> None:
        self.random = random
        self.encoder = Encoder()
        self.sequences: dict[int, SequenceState] = {}
        self.creations: dict[tuple[str, str], Creation] = {}
        self.dead: list[tuple[str, str]] = []
        self.tombstones: dict[bytes, str] = {}
        self.masks: dict[tuple[str, bytes], bytes] = {}
        self.next_no = 1
        self.pending: list[int] | None = None
        self._has_snapshots = has_snapshots
        self.snapshots: list[int] = []
        """Indices of the groups that begin a snapshot which has ended."""
        self._begun = 0
        self.groups = [self.encoder.snapshot_begin() + self.encoder.snapshot_end()]

    def state(self) -> State:
        """Return a copy of what is true now, as :func:`view` returns it."""
        dead = [(key, self.creations[key]) for key in self.dead]
        return deepcopy((self.sequences, self.creations, [dead, list(self.tombstones.items())], self.masks))

    def add_group(self) -> None:
        """Write the records of one to five operations as a group; the begin of a snapshot begins another one."""
        records = [self._operate() for _ in range(self.random.randint(1, 5))]
        if self.pending is None and self._has_snapshots and not self.random.randrange(10):
            self.groups.append(b"".join(records))
            records = [self._begin_snapshot()]
        self.groups.append(b"".join(records))

    def restart(self) -> None:
        """Go on as a new server does: with a snapshot, by an encoder that knows nothing."""
        self.encoder = Encoder()
        self.groups.append(self._begin_snapshot())

    def finish_snapshot(self) -> None:
        """Write the rest of a snapshot that has begun, as a group."""
        if self.pending is not None:
            rest = b"".join(self._rewrite(no) for no in self.pending)
            self.groups.append(rest + self._end_snapshot())

    def _operate(self) -> bytes:
        if self.pending is not None and not self.random.randrange(3):
            return self._advance_snapshot()
        if self.random.random() < 0.3:
            return self._decode()
        change = self.random.choice(
            (self._create, self._fork, self._append, self._verify, self._truncate, self._reserve, self._lease)
            if self.random.random() < 0.8
            else (self._create, self._end, self._mask)
        )
        return change()

    def _begin_snapshot(self) -> bytes:
        self.pending, self._begun = list(self.sequences), len(self.groups)
        self.random.shuffle(self.pending)
        return self.encoder.snapshot_begin()

    def _advance_snapshot(self) -> bytes:
        assert self.pending is not None
        if self.pending:
            return self._rewrite(self.pending.pop())
        return self._end_snapshot()

    def _rewrite(self, no: int) -> bytes:
        """Write a sequence again, unless that was done or it has ended; share the tokens of another one if it can."""
        if no not in self.sequences or self.encoder.knows(no):
            return b""
        state = self.sequences[no]
        for other in filter(self.encoder.knows, self.sequences):
            shared = _shared(state, self.sequences[other])
            if shared:
                return self.encoder.sequence(state, other, shared)
        return self.encoder.sequence(state)

    def _end_snapshot(self) -> bytes:
        live = [each for key, each in self.creations.items() if key not in self.dead]
        dead = [self.creations[key] for key in self.dead]
        records = [self.encoder.creation(each) for each in live + dead]
        records += [self.encoder.tombstone(principal, secret) for secret, principal in self.tombstones.items()]
        records += [self.encoder.mask(principal, bits) for (principal, _), bits in self.masks.items()]
        self.pending = None
        self.snapshots.append(self._begun)
        return b"".join((*records, self.encoder.snapshot_end()))

    def _create(self) -> bytes:
        state = SequenceState(
            self._new_no(),
            self.random.randbytes(16),
            self.random.choice(PRINCIPALS),
            self.random.choice((60.0, 0.5)),
            self.random.random() < 0.5,
            token_ids=self._tokens(self.random.choice((1, 3, 40))),
        )
        state.answer = self._answer(0, len(state.token_ids))
        self.sequences[state.no] = state
        record = self.encoder.sequence(state)
        return record + self._record_creation((state,), 0) if self.random.random() < 0.4 else record

    def _fork(self) -> bytes:
        source = self._any()
        if source is None or not source.token_ids:
            return self._create()
        length = self.random.randint(1, len(source.token_ids))
        records, branches = [self._touch(source)], []
        for _ in range(self.random.randint(1, 3)):
            branch = SequenceState(
                self._new_no(),
                self.random.randbytes(16),
                source.principal,
                source.ttl_s,
                source.is_published,
                0,
                hashlib.sha256(source.secret).hexdigest()[:16],
                source.token_ids[:length],
            )
            records.append(self.encoder.sequence(branch, source.no, length))
            self.sequences[branch.no] = branch
            branches.append(branch)
        records.append(self._record_creation(tuple(branches), length))
        return b"".join(records)

    def _record_creation(self, created: tuple[SequenceState, ...], start: int) -> bytes:
        creation = Creation(
            created[0].principal,
            f"request {self.next_no}",
            self.random.randbytes(16),
            self.random.choice((b"", b"l" * 16)),
            start,
            len(created[0].token_ids),
            b"L" * 16,
            self.random.choice((None, 5, 2**64 - 1)),
            self.random.choice((None, (2, 7), (0, None))),
            tuple(each.no for each in created),
        )
        self.creations[creation.principal, creation.request_id] = creation
        return self.encoder.creation(creation)

    def _decode(self) -> bytes:
        """Append the token that the last answer chose."""
        state = self._any()
        if state is None or state.answer is None or not state.answer.rows or state.answer.rows[-1].token is None:
            return self._append()
        last = state.answer.rows[-1]
        length = len(state.token_ids) + 1
        row = last._replace(position=length, token=self._token(), is_accepted=None)
        if self.random.random() < 0.1:
            row = self._row(length)
        seed = self.random.choice((state.answer.seed, 77))
        return self._change(
            state, None, array("I", [last.token or 0]), Answer(length - 1, 1, state.answer.policy, seed, (row,))
        )

    def _append(self) -> bytes:
        state = self._any()
        if state is None:
            return self._create()
        rewind_to = self.random.randint(0, len(state.token_ids)) if self.random.random() < 0.3 else None
        token_ids = self._tokens(self.random.choice((0, 1, 1, 5)))
        start = len(state.token_ids) if rewind_to is None else rewind_to
        return self._change(state, rewind_to, token_ids, self._answer(start, len(token_ids)))

    def _verify(self) -> bytes:
        state = self._any()
        if state is None:
            return self._create()
        drafts = tuple(self._tokens(4))
        accepted = self.random.randint(0, 4)
        token_ids = array("I", [1, *drafts[:accepted]])
        length = len(state.token_ids)
        rows = tuple(
            self._row(length + 2 + index)._replace(is_accepted=index < accepted) for index in range(accepted + 1)
        )
        digest = self.random.randbytes(16)
        verified = DraftsAnswer(digest, 1, drafts, accepted, self.random.choice((None, 9)))
        answer = Answer(length, 1 + accepted, self.random.choice(POLICIES), None, rows, drafts=verified)
        return self._change(state, None, token_ids, answer)

    def _change(
        self, state: SequenceState, rewind_to: int | None, token_ids: array[int], answer: Answer | None
    ) -> bytes:
        ttl_s = self.random.choice((None, None, None, 3.5))
        record = self._touch(state) + self.encoder.append(state.no, rewind_to, token_ids, ttl_s, answer)
        kept = state.token_ids if rewind_to is None else state.token_ids[:rewind_to]
        state.token_ids, state.answer, state.truncation = kept + token_ids, answer, None
        state.ttl_s = state.ttl_s if ttl_s is None else ttl_s
        return record

    def _truncate(self) -> bytes:
        state = self._any()
        if state is None:
            return self._create()
        length = len(state.token_ids)
        truncation = Truncation(length, self.random.randbytes(16), self.random.randint(0, length), 3)
        record = self._touch(state) + self.encoder.truncate(state.no, truncation)
        state.token_ids, state.truncation = state.token_ids[: truncation.new_length], truncation
        return record

    def _reserve(self) -> bytes:
        state = self._any()
        if state is None:
            return self._create()
        record = self._touch(state) + self.encoder.reserve(state.no, 1000)
        state.reserved_length = 1000
        return record

    def _lease(self) -> bytes:
        state = self._any()
        if state is None:
            return self._create()
        record = self._touch(state) + self.encoder.lease(state.no, 9.25)
        state.ttl_s = 9.25
        return record

    def _end(self) -> bytes:
        state = self._any()
        if state is None:
            return self._create()
        how = self.random.choice(tuple(End))
        record = self._touch(state) + self.encoder.end(state.no, how)
        del self.sequences[state.no]
        if how is End.EXPIRED:
            self.tombstones[state.secret] = state.principal
        for key, creation in self.creations.items():
            if state.no in creation.members:
                self._end_member(key, state)
        return record

    def _end_member(self, key: tuple[str, str], state: SequenceState) -> None:
        members = tuple(state.secret if no == state.no else no for no in self.creations[key].members)
        if all(isinstance(member, bytes) for member in members):
            members = members[:1]
            self.dead.append(key)
        self.creations[key] = self.creations[key]._replace(members=members)

    def _mask(self) -> bytes:
        principal, bits = self.random.choice(PRINCIPALS), self.random.randbytes(6)
        self.masks[principal, hashlib.blake2b(bits, digest_size=16).digest()] = bits
        return self.encoder.mask(principal, bits)

    def _touch(self, state: SequenceState) -> bytes:
        """Write a sequence again before its change, if a snapshot has begun and has not reached it."""
        return b"" if self.encoder.knows(state.no) else self.encoder.sequence(state)

    def _any(self) -> SequenceState | None:
        return self.random.choice(list(self.sequences.values())) if self.sequences else None

    def _new_no(self) -> int:
        self.next_no += self.random.choice((1, 1, 200))
        return self.next_no - 1

    def _token(self) -> int:
        return self.random.choice((0, 5, 127, 128, 20_000, 262_143, 2**21 - 1, 2**21, 2**32 - 1))

    def _tokens(self, count: int) -> array[int]:
        return array("I", [self._token() for _ in range(count)])

    def _row(self, position: int) -> Row:
        one, two, three, four = (self.random.choice(NUMBERS) for _ in range(4))
        return Row(position, self.random.choice((None, self._token())), one, two, three, four)

    def _answer(self, start: int, num_tokens: int) -> Answer | None:
        if self.random.random() < 0.2:
            return None
        rows = tuple(
            self._row(start + num_tokens - self.random.choice((0, 0, 1)) + 1)
            for _ in range(self.random.choice((0, 1, 1, 1, 2)))
        )
        seed = self.random.choice((None, 0, 12345, 2**64 - 1))
        return Answer(start, num_tokens, self.random.choice(POLICIES), seed, rows, self.random.random() < 0.8)


def _shared(one: SequenceState, other: SequenceState) -> int:
    """Return how many first tokens two sequences share."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
