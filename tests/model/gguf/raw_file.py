"""GGUF files written byte by byte, so that everything about them can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

UINT32, INT32, FLOAT32, BOOL, TEXT, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
F32, Q8_0, IQ2_XXS = 0, 8, 16


def text(content: str | bytes) -> bytes:
    """Return a text: its length, then its bytes."""
    raw = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, raw: bytes) -> bytes:
    """Return a key with its value."""
    return text(name) + struct.pack("<I", kind) + raw


def number(name: str, value: int) -> bytes:
    """Return a key with a whole number."""
    return key(name, UINT32, struct.pack("<I", value))


def items(kind: int, raw: Sequence[bytes], count: int | None = None) -> bytes:
    """Return an array of values, and its length as stated."""
    return struct.pack("<IQ", kind, len(raw) if count is None else count) + b"".join(raw)


@dataclass
class RawTensor:
    """A tensor, its sizes as they are written: fastest first."""

    name: str | bytes
    sizes: Sequence[int]
    kind: int = F32
    offset: int | None = None

    def entry(self, offset: int) -> bytes:
        """Return what the header says of it."""
        sizes = struct.pack(f"<I{len(self.sizes)}Q", len(self.sizes), *self.sizes)
        return text(self.name) + sizes + struct.pack("<IQ", self.kind, offset if self.offset is None else self.offset)


@dataclass
class RawFile:
    """A file.

    Attributes:
        keys: By name, so that one can be replaced; each as it is written.
        tensors: Their data are zeros, one after the other.
        missing_bytes: How many bytes the data are too short.
    """

    keys: dict[str, bytes] = field(default_factory=dict)
    tensors: list[RawTensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_keys: int | None = None
    num_tensors: int | None = None
    missing_bytes: int = 0

    def content(self) -> bytes:
        """Return the bytes of the file."""
        counts = (
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.keys) if self.num_keys is None else self.num_keys,
        )
        pieces = [self.magic, struct.pack("<IQQ", self.version, *counts), *self.keys.values()]
        position = 0
        for tensor in self.tensors:
            pieces.append(tensor.entry(position))
            position += -(-4 * min(prod(tensor.sizes), 1 << 16) // 32) * 32
        header = b"".join(pieces)
        return header + bytes(-len(header) % 32) + bytes(max(position - self.missing_bytes, 0))


_SIZES: Final = {
    "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
    "attention.head_count": 2, "attention.head_count_kv": 1,
}  # fmt: skip
_LAYER: Final = {
    "attn_norm": (32,), "attn_q": (32, 32), "attn_k": (32, 16), "attn_v": (32, 16), "attn_output": (32, 32),
    "ffn_norm": (32,), "ffn_gate": (32, 32), "ffn_up": (32, 32), "ffn_down": (32, 32),
}  # fmt: skip


def sound() -> RawFile:
    """Return the smallest file that loads, of zeros."""
    keys = {"general.architecture": key("general.architecture", TEXT, text("llama"))}
    keys |= {f"llama.{name}": number(f"llama.{name}", value) for name, value in _SIZES.items()}
    epsilon = "llama.attention.layer_norm_rms_epsilon"
    keys[epsilon] = key(epsilon, FLOAT32, struct.pack("<f", 1e-5))
    tensors = [RawTensor("token_embd.weight", (32, 24)), RawTensor("output_norm.weight", (32,))]
    tensors += [RawTensor(f"blk.0.{name}.weight", sizes) for name, sizes in _LAYER.items()]
    return RawFile(keys, tensors)
