"""What a checkpoint holds of a tensor, whatever the format of its files."""

from __future__ import annotations

from dataclasses import dataclass
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
