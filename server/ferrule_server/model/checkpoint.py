"""Which tensors the safetensors files of a folder hold, and where; nothing is read but the headers.

The format (huggingface/safetensors, README "Format"): 8 bytes little-endian header length, a JSON header of
``name -> {dtype, shape, data_offsets}``, then the bytes. It is parsed here rather than through the library so that
tensors are read straight into their final memory: a mapped file would count twice against the peak RSS.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

__all__ = ["DTYPE_BYTES", "StoredTensor", "list_tensors"]

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the dtypes a weight may be stored in."""

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: where its bytes lie.

    Attributes:
        name: As in the checkpoint.
        dtype: safetensors' name of it, such as ``BF16``.
        shape: Row-major.
        path: The file.
        offset: First byte in the file.
        num_bytes: Length of its data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


class _BadFile(Exception):
    """A file that does not follow the format; the message says how."""


def list_tensors(folder: Path) -> tuple[dict[str, StoredTensor], set[str], list[str]]:
    """Return every stored tensor of a model folder, and everything wrong with its files.

    Args:
        folder: Holds model.safetensors, or model.safetensors.index.json and its shards.

    Returns:
        Tensors by name; names that are already accounted for by a problem; the problems in words.
    """
    if (folder / _SINGLE_FILE).exists():
        return _merge(folder, [_SINGLE_FILE], None)
    try:
        weight_map = _read_index(folder / _INDEX_FILE)
    except _BadFile as problem:
        return {}, set(), [str(problem)]
    return _merge(folder, sorted(set(weight_map.values())), weight_map)


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except FileNotFoundError:
        raise _BadFile(f"neither {_SINGLE_FILE} nor {_INDEX_FILE} is there; only safetensors are read") from None
    except (OSError, ValueError) as error:
        raise _BadFile(f"{path.name} cannot be read: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _BadFile(f"{path.name} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise _BadFile(f"{path.name}: tensor {name} is mapped to {file!r}, which is no plain file name")
    return weight_map


def _merge(
    folder: Path, files: Iterable[str], weight_map: dict[str, str] | None
) -> tuple[dict[str, StoredTensor], set[str], list[str]]:
    tensors: dict[str, StoredTensor] = {}
    accounted: set[str] = set()
    problems: list[str] = []
    for file in files:
        try:
            entries = _read_header(folder / file)
        except _BadFile as problem:
            lost = [name for name, home in (weight_map or {}).items() if home == file]
            accounted.update(lost)
            problems.append(f"{problem} ({len(lost)} tensors: {', '.join(lost)})" if lost else str(problem))
            continue
        problems += [f"tensor {e.name} is stored twice, in {tensors[e.name].path.name} and {file}"
                     for e in entries if e.name in tensors]  # fmt: skip
        tensors.update((entry.name, entry) for entry in entries)
    if weight_map is not None:
        problems += _compare_with_index(tensors, accounted, weight_map)
    return tensors, accounted, problems


def _compare_with_index(tensors: dict[str, StoredTensor], accounted: set[str], weight_map: dict[str, str]) -> list[str]:
    """Return where the index and the shards disagree; a tensor that is nowhere is left to the caller to name."""
    problems = []
    for name, entry in tensors.items():
        if name not in weight_map:
            problems.append(f"tensor {name} is in {entry.path.name} but not in {_INDEX_FILE}")
        elif weight_map[name] != entry.path.name and name not in accounted:
            problems.append(f"tensor {name} is in {entry.path.name}, {_INDEX_FILE} says {weight_map[name]}")
    return problems


def _read_header(path: Path) -> list[StoredTensor]:
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise _BadFile(f"file {path.name} is truncated or no safetensors file")
            header = json.loads(file.read(header_bytes), object_pairs_hook=_unique_keys)
    except FileNotFoundError:
        raise _BadFile(f"shard file {path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise _BadFile(f"file {path.name} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise _BadFile(f"file {path.name} has no header object")
    header.pop("__metadata__", None)
    entries = [_parse_entry(path, name, value, 8 + header_bytes) for name, value in header.items()]
    _check_coverage(path, entries, 8 + header_bytes, file_bytes)
    return entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"duplicate entries {', '.join(twice)}")
    return dict(pairs)


def _parse_entry(path: Path, name: str, value: object, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]  # type: ignore[index]
        is_sound = isinstance(dtype, str) and all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise _BadFile(f"file {path.name}: the header entry of {name} is malformed")
    if dtype in DTYPE_BYTES and end - begin != prod(shape) * DTYPE_BYTES[dtype]:
        raise _BadFile(f"file {path.name}: {name} has {end - begin} bytes, {dtype} {list(shape)} needs others")
    return StoredTensor(name, dtype, shape, path, data_start + begin, end - begin)


def _check_coverage(path: Path, entries: list[StoredTensor], data_start: int, file_bytes: int) -> None:
    """Refuse overlaps, holes and truncation: the data must be exactly the tensors, end to end."""
    position = data_start
    for entry in sorted(entries, key=lambda e: (e.offset, e.num_bytes)):
        if entry.offset != position:
            raise _BadFile(f"file {path.name}: the data of {entry.name} overlaps another tensor or leaves a hole")
        position += entry.num_bytes
    if position != file_bytes:
        raise _BadFile(f"file {path.name} has {file_bytes} bytes, its header describes {position}; is it truncated?")
