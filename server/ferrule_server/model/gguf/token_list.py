"""The tokens of a GGUF file: their texts and types, which of them are control tokens, and which the file names.

What tokens mean by their texts are facts of ``src/llama-vocab.cpp`` in llama.cpp (as in llama-cpp-python 0.3.36, MIT
licence).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ferrule_server.errors import ModelError
from ferrule_server.model_files import listed, shown

PREFIX: Final = "tokenizer.ggml."
"""What the keys of a tokenizer begin with."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_MAX_TOKENS: Final = 1 << 20

STOPS: Final = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<EOT>",
    "<|endoftext|>", "<|eom_id|>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
    "<turn|>", "<|tool_response>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<fim-pad>",
    "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
    "<|file_sep|>",
))  # fmt: skip
"""Tokens that end a turn, or a file in a model of code, whatever type a file gives them."""
_FILL_IN: Final = frozenset((
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>",
    "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>",
))  # fmt: skip
_SIGN: Final = re.compile(r"<[|\uff5c][^<>\w]*\w[^<>]*[|\uff5c]>")
"""A control token by its form, with two equal bars; some converters give such tokens the type of words."""


@dataclass(frozen=True, slots=True)
class TokenList:
    """The tokens of a file; invariant: all are different texts in UTF-8, and each has a type.

    Attributes:
        metadata: Of the file, by key.
        tokens: Text by id.
        types: Type by id, one of the constants above; 0 counts as normal.
        ids: Id by text.
    """

    metadata: Mapping[str, Any]
    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> TokenList:
        """Return the tokens of a file; an empty one gets a name that is not a word.

        Raises:
            ModelError: A list is absent, not of the usual size, or holds something else.
        """
        given = texts_in(metadata, "tokens", _MAX_TOKENS)
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(given)]
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = [token for token, count in Counter(tokens).items() if count > 1]
            raise ModelError(f"{len(twice)} tokens are in the vocabulary more than once: {listed(twice[:3])}")
        types = numbers_in(metadata, "token_type", len(tokens))
        if types is None:
            types = np.full(len(tokens), NORMAL)
        if not np.isin(types, range(BYTE + 1)).all():
            raise ModelError(f"{PREFIX}token_type has values that are not types of tokens (0 to {BYTE})")
        return cls(metadata, tokens, types.astype(int).tolist(), ids)

    def named(self, key: str) -> int | None:
        """Return the id of the token that the metadata names, such as ``bos``; None: there is none in the vocabulary.

        Raises:
            ModelError: It is not a number.
        """
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if self.metadata[f"{PREFIX}model"] == "llama" else {}
        name = f"{PREFIX}{key}_token_id"
        value = self.metadata.get(name, defaults.get(key))
        if value is None:
            return None
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise ModelError(f"{name} is {shown(value)}, which is not the id of a token")
        return int(value) if 0 <= value < len(self.tokens) else None

    def flag(self, key: str, default: bool) -> bool:
        """Return a setting of the metadata.

        Raises:
            ModelError: It is neither true nor false.
        """
        value = self.metadata.get(PREFIX + key, default)
        if not isinstance(value, bool | np.bool_):
            raise ModelError(f"{PREFIX}{key} is {shown(value)}, which is neither true nor false")
        return bool(value)

    def special_ids(self) -> set[int]:
        """Return the control tokens, which are such by their type or by their text."""
        named = {self.ids[token] for token in STOPS | _FILL_IN if token in self.ids}
        typed = {i for i, kind in enumerate(self.types) if kind in (UNKNOWN, CONTROL)}
        signs = (i for i, token in enumerate(self.tokens) if _SIGN.fullmatch(token) and token[1] == token[-2])
        return named | typed | {i for i in signs if self.types[i] == NORMAL}


def texts_in(metadata: Mapping[str, Any], key: str, limit: int) -> list[str]:
    """Return a list of texts.

    Raises:
        ModelError: It is absent, has more than ``limit`` entries, or holds something else.
    """
    value = metadata.get(PREFIX + key)
    if not isinstance(value, list | np.ndarray) or not 0 < len(value) <= limit:
        raise ModelError(f"{PREFIX}{key} is not a list of 1 to {limit} texts")
    texts = list(value)
    try:
        "".join(texts).encode()
    except (TypeError, UnicodeEncodeError) as error:
        strange = next(i for i, text in enumerate(texts) if not isinstance(text, str) or not _is_utf8(text))
        found = f"entry {strange} is {shown(texts[strange])}"
        raise ModelError(f"{PREFIX}{key} has an entry that is not UTF-8: {found}") from error
    return texts


def numbers_in(metadata: Mapping[str, Any], key: str, length: int) -> np.ndarray | None:
    """Return a list of finite numbers, one for each token, as float64 [length]; None: the file has none.

    Raises:
        ModelError: It has another length, or holds something else.
    """
    value = metadata.get(PREFIX + key)
    if value is None:
        return None
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        numbers = np.array(np.nan)
    if not np.isfinite(numbers).all():
        raise ModelError(f"{PREFIX}{key} has entries that are not numbers")
    if numbers.shape != (length,):
        raise ModelError(f"{PREFIX}{key} has the shape {numbers.shape}, but there are {length} tokens")
    return numbers


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
