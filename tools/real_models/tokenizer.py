"""Write the byte-level tokenizer of a GGUF file as ``tokenizer.json`` and ``tokenizer_config.json``.

A GGUF file only names its rule for splitting a text before the merges (``tokenizer.ggml.pre``). The converter of
transformers 5.23 does not know the rule ``smollm`` and silently takes that of GPT-2, which keeps the digits of a number
together. Here an unknown rule is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Fields = Callable[[str], Any]  # Any: a number, a text or a list, by the name of the field
"""Returns the value of a field of the file; None if it has no such field."""

_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(fields: Fields, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        fields: Of the GGUF file.
        folder: An existing folder.

    Raises:
        ValueError: The file has a tokenizer of another kind, or a rule for splitting that is not known here.
    """
    tokens: list[str] = fields("tokenizer.ggml.tokens")
    _byte_level(fields, tokens).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[fields("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[fields("tokenizer.ggml.eos_token_id")],
        "chat_template": fields("tokenizer.chat_template"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), "utf-8")


def _byte_level(fields: Fields, tokens: list[str]) -> Tokenizer:
    kind, rule = fields("tokenizer.ggml.model"), fields("tokenizer.ggml.pre")
    if kind != "gpt2" or rule not in _SPLITTING or fields("tokenizer.ggml.add_bos_token"):
        raise ValueError(f"a tokenizer of kind {kind} with the rule {rule} is not known; known rules: {[*_SPLITTING]}")
    merges = [tuple(merge.split(" ")) for merge in fields("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _SPLITTING[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, fields("tokenizer.ggml.token_type"), strict=True))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED])
    return tokenizer


def _each_digit_alone() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


_SPLITTING: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {"smollm": _each_digit_alone}
"""How a text is split before the merges, by the name of the rule."""
