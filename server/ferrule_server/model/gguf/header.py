"""Parse the header of one GGUF file: the metadata, and what is stated of each tensor.

The format (ggml, docs/gguf.md): the magic, a version, the numbers of tensors and of keys; the keys with their values; a
name, sizes, a type and an offset for each tensor. A header is read and not mapped, because another process that cuts a
mapped file off ends this one.
"""

from __future__ import annotations

import os
import struct
from io import FileIO
from pathlib import Path
from typing import Any, Final

import numpy as np

from ferrule_server.model.stored import StoredTensor
from ferrule_server.model_files import name_of, read_up_to

Metadata = dict[str, Any]
"""The value of each key: a number, a text, a flag, or a list of one of these."""

MAX_HEADER_BYTES: Final = 64 << 20
"""Largest header, those of all parts together; 262 144 tokens with merges and scores take about 20 MiB."""

_TYPES: Final = (
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32",
    "I64", "F64", "IQ1_M", "BF16", "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8",
    "IQ4_NL_8_8", "MXFP4", "NVFP4", "Q1_0", "Q2_0",
)  # fmt: skip
"""The types of tensors by their number in ggml, whether their values are read or not."""
_FORMS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMBERS: Final = {kind: struct.Struct(f"<{form}") for kind, form in _FORMS.items()}
"""The types of values that are one number."""
_UINT32, _FLOAT32, _TEXT, _ARRAY, _UINT64 = 4, 6, 8, 9, 10
_VERSIONS: Final = (2, 3)
_MAX_ITEMS: Final = 1 << 22
_MAX_KEYS: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 17
_MAX_SIZES: Final = 4
_FIRST_BYTES: Final = 1 << 20


class BadFile(Exception):
    """A file does not follow the format; the message says how, as the end of a sentence about the file."""


class Header:
    """The header of a file, which is read as far as it is needed.

    Args:
        file: At its beginning.
        max_bytes: The most that the header may have.

    Attributes:
        file_bytes: Size of the file.
        num_bytes: Size of the header, once it has been parsed.
    """

    def __init__(self, file: FileIO, max_bytes: int) -> None:
        self._file, self._max_bytes = file, max_bytes
        self._data, self._num_items = b"", 0
        self.file_bytes = os.fstat(file.fileno()).st_size
        self.num_bytes = 0

    def parse(self, path: Path) -> tuple[Metadata, list[StoredTensor]]:
        """Return all metadata, and all tensors of the file without their lengths; their offsets are those in the data.

        Raises:
            BadFile: The file does not follow the format, or it is beyond a limit.
            OSError: It cannot be read.
        """
        if self.file_bytes < 4 or self._bytes(4) != b"GGUF":
            raise BadFile("is not a GGUF file" if self.file_bytes else "is empty")
        if (version := self._number(_UINT32)) not in _VERSIONS:
            raise BadFile(f"has the GGUF version {version}; versions 2 and 3 are read, little-endian")
        num_tensors, num_keys = self._count(_MAX_TENSORS, "tensors"), self._count(_MAX_KEYS, "keys")
        metadata: Metadata = {}
        for _ in range(num_keys):
            if (key := self._text()) in metadata:
                raise BadFile(f"has the key {name_of(key)} twice")
            metadata[key] = self._value(self._number(_UINT32))
        return metadata, [self._tensor(path) for _ in range(num_tensors)]

    def _tensor(self, path: Path) -> StoredTensor:
        name, num_sizes = self._text(), self._number(_UINT32)
        if num_sizes > _MAX_SIZES:
            raise BadFile(f"has {num_sizes} dimensions in tensor {name_of(name)}, at most {_MAX_SIZES} are read")
        shape = tuple(self._number(_UINT64) for _ in range(num_sizes))[::-1]
        number, offset = self._number(_UINT32), self._number(_UINT64)
        dtype = _TYPES[number] if number < len(_TYPES) else f"number {number}"
        return StoredTensor(name, dtype, shape, path, offset, 0)

    def _value(self, kind: int) -> Any:  # one of those of Metadata
        return self._items() if kind == _ARRAY else self._text() if kind == _TEXT else self._number(kind)

    def _items(self) -> list[Any]:
        kind, count = self._number(_UINT32), self._number(_UINT64)
        self._num_items += count
        if self._num_items > _MAX_ITEMS:
            raise BadFile(f"has {self._num_items} items in arrays, at most {_MAX_ITEMS} are read")
        if kind == _TEXT:
            return self._texts(count)
        if kind not in _FORMS:
            raise BadFile(f"has an array of values of type {kind}; arrays of numbers and of texts are read")
        begin = self._take(count * _NUMBERS[kind].size)
        return list(struct.unpack_from(f"<{count}{_FORMS[kind]}", self._data, begin))

    def _number(self, kind: int) -> Any:  # int, float or bool, as the kind says
        if kind not in _NUMBERS:
            raise BadFile(f"has a value of type {kind}, which GGUF lacks")
        begin = self._take(_NUMBERS[kind].size)
        (value,) = _NUMBERS[kind].unpack_from(self._data, begin)
        # The shortest decimal number that float32 rounds to this one is what the authors of the model wrote.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _text(self) -> str:
        return _decoded(self._bytes(self._number(_UINT64)))

    def _texts(self, count: int) -> list[str]:
        """Return texts, of which a vocabulary has hundreds of thousands: most are taken without a call for each."""
        texts, length_at = list[str](), _NUMBERS[_UINT64].unpack_from
        while len(texts) < count:
            texts.append(self._text())  # which reads on in the file if need be
            data, begin = self._data, self.num_bytes + 8
            while (
                len(texts) < count
                and begin <= len(data)
                and (end := begin + length_at(data, begin - 8)[0]) <= len(data)
            ):
                texts.append(_decoded(data[begin:end]))
                begin = end + 8
            self.num_bytes = begin - 8
        return texts

    def _count(self, most: int, what: str) -> int:
        count: int = self._number(_UINT64)
        if count > most:
            raise BadFile(f"has {count} {what}, at most {most} are read")
        return count

    def _bytes(self, count: int) -> bytes:
        begin = self._take(count)
        return self._data[begin : self.num_bytes]

    def _take(self, count: int) -> int:
        """Return where the next bytes begin, all of which are in memory then."""
        begin = self.num_bytes
        self.num_bytes += count
        if self.num_bytes > len(self._data):
            self._fetch()
        return begin

    def _fetch(self) -> None:
        if self.num_bytes > self.file_bytes:
            raise BadFile("ends inside its header; is it truncated?")
        if self.num_bytes > self._max_bytes:
            raise BadFile(f"has a header of more than {self._max_bytes} bytes, which is beyond the limit")
        wanted = max(self.num_bytes, 2 * len(self._data), _FIRST_BYTES)
        self._data += read_up_to(self._file, wanted - len(self._data))
        if self.num_bytes > len(self._data):
            raise BadFile("became shorter while it was read")


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise BadFile(f"has a text that is not UTF-8 ({error.reason})") from error
