"""What a Generate must answer: the appends that a client would send one by one, followed on the sequential model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ferrule.v1 import executor_pb2, types_pb2
from tests.chaos.model_policies import SEEDED, UNSEEDED, Policy, Tokens, drawn_token
from tests.chaos.sequential_model import (
    FAIL,
    FORK,
    INVALID,
    Answered,
    Ask,
    Issued,
    Record,
    Refused,
    Sequence,
    SequentialModel,
    fork_id,
)

EOS, STOP_TOKEN = executor_pb2.FINISH_REASON_EOS, executor_pb2.FINISH_REASON_STOP_TOKEN
STOP_SEQUENCE, MAX_TOKENS = executor_pb2.FINISH_REASON_STOP_SEQUENCE, executor_pb2.FINISH_REASON_MAX_TOKENS
CONTEXT_FULL, ERROR = executor_pb2.FINISH_REASON_CONTEXT_FULL, executor_pb2.FINISH_REASON_ERROR

_NO_HANDLE = types_pb2.KvCacheHandle()
_NUM_SEEDS = 1 << 64


@dataclass(frozen=True)
class Loop:
    """How a decode loop goes on from its first append, and what ends it."""

    max_tokens: int
    num_branches: int = 1
    stop_ids: Tokens = ()
    stop_runs: tuple[Tokens, ...] = ()

    def finish(self, drawn: list[int]) -> int:
        """Return why a branch ends with the tokens drawn so far, 0 where it goes on."""
        if drawn[-1] in self.stop_ids:
            return STOP_TOKEN
        if any(tuple(drawn[-len(run) :]) == run for run in self.stop_runs):
            return STOP_SEQUENCE
        return MAX_TOKENS if len(drawn) == self.max_tokens else 0


@dataclass(frozen=True)
class State:
    """A sequence at some moment; the tokens of the handle there, and what the sequence holds beyond."""

    owner: Sequence
    tokens: Tokens
    held: Tokens
    last_append: Record | None
    last_truncate: tuple[Tokens, int] | None
    num_gone: int

    def restore(self) -> None:
        """Nothing that came later has happened."""
        self.owner.tokens, self.owner.last_append = self.held, self.last_append
        self.owner.last_truncate, self.owner.num_gone = self.last_truncate, self.num_gone


@dataclass
class Branch:
    """What must come of one branch.

    Attributes:
        drawn: Its tokens. states: when each of them was drawn: the handle that comes with it covers what is before.
        error: Why it failed.
    """

    seed: int | None
    drawn: list[int] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    finish: int = 0
    error: Refused | None = None


@dataclass
class Generated:
    """What must come: branches, and of the first append whether it is a replay."""

    branches: list[Branch]
    replayed: bool | None


class _Generation:
    """Follows one Generate."""

    def __init__(self, model: SequentialModel, principal: str, loop: Loop) -> None:
        self.model = model
        self.principal = principal
        self.loop = loop

    def run(self, issued: Issued | None, ask: Ask) -> Generated | Refused:
        """Follow the first append, the forks, and then each branch to its end."""
        model, principal, loop = self.model, self.principal, self.loop
        if ask.request_id and model.is_of_another(principal, ask.request_id, ask.loop):
            return Refused(INVALID, "REQUEST_ID_REUSED")
        expected = model.create(principal, ask) if issued is None else model.append(principal, issued, ask)
        if isinstance(expected, Refused):
            return expected
        seed = ask.policy.seed if ask.policy.kind == SEEDED else None
        forked: list[Sequence] = []
        if loop.num_branches > 1:
            at = Issued(_NO_HANDLE, expected.owner, expected.tokens)
            name = ask.request_id and fork_id(ask.request_id)
            length, count = len(expected.tokens), loop.num_branches - 1
            made = model.fork(principal, at, length, count, ttl_s=None, request_id=name, loop=ask.loop)
            if isinstance(made, Refused):
                return made
            forked = made.branches
        later_id = ask.request_id if issued is not None and ask.on_stale == FORK else ""
        first = Branch(seed)
        is_new = bool(ask.tokens) and not expected.replayed
        on_stale, own_id = (FAIL, "") if is_new else (ask.on_stale, later_id)
        self._go(first, expected, replace(ask, tokens=(), on_stale=on_stale, request_id=own_id, ttl_s=None))
        branches = [first]
        for index, owner in enumerate(forked, 1):
            branch = Branch(None if seed is None else (seed + index) % _NUM_SEEDS)
            policy = ask.policy if branch.seed is None else replace(ask.policy, seed=branch.seed)
            branch_id = later_id and f"{later_id}/{index}"
            query = Ask((), policy, ask.on_stale, branch_id, loop=ask.loop)
            begun = model.append(principal, Issued(_NO_HANDLE, owner, expected.tokens), query)
            if isinstance(begun, Refused):
                branch.finish, branch.error = ERROR, begun
            else:
                self._go(branch, begun, query)
            branches.append(branch)
        return Generated(branches, expected.replayed)

    def _go(self, branch: Branch, expected: Answered, ask: Ask) -> None:
        """Draw and append until the branch ends; ``ask`` says how."""
        while True:
            owner, tokens = expected.owner, expected.tokens
            token = drawn_token(tokens, ask.policy, branch.seed, self.model.window)
            branch.drawn.append(token)
            held = (owner.tokens, owner.last_append, owner.last_truncate, owner.num_gone)
            branch.states.append(State(owner, tokens, *held))
            branch.finish = self.loop.finish(branch.drawn)
            if branch.finish:
                return
            following = self.model.append(
                self.principal, Issued(_NO_HANDLE, owner, tokens), replace(ask, tokens=(token,))
            )
            if isinstance(following, Refused):
                is_full = following.reason == "CONTEXT_EXCEEDED"
                branch.finish, branch.error = (CONTEXT_FULL, None) if is_full else (ERROR, following)
                return
            expected = following
            if not expected.replayed:
                ask = replace(ask, on_stale=FAIL, request_id="")


def generate(
    model: SequentialModel, principal: str, issued: Issued | None, ask: Ask, loop: Loop, *, told: int | None
) -> Generated | Refused:
    """Follow a Generate.

    Args:
        model: Changed.
        principal: Who asks.
        issued: The handle; None for a new sequence.
        ask: The first append, and how all others are drawn.
        loop: What ends it.
        told: The seed in its answer.
    """
    if ask.request_id:
        ask = replace(ask, loop=(issued and (issued.owner, issued.tokens), ask.content, loop.num_branches))
    if ask.policy.kind == UNSEEDED:
        told = _seed_of(model, principal, issued, ask, told)
        # Where the answer tells none, nothing is drawn; what is appended is then appended with a seed nobody knows.
        ask = replace(ask, policy=Policy(SEEDED, -1 if told is None else told, ask.policy.shape))
    return _Generation(model, principal, loop).run(issued, ask)


def _seed_of(model: SequentialModel, principal: str, issued: Issued | None, ask: Ask, told: int | None) -> int | None:
    """Return what an unseeded Generate draws with: told now, or, for a request_id, told before."""
    if not ask.request_id:
        return told
    key = (principal, ask.request_id, issued and (issued.owner, issued.tokens), ask.tokens)
    if told is not None:
        assert model.derived_seeds.setdefault(key, told) == told
    return model.derived_seeds.get(key)
