"""Random blocks of GGUF types, and a GGUF file of them in the shape of a known model: for speed, not for sense."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.make_random_model import SHAPES, config_of, tensor_sizes
from benchmarks.peers.llama_cpp_peer import gguf_name, gguf_writer
from ferrule_server.model.gguf.blocks import BLOCKS, Bytes, dequantise

__all__ = ["random_blocks", "random_matrix", "write_random_gguf"]

_HALVES: Final = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "MXFP4": (),
}  # fmt: skip
"""Where the float16 numbers of a block begin, if not at its beginning."""
_SCALE: Final = 0.02


def random_blocks(name: str, num_rows: int, num_values: int, seed: int = 7, scale: float = _SCALE) -> Bytes:
    """Return rows of blocks, uint8 [rows, row_bytes]: any bits, but float16 numbers from N(0, ``scale``)."""
    generator, block = np.random.default_rng(seed), BLOCKS[name]
    num_blocks = num_rows * num_values // block.num_values
    blocks = generator.integers(0, 256, (num_blocks, block.num_bytes), np.uint8)
    for begin in _HALVES.get(name, (0,)):
        halves = generator.normal(0, scale, (num_blocks, 1)).astype(np.float16)
        blocks[:, begin : begin + 2] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def random_matrix(name: str, num_rows: int, num_values: int, seed: int = 7, size: float = 0.02) -> Bytes:
    """Return rows of blocks whose numbers have about a standard deviation of ``size``."""
    if name == "MXFP4":  # its scales are powers of two
        blocks = random_blocks(name, num_rows, num_values, seed).reshape(-1, BLOCKS[name].num_bytes)
        blocks[:, 0] = 124 + round(np.log2(size)) + blocks[:, 0] % 3
        return blocks.reshape(num_rows, -1)
    sample = dequantise(name, random_blocks(name, 64, 1024))
    return random_blocks(name, num_rows, num_values, seed, _SCALE * size / float(sample.std()))


def write_random_gguf(path: Path, shape: str, name: str) -> None:
    """Write a Qwen3 whose matrices are random blocks of a type; norms are 1, and there is no vocabulary.

    Routers of experts are float32, and the matrices of experts are those of the first layer in every layer.
    """
    made: dict[str, Bytes] = {}
    gguf: Any = import_module("gguf")  # a package that not every environment has, without types
    with gguf_writer(path, config_of(SHAPES[shape])) as writer:
        for seed, (tensor, size) in enumerate(tensor_sizes(SHAPES[shape]).items()):
            if len(size) == 1:
                writer.add_tensor(gguf_name(tensor), np.ones(size, np.float32))
                continue
            if tensor.endswith(".mlp.gate.weight"):
                writer.add_tensor(
                    gguf_name(tensor), np.random.default_rng(seed).normal(0, 0.02, size).astype(np.float32)
                )
                continue
            kind = tensor.rpartition(".mlp.experts.")[2] if len(size) == 3 else tensor
            if kind not in made:
                made[kind] = random_matrix(name, math.prod(size[:-1]), size[-1], seed).reshape(*size[:-1], -1)
            values = made[kind] if len(size) == 3 else made.pop(kind)
            writer.add_tensor(gguf_name(tensor), values, raw_dtype=gguf.GGMLQuantizationType[name])
