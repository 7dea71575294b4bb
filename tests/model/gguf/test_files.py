"""A GGUF file as a model: its types, its parts, its name, and the commands and messages that know it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError, ModelError
from ferrule_server.loading import create_executor, find_model
from ferrule_server.model import weights
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.gguf.container import read_gguf
from ferrule_server.model.weights import LoadedModel, load_model
from ferrule_server.model_check.report import check_model
from tests.model.conftest import CASES, Example, make_example
from tests.model.gguf.raw_file import TEXT, key, number, sound, text
from tests.model.gguf.writing import write_gguf

SIZES = {
    "family": "Llama", "vocab_size": 77, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
WRITTEN = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0")
"""Types that the package writes, and that are read."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """A model whose rows are whole blocks."""
    return make_example(SIZES, tmp_path_factory.mktemp("model"))


def _loaded(example: Example, path: Path, **changes: Any) -> LoadedModel:
    write_gguf(path, "llama", example.oracle, {}, **changes)
    return load_model(path, dtype="float32")


def _assert_same(ours: LoadedModel, theirs: LoadedModel) -> None:
    pairs = zip(ours.take_weights().tensors(), theirs.take_weights().tensors(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_tensors_are_those_of_the_folder(llama: Example, tmp_path: Path) -> None:
    """Bit for bit, the rows of queries and keys in order."""
    _assert_same(_loaded(llama, tmp_path / "a.gguf"), load_model(llama.folder, dtype="float32"))


@pytest.mark.parametrize("dtype", WRITTEN)
@pytest.mark.parametrize("chunk_bytes", [weights._CHUNK_BYTES, 1 << 10])
def test_every_type_has_the_numbers_of_its_library(
    llama: Example, tmp_path: Path, dtype: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a tensor is read in many pieces."""
    monkeypatch.setattr(weights, "_CHUNK_BYTES", chunk_bytes)
    embedding = llama.oracle.model.embed_tokens.weight.detach().numpy()
    kind = gguf.GGMLQuantizationType[dtype]
    expected = gguf.quants.dequantize(gguf.quants.quantize(embedding, kind), kind)
    found = _loaded(llama, tmp_path / f"{dtype}.gguf", dtype=dtype).take_weights()
    assert np.array_equal(found.embedding.numpy(), expected)


def test_a_model_in_parts_is_that_in_one_file(llama: Example, tmp_path: Path) -> None:
    """The first part is named; the others are found beside it."""
    whole = _loaded(llama, tmp_path / "tiny.gguf")
    write_gguf(tmp_path / "tiny.gguf", "llama", llama.oracle, {}, split=7)
    parts = sorted(tmp_path.glob("tiny-*"))
    assert len(parts) == 3
    assert read_gguf(parts[0]).parts == tuple(parts)
    loaded = load_model(parts[0], dtype="float32")
    assert (loaded.model_id, loaded.fingerprint) == ("tiny", whole.fingerprint)
    _assert_same(loaded, whole)


def test_a_link_to_a_file_is_the_model(llama: Example, tmp_path: Path) -> None:
    """It may lead anywhere, as a link to a folder may: the operator named it. The model is called as the link is."""
    (tmp_path / "elsewhere").mkdir()
    write_gguf(tmp_path / "elsewhere" / "a", "llama", llama.oracle, {})
    (tmp_path / "b.gguf").symlink_to(tmp_path / "elsewhere" / "a")
    assert load_model(tmp_path / "b.gguf", dtype="float32").model_id == "b"


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    """What is kept of a file is forgotten."""
    path, file = tmp_path / "a.gguf", sound()
    path.write_bytes(file.content())
    assert read_config(path).num_layers == 1
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"a\.gguf ends inside its header"):
        read_config(path)


def test_norms_that_hold_their_1_are_float32_and_not_changed(tmp_path: Path) -> None:
    """Those of Gemma, also if everything else is bfloat16; the fingerprint knows it."""
    made = make_example(CASES["gemma2-window-softcap"] | {"query_pre_attn_scalar": 14}, tmp_path)
    keys = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0, "attention.sliding_window": 12}
    write_gguf(tmp_path / "a.gguf", "gemma2", made.oracle, keys)
    ours, theirs = (load_model(path, dtype="bfloat16") for path in (tmp_path / "a.gguf", tmp_path))
    assert replace(ours.config, eos_ids=theirs.config.eos_ids) == theirs.config
    assert ours.fingerprint != theirs.fingerprint
    assert ours.weights is not None
    assert ours.weights.final_norm.dtype == torch.float32
    _assert_same(ours, theirs)


def test_a_server_loads_a_file(tmp_path: Path) -> None:
    """Without a tokenizer of its own, it has none."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(sound().content())
    config = ServerConfig(model=str(path), executor="torch", kv_memory_bytes=1 << 20, num_threads=1)
    loaded = create_executor(config, lambda *_: None)
    assert (loaded.executor.info.model.model_id, loaded.tokenizer) == ("tiny", None)
    loaded.executor.close()
    with pytest.raises(ConfigError, match="is a file here, not on the hub"):
        find_model(ServerConfig(model=str(path), revision="main"), lambda *_: None)


def test_check_knows_a_file(tmp_path: Path) -> None:
    """Its size is that of all parts."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(sound().content())
    report = check_model(ServerConfig(model=str(path), executor="torch"))
    assert report.details is not None, report.reason
    assert report.details.stored_bytes == path.stat().st_size
    assert report.details.architecture == "LlamaForCausalLM"


def test_a_key_can_be_ignored_by_its_name(tmp_path: Path) -> None:
    """As one of config.json can. Keys that are not those of the architecture are for people."""
    file, path = sound(), tmp_path / "a.gguf"
    path.write_bytes(file.content())
    plain = read_config(path)
    names = ("general.of_tomorrow", "quantize.imatrix.entries_count", "tokenizer.ggml.x", "someone.of_tomorrow")
    file.keys |= {name: number(name, 3) for name in names}
    path.write_bytes(file.content())
    assert read_config(path) == plain
    file.keys["llama.of_tomorrow"] = number("llama.of_tomorrow", 3)
    path.write_bytes(file.content())
    with pytest.raises(ModelError, match=r"^a\.gguf: not supported for LlamaForCausalLM: llama\.of_tomorrow is 3;"):
        read_config(path)
    assert read_config(path, ("llama.of_tomorrow",)) == plain


def test_check_says_what_another_architecture_is(tmp_path: Path) -> None:
    """And names a model that loads."""
    file, path = sound(), tmp_path / "a.gguf"
    file.keys["general.architecture"] = key("general.architecture", TEXT, text("qwen3next"))
    path.write_bytes(file.content())
    report = check_model(ServerConfig(model=str(path)))
    assert report.reason.startswith("a.gguf: architectures is ['qwen3next'], which is not supported")
    assert report.instead == "Qwen/Qwen3-8B"


STOPS = {
    "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 4, "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "c", "d", "e", "f"], "tokenizer.ggml.token_type": [1, 1, 3, 1, 3, 1],
}  # fmt: skip


def test_a_turn_ends_at_the_tokens_that_end_it(llama: Example, tmp_path: Path) -> None:
    """Those of the vocabulary take the place of generation_config.json."""
    write_gguf(tmp_path / "a.gguf", "llama", llama.oracle, STOPS)
    assert read_config(tmp_path / "a.gguf").eos_ids == (2, 4)


def test_safetensors_have_no_blocks(tmp_path: Path) -> None:
    """A type of ggml in their header is refused."""
    example = make_example(SIZES, tmp_path)
    content = (example.folder / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header["model.norm.weight"]["dtype"] = "Q8_0"
    raw = json.dumps(header).encode()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    (example.folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    with pytest.raises(ModelError, match="which do not fit Q8_0"):
        load_model(example.folder, dtype="float32")
