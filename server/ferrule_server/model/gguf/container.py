"""Read what a GGUF file holds, with all its parts: the metadata, and where each tensor lies."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final

from ferrule_server.errors import ModelError
from ferrule_server.model.gguf.header import MAX_HEADER_BYTES, BadFile, Header, Metadata
from ferrule_server.model.stored import LAYOUTS, StoredTensor
from ferrule_server.model_files import FileMissing, name_of, open_file, read_up_to, shown

_MAX_PARTS: Final = 1024
_PART: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Gguf:
    """What a file and its other parts hold.

    Attributes:
        metadata: By key.
        tensors: By name.
        parts: The files, in order.
    """

    metadata: Metadata
    tensors: dict[str, StoredTensor]
    parts: tuple[Path, ...]


def read_gguf(path: Path) -> Gguf:
    """Return what a GGUF file holds, with its other parts if it is the first of several.

    Args:
        path: The file, which may be a link to anywhere; the other parts must be beside it.

    Raises:
        ModelError: A file is missing, cannot be read, or does not follow the format.
    """
    real = Path(os.path.realpath(path))
    metadata, found, spare_bytes = _read_part(real, path.name, MAX_HEADER_BYTES)
    parts = [real]
    for number, other in enumerate(_others(path, metadata), 1):
        stated, tensors, spare_bytes = _read_part(other, other.name, spare_bytes)
        if stated.get("split.no") != number:
            raise ModelError(f"file {name_of(other.name)} says that its split.no is {shown(stated.get('split.no'))}")
        if twice := sorted(tensors.keys() & found.keys()):
            raise ModelError(f"file {name_of(other.name)} has tensor {name_of(twice[0])}, which is in another part too")
        found |= tensors
        parts.append(other)
    if len(found) != (count := metadata.get("split.tensors.count", len(found))):
        raise ModelError(f"file {name_of(path.name)} and its parts have {len(found)} tensors, not {shown(count)}")
    return Gguf(metadata, found, tuple(parts))


def begins_with_header(path: Path, num_bytes: int) -> bool:
    """Return whether the first bytes of a file, of which there may be no more, have its whole header."""
    with open_file(path.parent, path.name) as file, suppress(BadFile):
        (header := Header(file, MAX_HEADER_BYTES)).parse(path)
        return header.num_bytes <= num_bytes
    return False


def part_names(name: str) -> list[str]:
    """Return the names, or paths, of all parts of the file that one of them is; only its own if it is whole."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= (count := int(match[3])) <= _MAX_PARTS:
        return [name]
    return [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, count + 1)]


def read_floats(tensor: StoredTensor, most: int) -> list[float]:
    """Return the values of a small vector.

    Raises:
        ModelError: It is not a vector of at most ``most`` values of the type F32, or it cannot be read.
    """
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > most:
        what = f"{tensor.dtype} {list(tensor.shape)}"
        where = f"file {name_of(tensor.path.name)}: tensor {name_of(tensor.name)}"
        raise ModelError(f"{where} is {what}; a vector of at most {most} F32 is expected")
    try:
        with open_file(tensor.path.parent, tensor.path.name) as file:
            file.seek(tensor.offset)
            return [value for (value,) in struct.iter_unpack("<f", read_up_to(file, tensor.num_bytes))]
    except (OSError, struct.error) as error:
        raise ModelError(f"file {name_of(tensor.path.name)} cannot be read: {error}") from error


def _others(path: Path, metadata: Metadata) -> Iterator[Path]:
    """Yield the other parts of a file, of which there may be none.

    Raises:
        ModelError: The file is not the first part, or its name is not that of one.
    """
    number, count = metadata.get("split.no", 0), metadata.get("split.count", 0)
    if count in (0, 1):
        return
    name, names = name_of(path.name), part_names(path.name)
    if type(count) is not int or len(names) != count:
        what = f"is one of {shown(count)} parts, at most {_MAX_PARTS} are read"
        raise ModelError(f"file {name} {what}; it must be named NAME-00001-of-NNNNN.gguf")
    if number != 0 or names[0] != path.name:
        raise ModelError(f"file {name} is not the first part; name {name_of(names[0])}")
    yield from map(path.with_name, names[1:])


def _read_part(path: Path, shown_as: str, spare_bytes: int) -> tuple[Metadata, dict[str, StoredTensor], int]:
    """Return what one file holds, and how many bytes the headers of other parts may have."""
    name = name_of(shown_as)
    try:
        with open_file(path.parent, path.name) as file:
            header = Header(file, spare_bytes)
            metadata, stated = header.parse(path)
            tensors = {tensor.name: tensor for tensor in _placed(header, metadata, stated)}
    except BadFile as problem:
        raise ModelError(f"file {name} {problem}") from None
    except FileMissing:
        raise ModelError(f"file {name} is missing") from None
    except (OSError, MemoryError) as error:
        raise ModelError(f"file {name} cannot be read: {error}") from error
    return metadata, tensors, spare_bytes - header.num_bytes


def _placed(header: Header, metadata: Metadata, stated: list[StoredTensor]) -> Iterator[StoredTensor]:
    """Yield tensors in the order of their data, which must be aligned, in the file, and apart from each other."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise BadFile(f"has the alignment {shown(alignment)}, which is not a power of two")
    start = position = -(-header.num_bytes // alignment) * alignment
    ordered, names = sorted(stated, key=lambda tensor: tensor.offset), set[str]()
    ends = [start + tensor.offset for tensor in ordered[1:]] + [header.file_bytes]
    for tensor, end in zip(ordered, ends, strict=False):  # without tensors, there is an end too many
        name, begin = name_of(tensor.name), start + tensor.offset
        if tensor.name in names:
            raise BadFile(f"has tensor {name} twice")
        if tensor.offset % alignment or begin < position:
            raise BadFile(f"has tensor {name} at byte {begin}, which is not aligned or overlaps another tensor")
        num_values, block_bytes = LAYOUTS.get(tensor.dtype, (1, 0))
        if num_values > 1 and (tensor.shape or (1,))[-1] % num_values:
            what = f"{tensor.dtype} {list(tensor.shape)}, whose rows are not blocks of {num_values} values"
            raise BadFile(f"has tensor {name} of {what}")
        # The length of a type that is not read is not known; a model with it is refused by name.
        num_bytes = prod(tensor.shape) // num_values * block_bytes if block_bytes else end - begin
        position = begin + num_bytes
        if num_bytes < 0 or position > header.file_bytes:
            raise BadFile(f"has {header.file_bytes} bytes and no room for tensor {name}; is it truncated?")
        names.add(tensor.name)
        yield replace(tensor, offset=begin, num_bytes=num_bytes)
