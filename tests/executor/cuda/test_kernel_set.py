"""Kernels are loaded when the set is made, and take arguments by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ferrule_server.executor.cuda.gpu import GpuError
from ferrule_server.executor.cuda.kernel_set import KernelSet, Trigger
from ferrule_server.kernels.cuda import argmax, embed
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec
from tests.executor.cuda.fake_gpu import CUBIN, FakeGpu, FakeKernel, FakeLaunch

SPEC = embed.spec()


def _arguments(gpu: FakeGpu) -> dict[str, int | float | torch.Tensor]:
    ids = gpu.allocate("ids", (4,), torch.int32)
    table = gpu.allocate("table", (8, 16), torch.bfloat16)
    sizes: dict[str, int | float | torch.Tensor] = {"num_rows": 2, "num_sampled": 0, "table_rows": 8, "size": 16}
    return {**sizes, "hidden": table[4:], "table": table, "sampled": 0, "token_ids": ids}


def test_every_kernel_is_loaded_once_when_the_set_is_made() -> None:
    """Whether it is asked for or not; one that the GPU refuses makes no set."""
    gpu = FakeGpu()
    cubins = {SPEC: CUBIN, argmax.spec(): CUBIN}
    kernels = KernelSet(gpu, cubins)
    assert [call.subject for call in gpu.calls("load")] == ["embed", "argmax"]
    arguments = _arguments(gpu)
    kernels.prepare(SPEC, arguments, 1)
    kernels.prepare(SPEC, arguments, 2, starts_early=False)
    assert len(gpu.calls("load")) == 2
    gpu.fail("load argmax", GpuError("no room"))
    with pytest.raises(GpuError, match="no room"):
        KernelSet(gpu, cubins)


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


def test_what_was_not_built_is_refused() -> None:
    """Another kernel, and more shared memory than was built for; less is fine."""
    gpu = FakeGpu()
    built = replace(SPEC, shared_bytes=512)
    kernels, arguments = KernelSet(gpu, {built: CUBIN}), _arguments(gpu)
    with pytest.raises(GpuError, match="was not built"):
        kernels.prepare(argmax.spec(), {}, 1)
    with pytest.raises(ValueError, match="is planned for 512 bytes, not 513"):
        kernels.prepare(replace(built, shared_bytes=513), arguments, 1)
    launch = kernels.prepare(SPEC, arguments, 1)
    assert isinstance(launch, FakeLaunch)
    assert launch.spec.shared_bytes == 512
    assert kernels.gpu is gpu


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
