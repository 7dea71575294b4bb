"""Graphs: launched first, captured one at a time, replayed from then on, never more than their memory."""

from __future__ import annotations

import pytest
import torch

from ferrule_server.executor.cuda.choices import OutputKind
from ferrule_server.executor.cuda.gpu import GpuError, Operation
from ferrule_server.executor.cuda.graphs import GraphKey, GraphStore
from tests.executor.cuda.fake_gpu import FakeGpu

ONE = GraphKey(1, True, OutputKind.GREEDY)
TWO = GraphKey(2, True, OutputKind.GREEDY)
SAMPLED = GraphKey(1, True, OutputKind.SAMPLE)
GRAPH_BYTES = 1 << 20


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
    """Runs what torch does."""
    return FakeGpu(graph_bytes=GRAPH_BYTES)


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
    assert (store.num_wanted, store.captured) == (1, ())
    assert not store.capture_next()
    assert (store.num_wanted, store.captured) == (0, (ONE,))
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


def test_graphs_take_no_more_than_their_memory(store: GraphStore) -> None:
    """What has no room is launched for ever, and nothing is left to be done."""
    for key in (ONE, TWO, SAMPLED):
        store.put(key)
    assert store.capture_next()
    assert not store.capture_next()
    assert store.taken_bytes == 2 * GRAPH_BYTES
    assert (len(store.captured), store.num_wanted) == (2, 0)
    assert not store.capture_next()
    assert sorted(store.put(key) for key in (ONE, TWO, SAMPLED)) == [False, True, True]


def test_a_failed_capture_leaves_its_key_wanted(store: GraphStore, gpu: FakeGpu) -> None:
    """Whoever asked is told; nothing counts as captured."""
    store.put(ONE)
    gpu.fail("capture", GpuError("no"))
    with pytest.raises(GpuError, match="no"):
        store.capture_next()
    assert (store.captured, store.num_wanted, store.taken_bytes) == ((), 1, 0)
    assert not store.put(ONE)


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
    assert (store.captured, store.num_wanted) == ((), 0)
    store.close()
