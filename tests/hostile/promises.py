"""Promises that a client can break without load: request ids that come again, and counters that disclose too much."""

from __future__ import annotations

import random
from collections.abc import Callable

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ferrule.v1 import cache_pb2, executor_pb2
from tests.chaos.server_process import ServerProcess
from tests.hostile.bodies import GREEDY
from tests.hostile.servers import VICTIMS, bearer, prefill, serving, token_file
from tests.hostile.verdicts import Attack, Campaign, Outcome

PROMPT_LENGTHS = (211, 333, 457, 333)
_ALICE, _BOB = (bearer(name) for name in VICTIMS)
_BASE = ("--executor=paged-reference", "--kv-memory=64MiB")


def _generate(server: ServerProcess, request_id: str, n: int, max_tokens: int = 3) -> None:
    request = executor_pb2.GenerateRequest(
        request_id=request_id, input_ids=[1, 2, 3], logits_policy=GREEDY, max_tokens=max_tokens, n=n
    )
    for _ in server.stub.Generate(request, metadata=_ALICE, timeout=20):
        pass


def _prefill(server: ServerProcess, request_id: str) -> None:
    message = executor_pb2.PrefillInput(request_id=request_id, input_ids=[1, 2, 3], logits_policy=GREEDY)
    server.stub.Prefill(executor_pb2.PrefillRequest(input=message), metadata=_ALICE, timeout=20)


_SAME_CREATION = "max_tokens=3, then 5"
"""The same sequence: a loop that was cut may go on for longer."""
REUSES: dict[str, tuple[Callable[[ServerProcess, str], None], Callable[[ServerProcess, str], None]]] = {
    "n=1, then n=2": (lambda server, name: _generate(server, name, 1), lambda server, name: _generate(server, name, 2)),
    "n=2, then n=1": (lambda server, name: _generate(server, name, 2), lambda server, name: _generate(server, name, 1)),
    "n=2, then n=3": (lambda server, name: _generate(server, name, 2), lambda server, name: _generate(server, name, 3)),
    _SAME_CREATION: (
        lambda server, name: _generate(server, name, 1),
        lambda server, name: _generate(server, name, 1, 5),
    ),
    "Generate, then Prefill": (lambda server, name: _generate(server, name, 1), _prefill),
    "Prefill, then Generate": (_prefill, lambda server, name: _generate(server, name, 1)),
}
"""A first creation, and another one with the same request id."""


def run_request_ids(campaign: Campaign) -> Outcome:
    """Repeat request ids with other content: nothing may be made, and each is REQUEST_ID_REUSED."""
    figures: dict[str, str] = {}
    num_made = 0
    with serving(campaign, "request_ids", f"--token-file={token_file(campaign.folder)}", base=_BASE) as server:
        for index, (name, (first, second)) in enumerate(REUSES.items()):
            first(server, f"id-{index}")
            before = _num_live(server)
            answer = _answer(lambda second=second, index=index: second(server, f"id-{index}"))  # type: ignore[misc]
            num_made += _num_live(server) - before
            figures[name] = f"{answer}, {_num_live(server) - before} made"
    others = [answer for name, answer in figures.items() if name != _SAME_CREATION]
    num_refused = sum(answer.startswith("REQUEST_ID_REUSED") for answer in others)
    is_met = num_made == 0 and num_refused == len(others)
    summary = f"{num_made} sequences made, {num_refused} of {len(others)} refused"
    return Outcome(summary, figures, "0 made, other content is REQUEST_ID_REUSED", is_met)


def _num_live(server: ServerProcess) -> int:
    request = cache_pb2.ListCachesRequest(page_size=1000)
    return len(server.stub.ListCaches(request, metadata=_ALICE, timeout=20).caches)


def _answer(call: Callable[[], None]) -> str:
    """Return the reason that a call is refused with, or OK."""
    try:
        call()
    except grpc.RpcError as error:
        return reason_of(error)
    return "OK"


def reason_of(error: grpc.RpcError) -> str:
    """Return the reason of an error of the server, or its status."""
    status = rpc_status.from_call(error)
    if status is None or not status.details:
        return str(error.code().name)
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    return str(info.reason or error.code().name)


def run_counters(campaign: Campaign) -> Outcome:
    """Let a principal without a role watch all counters while another one sends prompts of known lengths."""
    disclosed = []
    with serving(campaign, "counters", f"--token-file={token_file(campaign.folder)}", base=_BASE) as server:
        counters = _counters(server)
        for length in PROMPT_LENGTHS:
            rng = random.Random(length)
            prefill(server, VICTIMS[0], [rng.randrange(256) for _ in range(length)])
            after = _counters(server)
            disclosed += [f"{name}: {length}" for name in after if after[name] - counters.get(name, 0) == length]
            counters = after
    summary = f"{len(disclosed)} counters give the exact length of one of {len(PROMPT_LENGTHS)} prompts"
    return Outcome(summary, {"disclosed": disclosed}, "none", not disclosed)


def _counters(server: ServerProcess) -> dict[str, float]:
    """Return every number that GetStatus and GetCacheMetrics give to a principal without a role."""
    found: dict[str, float] = {}
    status = server.stub.GetStatus(executor_pb2.GetStatusRequest(), metadata=_BOB, timeout=20).status
    messages: list[Message] = [status]
    try:
        request = cache_pb2.GetCacheMetricsRequest()
        messages.append(server.stub.GetCacheMetrics(request, metadata=_BOB, timeout=20).metrics)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
            raise
    for message in messages:
        for field, value in message.ListFields():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[f"{type(message).__name__}.{field.name}"] = value
    return found


ATTACKS = [
    Attack("request_ids", "a repeated creation never makes anything", run_request_ids),
    Attack("counters", "counters do not give away what other principals send", run_counters),
]
