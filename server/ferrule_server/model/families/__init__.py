"""Model families: one file for each, which states what the family reads from config.json and what it refuses.

values.py      config.json, each value read with a check
experts.py     reads the sizes of a mixture
family.py      the frame: a family's names, its defaults, and the allow-list of its settings
harmless.py    which other settings change no logits, by rule
rotary.py      reads the settings of rotary positions
windows.py     which layers attend to a window
others.py      architectures that do not load: what they have, and what to try instead
cohere2.py     Command R7B and Command A
gemma.py       Gemma 2 and Gemma 3
gemma4.py      Gemma 4
glm.py         GLM-4
granite.py     Granite 3
llama.py       Llama 2 and 3, and models of the same architecture
mistral.py     Mistral, Ministral and Ministral 3
olmo.py        OLMo 2 and OLMo 3
phi3.py        Phi-3, Phi-3.5 and Phi-4
qwen.py        Qwen2, Qwen2.5 and Qwen3, dense and with experts
smollm3.py     SmolLM3
starcoder2.py  StarCoder2

To add a family, write its file, add it to :data:`FAMILIES`, and add a case to ``tests/model/conftest.py``, which
compares the decoder with transformers; README.md goes through it. If the family computes something new, add a
field to ``ModelConfig``: ``tensors.py`` says where its tensors go, and ``decoder.py`` runs them. Kernels refuse fields
that they do not know.
"""

from __future__ import annotations

from typing import Final

from ferrule_server.model.config import CheckpointNames
from ferrule_server.model.families.cohere2 import COHERE2
from ferrule_server.model.families.family import Wrapper
from ferrule_server.model.families.gemma import GEMMA2, GEMMA3
from ferrule_server.model.families.gemma4 import GEMMA4
from ferrule_server.model.families.glm import GLM, GLM4
from ferrule_server.model.families.granite import GRANITE
from ferrule_server.model.families.llama import LLAMA
from ferrule_server.model.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from ferrule_server.model.families.olmo import OLMO2, OLMO3
from ferrule_server.model.families.phi3 import PHI3
from ferrule_server.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from ferrule_server.model.families.smollm3 import SMOLLM3
from ferrule_server.model.families.starcoder2 import STARCODER2

FAMILIES: Final = (
    LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, GEMMA2, GEMMA3, GEMMA4, PHI3, SMOLLM3,
    OLMO2, OLMO3, GLM, GLM4, GRANITE, COHERE2, STARCODER2,
)  # fmt: skip
"""Every family that can be loaded."""

_INNER: Final = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_OTHERS: Final = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")
_VISION: Final = ("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector.")

WRAPPERS: Final = (
    Wrapper("Gemma3ForConditionalGeneration", ("gemma3_text",), CheckpointNames({}, _INNER, _VISION)),
    Wrapper("Gemma4ForConditionalGeneration", ("gemma4_text",), CheckpointNames({}, _INNER, _OTHERS)),
    Wrapper("Mistral3ForConditionalGeneration", ("mistral", "ministral3"), CheckpointNames({}, _INNER, _VISION)),
)
"""Every model of several modalities whose text model can be loaded."""
