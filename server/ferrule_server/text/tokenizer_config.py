"""Read the special tokens and the chat templates of a model folder, which are not in ``tokenizer.json``."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model_files import (
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_CONFIG_BYTES,
    FileMissing,
)
from ferrule_server.model_folder import read_object, read_text

DEFAULT_TEMPLATE: Final = "default"
_NAMED: Final = ("bos_token", "eos_token", "pad_token")
_EXTRA_FOLDER: Final = "additional_chat_templates"
_MAX_TEMPLATES: Final = 64


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The parts of ``tokenizer_config.json`` and the files beside it that are used here.

    Attributes:
        special_tokens: Text by name, such as ``eos_token``; names without a token are left out.
        chat_templates: Source by name; ``default`` is the usual one. Empty: the model has none.
        named_tokens: The begin, end, padding and stop tokens of all files of the model, by id or text.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    named_tokens: frozenset[int | str] = frozenset()

    @classmethod
    def load(cls, folder: Path) -> TokenizerConfig:
        """Read the files of a model folder as ``transformers`` does: template files replace the configured ones.

        Raises:
            ModelError: A file exists but cannot be read.
        """
        config = _read_json(folder, "tokenizer_config.json")
        legacy = {} if "added_tokens_decoder" in config else _read_json(folder, "special_tokens_map.json")
        templates = _template_files(folder) or _configured_templates(config.get("chat_template"))
        if len(templates) > _MAX_TEMPLATES:
            raise ModelError(
                f"the model brings {len(templates)} chat templates; at most {_MAX_TEMPLATES} are supported"
            )
        special_tokens = _special_tokens({**config, **legacy})
        named = {special_tokens[key] for key in _NAMED if key in special_tokens}
        ids = (_named_ids(_read_json(folder, name)) for name in ("config.json", "generation_config.json"))
        return cls(special_tokens, templates, frozenset(named.union(*ids)))


def _named_ids(config: Mapping[str, Any]) -> set[int]:
    """Return the ids of begin, end, padding and stop tokens in a configuration, also in that of its text model."""
    parts = (part for part in (config, config.get("text_config")) if isinstance(part, dict))
    values = [part.get(f"{key}_id") for part in parts for key in _NAMED]
    return {i for value in values for i in (value if isinstance(value, list) else [value]) if type(i) is int}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of all keys ``*_token`` and of extra tokens; each is a string or an AddedToken."""
    extra = config.get("extra_special_tokens")
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    return {key: text for key, value in named.items() if (text := _text_of(value)) is not None}


def _text_of(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _configured_templates(value: object) -> dict[str, str]:
    """Return the templates of a ``chat_template`` entry: one text, or a list of named ones.

    Raises:
        ModelError: It is neither.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    try:
        named = {str(one["name"]): one["template"] for one in value}  # type: ignore[attr-defined]  # checked by failing
    except (TypeError, KeyError):
        named = {"": None}
    if not all(isinstance(source, str) for source in named.values()):
        raise ModelError("tokenizer_config.json: chat_template is neither a text nor a list of named texts")
    return named


def _template_files(folder: Path) -> dict[str, str]:
    files = {DEFAULT_TEMPLATE: "chat_template.jinja"}
    files |= {path.stem: f"{_EXTRA_FOLDER}/{path.name}" for path in _extra_files(folder / _EXTRA_FOLDER)}
    sources = {}
    for name, file in files.items():
        with contextlib.suppress(FileMissing):
            sources[name] = read_text(folder, file, MAX_TEMPLATE_BYTES)
    return sources


def _extra_files(folder: Path) -> list[Path]:
    """Return the templates in a folder that need not exist, at most one more than the limit."""
    try:
        return sorted(itertools.islice(folder.glob("*.jinja"), _MAX_TEMPLATES + 1))
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is no file."""
    try:
        return read_object(folder, name, MAX_TOKENIZER_CONFIG_BYTES)
    except FileMissing:
        return {}
