"""Room for tokens to come, through the wire: ReserveKvSlots, and CacheOptions.reserve_length of a Prefill."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import grpc
import pytest

from ferrule.v1 import cache_pb2, executor_pb2, types_pb2
from ferrule_server.api.security.auth import OpenAccess
from ferrule_server.executor.reference import PagedReferenceExecutor
from ferrule_server.quotas import QuotaLimits
from tests.api.harness import RunningServer, decode_item, refused, wait_until
from tests.fakes import FakeExecutor

Code = grpc.StatusCode
Handle = types_pb2.KvCacheHandle


def reserve(
    server: RunningServer, *wanted: tuple[Handle, int] | tuple[Handle, int, int]
) -> cache_pb2.KvSlotReservation:
    """Reserve room and return the evidence."""
    requests = []
    for handle, target_length, *admission in wanted:
        request = cache_pb2.KvSlotRequest(kv_cache=handle, target_length=target_length)
        if admission:
            request.admission_target_length = admission[0]
        requests.append(request)
    response = server.stub.ReserveKvSlots(cache_pb2.ReserveKvSlotsRequest(requests=requests), timeout=20)
    return response.reservation


def new_blocks(reservation: cache_pb2.KvSlotReservation) -> list[int]:
    """Return what each sequence got."""
    return [each.new_blocks for each in reservation.allocations]


def with_room(length: int) -> executor_pb2.CacheOptions:
    """Return the options of a Prefill with room."""
    return executor_pb2.CacheOptions(reserve_length=length)


def fill(server: RunningServer, tokens: Sequence[int] = (1,)) -> list[Handle]:
    """Take every free block and return who has them."""
    return [server.prefill(tokens).kv_cache for _ in range(server.free_blocks)]


@pytest.fixture
def small() -> RunningServer:
    """A server whose pool is soon full, and not of shared prompts; not started yet."""
    return RunningServer(PagedReferenceExecutor(kv_memory_bytes=1 << 18), has_prefix_cache=False)


def test_the_reply_is_the_evidence(server: RunningServer) -> None:
    """The pool around it, and per sequence what it held, holds and took; asking again takes nothing."""
    handle, other = server.prefill((1, 2, 3)).kv_cache, server.prefill((4,)).kv_cache
    size, free = server.engine.info.block_size, server.free_blocks
    wanted = (handle, 3 * size), (other, 2 * size)
    first, again = reserve(server, *wanted), reserve(server, *wanted)
    assert (first.block_size, first.total_blocks) == (size, server.engine.info.num_blocks - 1)
    assert (first.free_blocks_before, first.free_blocks_after) == (free, free - 3)
    assert [(each.blocks_before, each.blocks_after) for each in first.allocations] == [(1, 3), (1, 2)]
    assert (new_blocks(first), new_blocks(again), again.free_blocks_before) == ([2, 1], [0, 0], free - 3)
    assert reserve(server).free_blocks_before == free - 3


def test_what_is_reserved_can_be_seen(server: RunningServer) -> None:
    """Blocks and bytes of a sequence count it, the blocks of its tokens are listed alone; release gives back all."""
    handle = server.prefill((1, 2, 3)).kv_cache
    size, plain = server.engine.info.block_size, server.info(handle)
    reserve(server, (handle, 3 * size))
    info = server.info(handle, include_blocks=True)
    assert (plain.summary.reserved_length, info.summary.reserved_length) == (0, 3 * size)
    assert (info.summary.num_blocks, len(info.block_ids), info.summary.kv_bytes) == (3, 1, 3 * plain.summary.kv_bytes)
    listed = server.stub.ListCaches(cache_pb2.ListCachesRequest()).caches
    assert [each.num_blocks for each in listed] == [3]
    (branch,) = server.fork(handle)
    assert server.info(branch).summary.reserved_length == 0
    assert server.release(handle).freed_blocks == 3  # its two, and the spare for the copy the fork made necessary


def test_appends_up_to_the_reservation_succeed_in_a_full_pool(small: RunningServer) -> None:
    """Which one without it does not; nor can what was reserved be taken by others."""
    with small as server:
        size = server.engine.info.block_size
        handle = server.prefill((1,) * size).kv_cache
        reserve(server, (handle, 3 * size))
        others = fill(server, (1,) * size)
        with refused() as refusals:
            server.decode(others[0], 5)
        tip = server.decode(handle, *(7,) * (2 * size)).kv_cache
        with refused() as beyond:
            server.decode(tip, 5)
        assert [each[0].reason for each in (refusals, beyond)] == ["KV_BLOCKS_EXHAUSTED"] * 2
        rewound = server.decode(handle, 8, on_stale=types_pb2.STALE_POLICY_REWIND).kv_cache
        assert server.truncate(rewound, 1).freed_blocks == 0
        assert server.info(rewound).summary.num_blocks == 3


def test_a_prompt_can_come_with_room(small: RunningServer) -> None:
    """Taken with the prompt's own or not at all, and it cannot run out afterwards."""
    with small as server:
        size, free = server.engine.info.block_size, server.free_blocks
        with refused() as refusals:
            server.prefill((1, 2), cache=with_room((free + 1) * size))
        assert (refusals[0].code, refusals[0].reason) == (Code.OUT_OF_RANGE, "EXCEEDS_POOL")
        handle = server.prefill((1, 2), cache=with_room(2 * size)).kv_cache
        assert (server.free_blocks, server.info(handle).summary.reserved_length) == (free - 2, 2 * size)
        fill(server)
        assert server.decode(handle, *(7,) * (2 * size - 2)).kv_cache.length == 2 * size


def test_a_repeated_prompt_asks_for_the_same_room(server: RunningServer) -> None:
    """The room is part of what a request_id made."""
    size = server.engine.info.block_size
    first = server.prefill(request_id="one", cache=with_room(2 * size))
    assert server.prefill(request_id="one", cache=with_room(2 * size)).kv_cache == first.kv_cache
    with refused() as refusals:
        server.prefill(request_id="one", cache=with_room(3 * size))
    assert refusals[0].reason == "REQUEST_ID_REUSED"


def test_it_is_all_or_nothing(server: RunningServer) -> None:
    """Whatever one of them is refused for, none gets anything."""
    handle = server.prefill((1, 2, 3)).kv_cache
    gone = server.prefill((4,)).kv_cache
    server.release(gone)
    free, size = server.free_blocks, server.engine.info.block_size
    context = server.engine.info.model.max_context
    unset = cache_pb2.KvSlotRequest(target_length=1)
    for bad, reason in (
        (cache_pb2.KvSlotRequest(kv_cache=gone, target_length=1), "HANDLE_UNKNOWN"),
        (cache_pb2.KvSlotRequest(kv_cache=handle, target_length=context + 1), "CONTEXT_EXCEEDED"),
        (cache_pb2.KvSlotRequest(kv_cache=handle, admission_target_length=context + 1), "CONTEXT_EXCEEDED"),
        (unset, "INVALID_FIELD"),
    ):
        good = cache_pb2.KvSlotRequest(kv_cache=handle, target_length=2 * size)
        with refused() as refusals:
            server.stub.ReserveKvSlots(cache_pb2.ReserveKvSlotsRequest(requests=[good, bad]), timeout=20)
        assert refusals[0].reason == reason
    assert refusals[0].fields == ("requests[1].kv_cache",)
    assert (server.free_blocks, server.info(handle).summary.num_blocks) == (free, 1)


def test_an_admission_target_only_has_to_fit(small: RunningServer) -> None:
    """It is refused where it does not, and takes nothing where it does."""
    with small as server:
        handle, size = server.prefill((1, 2, 3)).kv_cache, server.engine.info.block_size
        free = server.free_blocks
        assert new_blocks(reserve(server, (handle, 0, (free + 1) * size))) == [0]
        server.prefill((4,))
        with refused() as refusals:
            reserve(server, (handle, 2 * size, (free + 1) * size))
        assert (refusals[0].code, refusals[0].reason) == (Code.RESOURCE_EXHAUSTED, "KV_BLOCKS_EXHAUSTED")
        assert refusals[0].metadata["needed_blocks"] == str(free)
        assert server.info(handle).summary.num_blocks == 1


def test_reserved_room_counts_in_the_quota() -> None:
    """And is refused by it, before it is taken; a need beyond the quota itself is told so."""
    executor = PagedReferenceExecutor(kv_memory_bytes=1 << 20)
    size = executor.info.block_size
    access = OpenAccess(is_admin=True, quotas=QuotaLimits(handles=2, kv_tokens=4 * size))
    with RunningServer(executor, access=access) as server:
        handle, other = server.prefill((1,)).kv_cache, server.prefill((1,)).kv_cache
        reserve(server, (handle, 3 * size))
        with refused() as used:
            reserve(server, (other, 2 * size))
        with refused() as never:
            reserve(server, (other, 5 * size))
        with refused() as handles:
            server.fork(handle)
        assert [each[0].reason for each in (used, never, handles)] == ["QUOTA_KV_TOKENS"] * 2 + ["QUOTA_HANDLES"]
        assert [each[0].code for each in (used, never, handles)] == [Code.RESOURCE_EXHAUSTED] * 3
        assert used[0].metadata["needed"] == str(size)
        assert int(never[0].metadata["needed"]) > int(never[0].metadata["limit"])
        assert never[0].retry_after_s is None


def test_room_can_be_reserved_while_an_append_is_in_flight() -> None:
    """It does not wait for the step, and the append goes on with what it has."""
    executor = FakeExecutor()
    with RunningServer(executor) as server:
        handle, size = server.prefill((1, 2, 3)).kv_cache, executor.info.block_size
        other = server.prefill((1, 2, 3)).kv_cache
        executor.gate = threading.Event()
        stream = server.open_stream()
        stream.send(decode_item(handle, 7))
        assert executor.is_waiting.wait(10)
        reserving = server.stub.ReserveKvSlots.future(
            cache_pb2.ReserveKvSlotsRequest(
                requests=[cache_pb2.KvSlotRequest(kv_cache=each, target_length=2 * size) for each in (handle, other)]
            )
        )
        executor.gate.set()
        assert new_blocks(reserving.result(20).reservation) == [1, 1]
        assert stream.rest()[0].results[0].decode.kv_cache.length == 4
        wait_until(lambda: server.info(handle).summary.num_blocks == 2)
