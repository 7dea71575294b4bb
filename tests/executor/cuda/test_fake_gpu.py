"""The double of a GPU: what runs when, what is refused, what can be made to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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


def strided(x: Address, x_stride: Address, *, FACTOR: float) -> None:  # noqa: N803
    """Take a number of bytes that needs 64 bits."""


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


def test_staging_that_changes_before_its_copy_is_an_error(bench: Bench) -> None:
    """A GPU would read some of the new bytes, sometimes; afterwards it may change."""
    bench.upload(1.0)
    bench.gpu.record().wait()
    bench.upload(2.0)
    bench.staging[0] += 1
    with pytest.raises(AssertionError, match="staging"):
        bench.gpu.synchronize()


def test_a_download_is_of_no_use_before_it_has_run_and_left_alone_until_then(bench: Bench) -> None:
    """Its target holds nonsense; who writes there loses either the writing or the download."""
    bench.upload(1.0)
    target = bench.gpu.allocate_pinned("results", 4 * SIZE)
    bench.gpu.download(target, bench.x.view(torch.uint8))
    assert (target == UNREAD).all()
    bench.gpu.synchronize()
    assert (target.view(torch.float32) == 1).all()
    bench.gpu.download(target[:4], bench.x.view(torch.uint8)[:4])
    target[0] = 0
    with pytest.raises(AssertionError, match="staging"):
        bench.gpu.synchronize()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda staging: staging[1:], id="sizes differ"),
        pytest.param(lambda staging: staging.view(torch.float32), id="not bytes"),
        pytest.param(lambda staging: staging.clone(), id="not pinned"),
    ],
)
def test_copies_are_between_bytes_of_one_size_and_pinned(bench: Bench, change: Callable[[Tensor], Tensor]) -> None:
    """The driver copies what it is told to, or waits."""
    with pytest.raises(AssertionError):
        bench.gpu.upload(bench.x.view(torch.uint8), change(bench.staging))


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


def test_only_what_was_launched_is_captured(bench: Bench) -> None:
    """A first launch may load or allocate, which a capture cannot."""
    bench.gpu.launch([bench.double])
    with pytest.raises(AssertionError, match="never launched"):
        bench.gpu.capture([bench.double, bench.increment])
    bench.gpu.launch([bench.increment])
    assert bench.gpu.capture([bench.double, bench.increment]) in bench.gpu.graphs


def test_a_closed_graph_gives_its_memory_back_and_is_not_replayed(bench: Bench) -> None:
    """Closing twice is closing once."""
    bench.gpu.launch([bench.double])
    before = bench.gpu.free_bytes()
    graph = bench.gpu.capture([bench.double])
    assert before - bench.gpu.free_bytes() == 1 << 20
    graph.close()
    graph.close()
    assert bench.gpu.free_bytes() == before
    with pytest.raises(AssertionError, match="closed"):
        bench.gpu.replay(graph)


def _allocates(bench: Bench) -> None:
    bench.z.copy_(bench.y + 1)


def _waits(bench: Bench) -> None:
    bench.z.fill_(float(bench.y.sum()))


def _reads(bench: Bench) -> None:
    bench.z[0] = bench.y[1].item()


def _calls(bench: Bench) -> None:
    bench.gpu.record()


@pytest.mark.parametrize("function", [_allocates, _waits, _reads, _calls])
def test_an_operation_neither_allocates_nor_waits_nor_calls_the_gpu(
    bench: Bench, function: Callable[[Bench], None]
) -> None:
    """None of that can be captured."""
    with pytest.raises(AssertionError, match=r"allocates or waits|in an operation of a launch"):
        bench.gpu.launch([lambda: function(bench)])
    bench.gpu.launch([bench.increment])


def test_an_operation_may_make_views_and_write_in_place(bench: Bench) -> None:
    """Views, copies, out= and in-place functions are what there is."""

    def operation() -> None:
        torch.mm(bench.y.view(2, 4), bench.x.view(2, 4).t(), out=bench.z[:4].view(2, 2)).add_(1.0)
        bench.z[4:].copy_(bench.y[:4])

    bench.upload(1.0)
    bench.gpu.launch([bench.double, operation])
    bench.gpu.synchronize()
    assert bench.z.tolist() == [9.0] * 4 + [2.0] * 4


def test_calls_fail_when_they_are_told_to(bench: Bench) -> None:
    """The nth from now, so many times, and only that call."""
    bench.gpu.fail("upload", GpuError("full"), nth=2, times=2)
    bench.upload(1.0)
    bench.gpu.synchronize()
    for _ in range(2):
        with pytest.raises(GpuError, match="full"):
            bench.upload(2.0)
    bench.gpu.synchronize()
    bench.upload(3.0)
    bench.gpu.synchronize()
    assert (bench.x == 3).all()


@pytest.mark.parametrize("call", ["launch", "launch twice", "launch torch", "capture", "capture twice", "record"])
def test_a_failed_call_leaves_the_rest_in_order(bench: Bench, call: str) -> None:
    """What came before it still runs, and the next may succeed."""
    operations: list[Operation] = [bench.double, bench.increment]
    bench.gpu.launch(operations)
    bench.gpu.fail(call, GpuError("refused"))
    bench.upload(1.0)
    with pytest.raises(GpuError, match="refused"):  # noqa: PT012  (whichever of them it is)
        bench.gpu.launch(operations)
        bench.gpu.capture(operations)
        bench.gpu.record()
    bench.gpu.launch(operations)
    bench.gpu.synchronize()
    assert (bench.z == 3).all()


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


def test_loading_preparing_and_allocating_fail_by_name(bench: Bench) -> None:
    """A kernel that does not load, memory that is not there."""
    gpu = bench.gpu
    for call in ("load twice", "prepare twice"):
        gpu.fail(call, GpuError(call))
        with pytest.raises(GpuError, match=call):
            bench.prepare(bench.x, bench.y)
    gpu.fail("allocate more", GpuError("no"))
    gpu.allocate("other", (1,), torch.int32)
    with pytest.raises(GpuError, match="no"):
        gpu.allocate("more", (1,), torch.int32)


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


def test_memory_adopted_as_immutable_is_not_written(bench: Bench) -> None:
    """Kernels may read weights before the kernel in front has ended: nobody writes them."""
    weights = torch.ones(SIZE)
    bench.gpu.adopt("weights", weights, is_mutable=False)
    bench.gpu.launch([bench.prepare(weights, bench.y)])
    bench.gpu.synchronize()
    assert (bench.y == 2).all()
    bench.gpu.launch([bench.prepare(bench.y, weights)])
    with pytest.raises(ReadOnly, match="weights"):
        bench.gpu.synchronize()


def test_a_tensor_is_adopted_twice_and_others_must_not_overlap(bench: Bench) -> None:
    """Tied weights have two names; anything else of that kind is a mistake."""
    weights = torch.ones(64)
    bench.gpu.adopt("embedding", weights, is_mutable=False)
    bench.gpu.adopt("head", weights, is_mutable=False)
    for other, is_mutable in ((weights, True), (weights[16:], False)):
        with pytest.raises(AssertionError, match="overlaps embedding"):
            bench.gpu.adopt("other", other, is_mutable=is_mutable)
    assert bench.gpu.memory.name(weights[3:5]) == "embedding"


def test_addresses_are_of_known_memory_only(bench: Bench) -> None:
    """An unknown tensor has none, a kernel takes no other, and 0 stands for none."""
    with pytest.raises(AssertionError, match="neither allocated nor adopted"):
        bench.gpu.address(torch.zeros(4))
    kernel = bench.gpu.load(SPEC, CUBIN)
    with pytest.raises(AssertionError, match="x = 0x1000"):
        kernel.prepare([0x1000, 0, 1], grid=1)
    with pytest.raises(ValueError, match="one wave is 2"):
        kernel.prepare([0, 0, 1], grid=3)
    bench.gpu.load(replace(SPEC, kernel=strided), CUBIN).prepare([0, 0x1000], grid=1)


def test_a_part_of_a_tensor_is_aligned_as_it_would_be_on_a_gpu(bench: Bench) -> None:
    """What begins 16 bytes behind a whole tensor is no better aligned than that."""
    joint = torch.zeros(64)
    bench.gpu.adopt("part", joint[4:], is_mutable=False)
    assert bench.gpu.address(joint[4:]) % 256 == 16
    assert bench.gpu.address(bench.x) % 256 == 0


def test_stand_ins_act_for_kernels_in_their_place() -> None:
    """Without the simulator, too: so a runner's logic is tested with any vocabulary."""
    seen: list[float] = []
    gpu = FakeGpu(stand_ins={"twice": lambda values: seen.append(gpu.at(values["x"], (1,), torch.float32).item())})
    bench = Bench(gpu)
    bench.upload(4.0)
    gpu.launch([bench.double])
    bench.gpu.record().wait()
    bench.upload(5.0)
    gpu.launch([bench.double])
    gpu.synchronize()
    assert seen == [4.0, 5.0]
    gpu.stand_ins.clear()
    gpu.launch([bench.double])
    gpu.synchronize()
    assert bench.y.sum() == 0


def test_a_stand_in_finds_what_the_kernels_before_it_wrote(bench: Bench) -> None:
    """In the midst of a chain, too."""
    other = bench.gpu.load(replace(SPEC, kernel=strided), CUBIN).prepare([bench.gpu.address(bench.y), 0], grid=1)
    bench.gpu.stand_ins["strided"] = lambda values: bench.z.copy_(bench.gpu.at(values["x"], (SIZE,), torch.float32))
    bench.upload(2.0)
    bench.gpu.launch([bench.double, other])
    bench.gpu.synchronize()
    assert (bench.z == 4).all()


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
