"""What does not load: what the model has that is not supported, and a model to try in its place.

Architectures are not listed one by one. Rules over the keys of config.json and over the end of the architecture's name
say what a model has, and the names of the models of each family say which family is the nearest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.families import FAMILIES
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.harmless import EXPERTS, MAX_KEY, OFF
from ferrule_server.model_files import shown

SMALL: Final = "Qwen/Qwen3-0.6B"
"""A small model that loads."""

_PARTS: Final = r"(vision|audio|image|video|speech|mm|visual)(_\w+)?"
_LACKING: Final[Mapping[str, str]] = {
    "an encoder with a decoder": "is_encoder_decoder",
    "an output that is not text": r"\w*([Bb]ert[A-Za-z]*Model|For(MaskedLM|(Sequence|Token)Classification))",
    "layers with recurrent state": (
        r"(mamba|ssm|lru|conv\dd|conv|state|linear_(conv|attn|key|value|num))_\w+|rescale_every"
    ),
    "a mixture of experts": EXPERTS,
    "several modalities": _PARTS,
}
"""By what is not supported, what the whole of a key of config.json, or of the architecture's name, matches."""
_QUANTISED: Final = (
    "the original repository, which is not quantised; --weights int8 or int4 quantises it when it is read"
)
_QUANTISES: Final = ("quant_method", "load_in_4bit", "load_in_8bit")
_FORMATS: Final = {
    "adapter_config.json": (
        "it holds a LoRA adapter, which is not supported yet",
        "the model that it was made from, or merge the two (merge_and_unload of peft) and save the result",
    ),
    ".gguf": (
        "it holds GGUF, of which a file is named",
        "the file itself: --model FILE.gguf, after a download if need be",
    ),
    ".bin": ("it holds pickles, which are not read", "a repository of the model with safetensors"),
}


class NotSupported(ModelError):
    """A model that cannot be loaded, although it may be whole.

    Args:
        reason: What it is, as the end of a message.
        instead: What to try in its place: a model of the hub, or an action.
    """

    def __init__(self, reason: str, instead: str) -> None:
        super().__init__(f"{reason}. Try {instead}")
        self.reason, self.instead = reason, instead


def refusal_of(raw: Mapping[str, Any]) -> NotSupported:
    """Return the error of a configuration whose architecture does not load: what the model has, and the nearest family.

    Args:
        raw: Parsed config.json.
    """
    names, settings = raw.get("architectures"), _settings(raw)
    name = str(names[0])[:MAX_KEY] if isinstance(names, list) and len(names) == 1 else ""
    keys = [name, *(key for key, value in settings.items() if value not in OFF and len(key) <= MAX_KEY)]
    found = [
        f"{part} ({key})"
        for part, pattern in _LACKING.items()
        if (key := next((key for key in keys if re.fullmatch(pattern, key)), None)) is not None
    ]
    parts = f": it has {', '.join(found)}" if found else ""
    text = f"config.json: architectures is {shown(names)}, which is not supported{parts}"
    near = _nearest(name.partition("For")[0]) or _nearest(str(raw.get("model_type"))[:MAX_KEY])
    if near is None:
        return NotSupported(f"{text}; docs/models.md lists what loads", SMALL)
    return NotSupported(f"{text}; the nearest that loads is {near.architecture}", near.example or SMALL)


def _settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of config.json, and of the objects in it that are not about another modality."""
    inner = (part for key, part in raw.items() if isinstance(part, dict) and not re.fullmatch(_PARTS, key[:MAX_KEY]))
    return {key: value for part in (*inner, raw) for key, value in part.items()}


def _nearest(name: str) -> Family | None:
    """Return the family whose architecture or models have the longest word of a name; None: none has."""
    words: dict[str, Family] = {}
    for family in FAMILIES:
        stem = family.architecture.partition("For")[0]
        for word in (stem, stem.rstrip("0123456789"), *re.findall("[A-Z][A-Za-z]{4,}", family.models)):
            words.setdefault(word.lower(), family)
    text = name.lower()
    found = sorted((word for word in words if word in text), key=len) or difflib.get_close_matches(text, words, 1, 0.7)
    return words[found[-1]] if found else None


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


def no_model(text: str, names: Iterable[str], *, is_explained: bool = False) -> ModelError:
    """Return the error of a folder or repository without a model; if its files tell what they are, with what to try.

    Args:
        text: What is missing.
        names: The files that are there.
        is_explained: The text says already what they are.
    """
    found = list(names)
    if any(name.endswith(".safetensors") for name in found):
        found = [name for name in found if not name.endswith(".bin")]
    for end, (what, instead) in _FORMATS.items():
        if any(name.endswith(end) for name in found):
            return NotSupported(text if is_explained else f"{text}; {what}", instead)
    return ModelError(text)
