"""Tokenizers that multiply a text are refused before the library runs, and those of the field are not."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ferrule_server.errors import InvalidRequest, ModelError
from ferrule_server.text.growth import MAX_BYTES, bound_growth
from ferrule_server.text.tokenizer import Tokenizer
from tests.text.vocabularies import KINDS, SHIPPED, vocabulary

Part = dict[str, Any]
BASE: Part = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
TIMES_64 = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}
EMPTY = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "b" * 63}


def _described(**parts: Any) -> str:
    return json.dumps({**BASE, **parts})


def _model(**settings: Any) -> str:
    return json.dumps({**BASE, "model": {**BASE["model"], **settings}})


def _sequence(key: str, *parts: Part) -> Part:
    return {"type": "Sequence", key: list(parts)}


def _charsmap(*texts: str) -> Part:
    """Return a Precompiled with an empty trie."""
    table = (0).to_bytes(4, "little") + "\0".join(texts).encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def _added(*contents: str) -> list[Part]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return [{"id": 2 + i, "content": content, **flags} for i, content in enumerate(contents)]


def _template(num_sequences: int, num_specials: int) -> Part:
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}] * num_sequences + [{"SpecialToken": {"id": "s", "type_id": 0}}]
    special = {"id": "s", "ids": [0] * num_specials, "tokens": ["a"] * num_specials}
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {"s": special}}


HOSTILE: dict[str, tuple[str, str]] = {
    "a normalizer that multiplies": (
        _described(normalizer=_sequence("normalizers", *[TIMES_64] * 6)), "normalizer may make a text 262144 times"
    ),
    "one inside sequences": (
        _described(normalizer=_sequence("normalizers", _sequence("normalizers", TIMES_64), TIMES_64, TIMES_64)),
        "normalizer may make a text 262144 times",
    ),
    "an expression that matches nothing": (
        _described(normalizer=_sequence("normalizers", EMPTY, EMPTY, EMPTY)), "normalizer may make a text 262144 times"
    ),
    "a prefix of a megabyte": (
        _described(normalizer={"type": "Prepend", "prepend": "x" * (1 << 20)}),
        "1048577 times as long, by 1 parts up to Prepend",
    ),
    "normal forms without end": (
        _described(normalizer=_sequence("normalizers", *[{"type": "NFKD"}] * 9)), "up to NFKD"
    ),
    "a table of long texts": (_described(normalizer=_charsmap("a", "b" * 20_000)), "20000 times as long"),
    "parts of two sections": (
        _described(
            normalizer=_sequence("normalizers", TIMES_64, TIMES_64),
            pre_tokenizer=_sequence("pretokenizers", *[{"type": "Metaspace"}] * 2),
        ),
        "pre_tokenizer may make a text 8 times as long, by 3 parts up to Metaspace; the limits are 4 and 64",
    ),
    "a pre-tokenizer that multiplies": (
        _described(pre_tokenizer=_sequence("pretokenizers", *[{"type": "ByteLevel"}] * 20)), "up to ByteLevel"
    ),
    "parts without growth": (
        _described(normalizer=_sequence("normalizers", *[{"type": "Strip"}] * 1000)),
        "by 1001 parts up to Sequence; the limits are 16384 and 64",
    ),
    "a template of copies": (_described(post_processor=_template(100, 1)), "post_processor may make a text 101 times"),
    "a template of specials": (_described(post_processor=_template(1, 9000)), "post_processor may make a text 9001"),
    "templates in a sequence": (
        _described(post_processor=_sequence("processors", *[_template(3, 0)] * 4)), "post_processor may make a text 81"
    ),
    "a decoder that multiplies": (
        _described(decoder=_sequence("decoders", *[TIMES_64] * 6)), "decoder may make a text 16777216 times"
    ),
    "a long token and a decoder": (
        _described(decoder=TIMES_64, added_tokens=_added("c" * 20_000)),
        "longest token, 20000 characters, may take 1280000 bytes",
    ),
    "a token of megabytes": (_model(vocab={"a": 0, "b" * (3 << 20): 1}), "its longest token, 3145728 characters"),
    "a piece of megabytes": (
        _model(type="Unigram", vocab=[["a", -1.0], ["b" * (3 << 20), -1.0]]), "its longest token, 3145728 characters"
    ),
    "many added tokens": (
        _described(added_tokens=_added(*[f"{i:0400}" for i in range(11_000)])), "its added tokens, 4411000 bytes"
    ),
    "added tokens that grow": (
        _described(
            normalizer=_sequence("normalizers", TIMES_64, TIMES_64),
            added_tokens=_added(*[f"{i:0100}" for i in range(99)]),
        ),
        "its added tokens, 9999 bytes, may take 40955904 bytes",
    ),
    "a long unknown token": (_model(unk_token="u" * 5000, vocab={"u" * 5000: 0}), "unk_token may take 5000 bytes"),
    "a long prefix": (_model(type="WordPiece", continuing_subword_prefix="#" * 99), "continuing_subword_prefix"),
    "a Replace by another type": (
        _described(normalizer=_sequence("normalizers", *[{**TIMES_64, "type": "BertNormalizer"}] * 6)),
        "262144 times as long",
    ),
    "a sequence by another type": (
        _described(normalizer={**_sequence("normalizers", *[TIMES_64] * 6), "type": "BertNormalizer"}), "32768 times"
    ),
    "a template by another type": (
        _described(post_processor={**_template(30, 1), "type": "BertProcessing"}), "93 times"
    ),
    "a part without a type": (_described(normalizer={"prepend": "x"}), "the type None, which is not supported"),
    "a part of another section": (_described(decoder={"type": "NFKC"}), "its decoder has a part of the type 'NFKC'"),
    "a normalizer twice": (
        _described(normalizer=TIMES_64)[:-1] + f', "normalizer": {json.dumps(TIMES_64)}}}',
        "duplicate entries normalizer",
    ),
    "lists without end": ('{"model": [' + "[]," * 5_000_000 + "[]]}", "lists and objects"),
    "sequences too deep": (
        _described(normalizer=7).replace("7}", '{"type": "Sequence", "normalizers": [' * 5000), "nested too deeply"
    ),
    "a table that is none": (_described(normalizer={"type": "Precompiled", "precompiled_charsmap": 3}), "not a tokeni"),
    "an expression that is none": (
        _described(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        "not a tokenizer",
    ),
    "pieces of no length": (_described(pre_tokenizer={"type": "FixedLength", "length": 0}), "cannot encode a text"),
    "a table that panics": (
        _described(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}), "not a tokenizer"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_multiplies_is_refused(name: str) -> None:
    """The message names the part and the factor."""
    text, complaint = HOSTILE[name]
    with pytest.raises(ModelError, match=complaint):
        Tokenizer(text)


def _metaspace(*normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581a", -1.0)], unk_id=0))
    tokenizer.normalizer = normalizers.Sequence(list(normalizer))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _llama() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(vocab={"<unk>": 0, "\u2581": 1, "a": 2}, merges=[], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    inner.post_processor = processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    return inner


def _bert() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.BertProcessing(("[UNK]", 0), ("[UNK]", 0))
    inner.decoder = decoders.WordPiece()
    return inner


def _qwen() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    inner.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(r"\p{N}|\s+(?!\S)|\s+"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.post_processor, inner.decoder = processors.ByteLevel(), decoders.ByteLevel()
    return inner


NMT_NFKC = _charsmap("a", " ", unicodedata.normalize("NFKC", "\ufdfa"))
"""The longest text in SentencePiece's table."""


def _albert() -> str:
    forms = [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    described = json.loads(_metaspace(*forms, normalizers.Replace(tokenizers.Regex(" {2,}"), " ")).to_str())
    described["normalizer"]["normalizers"].insert(4, NMT_NFKC)
    return json.dumps(described)


PUBLISHED = {
    **{kind: vocabulary(kind)._parsing.to_str() for kind in KINDS},
    "shipped file": (SHIPPED / "tokenizer.json").read_text(),
    "like Llama 2": _llama().to_str(),
    "like BERT": _bert().to_str(),
    "like Qwen": _qwen().to_str(),
    "like T5": _metaspace(normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), "\u2581")).to_str(),
    "like ALBERT": _albert(),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokenizers_of_the_field_are_within_the_bounds(name: str) -> None:
    """All of them, with texts of at least 2 KiB; those of decoders with a megabyte, the default limit of a call."""
    encoding, decoding = bound_growth(PUBLISHED[name])
    assert encoding * 2048 <= MAX_BYTES
    if name not in ("like ALBERT", "like T5"):
        assert encoding << 20 <= MAX_BYTES
    assert decoding <= 4


TEXTS = st.text(st.sampled_from("aAb \u2581x\u00e9\ufdfa\u0130\u1e9e\uac01\u4e2d\u0ddd\U0001d160"), max_size=8)
SIMPLE = st.sampled_from(
    ["BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents"]
).map(lambda kind: json.loads(getattr(normalizers, kind)().__getstate__()))
PATTERNS = st.sampled_from(["a", "ab", "", " ", "\u2581"]).map(lambda text: {"String": text})
PATTERNS |= st.sampled_from(["a", "x*", "(?=a)", " {2,}", r"\b", "^|$"]).map(lambda text: {"Regex": text})
REPLACES = st.builds(lambda pattern, content: {"type": "Replace", "pattern": pattern, "content": content}, PATTERNS,
                     st.sampled_from(["", "a", "\u2581", "aab", " a a"]))  # fmt: skip
PREPENDS = st.sampled_from(["a", "\u2581 "]).map(lambda text: {"type": "Prepend", "prepend": text})


@given(parts=st.lists(SIMPLE | REPLACES | PREPENDS, max_size=4), text=TEXTS)
@settings(max_examples=150)
def test_no_normalizer_makes_more_than_its_growth(parts: Sequence[Part], text: str) -> None:
    """The bound is one: for sequences of any parts, and texts of the characters that grow most."""
    described = _described(normalizer=_sequence("normalizers", *parts))
    normalizer = tokenizers.Tokenizer.from_str(described).normalizer
    try:
        made = normalizer.normalize_str(text)
    except BaseException as panic:  # some sequences have bugs in the library
        if type(panic).__name__ != "PanicException":
            raise
    else:
        assert len(made.encode()) + 1 <= bound_growth(described)[0] * (len(text.encode()) + 1)


@given(parts=st.lists(REPLACES | st.sampled_from([
    {"type": "BPEDecoder", "suffix": ""}, {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": False}, json.loads(decoders.ByteLevel().__getstate__()),
    {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": "a", "start": 1, "stop": 1},
]), max_size=4), tokens=st.lists(TEXTS.filter(bool), min_size=1, max_size=4, unique=True))  # fmt: skip
@settings(max_examples=150)
def test_no_decoder_makes_more_than_its_growth(parts: Sequence[Part], tokens: Sequence[str]) -> None:
    """For all tokens together."""
    described = _model(vocab={token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])
    described = json.dumps({**json.loads(described), "decoder": _sequence("decoders", *parts) if parts else None})
    tokenizer = tokenizers.Tokenizer.from_str(described)
    try:
        made = tokenizer.decode(list(range(len(tokens))), skip_special_tokens=False)
    except BaseException as panic:  # as above
        if type(panic).__name__ != "PanicException":
            raise
    else:
        size = sum(len(token.encode()) + 1 for token in tokens)
        assert len(made.encode()) <= bound_growth(described)[1] * size


@pytest.mark.parametrize(
    ("kind", "worst", "most"),
    [("NFC", "\U0001d1c0", 3), ("NFD", "\u0ddd", 3), ("NFKC", "\ufdfa", 11), ("NFKD", "\ufdfa", 11)],
)
def test_the_factors_of_normal_forms_are_those_of_the_library(kind: str, worst: str, most: int) -> None:
    """No character grows more; these do, so a smaller factor would be wrong."""
    described = _described(normalizer={"type": kind})
    made = tokenizers.Tokenizer.from_str(described).normalizer.normalize_str(worst)
    assert bound_growth(described)[0] == most == len(made.encode()) / len(worst.encode())


def test_a_text_that_may_become_too_long_is_refused() -> None:
    """By its size and the growth, before the library sees it; shorter ones are encoded."""
    tokenizer = Tokenizer(_described(normalizer=_sequence("normalizers", TIMES_64, TIMES_64)))
    most = MAX_BYTES // 4096
    assert tokenizer.encode("b" * most) == [0]
    with pytest.raises(InvalidRequest, match=f"{most + 1} bytes; this tokenizer takes {most} at a time"):
        tokenizer.encode("b" * (most + 1))
    with pytest.raises(InvalidRequest, match="at a time"):
        tokenizer.find_control_token("b" * (most + 1))


def test_tokens_that_may_become_too_long_are_refused() -> None:
    """Where the longest token of a vocabulary is drawn again and again."""
    tokenizer = Tokenizer(_model(vocab={"a": 0, "b" * (1 << 18): 1}))
    assert len(tokenizer.decode([1] * 40)) > 10 << 20
    with pytest.raises(InvalidRequest, match="at a time"):
        tokenizer.decode([1] * 80)
