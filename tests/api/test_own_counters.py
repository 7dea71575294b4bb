"""What a principal without the role admin can see of another one: nothing but the load at the moment.

Each test asks as two principals, and walks every numeric field of the messages, so that a new field is seen as soon as
it is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, types_pb2
from tests.api.harness import GREEDY, RunningServer, refused, token_access

LOAD = {
    "status.state": "READY or BUSY: whether anything runs at the moment",
    "status.queue_depth": "load: how many jobs wait, not how long they are",
    "status.current_batch_size": "load: how many sequences a step has, not how many tokens",
    "status.active_streams": "load: how many Generates and Forwards run",
    "status.free_blocks": "a client must know whether its prompt fits; whole blocks, and StreamDecode says it too",
    "status.memory.host_resident_bytes": "memory of the process, in pages, which allocators keep",
    "status.memory.host_peak_bytes": "memory of the process, in pages, which allocators keep",
    "metrics.empty_blocks": "as free_blocks: empty and cached blocks add up to it",
    "metrics.cached_blocks": "as free_blocks: what was used before and was released, in whole blocks",
    "metrics.used_blocks": "as free_blocks: what the others do not have of total_blocks",
}
"""Fields in which one principal may see what another one does, and why."""

TIME = re.compile(r"^list\.caches\[\d+\]\.(lease|create_time)\.")
"""Fields of one's own sequences that change as time passes."""

HIDDEN = {
    *("last_step_time", "num_steps", "debug"),
    *("shared_blocks", "tombstones", "num_prefix_evictions", "num_exhausted"),
}
"""Counters that are kept for all principals together: 0 without the role."""


class Caller:
    """One principal's calls."""

    def __init__(self, server: RunningServer, token: str) -> None:
        self.stub = executor_pb2_grpc.ModelExecutorServiceStub(server.channel)
        self.metadata = (("authorization", f"Bearer {token}"),)

    def call(self, method: str, request: Message) -> Any:
        """Call a method."""
        return getattr(self.stub, method)(request, metadata=self.metadata, timeout=20)

    def prefill(self, input_ids: tuple[int, ...]) -> types_pb2.KvCacheHandle:
        """Prefill and return the handle."""
        message = executor_pb2.PrefillInput(input_ids=input_ids, logits_policy=GREEDY)
        handle: types_pb2.KvCacheHandle = self.call(
            "Prefill", executor_pb2.PrefillRequest(input=message)
        ).output.kv_cache
        return handle

    def decode(self, handle: types_pb2.KvCacheHandle, token: int) -> types_pb2.KvCacheHandle:
        """Decode and return the handle."""
        message = executor_pb2.DecodeInput(input_ids=[token], kv_cache=handle, logits_policy=GREEDY)
        newest: types_pb2.KvCacheHandle = self.call("Decode", executor_pb2.DecodeRequest(input=message)).output.kv_cache
        return newest

    def work(self) -> None:
        """Do a little of everything that is counted."""
        handle = self.prefill(tuple(range(1, 40)))
        newest = self.decode(handle, 7)
        self.decode(handle, 7)  # a replay
        with refused():
            self.decode(handle, 8)  # stale
        (branch,) = self.call("ForkCache", cache_pb2.ForkCacheRequest(kv_cache=newest, count=1)).kv_caches
        branch = self.decode(branch, 9)
        self.call("TruncateKv", cache_pb2.TruncateKvRequest(kv_cache=newest, new_length=20))
        request = executor_pb2.GenerateRequest(kv_cache=branch, input_ids=[3], max_tokens=3)
        list(self.call("Generate", request))
        handle = self.prefill((5,) * 20)
        draft = executor_pb2.VerifyInput(kv_cache=handle, input_ids=[1], draft_ids=[2, 3], logits_policy=GREEDY)
        self.call("ForwardVerify", executor_pb2.ForwardVerifyRequest(input=draft))
        self.call("ReleaseCache", cache_pb2.ReleaseCacheRequest(kv_caches=[handle]))
        self.prefill(tuple(range(1, 40)))
        self.call("RegisterTokenMask", cache_pb2.RegisterTokenMaskRequest(masks=[bytes([1] * 32)]))
        with refused():
            self.prefill((1,) * 10**5)

    def view(self) -> dict[str, object]:
        """Return every field of all that is told about the server, by path."""
        messages = {
            "status": self.call("GetStatus", executor_pb2.GetStatusRequest()).status,
            "metrics": self.call("GetCacheMetrics", cache_pb2.GetCacheMetricsRequest()).metrics,
            "capabilities": self.call("GetCapabilities", executor_pb2.GetCapabilitiesRequest()).capabilities,
            "info": self.call("GetModelInfo", executor_pb2.GetModelInfoRequest()).info,
            "list": self.call("ListCaches", cache_pb2.ListCachesRequest()),
        }
        return {path: value for name, message in messages.items() for path, value in fields_of(name, message)}


def fields_of(path: str, message: Message) -> Iterator[tuple[str, object]]:
    """Yield each field of a message and of those within, set or not."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            yield f"{path}.{field.name}", list(value) if field.is_repeated else value
        elif field.message_type.GetOptions().map_entry:
            yield f"{path}.{field.name}", dict(value)
        elif field.is_repeated:
            yield f"{path}.{field.name}.count", len(value)
            for i, each in enumerate(value):
                yield from fields_of(f"{path}.{field.name}[{i}]", each)
        else:
            yield from fields_of(f"{path}.{field.name}", value)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    """A server for alice, bob, and ops who has the role."""
    access = token_access(tmp_path, {"ali": "alice", "bob": "bob", "ops": "ops admin"})
    with RunningServer(access=access) as server:
        yield server


def test_what_one_does_changes_nothing_that_another_sees_but_the_load(server: RunningServer) -> None:
    """Every field of GetStatus, GetCacheMetrics, GetCapabilities, GetModelInfo and ListCaches."""
    alice, bob = Caller(server, "ali"), Caller(server, "bob")
    bob.work()
    before = bob.view()
    for _ in range(3):
        alice.work()
    after = bob.view()
    assert len(after) > 100
    changed = {path for path in after if after[path] != before[path]}
    assert {path for path in changed if not TIME.search(path)} <= set(LOAD)
    assert set(LOAD) <= set(after), "a field is allowed that is not there"


def test_a_principal_sees_its_own_counters(server: RunningServer) -> None:
    """The same that an administrator sees of a server with nobody else."""
    alice, bob, ops = (Caller(server, token) for token in ("ali", "bob", "ops"))
    alice.work()
    everything, own = ops.view(), alice.view()
    for path, value in own.items():
        if path.startswith(("status.", "metrics.")) and path.split(".")[1] not in HIDDEN:
            assert value == everything[path] or path in LOAD, path
    assert own["status.num_prefill_tokens"]
    assert own["metrics.num_prefix_lookup_tokens"]
    assert own["metrics.num_prefix_hit_tokens"]
    counters = ("num_prefills", "num_decodes", "num_generates", "num_errors", "num_verifies", "live_sequences")
    for counter in (*counters, "avg_prefill_ns", "avg_decode_ns", "num_decode_tokens", "num_draft_tokens"):
        assert own[f"status.{counter}"], counter
        assert not bob.view()[f"status.{counter}"], counter
    for counter in (
        "num_created",
        "num_forks",
        "num_truncates",
        "num_released",
        "num_replays",
        "num_stale",
        "token_masks",
    ):
        assert own[f"metrics.{counter}"], counter
        assert not bob.view()[f"metrics.{counter}"], counter


def test_counters_of_all_together_need_the_role(server: RunningServer) -> None:
    """Without it they are 0, for those who caused them too."""
    alice, ops = Caller(server, "ali"), Caller(server, "ops")
    alice.work()
    everything, own = ops.view(), alice.view()
    assert everything["status.num_steps"]
    assert everything["metrics.shared_blocks"]
    names = {path: path.split(".")[1] for path in own if path.split(".")[0] in ("status", "metrics")}
    hidden = {path for path, name in names.items() if name in HIDDEN}
    assert {names[path] for path in hidden} == HIDDEN
    assert not any(own[path] for path in hidden)
    alice_and_ops = everything["status.num_prefill_tokens"]
    ops.work()
    assert ops.view()["status.num_prefill_tokens"] > alice_and_ops  # type: ignore[operator]
