"""The benchmark of the processor: cells, shares and marks are what they say, and a run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cpu import cells, machine, report, rounds, sides
from benchmarks.cpu.cells import CELLS, PEER_CELLS, Cell
from benchmarks.cpu.rounds import ResultsFile, Samples
from benchmarks.make_random_model import write_model

IDENTITY = {"model": "tiny", "side": "numba-cpu", "is_quick": False}


def _samples(values: list[float], probes: list[float]) -> Samples:
    return Samples(values, probes)


def _record(**more: Any) -> rounds.Record:
    made = rounds.make_record(Cell("decode", 4, 128), _samples([10.0, 30.0, 20.0], [5.0, 5.0, 5.0]), IDENTITY, 1e9)
    return {**made, **more}


# ---- cells ----------------------------------------------------------------------------------------------------------


def test_cells_have_distinct_names_and_include_those_of_peers() -> None:
    """Results are kept by these names."""
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    assert {cell.name for cell in PEER_CELLS} <= set(names)
    assert {"decode b1 c16384", "decode b32 c128", "prefill 2048", "stream b16 c128", "rss"} <= set(names)


def test_a_pattern_selects_by_name() -> None:
    """As ``--cells`` does."""
    assert [cell.name for cell in cells.select(CELLS, r"^prefill|b32")] == [
        "decode b32 c128",
        "prefill 512",
        "prefill 2048",
    ]
    assert cells.select(CELLS, "") == list(CELLS)


def test_cells_beyond_the_positions_of_a_model_are_left_out() -> None:
    """The decoded tokens count, but not after a prompt."""
    found = cells.fitting(CELLS, 2048, 32)
    assert Cell("prefill", context=2048) in found
    assert Cell("decode", 1, 1024) in found
    assert Cell("decode", 1, 4096) not in found
    assert Cell("decode", 1, 2048) not in cells.fitting([Cell("decode", 1, 2048)], 2048, 32)


def test_the_pool_holds_the_largest_cell_in_whole_blocks() -> None:
    """Each sequence has blocks of its own."""
    assert cells.num_pool_tokens([Cell("decode", 3, 17), Cell("prefill", context=64)], 8, 16) == 3 * 32
    assert cells.num_pool_tokens([], 8, 16) == 16


# ---- machine --------------------------------------------------------------------------------------------------------


def test_busy_ticks_leave_idle_time_out() -> None:
    """Idle and waiting for a disk are not busy; guests are counted as users already."""
    assert machine.busy_ticks("cpu  1 2 4 1000 1000 8 16 32 64 128\ncpu0 9 9 9 9 9 9 9 9 9 9\n") == 63


def test_a_tree_is_a_process_and_all_its_descendants() -> None:
    """Also in sessions of their own; siblings are not in it."""
    assert machine.tree_of(5, {1: 0, 5: 1, 6: 5, 7: 6, 8: 1, 9: 7}) == {5, 6, 7, 9}


def test_work_of_this_process_and_its_children_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processors together were busy for two seconds, this tree for half a second of it."""
    busy, own, clock = iter([1000, 1200]), iter([500, 550]), iter([10.0, 14.0])
    monkeypatch.setattr(machine, "busy_ticks", lambda _stat: next(busy))
    monkeypatch.setattr(machine, "_tree_ticks", lambda _pid: next(own))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine, "_TICKS_PER_S", 100)
    others = machine.OtherCores()
    with others.counting():
        pass
    assert others.cores == pytest.approx(1.5 / 4)


def test_the_probe_reads_every_byte_once_in_a_pass() -> None:
    """Threads have parts that do not overlap."""
    sizes: list[int] = []

    def read(words: Any) -> None:
        sizes.append(words.nbytes)

    rate = machine.ReadRate(read, num_bytes=1 << 16, num_passes=3)
    sizes.clear()
    assert rate.gbs() > 0
    assert sum(sizes) == 3 << 16


# ---- rounds ---------------------------------------------------------------------------------------------------------


def test_sides_take_turns_between_probes() -> None:
    """The first call of each warms up; a sample's rate is the mean of the probes around it."""
    calls: list[str] = []
    probes: Iterator[float] = iter([10.0, 20.0, 30.0, 40.0, 50.0])

    def side(name: str) -> rounds.Measure:
        return lambda: calls.append(name) or float(len(calls))  # type: ignore[func-returns-value]

    found = rounds.sample_sides({"a": side("a"), "b": side("b")}, 2, lambda: next(probes))
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert found["a"].values == [3.0, 5.0]
    assert found["a"].probe_gbs == [15.0, 35.0]
    assert found["b"].probe_gbs == [25.0, 45.0]


def test_the_share_is_what_a_step_reads_against_the_probe() -> None:
    """20 tokens/s of 4 sequences are 5 steps/s, each of 1 GB."""
    record = _record()
    assert record["median"] == 20.0
    assert (record["min"], record["max"]) == (10.0, 30.0)
    assert record["gbs"] == pytest.approx(5.0)
    assert record["read_share"] == pytest.approx(1.0)


@pytest.mark.parametrize(("cores", "is_disturbed"), [(0.19, False), (0.21, True)])
def test_a_figure_is_marked_if_others_used_the_cores(cores: float, *, is_disturbed: bool) -> None:
    """In the record and in the table."""
    samples = _samples([10.0, 11.0], [5.0, 5.0])
    samples.others._other_ticks, samples.others._elapsed_s = round(cores * 1000 * machine._TICKS_PER_S), 1000.0
    record = rounds.make_record(Cell("prefill", context=512), samples, IDENTITY)
    assert record["is_disturbed"] is is_disturbed
    assert report.format_figure(record).endswith("*") is is_disturbed


def test_a_file_of_results_is_resumed(tmp_path: Path) -> None:
    """The last record of a key counts; a line that was cut off does not."""
    path = tmp_path / "results.jsonl"
    ResultsFile(path).add(_record(median=1.0))
    ResultsFile(path).add(_record(median=2.0))
    with path.open("a") as file:
        file.write(json.dumps(_record(cell="rss"))[:-9])
    results = ResultsFile(path)
    assert [record["median"] for record in results.records] == [2.0]
    assert results.has(rounds.key_of(_record()))
    assert not results.has(rounds.key_of(_record(is_quick=True)))
    assert not results.has(rounds.key_of(_record(cell="rss")))


def test_a_disturbed_record_can_be_measured_again(tmp_path: Path) -> None:
    """Only if it is asked for."""
    path = tmp_path / "results.jsonl"
    ResultsFile(path).add(_record(is_disturbed=True))
    assert ResultsFile(path).has(rounds.key_of(_record()))
    assert not ResultsFile(path, retries_disturbed=True).has(rounds.key_of(_record()))


# ---- report ---------------------------------------------------------------------------------------------------------


def test_a_row_has_both_sides_and_their_ratio() -> None:
    """Without the second side there is no ratio."""
    both = report.lines_of([_record(), _record(side="torch", median=8.0)], ["numba-cpu", "torch"])
    assert both[1].split()[:3] == ["decode", "b4", "c128"]
    assert both[1].split()[-2:] == ["2.50", "5.0"]
    alone = report.lines_of([_record()], ["numba-cpu", "torch"])
    assert alone[1].split()[-2:] == ["-", "5.0"]


def test_peak_memory_is_shown_with_its_parts() -> None:
    """Records of other cells have none."""
    parts = {"peak_mib": 100.0, "weights_mib": 60.0, "pool_mib": 30.0, "overhead_mib": 10.0}
    assert report.memory_lines([_record(), _record(**parts)]) == ["numba-cpu: peak 100 MiB = weights 60 + pool 30 + 10"]


# ---- sides ----------------------------------------------------------------------------------------------------------


def test_a_side_decodes_over_random_kv(tmp_path: Path) -> None:
    """The blocks of the context are filled, no number is denormal, and every figure is positive."""
    write_model(tmp_path, "tiny")
    side = sides.open_side("torch", tmp_path, 3 * 48, 256, 1)
    side.fill(3, 40)
    data = side.executor.read_blocks(np.arange(10, dtype=np.int32)).view(np.uint16)
    exponents = (data[1:] >> 7) & 0xFF
    assert not data[0].any()  # the null block
    assert exponents.min() > 0
    assert exponents.max() < 0xFF
    assert side.decode(3, 40, 4) > 0
    assert side.sustain(1, 40, 2, 0.0001) > 0
    assert side.prefill(20) > 0
    side.close()
