"""The pending rules while connections break: every append and creation of the library, sync and asyncio, each once.

Sessions draw a random mix of steps, confirmations, texts after a pending token, replacements, redraws, frames,
verifies, loops, loops left early, forks, branches and truncates, with seeds, so that the same session without cuts
must end in the same tokens. At the end the server's tokens are compared with the client's, and its count of tokens
with those that were sent.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ferrule import AsyncClient, Client, Policy, sample
from ferrule.errors import PendingTokenError
from ferrule.types import Append, Verify
from tests.api.harness import RunningServer
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.figures import report, seed_of_run

NUM_SESSIONS = 8
NUM_APPENDS = int(os.environ.get("FERRULE_CHAOS_APPENDS", "10400"))
MAX_LENGTH = 400
NUM_RETRIES = 1000

MAKING = ("fork", "branch", "loops")
KINDS = ("step", "confirm", "text", "drop", "send", "redraw", "frame", "verify", "loop", "leave", "truncate", *MAKING)


class Session:
    """The choices of one session: what to do next, and with which tokens and seeds. The same without cuts.

    ``num_within`` counts the loops of all sessions that were left within a frame; how many depends on the weather.
    """

    num_within = 0

    def __init__(self, number: int) -> None:
        self._random = random.Random(seed_of_run() + number)
        self.prompt = [number, *range(5, 12)]
        self.counts: Counter[str] = Counter()

    def kind(self) -> str:
        """Return what to do next."""
        kind = self._random.choice(KINDS)
        self.counts[kind] += 1
        return kind

    def policy(self) -> Policy:
        """Return a policy with a seed of its own."""
        return sample(temperature=0.9, seed=self._random.randrange(2**32))

    def tokens(self, pending: int) -> list[int]:
        """Return tokens whose first one differs from the pending one."""
        first = self._random.choice([token for token in range(256) if token != pending])
        return [first, *self._random.choices(range(256), k=self._random.randrange(3))]

    def num_drawn(self) -> int:
        """Return after how many tokens to leave a loop."""
        return self._random.randrange(1, 12)

    def drafts(self) -> list[int]:
        """Return a few drafts."""
        return self._random.choices(range(256), k=self._random.randrange(3))


async def settled(value: Any) -> Any:
    """Return what a call gave: of the asyncio client once it has been awaited."""
    return await value if inspect.isawaitable(value) else value


@asynccontextmanager
async def inside(resource: Any) -> AsyncIterator[Any]:
    """Enter a cache, a stream or a client of either kind."""
    if hasattr(resource, "__aenter__"):
        async with resource as entered:
            yield entered
    else:
        with resource as entered:
            yield entered


async def act(session: Session, cache: Any, stream: Any) -> Any:  # of either client
    """Do one thing with a cache that has a pending token, and return the cache that goes on."""
    kind, policy, token = session.kind(), session.policy(), cache.last.token
    if kind == "step":
        await settled(cache.step(policy))
    elif kind == "confirm":
        await settled(cache.append([token, *session.drafts()], policy=policy))
    elif kind == "text":
        with pytest.raises(PendingTokenError):
            await settled(cache.append(int(token)))
        await settled(cache.append(session.tokens(token), policy=policy))
    elif kind in ("drop", "send"):
        await settled(cache.append([int(token), *session.drafts()], policy=policy, pending=kind))
    elif kind == "redraw":
        await settled(cache.step(policy, redraw=True))
    elif kind == "frame":
        await settled(stream.run([Append(cache, token, policy)]))
    elif kind == "verify":
        await settled(stream.run([Verify(cache, session.drafts(), policy=policy)]))
    elif kind == "loop":
        await settled(cache.generate(3, policy=policy, ignore_eos=True).read())
    elif kind == "leave":
        loop = cache.generate(40, policy=policy, ignore_eos=True)
        for _ in range(session.num_drawn()):
            await settled(next(loop) if hasattr(loop, "__next__") else anext(loop))
        Session.num_within += cache.handle.length > cache.length
    elif kind == "truncate":
        await settled(cache.truncate(cache.length - 1))
        await settled(cache.append(session.tokens(token), policy=policy))
    else:
        born = await branched(kind, session, cache, stream)
        await settled(cache.release())
        cache = born
    return cache


async def branched(kind: str, session: Session, cache: Any, stream: Any) -> Any:
    """Return a sequence made of a cache, by a fork, by two places of a frame, or by a loop of two branches."""
    if kind == "fork":
        return await settled(cache.fork())
    if kind == "branch":
        first, pending = session.tokens(cache.last.token), cache.last.token
        other = next(token for token in (first[0] + 1, first[0] + 2) if token % 256 != pending) % 256
        texts = [first, [other, pending]]
        return (await settled(stream.branch([cache, cache], texts, policy=session.policy())))[1]
    loop = await settled(cache.generate(3, n=2, policy=session.policy(), ignore_eos=True).read())
    return loop.caches[1]


async def play(client: Any, number: int, num_actions: int) -> tuple[list[list[int]], Counter[str]]:
    """Return what each sequence of a session held at its end, with its pending token, and how often it did what."""
    session, held = Session(number), []
    async with inside(client.stream()) as stream:
        cache = await settled(client.prefill(session.prompt, policy=session.policy()))
        for _ in range(num_actions):
            if cache.length > MAX_LENGTH:
                held.append(await ended(cache))
                cache = await settled(client.prefill(session.prompt, policy=session.policy()))
            cache = await act(session, cache, stream)
        held.append(await ended(cache))
    return held, session.counts


async def ended(cache: Any) -> list[int]:
    """Return what the server holds of a sequence, which is what the client knows, and release it."""
    async with inside(cache):
        token = cache.last.token
        await settled(cache.truncate(cache.length))  # what a loop drew beyond
        info = await settled(cache.info(token_ids=True))
        assert list(info.token_ids) == cache.token_ids
        return [*info.token_ids, int(token)]


Played = list[tuple[list[list[int]], Counter[str]]]


def sync_sessions(target: str, num_actions: int) -> Played:
    """Play all sessions in threads, each with a client of its own."""

    def run(number: int) -> tuple[list[list[int]], Counter[str]]:
        with Client(target, timeout=120, max_retries=NUM_RETRIES) as client:
            return asyncio.run(play(client, number, num_actions))

    with ThreadPoolExecutor(NUM_SESSIONS) as pool:
        return list(pool.map(run, range(NUM_SESSIONS)))


def async_sessions(target: str, num_actions: int) -> Played:
    """Play all sessions in tasks, with one client."""

    async def run() -> Played:
        async with AsyncClient(target, timeout=120, max_retries=NUM_RETRIES) as client:
            return await asyncio.gather(*(play(client, number, num_actions) for number in range(NUM_SESSIONS)))

    return asyncio.run(run())


WAYS = {"sync": sync_sessions, "asyncio": async_sessions}


def campaign(way: str, sessions: Callable[[str, int], Played], num_actions: int, mean_bytes: float) -> int:
    """Play with and without cuts, compare, report, and return the number of cuts."""
    with RunningServer() as server:
        expected = sessions(server.address.target, num_actions)
        Session.num_within = 0
        with CuttingProxy(server.address.port, seed=seed_of_run(), mean_bytes=mean_bytes) as proxy:
            played = sessions(proxy.target, num_actions)
            num_cuts = proxy.num_cuts
        with Client(server.address.target) as client:
            num_left = len(list(client.list_caches()))
            replayed = client.admin.cache_metrics().num_replays
    counts = sum((one for _, one in played), Counter[str]())
    num_different = sum(one != other for one, other in zip(played, expected, strict=True))
    figures = {"cuts": num_cuts, "replayed": replayed, "different_sessions": num_different, "left": num_left}
    figures["within"] = Session.num_within
    report("pending rules under cuts", clients=way, actions=sum(counts.values()), **figures, kinds=dict(counts))
    assert played == expected
    assert num_left == 0
    assert set(counts) == set(KINDS)
    assert replayed > 0
    assert Session.num_within > 0
    return num_cuts


@pytest.mark.parametrize("way", WAYS)
def test_pending_tokens_are_sent_once_over_a_few_cuts(way: str) -> None:
    """Whatever the mix is."""
    assert campaign(way, WAYS[way], 40, 2500.0) > 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", WAYS)
def test_pending_tokens_are_sent_once_over_a_thousand_cuts(way: str) -> None:
    """The same, for long."""
    assert campaign(way, WAYS[way], NUM_APPENDS // NUM_SESSIONS, 2500.0) > 1500 * NUM_APPENDS / 10400
