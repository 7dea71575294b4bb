"""A real server, killed: forks answer in the pool that was enough before; and one whose journal is removed says so."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import grpc
import pytest

from ferrule.v1 import cache_pb2, executor_pb2, types_pb2
from tests.api.harness import GREEDY
from tests.chaos.raw_clients import LASTING
from tests.chaos.server_process import ServerProcess, wait_for
from tests.chaos.test_kills import KillBreaks, _reason_of, call

BLOCK_SIZE = 16
NUM_FORKS = 8
ARGUMENTS = ("--executor", "paged-reference", "--kv-memory", "512KiB", "--log-level", "warning")


def append(server: ServerProcess, handle: types_pb2.KvCacheHandle, token: int) -> types_pb2.KvCacheHandle:
    """Append a token; ask again while the server restores."""
    one = executor_pb2.DecodeRequest(
        input=executor_pb2.DecodeInput(kv_cache=handle, input_ids=[token], logits_policy=GREEDY)
    )
    return call(server.stub.Decode, one, KillBreaks()).output.kv_cache  # type: ignore[no-any-return]


def append_all(
    server: ServerProcess, handles: list[types_pb2.KvCacheHandle], token: int
) -> list[types_pb2.KvCacheHandle]:
    """Append to all at once, each from a thread of its own."""
    after: dict[int, types_pb2.KvCacheHandle] = {}

    def one(index: int) -> None:
        after[index] = append(server, handles[index], token)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(handles))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return [after[index] for index in range(len(handles))]


@pytest.mark.parametrize("kind", ["not published", pytest.param("cache off", marks=pytest.mark.slow)])
def test_all_forks_answer_in_a_pool_that_is_60_percent_full(tmp_path: Path, kind: str) -> None:
    """Of eight forks seven answered KV_BLOCKS_EXHAUSTED, since each held a trunk of its own."""
    flags: tuple[str, ...] = (*ARGUMENTS, "--durable", str(tmp_path / "journal"))
    flags += ("--prefix-cache", "off") if kind == "cache off" else ()
    with ServerProcess(tmp_path / "log", *flags) as server:
        request = executor_pb2.GetCapabilitiesRequest()
        num_blocks = server.stub.GetCapabilities(request, timeout=20).capabilities.total_blocks
        num_trunk = int(0.6 * num_blocks) - NUM_FORKS
        assert num_trunk > num_blocks / 2 - NUM_FORKS, "two trunks do not fit"
        options = executor_pb2.CacheOptions(ttl=LASTING.ttl, skip_prefix_publish=kind == "not published")
        tokens = [index * index % 251 for index in range(num_trunk * BLOCK_SIZE)]
        prompt = executor_pb2.PrefillInput(input_ids=tokens, logits_policy=GREEDY, cache=options)
        trunk = call(server.stub.Prefill, executor_pb2.PrefillRequest(input=prompt), KillBreaks()).output.kv_cache
        fork = cache_pb2.ForkCacheRequest(kv_cache=trunk, count=NUM_FORKS)
        handles = append_all(server, list(call(server.stub.ForkCache, fork, KillBreaks()).kv_caches), 3)
        gone = cache_pb2.ReleaseCacheRequest(kv_caches=[trunk])
        call(server.stub.ReleaseCache, gone, KillBreaks())
        assert server.used_blocks == num_trunk + NUM_FORKS
        server.kill()
        server.channel.close()
        server.start()
        after = append_all(server, handles, 4)
        assert [each.length for each in after] == [len(tokens) + 2] * NUM_FORKS
        assert server.used_blocks == num_trunk + NUM_FORKS


@pytest.mark.parametrize("gone", ["directory", pytest.param("segment", marks=pytest.mark.slow)])
def test_a_journal_that_is_removed_is_noticed_within_a_second(tmp_path: Path, gone: str) -> None:
    """Appends went on as confirmed. With the directory, it stays lost; without a segment all is written to another."""
    journal = tmp_path / "journal"
    with ServerProcess(tmp_path / "log", *ARGUMENTS, "--durable", str(journal)) as server:
        prompt = executor_pb2.PrefillInput(input_ids=[1, 2, 3], logits_policy=GREEDY, cache=LASTING)
        request = executor_pb2.PrefillRequest(input=prompt)
        handle = server.stub.Prefill(request, timeout=20).output.kv_cache
        if gone == "directory":
            shutil.rmtree(journal)
        else:
            for each in journal.glob("*.segment"):
                each.unlink()
        wait_for("the loss", lambda: "the journal is lost" in server.log.read_text(), 5.0)
        if gone == "segment":
            assert append(server, handle, 4).length == 4
            server.kill()
            server.channel.close()
            server.start()
            assert append(server, handle, 4).length == 4
        else:
            one = executor_pb2.DecodeInput(kv_cache=handle, input_ids=[4], logits_policy=GREEDY)
            with pytest.raises(grpc.RpcError) as caught:
                server.stub.Decode(executor_pb2.DecodeRequest(input=one), timeout=20)
            assert _reason_of(caught.value) == "DURABILITY_LOST"
            server.status()  # which asks for the size of the journal too
