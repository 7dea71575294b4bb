"""Mixtures on the kernels of a processor: ties, many rows of one expert, and one expert alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_gguf import random_matrix
from ferrule_server.errors import ModelError
from ferrule_server.executor.cpu.memory import StepMemory
from ferrule_server.executor.cpu.support import choose, unsupported
from ferrule_server.executor.sizes import pair_bytes
from ferrule_server.model.config_reader import parse_config, read_config
from tests.executor.cpu.models import KERNEL_SETS, kernel_set_name, plan_of, running
from tests.executor.cpu.packed_files import EXPERTS, MIXTURE, write_packed
from tests.executor.cpu.test_against_torch import all_logits, torch_executor
from tests.executor.cpu.test_families import case_of
from tests.model.conftest import make_example
from tests.model.gguf.writing import add_key, close
from tests.model.stepping import Piece, PooledSequence, Stepper

PROMPT = [(7 * i + i // 5) % 103 for i in range(400)]
"""Of one expert there are more pairs than are multiplied together."""


def edited(folder: Path, change: Any) -> Path:
    """Change the routers of a random mixture."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            change(tensor)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen2-moe-shared-gate"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose scores are all equal, so that every row passes the first experts."""
    made = make_example(case_of(request.param), tmp_path_factory.mktemp("moe"))
    return edited(made.folder, lambda router: router.zero_())


def test_of_equal_scores_the_first_experts_are_used(folder: Path) -> None:
    """As in torch; all rows pass the same experts, and a row alone has the bits that it has among them."""
    expected = all_logits(torch_executor(folder, "float32", is_plain=True), PROMPT)
    with running(folder, "float32") as executor:
        found = all_logits(executor, PROMPT)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
        stepper, seq = Stepper(executor), PooledSequence()
        stepper.run(Piece(seq, PROMPT[:-1]))
        alone = stepper.logits(Piece(seq, PROMPT[-1:]))
    np.testing.assert_array_equal(alone[0].view(np.uint32), found[len(PROMPT) - 1].view(np.uint32))


@pytest.mark.parametrize("kernels", KERNEL_SETS, ids=kernel_set_name)
def test_the_threads_change_no_bits(folder: Path, kernels: Any) -> None:
    """Nor does the number of rows in a step, with any instructions."""
    found = []
    for num_threads, max_step_rows in ((1, 512), (2, 130)):
        with running(folder, kernels=kernels, num_threads=num_threads, max_step_rows=max_step_rows) as executor:
            stepper, seq = Stepper(executor), PooledSequence()
            parts = [PROMPT[begin : begin + 130] for begin in range(0, len(PROMPT), 130)]
            found.append(np.concatenate([stepper.logits(Piece(seq, part, num_outputs=len(part))) for part in parts]))
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


def test_a_score_that_is_no_number_makes_no_number(tmp_path: Path) -> None:
    """Nothing is written beside its place: other rows of the step go on."""
    case = {**case_of("qwen3-moe"), "tie_word_embeddings": False}
    folder = make_example(case, tmp_path / "moe").folder
    with running(folder, "float32") as executor:
        expected = all_logits(executor, PROMPT[:20])[:20]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][102] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with running(folder, "float32") as executor:
        stepper = Stepper(executor)
        broken, *others = stepper.run(
            Piece(PooledSequence(), [102], num_outputs=1), Piece(PooledSequence(), PROMPT[:20], num_outputs=20)
        )
    assert broken.logits is None
    found = np.stack([row.logits for row in others if row.logits is not None])
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_a_router_that_is_broken_makes_no_number(tmp_path: Path) -> None:
    """Also where other experts have the highest scores: torch says so too."""
    folder = make_example(case_of("qwen3-moe"), tmp_path / "moe").folder
    edited(folder, lambda router: router[4].fill_(torch.nan))
    with running(folder, "float32") as executor:
        (row,) = Stepper(executor).run(Piece(PooledSequence(), PROMPT[:3]))
    assert row.logits is None


def _apart(path: Path, types: list[str]) -> Path:
    """Write a file that has a tensor for each expert of a layer, by their names in a folder."""
    write_packed(path, MIXTURE, "Q8_0", is_mixture=True)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name("apart.gguf"), "qwen3moe")
    for name, field in reader.fields.items():
        if name.startswith("qwen3moe."):
            add_key(writer, name, field.contents())
    for tensor in reader.tensors:
        if tensor.name != "blk.0.ffn_down_exps.weight":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for expert in range(EXPERTS):
        kind = types[expert % len(types)]
        writer.add_tensor(
            f"model.layers.0.mlp.experts.{expert}.down_proj.weight", random_matrix(kind, 256, 256, expert),
            raw_dtype=gguf.GGMLQuantizationType[kind],
        )  # fmt: skip
    close(writer)
    return path.with_name("apart.gguf")


def test_experts_of_other_types_are_left_to_torch(tmp_path: Path) -> None:
    """The kernels go from one expert to the next by its size."""
    assert unsupported(read_config(_apart(tmp_path / "a.gguf", ["Q4_K"]))) == ""
    config = read_config(_apart(tmp_path / "a.gguf", ["Q2_K", "Q8_0"]))
    assert "experts of one layer in different types" in unsupported(config)
    assert choose(config, "bfloat16").plan is None


def test_a_matrix_of_an_expert_is_not_stored_twice(tmp_path: Path) -> None:
    """Once alone and once among those of all."""
    path = _apart(tmp_path / "a.gguf", ["Q4_K"])
    content, name = path.read_bytes(), b".mlp.experts.3.down_proj.weight"
    path.write_bytes(content.replace(b"model.layers.0" + name, b"model.layers.1" + name))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.experts\.3\.down_proj\.weight is stored twice"):
        read_config(path)


def test_the_plan_of_memory_counts_the_pairs() -> None:
    """About as many bytes as there are, for a model of a usual size."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 64}
    names = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    config = parse_config({**names, **sizes, "num_attention_heads": 32, "head_dim": 64, "intermediate_size": 6144}, {})
    memory = StepMemory(config, plan_of(config, "bfloat16", weights="int8"), max_rows=64, max_context=64, num_threads=1)
    found = sum(rows.nbytes for name, rows in memory._made_rows.items() if name.startswith("pair_"))
    assert found == pytest.approx(pair_bytes(config, 64), rel=0.2)
