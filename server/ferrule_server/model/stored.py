"""What a checkpoint holds of a tensor, whatever the format of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ferrule_server.model.gguf.blocks import BLOCKS

LAYOUTS: Final[dict[str, tuple[int, int]]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    **{name: (block.num_values, block.num_bytes) for name, block in BLOCKS.items()},
}  # fmt: skip
"""The types in which weights may be stored: how many values a block has, and how many bytes they take."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, and the place of its bytes.

    Attributes:
        name: Its name in the checkpoint.
        dtype: Its type as safetensors or ggml names it, such as ``BF16`` or ``Q4_K``; ``LAYOUTS`` has those that load.
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


_STACK: Final = re.compile(r"(.*\.experts)\.(gate_up|gate|up|down)_proj(\.weight|[._]bias|)")
_MOST_PIECES: Final = 1 << 18


def without_stacks(tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """Yield tensors, of which one that holds a matrix or a bias of every expert is as many, named as if stored apart.

    ``experts.gate_up_proj`` has the rows of gate, then those of up, of each expert.
    """
    left = _MOST_PIECES
    for tensor in tensors:
        match = _STACK.fullmatch(tensor.name)
        is_bias = match is not None and match[3].endswith("bias")
        parts = match[2].split("_") if match is not None else []
        num_pieces = tensor.shape[0] * len(parts) if len(tensor.shape) == 3 - is_bias else 0
        if match is None or not 0 < num_pieces <= left or tensor.shape[1] % len(parts):
            yield tensor  # its name or shape is refused, if that is not what it should be
            continue
        left -= num_pieces
        shape, num_bytes = (tensor.shape[1] // len(parts), *tensor.shape[2:]), tensor.num_bytes // num_pieces
        for number in range(num_pieces):
            expert, part = divmod(number, len(parts))
            name = f"{match[1]}.{expert}.{parts[part]}_proj.{'bias' if is_bias else 'weight'}"
            place = tensor.offset + number * num_bytes
            yield replace(tensor, name=name, shape=shape, offset=place, num_bytes=num_bytes)
