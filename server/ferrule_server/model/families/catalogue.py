"""What people call the models of each family, what these differ from Llama by, and one of them to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["KNOWN", "Known"]


@dataclass(frozen=True, slots=True)
class Known:
    """A family, for people.

    Attributes:
        models: Their names.
        differs: What they need that Llama does not.
        example: One that loads, as the hub names it; empty if none has been published with this architecture.
        settings: What config.json of the newest ones says that decides which kernels run them.
    """

    models: str
    differs: str
    example: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


KNOWN: Final[Mapping[str, Known]] = {
    "LlamaForCausalLM": Known(
        "Llama 2, 3, 3.1, 3.2 (text), 3.3, TinyLlama, SmolLM, SmolLM2, Yi, Falcon 3, DeepSeek-R1-Distill-Llama",
        "",
        "meta-llama/Llama-3.1-8B-Instruct",
    ),
    "MistralForCausalLM": Known(
        "Mistral 7B, Nemo, Small",
        "windows in every layer (7B v0.1)",
        "mistralai/Mistral-7B-Instruct-v0.3",
        {"sliding_window": None},
    ),
    "MinistralForCausalLM": Known("Ministral 8B", "windows in some layers", "mistralai/Ministral-8B-Instruct-2410"),
    "Ministral3ForCausalLM": Known("Ministral 3", "yarn; queries grow with their position"),
    "Qwen2ForCausalLM": Known(
        "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen",
        "biases of queries, keys and values",
        "Qwen/Qwen2.5-7B-Instruct",
    ),
    "Qwen3ForCausalLM": Known(
        "Qwen3, dense, 0.6B to 32B, and their 2507 versions", "a norm of each query and key head", "Qwen/Qwen3-8B"
    ),
    "Gemma2ForCausalLM": Known(
        "Gemma 2",
        "norms of 1 + w before and after, GELU, softcaps, windows in every second layer",
        "google/gemma-2-2b-it",
    ),
    "Gemma3ForCausalLM": Known(
        "Gemma 3, 270M and 1B; 4B, 12B and 27B inside Gemma3ForConditionalGeneration",
        "as Gemma 2 without softcaps, norms of heads, windows in five of six layers, two rotations",
        "google/gemma-3-1b-it",
    ),
    "Phi3ForCausalLM": Known(
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        "fused projections; longrope and partial rotation (mini)",
        "microsoft/Phi-4-mini-instruct",
    ),
    "SmolLM3ForCausalLM": Known("SmolLM3", "no rotation in every fourth layer", "HuggingFaceTB/SmolLM3-3B"),
    "Olmo2ForCausalLM": Known(
        "OLMo 2",
        "norms after attention and feed-forward part alone; norms of all heads of a row",
        "allenai/OLMo-2-1124-7B-Instruct",
    ),
    "Olmo3ForCausalLM": Known("OLMo 3", "as OLMo 2, windows in three of four layers", "allenai/Olmo-3-1025-7B"),
    "GlmForCausalLM": Known(
        "GLM-4 9B",
        "half of each head is rotated, in neighbouring pairs; biases of queries, keys and values",
        "zai-org/glm-4-9b-hf",
    ),
    "Glm4ForCausalLM": Known(
        "GLM-4-0414, dense", "as GLM-4, norms after attention and feed-forward part too", "zai-org/GLM-4-9B-0414"
    ),
    "GraniteForCausalLM": Known(
        "Granite 3, dense",
        "multipliers of embedding, scores, residual stream and logits",
        "ibm-granite/granite-3.3-2b-instruct",
    ),
    "Cohere2ForCausalLM": Known(
        "Command R7B, Command A",
        "LayerNorm, parallel parts, neighbouring pairs, windows with rotation and full layers without, logit scale",
        "CohereLabs/c4ai-command-r7b-12-2024",
    ),
    "Starcoder2ForCausalLM": Known(
        "StarCoder2", "LayerNorm with biases, biases everywhere, no gate, windows", "bigcode/starcoder2-3b"
    ),
    "Gemma4ForCausalLM": Known(
        "Gemma 4, dense text models",
        "norms of values, wider heads in full layers, a second embedding, shared K and V in some models",
    ),
}
"""By architecture."""
