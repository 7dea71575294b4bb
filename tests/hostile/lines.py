"""What abusive clients leave in the log, and what they keep from the monitoring."""

from __future__ import annotations

import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from google.protobuf.message import Message

from ferrule.v1 import executor_pb2
from tests.chaos.server_process import ServerProcess
from tests.hostile.bodies import GREEDY, Body
from tests.hostile.fairness import Player
from tests.hostile.flooder import Spec
from tests.hostile.servers import serving
from tests.hostile.verdicts import Attack, Campaign, Outcome

MARKED_TOKEN = 886_886
"""An id that no vocabulary here has; it must not appear in a log."""
MAX_REFUSED_SHARE = 0.1
_NUM_SLOW = 90
_SLOW_S = 12.0
_SCRAPE_EVERY_S = 0.2
_CHURN_FATE = "kill"
_NUM_AT_ONCE = 4
_BUSY = Body("/ferrule.v1.ModelExecutorService/KeepAlive", b"\n\0" * ((8 << 20) - 1024))
"""As many empty handles as a message holds: half a second of parsing."""


def run_killed_clients(campaign: Campaign) -> Outcome:
    """Kill processes of clients in the middle of calls that are answered and refused, then read the log."""
    seconds = 10.0 if campaign.is_quick else 25.0
    with serving(campaign, "killed_clients", "--log-level=debug") as server:
        num_killed = _kill_clients(campaign, server, seconds)
        time.sleep(2.0)
        text = server.log.read_text(errors="replace")
    errors = [line for line in text.splitlines() if re.search(r"\bERROR\b", line)]
    num_ids = len(re.findall(rf"\b{MARKED_TOKEN}\b", text))
    figures = {"killed": num_killed, "error_lines": len(errors), "token_ids": num_ids, "first": errors[:2]}
    summary = f"{num_killed} processes killed: {len(errors)} ERROR lines, {num_ids} token ids"
    return Outcome(summary, figures, "0 ERROR lines, 0 token ids", not errors and not num_ids)


def _kill_clients(campaign: Campaign, server: ServerProcess, seconds: float) -> int:
    """Start and kill clients until the time is up, beside one that lives; returns how many processes were killed.

    The one that lives keeps the event loop of the server busy: answers of others come together there with their deaths.
    """
    paths = [campaign.folder / f"killed-{name}.json" for name in ("mixed", "busy")]
    _mixed_spec(server, paths[0])
    Spec(server.target, "", 1, 2, seconds + 30.0).save(paths[1], [_BUSY])
    chance, num_killed, ends_at = random.Random(7), 0, time.monotonic() + seconds
    with ExitStack() as stack:
        busy = Player("flooder", str(paths[1]))
        stack.callback(busy.end)
        busy.wait_until_up()
        busy.go()
        while time.monotonic() < ends_at:
            num_killed += _kill_some(server, paths[0], chance)
    return num_killed


def _kill_some(server: ServerProcess, path: Path, chance: random.Random) -> int:
    """Start a few processes of clients and kill them one after another; returns how many they were."""
    flooders = [Player("flooder", str(path)) for _ in range(_NUM_AT_ONCE)]
    churn = _churn(server, chance.getrandbits(32))
    for flooder in flooders:
        flooder.wait_until_up()
    for flooder in flooders:
        flooder.go()
    for flooder in flooders:
        time.sleep(chance.uniform(0.1, 0.8))
        flooder.end()
    churn.kill()
    churn.communicate()
    return _NUM_AT_ONCE + 1


def _mixed_spec(server: ServerProcess, path: Path) -> None:
    """Write what the flooder sends: prompts that are refused for a token, and prompts that are answered."""
    ids = [1, MARKED_TOKEN]
    message = executor_pb2.PrefillInput(input_ids=ids, logits_policy=GREEDY)
    requests: dict[str, Message] = {
        "Prefill": executor_pb2.PrefillRequest(input=message),
        "BatchPrefill": executor_pb2.BatchPrefillRequest(inputs=[message] * 64),
        "Forward": executor_pb2.ForwardRequest(input_ids=ids, logits_policy=GREEDY),
        "Generate": executor_pb2.GenerateRequest(input_ids=ids, logits_policy=GREEDY, max_tokens=3),
    }
    good = executor_pb2.GenerateRequest(input_ids=[1, 2], logits_policy=GREEDY, max_tokens=3)
    good.cache.ttl.FromSeconds(5)
    pairs = [*requests.items(), ("Generate", good), ("GetStatus", executor_pb2.GetStatusRequest())]
    bodies = [
        Body(f"/ferrule.v1.ModelExecutorService/{method}", request.SerializeToString()) for method, request in pairs
    ]
    Spec(server.target, "", 8, 16, 30.0).save(path, bodies)


def _churn(server: ServerProcess, seed: int) -> subprocess.Popen[bytes]:
    """Start clients that use every call."""
    command = [sys.executable, "-m", "tests.chaos.churn_clients", server.target, _CHURN_FATE, "20", str(seed), "60"]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


class SlowHeads:
    """HTTP clients that send their heads byte by byte and come again when they are cut off."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._crawl, daemon=True) for _ in range(count)]

    def __enter__(self) -> SlowHeads:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(5.0)

    def _crawl(self) -> None:
        while not self._is_over.is_set():
            try:
                self._dawdle()
            except OSError:
                self._is_over.wait(0.05)

    def _dawdle(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=5) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
            while not self._is_over.wait(0.5):
                connection.sendall(b"x")


def run_slow_heads(campaign: Campaign) -> Outcome:
    """Scrape the metrics while 90 clients send slow heads, and renew them."""
    seconds = 6.0 if campaign.is_quick else _SLOW_S
    arguments = ("--executor=paged-reference", "--kv-memory=64MiB", "--metrics-listen=127.0.0.1:0")
    with serving(campaign, "slow_heads", base=arguments) as server:
        port = _metrics_port(server)
        assert _scrape(port) == "200"
        with SlowHeads(port, _NUM_SLOW):
            time.sleep(1.0)
            answers = _scrapes(port, seconds)
        time.sleep(0.5)
    num_failed = sum(answer != "200" for answer in answers)
    counts = {answer: answers.count(answer) for answer in sorted(set(answers))}
    summary = f"{num_failed} of {len(answers)} scrapes failed"
    return Outcome(summary, counts, "at most 10 % fail", num_failed <= MAX_REFUSED_SHARE * len(answers))


def _scrapes(port: int, seconds: float) -> list[str]:
    answers, ends_at = [], time.monotonic() + seconds
    while time.monotonic() < ends_at:
        answers.append(_scrape(port))
        time.sleep(_SCRAPE_EVERY_S)
    return answers


def _scrape(port: int) -> str:
    """Return the HTTP status of a scrape, or what broke it."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            reply.read()
            return str(reply.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return type(error).__name__


def _metrics_port(server: ServerProcess) -> int:
    """Return the port of the metrics, the only other one that the server listens on."""
    ports = {
        each.laddr.port
        for each in server.watched.net_connections("tcp")
        if each.status == "LISTEN" and each.laddr.port != server.port
    }
    assert len(ports) == 1, f"ports besides gRPC's: {ports}"
    return int(ports.pop())


ATTACKS = [
    Attack("killed_clients", "clients that die leave no ERROR and no content in the log", run_killed_clients),
    Attack("slow_heads", "slow HTTP clients do not blind the monitoring", run_slow_heads),
]
