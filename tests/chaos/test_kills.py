"""kill -9 under load: durable handles go on in the next process, and nothing is lost, doubled or different.

Clients made of the stubs alone append, verify, create, fork and generate while the server is killed and started again
on the same journal. They know one rule: what was not answered is sent again, word for word. Afterwards the server must
hold what they sent, and the tokens that it chose must be those of a server that was never killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_status import rpc_status

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, types_pb2
from tests.api.harness import GREEDY
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.figures import report, seed_of_run
from tests.chaos.model_policies import SEEDED, Policy
from tests.chaos.raw_clients import (
    LASTING,
    Appender,
    BatchAppender,
    Breaks,
    Session,
    StreamAppender,
    UnaryAppender,
    VerifySession,
    call_until_answered,
    open_channel,
    run_session,
)
from tests.chaos.raw_generate import Branch, LoopClient, LoopSession
from tests.chaos.server_process import ServerProcess
from tests.chaos.side_by_side import run_side_by_side

REFERENCE = ("--executor", "paged-reference", "--kv-memory", "32MiB", "--log-level", "warning")
BUNDLED = ("--model", "demo", "--kv-memory", "128MiB", "--log-level", "warning")
_PATIENCE_S = 300.0
_PASSING = ("STARTING", "RESTORING", "DURABILITY_LOST", "REQUEST_TIMEOUT")


class KillBreaks(Breaks):
    """Counts what broke, and waits for a server that starts or computes."""

    def note(self, error: grpc.RpcError) -> None:
        """Count a break, or an answer that says to ask again; anything else is raised."""
        if (reason := _reason_of(error)) in _PASSING:
            self.codes[reason] += 1
            time.sleep(0.02)
            return
        super().note(error)


def _reason_of(error: grpc.RpcError) -> str:
    status = rpc_status.from_call(error)
    if status is None:
        return ""
    info = next((detail for detail in status.details if detail.type_url.endswith("ErrorInfo")), None)
    return "" if info is None else next((reason for reason in _PASSING if reason.encode() in info.value), "")


@dataclass
class Killer:
    """Kills a server again and again, at moments that nobody chooses, and starts it on the same journal.

    Attributes:
        seconds: The longest and shortest time that a server lives after it is ready.
        starts_s: How long each start took until the server was ready.
    """

    server: ServerProcess
    num_kills: int
    random: random.Random
    seconds: tuple[float, float] = (0.2, 1.5)
    is_over: threading.Event = field(default_factory=threading.Event)
    starts_s: list[float] = field(default_factory=list)

    def run(self, _breaks: Breaks) -> None:
        """Kill and start ``num_kills`` times."""
        try:
            for _ in range(self.num_kills):
                time.sleep(self.random.uniform(*self.seconds))
                self.server.kill()
                self.server.channel.close()
                started = time.monotonic()
                self.server.start()
                self.starts_s.append(time.monotonic() - started)
        finally:
            self.is_over.set()


call = partial(call_until_answered, attempt_s=3.0, patience_s=_PATIENCE_S)
"""Send a request until a server answers it."""


def _drive(channel: grpc.Channel) -> grpc.Channel:
    """Let a channel connect again as soon as it can, by watching its state.

    Between calls that fail at once only a timer of 5 s drives it otherwise.
    """
    channel.subscribe(lambda _: None)
    return channel


def append_until(
    kind: Callable[[str, Breaks], Appender], target: str, sessions: Sequence[Session], killer: Killer, breaks: Breaks
) -> None:
    """Append to the sessions until the last server lives."""
    appender = kind(target, breaks)
    assert isinstance(appender, UnaryAppender | StreamAppender)
    appender.patience_s = _PATIENCE_S
    _drive(appender._channel)
    try:
        while not killer.is_over.is_set():
            run_session(appender, sessions, 2)
            if any(len(session.tokens) > 300 for session in sessions):  # the context is not to be filled
                killer.is_over.wait()
                run_session(appender, sessions, 1)
    finally:
        appender.close()


@dataclass
class Maker:
    """Creates, forks, truncates and releases with request ids, and remembers what must be there.

    Attributes:
        live: The tokens behind each handle that was kept.
        num_made: Sequences that were created.
    """

    name: str
    random: random.Random
    live: list[tuple[types_pb2.KvCacheHandle, list[int]]] = field(default_factory=list)
    num_made: int = 0

    def run(self, target: str, killer: Killer, breaks: Breaks) -> None:
        """Create until the last server lives."""
        channel = _drive(open_channel(target))
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        for number in itertools.count():
            if killer.is_over.is_set():
                break
            self._round(stub, f"{self.name}-{number}", breaks)
        channel.close()

    def _round(self, stub: executor_pb2_grpc.ModelExecutorServiceStub, name: str, breaks: Breaks) -> None:
        tokens = [self.random.randrange(256) for _ in range(self.random.randrange(1, 40))]
        prompt = executor_pb2.PrefillInput(request_id=name, input_ids=tokens, logits_policy=GREEDY, cache=LASTING)
        trunk = call(stub.Prefill, executor_pb2.PrefillRequest(input=prompt), breaks).output.kv_cache
        fork = cache_pb2.ForkCacheRequest(kv_cache=trunk, count=3, request_id=name + "-fork")
        branches = list(call(stub.ForkCache, fork, breaks).kv_caches)
        length = self.random.randrange(1, len(tokens) + 1)
        cut = cache_pb2.TruncateKvRequest(kv_cache=branches[0], new_length=length)
        branches[0] = call(stub.TruncateKv, cut, breaks).kv_cache
        gone = [trunk, branches.pop()]
        call(stub.ReleaseCache, cache_pb2.ReleaseCacheRequest(kv_caches=gone), breaks)
        self.num_made += 4
        self.live += [(branches[0], tokens[:length]), (branches[1], tokens)]
        while len(self.live) > 20:
            handle, _ = self.live.pop(self.random.randrange(len(self.live)))
            call(stub.ReleaseCache, cache_pb2.ReleaseCacheRequest(kv_caches=[handle]), breaks)


def generate_until(target: str, name: str, killer: Killer, finished: list[LoopSession], breaks: Breaks) -> None:
    """Let the server draw, in loops of one and of two branches, until the last server lives."""
    client = LoopClient(target, breaks)
    client.patience_s = _PATIENCE_S
    stub = executor_pb2_grpc.ModelExecutorServiceStub(_drive(client._channel))
    for number in itertools.count():
        if killer.is_over.is_set():
            client.close()
            return
        branches = [Branch() for _ in range(1 + number % 2)]
        policy = Policy(SEEDED, seed=7 * number)
        session = LoopSession(
            f"{name}-{number}", (3, 1 + number % 50), policy, types_pb2.STALE_POLICY_REWIND, 25, branches
        )
        client.run(session)
        finished.append(session)
        for branch, sent in zip(session.branches, session.sent, strict=True):
            assert branch.handle is not None
            held = call(
                stub.GetCacheInfo,
                cache_pb2.GetCacheInfoRequest(kv_cache=branch.handle, include_token_ids=True),
                breaks,
            )
            assert list(held.info.token_ids)[: len(sent)] == sent
            call(stub.ReleaseCache, cache_pb2.ReleaseCacheRequest(kv_caches=[branch.handle]), breaks)


@dataclass(frozen=True)
class Campaign:
    """How large a campaign is: clients of each kind, and sequences of each appending client."""

    num_kills: int
    num_appenders: int
    width: int
    seconds: tuple[float, float] = (0.2, 1.5)


def run_campaign(folder: Path, arguments: Sequence[str], campaign: Campaign, *, cuts: bool) -> dict[str, object]:
    """Run all clients while the server is killed, compare everything, and return the figures."""
    chance = random.Random(seed_of_run())
    flags = (*arguments, "--durable", str(folder / "journal"))
    with ServerProcess(folder / "log", *flags, port=_quiet_port(chance)) as server:
        server.stop = server.kill  # type: ignore[method-assign, assignment]  # nothing is to be drained
        mean_bytes = 20_000.0 if cuts else None
        with CuttingProxy(server.port, seed=chance.randrange(1 << 30), mean_bytes=mean_bytes) as proxy:
            killer = Killer(server, campaign.num_kills, chance, campaign.seconds)
            sessions, loops, figures = _run_clients(killer, proxy.target, campaign)
        _check_tokens(sessions, loops, arguments, folder)
        return figures


def _quiet_port(chance: random.Random) -> int:
    """Return a free port below those that the system hands out.

    A client that connects again and again to a port where nobody listens may get that very port for its own end, and is
    then connected to itself: it waits 20 s for an answer, and the server cannot listen.
    """
    while True:
        port = chance.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run_clients(
    killer: Killer, target: str, campaign: Campaign
) -> tuple[list[Session], list[LoopSession], dict[str, object]]:
    server = killer.server
    kinds: list[Callable[[str, Breaks], Appender]] = [UnaryAppender, StreamAppender, BatchAppender]
    groups: list[list[Session]] = []
    for number in range(campaign.num_appenders):
        prompts = [(number, place, 7) for place in range(campaign.width)]
        policies = [GREEDY, Policy(SEEDED, seed=number).message()]
        if number % 4 == 3:
            groups.append(
                [VerifySession(prompt, policies[1], chance=random.Random(repr(prompt))) for prompt in prompts]
            )
        else:
            groups.append([Session(prompt, policies[number % 2]) for prompt in prompts])
    for session in itertools.chain(*groups):
        session.begin(server.stub)
    makers = [Maker(f"maker{number}", random.Random(number)) for number in range(2)]
    loops: list[LoopSession] = []
    work: list[Callable[[Breaks], None]] = [killer.run]
    for number, sessions in enumerate(groups):
        kind = UnaryAppender if number % 4 == 3 else kinds[number % 3]
        work.append(partial(append_until, kind, target, sessions, killer))
    work += [partial(maker.run, target, killer) for maker in makers]
    work += [partial(generate_until, target, f"loop{number}", killer, loops) for number in range(2)]
    total = run_side_by_side(work, KillBreaks)
    sessions = list(itertools.chain(*groups))
    _check_held(server, sessions, makers)
    starts = sorted(killer.starts_s)
    figures: dict[str, object] = {
        "kills": campaign.num_kills,
        "handles": len(sessions),
        "appended": sum(len(session.tokens) for session in sessions),
        "created": sum(maker.num_made for maker in makers),
        "generated": sum(len(branch.tokens) for loop in loops for branch in loop.branches),
        "broken_calls": sum(total.codes.values()),
        "asked_again": {reason: total.codes[reason] for reason in _PASSING if total.codes[reason]},
        "replayed": total.replayed,
        "lost": 0,
        "doubled": 0,
        "different": 0,
        "ready_again_s_median": round(starts[len(starts) // 2], 2),
    }
    return sessions, loops, figures


def _check_held(server: ServerProcess, sessions: Sequence[Session], makers: Sequence[Maker]) -> None:
    """The server holds what was sent, and no sequence that nobody knows, except cut off loops."""
    breaks = KillBreaks()
    expected = [(session.handle, session.sent) for session in sessions]
    expected += [known for maker in makers for known in maker.live]
    for handle, tokens in expected:
        request = cache_pb2.GetCacheInfoRequest(kv_cache=handle, include_token_ids=True)
        assert list(call(server.stub.GetCacheInfo, request, breaks).info.token_ids) == tokens
    listed = call(server.stub.ListCaches, cache_pb2.ListCachesRequest(page_size=1000), breaks)
    assert len(listed.caches) == len(expected), "a sequence is there twice, or came back"


def _check_tokens(
    sessions: Sequence[Session], loops: Sequence[LoopSession], arguments: Sequence[str], folder: Path
) -> None:
    """A server that is never killed chooses the same tokens."""
    with ServerProcess(folder / "log-undisturbed", *arguments) as server:
        appender = UnaryAppender(server.target, Breaks())
        for session in sessions:
            again = type(session)(session.prompt, session.policy)
            if isinstance(session, VerifySession):
                assert isinstance(again, VerifySession)
                again.chance = random.Random(repr(session.prompt))
            again.begin(server.stub)
            while len(again.tokens) < len(session.tokens):
                run_session(appender, [again], 1)
            assert again.tokens[: len(session.tokens)] == session.tokens
            server.stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=[again.handle]), timeout=20)
        appender.close()
        client = LoopClient(server.target, Breaks())
        for loop in loops:
            branches = [Branch() for _ in loop.branches]
            again_loop = LoopSession(loop.name, loop.prompt, loop.policy, loop.on_stale, loop.length, branches)
            client.run(again_loop)
            assert [branch.tokens for branch in branches] == [branch.tokens for branch in loop.branches]
            handles = [branch.handle for branch in branches if branch.handle is not None]
            server.stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=handles), timeout=20)
        client.close()


def test_handles_survive_kills_under_load(tmp_path: Path) -> None:
    """A few kills of a server without weights, with connections that are cut as well."""
    figures = run_campaign(tmp_path, REFERENCE, Campaign(3, 4, 3), cuts=True)
    assert figures["appended"]
    assert figures["created"]
    assert figures["generated"]


NUM_KILLS = int(os.environ.get("FERRULE_CHAOS_KILLS", "200"))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("name", "arguments"), [("reference", REFERENCE), ("bundled model on the CPU path", BUNDLED)], ids=["paged", "demo"]
)
def test_a_hundred_handles_survive_hundreds_of_kills(tmp_path: Path, name: str, arguments: tuple[str, ...]) -> None:
    """The campaign of docs/reliability.md."""
    figures = run_campaign(tmp_path, arguments, Campaign(NUM_KILLS, 10, 10), cuts=True)
    report(f"kill -9, {name}", **figures)
