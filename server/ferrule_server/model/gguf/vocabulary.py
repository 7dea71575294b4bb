"""The tokenizer of a GGUF file, as ``tokenizer.json`` and ``tokenizer_config.json`` of a model folder would state it.

The kinds ``gpt2`` (byte-level pairs), ``llama`` (SentencePiece pairs) and ``gemma4`` are supported. The meaning of the
metadata is that of ``src/llama-vocab.cpp`` in llama.cpp (as in llama-cpp-python 0.3.36, MIT licence).

The file of a SentencePiece tokenizer has no merges but a score for each token: of all neighbours that together are a
token, the pair with the best score is merged first. So each way to put a token together is a merge here, in the order
of the scores. Among pairs of equal scores llama.cpp takes the leftmost, which no list of merges can express. Scores are
equal for runs of spaces (Llama 2), where it is the same as taking the longest token first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ferrule_server.errors import ModelError
from ferrule_server.model.gguf.pre_tokenizers import RULES, Rule
from ferrule_server.model.gguf.token_list import (
    BYTE,
    CONTROL,
    PREFIX,
    STOPS,
    UNKNOWN,
    USER_DEFINED,
    TokenList,
    numbers_in,
    texts_in,
)
from ferrule_server.model_files import MAX_TEMPLATE_BYTES, name_of, shown

_TEMPLATE: Final = "tokenizer.chat_template"
_SPACE: Final = "\u2581"
_MAX_MERGES: Final = 2 << 20
_MAX_MERGED: Final = 512
"""Longest token, in characters, that is put together from its parts; the time grows with the square of the length."""
_MAX_CHARACTERS: Final = 4 << 20


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what ``tokenizer.json`` would hold; None if the file has no tokenizer.

    Args:
        metadata: Of the file, by key. Only keys that begin with ``tokenizer.`` and ``general.name`` are read.

    Raises:
        ModelError: The tokenizer is of a kind, or splits a text by a rule, that is not supported, or its parts do not
            fit together.
    """
    kind = _kind(metadata)
    if kind is None:
        return None
    tokens = TokenList.read(metadata)
    parts = _scored_pairs(tokens) if kind == "llama" else _ranked_pairs(tokens, _rule(metadata, kind))
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added_tokens(tokens), **parts}


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``tokenizer_config.json`` would hold: the texts of special tokens, and the chat templates.

    Raises:
        ModelError: The tokenizer is of another kind, an id is not that of a token, or a template is not a text of
            usual size.
    """
    config: dict[str, Any] = {}
    if _kind(metadata) is not None:
        tokens = TokenList.read(metadata)
        named = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        ids = {f"{name}_token": tokens.named(key) for name, key in named.items()}
        config |= {name: tokens.tokens[i] for name, i in ids.items() if i is not None}
    templates = dict(_templates(metadata))
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    return config


def stop_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a turn, by key or by name; the end token of the file comes first.

    The end token of a file may be that of a text and not that of a turn. In gpt-oss and Solar Open, ``<|end|>`` ends a
    message and not a turn. ``</s>`` is a tag of HTML in Gemma, so that it ends a turn only if it is a control token.

    Raises:
        ModelError: The tokenizer is of another kind, or an id is not that of a token.
    """
    if _kind(metadata) is None:
        return []
    tokens = TokenList.read(metadata)
    by_key = [tokens.named(key) for key in ("eos", "eot", "eom")]
    control = {name for name in ("</s>",) if name in tokens.ids and tokens.types[tokens.ids[name]] == CONTROL}
    found = {name: tokens.ids[name] for name in STOPS | control if name in tokens.ids}
    has_calls = not found.keys().isdisjoint({"<|call|>", "<|calls|>"})
    ends_message = has_calls and not found.keys().isdisjoint({"<|return|>", "<|flush|>"})
    ids = dict.fromkeys([*(i for i in by_key if i is not None), *sorted(found.values())])
    return [i for i in ids if not (ends_message and tokens.tokens[i] == "<|end|>")]


def _kind(metadata: Mapping[str, Any]) -> str | None:
    """Return the kind of the tokenizer; None: the file has none.

    Raises:
        ModelError: It is not supported.
    """
    kind = metadata.get(f"{PREFIX}model", "none")
    if not isinstance(kind, str) or kind not in ("none", "no_vocab", "gpt2", "gemma4", "llama"):
        raise ModelError(f"the tokenizer is of the kind {shown(kind)}; supported kinds: gemma4, gpt2, llama")
    return None if kind in ("none", "no_vocab") else kind


def _templates(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and the sources of chat templates, the usual one first.

    Raises:
        ModelError: One is not a text, or is too large.
    """
    for key in sorted(key for key in metadata if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")):
        source = metadata[key]
        if not isinstance(source, str) or len(source.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
            raise ModelError(f"{name_of(key)} is not a text of at most {MAX_TEMPLATE_BYTES} bytes")
        yield key.removeprefix(_TEMPLATE).removeprefix(".") or "default", source


def _rule(metadata: Mapping[str, Any], kind: str) -> Rule:
    """Return how a text is split before the merges.

    Raises:
        ModelError: The file does not name a known rule.
    """
    name = "gemma4" if kind == "gemma4" else metadata.get(f"{PREFIX}pre")
    if name is None:
        raise ModelError(
            f"the file does not say how its tokenizer splits a text ({PREFIX}pre), as files of before May 2024 do not;"
            " convert the model again"
        )
    if not isinstance(name, str) or name not in RULES:
        raise ModelError(f"the tokenizer splits a text by the rule {shown(name)} ({PREFIX}pre), which is not known")
    return RULES[name]


def _ranked_pairs(tokens: TokenList, rule: Rule) -> dict[str, Any]:
    """Return the parts of a tokenizer whose file lists the merges.

    Raises:
        ModelError: A merge does not make a token of two tokens.
    """
    merges = [_pair(tokens, merge) for merge in dict.fromkeys(texts_in(tokens.metadata, "merges", _MAX_MERGES))]
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in rule.splits
    ]
    alphabet = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spelling = [alphabet] if rule.is_byte_level else []
    parts = {"decoder": alphabet} if rule.is_byte_level else _spaces_as_signs(has_prefix=False)
    return {
        **parts,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits + spelling},
        "post_processor": _post_processor(tokens, rule.adds_begin),
        "model": _model(tokens, merges, not rule.is_byte_level) | {"ignore_merges": rule.ignores_merges},
    }


def _pair(tokens: TokenList, merge: str) -> tuple[str, str]:
    """Return the two tokens of a merge, which one space separates."""
    middle, ids = merge.find(" ", 1), tokens.ids
    left, right = merge[:middle], merge[middle + 1 :]
    if middle < 0 or left not in ids or right not in ids or left + right not in ids:
        raise ModelError(f"{PREFIX}merges has the entry {shown(merge)}, which does not make a token of two tokens")
    return left, right


def _scored_pairs(tokens: TokenList) -> dict[str, Any]:
    """Return the parts of a tokenizer whose file has scores instead of merges.

    Raises:
        ModelError: The scores are absent or do not fit, or there are too many merges.
    """
    scores = numbers_in(tokens.metadata, "scores", len(tokens.tokens))
    if scores is None:
        raise ModelError(f"the tokenizer has no scores ({PREFIX}scores), which say what is merged first")
    merges = list(itertools.islice(_merges_by_score(tokens, scores), _MAX_MERGES + 1))
    if len(merges) > _MAX_MERGES:
        raise ModelError(f"the tokenizer has more than {_MAX_MERGES} merges, the limit")
    return {
        **_spaces_as_signs(tokens.flag("add_space_prefix", default=True)),
        "post_processor": _post_processor(tokens, adds_begin=True),
        "model": _model(tokens, merges, has_bytes=True),
    }


def _merges_by_score(tokens: TokenList, scores: np.ndarray) -> Iterator[tuple[str, str]]:
    """Yield all ways to put a token together from two: by falling score, then the longest tokens first.

    Raises:
        ModelError: The tokens are so long that this would take too much time.
    """
    texts, ids = tokens.tokens, tokens.ids
    lengths = np.array([len(text) for text in texts])
    merged = ~np.isin(tokens.types, (UNKNOWN, CONTROL, BYTE))
    longest, together = int(lengths[merged].max(initial=0)), int(lengths[merged].sum())
    if longest > _MAX_MERGED or together > _MAX_CHARACTERS:
        limits = f"the limits are {_MAX_MERGED} and {_MAX_CHARACTERS}"
        raise ModelError(f"the tokens have up to {longest} characters, {together} together; {limits}")
    order = np.lexsort((-lengths, -scores))
    for text in (texts[i] for i in order[merged[order]]):
        for middle in range(len(text) - 1, 0, -1):
            right = text[middle:]
            if right in ids and (left := text[:middle]) in ids:
                yield left, right


def _model(tokens: TokenList, merges: Sequence[tuple[str, str]], has_bytes: bool) -> dict[str, Any]:
    """Return the ``model`` of a tokenizer; with ``has_bytes``, characters that are not tokens become bytes."""
    unknown = tokens.named("unknown") if has_bytes else None
    parts = {"type": "BPE", "fuse_unk": has_bytes, "byte_fallback": has_bytes, "vocab": dict(tokens.ids)}
    return parts | {"merges": merges, "unk_token": None if unknown is None else tokens.tokens[unknown]}


def _spaces_as_signs(has_prefix: bool) -> dict[str, Any]:
    """Return the normalizer and the decoder of tokens in UTF-8; with a prefix, a space is put before each text."""
    to_signs = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, to_signs]},
        "decoder": {"type": "Sequence", "decoders": [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    }


def _post_processor(tokens: TokenList, adds_begin: bool) -> dict[str, Any] | None:
    """Return what adds the begin and the end token to a text; None: nothing is added.

    Raises:
        ModelError: A token is to be added that the file does not name.
    """
    is_gemma = tokens.metadata[f"{PREFIX}model"] == "gemma4"  # some files of Gemma 4 say false, which is a mistake
    pieces, special = [{"Sequence": {"id": "A", "type_id": 0}}], {}
    for key, place, is_added in (
        ("bos", 0, is_gemma or tokens.flag("add_bos_token", adds_begin)),
        ("eos", 2, tokens.flag("add_eos_token", default=False)),
    ):
        if not is_added:
            continue
        token_id = tokens.named(key)
        if token_id is None:
            raise ModelError(f"{PREFIX}{key}_token_id names no token, but this token is to be added to a text")
        text = tokens.tokens[token_id]
        pieces.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
        special[text] = {"id": text, "ids": [token_id], "tokens": [text]}
    template = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special}
    return template if special else None


def _added_tokens(tokens: TokenList) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before all else: control tokens, and those that users defined.

    The control tokens of Phi-3 swallow the spaces after them, which a GGUF file does not say.
    """
    name = str(tokens.metadata.get("general.name", "")).lower()
    keeping = ("<unk>", "<s>", "<|endoftext|>") if "phi-3" in name or "phi3" in name else tokens.ids
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    special = tokens.special_ids()
    added = sorted(special | {i for i, kind in enumerate(tokens.types) if kind == USER_DEFINED})
    texts = ((i, tokens.tokens[i]) for i in added)
    return [
        {"id": i, "content": text, "rstrip": text not in keeping, "special": i in special, **flags} for i, text in texts
    ]
