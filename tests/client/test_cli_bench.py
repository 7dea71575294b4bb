"""``ferrule bench``: its figures, what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ferrule import Client
from ferrule_cli.commands.bench_measure import Figure, rate_of, read_rate
from tests.client.command_line import run
from tests.executor.cpu.models import HAS_VNNI


def test_a_server_that_runs_is_measured_and_left_as_it_was(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every figure is there, and a picture; no sequence is left. A model without weights has no share of memory."""
    picture = tmp_path / "bench.svg"
    assert run("bench", "--target", target, "--seconds", "0.1", "--json", "--plot", str(picture)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    names = [figure["name"] for figure in result["figures"]]
    assert names[0].startswith("first token, ")
    assert names[1].startswith("prefill ")
    assert names[2:] == [f"decode {size}" for size in (1, 4, 16, 32)][: len(names) - 2]
    assert "decode 4" in names
    assert all(min(figure["samples"]) > 0 and figure["share"] is None for figure in result["figures"])
    assert result["read_bytes_per_s"] > 1e8
    assert "decode" in picture.read_text()
    with Client(target) as client:
        assert client.status().live_sequences == 0


def test_a_server_of_its_own_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """With the model that ships; the table names every figure."""
    quantised = ("--weights", "int8", *(("--activations", "int8") if HAS_VNNI else ()))
    assert run("bench", "--seconds", "0.1", *quantised, "--threads", "1") == 0
    text = capsys.readouterr().out
    assert text.startswith("demo: int8, ")
    for word in ("memory reads", "first token", "prefill", "decode 32", "of memory", "%"):
        assert word in text


def test_wrong_use_is_told_apart(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is measured."""
    assert run("bench", "--target", target, "--weights", "int8") == 2
    assert "--weights is for a server of our own" in capsys.readouterr().err
    assert run("bench", "--model", str(tmp_path / "missing")) == 1
    captured = capsys.readouterr()
    assert "there is no such folder" in captured.err
    assert "SERVER_ENDED" in captured.err
    assert run("bench", "--help") == 0
    assert "ferrule bench --target" in capsys.readouterr().out


def test_the_share_is_of_what_a_step_must_read() -> None:
    """Twenty steps a second of 1 GB are half of 40 GB/s, however many sequences share them."""
    for size in (1, 16):
        figure = Figure("decode", "tokens/s", (18.0 * size, 20.0 * size, 90.0 * size), 1e9, size)
        assert figure.share(40e9) == pytest.approx(0.5)
    assert Figure("prefill", "tokens/s", (20.0,)).share(40e9) is None
    assert 1e8 < read_rate() < 1e13


@pytest.mark.parametrize("num_tokens", [1, 4, 30])
def test_tokens_that_come_together_are_counted_with_the_time_before_them(num_tokens: int) -> None:
    """Whatever number of tokens a message has, and wherever among them the measurement begins."""
    times = [0.03 * message + 1e-5 * token for message in range(20) for token in range(num_tokens)]
    for num_warm in range(1, 2 * num_tokens + 1):
        assert rate_of(times, num_warm) == pytest.approx(num_tokens / 0.03)


def test_a_single_message_has_a_rate_too() -> None:
    """By the times of its tokens."""
    assert rate_of([1.0, 1.0001, 1.0002, 1.0003], 1) == pytest.approx(10_000, rel=1e-3)
