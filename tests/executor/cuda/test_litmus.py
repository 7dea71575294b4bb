"""The test of early launch: what is launched and replayed, what is concluded, and where the verdict is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule_server.executor.cuda import bundle, litmus
from ferrule_server.executor.cuda.bundle import BundleError
from ferrule_server.executor.cuda.gpu import Gpu, GpuError, Operation
from ferrule_server.executor.cuda.litmus import Verdict, find_verdict, main, run_litmus
from ferrule_server.executor.cuda.torch_gpu import TorchGpu
from ferrule_server.kernel_builder.bundles import write_bundle
from ferrule_server.kernels.cuda.litmus import CONTROL, ROW_BYTES, SPECS, WAITING
from ferrule_server.kernels.cuda.spec import Cubin
from tests.executor.cuda.fake_gpu import FakeGpu, FakeLaunch

CUBINS = dict.fromkeys(SPECS, Cubin("litmus", b"code"))


class Finding:
    """Acts for a kernel that finds so many stale words in each launch."""

    def __init__(self, num_words: int) -> None:
        self.gpu: FakeGpu | None = None
        self.num_words, self.num_launches = num_words, 0

    def __call__(self, arguments: Mapping[str, int | float]) -> None:
        """Count them."""
        assert self.gpu is not None
        self.gpu.at(arguments["stale"], (1,), torch.int64).add_(self.num_words)
        self.num_launches += 1


class RecordingGpu(FakeGpu):
    """Keeps what is launched."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.launched: list[Operation] = []

    def launch(self, operations: Sequence[Operation]) -> None:
        """Launch."""
        self.launched += operations
        super().launch(operations)


def gpu_that_finds(*, waiting: int | None, control: int) -> FakeGpu:
    """Return a GPU whose kernels find so many stale words in each launch; None: the simulator runs those that wait."""
    acting = {CONTROL.name: Finding(control)} | ({} if waiting is None else {WAITING.name: Finding(waiting)})
    gpu = FakeGpu(simulate=True, stand_ins=acting)
    for one in acting.values():
        one.gpu = gpu
    return gpu


@pytest.fixture
def _bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a bundle where a server looks for one."""
    write_bundle(tmp_path / "sm_90a.bundle", "sm_90a", CUBINS, (12, 9))
    monkeypatch.setattr(bundle, "_places", lambda: [tmp_path])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, _bundle: None) -> FakeGpu:
    """Return a GPU of this machine, on which the test passes."""
    gpu = gpu_that_finds(waiting=0, control=3)
    monkeypatch.setattr(TorchGpu, "open", lambda _: gpu)
    return gpu


def test_a_gpu_that_keeps_its_promise_passes() -> None:
    """In the simulator, launches and replays; each launch of a row's kernel adds 1 to it, whatever the way."""
    gpu = gpu_that_finds(waiting=None, control=3)
    verdict = run_litmus(gpu, CUBINS, 3)
    assert verdict == Verdict(num_runs=3, num_stale=0, control_stale=3 * 5 * 3)
    assert verdict.outcome == "passed"
    rows = gpu.memory.tensor("litmus rows").view(torch.int32)
    assert rows.numel() == 5 * gpu.info.num_sms * ROW_BYTES // 4
    assert set(rows.tolist()) == {3 * 3}  # launched once to be captured, launched, replayed
    assert gpu.graphs == []


def test_launches_form_chains_that_start_early_within() -> None:
    """The first of each waits for the chain before; each reads the row before its own, the last one also the first."""
    gpu = RecordingGpu(stand_ins={"litmus": lambda _: None})
    run_litmus(gpu, CUBINS, 100)
    waiting = [it for it in gpu.launched if isinstance(it, FakeLaunch) and it.spec == WAITING]
    assert len(waiting) == 3 * 64 * 5  # launched once to be captured, and two whole batches
    rows = [it.arguments["own"] for it in waiting[:5]]
    for chain in (waiting[i : i + 5] for i in range(0, len(waiting), 5)):
        assert [it.starts_early for it in chain] == [False, True, True, True, True]
        assert [it.arguments["own"] for it in chain] == rows
        assert [it.arguments["before"] for it in chain] == [0, *rows[:4]]
        assert [it.arguments["first"] for it in chain] == [0, 0, 0, 0, rows[0]]
        assert {it.grid for it in chain} == {gpu.info.num_sms}
        assert len({it.arguments["cycles"] for it in chain}) == 1
    assert len({it.arguments["cycles"] for it in waiting}) > 2


@pytest.mark.parametrize(
    ("waiting", "control", "outcome"), [(1, 5, "failed"), (1, 0, "failed"), (0, 0, "inconclusive")]
)
def test_what_is_no_pass(waiting: int, control: int, outcome: str) -> None:
    """A stale word, whatever the control says; and a control that found none, as nothing overlapped."""
    assert run_litmus(gpu_that_finds(waiting=waiting, control=control), CUBINS, 2).outcome == outcome


def test_a_control_that_fails_in_one_way_only_is_inconclusive() -> None:
    """Steps are launched and replayed, so both are tested."""
    gpu = gpu_that_finds(waiting=0, control=1)
    control = gpu.stand_ins[CONTROL.name]
    assert isinstance(control, Finding)

    def launched(arguments: Mapping[str, int | float]) -> None:
        control.num_words = int(control.num_launches < 2 * 2 * 5)  # launched before the capture, launched, replayed
        control(arguments)

    gpu.stand_ins[CONTROL.name] = launched
    assert run_litmus(gpu, CUBINS, 2).outcome == "inconclusive"
    assert control.num_launches == 3 * 2 * 5


def test_the_command_keeps_the_verdict_for_this_kind_of_gpu(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another driver, another GPU or other sources there is none. The first word printed is the outcome."""
    monkeypatch.setattr(litmus, "_NUM_RUNS", 2)
    monkeypatch.setattr(litmus, "_DRIVER", tmp_path / "driver")
    folder = tmp_path / "new" / "cache"
    assert find_verdict(gpu.info, folder) is None
    assert _status("--cache", str(folder), "--runs", "2") == 0
    assert capsys.readouterr().out.split()[0] == "passed"
    assert find_verdict(gpu.info, folder) == Verdict(2, 0, 2 * 5 * 3)
    assert find_verdict(FakeGpu(capability=(8, 0)).info, folder) is None
    (tmp_path / "driver").write_text("580.65.06")
    assert find_verdict(gpu.info, folder) is None
    (tmp_path / "driver").unlink()
    monkeypatch.setattr(litmus, "source_hash", lambda: "other sources")
    assert find_verdict(gpu.info, folder) is None


def _status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.usefixtures("_bundle")
@pytest.mark.parametrize(
    ("waiting", "control", "status", "is_kept"), [(0, 1, 0, False), (1, 1, 1, True), (0, 0, 2, False)]
)
def test_few_runs_prove_a_fault_and_nothing_else(
    *, waiting: int, control: int, status: int, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status says how each ended."""
    gpu = gpu_that_finds(waiting=waiting, control=control)
    monkeypatch.setattr(TorchGpu, "open", lambda _: gpu)
    assert _status("--cache", str(tmp_path), "--runs", "2") == status
    assert (find_verdict(gpu.info, tmp_path) is not None) == is_kept


@pytest.mark.parametrize("error", [GpuError("there is no GPU 0"), BundleError("no kernels"), RuntimeError("a bug")])
def test_no_verdict_is_one_line_and_status_2(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever keeps the test from its end."""

    def refuse(_: int) -> Gpu:
        raise error

    monkeypatch.setattr(TorchGpu, "open", refuse)
    assert _status() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert str(error) in printed.err


@pytest.mark.usefixtures("gpu")
def test_a_folder_that_cannot_be_written_costs_the_next_start_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict is printed all the same."""
    monkeypatch.setattr(litmus, "_NUM_RUNS", 2)
    (tmp_path / "file").touch()
    assert _status("--cache", str(tmp_path / "file" / "folder"), "--runs", "2") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("passed on Fake GPU: ")
    assert "the verdict is not kept" in printed.err


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"{}", json.dumps({"num_runs": 3}).encode()])
def test_a_damaged_verdict_is_none(content: bytes, tmp_path: Path) -> None:
    """So the test is run again."""
    info = FakeGpu().info
    litmus._path(info, tmp_path).write_bytes(content)
    assert find_verdict(info, tmp_path) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_this_gpu_keeps_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a control that fails; a few seconds."""
    monkeypatch.undo()
    gpu = TorchGpu.open()
    if gpu.info.capability < (9, 0):
        pytest.skip("this GPU has no early launch")
    cubins = bundle.find_bundle(None, gpu.info.capability, gpu.info.cuda_version).read(SPECS)
    assert run_litmus(gpu, cubins, 10_000).outcome == "passed"
    gpu.close()
