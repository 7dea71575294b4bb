"""However often connections break, a loop on the server draws each token once, and its sequence holds just those.

Clients made of the stubs alone begin and resume Generates through the cutting proxy. The tokens must be those that
decoding one by one draws, the sequences as many as were asked for, and what was appended as much as was drawn.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass, field
from functools import partial

import pytest

from ferrule import Client, sample
from ferrule_server.executor.reference import PagedReferenceExecutor
from tests.api.harness import RunningServer
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.figures import report, seed_of_run
from tests.chaos.model_policies import MASKED, PLAIN, SEEDED, SHAPED, Policy, drawn_token
from tests.chaos.raw_clients import Breaks
from tests.chaos.raw_generate import Branch, LoopClient, LoopSession
from tests.chaos.sequential_model import FAIL, REWIND
from tests.chaos.side_by_side import run_side_by_side

MIN_CUTS = 1000
BYTES_PER_CUT = 500.0


@dataclass
class Outcome:
    """What loops through the proxy left behind.

    Attributes:
        drawn: Tokens read. appended, applied: those of them that had to be appended, and what the server counted.
        asked, alive: Sequences.
        different: Branches whose tokens are not those of decoding one by one, or whose sequence is not what was read.
    """

    drawn: int = 0
    appended: int = 0
    applied: int = 0
    asked: int = 0
    alive: int = 0
    doubled: int = 0
    lost: int = 0
    resumed: int = 0
    replayed: int = 0
    cuts: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def check(self) -> None:
        """Raise AssertionError unless every token was drawn and appended exactly once."""
        assert not self.different, self.different[:3]
        assert (self.doubled, self.lost, self.alive) == (0, 0, self.asked)
        assert self.applied == self.appended


def make_sessions(seed: int, num_clients: int, num_rounds: int, length: int) -> list[list[LoopSession]]:
    """Return sessions by client: random prompts, seeds, shapes and branches, resumed in each of the ways."""
    chance = random.Random(seed)
    return [
        [
            LoopSession(
                f"{seed}.{client}.{number}",
                tuple(chance.randrange(256) for _ in range(chance.randint(2, 40))),
                Policy(SEEDED, chance.getrandbits(64), chance.choice((PLAIN, MASKED, SHAPED))),
                chance.choice((FAIL, REWIND)),
                length,
                [Branch() for _ in range(chance.choice((1, 1, 2)))],
            )
            for number in range(num_rounds)
        ]
        for client in range(num_clients)
    ]


def run_loops(num_clients: int, num_rounds: int, length: int, seed: int) -> Outcome:
    """Let clients loop through the proxy and look at what the server holds."""
    clients = make_sessions(seed, num_clients, num_rounds, length)
    outcome = Outcome()
    with RunningServer(PagedReferenceExecutor(max_context=1024, kv_memory_bytes=64 << 20)) as server:
        started = time.monotonic()
        with CuttingProxy(server.address.port, seed=seed, mean_bytes=BYTES_PER_CUT) as proxy:
            breaks = run_clients(proxy.target, clients)
        outcome.seconds = round(time.monotonic() - started, 1)
        outcome.applied = server.engine.counters.decodes
        outcome.alive = server.engine.snapshot().num_sequences
        outcome.cuts, outcome.replayed, outcome.breaks = proxy.num_cuts, breaks.replayed, dict(breaks.codes)
        for session in (session for sessions in clients for session in sessions):
            compare(server, session, outcome)
    return outcome


def run_clients(target: str, clients: list[list[LoopSession]]) -> Breaks:
    """Run every client's sessions to their end, side by side."""

    def run_client(sessions: list[LoopSession], breaks: Breaks) -> None:
        with contextlib.closing(LoopClient(target, breaks)) as client:
            for session in sessions:
                client.run(session)

    return run_side_by_side([partial(run_client, sessions) for sessions in clients])


def compare(server: RunningServer, session: LoopSession, outcome: Outcome) -> None:
    """Note every branch that is not what decoding one by one gives."""
    outcome.asked += len(session.branches)
    outcome.resumed += session.num_resumed
    for index, (branch, sent) in enumerate(zip(session.branches, session.sent, strict=True)):
        assert branch.handle is not None
        held = list(server.info(branch.handle, include_token_ids=True).token_ids)
        outcome.drawn += len(branch.tokens)
        outcome.appended += len(branch.tokens) - 1
        outcome.doubled += max(0, len(held) - len(sent))
        outcome.lost += max(0, len(sent) - len(held))
        if held != sent or branch.tokens != decoded(session, index):
            outcome.different.append(f"session {session.name} branch {index}: {len(sent)} sent, {len(held)} held")


def decoded(session: LoopSession, index: int) -> list[int]:
    """Return what decoding one by one draws."""
    tokens = session.prompt
    for _ in range(session.length):
        tokens += (drawn_token(tokens, session.policy, (session.policy.seed + index) % (1 << 64)),)
    return list(tokens[len(session.prompt) :])


def test_a_few_cuts_change_no_token_of_a_loop() -> None:
    """The campaign below in small, on every run."""
    outcome = run_loops(num_clients=2, num_rounds=3, length=60, seed=2)
    outcome.check()
    assert outcome.cuts >= 5
    assert outcome.resumed >= 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_cuts_change_no_token_of_a_loop() -> None:
    """Loops of one and two branches, begun by request_id and resumed by handle: nothing doubled, lost, or left over."""
    seed = seed_of_run()
    outcome = run_loops(num_clients=8, num_rounds=24, length=150, seed=seed)
    figures = vars(outcome) | {"different": len(outcome.different)}
    report("loops exactly once", executor="paged-reference", clients="generate", seed=seed, **figures)
    outcome.check()
    assert outcome.cuts >= MIN_CUTS
    assert outcome.resumed >= MIN_CUTS // 4
    assert outcome.replayed >= MIN_CUTS // 40, "hardly a frame was lost: the cuts fell beside the loops"


@pytest.mark.parametrize("num_tokens", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_loops_of_the_library_go_on_by_themselves(num_tokens: int) -> None:
    """Its generations through the proxy, of a cache and of a prompt: the tokens of decoding, and nothing left over."""
    length = 60
    with RunningServer(PagedReferenceExecutor(max_context=1024, kv_memory_bytes=16 << 20)) as server:
        with (
            CuttingProxy(server.address.port, seed=5, mean_bytes=BYTES_PER_CUT) as proxy,
            Client(proxy.target, timeout=60, max_retries=1000) as client,
        ):
            for seed in range(num_tokens // length):
                session = LoopSession("", (7, seed % 256, 9), Policy(SEEDED, seed), FAIL, length, [Branch()])
                with client.generate(session.prompt, length, policy=sample(seed=seed)) as generation:
                    assert generation.read().tokens == decoded(session, 0)
                with client.prefill(session.prompt, policy=sample(seed=seed)) as cache:
                    first = decoded(session, 0)[:1]
                    assert [cache.last.token] == first
                    loop = cache.generate(length - 1, policy=sample(seed=seed))
                    assert first + list(loop) == decoded(session, 0)
            num_cuts = proxy.num_cuts
        assert server.engine.snapshot().num_sequences == 0
    report("loops of the library", tokens=2 * num_tokens, cuts=num_cuts)
    assert num_cuts >= num_tokens // 60
