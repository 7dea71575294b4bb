"""The loader takes exactly the tensors a model needs, from one file or shards, and names everything else at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ferrule_server
from ferrule_server.errors import ModelError
from ferrule_server.model import weights
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.parts import EMBEDDING
from ferrule_server.model.rope import stored_order
from ferrule_server.model.weights import LoadedModel, _fingerprint, check_tensors, load_model
from tests.model.conftest import CASES, Example, make_example

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1."
DEMO = Path(ferrule_server.__file__).parent / "demo_model"
FINGERPRINTS: dict[str, str] = json.loads(Path(__file__).with_name("fingerprints.json").read_text())


@pytest.fixture
def folder(qwen3: Example, tmp_path: Path) -> Path:
    """A copy of a sound model folder, tied, one file."""
    return Path(shutil.copytree(qwen3.folder, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrite the checkpoint after ``change``."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path, num_shards: int = 3) -> list[Path]:
    """Split the checkpoint into shards with an index and return their paths."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    paths = [folder / f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    names = sorted(tensors)
    for index, path in enumerate(paths):
        save_file({name: tensors[name] for name in names[index::num_shards]}, path)
    weight_map = {name: paths[index % num_shards].name for index, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return paths


def load(folder: Path) -> LoadedModel:
    """Load in float32."""
    return load_model(folder, dtype="float32")


def error_of(folder: Path) -> str:
    """Return the message of the ModelError that loading ends with."""
    with pytest.raises(ModelError) as caught:
        load(folder)
    return str(caught.value)


def test_tensors_arrive_in_their_places(example: Example) -> None:
    """Every matrix of the checkpoint is found, bit for bit, in the fused weights; rotated heads have our order."""
    stored = load_file(example.folder / "model.safetensors")

    def joined(prefix: str, *names: str) -> torch.Tensor:
        """Return the rows of those tensors that the checkpoint has: a family may store parts, or all in one."""
        return torch.cat([stored[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in stored])

    part = "feed_forward" if "model.layers.0.feed_forward.down_proj.weight" in stored else "mlp"

    model = load(example.folder)
    weights = model.take_weights()
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])
    assert (weights.head is weights.embedding) == model.config.is_tied
    for index, (layer, kind) in enumerate(zip(weights.layers, model.config.layers, strict=True)):
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.{part}."
        qkv = joined(attention, *(f"{name}_proj.weight" for name in ("q", "k", "v", "qkv")))
        order = stored_order(kind.rope, kind.head_dim)
        if order is not None:
            num_rotated = len(qkv) - kind.num_kv_heads * kind.head_dim
            rotated = qkv[:num_rotated].view(-1, kind.head_dim, qkv.shape[1])[:, order].flatten(0, 1)
            qkv = torch.cat([rotated, qkv[num_rotated:]])
        assert torch.equal(layer["qkv"], qkv)
        assert torch.equal(layer["attention_out"], joined(attention, "o_proj.weight"))
        count = 0 if kind.experts is None else kind.experts.count
        feed_forwards = {f".{number}": f"{mlp}experts.{number}." for number in range(count)} or {"": mlp}
        feed_forwards |= {"": f"{mlp}shared_expert."} if count and kind.intermediate_size else {}
        for number, prefix in feed_forwards.items():
            gate_up = joined(prefix, *(f"{name}.weight" for name in ("gate_proj", "up_proj", "gate_up_proj", "c_fc")))
            assert torch.equal(layer[f"expert_gate_up{number}" if number else "gate_up"], gate_up)
            down = joined(prefix, "down_proj.weight", "c_proj.weight")
            assert torch.equal(layer[f"expert_down{number}" if number else "down"], down)
        assert ("sinks" in layer) == kind.has_sinks
        assert not kind.has_sinks or torch.equal(layer["sinks"], stored[f"{attention}sinks"])
    assert model.num_parameters == sum(tensor.numel() for tensor in stored.values())
    assert model.weights_bytes == 4 * model.num_parameters


def test_a_folder_may_have_any_name(folder: Path) -> None:
    """The model's name goes into messages, which carry UTF-8 only."""
    odd = folder.rename(folder.with_name(os.fsdecode(b"m\xff")))
    assert load_model(odd, dtype="float32").model_id == "m?"


def test_weights_are_taken_once(qwen3: Example) -> None:
    """A second executor over the same LoadedModel is refused: the first may have repacked the weights."""
    model = load(qwen3.folder)
    model.take_weights()
    with pytest.raises(ModelError, match="taken already"):
        model.take_weights()


def test_shards_load_like_one_file(folder: Path) -> None:
    """Sharding changes neither the weights nor the fingerprint."""
    whole = load(folder)
    shard(folder)
    parts = load(folder)
    assert parts.fingerprint == whole.fingerprint
    assert torch.equal(parts.take_weights().layers[1]["qkv"], whole.take_weights().layers[1]["qkv"])


def test_fingerprint_follows_everything_that_decides_the_kv(folder: Path) -> None:
    """One weight, the dtype, or a rope setting changes the fingerprint; the eos ids do not."""
    prints = [load(folder).fingerprint, load_model(folder, dtype="bfloat16").fingerprint]
    assert all(len(fingerprint) == 32 for fingerprint in prints)
    config = json.loads((folder / "config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 6}))
    assert load(folder).fingerprint == prints[0]
    config["rope_parameters"]["rope_theta"] = 20_000.0
    (folder / "config.json").write_text(json.dumps(config))
    prints.append(load(folder).fingerprint)
    edit(folder, lambda tensors: tensors["model.norm.weight"][0].add_(1))
    prints.append(load(folder).fingerprint)
    assert len(set(prints)) == 4


def test_fingerprints_stay(example: Example, request: pytest.FixtureRequest) -> None:
    """A journal is bound to the fingerprint of its model. These were recorded once, without the random weights."""
    network = _fingerprint(read_config(example.folder), {EMBEDDING: b""}, "float32", None)
    assert network.hex()[:16] == FINGERPRINTS[request.node.callspec.params["example"]]


def test_the_fingerprint_of_the_bundled_model_stays() -> None:
    """With its weights."""
    assert load_model(DEMO, dtype="bfloat16").fingerprint.hex()[:16] == FINGERPRINTS["the bundled model"]


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_stored_half_precision_is_converted(folder: Path, stored: torch.dtype) -> None:
    """A float16 or bfloat16 checkpoint loads as float32 with the very values stored."""
    edit(folder, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    expected = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].float()
    assert torch.equal(load(folder).take_weights().layers[0]["down"], expected)


def test_progress_counts_every_byte(folder: Path) -> None:
    """The last report says all bytes are read; reports never go back."""
    seen: list[tuple[int, int]] = []
    load_model(folder, dtype="float32", on_progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())


def test_every_wrong_tensor_is_named_in_one_error(folder: Path) -> None:
    """Missing, unexpected, mis-shaped and wrong-dtype tensors are all in the message."""

    def spoil(tensors: Tensors) -> None:
        del tensors[f"{LAYER}self_attn.q_norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["model.norm.weight"] = torch.zeros(7)
        tensors[f"{LAYER}input_layernorm.weight"] = torch.zeros(48, dtype=torch.int32)

    edit(folder, spoil)
    message = error_of(folder)
    assert f"tensor {LAYER}self_attn.q_norm.weight is missing" in message
    assert "tensor model.layers.9.mlp.up_proj.weight in model.safetensors is unexpected" in message
    assert "tensor model.norm.weight has shape [7], [48] is needed" in message
    assert f"tensor {LAYER}input_layernorm.weight has dtype I32" in message


def test_missing_shards_are_named_with_their_tensors(folder: Path) -> None:
    """Two missing files give one error that names both and what they hold, once."""
    paths = shard(folder)
    lost = [name for path in paths[:2] for name in load_file(path)]
    for path in paths[:2]:
        path.unlink()
    message = error_of(folder)
    assert all(f"shard file {path.name} is missing" in message for path in paths[:2])
    assert all(message.count(name) >= 1 for name in lost)
    assert "is missing, shape" not in message


def test_shards_that_contradict_the_index_are_named(folder: Path) -> None:
    """A tensor stored twice, or where the index does not say, is an error."""
    paths = shard(folder)
    first, second = load_file(paths[0]), load_file(paths[1])
    twice = next(iter(first))
    save_file({**second, twice: first[twice].clone(), "stray.weight": torch.zeros(1)}, paths[1])
    message = error_of(folder)
    assert f"tensor {twice} is stored twice" in message
    assert "tensor stray.weight is in" in message


def test_a_truncated_file_is_named(folder: Path) -> None:
    """A download that stopped early is an error before anything is read."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "truncated" in error_of(folder)
    path.write_bytes(b"\x07")
    assert "truncated or is not a safetensors file" in error_of(folder)


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "has 4 bytes"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "malformed"),
        ({"a": 3}, "malformed"),
        (
            {f"{i}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for i in range(2)},
            "overlaps another tensor",
        ),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}, "leaves a hole"),
        (
            {
                "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                "b.rotary_emb.inv_freq": {"dtype": "I64", "shape": [1], "data_offsets": [16, 8]},
            },
            "has -8 bytes",
        ),
    ],
)
def test_malformed_headers_are_refused(folder: Path, header: object, named: str) -> None:
    """Sizes, overlaps, holes and entries of the wrong form are found in the header."""
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert named in error_of(folder)


def test_a_name_twice_in_one_header_is_refused(folder: Path) -> None:
    """JSON would keep the last of two entries silently."""
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    text = f'{{"a": {entry}, "a": {entry}}}'.encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert "duplicate entries a" in error_of(folder)


@pytest.mark.parametrize("index", ["{", '{"weight_map": {}}', '{"weight_map": {"a": "../secret.safetensors"}}'])
def test_a_broken_index_is_refused(folder: Path, index: str) -> None:
    """No JSON, no map, or a path out of the folder: one clear error."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in error_of(folder)


def test_a_folder_without_safetensors_says_so(folder: Path) -> None:
    """Other formats are not read; the message says what was looked for."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only safetensors are read" in error_of(folder)


def test_shards_without_an_index_are_one_sentence(folder: Path) -> None:
    """Alone, or beside a first shard that has the name of a whole model."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for number, half in enumerate(halves, 1):
        save_file({name: whole[name] for name in half}, folder / f"model-0000{number}-of-00002.safetensors")
    sentence = "2 more files (model-00001-of-00002.safetensors) without model.safetensors.index.json; add the index"
    message = error_of(folder)
    assert sentence in message
    assert len(message.splitlines()) == 2
    (folder / "model-00001-of-00002.safetensors").rename(folder / "model.safetensors")
    message = error_of(folder)
    assert f"{len(halves[1])} tensors are missing: weights are in 1 more files" in message
    assert len(message.splitlines()) == 2
    save_file(whole, folder / "model.safetensors")
    load(folder)


def test_another_head_is_found_before_the_weights_are_read(folder: Path) -> None:
    """Its first bytes are compared with the headers; ``ferrule check`` finds it too."""
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ModelError, match=r"ties the output head, yet lm_head\.weight differs"):
        check_tensors(folder, read_config(folder))


def test_another_head_that_begins_alike_is_found_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors are compared, by their digests."""
    monkeypatch.setattr(weights, "_FIRST_BYTES", 64)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    edit(folder, lambda t: t["lm_head.weight"][-1, -1].add_(1))
    check_tensors(folder, read_config(folder))
    assert "ties the output head" in error_of(folder)


def test_a_tied_head_may_be_stored_when_it_is_the_embedding(folder: Path) -> None:
    """A redundant equal lm_head changes nothing; one that differs is refused."""
    plain = load(folder)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    redundant = load(folder)
    assert (redundant.fingerprint, redundant.num_parameters) == (plain.fingerprint, plain.num_parameters)
    edit(folder, lambda t: t["lm_head.weight"][3, 3].add_(1))
    assert "ties the output head" in error_of(folder)
    edit(folder, lambda t: t.update({"lm_head.weight": torch.zeros(2, 2)}))
    assert "lm_head.weight has shape [2, 2]" in error_of(folder)


def test_rotary_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    """inv_freq follows from config.json; nothing else may be left over."""
    before = load(folder).fingerprint
    edit(folder, lambda t: t.update({f"{LAYER}self_attn.rotary_emb.inv_freq": torch.zeros(5)}))
    assert load(folder).fingerprint == before


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    """Without tying, lm_head.weight is a tensor like any other."""
    example = make_example(CASES["qwen3-gqa-1to1-untied"], tmp_path)
    edit(example.folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "tensor lm_head.weight is missing" in error_of(example.folder)
