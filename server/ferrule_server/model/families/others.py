"""Architectures that are known and do not load: what each is, and a model to try in its place.

Mixtures of experts, layers with recurrent state, quantised checkpoints and LoRA adapters are refused here by name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.families.harmless import OFF, has_experts
from ferrule_server.model_files import shown

__all__ = ["SMALL", "NotSupported", "Other", "check_not_quantised", "files_advice", "refusal_of"]

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
    "^ChatGLM": _DENSE,
    "^(Gemma(3n)?|Phi|Olmo|Cohere|Falcon|GPT(BigCode|J|NeoX)|OPT|Bloom|Mpt|StableLm|Nemotron)ForCausalLM$": _DENSE,
    "^GPT2LMHeadModel$": _DENSE,
}
"""By a part of the entry of ``architectures`` in config.json; the first counts."""
_ENDINGS: Final[Mapping[str, str]] = {
    "ForMaskedLM$": _ENCODER,
    "For(Sequence|Token)Classification$": "a classifier, which does not generate text",
}
_NEAREST: Final[Mapping[str, str]] = {
    "Qwen2": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen3|GptOss|MiniMax": "Qwen/Qwen3-8B",
    "Mixtral": "mistralai/Mistral-7B-Instruct-v0.3",
    "Deepseek": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "Olmo": "allenai/OLMo-2-1124-7B-Instruct",
    "Granite": "ibm-granite/granite-3.3-2b-instruct",
    "Phi": "microsoft/Phi-4-mini-instruct",
    "ChatGLM": "zai-org/glm-4-9b-hf",
    "Glm4": "zai-org/GLM-4-9B-0414",
    "Falcon": "tiiuae/Falcon3-7B-Instruct",
    "PaliGemma|Gemma3n": "google/gemma-3-4b-it",
    "(Recurrent)?Gemma": "google/gemma-2-2b-it",
    "Cohere": "CohereLabs/c4ai-command-r7b-12-2024",
    "GPTBigCode": "bigcode/starcoder2-3b",
    "Llama4|Llava|Mllama|Dbrx|Jamba|[BZ]amba|Lfm2|Nemotron": "meta-llama/Llama-3.1-8B-Instruct",
}
"""By how the entry begins; :data:`SMALL` for all others."""
_PARTS: Final = re.compile(r"(vision|audio|image|video|speech|mm|visual)(_\w+)?")
"""Settings of other modalities in config.json."""
_QUANTISED: Final = (
    "the original repository, which is not quantised; --weights int8 or int4 quantises it when it is read"
)
_QUANTISES: Final = ("quant_method", "load_in_4bit", "load_in_8bit")
_FORMATS: Final = {
    "adapter_config.json": (
        "it holds a LoRA adapter, which is not supported yet",
        "the model that it was made from, or merge the two (merge_and_unload of peft) and save the result",
    ),
    ".gguf": ("it holds GGUF, which is not read", _QUANTISED),
    ".bin": ("it holds pickles, which are not read", "a repository of the model with safetensors"),
}


def refusal_of(raw: Mapping[str, Any], known: Mapping[str, str]) -> ModelError:
    """Return the error of a configuration whose architecture does not load: what it is, or the most similar one.

    Args:
        raw: Parsed config.json.
        known: ``model_type`` of each architecture that loads.
    """
    names = raw.get("architectures")
    text = f"config.json: architectures is {shown(names)}"
    if (other := _other_of(names, raw)) is not None:
        return NotSupported(f"{text}, {other.kind}", other.instead)
    near = _nearest(names, raw.get("model_type"), known)
    guess = f"the nearest that loads is {near}" if near else "none that loads is similar"
    return ModelError(f"{text}, which is not supported; {guess}. docs/models.md lists all; {SMALL} is a small one")


def _other_of(names: object, raw: Mapping[str, Any]) -> Other | None:
    """Return what is known of an architecture that does not load; None: nothing."""
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return None
    (name,) = names
    kind, has = _first(re.search, _KINDS, name), has_experts(raw)
    if kind == _MOE and has is False:
        kind = _DENSE
    if kind is None and has:
        kind = _MOE
    kind = kind or _first(re.search, _ENDINGS, name) or _of_conditional(name, raw)
    return None if kind is None else Other(kind, _first(re.match, _NEAREST, name) or SMALL)


def _of_conditional(name: str, raw: Mapping[str, Any]) -> str | None:
    """Return what a model is whose name says only that it generates text given something."""
    if not name.endswith("ForConditionalGeneration"):
        return None
    if any(_PARTS.fullmatch(key) for key in raw):
        return _MODALITIES
    return _BOTH if raw.get("is_encoder_decoder") is True else None


def _nearest(names: object, model_type: object, known: Mapping[str, str]) -> str:
    """Return the architecture that loads with this ``model_type``, else with the most similar name; empty: none."""
    if exact := [f"{name} (model_type {kind!r})" for name, kind in known.items() if kind and kind == model_type]:
        return exact[0]
    stems = {name.partition("For")[0].lower(): name for name in known}
    for word in [*(names[:1] if isinstance(names, list) else []), model_type]:
        stem = re.sub("(For|LMHead|Model|PreTrained).*", "", str(word)[:100]).lower()
        if near := difflib.get_close_matches(stem, stems, 1):
            return stems[near[0]]
    return ""


def _first(finds: Callable[[str, str], object], table: Mapping[str, str], name: str) -> str | None:
    return next((value for pattern, value in table.items() if finds(pattern, name)), None)


def check_not_quantised(raw: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that is quantised already.

    Settings of bitsandbytes that load nothing in 4 or 8 bits are left over from training.

    Raises:
        NotSupported: ``quantization_config``, or ``quantization`` as MLX names it, is there.
    """
    for key in ("quantization_config", "quantization"):
        found = raw.get(key)
        method, *bits = map(found.get, _QUANTISES) if isinstance(found, dict) else [None]
        if found in OFF or (bits == [False, False] and method in (None, "bitsandbytes")):
            continue
        kind = f" by {shown(method)}" if method is not None else ""
        text = f"config.json: {key} is {shown(found)}: the checkpoint is quantised{kind}"
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
