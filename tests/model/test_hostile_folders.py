"""Model folders made to do harm are refused in one sentence, after little time and with little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ferrule_server.errors import ModelError
from ferrule_server.model.config_reader import parse_config, read_config
from ferrule_server.model.weights import load_model
from tests.model.small_model import CONFIG, LAYER, header_of, write_config, write_header, write_small_model

DEEP = "[" * 200_000 + "]" * 200_000
DEEP_OBJECT = '{"a":' * 200_000 + "1" + "}" * 200_000
MANY_DIGITS = "9" * 6000
ENTRY = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
Spoil = Callable[[Path], object]


def _text(name: str, content: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return spoil


def _key(key: str, literal: str) -> Spoil:
    """Spoil one key of config.json, by JSON as it is spelled."""
    return _text("config.json", json.dumps({**CONFIG, key: "HERE"}).replace('"HERE"', literal))


def _link(name: str, target: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def _pipe(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


def _folder(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return spoil


def _sparse(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        os.truncate(folder / name, 1 << 40)

    return spoil


def _header(text: str) -> Spoil:
    return lambda folder: write_header(folder, text)


def _index(text: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(text)

    return spoil


def _weight_map(weight_map: dict[str, object]) -> Spoil:
    return _index(json.dumps({"weight_map": weight_map}))


def _many_shards(folder: Path) -> None:
    """Write one small file and a thousand links to a file whose header is as long as one may be."""
    (folder / "model.safetensors").unlink()
    text = json.dumps({"__metadata__": {"a": "x" * ((16 << 20) - 100)}}).encode()
    (folder / "long").write_bytes(len(text).to_bytes(8, "little") + text)
    names = [f"m{i}.safetensors" for i in range(1000)]
    for name in names:
        (folder / name).symlink_to("long")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: n for n in names}}))


def _tokenizer(**parts: object) -> Spoil:
    """Change parts of the tokenizer."""

    def spoil(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))

    return spoil


def _tensors(num: int) -> str:
    offsets = '"shape": [0], "data_offsets": [0, 0]'
    return "{" + ", ".join(f'"t{i}": {{"dtype": "F32", {offsets}}}' for i in range(num)) + "}"


DUPLICATES = "{" + ", ".join(f'"k{i % 40_000}": {ENTRY}' for i in range(80_000)) + "}"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
TABLE: dict[str, Spoil] = {
    **{f"{name} deep": _text(name, DEEP) for name in (*CONFIGS, "tokenizer.json")},
    **{f"{name} deep in an object": _text(name, DEEP_OBJECT) for name in (*CONFIGS, "tokenizer.json")},
    **{f"{name} of many digits": _text(name, f'{{"a": {MANY_DIGITS}}}') for name in CONFIGS},
    **{f"{name} a pipe": _pipe(name) for name in (*CONFIGS, "tokenizer.json", "chat_template.jinja")},
    **{f"{name} endless": _link(name, "/dev/zero") for name in (*CONFIGS, "tokenizer.json", "chat_template.jinja")},
    **{f"{name} a folder": _folder(name) for name in ("config.json", "tokenizer.json", "model.safetensors")},
    **{f"{name} of a terabyte": _sparse(name) for name in ("config.json", "tokenizer.json", "tokenizer_config.json")},
    **{f"{key} 10**18": _key(key, str(10**18)) for key in SIZES},
    **{f"{key} 2**63": _key(key, str(2**63)) for key in SIZES},
    **{f"{key} of 4000 digits": _key(key, "9" * 4000) for key in SIZES},
    **{f"{key} null": _key(key, "null") for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
    "layers 5 000 000": _key("num_hidden_layers", "5000000"),
    "rope_theta 10**400": _key("rope_theta", "1" + "0" * 400),
    "rope_theta 1e400": _key("rope_theta", "1e400"),
    "rope_theta NaN": _key("rope_theta", "NaN"),
    "rope_theta 1e-320": _key("rope_theta", "1e-320"),
    "norm eps 10**400": _key("rms_norm_eps", "1" + "0" * 400),
    "max_window_layers a text": _text(
        "config.json",
        json.dumps({**CONFIG, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": "x"}),
    ),
    "eos a million": _key("eos_token_id", json.dumps([-1] * 1_000_000 + [0.5])),
    "hidden_act a megabyte": _key("hidden_act", json.dumps("x" * 1_000_000)),
    "hidden_act deep": _key("hidden_act", "[" * 900 + "]" * 900),
    "config two bytes": _text("config.json", "\x00\xff"),
    "weights a pipe": _pipe("model.safetensors"),
    "weights endless": _link("model.safetensors", "/dev/zero"),
    "weights themselves": _link("model.safetensors", "model.safetensors"),
    "weights of a terabyte": _sparse("model.safetensors"),
    "header deep": _header(DEEP),
    "header deep in an object": _header(DEEP_OBJECT),
    "header many digits": _header(f'{{"a": {MANY_DIGITS}}}'),
    "header shape wide": _header(f'{{"a": {{"dtype": "F32", "shape": [{", ".join(["9" * 4000] * 3000)}], '
                                 '"data_offsets": [0, 4]}}'),
    "header offsets huge": _header(f'{{"a": {{"dtype": "F32", "shape": [], "data_offsets": [0, {"9" * 4200}]}}}}'),
    "header duplicates": _header(DUPLICATES),
    "header of 200 000 tensors": _header(_tensors(200_000)),
    "header of 100 000 tensors": _header(_tensors(100_000)),
    "header of half a surrogate": _header('{"\\ud800": ' + ENTRY + "}"),
    "header of control characters": _header('{"a\\u001b[2Jb\\n": ' + ENTRY + "}"),
    "header longer than the limit": _header('{"__metadata__": {"a": "' + "x" * (17 << 20) + '"}}'),
    "index deep": _index(DEEP),
    "index many digits": _index(f'{{"weight_map": {MANY_DIGITS}}}'),
    "index duplicates": _index('{"weight_map": {' + ", ".join(f'"k{i % 40_000}": "m"' for i in range(80_000)) + "}}"),
    "index a pipe": lambda folder: (_index("{}")(folder), _pipe("model.safetensors.index.json")(folder)),
    "index endless": lambda folder: (_index("{}")(folder), _link("model.safetensors.index.json", "/dev/zero")(folder)),
    "index of many missing files": _weight_map({f"t{i}": f"m{i % 4000}.safetensors" for i in range(100_000)}),
    "index of too many files": _weight_map({f"t{i}": f"m{i}.safetensors" for i in range(5000)}),
    "index of bad names": _weight_map({"a": "x\0y", "b": "", "c": "..", "d": "y" * 5000, "e": "\ud800"}),
    "index of other types": _weight_map({"a": 3}),
    "shard endless": lambda folder: (_weight_map({"a": "m"})(folder), _link("m", "/dev/zero")(folder)),
    "shard a pipe": lambda folder: (_weight_map({"a": "m"})(folder), _pipe("m")(folder)),
    "shards of long headers": _many_shards,
    "tokenizer without a known token": _text(
        "tokenizer.json",
        json.dumps({"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "[UNK]"}}),
    ),
    "tokenizer of a bad unigram": _text(
        "tokenizer.json", json.dumps({"model": {"type": "Unigram", "vocab": [], "unk_id": 7}})
    ),
    "tokenizer that multiplies": _tokenizer(
        normalizer={"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}] * 6}
    ),
    "tokenizer of a bad expression": _tokenizer(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    ),
    "tokenizer of many lists": _text("tokenizer.json", '{"model": [' + "[]," * (15 << 20) + "[]]}"),
    "too many templates": _text(
        "tokenizer_config.json",
        json.dumps({"chat_template": [{"name": f"t{i}", "template": "x"} for i in range(10_000)]}),
    ),
    "template that compiles to a text of 200 MB": _text(
        "tokenizer_config.json", json.dumps({"chat_template": "{{ 'a'|center(200000000) }}"})
    ),
    "template too deep to compile": _text("chat_template.jinja", "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"),
    "templates in a pipe": _pipe("additional_chat_templates/a.jinja"),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What comes of every folder of the table, and of two names: each is loaded in a process of its own."""
    root = tmp_path_factory.mktemp("hostile")
    models = {"sound": str(write_small_model(root / "sound"))}
    for i, (name, spoil) in enumerate(TABLE.items()):
        folder = write_small_model(root / f"m{i}")
        spoil(folder)
        models[name] = str(folder)
    models |= {"a long name": "x" * 5000, "a long name of the hub": f"a/{'x' * 5000}", "no home": "~nobody-at-all/x"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.model.load_folders", *models.values()],
        capture_output=True, text=True, timeout=500, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return dict(zip(models, map(json.loads, run.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", [*TABLE, "a long name", "a long name of the hub", "no home"])
def test_a_hostile_folder_ends_in_a_sentence(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """A ModelError that people can read, within seconds, in the memory of any start."""
    found = outcomes[name]
    assert found["outcome"] == "ModelError", found
    assert found["seconds"] < 10
    assert 10 < len(found["message"]) < 70_000
    assert all(len(line) < 16_000 and line.isprintable() for line in found["message"].splitlines())


def test_the_sound_folder_of_the_table_loads(outcomes: dict[str, dict[str, Any]]) -> None:
    """So that the others fail for what was spoilt."""
    assert outcomes["sound"]["outcome"] == "loaded", outcomes["sound"]


@pytest.mark.parametrize("name", ["config deep", "config a pipe", "long name"])
def test_the_process_ends_with_2_and_one_line(tmp_path: Path, name: str) -> None:
    """No traceback, whatever the model is."""
    folder = write_small_model(tmp_path / "model")
    if name != "long name":
        TABLE[name.replace("config", "config.json")](folder)
    model = "x" * 5000 if name == "long name" else str(folder)
    command = [sys.executable, "-m", "ferrule_server", "--model", model, "--listen", "127.0.0.1:0", "--log-level"]
    run = subprocess.run([*command, "error"], capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stderr[-2000:]
    assert len(run.stderr) < 1000


NUMBERS = st.sampled_from([0, -1, 1, 2, 2**31, 2**63, 10**18, 10**30, 10**400, 1e-320, 1e308, -0.0, 5_000_000])
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | st.integers(-5, 300) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
ROPE_KEYS = st.sampled_from(["rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
                             "original_max_position_embeddings", "partial_rotary_factor"])  # fmt: skip
ROPES = st.dictionaries(ROPE_KEYS, VALUES | st.sampled_from(["llama3", "default", 1.0, 8.0]), max_size=6)
KEYS = st.sampled_from([*CONFIG, "rope_scaling", "rope_parameters", "partial_rotary_factor", "quantization_config",
                        "layer_types", "mlp_bias"])  # fmt: skip
CHANGES = st.dictionaries(KEYS, VALUES | ROPES, min_size=1, max_size=3)
GENERATIONS = st.dictionaries(st.just("eos_token_id"), VALUES, max_size=1)
QUIET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(change=CHANGES, generation=GENERATIONS)
@settings(max_examples=500)
def test_any_configuration_is_a_model_or_refused(change: dict[str, Any], generation: dict[str, Any]) -> None:
    """Whatever stands where, in either dialect."""
    assert len(_refusal(lambda: parse_config({**CONFIG, **change}, generation))) < 1000


@given(change=CHANGES)
@settings(QUIET, max_examples=60)
def test_any_configuration_beside_weights_loads_or_is_refused(
    change: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The tensors are compared with what the configuration asks for, however much that is."""
    folder = _shared_folder(tmp_path_factory)
    write_config(folder, {**CONFIG, **change})
    _refusal(lambda: load_model(folder, dtype="float32"))
    write_config(folder, CONFIG)


FIELDS = st.sampled_from(["dtype", "shape", "data_offsets"])
NAMES = st.sampled_from(["model.norm.weight", f"{LAYER}mlp.up_proj.weight", f"{LAYER}input_layernorm.weight"])
OFFSETS = st.lists(NUMBERS | st.integers(-10, 20_000), max_size=3)


@given(name=NAMES | st.text(max_size=4), field=FIELDS, value=VALUES | OFFSETS)
@settings(QUIET, max_examples=200)
def test_any_header_loads_or_is_refused(
    name: str, field: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One field of one tensor is anything at all."""
    folder = _shared_folder(tmp_path_factory)
    sound = header_of(folder)
    entry = {**sound.get(name, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}), field: value}
    write_header(folder, json.dumps({**sound, name: entry}))
    message = _refusal(lambda: load_model(folder, dtype="float32"))
    write_header(folder, json.dumps(sound))
    assert len(message) < 5000


@given(content=st.binary(max_size=64), name=st.sampled_from(["config.json", "model.safetensors"]))
@settings(QUIET, max_examples=100)
def test_any_bytes_are_a_file_or_refused(content: bytes, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Files that are cut off or were never of the format."""
    folder = _shared_folder(tmp_path_factory)
    sound = (folder / name).read_bytes()
    (folder / name).write_bytes(content)
    message = _refusal(lambda: load_model(folder, dtype="float32"))
    (folder / name).write_bytes(sound)
    assert message


def _refusal(load: Callable[[], object]) -> str:
    """Return the message of the ModelError that loading ends with, an empty one where it succeeds."""
    try:
        load()
    except ModelError as error:
        return str(error)
    return ""


def _shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder that examples change and put back."""
    folder = factory.getbasetemp() / "hostile-shared"
    return folder if folder.exists() else write_small_model(folder)


def test_a_sound_configuration_is_read(tmp_path: Path) -> None:
    """The bounds leave what exists alone: the largest dimensions of published models of these families."""
    largest = {"vocab_size": 262_208, "hidden_size": 16_384, "intermediate_size": 53_248, "num_hidden_layers": 126,
               "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 10_485_760}  # fmt: skip
    write_config(tmp_path, {**CONFIG, **largest})
    assert read_config(tmp_path).num_layers == 126
