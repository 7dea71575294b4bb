"""The real GPU's calls of torch and of the driver, against doubles of both that check signatures."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ferrule_server.executor.cuda.driver import Device, DriverError, Launch
from ferrule_server.executor.cuda.gpu import Gpu, GpuError, GpuLost
from ferrule_server.executor.cuda.torch_gpu import TorchGpu, translated
from ferrule_server.kernels.cuda import embed
from ferrule_server.kernels.cuda.spec import Cubin, parameters
from tests.executor.cuda.recorded_cuda import POOL, STREAM, RecordedCuda
from tools.gpu.gpu import CELLS
from tools.gpu.recorded_driver import LIBRARY, RecordedDriver

SPEC = embed.spec()
CUBIN = Cubin("embed", b"code")
CPU = torch.device("cpu")
BYTES = torch.zeros(16, dtype=torch.uint8)
BIND = ["set_device", "cuCtxSetCurrent"]


class Doubles:
    """A GPU whose torch and driver are recorded, in one list of names; the driver's begin with ``cu``."""

    def __init__(self) -> None:
        self.cuda = RecordedCuda()
        kinds = [CELLS[kind] for _, kind in parameters(SPEC.kernel)]
        self.driver = RecordedDriver(kinds=kinds, calls=self.cuda.calls)
        self.gpu = TorchGpu(Device.open(0, self.driver), CPU, self.cuda)

    def launch(self) -> Launch:
        """Return a launch of the one kernel."""
        arguments = [1 if kind == "Address" else 2 for _, kind in parameters(SPEC.kernel)]
        launch = self.gpu.load(SPEC, CUBIN).prepare(arguments, grid=2)
        assert isinstance(launch, Launch)
        return launch

    def since(self, start: int) -> list[str]:
        """Return the names of the calls behind the first ``start``."""
        return self.cuda.names()[start:]


@pytest.fixture
def doubles() -> Doubles:
    """What the tests begin with."""
    return Doubles()


def _accelerator_error(code: int) -> Exception:
    error = torch.AcceleratorError("CUDA error: something\nCompile with TORCH_USE_CUDA_DSA")
    setattr(error, "error_code", code)  # noqa: B010  (as torch does; it is not declared)
    return error


def test_it_is_a_gpu_and_says_what_it_is(doubles: Doubles) -> None:
    """Driver and torch agree on the device; sizes are bytes."""
    gpu: Gpu = doubles.gpu
    info = gpu.info
    assert (info.name, info.capability, info.cuda_version, info.num_sms) == ("Recorded GPU", (9, 0), (13, 0), 132)
    assert (info.shared_bytes_per_sm, info.shared_bytes_per_cta) == (228 << 10, 227 << 10)
    assert gpu.free_bytes() == 60 << 30
    assert gpu.torch_device == CPU


def test_a_step_goes_into_one_stream_in_order(doubles: Doubles) -> None:
    """Copies, kernels and torch's work, the event behind them."""
    gpu, launch, streams = doubles.gpu, doubles.launch(), list[int]()
    host, device = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    start = len(doubles.cuda.calls)
    gpu.upload(device, host)
    gpu.launch([launch, lambda: streams.append(doubles.cuda.stream_now), launch])
    gpu.download(host[:32], device[:32])
    gpu.record().wait()
    expected = ["cuMemcpyHtoDAsync", "stream", "cuLaunchKernelEx", "cuLaunchKernelEx", "cuMemcpyDtoHAsync"]
    assert doubles.since(start) == [*expected, "Event.record", "Event.synchronize"]
    (upload,), (download,) = doubles.driver.named("cuMemcpyHtoDAsync"), doubles.driver.named("cuMemcpyDtoHAsync")
    assert [*upload[:3], int(upload[3])] == [device.data_ptr(), host.data_ptr(), 64, STREAM]
    assert [*download[:3], int(download[3])] == [host.data_ptr(), device.data_ptr(), 32, STREAM]
    assert [seen.stream for seen in doubles.driver.launches] == [STREAM, STREAM]
    assert streams == [STREAM]
    assert [call[1][1].cuda_stream for call in doubles.cuda.calls if call[0] == "Event.record"] == [STREAM]


def test_copies_are_of_one_size(doubles: Doubles) -> None:
    """The driver would go on into what lies behind."""
    small, large = torch.zeros(4, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    for copy in (doubles.gpu.upload, doubles.gpu.download):
        for pair in ((small, large), (large[::2], small)):
            with pytest.raises(ValueError, match="do not fit"):
                copy(*pair)


def test_a_capture_is_that_of_its_thread_and_all_share_a_pool(doubles: Doubles) -> None:
    """Other threads may allocate meanwhile; no finaliser runs in the midst of it."""
    launch, collecting = doubles.launch(), list[bool]()
    start = len(doubles.cuda.calls)
    graph = doubles.gpu.capture([launch, lambda: collecting.append(gc.isenabled())])
    doubles.gpu.replay(graph)
    graph.close()
    capture = ["CUDAGraph.capture_begin", "cuLaunchKernelEx", "CUDAGraph.capture_end"]
    assert doubles.since(start) == ["stream", *capture, "stream", "CUDAGraph.replay", "CUDAGraph.reset"]
    assert doubles.cuda.calls[start + 1][1][1:] == (POOL, "thread_local")
    assert collecting == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("where", ["operation", "driver", "end", "begin"])
def test_a_failed_capture_is_ended_and_the_gpu_goes_on(
    doubles: Doubles, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails: neither the stream nor torch's allocator must stay in a capture.

    Torch ends the allocator's part only behind an end that succeeds, and the allocator keeps a pointer to the graph.
    """
    launch, error = doubles.launch(), _accelerator_error(900)
    ended = list[tuple[int | None, tuple[int, int]]]()
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda index, pool: ended.append((index, pool)))

    def operation() -> None:
        if where == "operation":
            raise error

    if where == "driver":
        doubles.driver.failures["cuLaunchKernelEx"] = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
        doubles.cuda.failures["CUDAGraph.capture_end"] = error
    elif where in {"end", "begin"}:
        doubles.cuda.failures[f"CUDAGraph.capture_{where}"] = error
    with pytest.raises(GpuError) as caught:
        doubles.gpu.capture([operation, launch])
    assert not isinstance(caught.value, GpuLost)
    assert ("CAPTURE_INVALIDATED" in str(caught.value)) == (where == "driver")
    assert not doubles.cuda.is_capturing
    assert ended == ([] if where == "operation" else [(CPU.index, POOL)])
    error.__traceback__ = None
    del caught  # whose frames have the graph
    doubles.cuda.calls.clear()
    gc.collect()
    assert [graph() is None for graph in doubles.cuda.graphs] == [where == "operation"]
    assert gc.isenabled()
    assert doubles.cuda.stream_now != STREAM
    doubles.driver.failures.clear()
    doubles.gpu.launch([launch])
    assert len(doubles.driver.launches) == (2 if where == "end" else 1)


def test_current_is_entered_once_however_deep(doubles: Doubles) -> None:
    """Steps enter it around everything; it is left when the outermost is, errors or not."""
    start = len(doubles.cuda.calls)

    def fail_inside() -> None:
        with doubles.gpu.current():
            doubles.gpu.launch([])
            with doubles.gpu.current():
                assert doubles.cuda.stream_now == STREAM
            assert doubles.cuda.stream_now == STREAM
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert doubles.cuda.stream_now != STREAM
    assert doubles.since(start) == ["stream"]
    with doubles.gpu.current():
        assert doubles.cuda.stream_now == STREAM


def test_memory_comes_from_torch_within_the_stream(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its allocator knows in which stream it is written and freed; page-locked memory is torch's too."""
    made: list[tuple[Any, ...]] = []
    zeros = torch.zeros

    def recorded(shape: Any, *, dtype: torch.dtype, device: object = None, pin_memory: bool = False) -> Tensor:
        made.append((shape, dtype, device, pin_memory, doubles.cuda.stream_now == STREAM))
        return zeros(shape, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", recorded)
    x = doubles.gpu.allocate("x", (2, 3), torch.bfloat16)
    doubles.gpu.allocate_pinned("staging", 100)
    assert made == [((2, 3), torch.bfloat16, CPU, False, True), (100, torch.uint8, None, True, False)]
    assert doubles.gpu.address(x[0]) == x.data_ptr()
    with pytest.raises(ValueError, match="multiple of 16"):
        doubles.gpu.address(x[1])


def test_memory_that_is_not_there_is_named(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says for what; a lost context stays one."""

    def fails(*args: object, **kwargs: object) -> None:
        raise errors.pop(0)

    errors: list[Exception] = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        _accelerator_error(2),
    ]
    monkeypatch.setattr(torch, "zeros", fails)
    with pytest.raises(GpuError, match="no memory for logits: CUDA out of memory"):
        doubles.gpu.allocate("logits", (1,), torch.float32)
    with pytest.raises(GpuError, match=r"no page-locked memory for staging: CUDA error: something$"):
        doubles.gpu.allocate_pinned("staging", 1)
    errors.append(_accelerator_error(700))
    with pytest.raises(GpuLost):
        doubles.gpu.allocate("logits", (1,), torch.float32)


def test_adopted_memory_is_on_the_device_and_what_was_written_there_comes_first(doubles: Doubles) -> None:
    """Weights are copied in another stream; kernels would read what was there before."""
    start = len(doubles.cuda.calls)
    doubles.gpu.adopt("weights", torch.zeros(4), is_mutable=False)
    assert doubles.since(start) == ["current_stream", "Stream.wait_stream"]
    elsewhere = torch.zeros(4, device="meta")
    for call in (
        lambda: doubles.gpu.adopt("weights", elsewhere, is_mutable=True),
        lambda: doubles.gpu.address(elsewhere),
    ):
        with pytest.raises(ValueError, match="lies on meta"):
            call()


def test_memory_that_kernels_cannot_read_is_left_to_torch(doubles: Doubles) -> None:
    """They load 16 bytes at a time; elsewhere the device would fault and the context be lost."""
    weights = torch.zeros(64, dtype=torch.bfloat16)
    doubles.gpu.adopt("aligned", weights[8:], is_mutable=False)
    with pytest.raises(GpuError, match=r"qkv0 begins 2 bytes behind a multiple of 16"):
        doubles.gpu.adopt("qkv0", weights[1:], is_mutable=False)


@pytest.mark.parametrize(("fit", "num_warnings"), [(1, 0), (0, 1)])
def test_a_kernel_that_does_not_fit_as_often_as_planned_is_said(
    doubles: Doubles, caplog: pytest.LogCaptureFixture, fit: int, num_warnings: int
) -> None:
    """Its grids are more than one wave then, which is slow and nothing else tells."""
    doubles.driver.max_ctas_per_sm = SPEC.ctas_per_sm - 1 + fit
    doubles.gpu.load(SPEC, CUBIN)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == num_warnings
    assert all(SPEC.name in message for message in messages)


def test_a_thread_that_comes_to_it_makes_the_context_its_own(doubles: Doubles) -> None:
    """Once for each: torch's device and the driver's context are per thread, and stay."""
    start = len(doubles.cuda.calls)
    _in_a_thread(lambda: (doubles.gpu.record(), doubles.gpu.record()))
    assert doubles.since(start) == [*BIND, "Event.record", "Event.record"]
    doubles.gpu.synchronize()
    assert doubles.since(start)[4:] == ["cuStreamSynchronize"]


def test_a_thread_that_has_the_id_of_one_that_ended_is_another(doubles: Doubles) -> None:
    """As at a start: one thread opens the GPU and ends, and the engine's often gets its id, but never its context."""
    idents = list[int]()

    def record() -> None:
        idents.append(threading.get_ident())
        doubles.gpu.record()

    while len(idents) == len(set(idents)):
        assert len(idents) < 100, "no id came again"
        start = len(doubles.cuda.calls)
        _in_a_thread(record)
        assert doubles.since(start) == [*BIND, "Event.record"]


def test_current_is_that_of_its_thread(doubles: Doubles) -> None:
    """Torch's stream is; a thread inside must not make another one believe that it is inside too."""
    start = len(doubles.cuda.calls)

    def enter() -> None:
        with doubles.gpu.current():
            pass

    with doubles.gpu.current():
        _in_a_thread(enter)
    assert doubles.since(start) == ["stream", *BIND, "stream"]


def _in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_closing_unloads_what_was_loaded(doubles: Doubles) -> None:
    """And waits for the stream before."""
    doubles.launch()
    start = len(doubles.cuda.calls)
    doubles.gpu.close()
    assert doubles.since(start) == ["cuStreamSynchronize", "cuLibraryUnload", "cuDevicePrimaryCtxRelease"]
    assert doubles.driver.named("cuLibraryUnload") == [(LIBRARY,)]


def test_closing_a_lost_gpu_is_quiet(doubles: Doubles) -> None:
    """The end of the process gives everything back."""
    doubles.launch()
    doubles.driver.failures["cuStreamSynchronize"] = "CUDA_ERROR_ILLEGAL_ADDRESS"
    doubles.gpu.close()


CALLS: dict[str, tuple[str, Callable[[Doubles], object]]] = {
    "upload": ("cuMemcpyHtoDAsync", lambda it: it.gpu.upload(BYTES, BYTES)),
    "download": ("cuMemcpyDtoHAsync", lambda it: it.gpu.download(BYTES, BYTES)),
    "launch": ("cuLaunchKernelEx", lambda it: it.gpu.launch([it.launch()])),
    "load": ("cuLibraryLoadData", lambda it: it.gpu.load(SPEC, CUBIN)),
    "synchronize": ("cuStreamSynchronize", lambda it: it.gpu.synchronize()),
    "free_bytes": ("mem_get_info", lambda it: it.gpu.free_bytes()),
    "record": ("Event.record", lambda it: it.gpu.record()),
    "wait": ("Event.synchronize", lambda it: it.gpu.record().wait()),
    "replay": ("CUDAGraph.replay", lambda it: it.gpu.replay(it.gpu.capture([]))),
    "close graph": ("CUDAGraph.reset", lambda it: it.gpu.capture([]).close()),
    "adopt": ("Stream.wait_stream", lambda it: it.gpu.adopt("x", BYTES, is_mutable=True)),
}


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_translates_its_errors(doubles: Doubles, name: str, is_lost: bool) -> None:
    """Of the driver and of torch; the cause is kept."""
    inner, call = CALLS[name]
    if inner.startswith("cu"):
        doubles.driver.failures[inner] = "CUDA_ERROR_LAUNCH_FAILED" if is_lost else "CUDA_ERROR_INVALID_VALUE"
    else:
        doubles.cuda.failures[inner] = _accelerator_error(719 if is_lost else 1)
    with pytest.raises(GpuLost if is_lost else GpuError) as caught:
        call(doubles)
    assert isinstance(caught.value, GpuLost) == is_lost
    if name == "launch" and not is_lost:
        assert SPEC.name in str(caught.value)
    assert isinstance(caught.value.__cause__, DriverError | torch.AcceleratorError)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GpuLost("gone"), GpuLost),
        (DriverError("x", 700), GpuLost),
        (DriverError("x", 2), GpuError),
        (_accelerator_error(710), GpuLost),
        (_accelerator_error(901), GpuError),
        (torch.AcceleratorError("CUDA error: without a number"), GpuError),
        (torch.OutOfMemoryError("CUDA out of memory."), GpuError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"), GpuError),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), GpuError),
        (RuntimeError("Found no NVIDIA driver on your system."), GpuError),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"), None),
        (RuntimeError('Function "cuFuncLoad" not found'), GpuError),
        (type("CudaError", (RuntimeError,), {})("CUDA error: invalid argument (1)"), GpuError),
        (NotImplementedError("no kernel for CUDA"), None),
        (ValueError("CUDA"), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_errors_mean(error: BaseException, expected: type[GpuError] | None) -> None:
    """Only what comes from a GPU is one of its errors; the first line of the message says what it was."""
    meant = translated(error)
    assert (type(meant) if meant else None) is expected
    assert meant is None or str(meant) == str(error).splitlines()[0]


def test_errors_of_an_operation_itself_are_its_own(doubles: Doubles) -> None:
    """A mistake of ours must not look like one of the GPU: the executor would fall back and hide it."""

    def operation() -> None:
        raise IndexError("ours")

    for call in (doubles.gpu.launch, doubles.gpu.capture):
        with pytest.raises(IndexError):
            call([operation])


def test_errors_that_are_translated_already_stay_as_they_are(doubles: Doubles) -> None:
    """An operation may go through the GPU itself; an error is not its own cause."""
    error = GpuError("from below")

    def operation() -> None:
        raise error

    with pytest.raises(GpuError) as caught:
        doubles.gpu.launch([operation])
    assert caught.value is error
    assert error.__cause__ is None


def test_a_torch_without_cuda_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a machine without driver or GPU: the reason is shown to people."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(GpuError, match=r"torch \S+ was built without CUDA"):
        TorchGpu.open(0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    opened, drivers = Device.open, [RecordedDriver(num_devices=0), RecordedDriver(num_devices=4)]
    monkeypatch.setattr(Device, "open", lambda index: opened(index, drivers.pop(0)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(GpuError, match="there is no GPU 3"):
        TorchGpu.open(3)
    with pytest.raises(GpuError, match="sees 1 GPUs"):
        TorchGpu.open(3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_replays_copies_and_products() -> None:
    """Uploads, a graph of torch's work, events and downloads, as a step uses them."""
    gpu = TorchGpu.open(torch.cuda.current_device())
    weight = torch.randn(256, 128, device=gpu.torch_device).bfloat16()
    gpu.adopt("weight", weight, is_mutable=False)
    x, y = gpu.allocate("x", (96, 128), torch.bfloat16), gpu.allocate("y", (96, 256), torch.bfloat16)
    host_x, host_y = gpu.allocate_pinned("x", x.nbytes), gpu.allocate_pinned("y", y.nbytes)

    def product() -> None:
        torch.matmul(x, weight.t(), out=y)

    with torch.inference_mode():
        gpu.launch([product])
        graph = gpu.capture([product])
        for seed in range(3):
            values = torch.randn(96, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()
            host_x.copy_(values.view(torch.uint8).view(-1))
            gpu.upload(x.view(torch.uint8).view(-1), host_x)
            gpu.replay(graph)
            gpu.download(host_y, y.view(torch.uint8).view(-1))
            gpu.record().wait()
            expected = values.float() @ weight.cpu().float().t()
            torch.testing.assert_close(host_y.view(torch.bfloat16).view(96, 256).float(), expected, rtol=0.02, atol=0.1)
    graph.close()
    gpu.close()
