"""What a server must answer, worked out the slow and obvious way: one request after another, tokens in tuples.

Shares no code with the server but the draw itself (``select_rows``), which has proofs of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import grpc
import numpy as np
import numpy.typing as npt

from ferrule.v1 import policy_pb2, types_pb2
from ferrule_server.executor.base import OutputSpec, SampleSpec
from ferrule_server.executor.sampling import select_rows

Tokens = tuple[int, ...]

VOCAB_SIZE = 256
NUM_HEADS = 4
HEAD_DIM = 8
MIN_TTL_S = 5.0
DEFAULT_TTL_S = 60.0
MAX_TTL_S = 3600.0
TOMBSTONE_S = 600.0

NOT_FOUND, ABORTED = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED
OUT_OF_RANGE, INVALID = grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.INVALID_ARGUMENT

GREEDY, SEEDED, UNSEEDED, NOTHING = "greedy", "seeded", "unseeded", "nothing"


def reference_logits(tokens: SequenceOf[int]) -> npt.NDArray[np.float32]:
    """Return the paged reference's law, float32 [VOCAB_SIZE], from the tokens alone, without any cache."""
    width = NUM_HEADS * HEAD_DIM
    rows = np.zeros((len(tokens), width), np.float32)
    rows[np.arange(len(tokens)), np.array(tokens) % width] = 1
    logits = np.zeros(VOCAB_SIZE, np.float32)
    for head in range(NUM_HEADS):
        part = rows[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]
        scores = (part @ part[-1]) * np.float32(HEAD_DIM**-0.5)
        weights = np.exp(scores - scores.max()).astype(np.float64)
        logits[head * HEAD_DIM : (head + 1) * HEAD_DIM] = (weights @ part / weights.sum()).astype(np.float32)
    return logits


def drawn_token(tokens: SequenceOf[int], seed: int | None) -> int:
    """Return the token that follows: the likeliest for None, else the one drawn with the seed."""
    spec = OutputSpec(greedy=True) if seed is None else OutputSpec(sample=SampleSpec(seed=seed))
    (row,) = select_rows(reference_logits(tokens)[None], [len(tokens) - 1], [spec])
    assert row.token is not None
    return row.token


@dataclass(frozen=True)
class Policy:
    """What a request asks of its row: one of GREEDY, SEEDED, UNSEEDED and NOTHING."""

    kind: str
    seed: int = 0

    def message(self) -> policy_pb2.LogitsReturnPolicy:
        """Return it as the contract writes it."""
        if self.kind == NOTHING:
            return policy_pb2.LogitsReturnPolicy(none=True)
        if self.kind == GREEDY:
            return policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())
        seed = self.seed if self.kind == SEEDED else None
        return policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(seed=seed))


@dataclass(eq=False)
class Draw:
    """How a row was drawn, shared by all who must answer it alike.

    Attributes:
        seed: None: not drawn, or with a seed of the server's that nobody has been told yet.
    """

    seed: int | None = None


@dataclass(eq=False)
class Sequence:
    """What a sequence should be.

    Attributes:
        epoch: Number of the server's run that made it.
        last_append: Start, number of tokens, policy and draw of the newest append whose answer is kept.
        last_truncate: Tokens of the handle and new length of the newest truncate, while the tip has not moved.
    """

    principal: str
    epoch: int
    tokens: Tokens
    ttl_s: float
    expires_at: float = 0.0
    died: str = ""
    died_at: float = 0.0
    last_append: tuple[int, int, Policy, Draw] | None = None
    last_truncate: tuple[Tokens, int] | None = None


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
        ttl_s: Lease as granted.
    """

    owner: Sequence
    tokens: Tokens
    policy: Policy
    draw: Draw
    replayed: bool | None = False
    is_new: bool = False
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
        draw: Of its row.
    """

    content: tuple[object, ...]
    sequences: list[Sequence]
    tokens: Tokens
    draw: Draw = field(default_factory=Draw)


Expected = Answered | Refused


class SequentialModel:
    """Follows every request and predicts its answer.

    Attributes:
        clock_s: The time on the server's clock. epoch: number of its run.
        sequences: All there ever were. issued: all handles given out.
    """

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context
        self.clock_s = 1000.0
        self.epoch = 0
        self.sequences: list[Sequence] = []
        self.issued: list[Issued] = []
        self.creations: dict[tuple[str, str], Creation] = {}

    @property
    def live(self) -> list[Sequence]:
        """Sequences of this run that have not ended."""
        return [each for each in self.sequences if each.epoch == self.epoch and not each.died]

    # ---- requests ---------------------------------------------------------------------------------------------------

    def prefill(self, principal: str, tokens: Tokens, policy: Policy, ttl_s: float | None, request_id: str) -> Expected:
        """Follow a Prefill without a handle."""
        content = ("prefill", tokens, policy, ttl_s)
        known = self._creation(principal, request_id)
        if known is not None:
            return self._repeat(known, content, principal, policy)
        if len(tokens) > self.max_context:
            return Refused(OUT_OF_RANGE, "CONTEXT_EXCEEDED")
        sequence = Sequence(principal, self.epoch, tokens, DEFAULT_TTL_S)
        return self._born(sequence, content, policy, request_id, start=0, ttl_s=ttl_s)

    def append(
        self,
        principal: str,
        issued: Issued,
        tokens: Tokens,
        policy: Policy,
        on_stale: int,
        *,
        ttl_s: float | None = None,
        request_id: str = "",
    ) -> Expected:
        """Follow an append, query, replay, fork or rewind."""
        is_fork = on_stale == types_pb2.STALE_POLICY_FORK
        content = ("append", issued.handle.SerializeToString(), tokens, policy, ttl_s)
        known = self._creation(principal, request_id) if is_fork else None
        if known is not None and known.content == content:
            return self._repeat(known, content, principal, policy)
        refusal = self._refusal(issued, principal) or self._stale(issued)
        if refusal is not None:
            return refusal
        return self._judge(issued, tokens, policy, on_stale, content=content, ttl_s=ttl_s, request_id=request_id)

    def _judge(  # noqa: PLR0911  (one return for each line of the rule's table)
        self,
        issued: Issued,
        tokens: Tokens,
        policy: Policy,
        on_stale: int,
        *,
        content: tuple[object, ...],
        ttl_s: float | None,
        request_id: str,
    ) -> Expected:
        """Follow the append rule for a handle that names tokens of a live sequence."""
        sequence, length = issued.owner, len(issued.tokens)
        is_fork = on_stale == types_pb2.STALE_POLICY_FORK and length < len(sequence.tokens)
        if not tokens:
            self.renew(sequence, ttl_s)
            return Answered(sequence, issued.tokens, policy, _draw(policy))
        if sequence.tokens[length : length + len(tokens)] == tokens:
            return self._replay(sequence, length, issued.tokens + tokens, policy)
        if length < len(sequence.tokens) and on_stale == types_pb2.STALE_POLICY_FAIL:
            return Refused(ABORTED, "HANDLE_STALE", len(sequence.tokens))
        if is_fork and self._creation(sequence.principal, request_id) is not None:
            return Refused(INVALID, "REQUEST_ID_REUSED")
        if length + len(tokens) > self.max_context:
            return Refused(OUT_OF_RANGE, "CONTEXT_EXCEEDED")
        if is_fork:
            self.renew(sequence)
            branch = Sequence(sequence.principal, self.epoch, issued.tokens + tokens, sequence.ttl_s)
            return self._born(branch, content, policy, request_id, start=length, ttl_s=ttl_s)
        sequence.tokens = issued.tokens + tokens
        sequence.last_truncate = None
        draw = _draw(policy)
        sequence.last_append = (length, len(tokens), policy, draw)
        self.renew(sequence, ttl_s)
        return Answered(sequence, sequence.tokens, policy, draw)

    def fork(
        self, principal: str, issued: Issued, length: int, count: int, *, ttl_s: float | None, request_id: str
    ) -> Forked | Refused:
        """Follow a ForkCache."""
        content = ("fork", issued.handle.SerializeToString(), length, count, ttl_s)
        known = self._creation(principal, request_id)
        if known is not None:
            return self._repeat_fork(known, content)
        refusal = self._refusal(issued, principal) or self._stale(issued)
        if refusal is not None:
            return refusal
        self.renew(issued.owner)
        tokens = issued.tokens[:length]
        branches = [Sequence(principal, self.epoch, tokens, issued.owner.ttl_s) for _ in range(count)]
        for branch in branches:
            self.renew(branch, ttl_s)
        self.sequences += branches
        if request_id:
            self.creations[principal, request_id] = Creation(content, branches, tokens)
        return Forked(branches, tokens, branches[0].ttl_s, False)

    def truncate(self, principal: str, issued: Issued, new_length: int) -> Tokens | Refused:
        """Follow a TruncateKv; returns the tokens that the new handle covers."""
        sequence = issued.owner
        refusal = self._refusal(issued, principal)
        if refusal is None and not 1 <= new_length <= len(issued.tokens):
            refusal = Refused(OUT_OF_RANGE, "TRUNCATE_BEYOND")
        if refusal is None and sequence.last_truncate != (issued.tokens, new_length):
            refusal = self._stale(issued)
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

    def renew(self, sequence: Sequence, ttl_s: float | None = None) -> None:
        """Start a lease anew."""
        if ttl_s is not None:
            sequence.ttl_s = min(max(ttl_s, MIN_TTL_S), MAX_TTL_S)
        sequence.expires_at = self.clock_s + sequence.ttl_s

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

    def _creation(self, principal: str, request_id: str) -> Creation | None:
        return self.creations.get((principal, request_id)) if request_id else None

    def _born(
        self,
        sequence: Sequence,
        content: tuple[object, ...],
        policy: Policy,
        request_id: str,
        *,
        start: int,
        ttl_s: float | None,
    ) -> Answered:
        self.renew(sequence, ttl_s)
        self.sequences.append(sequence)
        draw = _draw(policy)
        if request_id:
            self.creations[sequence.principal, request_id] = Creation(content, [sequence], sequence.tokens, draw)
            sequence.last_append = (start, len(sequence.tokens) - start, policy, draw)
        return Answered(sequence, sequence.tokens, policy, draw, is_new=True)

    def _repeat(self, known: Creation, content: tuple[object, ...], principal: str, policy: Policy) -> Expected:
        """Answer a creation again."""
        if known.content != content:
            return Refused(INVALID, "REQUEST_ID_REUSED")
        (sequence,) = known.sequences
        again = Issued(types_pb2.KvCacheHandle(), sequence, known.tokens)
        refusal = self._refusal(again, principal) or self._stale(again)
        if refusal is not None:
            return refusal
        self.renew(sequence)
        return Answered(sequence, known.tokens, policy, known.draw, True)

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

    def _replay(self, sequence: Sequence, start: int, tokens: Tokens, policy: Policy) -> Expected:
        """Answer an append that happened before, an unseeded draw only if its seed is still known; no lease changes."""
        draw = _draw(policy)
        if policy.kind == UNSEEDED:
            last = sequence.last_append
            if last is None or last[:3] != (start, len(tokens) - start, policy):
                return Refused(INVALID, "INVALID_FIELD")
            draw = last[3]
        self.renew(sequence)
        return Answered(sequence, tokens, policy, draw, True)


def _draw(policy: Policy) -> Draw:
    """Return the draw of a row as far as it is known before the answer."""
    return Draw(policy.seed if policy.kind == SEEDED else None)
