"""Architectures that are known and do not load: what each is, and a model to try in its place.

Mixtures of experts, layers with recurrent state, quantised checkpoints and LoRA adapters are refused here by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model_files import shown

__all__ = ["OTHERS", "SMALL", "NotSupported", "Other", "check_not_quantised", "files_advice", "other_of"]

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


_QWEN3: Final = "Qwen/Qwen3-8B"
_LLAMA: Final = "meta-llama/Llama-3.1-8B-Instruct"
_MISTRAL: Final = "mistralai/Mistral-7B-Instruct-v0.3"
_R1: Final = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
_GRANITE: Final = "ibm-granite/granite-3.3-2b-instruct"
_PHI4: Final = "microsoft/Phi-4-mini-instruct"
_GLM: Final = "zai-org/GLM-4-9B-0414"
_OLMO: Final = "allenai/OLMo-2-1124-7B-Instruct"
_FALCON: Final = "tiiuae/Falcon3-7B-Instruct"

OTHERS: Final[Mapping[str, Other]] = {
    "Qwen2MoeForCausalLM": Other(_MOE, "Qwen/Qwen2.5-7B-Instruct"),
    "Qwen3MoeForCausalLM": Other(_MOE, _QWEN3),
    "Qwen3NextForCausalLM": Other(_HYBRID, _QWEN3),
    "Qwen3_5ForCausalLM": Other(_HYBRID, _QWEN3),
    "Qwen3_5MoeForCausalLM": Other(_HYBRID, _QWEN3),
    "Qwen3_5ForConditionalGeneration": Other(_HYBRID, _QWEN3),
    "Qwen3_5MoeForConditionalGeneration": Other(_HYBRID, _QWEN3),
    "MixtralForCausalLM": Other(_MOE, _MISTRAL),
    "DeepseekV2ForCausalLM": Other(_MOE, _R1),
    "DeepseekV3ForCausalLM": Other(_MOE, _R1),
    "GptOssForCausalLM": Other(_MOE, _QWEN3),
    "Llama4ForCausalLM": Other(_MOE, _LLAMA),
    "Llama4ForConditionalGeneration": Other(_MOE, _LLAMA),
    "OlmoeForCausalLM": Other(_MOE, _OLMO),
    "GraniteMoeForCausalLM": Other(_MOE, _GRANITE),
    "GraniteMoeSharedForCausalLM": Other(_MOE, _GRANITE),
    "GraniteMoeHybridForCausalLM": Other(_HYBRID, _GRANITE),
    "PhimoeForCausalLM": Other(_MOE, _PHI4),
    "Glm4MoeForCausalLM": Other(_MOE, _GLM),
    "DbrxForCausalLM": Other(_MOE, _LLAMA),
    "MiniMaxForCausalLM": Other(_HYBRID, _QWEN3),
    "JambaForCausalLM": Other(_HYBRID, _LLAMA),
    "ZambaForCausalLM": Other(_HYBRID, _LLAMA),
    "Zamba2ForCausalLM": Other(_HYBRID, _LLAMA),
    "BambaForCausalLM": Other(_HYBRID, _LLAMA),
    "FalconH1ForCausalLM": Other(_HYBRID, _FALCON),
    "Lfm2ForCausalLM": Other(_HYBRID, _LLAMA),
    "Lfm2MoeForCausalLM": Other(_HYBRID, _LLAMA),
    "NemotronHForCausalLM": Other(_HYBRID, _LLAMA),
    "RecurrentGemmaForCausalLM": Other(_HYBRID, "google/gemma-2-2b-it"),
    "MambaForCausalLM": Other(_RECURRENT),
    "Mamba2ForCausalLM": Other(_RECURRENT),
    "FalconMambaForCausalLM": Other(_RECURRENT, _FALCON),
    "RwkvForCausalLM": Other(_RECURRENT),
    "Qwen2VLForConditionalGeneration": Other(_MODALITIES, "Qwen/Qwen2.5-7B-Instruct"),
    "Qwen2_5_VLForConditionalGeneration": Other(_MODALITIES, "Qwen/Qwen2.5-7B-Instruct"),
    "Qwen3VLForConditionalGeneration": Other(_MODALITIES, _QWEN3),
    "Qwen3VLMoeForConditionalGeneration": Other(_MOE, _QWEN3),
    "LlavaForConditionalGeneration": Other(_MODALITIES, _LLAMA),
    "MllamaForConditionalGeneration": Other(_MODALITIES, _LLAMA),
    "PaliGemmaForConditionalGeneration": Other(_MODALITIES, "google/gemma-3-4b-it"),
    "Gemma3nForConditionalGeneration": Other(_MODALITIES, "google/gemma-3-4b-it"),
    "Gemma3nForCausalLM": Other(_DENSE, "google/gemma-3-4b-it"),
    "Phi4MultimodalForCausalLM": Other(_MODALITIES, _PHI4),
    "Glm4vForConditionalGeneration": Other(_MODALITIES, _GLM),
    "BertModel": Other(_ENCODER),
    "BertForMaskedLM": Other(_ENCODER),
    "RobertaForMaskedLM": Other(_ENCODER),
    "XLMRobertaModel": Other(_ENCODER),
    "ModernBertForMaskedLM": Other(_ENCODER),
    "T5ForConditionalGeneration": Other(_BOTH),
    "BartForConditionalGeneration": Other(_BOTH),
    "MarianMTModel": Other(_BOTH),
    "WhisperForConditionalGeneration": Other(_BOTH),
    "GemmaForCausalLM": Other(_DENSE, "google/gemma-2-2b-it"),
    "PhiForCausalLM": Other(_DENSE, _PHI4),
    "OlmoForCausalLM": Other(_DENSE, _OLMO),
    "CohereForCausalLM": Other(_DENSE, "CohereLabs/c4ai-command-r7b-12-2024"),
    "FalconForCausalLM": Other(_DENSE, _FALCON),
    "GPTBigCodeForCausalLM": Other(_DENSE, "bigcode/starcoder2-3b"),
    "GPT2LMHeadModel": Other(_DENSE),
    "GPTJForCausalLM": Other(_DENSE),
    "GPTNeoXForCausalLM": Other(_DENSE),
    "OPTForCausalLM": Other(_DENSE),
    "BloomForCausalLM": Other(_DENSE),
    "MptForCausalLM": Other(_DENSE),
    "StableLmForCausalLM": Other(_DENSE),
    "NemotronForCausalLM": Other(_DENSE, _LLAMA),
}
"""By the entry of ``architectures`` in config.json."""

_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_ENDINGS: Final = {
    "ForMaskedLM": _ENCODER,
    "ForSequenceClassification": "a classifier, which does not generate text",
    "ForTokenClassification": "a classifier, which does not generate text",
    "ForConditionalGeneration": "a model of several modalities, or an encoder with a decoder, that is not supported",
}
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
    if name in OTHERS:
        return OTHERS[name]
    if any(isinstance(raw.get(key), int) and raw[key] > 1 for key in _EXPERTS):
        return Other(_MOE)
    return next((Other(kind) for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)


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
