"""Model families: one file for each, which states what the family reads from config.json and what it refuses.

values.py    config.json, each value read with a check
family.py    the frame: a family's names, its defaults, and the allow-list of its settings
llama.py     Llama 2 and 3, and models of the same architecture
mistral.py   Mistral without windows
qwen2.py     Qwen2 and Qwen2.5, dense
qwen3.py     Qwen3, dense
windows.py   refuses layers that attend to a window only

To add a family, write its file, add it to :data:`FAMILIES`, and add a case to ``tests/model/conftest.py``, which
compares the decoder with transformers. ``tests/model/test_families.py`` compares the defaults with transformers. If the
family computes something new, add a field to ``ModelConfig``: ``_layer_parts`` of ``weights.py`` maps the tensors and
``decoder.py`` runs them. If the kernels for GPUs do not compute it, ``executor/cuda/kernel_choice.py`` must refuse it.
"""

from __future__ import annotations

from typing import Final

from ferrule_server.model.families.llama import LLAMA
from ferrule_server.model.families.mistral import MISTRAL
from ferrule_server.model.families.qwen2 import QWEN2
from ferrule_server.model.families.qwen3 import QWEN3

__all__ = ["FAMILIES"]

FAMILIES: Final = (LLAMA, MISTRAL, QWEN2, QWEN3)
"""Every family that can be loaded."""
