"""The benchmark of the GPU without one: its parts compute what they say, and nothing in its report is made up."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import bench_gpu
from benchmarks.gpu import (
    bars,
    batching,
    correct,
    decode,
    models,
    operations,
    parts,
    peers,
    reference,
    report,
    timing,
    wire,
)
from benchmarks.gpu.executors import kv_bytes, open_executor
from benchmarks.gpu.ours import NotReady, Ours
from benchmarks.gpu.peers import CompiledPeer, GraphPeer, Peer, PlainPeer, StaticPeer
from benchmarks.gpu.process import Workplace, run_limited
from benchmarks.gpu.worker import TASKS
from ferrule_server.executor.base import ExecutorState
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.tensors import ModelWeights
from ferrule_server.model.weights import load_model
from tests.engine.deferred import Call, DeferredExecutor
from tests.executor.cuda.test_end_to_end import simulated
from tests.executor.cuda.tiny_model import tiny_executor

TINY, CPU = models.TINY, torch.device("cpu")
CONFIG = models.config_of(TINY)
TASK = {"model": TINY, "dry": "sm_90a", "rounds": 1, "limit_s": 60.0}
Row = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """As the workers of a dry run do: threads that wait for one another cost more than they compute here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    """Of the tiny model."""
    return models.random_weights(TINY, CPU)


def _executor(weights: ModelWeights, batch: int = 3, length: int = 64) -> TorchExecutor:
    made = open_executor(TASK, weights, kv_bytes(CONFIG, batch, length), length)
    assert isinstance(made, TorchExecutor)
    return made


# ---- models -------------------------------------------------------------------------------------------------------


def test_bytes_of_a_step_are_those_of_the_tensors(weights: ModelWeights) -> None:
    """Every weight once, and K and V of every token."""
    tensors = dict(models.checkpoint_tensors(CONFIG, weights))
    assert sum(tensor.numel() for tensor in tensors.values()) == models.num_read_weights(CONFIG)  # the head is tied
    kv = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    assert models.read_bytes(CONFIG, 3, 10.5) == 2 * models.num_read_weights(CONFIG) + 3 * 10.5 * kv


@pytest.mark.parametrize(
    ("name", "gigabytes", "kib_per_token"),
    [("Qwen3-0.6B", 1.192, 112), ("Qwen3-1.7B", 3.441, 112), ("Qwen3-8B", 15.137, 144), ("Llama-3.2-1B", 2.472, 32)],
)
def test_known_models_have_their_sizes(name: str, gigabytes: float, kib_per_token: int) -> None:
    """As their configurations on the hub give them."""
    config = models.config_of(name)
    assert round(models.read_bytes(config, 1, 0) / 1e9, 3) == gigabytes
    assert models.kv_bytes_per_token(config) == kib_per_token << 10


def test_weights_are_random_and_the_same_each_time(weights: ModelWeights) -> None:
    """No matrix holds zeros; the same seed gives the same bits, another one does not."""
    again, other = (dict(models.checkpoint_tensors(CONFIG, models.random_weights(TINY, CPU, seed))) for seed in (0, 1))
    for name, tensor in models.checkpoint_tensors(CONFIG, weights):
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])
        if tensor.dim() == 2:
            assert float(tensor.float().std()) == pytest.approx(models.STD, rel=0.05)


def test_written_folder_loads_as_the_same_model(weights: ModelWeights, tmp_path: Path) -> None:
    """What the server is given are the tensors that the peers have."""
    assert models.write_folder(TINY, weights, tmp_path) > 2 * models.num_read_weights(CONFIG)
    loaded = load_model(tmp_path, dtype="bfloat16").take_weights()
    for (name, ours), (_, theirs) in zip(
        models.checkpoint_tensors(CONFIG, weights), models.checkpoint_tensors(CONFIG, loaded), strict=True
    ):
        assert torch.equal(ours, theirs), name


# ---- ours ---------------------------------------------------------------------------------------------------------


class CountingExecutor(DeferredExecutor):
    """Takes steps ahead, and counts those after its preparation as replays of a graph."""

    def __init__(self, inner: TorchExecutor, num_preparations: int = 2, fallback_reason: str = "") -> None:
        super().__init__(inner)
        self.num_to_tend, self.takes_histories = num_preparations, True
        self._reason, self._counts = fallback_reason, [0, 0]

    @property
    def state(self) -> ExecutorState:
        """What ran so far."""
        stage = "capturing" if self.num_to_tend else ""
        graph_steps, torch_steps = self._counts
        state = ExecutorState("numba-cuda", preparation=stage, fallback_reason=self._reason)
        return replace(state, num_graph_steps=graph_steps, num_torch_steps=torch_steps)

    def _called(self, call: Call, num_rows: int) -> None:
        super()._called(call, num_rows)
        self._counts[self.num_to_tend > 0] += call in ("run", "result")


def test_steps_ahead_choose_the_tokens_of_steps_in_turns() -> None:
    """Two in flight, each fed with the tokens of the one before; twice over the same KV."""
    weights = models.random_weights(TINY, CPU)
    for layer in weights.layers:
        layer["down"].mul_(40)  # else a tied head repeats the token before
    plain = Ours(_executor(weights), is_dry=True)
    plain.prepare(3, 37, 8)
    inner, seen = _executor(weights), list[list[int]]()
    queued = CountingExecutor(inner)
    ahead = Ours(queued)
    ahead.prepare(3, 37, 8)
    inner.run, run = (lambda batch: seen.append(batch.token_ids.tolist()) or run(batch)), inner.run  # type: ignore[func-returns-value, method-assign]
    queued.calls.clear()
    ahead.decode(8)
    ahead.decode(8)
    chosen = plain.decoded(8)
    assert seen[1:8] == chosen[:7]
    assert seen[8:] == seen[:8]
    assert [kind for kind, _ in queued.calls[:3]] == ["submit", "submit", "result"]
    assert queued.misuse == []
    assert len({tuple(tokens) for tokens in chosen}) > 1


def test_branches_share_the_blocks_of_their_context(weights: ModelWeights) -> None:
    """Only whole blocks; what follows is each one's own."""
    ours = Ours(_executor(weights), is_dry=True, shares_prefix=True)
    tables = ours.tables(3, 37, 45)
    assert (tables[0, :2] == tables[1, :2]).all()
    assert len(set(tables[:, 2].tolist())) == 3
    with pytest.raises(NotReady, match="do not fit"):
        ours.tables(64, 37, 64)


def test_torch_is_never_measured_as_ours(weights: ModelWeights) -> None:
    """A fallback ends the preparation with its reason; a step that was no replay is said in the row."""
    failing = CountingExecutor(_executor(weights), num_preparations=9, fallback_reason="no kernel loads")
    (row,) = decode.measured([Ours(failing)], CONFIG, (2, 20, 4), 1)
    assert (row["status"], row["reason"]) == ("NOT READY", "NotReady: no kernel loads")
    slow = CountingExecutor(_executor(weights))
    ours = Ours(slow)
    ours.prepare(2, 20, 4)
    slow.num_to_tend = 1
    ours.make_ready = lambda step: None  # type: ignore[method-assign]
    (row,) = decode.measured([ours], CONFIG, (2, 20, 4), 1)
    assert (row["status"], row["graph_steps"], row["torch_steps"]) == ("NOT ALL ON GRAPHS", 0, 8)


@pytest.mark.slow
def test_ours_drives_the_executor_of_the_gpu() -> None:
    """In the simulator: ready after its graph, every step a replay, tokens and logits of torch; buffers by name."""
    executor, _ = simulated()
    ours, plain = Ours(executor), Ours(tiny_executor("qwen3", num_layers=1), is_dry=True)
    for one in (ours, plain):
        one.prepare(2, 20, 3)
    before = ours.counts()
    ours.decode(3)
    assert decode._steps_of(ours, before, 3) == {"graph_steps": 3, "launched_steps": 0, "torch_steps": 0}
    assert ours.decoded(3) == plain.decoded(3)
    assert np.abs(ours.first_logits() - plain.first_logits()).max() < decode.LIMIT_OF_DIFFERENCE
    assert set(correct._buffers(ours, 2)) == {"qkv", "attended", "gated", "hidden"}


# ---- peers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PlainPeer, GraphPeer, CompiledPeer, StaticPeer])
def test_peers_compute_what_ours_does(weights: ModelWeights, kind: type[Peer]) -> None:
    """Each on the same tensors, from the same prompt; rewound to the context, again the same."""
    if kind is StaticPeer:
        pytest.importorskip("transformers")
    peer = kind(TINY, weights) if kind in (PlainPeer, GraphPeer) else kind(TINY, weights, None)  # type: ignore[call-arg]
    rows = list(decode.measured([Ours(_executor(weights), is_dry=True), peer], CONFIG, (2, 40, 8), 1))
    assert [row["arm"] for row in rows] == ["ferrule", peer.name]
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert rows[1]["difference"] < 0.02


def test_a_peer_that_computes_something_else_is_found(weights: ModelWeights) -> None:
    """Its logits are compared before its time counts."""
    other = PlainPeer(TINY, models.random_weights(TINY, CPU, seed=1))
    rows = list(decode.measured([Ours(_executor(weights), is_dry=True), other], CONFIG, (1, 20, 4), 1))
    assert [row["status"] for row in rows] == ["ok", "WRONG"]


def test_transformers_computes_with_the_very_tensors(weights: ModelWeights) -> None:
    """Nothing is copied, the output head neither."""
    pytest.importorskip("transformers")
    model = peers.transformers_model(TINY, weights)
    tensors = dict(models.checkpoint_tensors(CONFIG, weights))
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert places == {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert model.lm_head.weight.data_ptr() == weights.head.data_ptr()


def test_continuous_batching_is_timed_from_token_to_token() -> None:
    """Of all its requests together."""
    pytest.importorskip("transformers")
    (row,) = batching.batching({**TASK, "cells": [(3, 20, 6)]})
    assert (row["arm"], row["status"], row["batch"]) == (batching.ARM, "ok", 3)


# ---- correctness --------------------------------------------------------------------------------------------------


def test_ours_is_compared_with_float32(weights: ModelWeights) -> None:
    """Steps of one row and of several: logits, KV and tokens; other weights are wrong."""
    ours = Ours(_executor(weights), is_dry=True)
    for cell in ((3, 40, 2, 1), (2, 33, 2, 4)):
        row = correct._compared(ours, weights, cell)
        assert (row["status"], row["wrong_tokens"], sorted(row["errors"])) == ("ok", 0, ["kv", "logits"])
        assert row["decided"] > 0
    row = correct._compared(ours, models.random_weights(TINY, CPU, seed=1), (1, 40, 1, 1))
    assert row["status"] == "WRONG"
    assert row["errors"]["kv"]["error"] > row["errors"]["kv"]["limit"]


def test_buffers_of_the_runner_are_compared_too(weights: ModelWeights) -> None:
    """By name, those of the last step: right ones pass, one that is off by 3 % does not."""
    ours = Ours(_executor(weights), is_dry=True)
    ids = torch.from_numpy(np.random.default_rng(11).integers(0, CONFIG.vocab_size, (1, 42))).long()
    trace = reference.traced(CONFIG, weights, ids, 1, torch.bfloat16)
    held = {name: values[0] for name, values in trace.buffers.items()}
    for factor, status in ((1.0, "ok"), (1.03, "WRONG")):
        buffers = type("Buffers", (), {**held, "gated": held["gated"] * factor})
        ours.executor.runner = type("Runner", (), {"buffers": buffers})  # type: ignore[attr-defined]
        row = correct._compared(ours, weights, (1, 40, 2, 1))
        assert row["status"] == status, row["errors"]
        assert {"qkv", "attended", "gated", "hidden"} < set(row["errors"])


def test_tokens_count_where_the_gap_is_beyond_the_error() -> None:
    """A gap of 1 with logits moved by 0.4 each decides, one with 0.6 does not."""
    exact = torch.tensor([[[3.0, 2.0, 0.0]]])
    for moved, chosen, decided, wrong in ((0.4, 1, 1, 1), (0.4, 0, 1, 0), (0.6, 1, 0, 0)):
        traces = reference.Trace(exact), reference.Trace(exact - moved)
        found = correct._argmax(torch.tensor([[chosen]]), *traces)
        assert (found["decided"], found["wrong_tokens"], found["other_tokens"]) == (decided, wrong, int(chosen != 0))


def test_nan_is_infinitely_far() -> None:
    """And no comparison lets it pass."""
    assert correct.relative(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")


# ---- the wire and operations --------------------------------------------------------------------------------------


def test_three_ways_through_a_server(shipped_target: str) -> None:
    """Each gives as many tokens as there were steps, in order, and can be timed again."""
    rows = list(wire._through(shipped_target, CONFIG, [(1, 20, 400), (3, 20, 400)], TASK))
    ways = ["Generate, branches", "Generate, calls", "StreamDecode"]
    assert [row["arm"] for row in rows] == ways * 2
    assert {row["status"] for row in rows} == {"ok"}


class _Counting:
    """A client of a server that runs so many steps per sample from graphs, by launches and in torch."""

    def __init__(self, *steps: int, sizes: tuple[int, ...] = (1, 2, 4)) -> None:
        self.steps, self.sizes, self.num_samples = steps, sizes, 0
        self.warmed: list[list[int]] = []
        self.admin = SimpleNamespace(warmup=lambda sizes, timeout: self.warmed.append(sizes))

    def capabilities(self) -> SimpleNamespace:
        return SimpleNamespace(max_step_rows=16)

    def status(self) -> SimpleNamespace:
        names = ("graph_steps", "launched_steps", "torch_steps")
        debug = {name: str(self.num_samples * count) for name, count in zip(names, self.steps, strict=True)}
        debug["captured_batch_sizes"] = ",".join(map(str, self.sizes))
        return SimpleNamespace(debug=debug, fallback_reason="none")

    def way(self, num_steps: int) -> list[list[float]]:
        self.num_samples += 1
        return [[0.1 * step for step in range(num_steps + 1)]] * 3


@pytest.mark.parametrize(
    ("arm", "steps", "status"),
    [
        ("StreamDecode", (5, 0, 0), "ok"),
        ("StreamDecode", (4, 0, 0), "NOT ALL ON GRAPHS"),
        ("StreamDecode", (5, 1, 0), "NOT ALL ON GRAPHS"),
        ("Generate, calls", (9, 0, 1), "NOT ALL ON GRAPHS"),
        ("Generate, branches", (5, 1, 3), "ok"),
        ("Generate, branches", (5, 1, 4), "NOT ALL ON GRAPHS"),
    ],
)
def test_steps_of_the_server_that_were_no_replay_are_said(arm: str, steps: tuple[int, ...], status: str) -> None:
    """Only a prompt may run otherwise, and only where there is one in the sample: 20 tokens in steps of 16 rows."""
    client = _Counting(*steps)
    (row,) = wire._one_way(client.way, arm, (3, 20, 5), {**TASK, "dry": "", "rounds": 2}, client)  # type: ignore[arg-type]
    assert (row["status"], row["graph_steps"], row["torch_steps"]) == (status, 2 * steps[0], 2 * steps[2])
    assert client.warmed == [[1, 2, 4]]


def test_a_larger_graph_is_not_that_of_the_batch() -> None:
    """Nor a smaller one."""
    client = _Counting(5, 0, 0, sizes=(1, 2, 8))
    (row,) = wire._one_way(client.way, "StreamDecode", (3, 20, 5), {**TASK, "dry": ""}, client)  # type: ignore[arg-type]
    assert row["status"] == "left out"


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    """And the part ends."""
    task = {**TASK, "models": str(tmp_path)}
    with (
        pytest.raises(RuntimeError, match=r"did not start: [\s\S]*none"),
        wire.server(task, tmp_path / "none", 1 << 24, 64),
    ):
        pass


def test_operations_are_measured_in_process() -> None:
    """Every kind, with more than one row and one branch."""
    task = {**TASK, "context": 96, "verify_contexts": [20], "transfer_blocks": 4}
    rows = list(operations.operations(task))
    assert {row["kind"] for row in rows} == {"verify", "transfer", "prefix hit", "fork"}
    assert {row["status"] for row in rows} == {"ok"}
    assert [row["rows"] for row in rows if row["kind"] == "verify"] == [1, 2, 4, 8, 16]


# ---- timing -------------------------------------------------------------------------------------------------------


def test_arms_take_turns() -> None:
    """A B, B A, ...; the round before the first does not count."""
    order: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def prepare(self, batch: int, context: int, num_steps: int) -> None: ...

        def decode(self, num_steps: int) -> None:
            order.append(self.name)
            time.sleep(0.004 if self.name == "a" else 0.001)

    found = timing.alternate([Fake("a"), Fake("b")], 2, 2)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert [len(samples) for samples in found.values()] == [2, 2]
    assert min(found["a"]) >= 2.0
    assert min(found["b"]) >= 0.5


def test_time_per_step_counts_while_all_are_continued() -> None:
    """Not the first tokens of early ones, nor the last of late ones."""
    early, late = [0.0, 1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]
    assert timing.ms_per_step([early, late]) == 1000.0
    assert timing.ms_per_step([[1.0, 1.5, 2.0]]) == 500.0
    with pytest.raises(ValueError, match="one after the other"):
        timing.ms_per_step([[0.0, 1.0], [2.0, 3.0]])


# ---- parts and processes ------------------------------------------------------------------------------------------


def test_parts_end_within_ten_minutes_and_can_be_run() -> None:
    """Each has a name of its own and a worker; a dry run has one of every kind."""
    everything, dry = parts.all_parts(), parts.dry_parts()
    assert len({part.name for part in everything}) == len(everything)
    assert max(part.limit_s for part in everything) < 600
    assert {part.task for part in everything} == {part.task for part in dry} == set(TASKS)
    assert {part.settings.get("peer") for part in everything} == {part.settings.get("peer") for part in dry}
    for task, module in TASKS.items():
        assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), task))


def test_parts_cover_what_is_asked() -> None:
    """Batches and contexts of every model in process and through gRPC; every bar has its cell."""
    found = {part.name: part for part in parts.all_parts()}
    grid = {(batch, context) for batch in (1, 8, 32, 128) for context in (256, 2048, 8192)}
    for model in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B"):
        assert {cell[:2] for cell in found[f"decode:{model}"].settings["cells"]} == grid
        assert f"correct:{model}" in found
        cells = {
            cell[:2] for context in (256, 2048, 8192) for cell in found[f"wire:{model}:{context}"].settings["cells"]
        }
        assert cells == grid
    rows = [row for part in found.values() for row in _rows_of(part, share=0.8)]
    assert {row["verdict"] for row in bars.judge(rows, 4300.0)} <= {"aim met", "parity met", "missed"}


def _rows_of(part: parts.Part, share: float) -> list[Row]:
    """Return what a part would say if every arm ran at a share of 4.3 TB/s; peers at 45 % of ours."""
    if "cells" not in part.settings or part.task not in ("decode", "against", "wire"):
        return []
    config, made = models.config_of(part.model), []
    arms = {"decode": ["ferrule"], "against": ["ferrule", _PEERS.get(part.settings.get("peer", ""), "")]}
    for cell in part.settings["cells"]:
        batch, context, steps = cell
        for arm in arms.get(part.task, ["Generate, branches"]):
            rate = 4.3e9 * share * (1.0 if arm in ("ferrule", "Generate, branches") else 0.45)
            ms = models.read_bytes(config, batch, context + (steps + 1) / 2) / rate
            row = decode.decode_row(config, cell, arm, [ms * 1e0, ms * 1.01, ms * 0.99])
            wired = {"kind": "wire", "loss": 0.005} if part.task == "wire" else {}
            made.append({**row, **wired, "part": part.name, "model": part.model})
    return made


_PEERS = {"static": "transformers static", "compiled": "gpt-fast style", "graph": "torch in a graph"}


def test_a_part_is_killed_with_its_children(tmp_path: Path) -> None:
    """At its limit; what it said before stays."""
    out, log = tmp_path / "out", tmp_path / "log"
    assert run_limited(["sh", "-c", "sleep 60 & echo $!; wait"], out, log, 1.0) == "stopped after 1 s"
    pid = int(out.read_text())
    deadline = time.monotonic() + 30
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_alive(pid)
    assert run_limited([sys.executable, "-c", "raise SystemExit(3)"], out, log, 20) == "exit status 3"
    assert run_limited([sys.executable, "-c", "print(1)"], out, log, 20) == ""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_finished_parts_are_kept_for_the_next_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run from the command line: one part, its report, and the same again without running it."""
    arguments = ["--dry-run", "--output", str(tmp_path), "--parts", "correct"]
    for expected in (r" correct:tiny: \d+ s\n", r" correct:tiny: from 20"):
        with pytest.raises(SystemExit, match="0"):
            bench_gpu.main(arguments)
        said = capsys.readouterr().out
        assert re.search(expected, said), said
        assert "none of its times is a figure" in said
    found = json.loads((tmp_path / "results.json").read_text())
    assert report.problems_of(found) == []
    assert (found["is_dry"], found["ceiling_gbs"], found["device"], found["failures"]) == (True, None, None, [])
    assert {bar["verdict"] for bar in found["bars"]} == {"not measured"}
    assert not (tmp_path / "share.svg").exists()


def test_results_of_another_commit_or_device_do_not_stand_beside_these(tmp_path: Path) -> None:
    """Nor are parts that failed taken for finished."""
    part = parts.dry_parts()[1]
    here = Workplace(tmp_path, {}, {"commit": "a", "is_dry": False, "device": "H200"})
    path = here.folder() / "correct-tiny.json"
    for commit, failures, is_kept, is_shown in (
        ("a", [], True, True),
        ("b", [], False, False),
        ("a", ["x"], False, True),
    ):
        kept = {"commit": commit, "is_dry": False, "device": "H200", "date": "2026", "rows": [], "failures": failures}
        path.write_text(json.dumps(kept))
        assert (here.kept(part) is not None, len(here.results()) == 1) == (is_kept, is_shown)


def test_a_part_that_fails_is_said_and_no_end(tmp_path: Path) -> None:
    """With the last line of its log; rows with another status than expected count as failures."""
    part = replace(parts.dry_parts()[1], task="nothing", settings={})
    result = Workplace(tmp_path, {"dry": "sm_90a"}, {"commit": "a"}).run(part)
    assert result["failures"] == ["correct:tiny: exit status 1; KeyError: 'nothing'"]


def test_time_that_is_short_leaves_parts_for_the_next_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None is started that might not end in time."""
    options = ["--dry-run", "--output", str(tmp_path), "--minutes", "0.5"]
    with pytest.raises(SystemExit, match="0"):
        bench_gpu.main(options)
    assert "left for the next call: ceilings, correct:tiny, decode:tiny" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "Nope"], "--models: invalid choice"),
        (["--stages", "z"], "--stages: invalid choice"),
        (["--minutes", "0"], "--minutes: .*above 0"),
        (["--output", "file/below"], "--output: .*file"),
        (["--bundle", "none"], "--bundle: .*none is not a bundle"),
        (["--build-bundle", "none/kernels"], "--build-bundle: .*none"),
    ],
)
def test_arguments_are_checked_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    said: str,
) -> None:
    """With 2 and one line, before any process is started."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        bench_gpu._parse_arguments(["--output", "out", *arguments])
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.slow
def test_whole_dry_run_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every part of it, in processes of their own."""
    with pytest.raises(SystemExit, match="0"):
        bench_gpu.main(["--dry-run", "--output", str(tmp_path)])
    assert "nothing failed" in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text())
    assert [part["part"] for part in found["parts"]] == [part.name for part in parts.dry_parts()]


# ---- bars, report, plot -------------------------------------------------------------------------------------------


def _recorded() -> list[Row]:
    """Return rows as a run would have them, of arms at made-up shares."""
    return [row for part in parts.all_parts() for row in _rows_of(part, share=0.8)]


def test_bars_are_judged_by_the_measured_ceiling() -> None:
    """Shares, times, ratios and losses; a row that is not right is none."""
    judged = {row["bar"]: row for row in bars.judge(_recorded(), 4300.0)}
    assert judged["Qwen3-8B batch 1 context 256"]["value"] == pytest.approx(80, abs=0.01)
    assert judged["Qwen3-8B batch 1 context 256"]["verdict"] == "parity met"
    assert judged["Qwen3-0.6B batch 1 context 256"]["verdict"] == "aim met"
    assert judged["Qwen3-8B batch 1 over transformers static + compile"]["value"] == pytest.approx(2.22, abs=0.01)
    assert judged["Qwen3-0.6B batch 1 over transformers static + compile"]["verdict"] == "parity met"
    assert judged["Llama-3.2-1B shape batch 1 from context 32"]["verdict"] == "aim met"
    assert judged["Qwen3-8B Generate through gRPC, batch 128"]["verdict"] == "aim met"
    half = {row["bar"]: row for row in bars.judge(_recorded(), 8600.0)}
    assert half["Qwen3-8B batch 1 context 256"]["verdict"] == "missed"
    wrong = [{**row, "status": "NOT ALL ON GRAPHS"} for row in _recorded()]
    assert {row["verdict"] for row in bars.judge(wrong, 4300.0)} == {"not measured"}
    assert {row["value"] for row in bars.judge([], None)} == {None}


def test_a_bar_is_met_at_its_bound() -> None:
    """A time is met from above; nothing measured is no verdict."""
    lower = next(bar for bar in bars.BARS if bar.unit == "us")
    verdicts = [lower.verdict(value) for value in (lower.aim, lower.aim + 1, lower.parity, lower.parity + 1, None)]
    assert verdicts == ["aim met", "parity met", "parity met", "missed", "not measured"]


def test_report_is_made_of_what_parts_said(tmp_path: Path) -> None:
    """Shares of the ceiling of the same run, bars, plot; a key that is missing is found."""
    identity = {"commit": "abc", "is_dry": False, "device": "NVIDIA H100"}
    here = Workplace(tmp_path, {}, identity)
    read = {"kind": "read", "reader": "x", "gbs": 4000.0, "status": "ok", "part": "ceilings", "model": "Qwen3-8B"}
    kept = {**identity, "part": "all", "date": "2026-11-22", "rows": [read, *_recorded()], "failures": []}
    (here.folder() / "all.json").write_text(json.dumps(kept))
    made = report.make_report(here, {"device": "NVIDIA H100"})
    assert report.problems_of(made) == []
    assert made["ceiling_gbs"] == 4000.0
    row = next(row for row in made["parts"][0]["rows"] if row["kind"] == "decode")
    assert row["share_of_ceiling"] == pytest.approx(0.86, abs=1e-3)
    assert report.save(here, made) == ["results.json", "share.svg"]
    assert any("set for an H200" in line for line in report.lines_of(made))
    del row["tok_s"]
    assert report.problems_of({**made, "bars": None}) == [
        "bars is None",
        f"{row['part']}: tok_s is missing in {row}",
    ]
