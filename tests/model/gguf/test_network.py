"""What the metadata of a GGUF file says of the network, key by key."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ferrule_server.errors import ModelError
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.families import FAMILIES
from ferrule_server.model.gguf.architectures import _ARCHITECTURES
from ferrule_server.model.rope import LinearScaling, LongScaling, YarnScaling
from tests.model.gguf.raw_file import ARRAY, BOOL, FLOAT32, TEXT, UINT32, RawFile, RawTensor, items, key, text

SIZES = {
    "block_count": 8, "context_length": 4096, "embedding_length": 48, "feed_forward_length": 32,
    "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


def _raw(name: str, value: Any) -> bytes:
    """Return a key whose type is that of the value."""
    if isinstance(value, list):
        return key(name, ARRAY, items(BOOL, [struct.pack("<?", flag) for flag in value]))
    kind, form = {bool: (BOOL, "<?"), int: (UINT32, "<I"), float: (FLOAT32, "<f"), str: (TEXT, "")}[type(value)]
    return key(name, kind, text(value) if kind == TEXT else struct.pack(form, value))


def network(
    folder: Path, arch: str, keys: Mapping[str, Any] = MappingProxyType({}), tensors: Sequence[RawTensor] = ()
) -> ModelConfig:
    """Return what a file without weights says."""
    values = {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in (SIZES | dict(keys)).items()}
    raw = {name: _raw(name, value) for name, value in values.items() if value is not None}
    path = folder / "a.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(RawFile(raw, [RawTensor("token_embd.weight", (48, 30)), *tensors]).content())
    return read_config(path)


def test_what_a_file_lacks_means_what_it_means_in_llama_cpp(tmp_path: Path) -> None:
    """As many heads of keys as of queries, a base of 10 000, a head's share of the row, a tied head."""
    for arch in ("llama", "qwen2", "qwen3", "smollm3", "olmo2", "gemma2"):
        found = network(tmp_path, arch)
        first = found.layers[0]
        assert (found.vocab_size, found.is_tied) == (30, True), arch
        assert (first.num_kv_heads, first.head_dim) == (4, 12), arch
        assert first.rope is not None
        assert first.rope.theta == 10_000, arch
        assert not found.has_attention_out_bias, arch
    assert not network(tmp_path, "llama", tensors=[RawTensor("output.weight", (48, 30))]).is_tied


def test_numbers_are_those_that_the_authors_wrote(tmp_path: Path) -> None:
    """The float32 next to 1e-5 is 9.99999974e-06."""
    assert network(tmp_path, "llama", {"attention.layer_norm_rms_epsilon": 1e-5}).norm_eps == 1e-5


@pytest.mark.parametrize(
    ("arch", "layers", "hidden", "scale"),
    [
        ("gemma2", 8, 48, 32**-0.5),
        ("gemma2", 46, 48, 12**-0.5),
        ("gemma3", 62, 48, 12**-0.5),
        ("gemma3", 46, 48, 32**-0.5),
    ],
)
def test_scores_of_the_largest_gemmas_are_scaled_otherwise(
    tmp_path: Path, arch: str, layers: int, hidden: int, scale: float
) -> None:
    """As llama.cpp does, which knows them by their layers: no key says so."""
    keys = {"block_count": layers, "embedding_length": hidden, "attention.key_length": 32}
    assert network(tmp_path, arch, keys).layers[0].score_scale == scale


def test_windows(tmp_path: Path) -> None:
    """By the number of the architecture, that of the file, its flags, or none."""
    window = {"attention.sliding_window": 64}
    assert [kind.window for kind in network(tmp_path, "gemma3", window).layers] == [64] * 5 + [0, 64, 64]
    assert [kind.window for kind in network(tmp_path, "gemma3").layers] == [0] * 8
    assert [kind.window for kind in network(tmp_path, "gemma2", {"context_length": 8192}).layers] == [4096, 0] * 4
    flags = [True, False, False, True, True, True, True, False]
    found = network(tmp_path, "olmo2", {**window, "attention.sliding_window_pattern": flags})
    assert found.architecture == "Olmo3ForCausalLM"
    assert [kind.window for kind in found.layers] == [64 * flag for flag in flags]
    assert network(tmp_path, "phi3", {"attention.sliding_window": 0}).layers[0].window == 0
    for flag in (True, False):
        found = network(tmp_path, "gemma3", {**window, "attention.sliding_window_pattern": [flag] * 8})
        assert [kind.window for kind in found.layers] == [64 * flag] * 8
    with pytest.raises(ModelError, match="layer_types is"):
        network(tmp_path, "gemma3", {**window, "attention.sliding_window_pattern": [True]})
    with pytest.raises(ModelError, match=r"llama\.attention\.sliding_window is 64"):
        network(tmp_path, "llama", window)


def test_rotations_of_layers_with_a_window(tmp_path: Path) -> None:
    """Gemma 3 has a base of its own for them, 10 000 unless the file says otherwise."""
    keys = {
        "attention.sliding_window": 64,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    for more, theta in (({}, 1e4), ({"rope.freq_base_swa": 5e4}, 5e4)):
        sliding, full = (network(tmp_path, "gemma3", {**keys, **more}).layers[i].rope for i in (0, 5))
        assert sliding is not None
        assert full is not None
        assert (sliding.theta, sliding.scaling) == (theta, None)
        assert (full.theta, full.scaling) == (1e6, LinearScaling(8.0))


def test_scalings(tmp_path: Path) -> None:
    """Linear, also by its old key, and yarn; neither if a factor is 0 or the type none."""

    def scaling(**keys: Any) -> object:
        values = {name.replace("__", "."): value for name, value in keys.items()}
        rope = network(tmp_path, "llama", values).layers[0].rope
        assert rope is not None
        return rope.scaling

    assert scaling(rope__scaling__factor=4.0) == LinearScaling(4.0)
    assert scaling(rope__scale_linear=2.0) == LinearScaling(2.0)
    assert scaling(rope__scaling__factor=0.0) is scaling(rope__scaling__type="none") is None
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 1024}
    found = scaling(**yarn, rope__scaling__finetuned=True, rope__scaling__attn_factor=1.0)
    assert isinstance(found, YarnScaling)
    assert (found.factor, found.original_max_positions) == (4.0, 1024)
    assert scaling(**yarn, rope__scaling__yarn_log_multiplier=1.0).magnitude == 1.0  # type: ignore[attr-defined]
    for magnitude in (1.0, 1.1386294):  # of the factor, whose magnitude is always used
        assert scaling(**yarn, rope__scaling__yarn_attn_factor=magnitude) == scaling(**yarn)
    refused = {"attn_factor": 1.5, "yarn_ext_factor": 0.5, "yarn_attn_factor": 1.5, "finetuned": False}
    for name, value in refused.items():
        with pytest.raises(ModelError, match=rf"llama\.rope\.scaling\.{name} is {value}"):
            scaling(**yarn, **{f"rope__scaling__{name}": value})


def test_divisors_are_read_from_the_tensor(tmp_path: Path) -> None:
    """Those of Llama 3.1; a scaling beside them is refused."""
    path = tmp_path / "a.gguf"
    divisors = RawTensor("rope_freqs.weight", (6,))
    with pytest.raises(ModelError, match="short_factor is 0"):
        network(tmp_path, "llama", tensors=[divisors])
    content = bytearray(path.read_bytes())
    content[-32 : -32 + 24] = struct.pack("<6f", 1, 1, 2, 3, 8, 8)
    path.unlink()
    path.write_bytes(content)
    rope = read_config(path).layers[0].rope
    assert rope is not None
    assert rope.scaling == LongScaling((1, 1, 2, 3, 8, 8), (1, 1, 2, 3, 8, 8), 1, 1.0)
    assert rope == read_config(path).for_context(8).layers[0].rope
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.type is 'yarn'"):
        network(tmp_path, "llama", {"rope.scaling.type": "yarn"}, [divisors])


def test_divisors_stand_alone_or_in_pairs(tmp_path: Path) -> None:
    """Which would be meant is not known."""
    names = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
    for chosen in (names, names[:2], names[1:2], names[2:]):
        with pytest.raises(ModelError, match="stands alone, or both of the others together"):
            network(tmp_path, "phi3", tensors=[RawTensor(name, (6,)) for name in chosen])


def test_the_scores_of_granite_without_a_scale(tmp_path: Path) -> None:
    """Its file says one if config.json did."""
    assert network(tmp_path, "granite").layers[0].score_scale == 12**-0.5
    assert network(tmp_path, "granite", {"attention.scale": 0.5}).layers[0].score_scale == 0.5


def test_zeros_switch_off(tmp_path: Path) -> None:
    """What is not there is no reason to refuse a model."""
    off = {"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0, "nextn_predict_layers": 0}
    same = {"attention.causal": True, "attention.value_length": 12, "vocab_size": 30}
    assert network(tmp_path, "llama", {**off, **same}) == network(tmp_path, "llama")


def test_every_architecture_is_of_a_family() -> None:
    """By its name; all families have one but those that no converter knows, or whose files have parts we lack."""
    names = {family.architecture for family in FAMILIES}
    found = {it.name for it in _ARCHITECTURES.values()}
    assert names - found == {"MistralForCausalLM", "MinistralForCausalLM", "Gemma4ForCausalLM"}
    assert found <= names
