"""Connections cut on both sides of Envoy, over and over: every append still happens once, on the right server."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from ferrule import Client, greedy
from ferrule.v1 import cache_pb2, policy_pb2
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.figures import report, seed_of_run
from tests.chaos.library_clients import LibraryStreamAppender, LibraryUnaryAppender
from tests.chaos.raw_clients import Appender, Breaks, Session, run_session
from tests.chaos.server_process import ServerProcess
from tests.chaos.side_by_side import run_side_by_side
from tools.compose.envoy import EnvoyProcess

NAMES = ("ferrule-a", "ferrule-b")
SERVER = ("--executor", "paged-reference", "--kv-memory", "32MiB", "--log-level", "error", "--drain-grace", "0s")
KINDS: tuple[Callable[[str, Breaks], Appender], ...] = (LibraryUnaryAppender, LibraryStreamAppender)
NUM_APPENDS = int(os.environ.get("FERRULE_CHAOS_APPENDS", "10400"))


@dataclass
class Rig:
    """Two servers, and what is cut: the way from the clients to Envoy, and from it to each server.

    Attributes:
        servers: By instance.
        cutters: One before Envoy, one behind it for each server.
    """

    servers: dict[str, ServerProcess]
    cutters: list[CuttingProxy]

    def counts(self) -> dict[str, int]:
        """Return the appends of each server."""
        return {name: server.status().num_decodes for name, server in self.servers.items()}


@contextlib.contextmanager
def rig(folder: Path, seed: int) -> Iterator[Rig]:
    """Run servers, Envoy and what cuts."""
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(ServerProcess(folder / f"{name}.log", *SERVER, "--instance", name))
            for name in NAMES
        }
        behind = [
            stack.enter_context(CuttingProxy(server.port, seed=seed + place, mean_bytes=6000.0))
            for place, server in enumerate(servers.values())
        ]
        ports = {name: int(cutter.target.rpartition(":")[2]) for name, cutter in zip(NAMES, behind, strict=True)}
        envoy = stack.enter_context(EnvoyProcess(folder, ports))
        before = stack.enter_context(CuttingProxy(envoy.port, seed=seed + 2, mean_bytes=6000.0))
        yield Rig(servers, [before, *behind])


def make_sessions(seed: int, count: int) -> list[Session]:
    """Return sessions with random prompts and seeds, the same ones for the same seed."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        sampled = policy_pb2.Sample(temperature=0.9, top_p=0.95, seed=chance.getrandbits(64))
        prompt = tuple(chance.randrange(256) for _ in range(chance.randint(1, 20)))
        made.append(Session(prompt, policy_pb2.LogitsReturnPolicy(sample=sampled)))
    return made


def begin(rig: Rig, sessions: Sequence[Session]) -> None:
    """Make their sequences, on one server after the other in turn."""
    for place, session in enumerate(sessions):
        session.begin(rig.servers[NAMES[place % 2]].stub)


def run_all(target: str, groups: Sequence[Sequence[Session]], length: int) -> Breaks:
    """Run groups side by side, each by a client of its own; returns what broke."""

    def run_group(kind: Callable[[str, Breaks], Appender], sessions: Sequence[Session], breaks: Breaks) -> None:
        with contextlib.closing(kind(target, breaks)) as appender:
            run_session(appender, sessions, length)

    pairs = zip(itertools.cycle(KINDS), groups, strict=False)
    return run_side_by_side([partial(run_group, *pair) for pair in pairs])


def undisturbed(rig: Rig, seed: int, count: int, length: int) -> list[list[int]]:
    """Return what the sessions draw when nothing is between a client and one server."""
    sessions, server = make_sessions(seed, count), rig.servers[NAMES[0]]
    for session in sessions:
        session.begin(server.stub)
    run_all(server.target, [sessions], length)
    return [session.tokens for session in sessions]


def campaign(folder: Path, seed: int, num_clients: int, width: int, length: int) -> dict[str, object]:
    """Run sessions through the cuts, compare with an undisturbed run, and return the figures."""
    with rig(folder, seed) as stack:
        count = num_clients * width
        expected = undisturbed(stack, seed, count, length)
        sessions = make_sessions(seed, count)
        begin(stack, sessions)
        before, started = stack.counts(), time.monotonic()
        groups = [sessions[start : start + width] for start in range(0, count, width)]
        breaks = run_all(stack.cutters[0].target, groups, length)
        seconds = round(time.monotonic() - started, 1)
        applied = {name: count_now - before[name] for name, count_now in stack.counts().items()}
        assert [session.tokens for session in sessions] == expected
        for place, session in enumerate(sessions):
            stub = stack.servers[NAMES[place % 2]].stub
            request = cache_pb2.GetCacheInfoRequest(kv_cache=session.handle, include_token_ids=True)
            assert list(stub.GetCacheInfo(request).info.token_ids) == session.sent
        cuts = [cutter.num_cuts for cutter in stack.cutters]
    assert applied == dict.fromkeys(NAMES, count * length // 2), "an append was doubled, lost, or went astray"
    return {"sent": count * length, "applied": applied, "cuts": cuts, "replayed": breaks.replayed, "seconds": seconds}


def test_cuts_on_both_sides_of_envoy_double_and_lose_nothing(tmp_path: Path) -> None:
    """The campaign below in small, on every run."""
    figures = campaign(tmp_path, seed=1, num_clients=4, width=2, length=40)
    cuts = figures["cuts"]
    assert isinstance(cuts, list)
    assert min(cuts) >= 2, f"hardly anything was cut: {cuts}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_cuts_around_envoy_double_and_lose_nothing(tmp_path: Path) -> None:
    """Ten thousand appends: those applied are those sent, and every token is that of the undisturbed run."""
    seed = seed_of_run()
    figures = campaign(tmp_path, seed, num_clients=8, width=4, length=NUM_APPENDS // 32)
    cuts = figures["cuts"]
    assert isinstance(cuts, list)
    assert sum(cuts) >= 1000, f"too few were cut: {cuts}"
    report("exactly-once through Envoy", executor="paged-reference", clients="library", seed=seed, **figures)


def test_a_creation_that_is_repeated_leaves_at_most_a_sequence_that_expires(tmp_path: Path) -> None:
    """Its request_id is known to one server alone; the next one makes it anew, and the answer is as right."""
    with (
        rig(tmp_path, seed=5) as stack,
        Client(stack.cutters[0].target, timeout=60, max_retries=1000) as client,
    ):
        caches = [client.prefill([number, 2, 3], policy=greedy(), keep_alive=False, ttl=5) for number in range(30)]
        with Client(stack.servers[NAMES[0]].target) as direct:
            for number in (0, 15, 29):
                with direct.prefill([number, 2, 3], policy=greedy()) as plain:
                    repeated = caches[number].last
                    assert plain.last is not None
                    assert repeated is not None
                    assert (plain.last.token, plain.handle.lineage) == (repeated.token, repeated.handle.lineage)
        live = sum(server.status().live_sequences for server in stack.servers.values())
        assert live >= len(caches)
        client.release(caches)
