"""The launch path against a recorded driver; structures and enumerations are those of the real bindings."""

from __future__ import annotations

import builtins
import ctypes
import gc
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from cuda.bindings import driver as real

from ferrule_server.executor.cuda import driver as driver_module
from ferrule_server.executor.cuda.driver import Device, DriverError, Function, NoDevice
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec
from tools.gpu.recorded_driver import FUNCTION, LIBRARY, RecordedDriver, RecordedLaunch

KINDS = (ctypes.c_int64, ctypes.c_int32, ctypes.c_float)


def scale(x: Address, size: I32, factor: F32, *, M: int) -> None:  # noqa: N803
    """Stand for a kernel."""


def _spec(shared_bytes: int = 100 << 10) -> KernelSpec:
    return KernelSpec(scale, (("M", 1),), num_threads=256, shared_bytes=shared_bytes)


CUBIN = Cubin("scale", b"code")


def _load(driver: RecordedDriver, shared_bytes: int = 100 << 10) -> Function:
    return Device.open(0, driver).load(_spec(shared_bytes), CUBIN)


def test_launch_packs_every_argument_by_its_kind() -> None:
    """An address of more than 32 bits, a negative integer and a float arrive as they were given."""
    driver = RecordedDriver(kinds=KINDS)
    launch = _load(driver).prepare((0x7F00_1234_5678, -5, 0.5), grid=132, shared_bytes=70_000)
    launch(stream=0xABC0)
    (seen,) = driver.launches
    assert seen == RecordedLaunch(
        function=FUNCTION,
        grid=(132, 1, 1),
        block=(256, 1, 1),
        shared_bytes=70_000,
        stream=0xABC0,
        starts_early=True,
        arguments=(0x7F00_1234_5678, -5, 0.5),
    )


def test_prepared_launch_survives_a_collection() -> None:
    """Nothing that the driver reads is owned by a temporary."""
    driver = RecordedDriver(kinds=KINDS)
    launch = _load(driver).prepare((1, 2, 3.0), grid=1)
    gc.collect()
    launch(7)
    launch(8)
    assert [(seen.arguments, seen.stream) for seen in driver.launches] == [((1, 2, 3.0), 7), ((1, 2, 3.0), 8)]


@pytest.mark.parametrize(("capability", "asked", "given"), [((9, 0), False, False), ((8, 0), True, False)])
def test_early_start_is_left_out_where_unwanted_or_unknown(
    capability: tuple[int, int], asked: bool, given: bool
) -> None:
    """Before sm_90 the attribute is an error."""
    driver = RecordedDriver(capability=capability, kinds=KINDS)
    _load(driver).prepare((1, 2, 3.0), grid=1, starts_early=asked)(0)
    assert driver.launches[0].starts_early == given


def test_loading_raises_the_limit_of_shared_memory_only_above_48_kib() -> None:
    """The driver refuses launches above 48 KiB without it."""
    limit = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    for shared_bytes, expected in ((48 << 10, []), ((48 << 10) + 16, [(48 << 10) + 16])):
        driver = RecordedDriver(kinds=KINDS)
        _load(driver, shared_bytes)
        attributes = driver.named("cuFuncSetAttribute")
        assert [value for _, kind, value in attributes if kind.name == limit] == expected
        assert driver.named("cuLibraryLoadData")[0][0] == b"code"
        assert driver.named("cuLibraryGetKernel") == [(LIBRARY, b"scale")]
        assert driver.named("cuFuncLoad") == [(FUNCTION,)], "lazily loaded code would load within a capture"


@pytest.mark.parametrize(
    ("x", "size", "name"), [(1, 1 << 31, "size"), (1, 1.0, "size"), (-1, 2, "x"), (1 << 63, 2, "x")]
)
def test_arguments_that_do_not_fit_are_refused(x: int, size: float, name: str) -> None:
    """They would wrap silently."""
    with pytest.raises(ValueError, match=f"{name} = "):
        _load(RecordedDriver(kinds=KINDS)).prepare((x, size, 3.0), grid=1)


def test_launch_outside_the_plan_is_refused() -> None:
    """Too few arguments, more shared memory than planned, no CTA, more shared memory than there is."""
    function = _load(RecordedDriver(kinds=KINDS))
    with pytest.raises(ValueError, match="takes 3 arguments"):
        function.prepare((1, 2), grid=1)
    with pytest.raises(ValueError, match="planned for"):
        function.prepare((1, 2, 3.0), grid=1, shared_bytes=(100 << 10) + 1)
    with pytest.raises(ValueError, match="one wave is 132"):
        function.prepare((1, 2, 3.0), grid=133)
    function.prepare((1, 2, 3.0), grid=133, starts_early=False)
    with pytest.raises(ValueError, match="grid of 0"):
        function.prepare((1, 2, 3.0), grid=0)
    with pytest.raises(ValueError, match="shared memory"):
        _load(RecordedDriver(kinds=KINDS), 228 << 10)


def test_a_wave_is_what_the_multiprocessors_have_room_for() -> None:
    """One with less shared memory than two CTAs take runs one."""
    spec = replace(_spec(50 << 10), ctas_per_sm=2)
    for capability, wave in (((9, 0), 264), ((8, 6), 132), ((12, 0), 132)):
        function = Device.open(0, RecordedDriver(capability=capability, kinds=KINDS)).load(spec, CUBIN)
        function.prepare((1, 2, 3.0), grid=wave)
        with pytest.raises(ValueError, match=f"one wave is {wave}"):
            function.prepare((1, 2, 3.0), grid=wave + 1)


def test_a_driver_that_cannot_load_ahead_loads_later() -> None:
    """``cuFuncLoad`` came with CUDA 12.4; the bindings raise for what a driver lacks."""

    class Older(RecordedDriver):
        def _cuFuncLoad(self, function: int) -> tuple[int, ...]:  # noqa: N802
            raise RuntimeError('Function "cuFuncLoad" not found')

    device = Device.open(0, Older(version=12000, kinds=KINDS))
    device.load(_spec(), CUBIN).prepare((1, 2, 3.0), grid=1)
    assert device.info.cuda_version == (12, 0)


@pytest.mark.parametrize(
    ("name", "is_lost"),
    [("CUDA_ERROR_ILLEGAL_ADDRESS", True), ("CUDA_ERROR_INVALID_VALUE", False), ("CUDA_ERROR_OUT_OF_MEMORY", False)],
)
def test_failures_carry_the_name_of_cuda_and_say_whether_the_context_is_lost(name: str, is_lost: bool) -> None:
    """At a launch and at any other call."""
    driver = RecordedDriver(kinds=KINDS)
    device = Device.open(0, driver)
    launch = device.load(_spec(), CUBIN).prepare((1, 2, 3.0), grid=1)
    driver.failures = {"cuLaunchKernelEx": name, "cuStreamSynchronize": name}
    for call in (launch, device.synchronize):
        with pytest.raises(DriverError, match=name) as caught:
            call(0)
        code = caught.value.code
        assert (code, driver_module.is_context_lost(code)) == (getattr(driver.CUresult, name), is_lost)
        assert ("only a new process" in str(caught.value)) == is_lost


LOST = """
DEINITIALIZED DEVICE_UNAVAILABLE ECC_UNCORRECTABLE NVLINK_UNCORRECTABLE CONTAINED ILLEGAL_ADDRESS
LAUNCH_TIMEOUT CONTEXT_IS_DESTROYED ASSERT HARDWARE_STACK_ERROR ILLEGAL_INSTRUCTION MISALIGNED_ADDRESS
INVALID_ADDRESS_SPACE INVALID_PC LAUNCH_FAILED TENSOR_MEMORY_LEAK EXTERNAL_DEVICE UNKNOWN
"""


def test_numbers_of_lost_contexts_are_those_of_the_bindings() -> None:
    """One that is wrong would never match; torch knows the numbers only."""
    codes = {result.name: int(result) for result in RecordedDriver().CUresult}
    assert {codes[f"CUDA_ERROR_{name}"] for name in LOST.split()} == driver_module._LOST  # of 13.0 and later
    assert driver_module.is_context_lost(700)
    assert not driver_module.is_context_lost(2)


def test_copies_take_host_and_device_in_the_order_of_the_driver() -> None:
    """Target first, either way; the stream is a handle."""
    driver = RecordedDriver()
    device = Device.open(0, driver)
    device.upload(0x7F00_0000_0000, 0x1000, 96, 7)
    device.download(0x1000, 0x7F00_0000_0000, 64, 7)
    for name, expected in (
        ("cuMemcpyHtoDAsync", (0x7F00_0000_0000, 0x1000, 96)),
        ("cuMemcpyDtoHAsync", (0x1000, 0x7F00_0000_0000, 64)),
    ):
        ((*given, stream),) = driver.named(name)
        assert (tuple(given), int(stream)) == (expected, 7)
        assert getattr(real, name).__doc__.startswith(f"{name}(dst")
        driver.failures[name] = "CUDA_ERROR_ILLEGAL_ADDRESS"
    for copy in (device.upload, device.download):
        with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
            copy(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (RecordedDriver(failures={"cuInit": "CUDA_ERROR_NO_DEVICE"}), "CUDA_ERROR_NO_DEVICE"),
        (RecordedDriver(num_devices=0), "no GPU 0"),
    ],
)
def test_missing_device_is_one_clear_error(driver: RecordedDriver, reason: str) -> None:
    """The reason a server tells for running without one."""
    with pytest.raises(NoDevice, match=reason):
        Device.open(0, driver)


def test_missing_package_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the way to install it."""
    real_import = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError(name)
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(NoDevice, match=r"pip install 'ferrule-server\[cuda\]'"):
        Device.open()


def test_real_bindings_without_a_driver_give_the_same_error() -> None:
    """In a process of its own: the bindings remember what they did not find."""
    code = (
        "from ferrule_server.executor.cuda.driver import Device, NoDevice\n"
        "import sys\n"
        "assert not any(name.startswith(('cuda', 'numba')) for name in sys.modules)\n"
        "try:\n    Device.open()\nexcept NoDevice as error:\n    print('none:', error)\nelse:\n    print('found')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match("none: .+|found", done.stdout)
