"""Graphs: launched first, captured one at a time, replayed from then on, never more than their memory."""

from __future__ import annotations

import logging

import pytest
import torch

from ferrule_server.executor.cuda import graphs
from ferrule_server.executor.cuda.choices import OutputKind
from ferrule_server.executor.cuda.gpu import GpuError, GpuLost, Graph, Operation
from ferrule_server.executor.cuda.graphs import GraphKey, GraphStore
from tests.executor.cuda.fake_gpu import FakeGpu

ONE = GraphKey(1, OutputKind.GREEDY)
TWO = GraphKey(2, OutputKind.GREEDY)
SAMPLED = GraphKey(1, OutputKind.SAMPLE)
GRAPH_BYTES = graphs.NODE_BYTES
"""Of a graph with one operation."""
GIB = 1 << 30


class Failing:
    """Stands for a capture that fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.num_calls = 0

    def __call__(self, operations: object) -> Graph:
        """Fail."""
        self.num_calls += 1
        raise self.error


def keys(num: int) -> list[GraphKey]:
    """Return different keys."""
    return [GraphKey(n, OutputKind.GREEDY) for n in range(1, num + 1)]


class Counting:
    """Operations that add to a sum of their key, and how often each key was asked for them."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.sums: dict[GraphKey, torch.Tensor] = {}
        self.num_asked: dict[GraphKey, int] = {}

    def __call__(self, key: GraphKey) -> list[Operation]:
        """Return one operation."""
        self.num_asked[key] = self.num_asked.get(key, 0) + 1
        total = self.sums[key] = self.gpu.allocate(str(key), (1,), torch.float32)

        def add() -> None:
            torch.add(total, 1, out=total)

        return [add]

    def sum(self, key: GraphKey) -> float:
        """Return how often the operations of a key have run."""
        self.gpu.synchronize()
        return float(self.sums[key])


@pytest.fixture
def gpu() -> FakeGpu:
    """Runs what torch does; of its memory so much is in use that graphs have what is planned for them."""
    return FakeGpu(graph_bytes=GRAPH_BYTES, total_bytes=GIB)


@pytest.fixture
def counting(gpu: FakeGpu) -> Counting:
    """What the keys do."""
    return Counting(gpu)


@pytest.fixture
def store(gpu: FakeGpu, counting: Counting) -> GraphStore:
    """With room for two graphs."""
    return GraphStore(gpu, counting, memory_bytes=2 * GRAPH_BYTES)


def test_a_key_is_launched_until_it_is_captured(store: GraphStore, counting: Counting) -> None:
    """Its operations are prepared once, a capture runs nothing, and a replay does the same as the launches."""
    assert [store.put(ONE), store.put(ONE)] == [False, False]
    assert (store.num_wanted, tuple(store.captured)) == (1, ())
    assert not store.capture_next()
    assert (store.num_wanted, tuple(store.captured)) == (0, (ONE,))
    assert counting.sum(ONE) == 2
    assert store.put(ONE)
    assert counting.sum(ONE) == 3
    assert counting.num_asked == {ONE: 1}


def test_one_key_is_captured_at_a_time(store: GraphStore, gpu: FakeGpu) -> None:
    """The one that was launched most often comes first; kinds have graphs of their own."""
    for key in (ONE, SAMPLED, SAMPLED):
        store.put(key)
    assert store.capture_next()
    assert list(store.captured) == [SAMPLED]
    assert [store.put(SAMPLED), store.put(ONE)] == [True, False]
    assert not store.capture_next()
    assert list(store.captured) == [SAMPLED, ONE]
    assert len(gpu.calls("capture")) == 2


def test_nothing_is_captured_that_nobody_asked_for(store: GraphStore, gpu: FakeGpu) -> None:
    """Without a step there is nothing to do."""
    assert not store.capture_next()
    assert gpu.log == []


def test_graphs_take_no_more_than_their_memory(store: GraphStore, caplog: pytest.LogCaptureFixture) -> None:
    """What has no room is launched for ever, nothing is left to be done, and one warning says so."""
    for key in (ONE, TWO, SAMPLED):
        store.put(key)
    assert store.capture_next()
    assert not store.capture_next()
    assert store.taken_bytes == 2 * GRAPH_BYTES
    assert (len(store.captured), store.num_wanted) == (2, 0)
    assert not store.capture_next()
    assert sorted(store.put(key) for key in (ONE, TWO, SAMPLED)) == [False, True, True]
    assert all(store.is_settled(key) for key in (ONE, TWO, SAMPLED))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("event=no_room_for_graphs num=2 bytes=131072 planned=131072 free=")


def test_graphs_take_what_nobody_needs(counting: Counting, caplog: pytest.LogCaptureFixture) -> None:
    """Beyond what is planned, as long as a GiB stays free, and four times the plan at most."""
    gpu = counting.gpu = FakeGpu(graph_bytes=GRAPH_BYTES, total_bytes=GIB + 6 * GRAPH_BYTES)
    for planned, expected in ((2, 6), (1, 4)):
        store = GraphStore(gpu, counting, memory_bytes=planned * GRAPH_BYTES)
        for key in keys(12):
            store.put(key)
        while store.capture_next():
            pass
        assert abs(len(store.captured) - expected) <= 1, planned
        store.close()
        counting.gpu = gpu = FakeGpu(graph_bytes=GRAPH_BYTES)
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 2


def test_nothing_is_captured_where_memory_is_short(counting: Counting) -> None:
    """Although it was planned: somebody else has it. Once it is free again, captures go on."""
    gpu = counting.gpu = FakeGpu(graph_bytes=GRAPH_BYTES, total_bytes=GIB)
    taken = gpu.allocate("somebody else's", (GIB - (100 << 20),), torch.uint8)
    store = GraphStore(gpu, counting, memory_bytes=1 << 30)
    store.put(ONE)
    assert not store.capture_next()
    assert (gpu.calls("capture"), store.is_settled(ONE)) == ([], True)
    gpu.memory.num_bytes -= taken.nbytes
    for _ in range(graphs._LOOK_AGAIN_AFTER - 1):
        assert (store.is_settled(ONE), store.num_wanted) == (True, 0)
        store.put(ONE)
    assert store.num_wanted == 1
    assert not store.capture_next()
    assert tuple(store.captured) == (ONE,)


@pytest.mark.parametrize("error", [GpuError("out of memory"), RuntimeError("Offset increment outside graph capture")])
def test_a_key_that_cannot_be_captured_is_launched_for_ever(
    store: GraphStore, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """It is not tried again, and said once; others are. Nobody waits for its graph."""
    store.put(ONE)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "capture", Failing(error))
        assert not store.capture_next()
    assert (tuple(store.captured), store.num_wanted, store.taken_bytes, store.is_settled(ONE)) == ((), 0, 0, True)
    assert not store.capture_next()
    assert [store.put(ONE), store.put(TWO)] == [False, False]
    assert not store.is_settled(TWO)
    store.capture_next()
    assert tuple(store.captured) == (TWO,)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.exc_info and record.exc_info[1] for record in warnings] == [error]


def test_captures_that_fail_in_a_row_are_the_last(
    store: GraphStore, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three of them: then steps are launched, and nobody waits for a graph, of a key that was never put either."""
    monkeypatch.setattr(gpu, "capture", failing := Failing(GpuError("no")))
    for key in keys(6):
        assert store.is_settled(key) is (key.num_rows > 3)
        assert not store.put(key)
        store.capture_next()
    assert (failing.num_calls, store.num_wanted) == (3, 0)
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 3


def test_failures_now_and_then_end_nothing(store: GraphStore, gpu: FakeGpu) -> None:
    """A capture that succeeds in between shows that captures work."""
    for key in keys(5):
        store.put(key)
        if key.num_rows != 3:
            gpu.fail("capture", GpuError("no"))
        store.capture_next()
    assert tuple(store.captured) == (keys(3)[-1],)
    assert not store.is_settled(SAMPLED)


@pytest.mark.parametrize("call", ["capture", "synchronize"])
def test_a_capture_that_takes_the_device_along_is_told(store: GraphStore, gpu: FakeGpu, call: str) -> None:
    """A lost device, or a stream that does nothing any more."""
    store.put(ONE)
    gpu.fail("capture", GpuLost("gone") if call == "capture" else GpuError("no"))
    if call == "synchronize":
        gpu.fail("synchronize", GpuError("gone"))
    with pytest.raises(GpuError, match="gone"):
        store.capture_next()


def test_what_cannot_be_prepared_is_an_error_of_the_gpu(gpu: FakeGpu) -> None:
    """A kernel that takes other arguments, say: no request is to blame."""

    def operations_of(key: GraphKey) -> list[Operation]:
        raise ValueError(f"{key.kind.name} takes 3 arguments, was given 4")

    store = GraphStore(gpu, operations_of, memory_bytes=GRAPH_BYTES)
    with pytest.raises(GpuError, match="1 rows cannot be launched: GREEDY takes 3 arguments"):
        store.put(ONE)
    assert store.num_wanted == 0


def test_closing_gives_every_graph_back(store: GraphStore, gpu: FakeGpu) -> None:
    """Also where one refuses; afterwards nothing is captured or wanted."""
    for key in (ONE, TWO):
        store.put(key)
        store.capture_next()
    store.put(SAMPLED)
    gpu.fail("close graph", GpuError("busy"))
    with pytest.raises(GpuError, match="busy"):
        store.close()
    assert len(gpu.calls("close graph")) == 2
    assert (tuple(store.captured), store.num_wanted) == ((), 0)
    store.close()
