"""GGUF files made to do harm are refused in one sentence, after little time and with little memory."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from ferrule_server.errors import ModelError
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.weights import check_tensors
from tests.model.gguf.raw_file import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    IQ2_XXS,
    Q8_0,
    TEXT,
    UINT32,
    UINT64,
    RawFile,
    RawTensor,
    items,
    key,
    number,
    sound,
    text,
)

Spoil = Callable[[RawFile], object]
HUGE: Final = (1 << 60, (1 << 63) - 1, (1 << 64) - 1)
PART: Final = "x-0000{}-of-00003.gguf"


def _with(name: str, kind: int, raw: bytes) -> Spoil:
    """Add a key, or replace its value."""
    return lambda file: file.keys.update({name: key(name, kind, raw)})


def _with_tensor(*args: Any) -> Spoil:
    return lambda file: file.tensors.append(RawTensor(*args))


def _changed(index: int, **changes: Any) -> Spoil:
    return lambda file: vars(file.tensors[index]).update(changes)


def _set(**changes: Any) -> Spoil:
    return lambda file: vars(file).update(changes)


def _without(name: str) -> Spoil:
    return lambda file: file.keys.pop(name)


def _numbers(count: int, kind: int = UINT32) -> bytes:
    return items(kind, [bytes(4 * count)], count)


TABLE: dict[str, Spoil] = {
    "another magic": _set(magic=b"GGML"),
    **{f"version {version}": _set(version=version) for version in (0, 1, 4, 3 << 24)},
    **{f"{count} tensors": _set(num_tensors=count) for count in (13, 1 << 17, *HUGE)},
    **{f"{count} keys": _set(num_keys=count) for count in (9, 1 << 16, *HUGE)},
    **{f"a text of {count} bytes": _with("a", TEXT, struct.pack("<Q", count)) for count in (1 << 20, 1 << 27, *HUGE)},
    **{f"{count} texts": _with("a", ARRAY, items(TEXT, [text("b")] * 9, count)) for count in (1 << 20, *HUGE)},
    **{f"{count} numbers": _with("a", ARRAY, items(UINT32, [], count)) for count in (1 << 20, *HUGE)},
    **{f"{count} flags": _with("a", ARRAY, items(BOOL, [], count)) for count in (1 << 20, *HUGE)},
    "too many items": _with("a", ARRAY, _numbers((1 << 22) + 1)),
    "too many items in all": lambda file: [_with(f"a{i}", ARRAY, _numbers(1 << 21))(file) for i in range(3)],
    "too many texts": _with("a", ARRAY, items(TEXT, [bytes(8 * (1 << 22) + 8)], (1 << 22) + 1)),
    "an array of arrays": _with("a", ARRAY, items(ARRAY, [items(UINT32, [bytes(4)])])),
    "arrays nested deeply": _with("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 100_000),
    "an array of type 13": _with("a", ARRAY, items(13, [bytes(4)])),
    "a value of type 13": _with("a", 13, bytes(4)),
    "a value of type 2**32-1": _with("a", (1 << 32) - 1, bytes(4)),
    "a long header": _with("a", TEXT, text("x" * (65 << 20))),
    "a key twice": lambda file: file.keys.update({"again": number("llama.block_count", 1)}),
    "a key that is not UTF-8": lambda file: file.keys.update({"a": key(b"\xff\xfe", UINT32, bytes(4))}),
    "a value that is not UTF-8": _with("a", TEXT, text(b"\xed\xa0\x80")),
    "a token that is not UTF-8": _with("tokenizer.ggml.tokens", ARRAY, items(TEXT, [text("a"), text(b"\xff")])),
    "a tensor's name that is not UTF-8": _with_tensor(b"\xff", (1,)),
    **{
        f"alignment {value}": _with("general.alignment", UINT32, struct.pack("<I", value))
        for value in (0, 3, 33, 1 << 31, (1 << 32) - 1)
    },
    "alignment below zero": _with("general.alignment", INT32, struct.pack("<i", -32)),
    "alignment a text": _with("general.alignment", TEXT, text("32")),
    "alignment a fraction": _with("general.alignment", FLOAT32, struct.pack("<f", 32)),
    "5 dimensions": _with_tensor("a", (1, 1, 1, 1, 1)),
    "2**32-1 dimensions": lambda file: file.keys.update(
        {"a": number("a", 1), "b": text("t") + struct.pack("<IQ", (1 << 32) - 1, 1)}
    ) or _set(num_keys=len(file.keys) - 1, num_tensors=1)(file),
    "sizes that overflow": _changed(0, sizes=(1 << 63, 2)),
    "sizes that overflow four times": _changed(0, sizes=((1 << 64) - 1,) * 4),
    "sizes of zero": _changed(0, sizes=(0, 24)),
    "no sizes": _changed(0, sizes=()),
    **{f"offset {offset}": _changed(3, offset=offset) for offset in (16, 1 << 40, *HUGE)},
    "a tensor over another": _changed(3, offset=0),
    "a tensor twice": _changed(3, name="output_norm.weight"),
    "data that are cut off": _set(missing_bytes=64),
    "data that are missing": _set(missing_bytes=1 << 20),
    "rows that no blocks fill": _changed(1, kind=Q8_0, sizes=(31,)),
    "blocks without sizes": _changed(1, kind=Q8_0, sizes=()),
    "a type of ggml that is not read": _changed(0, kind=IQ2_XXS),
    "a type that ggml lacks": _changed(0, kind=4711),
    "the type 2**32-1": _changed(0, kind=(1 << 32) - 1),
    "a tensor too many": _with_tensor("blk.1.attn_q.weight", (32, 32)),
    "a tensor by its name in a folder too": _with_tensor("model.embed_tokens.weight", (32, 24)),
    "a tensor of another shape": _changed(3, sizes=(32, 16)),
    "a tensor of control characters": _with_tensor("a\x1b[2Jb\n", (8,)),
    "a tensor of a long name": _with_tensor("a" * 100_000, (8,)),
    "no embedding": _changed(0, name="token_embd.bias"),
    "no tensors": _set(tensors=[]),
    "100 000 tensors": _set(tensors=[RawTensor(f"t{i}", (0,)) for i in range(100_000)]),
    "no keys": _set(keys={}),
    "no architecture": _without("general.architecture"),
    "an architecture that is a number": _with("general.architecture", UINT32, bytes(4)),
    "an architecture that is a list": _with("general.architecture", ARRAY, items(TEXT, [text("llama")])),
    "a mixture of experts": _with("general.architecture", TEXT, text("deepseek2")),
    "an architecture of transformers": _with("general.architecture", TEXT, text("Gemma3ForCausalLM")),
    "an architecture of control characters": _with("general.architecture", TEXT, text("\x1b[2J\n" * 1000)),
    "an adapter": _with("general.type", TEXT, text("adapter")),
    "experts": _with("llama.expert_count", UINT32, struct.pack("<I", 8)),
    "a key of tomorrow": _with("llama.of_tomorrow", UINT32, struct.pack("<I", 1)),
    "a key of tomorrow with a long list": _with("llama.of_tomorrow", ARRAY, _numbers(1 << 20)),
    **{f"no {name}": _without(f"llama.{name}") for name in ("block_count", "context_length", "embedding_length",
                                                           "feed_forward_length", "attention.head_count",
                                                           "attention.layer_norm_rms_epsilon")},
    **{
        f"{name} {value}": _with(f"llama.{name}", UINT64, struct.pack("<Q", value))
        for name in ("block_count", "context_length", "embedding_length", "attention.head_count",
                     "attention.head_count_kv", "attention.key_length", "rope.dimension_count")
        for value in (0, 7, 1 << 40, (1 << 64) - 1) if name != "context_length" or value not in (7,)
    },
    "layers a text": _with("llama.block_count", TEXT, text("1")),
    "layers a flag": _with("llama.block_count", BOOL, b"\1"),
    "heads by layer": _with("llama.attention.head_count_kv", ARRAY, items(UINT32, [struct.pack("<II", 1, 2)], 2)),
    "no heads by layer": _with("llama.attention.head_count_kv", ARRAY, items(UINT32, [])),
    "values of another width": _with("llama.attention.value_length", UINT32, struct.pack("<I", 8)),
    "epsilon NaN": _with("llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", float("nan"))),
    "frequencies 0": _with("llama.rope.freq_base", FLOAT32, bytes(4)),
    "frequencies infinite": _with("llama.rope.freq_base", FLOAT32, struct.pack("<f", float("inf"))),
    "a scaling of tomorrow": _with("llama.rope.scaling.type", TEXT, text("of tomorrow")),
    "not causal": _with("llama.attention.causal", BOOL, b"\0"),
    "divisors of zero": _with_tensor("rope_freqs.weight", (8,)),
    "divisors too few": _with_tensor("rope_freqs.weight", (7,)),
    "divisors too many": _with_tensor("rope_freqs.weight", (1 << 16,)),
    "divisors in a matrix": _with_tensor("rope_freqs.weight", (8, 1)),
    "divisors in blocks": _with_tensor("rope_freqs.weight", (32,), Q8_0),
    "a part alone": _with("split.count", UINT32, struct.pack("<I", 3)),
    "parts that are a text": _with("split.count", TEXT, text("3")),
    "parts of half a number": _with("split.count", FLOAT32, struct.pack("<f", 2.5)),
    "another number of tensors": _with("split.tensors.count", UINT32, struct.pack("<I", 12)),
}  # fmt: skip


def _part(folder: Path, number_of: int, **changes: Any) -> Path:
    """Write one of three parts; only the first has tensors unless they are given."""
    file = sound() if number_of == 1 else RawFile()
    _set(**changes)(file)
    for name, value in {"split.no": number_of - 1, "split.count": 3}.items():
        file.keys.setdefault(name, number(name, value))
    path = folder / PART.format(number_of)
    path.write_bytes(file.content())
    return path


def _parts(folder: Path) -> Path:
    first, *_ = (_part(folder, i) for i in (1, 2, 3))
    return first


def _second_is(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    """Return what writes three parts, of which the second one is replaced."""

    def write(folder: Path) -> Path:
        first = _parts(folder)
        (folder / PART.format(2)).unlink()
        make(folder / PART.format(2))
        return first

    return write


def _outside(path: Path) -> None:
    outside = path.parent.parent / f"outside-{path.parent.name}.gguf"
    outside.write_bytes(RawFile({"split.no": number("split.no", 1)}).content())
    path.symlink_to(outside)


def _renamed(name: str) -> Callable[[Path], Path]:
    return lambda folder: _parts(folder).rename(folder / name)


def _at(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "x.gguf"
        make(path)
        return path

    return write


def _terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


PLACES: dict[str, Callable[[Path], Path]] = {
    "nothing": _at(Path.touch),
    "three bytes": _at(lambda path: path.write_bytes(b"GGU")),
    "the magic alone": _at(lambda path: path.write_bytes(b"GGUF")),
    "a text": _at(lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n" * 3)),
    "a pipe": _at(os.mkfifo),
    "an endless device": _at(lambda path: path.symlink_to("/dev/zero")),
    "itself": _at(lambda path: path.symlink_to(path)),
    "a terabyte of zeros": _at(_terabyte),
    "an empty folder": _at(Path.mkdir),
    "the second part": lambda folder: _parts(folder).with_name(PART.format(2)),
    "a part of another name": _renamed("x.gguf"),
    "a part of another number": _renamed("x-00002-of-00003.gguf"),
    "a part of another count": _renamed("x-00001-of-00004.gguf"),
    "a missing part": _second_is(lambda _path: None),
    "a part that is a pipe": _second_is(os.mkfifo),
    "a part that is a folder": _second_is(Path.mkdir),
    "a part that is endless": _second_is(lambda path: path.symlink_to("/dev/zero")),
    "a part outside": _second_is(_outside),
    "a part that is the first": _second_is(lambda path: path.symlink_to(PART.format(1))),
    "a part that is itself": _second_is(lambda path: path.symlink_to(path.name)),
    "a part that is the third": _second_is(lambda path: path.symlink_to(PART.format(3))),
    "a part that is no GGUF": _second_is(lambda path: path.write_bytes(bytes(100))),
    "a tensor in two parts": _second_is(
        lambda path: _part(path.parent, 2, tensors=[RawTensor("output_norm.weight", (32,))])
    ),
    "parts of long headers": _second_is(
        lambda path: [
            _part(path.parent, i, keys={"a": key("a", TEXT, text("x" * (40 << 20)))}) for i in (2, 3)
        ]
    ),
    "65 535 parts": lambda folder: _part(
        folder, 1, keys={**sound().keys, "split.count": number("split.count", 65_535)}
    ).rename(folder / "x-00001-of-65535.gguf"),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What comes of every file: each is loaded in a process of its own."""
    root = tmp_path_factory.mktemp("hostile")
    models = {}
    for i, (name, spoil) in enumerate({"sound": _set(), **TABLE}.items()):
        file = sound()
        spoil(file)
        models[name] = root / f"m{i}.gguf"
        models[name].write_bytes(file.content())
    for i, (name, write) in enumerate({"sound parts": _parts, **PLACES}.items()):
        folder = root / f"p{i}"
        folder.mkdir()
        models[name] = write(folder)
    run = subprocess.run(
        [sys.executable, "-m", "tests.model.load_folders", *map(str, models.values())],
        capture_output=True, text=True, timeout=500, check=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    return dict(zip(models, map(json.loads, run.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", [*TABLE, *PLACES])
def test_a_hostile_file_ends_in_a_sentence(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """A ModelError that people can read, within seconds, in the memory of any start."""
    found = outcomes[name]
    assert found["outcome"] in ("ModelError", "NotSupported"), found
    assert found["seconds"] < 10
    assert 10 < len(found["message"]) < 70_000
    assert all(len(line) < 16_000 and line.isprintable() for line in found["message"].splitlines())
    assert "config.json" not in found["message"] or name == "an empty folder"


@pytest.mark.parametrize("name", ["sound", "sound parts"])
def test_the_sound_files_of_the_table_load(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """So that the others fail for what was spoilt."""
    assert outcomes[name]["outcome"] == "loaded", outcomes[name]


NUMBERS: Final = (0, 1, 2, 31, 1 << 20, 1 << 31, (1 << 32) - 1, *HUGE)


def _mutated(content: bytes, chance: random.Random) -> bytes:
    """Return a file of which some bytes are others."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(min(len(changed), 1400))
        match chance.randrange(5):
            case 0:
                changed[at] = chance.randrange(256)
            case 1:
                changed[at : at + 8] = struct.pack("<Q", chance.choice(NUMBERS))
            case 2:
                changed[at : at + 4] = struct.pack("<I", chance.randrange(16))
            case 3:
                del changed[at : at + chance.randint(1, 32)]
            case 4:
                changed[at:at] = changed[at : at + chance.randint(1, 32)]
    return bytes(changed)


def _load_mutants(folder: Path, seed: int, count: int) -> int:
    """Return how many mutants are refused; whatever else happens is raised."""
    chance, content, num_refused = random.Random(seed), sound().content(), 0
    for i in range(count):
        path = folder / f"{i % 2}.gguf"  # one of another name than the last, which may have been read
        path.write_bytes(_mutated(content, chance))
        begin = time.process_time()
        try:
            check_tensors(path, read_config(path))
        except ModelError:
            num_refused += 1
        assert time.process_time() - begin < 5, (seed, i)
    return num_refused


def test_mutants_load_or_are_refused(tmp_path: Path) -> None:
    """Some thousand files, each with some bytes changed."""
    assert 1500 < _load_mutants(tmp_path, seed=1, count=2000) < 2000


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(100, 110))
def test_a_million_mutants_load_or_are_refused(tmp_path: Path, seed: int) -> None:
    """As above, for longer."""
    assert _load_mutants(tmp_path, seed, count=100_000)
