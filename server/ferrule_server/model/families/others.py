"""Architectures that are known and do not load: what each is, and a model to try in its place.

Mixtures of experts, layers with recurrent state, quantised checkpoints and LoRA adapters are refused here by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model_files import shown

__all__ = ["SMALL", "NotSupported", "Other", "check_not_quantised", "files_advice", "other_of"]

SMALL: Final = "Qwen/Qwen3-0.6B"
"""A small model that loads."""

_MOE: Final = "a mixture of experts, which is not supported yet"
_HYBRID: Final = "a hybrid of attention and layers with recurrent state, which is not supported yet"
_RECURRENT: Final = "a recurrent network without a KV cache, which is not supported"
_MODALITIES: Final = "a model of several modalities whose text model is not supported yet"
_ENCODER: Final = "an encoder, which does not generate text"
_BOTH: Final = "an encoder with a decoder; only models with a decoder alone are supported"
_DENSE: Final = "a dense decoder of a family that is not supported yet"


class NotSupported(ModelError):
    """A model that is known and cannot be loaded.

    Args:
        reason: What it is, as the end of a message.
        instead: What to try in its place: a model of the hub, or an action.
    """

    def __init__(self, reason: str, instead: str) -> None:
        super().__init__(f"{reason}. Try {instead}")
        self.reason, self.instead = reason, instead


@dataclass(frozen=True, slots=True)
class Other:
    """An architecture that does not load.

    Attributes:
        kind: What it is.
        instead: The nearest model that loads, as the hub names it.
    """

    kind: str
    instead: str = SMALL


_KINDS: Final[Mapping[str, str]] = {
    "Qwen3(Next|_5)|MoeHybrid|MiniMax|Jamba|[BZ]amba|FalconH1|Lfm2|NemotronH|RecurrentGemma": _HYBRID,
    "Mamba|Rwkv": _RECURRENT,
    "[Mm]o[eE]|Mixtral|DeepseekV|GptOss|Llama4|Dbrx": _MOE,
    "VLFor|Multimodal|Llava|Mllama|PaliGemma|Gemma3nForCond|Glm4v": _MODALITIES,
    "(Bert|Roberta)Model$": _ENCODER,
    "^(T5|Bart|Marian|Whisper)": _BOTH,
    "^(Gemma(3n)?|Phi|Olmo|Cohere|Falcon|GPT(BigCode|J|NeoX)|OPT|Bloom|Mpt|StableLm|Nemotron)ForCausalLM$": _DENSE,
    "^GPT2LMHeadModel$": _DENSE,
}
"""By a part of the entry of ``architectures`` in config.json; the first counts."""
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_ENDINGS: Final[Mapping[str, str]] = {
    "ForMaskedLM$": _ENCODER,
    "For(Sequence|Token)Classification$": "a classifier, which does not generate text",
    "ForConditionalGeneration$": "a model of several modalities, or an encoder with a decoder, that is not supported",
}
_NEAREST: Final[Mapping[str, str]] = {
    "Qwen2": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen3|GptOss|MiniMax": "Qwen/Qwen3-8B",
    "Mixtral": "mistralai/Mistral-7B-Instruct-v0.3",
    "Deepseek": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "Olmo": "allenai/OLMo-2-1124-7B-Instruct",
    "Granite": "ibm-granite/granite-3.3-2b-instruct",
    "Phi": "microsoft/Phi-4-mini-instruct",
    "Glm4": "zai-org/GLM-4-9B-0414",
    "Falcon": "tiiuae/Falcon3-7B-Instruct",
    "PaliGemma|Gemma3n": "google/gemma-3-4b-it",
    "(Recurrent)?Gemma": "google/gemma-2-2b-it",
    "Cohere": "CohereLabs/c4ai-command-r7b-12-2024",
    "GPTBigCode": "bigcode/starcoder2-3b",
    "Llama4|Llava|Mllama|Dbrx|Jamba|[BZ]amba|Lfm2|Nemotron": "meta-llama/Llama-3.1-8B-Instruct",
}
"""By how the entry begins; :data:`SMALL` for all others."""
_QUANTISED: Final = (
    "the original repository, which is not quantised; --weights int8 or int4 quantises it when it is read"
)
_FORMATS: Final = {
    "adapter_config.json": (
        "it holds a LoRA adapter, which is not supported yet",
        "the model that it was made from, or merge the two (merge_and_unload of peft) and save the result",
    ),
    ".gguf": ("it holds GGUF, which is not read", _QUANTISED),
    ".bin": ("it holds pickles, which are not read", "a repository of the model with safetensors"),
}


def other_of(names: object, raw: Mapping[str, Any]) -> Other | None:
    """Return what is known of an architecture that does not load.

    Args:
        names: ``architectures`` of config.json.
        raw: Parsed config.json.
    """
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return None
    (name,) = names
    kind = _first(re.search, _KINDS, name)
    if kind is None and any(isinstance(raw.get(key), int) and raw[key] > 1 for key in _EXPERTS):
        kind = _MOE
    kind = kind or _first(re.search, _ENDINGS, name)
    return None if kind is None else Other(kind, _first(re.match, _NEAREST, name) or SMALL)


def _first(finds: Callable[[str, str], object], table: Mapping[str, str], name: str) -> str | None:
    return next((value for pattern, value in table.items() if finds(pattern, name)), None)


def check_not_quantised(raw: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that is quantised already.

    Raises:
        NotSupported: ``quantization_config`` is there; the message has its method.
    """
    found = raw.get("quantization_config")
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else None
        kind = f" by {shown(method)}" if method is not None else ""
        text = f"config.json: quantization_config is {shown(found)}: the checkpoint is quantised{kind}"
        raise NotSupported(f"{text}, which is not supported yet", _QUANTISED)


def files_advice(names: Iterable[str]) -> tuple[str, str] | None:
    """Return what the files are of a folder or repository without a model, and what to try; None if nothing is known.

    Args:
        names: Its files.
    """
    found = list(names)
    if any(name.endswith(".safetensors") for name in found):
        found = [name for name in found if not name.endswith(".bin")]
    return next((advice for end, advice in _FORMATS.items() if any(name.endswith(end) for name in found)), None)
