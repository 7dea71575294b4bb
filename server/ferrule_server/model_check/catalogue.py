"""Every family that loads: its models, what it differs from Llama by, and which kernels run it.

Kernels are chosen for a network of the usual sizes. No file of a model is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ferrule_server.executor.cpu.support import unsupported
from ferrule_server.model.config_reader import parse_config
from ferrule_server.model.families import FAMILIES
from ferrule_server.model.families.family import Family
from ferrule_server.model_check.report import gpu_reason

_USUAL: Final = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
}  # fmt: skip
"""Sizes as in many models of 7 to 9 billion parameters."""


@dataclass(frozen=True, slots=True)
class KnownFamily:
    """A family that loads, as ``ferrule models`` shows it.

    Attributes:
        architecture: The entry of ``architectures`` in config.json.
        models: For people; empty if the family is new.
        differs: What it needs that Llama does not.
        example: One of its models that loads, as the hub names it; may be empty.
        processor_kernels: Why the kernels of the processor cannot run a model of the usual sizes; empty if they can.
        gpu_kernels: Why the kernels of a GPU cannot; empty if they can.
    """

    architecture: str
    models: str
    differs: str
    example: str
    processor_kernels: str
    gpu_kernels: str


def known_families() -> list[KnownFamily]:
    """Return every family that loads, in the order of ``FAMILIES``."""
    return [_known(family) for family in FAMILIES]


def _known(family: Family) -> KnownFamily:
    network = parse_config({"architectures": [family.architecture], **_USUAL, **family.usual}, {})
    names = (family.architecture, family.models, family.differs, family.example)
    return KnownFamily(*names, unsupported(network), gpu_reason(network))
