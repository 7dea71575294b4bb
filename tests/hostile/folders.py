"""Hostile model folders: each must end the server with exit code 2 and one line, soon, and in little memory."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from tests.api.harness import DEMO_FOLDER
from tests.hostile.servers import MIB
from tests.hostile.verdicts import Attack, Campaign, Outcome

MAX_S = 10.0
MAX_RSS_MIB = 2048.0
PROMISE = "a model folder that cannot be used ends the server with exit code 2 and a sentence"
BAR = "exit code 2, one line, <= 10 s, <= 2 GiB"
_NESTED = 200_000
_NESTED_JSON: Final = b'{"a":' + b"[" * _NESTED + b"]" * _NESTED + b"}"
_KILL_AT_MIB = 3072.0
_POLL_S = 0.02

Spoil = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class End:
    """How a server with a hostile folder ended.

    Attributes:
        exit_code: None: it did not end. is_ready: whether it began to serve.
        num_lines: Messages on stderr, without those of progress. last_line: the last of them.
        seconds: Until then. rss_mib: most memory it took. may_serve: to begin to serve is fine, too.
    """

    exit_code: int | None
    is_ready: bool
    num_lines: int
    last_line: str
    seconds: float
    rss_mib: float
    may_serve: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the bar is met."""
        is_refused = self.exit_code == 2 and self.num_lines == 1
        is_bounded = self.seconds <= MAX_S and self.rss_mib <= MAX_RSS_MIB
        return is_bounded and (is_refused or (self.may_serve and self.is_ready))


def demo_folder(parent: Path, name: str) -> Path:
    """Make a folder with links to the files of the bundled model."""
    folder = parent / re.sub(r"\W+", "_", name)
    folder.mkdir()
    for path in DEMO_FOLDER.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def replace(folder: Path, name: str, data: bytes) -> None:
    """Write a file in the place of a link."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(data)


def config_with(key: str, value: str) -> Spoil:
    """Return what sets a key of config.json to a value, written as JSON."""

    def spoil(folder: Path) -> None:
        config = json.loads((DEMO_FOLDER / "config.json").read_text())
        config[key] = "@"
        if key == "rope_theta":
            del config["rope_parameters"]
        if key == "max_window_layers":
            config |= {"use_sliding_window": True, "sliding_window": 64}
        replace(folder, "config.json", json.dumps(config).replace('"@"', value).encode())

    return spoil


def file_with(name: str, data: bytes) -> Spoil:
    """Return what writes a file."""
    return lambda folder: replace(folder, name, data)


def index_with(data: bytes) -> Spoil:
    """Return what makes the model one of several files, with this index."""

    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        replace(folder, "model.safetensors.index.json", data)

    return spoil


def header_with(header: bytes) -> Spoil:
    """Return what writes a safetensors file with this header and no data."""
    return file_with("model.safetensors", struct.pack("<Q", len(header)) + header)


def fifo(name: str) -> Spoil:
    """Return what puts a named pipe in the place of a file."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def device(name: str) -> Spoil:
    """Return what puts an endless device in the place of a file."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/zero")

    return spoil


def double_keys(count: int) -> bytes:
    """Return a header that names one tensor again and again."""
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    return b"{" + b",".join([entry] * count) + b"}"


def long_shape(num_dimensions: int, num_digits: int) -> bytes:
    """Return a header with a tensor of a shape of many long numbers."""
    shape = b",".join([b"9" * num_digits] * num_dimensions)
    return b'{"a":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[0,4]}}'


FOLDERS: dict[str, Spoil] = {
    "config nested": file_with("config.json", _NESTED_JSON),
    "index nested": index_with(_NESTED_JSON),
    "header nested": header_with(_NESTED_JSON),
    "generation config nested": file_with("generation_config.json", _NESTED_JSON),
    "tokenizer config nested": file_with("tokenizer_config.json", _NESTED_JSON),
    "tokenizer nested": file_with("tokenizer.json", _NESTED_JSON),
    "integer of 6000 digits": config_with("hidden_size", "9" * 6000),
    "rope_theta 10**400": config_with("rope_theta", "1" + "0" * 400),
    "vocab_size 10**18": config_with("vocab_size", str(10**18)),
    "vocab_size 2**63": config_with("vocab_size", str(2**63)),
    "max_window_layers x": config_with("max_window_layers", '"x"'),
    "config /dev/zero": device("config.json"),
    "weights /dev/zero": device("model.safetensors"),
    "5 million layers": config_with("num_hidden_layers", "5000000"),
    "shape of long numbers": header_with(long_shape(3000, 4000)),
    "80000 double keys": header_with(double_keys(80_000)),
    "weights a pipe": fifo("model.safetensors"),
    "config a pipe": fifo("config.json"),
    "template constant": file_with("chat_template.jinja", b"{{ 'a'|center(3000000000) }}"),
    "template constant product": file_with("chat_template.jinja", b"{{ '%3000000000d' % 1 }}"),
}
"""What is wrong with each folder. For the last two, a model of the hub has to bring no more than a template."""

MAY_SERVE: Final = frozenset({"template constant", "template constant product"})
"""Folders that may also be served: their templates fail when they are rendered, within the bounds of a rendering."""


def start_with(model: str, log: Path) -> End:
    """Start a server with a model and return how it ends."""
    command = [sys.executable, "-m", "ferrule_server", "--model", model, "--listen=127.0.0.1:0", "--kv-memory=32MiB"]
    began_s = time.monotonic()
    with log.open("wb") as stderr, log.with_suffix(".out").open("wb") as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
        largest, is_ready = 0.0, False
        try:
            for rss_mib in _sizes(process, began_s):
                largest = max(largest, rss_mib)
                is_ready = b"ready " in log.with_suffix(".out").read_bytes()
                if is_ready or largest > _KILL_AT_MIB:
                    break
            seconds = time.monotonic() - began_s
            exit_code = process.poll()
        finally:
            process.kill()
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if _is_message(line)]
    last = lines[-1][:200] if lines else ""
    return End(exit_code, is_ready, len(lines), last, round(seconds, 1), round(largest, 1))


def _is_message(line: str) -> bool:
    """Whether a line of stderr begins a message: not a continuation, and not progress on the level INFO."""
    return bool(line) and not line[0].isspace() and " INFO " not in line


def _sizes(process: subprocess.Popen[bytes], began_s: float) -> Iterator[float]:
    """Yield the resident size in MiB while the process runs, within the time it has."""
    watched = psutil.Process(process.pid)
    while process.poll() is None and time.monotonic() < began_s + MAX_S + 1.0:
        yield watched.memory_info().rss / MIB
        time.sleep(_POLL_S)


def run_folders(campaign: Campaign) -> Outcome:
    """Start a server with each folder, and with a name of 5 000 characters."""
    parent = campaign.folder / "models"
    parent.mkdir()
    ends: dict[str, End] = {}
    for name, spoil in FOLDERS.items():
        folder = demo_folder(parent, name)
        spoil(folder)
        end = start_with(str(folder), folder.with_suffix(".log"))
        ends[name] = dataclasses.replace(end, may_serve=name in MAY_SERVE)
        campaign.progress(f"{name}: {_in_words(ends[name])}")
    ends["name of 5000 characters"] = start_with("m" * 5000, parent / "name.log")
    return _outcome(ends)


def _in_words(end: End) -> str:
    what = "ready" if end.is_ready else f"exit {end.exit_code}"
    word = "holds" if end.is_met else "MISSED"
    return f"{word}: {what}, {end.num_lines} lines, {end.seconds} s, {end.rss_mib} MiB: {end.last_line[:100]}"


def _outcome(ends: dict[str, End]) -> Outcome:
    missed = [name for name, end in ends.items() if not end.is_met]
    figures: dict[str, Any] = {name: asdict(end) for name, end in ends.items()}
    num_hung = sum(end.exit_code is None and not end.is_ready for end in ends.values())
    summary = f"{len(missed)} of {len(ends)} missed, {num_hung} of them without an end"
    return Outcome(summary, {"missed": missed, "ends": figures}, BAR, not missed)


ATTACKS = [Attack("model_folders", PROMISE, run_folders)]
