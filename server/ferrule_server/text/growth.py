"""Bound how large texts become in a tokenizer, before the library reads its ``tokenizer.json``.

Each part of a tokenizer may make a long text of every character, and a sequence of parts multiplies. The library has no
limit, and a process that runs out of memory ends. Here the *growth* of a part is the largest ratio of the size of its
output to that of its input; a size is the bytes of a text, plus one because a part may add text to an empty one. The
factors of Unicode's normal forms are those of Unicode Standard Annex 15.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model_files import parse_object, shown

MAX_BYTES: Final = 32 << 20
"""Largest text that may come of one text, by its growth; the library takes about 40 bytes of memory for each byte."""
_MAX_GROWTH: Final = 16384
"""Largest growth before the model: 2 KiB can always be encoded. Tokenizers like ALBERT's have 11 616, Gemma's has 3."""
_MAX_TEMPLATE: Final = 64
"""Most tokens that may come of one token in the post-processor."""
_MAX_TOKEN_BYTES: Final = 1 << 20
"""Largest text of one token; the longest tokens of published models have some hundred characters."""
_MAX_REPEATED: Final = 64
"""Longest text that the model repeats for each character, in characters."""
_MIN_ADDED: Final = 8
"""The library takes hundreds of bytes of memory for each byte of added tokens, whatever their growth."""
_MAX_PARTS: Final = 64
_MAX_CONTAINERS: Final = 4 << 20
"""Most lists and objects; a list of merges has half a million."""

_Part = Mapping[str, Any]


def _replaced(part: _Part) -> int:
    """Return the growth of a Replace; a regular expression, or an empty text, may match between all characters."""
    content, pattern = len(part.get("content", "").encode()), len(part["pattern"].get("String", "").encode())
    return max(1, -(-content // pattern)) if pattern else 1 + content


def _prepended(part: _Part) -> int:
    return 1 + len(part["prepend"].encode())


def _mapped(part: _Part) -> int:
    """Return the growth of a Precompiled: the longest text in its table, which follows a trie of 32-bit words."""
    table = base64.b64decode(part["precompiled_charsmap"])
    return max(1, *map(len, table[4 + int.from_bytes(table[:4], "little") // 4 * 4 :].split(b"\0")))


def _filled(part: _Part) -> int:
    """Return how many tokens come of one token in a template for one text."""
    specials, pieces = part["special_tokens"], part["single"]
    return sum(1 if "Sequence" in piece else len(specials[piece["SpecialToken"]["id"]]["ids"]) for piece in pieces)


_OF_FIELDS: Final[Mapping[str, Callable[[_Part], int]]] = {
    "pattern": _replaced, "prepend": _prepended, "precompiled_charsmap": _mapped, "single": _filled,
}  # fmt: skip
"""The growth by the fields of a part, whatever its type: the library takes some types for others that have these."""
_KNOWN: Final[Mapping[str, tuple[str, Mapping[str, int]]]] = {
    "normalizer": ("normalizers", {
        "BertNormalizer": 8, "ByteLevel": 2, "Lowercase": 2, "NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Nmt": 1,
        "Precompiled": 1, "Prepend": 1, "Replace": 1, "Sequence": 1, "Strip": 1, "StripAccents": 1}),
    "pre_tokenizer": ("pretokenizers", {
        "BertPreTokenizer": 1, "ByteLevel": 4, "CharDelimiterSplit": 1, "Digits": 1, "FixedLength": 1, "Metaspace": 8,
        "Punctuation": 1, "Sequence": 1, "Split": 1, "UnicodeScripts": 1, "Whitespace": 1, "WhitespaceSplit": 1}),
    "post_processor": ("processors", {
        "BertProcessing": 3, "ByteLevel": 1, "RobertaProcessing": 3, "Sequence": 1, "TemplateProcessing": 1}),
    "decoder": ("decoders", {
        "BPEDecoder": 3, "ByteFallback": 1, "ByteLevel": 2, "CTC": 3, "Fuse": 1, "Metaspace": 1, "Replace": 1,
        "Sequence": 1, "Strip": 1, "WordPiece": 2}),
}  # fmt: skip
"""By section: the field of the parts of a sequence, and the growth of each type besides that of its fields."""


def bound_growth(text: str) -> tuple[int, int]:
    """Return the growth of a text before the model of a tokenizer, and that of spelled tokens in its decoder.

    Args:
        text: The content of a ``tokenizer.json``.

    Raises:
        ModelError: It grows too much, or it is not a tokenizer; the message names the part and the factor.
    """
    if text.count("[") + text.count("{") > _MAX_CONTAINERS:
        raise ModelError(f"it has more than {_MAX_CONTAINERS} lists and objects, the limit")
    described = parse_object(text.encode(), Path("tokenizer.json"), has_unique_keys=True)
    try:
        encoding = _growth(described, "normalizer", _MAX_GROWTH)
        encoding *= _growth(described, "pre_tokenizer", _MAX_GROWTH // encoding)
        _growth(described, "post_processor", _MAX_TEMPLATE)
        decoding = _growth(described, "decoder", _MAX_TOKEN_BYTES) if described.get("decoder") else 2
        _check_tokens(described, encoding, decoding)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"not a tokenizer: {type(error).__name__} {shown(str(error))}") from error
    return encoding, decoding


def _growth(described: _Part, section: str, limit: int) -> int:
    """Return the growth of a section; refuse one beyond a limit."""
    inner, known = _KNOWN[section]
    growth, waiting = 1, [described[section]] if described.get(section) else []
    for part in waiting:
        kind = part.get("type")
        if kind not in known:
            raise ModelError(f"its {section} has a part of the type {shown(kind)}, which is not supported")
        growth *= prod((factor(part) for field, factor in _OF_FIELDS.items() if field in part), start=known[kind])
        waiting += part.get(inner) or ()
        if growth > limit or len(waiting) > _MAX_PARTS:
            raise ModelError(
                f"its {section} may make a text {growth} times as long, by {len(waiting)} parts up to {kind}; the"
                f" limits are {limit} and {_MAX_PARTS}"
            )
    return growth


def _check_tokens(described: _Part, encoding: int, decoding: int) -> None:
    """Refuse tokens that are too long, one by one or the added ones together."""
    model, added = described["model"], [token["content"] for token in described.get("added_tokens") or ()]
    words = model["vocab"] if isinstance(model["vocab"], dict) else [word for word, _ in model["vocab"]]
    longest = max(map(len, itertools.chain(words, added)), default=0)
    added_bytes = sum(len(content.encode()) + 1 for content in added)
    sizes = [
        (f"its longest token, {longest} characters,", decoding * longest, _MAX_TOKEN_BYTES),
        (f"its added tokens, {added_bytes} bytes,", max(encoding, _MIN_ADDED) * added_bytes, MAX_BYTES),
    ]
    repeated = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    sizes += [(f"its {key}", len(model.get(key) or ""), _MAX_REPEATED) for key in repeated]
    for what, size, limit in sizes:
        if size > limit:
            raise ModelError(f"{what} may take {size} bytes; the limit is {limit}")
