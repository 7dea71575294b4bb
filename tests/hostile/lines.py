"""What abusive clients leave in the log."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
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


ATTACKS = [
    Attack("killed_clients", "clients that die leave no ERROR and no content in the log", run_killed_clients),
]
