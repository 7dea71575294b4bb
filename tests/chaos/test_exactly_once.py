"""However often connections break, every append happens once: none is lost, none doubled, no token differs.

Clients made of the stubs alone run through the cutting proxy and send again whatever was not answered. What the server
holds afterwards is compared with what they sent, and the tokens it drew with those of a run that nothing disturbed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from ferrule.v1 import policy_pb2
from ferrule_server.executor.base import Executor
from ferrule_server.executor.reference import PagedReferenceExecutor
from tests.api.harness import RunningServer
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.figures import report, seed_of_run
from tests.chaos.library_clients import LibraryStreamAppender, LibraryUnaryAppender
from tests.chaos.model_policies import EXACT, MASKED, REJECTION, SEEDED, SHAPED, Policy, drawn_token
from tests.chaos.raw_clients import (
    Appender,
    BatchAppender,
    Breaks,
    Session,
    StreamAppender,
    UnaryAppender,
    UnifiedAppender,
    UnifiedStreamAppender,
    VerifySession,
    run_session,
)
from tests.chaos.side_by_side import run_side_by_side

NUM_APPENDS = int(os.environ.get("FERRULE_CHAOS_APPENDS", "10400"))
MIN_CUTS = NUM_APPENDS // 10
BYTES_PER_CUT = 1500.0
CLIENTS: dict[str, Callable[[str, Breaks], Appender]] = {
    "unary": UnaryAppender,
    "stream": StreamAppender,
    "batch": BatchAppender,
    "unified": UnifiedAppender,
    "unified-stream": UnifiedStreamAppender,
    "verify": UnaryAppender,
    "verify-stream": StreamAppender,
    "library-unary": LibraryUnaryAppender,
    "library-stream": LibraryStreamAppender,
    "library-verify": LibraryUnaryAppender,
    "library-verify-stream": LibraryStreamAppender,
}
"""By what is sent; what is called a verify has drafts."""


@dataclass(frozen=True)
class Shape:
    """Size of a run.

    Attributes:
        num_clients: Clients at the same time, each with a connection of its own.
        num_rounds: How often each of them begins new sequences.
        width: Sequences of each client.
        length: Appends to each sequence.
    """

    num_clients: int
    num_rounds: int
    width: int
    length: int

    @property
    def num_appends(self) -> int:
        """Appends in all."""
        return self.num_clients * self.num_rounds * self.width * self.length


@dataclass
class Outcome:
    """What a disturbed run left behind, compared with an undisturbed one.

    Attributes:
        sent: Appends that clients wanted. applied: appends that the server counted.
        doubled, lost: Tokens too many and too few in the sequences.
        different: Sessions whose tokens differ from the undisturbed run, or whose sequence from what was sent.
    """

    sent: int = 0
    applied: int = 0
    doubled: int = 0
    lost: int = 0
    different: list[str] = field(default_factory=list)
    replayed: int = 0
    cuts: int = 0
    connections: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    smallest_gap: float | None = None
    drafts_held: int = 0
    seconds: float = 0.0

    def check(self) -> None:
        """Raise AssertionError unless every append happened exactly once."""
        assert not self.different, self.different[:3]
        assert (self.doubled, self.lost) == (0, 0)
        assert self.applied == self.sent


def make_sessions(seed: int, shape: Shape, vocab_size: int, *, has_drafts: bool) -> list[list[list[Session]]]:
    """Return fresh sessions by client and round: random prompts, each with a sampling seed of its own."""
    chance = random.Random(seed)

    def session() -> Session:
        if has_drafts:
            return make_verify_session(chance, vocab_size)
        prompt = tuple(chance.randrange(vocab_size) for _ in range(chance.randint(1, 40)))
        sampled = policy_pb2.Sample(temperature=0.9, top_p=0.95, seed=chance.getrandbits(64))
        return Session(prompt, policy_pb2.LogitsReturnPolicy(sample=sampled, top_logprobs=2))

    return [
        [[session() for _ in range(shape.width)] for _ in range(shape.num_rounds)] for _ in range(shape.num_clients)
    ]


def make_verify_session(chance: random.Random, vocab_size: int) -> VerifySession:
    """Return a session that drafts few tokens and draws from few; half of them work by one rule only."""
    prompt = tuple(chance.randrange(vocab_size) for _ in range(chance.randint(1, 40)))
    policy = Policy(SEEDED, chance.getrandbits(64), chance.choice((MASKED, SHAPED)))
    acceptances = chance.choice(((EXACT,), (EXACT, REJECTION)))
    drafter = random.Random(chance.getrandbits(64))
    return VerifySession(prompt, policy.message(), chance=drafter, acceptances=acceptances, distribution=policy)


def run_clients(
    server: RunningServer,
    target: str,
    clients: Sequence[Sequence[Sequence[Session]]],
    kinds: Sequence[str],
    length: int,
) -> Breaks:
    """Run every client's sessions to their end, side by side; returns what broke."""

    def run_client(rounds: Sequence[Sequence[Session]], kind: str, breaks: Breaks) -> None:
        with contextlib.closing(CLIENTS[kind](target, breaks)) as appender:
            for sessions in rounds:
                for session in sessions:
                    session.begin(server.stub)
                run_session(appender, sessions, length)

    pairs = zip(clients, itertools.cycle(kinds), strict=False)
    return run_side_by_side([partial(run_client, *pair) for pair in pairs])


def run_disturbed(server: RunningServer, shape: Shape, kinds: Sequence[str], seed: int) -> Outcome:
    """Run sessions with and without the proxy and compare."""
    vocab_size, has_drafts = server.executor.info.model.config.vocab_size, "verify" in kinds[0]
    plain = make_sessions(seed, shape, vocab_size, has_drafts=has_drafts)
    run_clients(server, server.address.target, plain, kinds, shape.length)
    release(server, plain)
    disturbed = make_sessions(seed, shape, vocab_size, has_drafts=has_drafts)
    before = num_applied(server)
    started = time.monotonic()
    mean_bytes = BYTES_PER_CUT * (1 + shape.width) / 2
    with CuttingProxy(server.address.port, seed=seed, mean_bytes=mean_bytes) as proxy:
        breaks = run_clients(server, proxy.target, disturbed, kinds, shape.length)
    outcome = Outcome(
        sent=shape.num_appends,
        applied=num_applied(server) - before,
        replayed=breaks.replayed,
        cuts=proxy.num_cuts,
        connections=proxy.num_connections,
        breaks=dict(breaks.codes),
        seconds=round(time.monotonic() - started, 1),
    )
    compare(server, outcome, plain, disturbed)
    release(server, disturbed)
    return outcome


def num_applied(server: RunningServer) -> int:
    """Return how many appends the server has counted."""
    return server.engine.counters.decodes + server.engine.counters.verifies


def compare(
    server: RunningServer,
    outcome: Outcome,
    plain: Sequence[Sequence[Sequence[Session]]],
    disturbed: Sequence[Sequence[Sequence[Session]]],
) -> None:
    """Note every sequence that is not what it would have been."""
    gaps = []
    for (name, one), (_, other) in zip(each(plain), each(disturbed), strict=True):
        held = list(server.info(other.handle, include_token_ids=True).token_ids)
        outcome.doubled += max(0, len(held) - len(other.sent))
        outcome.lost += max(0, len(other.sent) - len(held))
        gaps += other.gaps
        if held != other.sent or one.tokens != other.tokens:
            pairs = zip(one.tokens, other.tokens, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            gap = (one.gaps[at], other.gaps[at]) if at is not None and one.gaps else None
            outcome.different.append(
                f"session {name}: sent {len(other.sent)}, held {len(held)}, first other token at {at}, gaps {gap}"
            )
        if isinstance(one, VerifySession):
            outcome.drafts_held += one.num_held
            outcome.different += [f"session {name}: {other}" for other in lawless(one)]
    outcome.smallest_gap = min(gaps, default=None)


def lawless(session: VerifySession) -> Iterator[str]:
    """Yield the first token that decoding one by one would not have drawn, where the rule promises that it would."""
    if session.acceptances != (EXACT,):
        return
    tokens = session.prompt
    for at, token in enumerate(session.tokens):
        if token != drawn_token(tokens, session.distribution, session.distribution.seed):
            yield f"token {at} is not what decoding draws"
            return
        tokens += (token,)


def each(clients: Sequence[Sequence[Sequence[Session]]]) -> Iterator[tuple[str, Session]]:
    """Return every session with its name: client, round and place."""
    for client, rounds in enumerate(clients):
        for number, sessions in enumerate(rounds):
            for place, session in enumerate(sessions):
                yield f"{client}.{number}.{place}", session


def release(server: RunningServer, clients: Sequence[Sequence[Sequence[Session]]]) -> None:
    """Release every sequence."""
    server.release(*(session.handle for _, session in each(clients)))


def shipped() -> Executor:
    """Return the model that ships."""
    pytest.importorskip("torch")
    from ferrule_server.config import ServerConfig
    from ferrule_server.loading import create_executor

    return create_executor(ServerConfig(kv_memory_bytes=256 << 20, dtype="float32"), lambda stage, share: None).executor


def reference() -> Executor:
    """Return the executor whose logits are the same bits whatever shares the step."""
    return PagedReferenceExecutor(max_context=2048, kv_memory_bytes=16 << 20)


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_few_cuts_double_and_lose_nothing(kind: str) -> None:
    """The campaign below in small, on every run."""
    with RunningServer(reference()) as server:
        outcome = run_disturbed(server, Shape(num_clients=2, num_rounds=1, width=2, length=30), [kind], seed=1)
    outcome.check()
    assert outcome.cuts >= 5
    assert ("verify" in kind) == (outcome.drafts_held > 0)


def figures_of(outcome: Outcome) -> dict[str, object]:
    """Return what is worth reporting of a run."""
    return {name: value for name, value in vars(outcome).items() if name != "different"} | {
        "different_sessions": len(outcome.different)
    }


def campaign_shape(width: int) -> Shape:
    """Return eight clients that together append so often."""
    num_clients, length = 8, 325
    return Shape(num_clients, -(-NUM_APPENDS // (num_clients * width * length)), width, length)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_thousand_cuts_double_and_lose_nothing(kind: str) -> None:
    """Ten thousand appends, a thousand cuts: applied is sent, and every token is that of the undisturbed run."""
    seed = seed_of_run()
    shape = campaign_shape(1 if kind in ("unary", "verify", "library-unary", "library-verify") else 2)
    with RunningServer(reference()) as server:
        outcome = run_disturbed(server, shape, [kind], seed)
    report("exactly-once", executor="paged-reference", clients=kind, seed=seed, **figures_of(outcome))
    outcome.check()
    assert outcome.sent >= NUM_APPENDS
    assert outcome.cuts >= MIN_CUTS
    assert outcome.replayed >= NUM_APPENDS // 200, "hardly a reply was lost: the cuts fell beside the appends"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_cuts_change_no_token_of_the_shipped_model() -> None:
    """The same on a real model, with the smallest lead of a likeliest token: how near a tie the run came.

    There the last bits of the logits differ from run to run. In float32 that is too little to be seen; in bfloat16
    tokens differ after some dozens of steps, with cuts or without.
    """
    seed = seed_of_run()
    with RunningServer(shipped()) as server:
        outcome = run_disturbed(server, campaign_shape(width=2), ["unary", "stream"], seed)
    executor = "shipped model, float32"
    report("exactly-once", executor=executor, clients="unary+stream", seed=seed, **figures_of(outcome))
    outcome.check()
    assert outcome.sent >= NUM_APPENDS
    assert outcome.cuts >= MIN_CUTS
