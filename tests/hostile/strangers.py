"""What strangers cost before they show credentials: memory, health checks, decodes, and the next honest call."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import grpc

from ferrule_server.config import CONNECTIONS_OF_STRANGERS
from tests.chaos.load import Measured, end_load, percentile, start_load
from tests.chaos.server_process import ServerProcess
from tests.hostile.control import Sink
from tests.hostile.fairness import MIN_SHARE, Comparison, Measurement, Player, comparison_of
from tests.hostile.servers import VICTIMS, MemoryWatch, prefill, serving, token_file
from tests.hostile.verdicts import Attack, Campaign, Outcome

MAX_GROWTH_MIB = 64.0
MAX_HEALTH_MS = 100.0
MAX_BYTES = 2 << 30
BAR = "RSS + < 64 MiB, Health p99 <= 100 ms on old and new connections, then Prefill is served"
PROMISE = "a client without credentials costs next to nothing"
_KILL_AT_BYTES = 1536 << 20
_LEAD_S = 2.0
_HONEST_CONNECTIONS = 4
"""Left to the two probers and the honest caller: a server that has no connection left cannot answer anybody."""
_PREFILL = "/ferrule.v1.ModelExecutorService/Prefill"
_HEALTH = "/grpc.health.v1.Health/Check"
_KINDS = {
    "prefill": ("fill", _PREFILL),
    "health": ("fill", _HEALTH),
    "no_message": ("headers", _PREFILL),
    "half_headers": ("half", _PREFILL),
    "again": ("headers", _PREFILL, "--again"),
    "again_unary": ("unary", _PREFILL, "--again"),
    "again_token": ("headers", _PREFILL, "--again", "--token=wrong"),
    "again_connected": ("headers", _PREFILL, "--again", "--reconnect"),
}
"""What each attack sends and to which method. ``again`` opens a stream again as soon as it is refused, and
``again_connected`` also a connection as soon as it is ended."""
_DECODE_S = 12.0
"""Length of a phase beside decodes: strangers are held for 10 s, so that those who connect again do so in it."""
_MAX_DELAY_MS = 25.0
DECODE_BAR = f"{BAR}; decodes: p99 <= unattacked + 25 ms, >= 45 %"


def run_strangers(campaign: Campaign, name: str) -> Outcome:
    """Attack a server with a token file while two probers ask for its health."""
    seconds = 4.0 if campaign.is_quick else 8.0
    access = (f"--token-file={token_file(campaign.folder)}", f"--max-connections={CONNECTIONS_OF_STRANGERS}")
    with serving(campaign, f"strangers.{name}", *access) as server:
        prefill(server, VICTIMS[0], [1, 2, 3])
        probers = {kind: _prober(server, kind, seconds + _LEAD_S) for kind in ("health", "strange_health")}
        time.sleep(_LEAD_S)
        with MemoryWatch(server.watched, _KILL_AT_BYTES, lambda: _end(probers)) as watch:
            done = _attack(server, name, seconds)
        if watch.was_killed:
            return _killed(watch)
        measured = {kind: end_load(kind, prober) for kind, prober in probers.items()}
        figures = {**done, "rss_growth_mib": watch.grown_mib, **_health(measured), "honest_call": _honest_call(server)}
    found = _outcome(figures)
    return _with_decodes(found, _beside_decodes(campaign, name)) if name.startswith("again") else found


def _beside_decodes(campaign: Campaign, name: str) -> Comparison:
    """Attack another server while two principals decode over connections that were open before."""
    access = (f"--token-file={token_file(campaign.folder)}", f"--max-connections={CONNECTIONS_OF_STRANGERS}")
    with ExitStack() as stack:
        server = stack.enter_context(serving(campaign, f"strangers.{name}", *access))
        control = Player("control", str(stack.enter_context(Sink()).port))
        attacker = Player("stranger", *_arguments(server, name, _DECODE_S), "--wait")
        for player in (control, attacker):
            stack.callback(player.end)
            player.wait_until_up()
        measurement = Measurement(server, _DECODE_S, [attacker], [control])
        victims = measurement.run(2, begins_attacked=False)
    return comparison_of((CONNECTIONS_OF_STRANGERS - _HONEST_CONNECTIONS, 2), measurement, victims)


def _with_decodes(found: Outcome, decodes: Comparison) -> Outcome:
    """Return an outcome together with what the decodes met."""
    late_ms = decodes.corrected_p99_ms - decodes.unattacked.p99_ms
    summary = (
        f"{found.summary}; decodes p99 {decodes.unattacked.p99_ms} -> {decodes.attacked.p99_ms} ms "
        f"(control {'none' if decodes.control is None else decodes.control.p99_ms}), "
        f"{100 * decodes.corrected_share:.0f} %"
    )
    is_met = found.is_met and late_ms <= _MAX_DELAY_MS and decodes.corrected_share >= MIN_SHARE
    return Outcome(summary, {**found.figures, "decodes": decodes.as_figures()}, DECODE_BAR, is_met)


def _prober(server: ServerProcess, kind: str, seconds: float) -> subprocess.Popen[str]:
    return start_load(server.target, {"kind": kind, "seconds": seconds})


def _end(probers: dict[str, subprocess.Popen[str]]) -> None:
    for prober in probers.values():
        prober.kill()
        prober.communicate()


def _attack(server: ServerProcess, name: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.hostile.stranger", *_arguments(server, name, seconds)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return dict(json.loads(run.stdout.splitlines()[-1]))


def _arguments(server: ServerProcess, name: str, seconds: float) -> list[str]:
    """Return the command line of the attacker."""
    kind, path, *more = _KINDS[name]
    connections = CONNECTIONS_OF_STRANGERS - _HONEST_CONNECTIONS
    return [
        *(kind, f"--port={server.port}", f"--path={path}", *more),
        *(f"--seconds={seconds}", f"--max-bytes={MAX_BYTES}", f"--connections={connections}"),
    ]


def _health(measured: dict[str, Measured]) -> dict[str, Any]:
    old, new = measured["health"], measured["strange_health"]
    return {
        "health_p99_ms": _p99(old.latencies_ms),
        "health_new_connection_p99_ms": _p99(new.latencies_ms + new.refused_ms),
        "health_new_connection_refused": dict(new.counts),
        "health_checks": (len(old.latencies_ms), len(new.latencies_ms)),
    }


def _p99(latencies_ms: Sequence[float]) -> float:
    return round(percentile(list(latencies_ms), 0.99), 1) if latencies_ms else float("inf")


def _honest_call(server: ServerProcess) -> str:
    """Return the status of a Prefill with a token after the attack."""
    try:
        prefill(server, VICTIMS[0], [4, 5, 6], timeout_s=10.0)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def _killed(watch: MemoryWatch) -> Outcome:
    summary = f"RSS + {watch.grown_mib} MiB; the server was killed to spare the machine"
    return Outcome(summary, {"rss_growth_mib": watch.grown_mib, "was_killed": True}, BAR, False)


def _outcome(figures: dict[str, Any]) -> Outcome:
    refused = sum(figures["health_new_connection_refused"].values())
    is_met = (
        figures["rss_growth_mib"] < MAX_GROWTH_MIB
        and figures["health_p99_ms"] <= MAX_HEALTH_MS
        and figures["health_new_connection_p99_ms"] <= MAX_HEALTH_MS
        and not refused
        and figures["honest_call"] == "OK"
    )
    summary = (
        f"{figures['connections']} x {figures['streams_allowed']} streams, RSS + {figures['rss_growth_mib']} MiB, "
        f"Health p99 {figures['health_p99_ms']} ms, new connections {figures['health_new_connection_p99_ms']} ms "
        f"({refused} refused), then {figures['honest_call']}"
    )
    return Outcome(summary, figures, BAR, is_met)


ATTACKS = [
    Attack(f"strangers.{name}", PROMISE, lambda campaign, name=name: run_strangers(campaign, name))  # type: ignore[misc]
    for name in _KINDS
]
