"""When kernels start: by setting, by the verdict that is kept, or by a test in a process of its own."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ferrule_server.executor.cuda import early_launch, litmus
from ferrule_server.executor.cuda.early_launch import EarlyLaunch
from ferrule_server.executor.cuda.litmus import Verdict
from tests.executor.cuda.fake_gpu import FakeGpu

BUNDLE = Path("kernels.bundle")
PASSED, FAILED, INCONCLUSIVE = Verdict(9, 0, 1), Verdict(9, 1, 1), Verdict(9, 0, 0)


def gpu(device: str = "cuda:1", capability: tuple[int, int] = (9, 0)) -> Any:
    """Return as much of a GPU as is looked at."""
    return SimpleNamespace(info=FakeGpu(capability=capability).info, torch_device=torch.device(device))


def keep(verdict: Verdict, folder: Path) -> None:
    """Put a verdict on that GPU into a cache folder."""
    litmus._path(gpu().info, folder).write_text(json.dumps(asdict(verdict)))


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def child(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Have a shell script run in place of Python: it notes its arguments first."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("setting", "verdict", "mode", "reason"),
    [
        ("auto", PASSED, "early", "the litmus passed"),
        ("auto", FAILED, "off", "the litmus failed"),
        ("on", FAILED, "early", "--early-launch on"),
        ("on", None, "early", "--early-launch on"),
        ("off", PASSED, "off", "--early-launch off"),
    ],
)
def test_settings_and_verdicts_decide(
    *, setting: str, verdict: Verdict | None, mode: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A line of the log says which mode is in force and why: a warning where speed is lost for good."""
    if verdict is not None:
        keep(verdict, tmp_path)
    with caplog.at_level(logging.INFO):
        assert EarlyLaunch(setting, gpu(), tmp_path, BUNDLE).decide() == mode
    (record,) = caplog.records
    assert record.getMessage() == f"event=early_launch mode={mode} reason={reason!r}"
    assert (record.levelno == logging.WARNING) == (mode == "off")


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("setting", ["auto", "on"])
def test_a_gpu_that_has_no_early_launch_is_not_tested(
    setting: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is wrong."""
    with caplog.at_level(logging.INFO):
        assert EarlyLaunch(setting, gpu(capability=(8, 0)), tmp_path, BUNDLE).decide() == "off"
    assert [record.levelno for record in caplog.records] == [logging.INFO]


@pytest.mark.usefixtures("no_process")
def test_a_test_that_proved_nothing_is_not_run_at_every_start(tmp_path: Path) -> None:
    """Kernels start late, and the status says so."""
    keep(INCONCLUSIVE, tmp_path)
    choice = EarlyLaunch("auto", gpu(), tmp_path, BUNDLE)
    assert choice.decide() == "late"
    assert choice.notice == "kernels start late: the litmus inconclusive"


@pytest.mark.usefixtures("no_process")
def test_what_only_looks_like_a_gpu_is_not_tested(tmp_path: Path) -> None:
    """Kernels start late there, as everywhere without a verdict."""
    assert EarlyLaunch("auto", gpu("cpu"), tmp_path, BUNDLE).decide() == "late"


@pytest.mark.parametrize(
    ("script", "mode", "reason"),
    [
        ("echo passed on H100: ...", "early", "the litmus passed"),
        ("echo failed on H100: ...; exit 1", "off", "the litmus failed"),
        ("echo inconclusive on H100: ...; exit 2", "late", "the litmus inconclusive"),
        ("echo No module named torch >&2; exit 1", "late", "the litmus gave no verdict: No module named torch"),
        ("kill -9 $$", "late", "the litmus gave no verdict: exit status -9"),
    ],
)
def test_without_a_verdict_the_gpu_is_tested_in_another_process(
    *,
    script: str,
    mode: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its first word counts; a process that breaks says none, and its last line is the reason."""
    child(monkeypatch, tmp_path, script)
    choice, told = EarlyLaunch("auto", gpu(), tmp_path, BUNDLE), list[str]()
    with caplog.at_level(logging.INFO):
        assert choice.decide(told.append) == mode
    assert told == ["testing early launch"]
    assert caplog.messages == [f"event=early_launch mode={mode} reason={reason!r}"]
    later = {"early": "", "late": "kernels start late: ", "off": "kernels start one behind the other: "}[mode]
    assert choice.notice == (later and f"{later}{reason}")
    module = "-P -m ferrule_server.executor.cuda.litmus"
    expected = f"{module} --device 1 --cache {tmp_path} --bundle {BUNDLE}\n"
    assert (tmp_path / "arguments").read_text() == expected


def test_a_test_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time runs from its start, and kernels start late."""
    monkeypatch.setattr(early_launch, "_LIMIT_S", 0.1)
    child(monkeypatch, tmp_path, "exec sleep 100")
    choice = EarlyLaunch("auto", gpu(), tmp_path, BUNDLE)
    process = choice._process
    assert process is not None
    assert choice.decide() == "late"
    assert process.returncode == -9


def test_a_test_ends_with_a_start_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing twice, or what runs no test, is fine."""
    child(monkeypatch, tmp_path, "exec sleep 100")
    choice = EarlyLaunch("auto", gpu(), tmp_path, BUNDLE)
    process = choice._process
    assert process is not None
    choice.close()
    choice.close()
    assert process.returncode == -9


def test_a_process_that_cannot_be_started_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start goes on."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert EarlyLaunch("auto", gpu(), tmp_path, BUNDLE).decide() == "late"


@pytest.mark.skipif(torch.cuda.is_available(), reason="finds the GPU of this machine")
def test_the_real_command_finds_no_gpu_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The process is started as a server starts it, and ends with the status that says so."""
    with caplog.at_level(logging.INFO):
        assert EarlyLaunch("auto", gpu(), tmp_path, BUNDLE).decide() == "late"
    assert [it.partition(" torch ")[0] for it in caplog.messages] == [
        "event=early_launch mode=late reason='the litmus gave no verdict: error:"
    ]
