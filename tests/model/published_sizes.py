"""The sizes of published models, from which their memory is computed, with their number of parameters as a check.

No file of these models is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.config_reader import parse_config

__all__ = ["MODELS", "Published"]

_SIZES: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
"""The keys in config.json of the sizes of :func:`_published`, in its order."""


@dataclass(frozen=True, slots=True)
class Published:
    """The sizes of a published model.

    Attributes:
        architecture: The entry of ``architectures`` in config.json.
        name: As the hub names it.
        billions: Its parameters as published, rounded.
        settings: What config.json says besides the architecture.
    """

    architecture: str
    name: str
    billions: float
    settings: Mapping[str, Any]

    @property
    def network(self) -> ModelConfig:
        """Its network."""
        return parse_config({"architectures": [self.architecture], **self.settings}, {})


def _published(
    architecture: str, name: str, billions: float, sizes: tuple[int, ...], *, is_tied: bool = False, **others: Any
) -> Published:
    """Return a published model.

    Args:
        architecture: The entry of ``architectures`` in config.json.
        name: As the hub names it.
        billions: Of parameters.
        sizes: Vocabulary, residual stream and inside of the feed-forward part; layers, query heads, KV heads; tokens of
            the longest sequence.
        is_tied: The head is the embedding.
        **others: Further settings.
    """
    named = dict(zip(_SIZES, sizes, strict=True))
    return Published(architecture, name, billions, {**named, "tie_word_embeddings": is_tied, **others})


_GRANITE: Final = {
    "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip
MODELS: Final = (
    _published("LlamaForCausalLM", "meta-llama/Llama-3.1-8B", 8.03, (128256, 4096, 14336, 32, 32, 8, 131072)),
    _published(
        "LlamaForCausalLM", "meta-llama/Llama-3.2-1B", 1.24, (128256, 2048, 8192, 16, 32, 8, 131072), is_tied=True
    ),
    _published(
        "MistralForCausalLM",
        "mistralai/Mistral-7B-v0.3",
        7.25,
        (32768, 4096, 14336, 32, 32, 8, 32768),
        sliding_window=None,
    ),
    _published(
        "MistralForCausalLM",
        "mistralai/Mistral-7B-v0.1",
        7.24,
        (32000, 4096, 14336, 32, 32, 8, 32768),
        sliding_window=4096,
    ),
    _published(
        "MinistralForCausalLM",
        "mistralai/Ministral-8B-Instruct-2410",
        8.02,
        (131072, 4096, 12288, 36, 32, 8, 131072),
        head_dim=128,
        sliding_window=32768,
        layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 9,
    ),
    _published("Qwen2ForCausalLM", "Qwen/Qwen2.5-7B", 7.62, (152064, 3584, 18944, 28, 28, 4, 131072)),
    _published("Qwen3ForCausalLM", "Qwen/Qwen3-0.6B", 0.596, (151936, 1024, 3072, 28, 16, 8, 40960), is_tied=True),
    _published("Qwen3ForCausalLM", "Qwen/Qwen3-8B", 8.19, (151936, 4096, 12288, 36, 32, 8, 40960)),
    _published(
        "Gemma2ForCausalLM", "google/gemma-2-2b", 2.61, (256000, 2304, 9216, 26, 8, 4, 8192), is_tied=True, head_dim=256
    ),
    _published(
        "Gemma3ForCausalLM",
        "google/gemma-3-1b-pt",
        1.0,
        (262144, 1152, 6912, 26, 4, 1, 32768),
        is_tied=True,
        head_dim=256,
        sliding_window=512,
        sliding_window_pattern=6,
        rope_theta=1e6,
        rope_local_base_freq=10000,
    ),
    _published("Phi3ForCausalLM", "microsoft/phi-4", 14.7, (100352, 5120, 17920, 40, 40, 10, 16384)),
    _published(
        "SmolLM3ForCausalLM", "HuggingFaceTB/SmolLM3-3B", 3.08, (128256, 2048, 11008, 36, 16, 4, 65536), is_tied=True
    ),
    _published("Olmo2ForCausalLM", "allenai/OLMo-2-1124-7B", 7.3, (100352, 4096, 11008, 32, 32, 32, 4096)),
    _published("Olmo3ForCausalLM", "allenai/Olmo-3-1025-7B", 7.3, (100278, 4096, 11008, 32, 32, 32, 65536)),
    _published("GlmForCausalLM", "zai-org/glm-4-9b-hf", 9.4, (151552, 4096, 13696, 40, 32, 2, 131072)),
    _published(
        "Glm4ForCausalLM", "zai-org/GLM-4-9B-0414", 9.4, (151552, 4096, 13696, 40, 32, 2, 32768), attention_bias=True
    ),
    _published(
        "GraniteForCausalLM",
        "ibm-granite/granite-3.3-2b-instruct",
        2.53,
        (49159, 2048, 8192, 40, 32, 8, 131072),
        is_tied=True,
        **_GRANITE,
    ),
    _published(
        "Cohere2ForCausalLM",
        "CohereLabs/c4ai-command-r7b-12-2024",
        8.03,
        (256000, 4096, 14336, 32, 32, 8, 132096),
        is_tied=True,
    ),
    _published(
        "Starcoder2ForCausalLM",
        "bigcode/starcoder2-3b",
        3.03,
        (49152, 3072, 12288, 30, 24, 2, 16384),
        is_tied=True,
        sliding_window=4096,
    ),
)
"""Those of the table of memory in docs/models.md, in its order."""
