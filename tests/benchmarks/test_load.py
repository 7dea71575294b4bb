"""The load generator counts right: quantiles, intended times, what was refused; and it ends by itself."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.load.interrupts import Interrupts
from benchmarks.load.loops import Bounds, Refused, arrival_times, prompt_lengths, run_closed, run_open
from benchmarks.load.records import OK, UNFINISHED, Record, gaps, median_of, percentile, quantiles_ms, summarize
from benchmarks.load.servers import is_local
from benchmarks.load.watch import Watch, watching

ROOT = Path(__file__).resolve().parents[2]


def _lengths() -> itertools.repeat[int]:
    return itertools.repeat(16)


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.9, 90), (0.99, 99), (1.0, 100), (0.001, 1), (0.501, 51)])
def test_percentiles_are_values_that_happened(share: float, value: float) -> None:
    """Nearest rank: the least value that so many do not exceed."""
    assert percentile([float(n) for n in range(1, 101)], share) == value


def test_percentiles_of_few_values_are_the_worst_of_them() -> None:
    """A p99 of ten values is their maximum; of none it is no number."""
    assert quantiles_ms(n / 1000 for n in range(10)).p99 == 9.0
    assert math.isnan(quantiles_ms([]).p50)


def test_gaps_are_between_tokens_not_between_messages() -> None:
    """Three tokens in one message are two gaps of nothing."""
    assert sorted(gaps([(1.0, 1), (1.5, 3), (2.5, 1)])) == [0.0, 0.0, 0.5, 1.0]
    assert gaps([]) == gaps([(1.0, 1)]) == []


def test_a_summary_counts_what_the_window_holds() -> None:
    """Tokens by when they came, latencies by when their request was to begin, also of those that end behind it."""
    records = [
        Record(16, 0.5, 0.5, [(0.9, 1), (1.1, 1)], OK),  # began before: its tokens inside count, its latency does not
        Record(16, 1.0, 1.2, [(1.5, 1), (2.5, 2)], OK),
        Record(16, 1.9, 1.9, [(4.0, 1)], OK),
        Record(16, 2.0, 2.0, [(2.5, 9)], OK),
    ]
    summary = summarize(records, 1.0, 2.0)
    assert summary.tokens_per_s == 2
    assert summary.requests_per_s == 1
    assert (summary.first_token.num, summary.first_token.p50, summary.first_token.p99) == (2, 500.0, 2100.0)
    assert (summary.inter_token.num, summary.inter_token.p99) == (2, 1000.0)
    assert summary.late.p99 == pytest.approx(200.0)
    assert summary.num_ok == 2


def test_what_was_refused_is_counted_by_reason() -> None:
    """No room is not an error, and neither makes the latencies look better."""
    records = [
        Record(16, 0.1, 0.1, [(0.2, 1)], OK),
        *(Record(16, 0.2, 0.2, [], "QUEUE_FULL", True) for _ in range(3)),
        Record(16, 0.3, 0.3, [(0.4, 1)], "KV_BLOCKS_EXHAUSTED", True),
        Record(16, 0.3, 0.3, [], "ENGINE_FAULT"),
        Record(16, 0.3, 0.3),
    ]
    summary = summarize(records, 0.0, 1.0)
    assert summary.rejected == {"QUEUE_FULL": 3, "KV_BLOCKS_EXHAUSTED": 1}
    assert summary.errors == {"ENGINE_FAULT": 1, UNFINISHED: 1}
    assert summary.num_ok == 1
    assert json.loads(json.dumps(summary.as_json(), allow_nan=False))["inter_token"]["p50"] is None


def test_the_median_round_is_one_that_happened() -> None:
    """Its figures belong together."""
    rounds = [summarize([Record(1, 0.0, 0.0, [(0.5, count)], OK)], 0.0, 1.0) for count in (5, 1, 3, 9)]
    assert median_of(rounds) is rounds[2]


def test_prompts_are_spread_over_the_logarithm() -> None:
    """As many in each doubling, none out of bounds, the same for the same seed."""
    lengths = list(itertools.islice(prompt_lengths(16, 1024, "a"), 6000))
    assert (min(lengths), max(lengths)) == (16, 1024)
    per_doubling = [sum(16 << n <= length < 32 << n for length in lengths) for n in range(6)]
    assert all(900 < count < 1100 for count in per_doubling)
    assert lengths[:50] == list(itertools.islice(prompt_lengths(16, 1024, "a"), 50))


def test_arrivals_are_drawn_beforehand() -> None:
    """As many as the rate says, at times that nothing the server does can move."""
    times = arrival_times(100.0, 50.0, "a")
    assert 4700 < len(times) < 5300
    assert times == sorted(times)
    assert times == arrival_times(100.0, 50.0, "a")


def test_an_open_loop_counts_the_wait_for_a_place() -> None:
    """A server that stands still is charged for everybody who would have come: nothing is omitted."""

    async def run() -> list[Record]:
        async def work(number: int, record: Record) -> None:
            await asyncio.sleep(0.2 if number == 0 else 0)  # the first one blocks the only place
            record.arrivals.append((asyncio.get_running_loop().time(), 1))

        times = [0.0, 0.01, 0.02, 0.03]
        return await run_open(work, times, _lengths(), Bounds(0.1, 100), max_in_flight=1)

    records = asyncio.run(run())
    waits = [record.arrivals[0][0] - record.intended_s for record in records]
    assert [round(record.intended_s - records[0].intended_s, 3) for record in records] == [0.0, 0.01, 0.02, 0.03]
    assert min(waits) >= 0.165
    assert all(record.sent_s - record.intended_s >= 0.165 for record in records[1:])


def test_a_closed_loop_has_no_more_under_way_than_users() -> None:
    """And each user asks again as soon as it is answered."""
    under_way: list[int] = [0]

    async def work(number: int, record: Record) -> None:
        under_way.append(under_way[-1] + 1)
        await asyncio.sleep(0.005)
        under_way.append(under_way[-1] - 1)

    records = asyncio.run(run_closed(work, 4, _lengths(), Bounds(0.2, 40)))
    assert max(under_way) == 4
    assert 20 <= len(records) <= 43  # four users may pass the count together
    assert {record.outcome for record in records} == {OK}


def test_a_refused_user_tries_again_later() -> None:
    """Every refusal is counted, and the loop goes on."""

    async def work(number: int, record: Record) -> None:
        if number % 2:
            raise Refused("QUEUE_FULL", is_rejected=True)
        await asyncio.sleep(0.01)

    records = asyncio.run(run_closed(work, 1, _lengths(), Bounds(0.3, 100)))
    assert {(record.outcome, record.is_rejected) for record in records} == {(OK, False), ("QUEUE_FULL", True)}
    assert len(records) >= 4


def test_a_server_that_never_answers_does_not_hold_the_generator() -> None:
    """What is left is cancelled, and counted as unfinished."""

    async def work(number: int, record: Record) -> None:
        await asyncio.sleep(3600)

    begin_s = time.monotonic()
    records = asyncio.run(run_closed(work, 3, _lengths(), Bounds(0.1, 100, patience_s=0.1)))
    assert time.monotonic() - begin_s < 2
    assert [record.outcome for record in records] == [UNFINISHED] * 3


def test_a_fault_of_the_generator_is_not_a_figure() -> None:
    """What nobody expected is raised."""

    async def work(number: int, record: Record) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_closed(work, 2, _lengths(), Bounds(0.1, 10)))


def test_a_generator_that_is_the_limit_says_so() -> None:
    """A loop that is blocked is late, and busy."""

    async def run() -> Watch:
        async with watching() as watch:
            for _ in range(4):
                await asyncio.sleep(0.011)
                end_s = time.process_time() + 0.05
                while time.process_time() < end_s:
                    pass
        return watch

    watch = asyncio.run(run())
    assert watch.lag_p99_ms > 30
    assert watch.cpu_share > 0.01
    assert "ms late" in watch.limit
    assert Watch(0.3, 1.0).limit == ""
    assert Watch(0.95, 1.0).limit == "its processor time, 95% of a core"


@pytest.mark.parametrize(
    ("address", "holds"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("unix:/tmp/s", True),
     ("10.0.0.1:1", False), ("example.org:1", False), ("127.0.0.1.example.org:1", False)],
)  # fmt: skip
def test_other_machines_are_loaded_only_if_asked_for(address: str, holds: bool) -> None:
    """The default can hurt nobody else."""
    assert is_local(address) is holds


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.load", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def _report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return report


def test_a_remote_target_is_refused() -> None:
    """With what to add."""
    done = _run("--target", "example.org:50051")
    assert done.returncode == 2
    assert "--allow-remote if it is yours to load" in done.stderr


def test_a_full_server_is_counted_as_that() -> None:
    """A prompt that finds no room, and a sequence that is cut short, are refused, not answered."""
    command = "--model paged-reference --kv-memory 512KiB --paths direct --levels 64 --modes generate --seconds 0.6"
    report = _report(_run(*command.split(), "--rounds", "1", "--longest-prompt", "200"))
    closed = report["cells"][0]["figures"]
    assert closed["rejected"].keys() == {"KV_BLOCKS_EXHAUSTED"}
    assert closed["errors"] == {}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)], ids=["SIGTERM", "SIGKILL"])
def test_ended_by_a_signal_it_leaves_no_server_behind(number: int, code: int) -> None:
    """SIGTERM as well as Ctrl-C, in order; and where it is killed, which is how a crash looks to its servers."""
    command = [sys.executable, "-m", "benchmarks.load", "--model", "paged-reference", "--paths", "direct"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "runs of" in process.stderr.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert len(children) == 4  # two servers, each with what ends it
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert process.returncode == code
    assert "Traceback" not in said


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    """Take the signals; afterwards they do what they did before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Interrupts()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_while_the_loop_begins_is_not_lost(interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch) -> None:
    """There nobody could raise it; nothing of the work begins."""
    begun: list[int] = []
    run = asyncio.run

    async def work() -> None:
        begun.append(1)

    def run_late(coroutine: Coroutine[Any, Any, None]) -> None:
        signal.raise_signal(signal.SIGTERM)
        run(coroutine)

    monkeypatch.setattr(asyncio, "run", run_late)
    with pytest.raises(KeyboardInterrupt):
        interrupts.run(work)
    assert begun == []


def test_a_loop_that_is_cancelled_leaves_nothing_under_way() -> None:
    """Requests end before their connections do: on a closed one gRPC may crash."""
    ended: list[int] = []

    async def work(number: int, record: Record) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            ended.append(number)

    async def run() -> None:
        running = asyncio.create_task(run_closed(work, 3, _lengths(), Bounds(60, 100)))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sorted(ended) == [0, 1, 2]

    asyncio.run(run())


def test_a_short_run_loads_servers_of_its_own(tmp_path: Path) -> None:
    """Table, JSON line and plot; every request is answered, by both ways."""
    command = ("--model", "paged-reference", "--kv-memory", "16MiB", "--paths", "direct", "--levels", "1,4")
    done = _run(*command, "--seconds", "0.4", "--rounds", "1", "--tokens", "4", "--plot", str(tmp_path / "load.svg"))
    report = _report(done)
    assert sorted((cell["mode"], cell["loop"]) for cell in report["cells"]) == sorted(
        [(mode, loop) for mode in ("stream", "generate") for loop in ("closed", "closed", "open")]
    )
    for cell in report["cells"]:
        assert cell["figures"]["errors"] == cell["figures"]["rejected"] == {}
    assert sum(cell["figures"]["tokens_per_s"] for cell in report["cells"]) > 0
    assert len(re.findall(r"^\| (?:stream|generate) \| direct \|", done.stdout, re.MULTILINE)) == 6
    ET.parse(tmp_path / "load.svg")
