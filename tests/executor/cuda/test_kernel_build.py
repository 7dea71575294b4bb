"""Kernels are built beside a server that serves: told of, waited for by nobody, and failing without harm."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ferrule_server.executor.cuda import kernel_build
from ferrule_server.executor.cuda.gpu import GpuError
from ferrule_server.executor.cuda.kernel_build import KernelBuild
from ferrule_server.executor.cuda.kernel_choice import shape_of, specs_needed
from ferrule_server.executor.cuda.parts import part_of
from ferrule_server.kernels.cuda import copy_blocks, embed
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.toolchain.compile import CompileError, Cubin
from tests.executor.cuda.tiny_model import tiny_config

SPECS = [copy_blocks.spec(), embed.spec()]
TIMEOUT_S = 10.0


def cubin(spec: KernelSpec) -> Cubin:
    """A cubin of nothing."""
    return Cubin(spec.kernel.__name__, "sm_90a", b"", "", 32, 0, 0)


class SlowLoad:
    """Stands for ``load_all``: each kernel waits until the test lets it go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.options: dict[str, Any] = {}
        self.told = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)

    def __call__(
        self, specs: Iterable[KernelSpec], architecture: str, *, progress: Callable[[int, int, str], None], **more: Any
    ) -> dict[KernelSpec, Cubin]:
        """Return cubins, or fail behind the first."""
        self.options = {"architecture": architecture, **more}
        specs = list(specs)
        for index, spec in enumerate(specs, 1):
            assert self.may_go_on.acquire(timeout=TIMEOUT_S)
            progress(index, len(specs), spec.name)
            self.told.release()
            if self.error is not None:
                raise self.error
        return {spec: cubin(spec) for spec in specs}


def started(load: SlowLoad, **options: Any) -> KernelBuild:
    """Return a build that runs."""
    build = KernelBuild(SPECS, "sm_90a", load=load, **options)
    build.start()
    return build


def test_progress_counts_kernels_until_all_are_there() -> None:
    """Nobody waits meanwhile; the result is every cubin, and stays."""
    load = SlowLoad()
    build = started(load)
    assert (build.progress, build.is_done) == ("compiling kernels, 0 of 2", False)
    load.may_go_on.release()
    assert load.told.acquire(timeout=TIMEOUT_S)
    assert build.progress == "compiling kernels, 1 of 2"
    assert not build.wait(0)
    load.may_go_on.release()
    assert build.wait(TIMEOUT_S)
    assert (build.progress, build.is_done, build.failure) == ("", True, "")
    assert build.result() == build.result() == {spec: cubin(spec) for spec in SPECS}


def test_the_log_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For who looks at a server that compiles for minutes; not once for each kernel."""
    for seconds, expected in ((1e-9, ["kernels_compiling", "kernels_compiling"]), (60.0, [])):
        monkeypatch.setattr(kernel_build, "_SAY_S", seconds)
        caplog.clear()
        load = SlowLoad()
        load.may_go_on.release(2)
        with caplog.at_level(logging.INFO):
            assert started(load).wait(TIMEOUT_S)
        events = [record.getMessage().split()[0] for record in caplog.records]
        assert events == [f"event={event}" for event in [*expected, "kernels_ready"]]


@pytest.mark.parametrize(("cpus", "expected"), [(1, 1), (2, 1), (4, 2), (10, 8), (224, 8)])
def test_the_compiler_gets_processes_of_its_own(monkeypatch: pytest.MonkeyPatch, cpus: int, expected: int) -> None:
    """Few enough that the server has cores and memory left, and never a thread of the server."""
    monkeypatch.setattr(kernel_build, "usable_cpus", lambda: cpus)
    load = SlowLoad()
    load.may_go_on.release(2)
    assert started(load).wait(TIMEOUT_S)
    assert (load.options["num_workers"], load.options["is_serving"]) == (expected, True)
    assert (load.options["architecture"], load.options["cache"], load.options["bundle"]) == ("sm_90a", None, None)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        pytest.param(CompileError("ptxas refuses gemv for sm_90a:\nline 3: no"), "ptxas refuses gemv for sm_90a"),
        pytest.param(RuntimeError("can't start new thread"), "can't start new thread"),
        pytest.param(MemoryError(), "MemoryError"),
    ],
)
def test_what_fails_is_said_in_one_line(error: Exception, sentence: str) -> None:
    """The build is done, and whoever wants its result is told why there is none."""
    load = SlowLoad(error)
    load.may_go_on.release(2)
    build = started(load)
    assert build.wait(TIMEOUT_S)
    with pytest.raises(GpuError) as raised:
        build.result()
    assert str(raised.value) == sentence
    assert raised.value.__cause__ is error
    assert (build.progress, build.is_done, build.failure) == ("", True, sentence)


class PickyLoad:
    """Stands for ``load_all``: does not compile some kernels."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused

    def __call__(self, specs: Iterable[KernelSpec], *_: object, **__: object) -> dict[KernelSpec, Cubin]:
        """Return cubins, or fail at the first kernel that does not compile."""
        cubins = {}
        for spec in specs:
            if spec.kernel.__name__ in self.refused:
                raise CompileError(f"ptxas refuses {spec.kernel.__name__}:\nline 3")
            cubins[spec] = cubin(spec)
        return cubins


@pytest.mark.parametrize(
    ("refused", "part"),
    [("copy_blocks", "copies of blocks"), ("draw", "sampling"), ("gemm", "steps of 3 to 64 rows")],
)
def test_a_kernel_that_does_not_compile_costs_its_part_only(refused: str, part: str) -> None:
    """All other kernels are there, and the reason is kept."""
    specs = specs_needed(shape_of(tiny_config()), is_deterministic=False)
    build = KernelBuild(specs, "sm_90a", load=PickyLoad(refused))
    build.start()
    cubins = build.result()
    assert build.part_failures == {part: f"ptxas refuses {refused}"}
    assert set(cubins) == {spec for spec in specs if part_of(spec.kernel.__name__) != part}
    assert (build.is_done, build.failure) == (True, "")


@pytest.mark.parametrize(("refused", "needs_all"), [(("draw", "embed"), False), (("draw",), True)])
def test_without_the_kernels_that_are_needed_the_build_fails(refused: tuple[str, ...], needs_all: bool) -> None:
    """The first reason is kept."""
    specs = specs_needed(shape_of(tiny_config()), is_deterministic=False)
    build = KernelBuild(specs, "sm_90a", load=PickyLoad(*refused), needs_all=needs_all)
    build.start()
    with pytest.raises(GpuError, match=f"ptxas refuses {refused[-1]}$"):
        build.result()


def test_a_missing_bundle_fails_the_build(tmp_path: Path) -> None:
    """It is opened on the thread; its name is said."""
    build = started(SlowLoad(), bundle=tmp_path / "none.bundle")
    with pytest.raises(GpuError, match=r"none\.bundle"):
        build.result()


def test_a_closed_build_begins_no_further_kernel() -> None:
    """The one that is being compiled ends, the next is not begun."""
    load = SlowLoad()
    build = started(load)
    build.close()
    assert not build.is_done
    load.may_go_on.release()
    assert build.wait(TIMEOUT_S)
    assert not load.told.acquire(blocking=False)
    with pytest.raises(GpuError, match="the server ends"):
        build.result()
