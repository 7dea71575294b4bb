"""What a server must answer, worked out the slow and obvious way: one request after another, tokens in tuples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import grpc

from ferrule.v1 import types_pb2
from tests.chaos.model_policies import NONE, SEEDED, UNSEEDED, Drafts, Policy, Tokens, Verified

MIN_TTL_S = 5.0
DEFAULT_TTL_S = 60.0
MAX_TTL_S = 3600.0
TOMBSTONE_S = 600.0

NOT_FOUND, ABORTED = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED
OUT_OF_RANGE, INVALID = grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.INVALID_ARGUMENT
FAIL, FORK, REWIND = types_pb2.STALE_POLICY_FAIL, types_pb2.STALE_POLICY_FORK, types_pb2.STALE_POLICY_REWIND


@dataclass(frozen=True)
class Ask:
    """What is asked of one append, whichever RPC carries it.

    Attributes:
        tokens: Of a verify, those before the drafts.
        drafts: Makes it a verify.
        loop: All that is asked of the Generate it belongs to, but its request_id and what ends it; None: of none.
        drops: A new sequence gives back what is outside the window.
    """

    tokens: Tokens
    policy: Policy
    on_stale: types_pb2.StalePolicy = FAIL
    request_id: str = ""
    ttl_s: float | None = None
    drafts: Drafts | None = None
    loop: object = None
    drops: bool = False

    @property
    def all_tokens(self) -> Tokens:
        """Everything that may be appended."""
        return self.tokens if self.drafts is None else self.tokens + self.drafts.draft_ids

    @property
    def content(self) -> Ask:
        """All of it but the request_id."""
        return replace(self, request_id="")


@dataclass(eq=False)
class Draw:
    """How a row was drawn, shared by all who must answer it alike.

    Attributes:
        seed: None: not drawn, or with a seed of the server's that nobody has been told yet.
    """

    seed: int | None = None


@dataclass(frozen=True)
class Record:
    """The newest append of a sequence, as far as a retry has to be told from something else.

    Attributes:
        start, num_tokens: What it appended. policy, draw: of its rows.
        drafts: Of a verify; num_certain: tokens before them; verified: what became of them.
    """

    start: int
    num_tokens: int
    policy: Policy
    draw: Draw
    drafts: Drafts | None = None
    num_certain: int = 0
    verified: Verified | None = None

    def is_of(self, start: int, ask: Ask) -> bool:
        """Whether the append was asked for as this one is; of plain ones the tokens are compared elsewhere."""
        is_asked = (self.start, self.policy, self.drafts) == (start, ask.policy, ask.drafts)
        return is_asked and (ask.drafts is None or self.num_certain == len(ask.tokens))


@dataclass(eq=False)
class Sequence:
    """What a sequence should be.

    Attributes:
        epoch: Number of the server's run that made it.
        last_append: The newest append whose answer is kept.
        last_truncate: Tokens of the handle and new length of the newest truncate, while the tip has not moved.
        drops: It gives back blocks outside the window. num_gone: how many it has given back.
    """

    principal: str
    epoch: int
    tokens: Tokens
    ttl_s: float
    expires_at: float = 0.0
    died: str = ""
    died_at: float = 0.0
    last_append: Record | None = None
    last_truncate: tuple[Tokens, int] | None = None
    drops: bool = False
    num_gone: int = 0


@dataclass(frozen=True)
class Issued:
    """A handle that was given out, and the tokens it names for ever."""

    handle: types_pb2.KvCacheHandle = field(repr=False)
    owner: Sequence
    tokens: Tokens


@dataclass(frozen=True)
class Refused:
    """An error that must be answered."""

    code: grpc.StatusCode
    reason: str
    tip_length: int | None = None


@dataclass(eq=False)
class Answered:
    """An answer that must come.

    Attributes:
        owner: The sequence of the handle. tokens: those that the handle must cover.
        replayed: What the flag must say; None where both are right.
        policy: Of the row; UNSEEDED without a known seed may draw with any, which is then noted in ``draw``.
        is_new: The handle's ``cache_id`` was never seen before.
        verified: Of a verify.
        ttl_s: Lease as granted.
    """

    owner: Sequence
    tokens: Tokens
    policy: Policy
    draw: Draw
    replayed: bool | None = False
    is_new: bool = False
    verified: Verified | None = None
    ttl_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.ttl_s = self.owner.ttl_s


@dataclass(eq=False)
class Forked:
    """Branches that must come: new ones, or those of the first answer."""

    branches: list[Sequence]
    tokens: Tokens
    ttl_s: float
    replayed: bool


@dataclass(eq=False)
class Creation:
    """What a request with a request_id made.

    Attributes:
        content: All that was asked. sequences: those made. tokens: those that the answered handles cover.
        draw: Of its row. verified: of a verify. loop: as in :class:`Ask`.
        record: What it appended. first_row: tokens up to the first row that is answered.
    """

    content: tuple[object, ...]
    sequences: list[Sequence]
    tokens: Tokens
    draw: Draw = field(default_factory=Draw)
    verified: Verified | None = None
    loop: object = None
    record: Record | None = None
    first_row: int = 0


GIVEN_BACK = Refused(OUT_OF_RANGE, "KV_GIVEN_BACK")
Expected = Answered | Refused


def fork_id(request_id: str) -> str:
    """Return the id under which a Generate makes its other branches."""
    return f"{request_id}/fork"


class SequentialModel:
    """Follows every request and predicts its answer.

    Attributes:
        clock_s: The time on the server's clock. epoch: number of its run.
        sequences: All there ever were. issued: all handles given out.
        derived_seeds: What unseeded Generates with a request_id draw with, as far as it was told.
    """

    def __init__(self, max_context: int, *, window: int, block_size: int) -> None:
        self.max_context = max_context
        self.window = window
        self.block_size = block_size
        self.clock_s = 1000.0
        self.epoch = 0
        self.sequences: list[Sequence] = []
        self.issued: list[Issued] = []
        self.creations: dict[tuple[str, str], Creation] = {}
        self.derived_seeds: dict[object, int] = {}

    @property
    def live(self) -> list[Sequence]:
        """Sequences of this run that have not ended."""
        return [each for each in self.sequences if each.epoch == self.epoch and not each.died]

    # ---- requests ---------------------------------------------------------------------------------------------------

    def create(self, principal: str, ask: Ask) -> Expected:
        """Follow a request for a new sequence."""
        if not ask.tokens:
            return Refused(INVALID, "INVALID_FIELD")
        if len(ask.tokens) > self.max_context:
            return Refused(OUT_OF_RANGE, "CONTEXT_EXCEEDED")
        known = self._creation(principal, ask.request_id)
        if known is not None:
            return self._repeat(known, (ask.content,), principal, ask.policy)
        if self.is_taken(principal, ask.request_id, ask.loop):
            return Refused(INVALID, "REQUEST_ID_REUSED")
        sequence = Sequence(principal, self.epoch, ask.tokens, DEFAULT_TTL_S, drops=ask.drops)
        self._give_back(sequence, 0)
        return self._born(sequence, (ask.content,), ask, Record(0, len(ask.tokens), ask.policy, _draw(ask.policy)))

    def append(self, principal: str, issued: Issued, ask: Ask, told: int | None = None) -> Expected:
        """Follow an append, verify, query, replay, fork or rewind.

        ``told`` is the seed in the answer to a verify, where the server chose one: what holds depends on it.
        """
        if ask.drafts is not None and (not ask.tokens or not ask.drafts.is_valid_with(ask.policy)):
            return Refused(INVALID, "INVALID_FIELD")
        if len(ask.all_tokens) > self.max_context:
            return Refused(OUT_OF_RANGE, "CONTEXT_EXCEEDED")
        known = self._creation(principal, ask.request_id) if ask.on_stale == FORK else None
        content = (issued.owner, issued.tokens, ask.content)
        if known is not None and known.content == content:
            return self._repeat(known, content, principal, ask.policy)
        refusal = self._refusal(issued, principal) or self._stale(issued)
        if refusal is not None:
            return refusal
        if not ask.tokens:
            return self._query(issued, ask)
        return self._replay(issued, ask) or self._no_room(issued, ask) or self._appended(issued, ask, told)

    def _query(self, issued: Issued, ask: Ask) -> Expected:
        """Run the last row again, if any is wanted."""
        if ask.policy.chooses and len(issued.tokens) < self.lowest_length(issued.owner):
            return GIVEN_BACK
        self.renew(issued.owner, ask.ttl_s)
        return Answered(issued.owner, issued.tokens, ask.policy, _draw(ask.policy))

    def _replay(self, issued: Issued, ask: Ask) -> Expected | None:
        """Answer what happened before, an unseeded draw only if its seed is still known; None for what did not.

        No lease changes. What a verify with a rule appended, its own record alone tells.
        """
        sequence, start, record = issued.owner, len(issued.tokens), issued.owner.last_append
        num_tokens, draw, verified = len(ask.all_tokens), _draw(ask.policy), None
        if record is not None and not record.is_of(start, ask):
            record = None
        if ask.drafts is not None and ask.drafts.acceptance != NONE:
            if record is None:
                return None
            num_tokens = record.num_tokens
        done = ask.all_tokens[:num_tokens]
        if sequence.tokens[start : start + num_tokens] != done:
            return None
        if record is not None and record.num_tokens == num_tokens:
            draw, verified = record.draw, record.verified
        elif ask.policy.kind == UNSEEDED:
            return Refused(INVALID, "INVALID_FIELD")
        elif ask.policy.chooses and _first_row(start, ask) < self.lowest_length(sequence):
            return GIVEN_BACK
        elif ask.drafts is not None:
            verified = ask.drafts.verify(issued.tokens + ask.tokens, ask.policy, draw.seed, self.window)
        self.renew(sequence)
        return Answered(sequence, issued.tokens + done, ask.policy, draw, True, verified=verified)

    def _no_room(self, issued: Issued, ask: Ask) -> Refused | None:
        """Return why tokens that are no replay cannot be appended, or None."""
        sequence, length = issued.owner, len(issued.tokens)
        is_behind = length < len(sequence.tokens)
        if is_behind and ask.on_stale == FAIL:
            return Refused(ABORTED, "HANDLE_STALE", len(sequence.tokens))
        principal, request_id = sequence.principal, ask.request_id
        is_used = self._creation(principal, request_id) is not None or self.is_taken(principal, request_id, ask.loop)
        if is_behind and ask.on_stale == FORK and is_used:
            return Refused(INVALID, "REQUEST_ID_REUSED")
        if is_behind and length < self.lowest_length(sequence):
            return GIVEN_BACK
        if length + len(ask.all_tokens) > self.max_context:
            return Refused(OUT_OF_RANGE, "CONTEXT_EXCEEDED")
        return None

    def _appended(self, issued: Issued, ask: Ask, told: int | None) -> Answered:
        """Have the sequence, or a branch of it, hold what is asked for."""
        sequence, start, draw = issued.owner, len(issued.tokens), _draw(ask.policy)
        tokens, verified = issued.tokens + ask.all_tokens, None
        if ask.drafts is not None:
            draw.seed = told if ask.policy.kind == UNSEEDED else draw.seed
            verified = ask.drafts.verify(issued.tokens + ask.tokens, ask.policy, draw.seed, self.window)
            if ask.drafts.acceptance != NONE:
                tokens = issued.tokens + ask.tokens + ask.drafts.draft_ids[: verified.num_held]
        record = Record(start, len(tokens) - start, ask.policy, draw, ask.drafts, len(ask.tokens), verified)
        if ask.on_stale == FORK and start < len(sequence.tokens):
            self.renew(sequence)
            branch = Sequence(sequence.principal, self.epoch, tokens, sequence.ttl_s, drops=sequence.drops)
            branch.num_gone = sequence.num_gone
            self._give_back(branch, start)
            return self._born(branch, (sequence, issued.tokens, ask.content), ask, record)
        sequence.tokens, sequence.last_append, sequence.last_truncate = tokens, record, None
        self._give_back(sequence, start)
        self.renew(sequence, ask.ttl_s)
        return Answered(sequence, tokens, ask.policy, draw, verified=verified)

    def fork(
        self,
        principal: str,
        issued: Issued,
        length: int,
        count: int,
        *,
        ttl_s: float | None,
        request_id: str,
        loop: object = None,
    ) -> Forked | Refused:
        """Follow a ForkCache, or the fork of a Generate."""
        content = ("fork", issued.owner, issued.tokens, length, count, ttl_s, loop)
        known = self._creation(principal, request_id)
        if known is not None:
            return self._repeat_fork(known, content)
        if self.is_taken(principal, request_id, loop):
            return Refused(INVALID, "REQUEST_ID_REUSED")
        refusal = self._refusal(issued, principal) or self._stale(issued)
        if refusal is None and length < self.lowest_length(issued.owner):
            refusal = GIVEN_BACK
        if refusal is not None:
            return refusal
        self.renew(issued.owner)
        tokens = issued.tokens[:length]
        branches = [Sequence(principal, self.epoch, tokens, issued.owner.ttl_s) for _ in range(count)]
        for branch in branches:
            branch.drops, branch.num_gone = issued.owner.drops, issued.owner.num_gone
            self.renew(branch, ttl_s)
        self.sequences += branches
        if request_id:
            self.creations[principal, request_id] = Creation(content, branches, tokens, loop=loop)
        return Forked(branches, tokens, branches[0].ttl_s, False)

    def truncate(self, principal: str, issued: Issued, new_length: int) -> Tokens | Refused:
        """Follow a TruncateKv; returns the tokens that the new handle covers."""
        sequence = issued.owner
        refusal = self._refusal(issued, principal)
        if refusal is None and not 1 <= new_length <= len(issued.tokens):
            refusal = Refused(OUT_OF_RANGE, "TRUNCATE_BEYOND")
        if refusal is None and sequence.last_truncate != (issued.tokens, new_length):
            refusal = self._stale(issued)
            if refusal is None and new_length < self.lowest_length(sequence):
                refusal = GIVEN_BACK
        if refusal is not None:
            return refusal
        sequence.tokens = sequence.tokens[:new_length]
        sequence.last_truncate = (issued.tokens, new_length)
        self.renew(sequence)
        return sequence.tokens

    def release(self, principal: str, issued: Issued) -> bool:
        """Follow the release of one handle; returns whether there was something to release."""
        sequence = issued.owner
        if sequence.epoch != self.epoch or sequence.died or sequence.principal != principal:
            return False
        sequence.died, sequence.died_at = "released", self.clock_s
        return True

    def touch(self, principal: str, issued: Issued, ttl_s: float | None = None) -> Refused | None:
        """Follow a KeepAlive or GetCacheInfo of one handle."""
        refusal = self._refusal(issued, principal)
        if refusal is None:
            self.renew(issued.owner, ttl_s)
        return refusal

    def wait(self, seconds: float) -> None:
        """Let time pass: leases end."""
        self.clock_s += seconds
        for sequence in self.live:
            if sequence.expires_at <= self.clock_s:
                sequence.died, sequence.died_at = "expired", self.clock_s
        self.forget_creations()

    def forget_creations(self) -> None:
        """Creations are remembered for as long as tombstones after the last of their sequences has ended."""
        self.creations = {
            key: each
            for key, each in self.creations.items()
            if any(not one.died or self.clock_s < one.died_at + TOMBSTONE_S for one in each.sequences)
        }

    def restart(self) -> None:
        """Nothing outlives the process."""
        self.epoch += 1
        self.creations.clear()
        self.derived_seeds.clear()

    def renew(self, sequence: Sequence, ttl_s: float | None = None) -> None:
        """Start a lease anew."""
        if ttl_s is not None:
            sequence.ttl_s = min(max(ttl_s, MIN_TTL_S), MAX_TTL_S)
        sequence.expires_at = self.clock_s + sequence.ttl_s

    def lowest_length(self, sequence: Sequence) -> int:
        """Return how short the sequence may be cut so that the last row still finds all that it attends to."""
        return sequence.num_gone * self.block_size + self.window if sequence.num_gone else 1

    def _give_back(self, sequence: Sequence, start: int) -> None:
        """Follow an append that began at ``start``: blocks go where it has filled one."""
        stop = len(sequence.tokens)
        if sequence.drops and start // self.block_size != stop // self.block_size:
            sequence.num_gone = max(sequence.num_gone, (stop - 2 * self.window - 1) // self.block_size)

    # ---- rules ------------------------------------------------------------------------------------------------------

    def _refusal(self, issued: Issued, principal: str) -> Refused | None:
        """Return why a handle names no sequence of the principal, or None."""
        sequence = issued.owner
        if sequence.epoch != self.epoch:
            return Refused(NOT_FOUND, "EPOCH_CHANGED")
        if sequence.principal != principal or sequence.died == "released":
            return Refused(NOT_FOUND, "HANDLE_UNKNOWN")
        if sequence.died == "expired":
            is_remembered = self.clock_s < sequence.died_at + TOMBSTONE_S
            return Refused(NOT_FOUND, "HANDLE_EXPIRED" if is_remembered else "HANDLE_UNKNOWN")
        return None

    def _stale(self, issued: Issued) -> Refused | None:
        sequence = issued.owner
        if sequence.tokens[: len(issued.tokens)] == issued.tokens:
            return None
        return Refused(ABORTED, "HANDLE_STALE", len(sequence.tokens))

    def is_taken(self, principal: str, request_id: str, loop: object) -> bool:
        """Whether a Generate other than ``loop`` has made branches under a request_id."""
        branches = self._creation(principal, request_id and fork_id(request_id))
        return branches is not None and branches.loop != loop

    def is_of_another(self, principal: str, request_id: str, loop: object) -> bool:
        """Whether anything but ``loop`` has made something under a request_id."""
        known = self._creation(principal, request_id)
        return (known is not None and known.loop != loop) or self.is_taken(principal, request_id, loop)

    def _creation(self, principal: str, request_id: str) -> Creation | None:
        return self.creations.get((principal, request_id)) if request_id else None

    def _born(self, sequence: Sequence, content: tuple[object, ...], ask: Ask, record: Record) -> Answered:
        self.renew(sequence, ask.ttl_s)
        self.sequences.append(sequence)
        if ask.request_id:
            made = Creation(content, [sequence], sequence.tokens, record.draw, record.verified, ask.loop, record)
            if ask.policy.chooses:
                made.first_row = _first_row(record.start, ask)
            self.creations[sequence.principal, ask.request_id] = made
            sequence.last_append = record
        return Answered(sequence, sequence.tokens, ask.policy, record.draw, is_new=True, verified=record.verified)

    def _repeat(self, known: Creation, content: tuple[object, ...], principal: str, policy: Policy) -> Expected:
        """Answer a creation again."""
        if known.content != content:
            return Refused(INVALID, "REQUEST_ID_REUSED")
        (sequence,) = known.sequences
        again = Issued(types_pb2.KvCacheHandle(), sequence, known.tokens)
        refusal = self._refusal(again, principal) or self._stale(again)
        if refusal is None and sequence.last_append is not known.record and known.first_row:
            refusal = GIVEN_BACK if known.first_row < self.lowest_length(sequence) else None
        if refusal is not None:
            return refusal
        self.renew(sequence)
        return Answered(sequence, known.tokens, policy, known.draw, True, verified=known.verified)

    def _repeat_fork(self, known: Creation, content: tuple[object, ...]) -> Forked | Refused:
        if known.content != content:
            return Refused(INVALID, "REQUEST_ID_REUSED")
        live = [each for each in known.sequences if not each.died]
        if not live:
            first = known.sequences[0]
            refusal = self._refusal(Issued(types_pb2.KvCacheHandle(), first, known.tokens), first.principal)
            assert refusal is not None
            return refusal
        for branch in live:
            self.renew(branch)
        return Forked(known.sequences, known.tokens, min(each.ttl_s for each in live), True)


def _first_row(start: int, ask: Ask) -> int:
    """Return how many tokens there are up to the first row that is answered: of a verify, the last certain one."""
    return start + len(ask.tokens)


def _draw(policy: Policy) -> Draw:
    """Return the draw of a row as far as it is known before the answer."""
    return Draw(policy.seed if policy.kind == SEEDED else None)
