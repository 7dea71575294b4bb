"""Mixtures of experts: how they are stored, how rows are routed, and which settings are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule_server.errors import ModelError
from ferrule_server.kernels import reference
from ferrule_server.model.config_reader import parse_config, read_config
from ferrule_server.model.stored import StoredTensor, without_stacks
from ferrule_server.model.weights import load_model
from ferrule_server.model_check.report import _check_index
from tests.model.conftest import CASES, make_example

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with experts."""
    return make_example(CASES["qwen3-moe"], tmp_path_factory.mktemp("moe")).folder


def _is_apart(tensors: dict[str, torch.Tensor]) -> bool:
    return any(name.endswith(".experts.0.gate_proj.weight") for name in tensors)


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with those of all experts in one, as newer checkpoints store them."""
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    prefixes = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
    for prefix in prefixes:
        of = {part: [] for part in ("gate", "up", "down")}  # type: dict[str, list[torch.Tensor]]
        for part, found in of.items():
            while (name := f"{prefix}.experts.{len(found)}.{part}_proj.weight") in tensors:
                found.append(tensors[name])
        pairs = zip(of["gate"], of["up"], strict=True)
        rest[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        rest[f"{prefix}.experts.down_proj"] = torch.stack(of["down"])
    return rest


def test_both_stored_forms_are_one_model(folder: Path, tmp_path: Path) -> None:
    """A tensor for each expert, or one for all: the weights are the same."""
    apart = load_file(folder / "model.safetensors")
    assert _is_apart(apart)
    stacked = _stacked(apart)
    assert not _is_apart(stacked)
    save_file(stacked, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    first, second = (load_model(path, dtype="float32") for path in (folder, tmp_path))
    assert first.weights is not None
    assert second.weights is not None
    assert "expert_down.8" in first.weights.layers[1]
    for one, other in zip(first.weights.layers, second.weights.layers, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_index_of_either_form_has_the_names_that_are_needed(folder: Path) -> None:
    """Before the weights are fetched; a stack of something else is unexpected."""
    network, apart = read_config(folder), load_file(folder / "model.safetensors")
    _check_index(network, frozenset(apart))
    _check_index(network, frozenset(_stacked(apart)))
    with pytest.raises(ModelError, match=r"has unexpected .*model\.layers\.0\.mlp\.experts"):
        _check_index(network, frozenset({*apart, "model.layers.0.mlp.experts.down_proj"}))


def test_a_missing_expert_is_named(folder: Path, tmp_path: Path) -> None:
    """Before anything is allocated."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight is missing"):
        load_model(tmp_path, dtype="float32")


def _stored(name: str, *shape: int, num_bytes: int = 0) -> StoredTensor:
    return StoredTensor(name, "F32", shape, Path("file"), 100, num_bytes)


def test_a_stack_is_cut_into_its_matrices() -> None:
    """Each with its own place in the file; of biases each is a vector."""
    cut = list(without_stacks([_stored("a.experts.gate_up_proj", 2, 6, 5, num_bytes=240)]))
    assert [tensor.name for tensor in cut] == [
        f"a.experts.{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up")
    ]
    assert [(tensor.shape, tensor.offset, tensor.num_bytes) for tensor in cut] == [
        ((3, 5), 100 + 60 * number, 60) for number in range(4)
    ]
    (bias, _) = without_stacks([_stored("a.experts.down_proj_bias", 2, 6, num_bytes=48)])
    assert (bias.name, bias.shape, bias.num_bytes) == ("a.experts.0.down_proj.bias", (6,), 24)


@pytest.mark.parametrize(
    "tensor",
    [
        _stored("a.experts.gate_up_proj", 2, 5, 5),
        _stored("a.experts.gate_up_proj", 1 << 60, 0, 5),
        _stored("a.experts.down_proj", 0, 5, 5),
        _stored("a.experts.down_proj", 5, 5),
        _stored("a.experts.0.down_proj.weight", 5, 5),
        _stored("a.mlp.down_proj.weight", 2, 5, 5),
    ],
    ids=str,
)
def test_what_is_no_stack_stays(tensor: StoredTensor) -> None:
    """The loader refuses its shape, if that is wrong; a stack of very many costs nothing."""
    assert list(without_stacks([tensor])) == [tensor]


def test_many_stacks_cost_bounded_memory() -> None:
    """However many tensors say that they hold many."""
    tensors = (_stored(f"{number}.experts.down_proj", 1 << 17, 0, 1) for number in range(1000))
    assert len(list(without_stacks(tensors))) == 998 + 2 * (1 << 17)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 of 8 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"num_local_experts": 4}, "the number of experts is .'num_experts': 8, 'num_local_experts': 4."),
        ({"num_experts": 1 << 20}, "at most 4096"),
        ({"moe_intermediate_size": "wide"}, "moe_intermediate_size is 'wide'"),
        ({"mlp_only_layers": [0.5]}, "mlp_only_layers is"),
        ({"n_group": 4}, "n_group is 4"),
        ({"q_lora_rank": 64}, "q_lora_rank is 64"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, true or false"),
        ({"num_experts": 4096, "num_hidden_layers": 1024}, "4096 experts a layer are more than 65536 in all"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is"),
    ],
)
def test_wrong_settings_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    """In one sentence."""
    with pytest.raises(ModelError, match=text):
        parse_config(json.loads(json.dumps({**QWEN3_MOE, **changes})), {})


def test_dense_layers_are_those_that_the_settings_name() -> None:
    """Every second layer has experts, but not one that is listed."""
    config = parse_config({**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, {})
    assert [kind.experts is not None for kind in config.layers] == [False, True, False, False]
    assert [kind.intermediate_size for kind in config.layers] == [48, 0, 48, 48]


def test_of_equal_scores_the_first_experts_are_used() -> None:
    """Also where all are equal."""
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0] * 5])
    _, ids = reference.route(scores, 3, "softmax", is_normalised=True, scale=1.0)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]


@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("gate", ["softmax", "softmax_of_used", "sigmoid"])
def test_weights_are_those_of_the_gate(gate: str, is_normalised: bool) -> None:
    """By their definitions in float64."""
    scores = torch.randn(5, 12, generator=torch.Generator().manual_seed(3)) * 3
    weights, ids = reference.route(scores, 4, gate, is_normalised=is_normalised, scale=2.5)
    best = scores.double().gather(1, ids)
    assert torch.equal(best, scores.double().topk(4).values)
    made = {
        "softmax": scores.double().softmax(1).gather(1, ids), "softmax_of_used": best.softmax(1),
        "sigmoid": best.sigmoid(),
    }[gate]  # fmt: skip
    made = made / made.sum(1, keepdim=True) if is_normalised else made
    torch.testing.assert_close(weights.double(), made * 2.5, rtol=1e-5, atol=0)
