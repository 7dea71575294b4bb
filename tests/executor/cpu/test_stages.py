"""The list of stages of a model: what a family adds are entries, and barriers stand only where rows change hands."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

from ferrule_server.executor.cpu import stages
from ferrule_server.executor.cpu.memory import StepMemory
from ferrule_server.executor.cpu.stages import list_stages
from ferrule_server.kernels.cpu import linear, rows
from ferrule_server.kernels.cpu.kinds import Kind
from ferrule_server.kernels.cpu.plan import WeightKind
from ferrule_server.kernels.cpu.records import LAYER, STAGE
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.weights import load_model
from tests.executor.cpu.models import QUANTISED_SETS, plan_of, prepared_of
from tests.executor.cpu.test_families import case_of
from tests.model.conftest import make_example


def stages_of(folder: Path, weights: WeightKind = "float") -> tuple[str, np.ndarray[tuple[int], np.dtype[np.void]]]:
    """Return the stages of a model as text, with a bar for each barrier, and as records."""
    config = read_config(folder)
    instructions, is_emulated = QUANTISED_SETS[-1] if weights != "float" else ("fma", False)
    plan = plan_of(config, "bfloat16", instructions, weights, is_emulated=is_emulated)
    prepared = prepared_of(config, plan)
    model = load_model(folder, dtype="bfloat16", encoding=prepared.packer)
    packed = prepared.packer.finish(model.take_weights())
    memory = StepMemory(config, plan, max_rows=64, max_context=64, num_threads=2)
    records, first_of_head = list_stages(config, packed, np.zeros(config.num_layers, LAYER), prepared.kernels, memory)
    words: list[str] = []
    for number, record in enumerate(records):
        if number and record["num_together"]:
            words.append("|")
        if number == first_of_head:
            words.append("head")
        words.append(Kind(record["kind"]).name.lower())
    return " ".join([*words, "|"]), records


@pytest.fixture(name="folder")
def fixture_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model of a case."""
    return make_example(case_of(request.param), tmp_path).folder


@pytest.mark.parametrize(
    ("folder", "layer"),
    [
        ("qwen3-gqa-4to1-tied", "norm | project | attend | merge | add | norm | activate | add |"),
        ("olmo2", "copy | keep_heads | norm_heads | attend | merge | AFTER copy | activate | AFTER"),
        ("cohere2-parallel", "layer_norm | project | attend | merge | add | activate | add |"),
    ],
    indirect=["folder"],
)
def test_a_layer_is_a_list(folder: Path, layer: str) -> None:
    """Stages of the same rows stand between the same two barriers."""
    config = read_config(folder)
    found, _ = stages_of(folder)
    norm = "layer_norm" if config.has_layer_norm else "norm"
    layers = " ".join([layer.replace("AFTER", "keep | add_normed")] * config.num_layers)
    end = "" if layer.endswith("|") else " |"
    assert found == f"embed {layers}{end} head {norm} clear_output | read_logits | merge_output | choose |"


@pytest.mark.parametrize("folder", ["gemma4-shared-kv-second-embedding"], indirect=True)
def test_a_second_embedding_is_entries(folder: Path) -> None:
    """It begins with its own rows, and every layer ends with its gate and its projection."""
    found, _ = stages_of(folder)
    assert found.startswith("embed copy | keep | mix_inputs norm | project | attend |")
    assert found.count("add_normed copy | gate | keep | add_normed") == read_config(folder).num_layers


@pytest.mark.parametrize("folder", ["qwen3-gqa-4to1-tied"], indirect=True)
def test_the_matrix_of_an_entry_says_whether_its_inputs_are_integers(folder: Path) -> None:
    """Rows become integers with the norm, or by themselves where threads have claimed what was before."""
    found, records = stages_of(folder, "int8")
    layer = "norm quantise | project | attend | merge | quantise | add | norm quantise | activate | quantise | add |"
    assert found.startswith(f"embed {layer} {layer}")
    linear = records["num_units"] > 0
    assert (records["kind"][np.flatnonzero(linear) - 1] == Kind.QUANTISE).all()


@pytest.mark.parametrize("folder", ["qwen3-gqa-4to1-tied"], indirect=True)
def test_a_stage_knows_the_linear_layer_that_follows(folder: Path) -> None:
    """Its weights are prefetched; after the head come those of the next step. Each claimed stage has its own number."""
    _, records = stages_of(folder)
    linear = np.flatnonzero(records["num_units"])
    for number, record in enumerate(records):
        following = next((each for each in linear if each > number), linear[0])
        assert record["following"] == records.ctypes.data + following * STAGE.itemsize
    claims = records["claim"][records["kernel"] != 0]
    assert claims.tolist() == list(range(len(claims)))
    assert records["num_together"].sum() == len(records)


def test_every_kind_is_listed_and_does_something() -> None:
    """None falls through to what another one does. Attention and the choice are called by their addresses alone."""
    done = inspect.getsource(rows) + inspect.getsource(linear)
    called = {Kind.ATTEND, Kind.MERGE, Kind.CHOOSE}
    assert [kind.name for kind in Kind if kind not in called and f"Kind.{kind.name}" not in done] == []
    assert [kind.name for kind in Kind if f"Kind.{kind.name}" not in inspect.getsource(stages)] == []
