"""List the tensors in the safetensors files of a folder; only the headers are read.

The format (huggingface/safetensors, README "Format"): 8 bytes little-endian header length, a JSON header of
``name -> {dtype, shape, data_offsets}``, then the bytes. It is parsed here and not by the library, so that tensors are
read straight into their final memory: a mapped file would count twice in the peak RSS.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import TypeGuard

from ferrule_server.errors import ModelError
from ferrule_server.model.gguf.files import opened
from ferrule_server.model.stored import LAYOUTS, StoredTensor
from ferrule_server.model_files import (
    MAX_HEADER_BYTES,
    FileMissing,
    is_file,
    listed,
    name_of,
    open_file,
    parse_object,
    read_object,
    read_up_to,
    shown,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_ALL_HEADERS_BYTES = 2 * MAX_HEADER_BYTES
_MAX_SHARDS = 4096
_MAX_TENSORS = 1 << 17
_MAX_DIMENSIONS = 8
_MAX_NUMBER = (1 << 63) - 1


class _BadFile(Exception):
    """A file does not follow the format; the message says how."""


def list_tensors(folder: Path) -> tuple[dict[str, StoredTensor], set[str], list[str]]:
    """Return every tensor in the files of a model, and everything that is wrong with the files.

    Args:
        folder: Holds model.safetensors, or model.safetensors.index.json and its shards; or a GGUF file.

    Returns:
        The tensors by name; the names that a problem already mentions; the problems in words.
    """
    if is_file(folder):
        return _list_gguf(folder)
    if os.path.exists(folder / SINGLE_FILE):  # noqa: PTH110  (Path.exists raises for a folder that may not be read)
        return _merge(folder, [SINGLE_FILE], None)
    try:
        weight_map = read_index(folder)
    except ModelError as problem:
        return {}, set(), [str(problem)]
    return _merge(folder, sorted(set(weight_map.values())), weight_map)


def _list_gguf(path: Path) -> tuple[dict[str, StoredTensor], set[str], list[str]]:
    from ferrule_server.model.gguf.names import renamed  # which needs torch

    try:
        return renamed(opened(path)), set(), []
    except ModelError as problem:
        return {}, set(), [str(problem)]


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, by the index of a model folder.

    Raises:
        ModelError: There is no index, or it is not usable.
    """
    try:
        content = read_object(folder, INDEX_FILE, MAX_HEADER_BYTES, has_unique_keys=True)
    except FileMissing:
        text = without_index(folder) or f"neither {SINGLE_FILE} nor {INDEX_FILE} is there; only safetensors are read"
        raise ModelError(text) from None
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX_FILE} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(
                f"{INDEX_FILE}: tensor {name_of(name)} is mapped to {shown(file)}, which is not a plain file name"
            )
    if len(set(weight_map.values())) > _MAX_SHARDS:
        raise ModelError(f"{INDEX_FILE} names more than {_MAX_SHARDS} files, the limit")
    return weight_map


def without_index(folder: Path) -> str:
    """Return what is wrong with a folder whose weights lie in several files without an index; empty: nothing."""
    files = sorted(path.name for path in folder.glob("*.safetensors") if path.name != SINGLE_FILE)
    if not files or os.path.lexists(folder / INDEX_FILE):
        return ""
    return f"weights are in {len(files)} more files ({name_of(files[0])}) without {INDEX_FILE}; add the index"


def _merge(
    folder: Path, files: Iterable[str], weight_map: dict[str, str] | None
) -> tuple[dict[str, StoredTensor], set[str], list[str]]:
    tensors: dict[str, StoredTensor] = {}
    accounted: set[str] = set()
    problems: list[str] = []
    names_by_file: defaultdict[str, list[str]] = defaultdict(list)
    for name, file in (weight_map or {}).items():
        names_by_file[file].append(name)
    spare_bytes = _MAX_ALL_HEADERS_BYTES
    for file in files:
        try:
            entries, header_bytes = _read_header(folder / file, spare_bytes)
        except _BadFile as problem:
            lost = names_by_file[file]
            accounted.update(lost)
            problems.append(f"{problem} ({len(lost)} tensors: {listed(lost)})" if lost else str(problem))
            continue
        spare_bytes -= header_bytes
        problems += [
            f"tensor {name_of(e.name)} is stored twice, in {tensors[e.name].path.name} and {name_of(file)}"
            for e in entries
            if e.name in tensors
        ]
        tensors.update((entry.name, entry) for entry in entries)
    if weight_map is not None:
        problems += _compare_with_index(tensors, accounted, weight_map)
    return tensors, accounted, problems


def _compare_with_index(tensors: dict[str, StoredTensor], accounted: set[str], weight_map: dict[str, str]) -> list[str]:
    """Return where the index and the shards disagree. A tensor that no shard holds is not reported here."""
    problems = []
    for name, entry in tensors.items():
        place = f"tensor {name_of(name)} is in {name_of(entry.path.name)}"
        if name not in weight_map:
            problems.append(f"{place} but not in {INDEX_FILE}")
        elif weight_map[name] != entry.path.name and name not in accounted:
            problems.append(f"{place}, {INDEX_FILE} says {name_of(weight_map[name])}")
    return problems


def _read_header(path: Path, spare_bytes: int) -> tuple[list[StoredTensor], int]:
    """Return the tensors of a file, and the size of its header, which is at most ``spare_bytes``."""
    name = name_of(path.name)
    try:
        with open_file(path.parent, path.name) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(read_up_to(file, 8), "little")
            if file_bytes < 8 or not 2 <= header_bytes <= file_bytes - 8:
                raise _BadFile(f"file {name} is truncated or is not a safetensors file")
            if header_bytes > min(MAX_HEADER_BYTES, spare_bytes):
                raise _BadFile(f"file {name} has a header of {header_bytes} bytes, which is beyond the limit")
            header = parse_object(read_up_to(file, header_bytes), path, has_unique_keys=True)
    except FileMissing:
        raise _BadFile(f"shard file {name} is missing") from None
    except (OSError, ModelError) as error:
        raise _BadFile(f"file {name} cannot be read: {error}") from error
    header.pop("__metadata__", None)
    if len(header) > _MAX_TENSORS:
        raise _BadFile(f"file {name} holds more than {_MAX_TENSORS} tensors, the limit")
    entries = [_parse_entry(path, tensor, value, 8 + header_bytes) for tensor, value in header.items()]
    _check_coverage(path, entries, 8 + header_bytes, file_bytes)
    return entries, header_bytes


def _parse_entry(path: Path, name: str, value: object, data_start: int) -> StoredTensor:
    found = value if isinstance(value, dict) else {}
    dtype, shape, offsets = found.get("dtype"), found.get("shape"), found.get("data_offsets")
    where = f"file {name_of(path.name)}: "
    if not isinstance(dtype, str) or not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise _BadFile(f"{where}the header entry of {name_of(name)} is malformed")
    num_bytes = offsets[1] - offsets[0]
    num_values, block_bytes = LAYOUTS.get(dtype, (0, 0))
    if num_bytes < 0 or num_values > 1 or (num_values and num_bytes != prod(shape) * block_bytes):
        raise _BadFile(f"{where}{name_of(name)} has {num_bytes} bytes, which do not fit {dtype} {shape}")
    return StoredTensor(name, dtype, tuple(shape), path, data_start + offsets[0], num_bytes)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    """Return whether a value is a short list of numbers in the range of sizes and offsets."""
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _MAX_NUMBER for n in value)


def _check_coverage(path: Path, entries: list[StoredTensor], data_start: int, file_bytes: int) -> None:
    """Refuse overlaps, holes and truncation: the tensors must cover the data exactly."""
    position, where = data_start, f"file {name_of(path.name)}"
    for entry in sorted(entries, key=lambda e: (e.offset, e.num_bytes)):
        if entry.offset != position:
            raise _BadFile(f"{where}: the data of {name_of(entry.name)} overlaps another tensor or leaves a hole")
        position += entry.num_bytes
    if position != file_bytes:
        raise _BadFile(f"{where} has {file_bytes} bytes, its header describes {position}; is it truncated?")
