"""Every family that loads: its models, what it differs from Llama by, and the sizes of some of its models.

The sizes are those of published models, from which memory and kernels are computed. No file of these models is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ferrule_server.executor.cpu.support import unsupported
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.config_reader import parse_config
from ferrule_server.model.families import FAMILIES, WRAPPERS
from ferrule_server.model_check.paths import gpu_reason

__all__ = ["KNOWN", "Known", "KnownFamily", "Published", "known_families", "known_wrappers"]

_UNKNOWN: Final = "not known without the sizes of a model"


@dataclass(frozen=True, slots=True)
class Published:
    """The sizes of a published model.

    Attributes:
        name: As the hub names it; empty if the sizes are those of no published model.
        billions: Its parameters as published, rounded; 0 without a name.
        sizes: What config.json says besides the architecture.
    """

    name: str
    billions: float
    sizes: Mapping[str, Any]

    def network(self, architecture: str) -> ModelConfig:
        """Return its network."""
        return parse_config({"architectures": [architecture], **self.sizes}, {})


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a family.

    Attributes:
        models: For people.
        differs: What it needs that Llama does not.
        published: Sizes of some of its models; kernels are chosen for the first.
    """

    models: str
    differs: str
    published: tuple[Published, ...]


@dataclass(frozen=True, slots=True)
class KnownFamily:
    """A family that loads, as ``ferrule models`` shows it.

    Attributes:
        architecture: The entry of ``architectures`` in config.json.
        models: For people; empty if the family is new.
        differs: What it needs that Llama does not.
        example: The model for which the kernels were chosen; empty if none is published.
        processor_kernels: Why the kernels of the processor cannot run that model; empty if they can.
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
    return [_family(family.architecture) for family in FAMILIES]


def known_wrappers() -> list[str]:
    """Return the architectures of several modalities whose text model loads."""
    return [wrapper.architecture for wrapper in WRAPPERS]


def _family(architecture: str) -> KnownFamily:
    known = KNOWN.get(architecture)
    if known is None:
        return KnownFamily(architecture, "", "", "", _UNKNOWN, _UNKNOWN)
    network = known.published[0].network(architecture)
    reasons = unsupported(network), gpu_reason(network)
    return KnownFamily(architecture, known.models, known.differs, known.published[0].name, *reasons)


_SIZES: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
"""The keys in config.json of the sizes of :func:`_published`, in its order."""


def _known(models: str, differs: str, *published: Published) -> Known:
    return Known(models, differs, published)


def _published(
    name: str, billions: float, sizes: tuple[int, ...], *, is_tied: bool = False, **others: Any
) -> Published:
    """Return a published model.

    Args:
        name: As the hub names it.
        billions: Of parameters.
        sizes: Vocabulary, residual stream and inside of the feed-forward part; layers, query heads, KV heads; tokens of
            the longest sequence.
        is_tied: The head is the embedding.
        **others: Further settings.
    """
    named = dict(zip(_SIZES, sizes, strict=True))
    return Published(name, billions, {**named, "tie_word_embeddings": is_tied, **others})


_GRANITE: Final = {
    "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip
KNOWN: Final[Mapping[str, Known]] = {
    "LlamaForCausalLM": _known(
        "Llama 2, 3, 3.1, 3.2 (text), 3.3, TinyLlama, SmolLM, SmolLM2, Yi, Falcon 3, DeepSeek-R1-Distill-Llama",
        "",
        _published("meta-llama/Llama-3.1-8B", 8.03, (128256, 4096, 14336, 32, 32, 8, 131072)),
        _published("meta-llama/Llama-3.2-1B", 1.24, (128256, 2048, 8192, 16, 32, 8, 131072), is_tied=True),
    ),
    "MistralForCausalLM": _known(
        "Mistral 7B, Nemo, Small",
        "windows in every layer (7B v0.1)",
        _published("mistralai/Mistral-7B-v0.3", 7.25, (32768, 4096, 14336, 32, 32, 8, 32768), sliding_window=None),
        _published("mistralai/Mistral-7B-v0.1", 7.24, (32000, 4096, 14336, 32, 32, 8, 32768), sliding_window=4096),
    ),
    "MinistralForCausalLM": _known(
        "Ministral 8B",
        "windows in some layers",
        _published(
            "mistralai/Ministral-8B-Instruct-2410",
            8.02,
            (131072, 4096, 12288, 36, 32, 8, 131072),
            head_dim=128,
            sliding_window=32768,
            layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 9,
        ),
    ),
    "Ministral3ForCausalLM": _known(
        "Ministral 3",
        "yarn; queries grow with their position",
        _published("", 0.0, (131072, 4096, 14336, 34, 32, 8, 262144)),
    ),
    "Qwen2ForCausalLM": _known(
        "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen",
        "biases of queries, keys and values",
        _published("Qwen/Qwen2.5-7B", 7.62, (152064, 3584, 18944, 28, 28, 4, 131072)),
    ),
    "Qwen3ForCausalLM": _known(
        "Qwen3, dense, 0.6B to 32B, and their 2507 versions",
        "a norm of each query and key head",
        _published("Qwen/Qwen3-0.6B", 0.596, (151936, 1024, 3072, 28, 16, 8, 40960), is_tied=True),
        _published("Qwen/Qwen3-8B", 8.19, (151936, 4096, 12288, 36, 32, 8, 40960)),
    ),
    "Gemma2ForCausalLM": _known(
        "Gemma 2",
        "norms of 1 + w before and after, GELU, softcaps, windows in every second layer",
        _published("google/gemma-2-2b", 2.61, (256000, 2304, 9216, 26, 8, 4, 8192), is_tied=True, head_dim=256),
    ),
    "Gemma3ForCausalLM": _known(
        "Gemma 3, 270M and 1B; 4B, 12B and 27B inside Gemma3ForConditionalGeneration",
        "as Gemma 2 without softcaps, norms of heads, windows in five of six layers, two rotations",
        _published(
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
    ),
    "Phi3ForCausalLM": _known(
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        "fused projections; longrope and partial rotation (mini)",
        _published("microsoft/phi-4", 14.7, (100352, 5120, 17920, 40, 40, 10, 16384)),
    ),
    "SmolLM3ForCausalLM": _known(
        "SmolLM3",
        "no rotation in every fourth layer",
        _published("HuggingFaceTB/SmolLM3-3B", 3.08, (128256, 2048, 11008, 36, 16, 4, 65536), is_tied=True),
    ),
    "Olmo2ForCausalLM": _known(
        "OLMo 2",
        "norms after attention and feed-forward part alone; norms of all heads of a row",
        _published("allenai/OLMo-2-1124-7B", 7.3, (100352, 4096, 11008, 32, 32, 32, 4096)),
    ),
    "Olmo3ForCausalLM": _known(
        "OLMo 3",
        "as OLMo 2, windows in three of four layers",
        _published("allenai/Olmo-3-1025-7B", 7.3, (100278, 4096, 11008, 32, 32, 32, 65536)),
    ),
    "GlmForCausalLM": _known(
        "GLM-4 9B",
        "half of each head is rotated, in neighbouring pairs; biases of queries, keys and values",
        _published("zai-org/glm-4-9b-hf", 9.4, (151552, 4096, 13696, 40, 32, 2, 131072)),
    ),
    "Glm4ForCausalLM": _known(
        "GLM-4-0414, dense",
        "as GLM-4, norms after attention and feed-forward part too",
        _published("zai-org/GLM-4-9B-0414", 9.4, (151552, 4096, 13696, 40, 32, 2, 32768), attention_bias=True),
    ),
    "GraniteForCausalLM": _known(
        "Granite 3, dense",
        "multipliers of embedding, scores, residual stream and logits",
        _published(
            "ibm-granite/granite-3.3-2b-instruct",
            2.53,
            (49159, 2048, 8192, 40, 32, 8, 131072),
            is_tied=True,
            **_GRANITE,
        ),
    ),
    "Cohere2ForCausalLM": _known(
        "Command R7B, Command A",
        "LayerNorm, parallel parts, neighbouring pairs, windows with rotation and full layers without, logit scale",
        _published("CohereLabs/c4ai-command-r7b-12-2024", 8.03, (256000, 4096, 14336, 32, 32, 8, 132096), is_tied=True),
    ),
    "Starcoder2ForCausalLM": _known(
        "StarCoder2",
        "LayerNorm with biases, biases everywhere, no gate, windows",
        _published(
            "bigcode/starcoder2-3b", 3.03, (49152, 3072, 12288, 30, 24, 2, 16384), is_tied=True, sliding_window=4096
        ),
    ),
    "Gemma4ForCausalLM": _known(
        "Gemma 4, dense text models",
        "norms of values, wider heads in full layers, a second embedding, shared K and V in some models",
        _published("", 0.0, (262144, 2304, 9216, 30, 8, 4, 131072), is_tied=True),
    ),
}
"""By architecture. The sizes of Ministral 3 and Gemma 4 are the defaults of their classes in transformers, and no
published model was compared with them."""
