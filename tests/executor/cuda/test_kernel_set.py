"""Kernels are loaded once, when they are first asked for, and take arguments by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ferrule_server.executor.cuda.gpu import GpuError
from ferrule_server.executor.cuda.kernel_set import KernelMissing, KernelSet, Trigger
from ferrule_server.kernels.cuda import embed, gemv
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec
from tests.executor.cuda.fake_gpu import CUBIN, FakeGpu, FakeKernel, FakeLaunch

SPEC = embed.spec()


def _arguments(gpu: FakeGpu) -> dict[str, int | float | torch.Tensor]:
    ids = gpu.allocate("ids", (4,), torch.int32)
    table = gpu.allocate("table", (8, 16), torch.bfloat16)
    sizes: dict[str, int | float | torch.Tensor] = {"num_rows": 2, "num_sampled": 0, "table_rows": 8, "size": 16}
    return {**sizes, "hidden": table[4:], "table": table, "sampled": 0, "token_ids": ids}


def test_a_kernel_is_loaded_once() -> None:
    """And not before it is asked for."""
    gpu = FakeGpu()
    kernels = KernelSet(gpu, {SPEC: CUBIN})
    assert not gpu.calls("load")
    arguments = _arguments(gpu)
    kernels.prepare(SPEC, arguments, 1)
    kernels.prepare(SPEC, arguments, 2, starts_early=False)
    assert len(gpu.calls("load")) == 1


def test_arguments_are_put_in_order() -> None:
    """Tensors by their addresses, views by theirs."""
    gpu = FakeGpu()
    arguments = _arguments(gpu)
    launch = KernelSet(gpu, {SPEC: CUBIN}).prepare(SPEC, arguments, 2)
    assert isinstance(launch, FakeLaunch)
    assert list(launch.arguments)[:4] == ["token_ids", "sampled", "table", "hidden"]
    assert launch.arguments["hidden"] == launch.arguments["table"] + 4 * 16 * 2
    assert (launch.arguments["sampled"], launch.arguments["size"], launch.grid) == (0, 16, 2)


def test_missing_and_unknown_arguments_are_noticed() -> None:
    """A kernel would read something else in their place."""
    gpu = FakeGpu()
    kernels, arguments = KernelSet(gpu, {SPEC: CUBIN}), _arguments(gpu)
    with pytest.raises(AssertionError, match="takes"):
        kernels.prepare(SPEC, {**arguments, "scales": 0}, 1)
    del arguments["table"]
    with pytest.raises(AssertionError, match="takes"):
        kernels.prepare(SPEC, arguments, 1)


def test_what_was_not_built_is_an_error_of_the_gpu() -> None:
    """So that it ends in torch: another kernel, and more shared memory than was built for; less is fine."""
    gpu = FakeGpu()
    built = gemv.spec(512, M=1, NORM=False, EPILOGUE="store", R=2, U=4, WARPS=8)
    kernels = KernelSet(gpu, {built: CUBIN})
    with pytest.raises(KernelMissing, match="was not built"):
        kernels.load(SPEC)
    with pytest.raises(GpuError, match="was built for"):
        kernels.load(replace(built, shared_bytes=built.shared_bytes + 1))
    kernels.load(replace(built, shared_bytes=built.shared_bytes - 16))
    assert kernels.gpu is gpu


def test_a_refused_kernel_may_be_asked_for_again() -> None:
    """Nothing is kept of a failed load."""
    gpu = FakeGpu()
    gpu.fail("load embed", GpuError("no room"))
    kernels = KernelSet(gpu, {SPEC: CUBIN})
    with pytest.raises(GpuError, match="no room"):
        kernels.load(SPEC)
    assert kernels.load(SPEC).spec == SPEC


@pytest.mark.parametrize("trigger", ["early", "late", "off"])
def test_kernels_start_when_the_set_says(trigger: Trigger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that prepares launches knows of it; what must not start early never does. Late is other code."""
    gpu, codes = FakeGpu(), []
    load = gpu.load

    def noting(spec: KernelSpec, cubin: Cubin) -> FakeKernel:
        codes.append(cubin.code)
        return load(spec, cubin)

    monkeypatch.setattr(gpu, "load", noting)
    kernels, arguments = KernelSet(gpu, {SPEC: Cubin("embed", b"early", b"late")}, trigger), _arguments(gpu)
    for wanted in (True, False):
        launch = kernels.prepare(SPEC, arguments, 1, starts_early=wanted)
        assert isinstance(launch, FakeLaunch)
        assert launch.starts_early == (wanted and trigger != "off")
    assert codes == [b"late" if trigger == "late" else b"early"]
