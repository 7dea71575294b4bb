"""The simplest reader of the metadata of GGUF files, for files that are trusted."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final

import numpy as np

_FORMATS: Final = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING: Final = 8
_LIST: Final = 9


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file by key."""
    return _Reader(path.read_bytes()).metadata()


class _Reader:
    """Reads values one after the other; ``place`` is that of the next byte."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.place = 8  # after the magic number and the version

    def metadata(self) -> dict[str, Any]:
        self.number("<Q")
        return {self.text(): self.value(self.number("<I")) for _ in range(self.number("<Q"))}

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self.content, self.place)
        self.place += struct.calcsize(form)
        return int(value)

    def text(self) -> str:
        length = self.number("<Q")
        self.place += length
        return self.content[self.place - length : self.place].decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:  # Any: what the file holds
        if kind == _STRING:
            return self.text()
        if kind == _LIST:
            inner, length = self.number("<I"), self.number("<Q")
            return [self.text() for _ in range(length)] if inner == _STRING else self.numbers(inner, length)
        return self.numbers(kind, 1)[0].item()

    def numbers(self, kind: int, length: int) -> np.ndarray:
        found = np.frombuffer(self.content, _FORMATS[kind], length, self.place)
        self.place += found.nbytes
        return found
