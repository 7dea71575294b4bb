"""The double of a GPU: what runs when, what is refused, what can be made to fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ferrule_server.executor.cuda.gpu import GpuError, GpuLost, Operation
from ferrule_server.kernels.cuda.intrinsics import I32, Address, grid_wait, load_f32, store_f32, thread_id
from ferrule_server.kernels.cuda.spec import KernelSpec
from tests.executor.cuda.fake_gpu import CUBIN, UNREAD, FakeGpu, FakeLaunch
from tools import cuda_simulator as simulator
from tools.cuda_simulator import Memory, ReadOnly

SIZE = 8


def twice(x: Address, y: Address, size: I32, *, FACTOR: float) -> None:  # noqa: N803
    """Put x times a factor into y."""
    grid_wait()
    i = thread_id()
    if i < size:
        store_f32(y + 4 * i, FACTOR * load_f32(x + 4 * i))


SPEC = KernelSpec(twice, (("FACTOR", 2.0),), num_threads=32, shared_bytes=0)


class Bench:
    """Three vectors in a row, staging memory, and a kernel that doubles x into y."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.staging = gpu.allocate_pinned("staging", 4 * SIZE)
        self.x, self.y, self.z = (gpu.allocate(name, (SIZE,), torch.float32) for name in "xyz")
        self.double = self.prepare(self.x, self.y)

    def prepare(self, x: Tensor, y: Tensor, *, starts_early: bool = True) -> FakeLaunch:
        """Return a launch."""
        kernel = self.gpu.load(SPEC, CUBIN)
        return kernel.prepare([self.gpu.address(x), self.gpu.address(y), SIZE], grid=1, starts_early=starts_early)

    def upload(self, value: float) -> None:
        """Stage a value and put its way to x into the stream."""
        self.staging.view(torch.float32).fill_(value)
        self.gpu.upload(self.x.view(torch.uint8), self.staging)

    def increment(self) -> None:
        """Put y + 1 into z, as an operation of torch."""
        torch.add(self.y, 1, out=self.z)


@pytest.fixture
def bench() -> Bench:
    """A GPU that runs kernels."""
    return Bench(FakeGpu(simulate=True))


def test_nothing_runs_before_somebody_waits_and_then_up_to_there_only(bench: Bench) -> None:
    """Kernels, copies and torch's work alike, in the order they were put into the stream."""
    bench.upload(3.0)
    bench.gpu.launch([bench.double])
    first = bench.gpu.record()
    bench.gpu.launch([bench.increment])
    second = bench.gpu.record()
    assert bench.x.sum() + bench.y.sum() + bench.z.sum() == 0
    first.wait()
    assert (bench.y == 6).all()
    assert bench.z.sum() == 0
    second.wait()
    first.wait()
    assert (bench.z == 7).all()
    assert bench.gpu.num_waiting == 0


def test_what_torch_does_inside_current_comes_after_the_stream(bench: Bench) -> None:
    """And what is put into the stream meanwhile runs in its turn."""
    bench.upload(3.0)
    bench.gpu.launch([bench.double])
    with bench.gpu.current():
        bench.x.copy_(bench.y)
        bench.gpu.launch([bench.double])
        bench.z.copy_(bench.y)
    bench.gpu.launch([bench.double])
    assert (bench.z == 12).all()
    assert bench.gpu.num_waiting == 1


def test_a_graph_does_what_was_captured_with_what_the_buffers_hold_then(bench: Bench) -> None:
    """Capturing runs nothing; arguments are those of the capture, contents those of the replay."""
    addend = [1.0]

    def add() -> None:
        torch.add(bench.y, addend[0], out=bench.z)

    operations: list[Operation] = [bench.double, add]
    bench.gpu.launch(operations)
    bench.gpu.synchronize()
    bench.upload(5.0)
    graph = bench.gpu.capture(operations)
    addend[0] = 100.0
    bench.gpu.synchronize()
    assert (bench.z == 1).all()
    for value in (2.0, 3.0):
        bench.upload(value)
        bench.gpu.replay(graph)
        bench.gpu.synchronize()
        assert (bench.z == 2 * value + 1).all()
    assert bench.gpu.calls("replay")[0].kernels == ("twice", "torch")


def _touches_staging(bench: Bench) -> None:
    bench.upload(2.0)
    bench.staging[0] += 1
    bench.gpu.synchronize()


def _touches_results(bench: Bench) -> None:
    target = bench.gpu.allocate_pinned("results", 4 * SIZE)
    bench.gpu.download(target, bench.x.view(torch.uint8))
    assert (target == UNREAD).all()
    target[0] = 0
    bench.gpu.synchronize()


def _writes_weights(bench: Bench) -> None:
    weights = torch.ones(SIZE)
    bench.gpu.adopt("weights", weights, is_mutable=False)
    bench.gpu.launch([bench.prepare(weights, bench.y)])
    bench.gpu.synchronize()
    assert (bench.y == 2).all()
    bench.gpu.launch([bench.prepare(bench.y, weights)])
    bench.gpu.synchronize()


def _adopts(bench: Bench, begin: int, *, is_mutable: bool) -> None:
    weights = torch.ones(64)
    for name in ("embedding", "head"):  # tied weights have two names
        bench.gpu.adopt(name, weights, is_mutable=False)
    assert bench.gpu.memory.name(weights[3:5]) == "embedding"
    bench.gpu.adopt("other", weights[begin:], is_mutable=is_mutable)


def _replays_closed(bench: Bench) -> None:
    bench.gpu.launch([bench.double])
    graph, before = bench.gpu.capture([bench.double]), bench.gpu.free_bytes()
    graph.close()
    graph.close()
    assert bench.gpu.free_bytes() - before == 1 << 20
    bench.gpu.replay(graph)


def _launches(operation: Callable[[Bench], object]) -> Callable[[Bench], object]:
    def launch(bench: Bench) -> None:
        def work() -> None:
            operation(bench)

        bench.gpu.launch([work])

    return launch


def _uploads(change: Callable[[Tensor], Tensor]) -> Callable[[Bench], object]:
    return lambda bench: bench.gpu.upload(bench.x.view(torch.uint8), change(bench.staging))


def _prepares(address: int, grid: int) -> Callable[[Bench], object]:
    return lambda bench: bench.gpu.load(SPEC, CUBIN).prepare([address, 0, 1], grid=grid)


MISUSE: dict[str, tuple[Callable[[Bench], object], type[Exception], str]] = {
    "staging changes before its copy": (_touches_staging, AssertionError, "staging"),
    "a download's target before it has run": (_touches_results, AssertionError, "staging"),
    "copies of other sizes": (_uploads(lambda staging: staging[1:]), AssertionError, "bytes into"),
    "copies of no bytes": (_uploads(lambda staging: staging.view(torch.float32)), AssertionError, "Size"),
    "copies of memory that is not pinned": (_uploads(Tensor.clone), AssertionError, "only pinned memory"),
    "a capture of what was never launched": (lambda it: it.gpu.capture([it.double]), AssertionError, "never launched"),
    "a replay of a closed graph": (_replays_closed, AssertionError, "closed"),
    "an operation allocates": (_launches(lambda it: it.z.copy_(it.y + 1)), AssertionError, "allocates or waits"),
    "an operation waits": (_launches(lambda it: it.z.fill_(float(it.y.sum()))), AssertionError, "allocates or waits"),
    "an operation reads": (_launches(lambda it: it.y[1].item()), AssertionError, "allocates or waits"),
    "an operation calls": (_launches(lambda it: it.gpu.record()), AssertionError, "in an operation of a launch"),
    "a kernel writes weights": (_writes_weights, ReadOnly, "weights"),
    "weights that are mutable": (lambda it: _adopts(it, 0, is_mutable=True), AssertionError, "overlaps embedding"),
    "weights in part": (lambda it: _adopts(it, 16, is_mutable=False), AssertionError, "overlaps embedding"),
    "an unknown tensor": (lambda it: it.gpu.address(torch.zeros(4)), AssertionError, "neither allocated nor adopted"),
    "an unknown address": (_prepares(0x1000, 1), AssertionError, "x = 0x1000"),
    "more than one wave": (_prepares(0, 3), ValueError, "one wave is 2"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_what_a_gpu_would_punish_later_is_an_error(bench: Bench, case: str) -> None:
    """At once, or when the stream comes to it."""
    misuse, error, message = MISUSE[case]
    with pytest.raises(error, match=message):
        misuse(bench)


def test_a_fault_on_the_device_shows_at_the_next_wait_and_stays(bench: Bench) -> None:
    """Nothing behind it runs, and every later call says the same."""
    bench.gpu.fail("run twice", GpuLost("illegal address"))
    bench.gpu.launch([bench.double, bench.increment])
    event = bench.gpu.record()
    assert bench.gpu.names()[-2:] == ["launch", "record"]
    calls: list[Callable[[], object]] = [event.wait, bench.gpu.synchronize, bench.gpu.record, bench.gpu.free_bytes]
    for call in calls:
        with pytest.raises(GpuLost, match="illegal"):
            call()
    assert bench.z.sum() == 0
    assert bench.gpu.num_waiting == 0


def test_memory_is_bounded() -> None:
    """Graphs and adopted tensors count."""
    gpu = FakeGpu(total_bytes=4096, graph_bytes=3072)
    gpu.adopt("weights", torch.zeros(512, dtype=torch.uint8), is_mutable=False)
    assert gpu.free_bytes() == 3584
    with pytest.raises(GpuError, match="3584 are free"):
        gpu.allocate("x", (1024,), torch.float32)
    x = gpu.allocate("x", (256,), torch.float32)

    def operation() -> None:
        x.zero_()

    gpu.launch([operation])
    with pytest.raises(GpuError, match="no room"):
        gpu.capture([operation])


def test_kernels_see_views_at_their_place_and_torch_sees_what_kernels_write(bench: Bench) -> None:
    """Also beyond the first page of an allocation, and in memory that somebody else made."""
    pool = torch.arange(40_000, dtype=torch.float32)
    bench.gpu.adopt("pool", pool, is_mutable=True)
    bench.gpu.launch([bench.prepare(pool[16_380:], pool[32_004:])])
    pool[16_380] = -1.0
    bench.gpu.synchronize()
    assert pool[32_004 : 32_004 + SIZE].tolist() == [-2.0, *(2.0 * value for value in range(16_381, 16_388))]
    assert pool[32_003] == 32_003
    assert pool[32_004 + SIZE] == 32_004 + SIZE


def test_a_part_of_a_tensor_is_aligned_as_it_would_be_on_a_gpu(bench: Bench) -> None:
    """What begins 16 bytes behind a whole tensor is no better aligned than that."""
    joint = torch.zeros(64)
    bench.gpu.adopt("part", joint[4:], is_mutable=False)
    assert bench.gpu.address(joint[4:]) % 256 == 16
    assert bench.gpu.address(bench.x) % 256 == 0


def test_kernels_that_start_early_run_as_one_chain(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy, an event, a graph's border and a launch that starts late part it."""
    chains: list[int] = []
    monkeypatch.setattr(simulator, "run", lambda memory, launches, seed: chains.append(len(launches)))
    late = bench.prepare(bench.y, bench.z, starts_early=False)
    bench.gpu.launch([bench.double, bench.double])
    bench.gpu.launch([bench.double, late, bench.double])
    bench.gpu.record()
    bench.gpu.launch([bench.double])
    bench.gpu.replay(bench.gpu.capture([bench.double, bench.double]))
    bench.gpu.synchronize()
    assert chains == [3, 2, 1, 2]


def test_torch_outside_of_current_is_in_no_order_with_the_stream(bench: Bench) -> None:
    """Where a test watches: reading, writing and adopted memory alike; views and other tensors are free."""
    pool, other = torch.zeros(8), torch.zeros(8)
    bench.gpu.adopt("pool", pool, is_mutable=True)
    functions: list[Callable[[], object]] = [pool[2:].zero_, lambda: other.copy_(bench.x), bench.y.sum, bench.y[0].item]
    for function in functions:
        with bench.gpu.watched(), pytest.raises(AssertionError, match=r"outside of gpu.current"):
            function()
    bench.upload(1.0)
    with bench.gpu.watched():
        bench.x.view(2, 4).t()
        other.add_(1.0)
        bench.gpu.launch([bench.double, bench.increment])
        bench.gpu.record().wait()
        with bench.gpu.current():
            pool.copy_(bench.z)
            bench.gpu.allocate("more", (1,), torch.int32)
    assert (pool == 3).all()


def test_a_shared_array_is_one_memory_for_both_sides() -> None:
    """What the owner writes later is read, what is written is the owner's, and a copy of the array is refused."""
    memory, array = Memory(), np.zeros((3, 40_000), np.int16)
    address = memory.share("array", array, mutable=True, offset=16)
    assert address % (1 << 16) == 16
    array[2, 5] = 7
    assert memory.get("array")[2, 5] == 7
    memory.write(address + 2 * (40_000 + 1), np.array([8, 9], np.int16))
    assert array[1, :4].tolist() == [0, 8, 9, 0]
    with pytest.raises(AssertionError, match="not contiguous"):
        memory.share("columns", array[:, ::2], mutable=True)
    with pytest.raises(AssertionError, match="somebody else"):
        memory.reset("array")
