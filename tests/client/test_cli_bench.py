"""``ferrule bench``: its figures and loads, what it leaves behind, and what it refuses."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from ferrule import Client
from ferrule_cli.commands.bench_measure import Figure, Run, rate_of, read_rate
from ferrule_cli.commands.bench_view import draw
from ferrule_cli.load import view
from ferrule_cli.load.command import Level, Result
from ferrule_cli.load.records import OK, Record, Summary, summarize
from ferrule_cli.load.requests import Shape
from ferrule_cli.load.watch import Watch
from tests.api.harness import RunningServer
from tests.client.command_line import run
from tests.client.conftest import TOKEN, TOKEN_OF_BOB
from tests.client.fake_server import Failure, FakeServer
from tests.executor.cpu.models import HAS_VNNI

pytestmark = pytest.mark.usefixtures("no_variables")

SMALL = ("--seconds", "0.4", "--warm-up", "0.1", "--new-tokens", "4", "--prompt-tokens", "5-9", "--json")


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


@pytest.mark.timeout(400)  # compiles the kernels of int8 where nobody has yet
def test_a_server_of_its_own_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """With the model that ships; the table names every figure."""
    quantised = ("--weights", "int8", *(("--activations", "int8") if HAS_VNNI else ()))
    assert run("bench", "--seconds", "0.1", *quantised, "--threads", "1") == 0
    text = capsys.readouterr().out
    assert text.startswith("demo: int8, ")
    for word in ("memory reads", "first token", "prefill", "decode 32", "of memory", "%"):
        assert word in text


def test_the_table_fits_80_columns() -> None:
    """With six digits in every figure; a heading that is cut says nothing."""
    out = io.StringIO()
    name, samples = "first token, 128", (134_119.0, 134_119.0, 903_639.0)
    figures = (Figure(name, "tokens/s", samples, 1e6, 1),)
    draw(Console(file=out, width=80), Run("demo", "x", "int8", "cpu", "1", 5 << 20, 40e9, figures))
    assert out.getvalue().splitlines()[2].endswith("of memory")
    assert "134,119-903,639  tokens/s" in out.getvalue()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--requests", "3"), "--requests goes with --concurrency or --rate (OPTION_ALONE)"),
        (("--concurrency", "0"), "it must be at least 1 and at most 250"),
        (("--concurrency", "1,x"), "'x' is not a number"),
        (("--rate", "1", "--prompt-tokens", "9-5"), "'9-5' is not a number of tokens or a range such as 16-1024"),
        (("--rate", "1", "--new-tokens", "9999"), "exceed the context of the model, 512: lower"),
        (
            ("--rate", "2,5000", "--seconds", "300"),
            "5000 requests per second for 302 s are more than 1000000: lower --rate",
        ),
        (("--target", "127.0.0.1:1"), "TARGET and --target are the same"),
        (("--weights", "int8"), "--weights is for a server of our own"),
    ],
)
def test_wrong_use_is_told_apart(
    target: str, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, and nothing is measured."""
    assert run("bench", target, *options) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_cannot_start_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the last lines of its log."""
    assert run("bench", "--model", str(tmp_path / "missing")) == 1
    captured = capsys.readouterr()
    assert "there is no such folder" in captured.err
    assert "SERVER_ENDED" in captured.err


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


# ---- loads ----------------------------------------------------------------------------------------------------------


def load(*arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Return the JSON of a small load and its standard error. It has its own process: the servers here use grpc.aio."""
    command = [sys.executable, "-m", "ferrule_cli", "bench", *SMALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.parametrize("mode", ["generate", "stream"])
def test_a_load_reaches_a_secured_server(
    mode: str, secured: RunningServer, client_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS, a certificate and a token; every level has all figures, and no handle is left."""
    monkeypatch.delenv("FERRULE_TLS_CA")
    levels = (
        "--tls-ca",
        str(client_files / "ca.pem"),
        "--concurrency",
        "1,3",
        "--rate",
        "20",
        "--fork",
        "2",
        "--mode",
        mode,
    )
    facts, said = load(secured.address.target, *levels)
    assert said == ""
    assert {name: type(value) for name, value in facts.items() if name != "levels"} == {
        **dict.fromkeys(("model", "executor", "dtype", "device", "server_version", "mode"), str),
        **dict.fromkeys(("new_tokens", "num_branches", "seed", "num_unreleased"), int),
        "prompt_tokens": list,
        "interrupted": bool,
    }
    assert (facts["mode"], facts["num_branches"], facts["prompt_tokens"]) == (mode, 2, [5, 9])
    assert [(one["loop"], one.get("concurrency"), one.get("rate_per_s")) for one in facts["levels"]] == [
        ("closed", 1, None), ("closed", 3, None), ("open", None, 20.0)
    ]  # fmt: skip
    for one in facts["levels"]:
        own = ("loop", "concurrency" if one["loop"] == "closed" else "rate_per_s", "retries", "generator")
        assert set(one) == {*own, *(figure.name for figure in fields(Summary))}
        assert set(one["generator"]) == {"cpu_share", "lag_p99_ms", "limit"}
        assert one["num_ok"] > 0
        assert one["errors"] == one["retries"] == {}
        first, whole = one["first_token_ms"], one["end_to_end_ms"]
        assert 0 < first["p50"] <= first["p90"] <= first["p99"] <= whole["p99"]
        assert one["inter_token_ms"]["num"] >= one["num_ok"] * (3 + 2)  # the prefill draws the first token for both
        assert one["tokens_per_s"] > one["requests_per_s"] * (1 + 3)
    assert facts["num_unreleased"] == 0
    assert secured.engine.snapshot().num_sequences == 0


@pytest.mark.usefixtures("client_files")
@pytest.mark.parametrize("mode", ["generate", "stream"])
def test_a_quota_is_counted_and_not_a_crash(mode: str, secured: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bob can hold three handles: of five users some are refused; with four branches each, all are."""
    monkeypatch.setenv("FERRULE_TOKEN", TOKEN_OF_BOB)
    bench = (secured.address.target, "--mode", mode, "--warm-up", "0", "--concurrency")
    (level,) = load(*bench, "5", "--new-tokens", "60")[0]["levels"]
    assert level["errors"].keys() == {"QUOTA_HANDLES"}
    assert level["num_ok"] > 0
    facts, said = load(*bench, "1", "--fork", "4", code=1)
    assert facts["levels"][0]["num_ok"] == 0
    assert json.loads(said)["reason"] == "NOTHING_MEASURED"
    assert secured.engine.snapshot().num_sequences == 0


@pytest.mark.parametrize(("retries", "num_refused"), [(0, 3), (3, 6)])
def test_refused_calls_are_tried_again_if_wanted(fake: FakeServer, retries: int, num_refused: int) -> None:
    """And counted by reason, as retries or as errors. A release that failed is tried again in any case."""
    full = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", retry_after_s=0.01)
    fake.failures |= {"ReleaseCache": [full], "Generate": [full] * num_refused}  # the last two are measured
    bench = ("--concurrency", "1", "--requests", "4", "--warm-up", "0", "--retries", str(retries))
    (level,) = load(fake.target, *bench)[0]["levels"]
    assert (level["errors"], level["retries"]) == (({}, {"QUEUE_FULL": 3}) if retries else ({"QUEUE_FULL": 2}, {}))
    assert level["num_ok"] == 4 - sum(level["errors"].values())
    assert fake.sequences == {}
    fake.failures["Generate"] = [Failure(grpc.StatusCode.INTERNAL, reason="ENGINE_FAULT")]
    assert json.loads(load(fake.target, "--rate", "1", code=1)[1])["reason"] == "ENGINE_FAULT"  # one error, at once


@pytest.mark.parametrize("mode", ["generate", "stream"])
def test_ctrl_c_shows_what_was_measured_and_releases_all(mode: str, target: str) -> None:
    """With many requests under way; what they have not ended is said."""
    command = [sys.executable, "-m", "ferrule_cli", "bench", target, "--concurrency", "6", "--fork", "2", "--json"]
    command += ["--mode", mode, "--seconds", "60", "--warm-up", "0", "--new-tokens", "100", "--prompt-tokens", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, Client(target) as client:
        while process.poll() is None and client.status().live_sequences < 6:
            time.sleep(0.01)
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 130
        facts = json.loads(out)
        assert facts["interrupted"]
        assert facts["num_unreleased"] == 0
        (level,) = facts["levels"]
        assert level["num_unfinished"] > 0
        assert 0 < level["seconds"] < 30
        assert level["tokens_per_s"] > 0
        assert level["errors"] == {}
        assert client.status().live_sequences == 0


@pytest.fixture
def frozen_when_asked(tmp_path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Address of a real server, and what makes it stand still for good."""
    address = f"unix:{tmp_path}/ferrule.sock"
    command = [sys.executable, "-m", "ferrule_server", "--executor", "paged-reference", "--listen", address]
    with subprocess.Popen(
        [*command, "--kv-memory", "4MiB"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("ready")
            yield address, lambda: server.send_signal(signal.SIGSTOP)
        finally:
            server.kill()


@pytest.mark.parametrize(("mode", "number"), [("generate", signal.SIGINT), ("stream", signal.SIGTERM)])
def test_a_second_signal_does_not_wait_for_a_frozen_server(
    mode: str, number: signal.Signals, frozen_when_asked: tuple[str, Callable[[], None]]
) -> None:
    """After a second the command says what it waits for; the second signal ends it at once, with its figures."""
    target, freeze = frozen_when_asked
    command = [sys.executable, "-m", "ferrule_cli", "bench", target, "--concurrency", "3", "--fork", "2", "--json"]
    command += ["--mode", mode, "--seconds", "60", "--warm-up", "0", "--new-tokens", "400", "--prompt-tokens", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        with Client(target) as client:
            while process.poll() is None and client.status().live_sequences < 6:
                time.sleep(0.01)
            time.sleep(0.7)
            # in the middle of a text, so that the command has heard of its handles
            while process.poll() is None and not any(100 < one.length < 200 for one in client.list_caches()):
                time.sleep(0.001)
        freeze()
        process.send_signal(number)
        first_s = time.monotonic()
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line == "releasing handles, at most 20 s; Ctrl-C again leaves them to their leases (15 s)\n"
        assert 0.9 < time.monotonic() - first_s < 15
        process.send_signal(number)
        second_s = time.monotonic()
        out, said = process.communicate(timeout=300)
        assert time.monotonic() - second_s < 15
    assert (process.returncode, said) == (128 + number, "")
    facts = json.loads(out)
    assert facts["interrupted"]
    assert facts["num_unreleased"] > 0
    assert facts["levels"][0]["tokens_per_s"] > 0


def test_the_table_of_a_load_fits_80_columns() -> None:
    """With many digits in every figure; what is to be known of the figures stands below."""
    records = [Record(16, 0.0, 0.0, {0: [99.0, 110.0]}, OK), Record(16, 0.0), Record(16, 0.0, 0.0, {}, "QUEUE_FULL")]
    level = Level("closed", 128, summarize(records, 0.0, 999.0), {"QUEUE_FULL": 2}, Watch(0.9, 1.0))
    result = Result(Shape("stream", 32, 4, 256, 1), (16, 64), [level], signal.SIGINT, 3)
    out = io.StringIO()
    view.draw(Console(file=out, width=80), result, "a-model")
    lines = out.getvalue().splitlines()
    assert lines[0] == "a-model: stream, prompts of 16 to 64 tokens, 32 new in each of 4 branches"
    assert lines[1].endswith("request")
    assert lines[2].endswith("110,000")
    notes = (
        "failed: 1 QUEUE_FULL; succeeded: 1",
        "tried again: 2 QUEUE_FULL",
        "1 request had not finished",
        "90% of a core",
    )
    for part, line in zip((*notes, "interrupted", "3 handles could not be released"), lines[5:], strict=True):
        assert part in line
