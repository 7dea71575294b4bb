"""Small tokenizers of every kind there is, as the models of the field have them."""

from __future__ import annotations

import functools
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from ferrule_server.text.tokenizer import Tokenizer

SHIPPED = Path(__file__).resolve().parents[2] / "server" / "ferrule_server" / "demo_model"
CORPUS = ["def f(x):\n    return x\n", "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \U0001f980 stop STOP </s>"] * 4
KINDS = ("shipped", "byte_level", "llama", "gemma", "metaspace", "word_piece", "suffix", "plain", "normalized")


@functools.cache
def vocabulary(kind: str) -> Tokenizer:
    """Return a tokenizer by the name of its kind."""
    if kind == "shipped":
        loaded = Tokenizer.load(SHIPPED)
        assert loaded is not None
        return loaded
    inner = {
        "byte_level": _byte_level,
        "llama": lambda: _byte_fallback(decoders.Strip(" ", 1, 0)),
        "gemma": _byte_fallback,
        "metaspace": _metaspace,
        "word_piece": _word_piece,
        "suffix": _suffix,
        "plain": _plain,
        "normalized": _normalized,
    }[kind]()
    inner.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(inner.to_str())


def token(tokenizer: Tokenizer, spelled: str) -> int:
    """Return the id of a token as the vocabulary spells it."""
    token_id = tokenizer._parsing.token_to_id(spelled)
    assert token_id is not None
    return int(token_id)


def _byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _byte_fallback(*last: object) -> tokenizers.Tokenizer:
    """Like SentencePiece: a few words, every byte, spaces spelled U+2581."""
    words = ["\u2581", "\u2581a", "a", "b", "\u2581stop", "st", "op", "\u00e9", "\u65e5\u672c", "\n", "\ufffd"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocab |= {word: 257 + i for i, word in enumerate(words)}
    model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _metaspace() -> tokenizers.Tokenizer:
    words = ["<unk>", "\u2581", "\u2581a", "\u2581\u2581b", "c", "\u2581stop", "st", "op", "\u00e9"]
    tokenizer = tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _word_piece() -> tokenizers.Tokenizer:
    words = ["[UNK]", "a", "##b", "stop", "##st", "##op", ".", "'", "n't", "do", "\u00e9", "##", "!"]
    model = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _suffix() -> tokenizers.Tokenizer:
    """The first BPE: the end of a word is part of its last token."""
    words = ["a", "b", "a</w>", "st", "op</w>", "stop</w>", "\u00e9", "\u00e9</w>", "</w>"]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def _plain() -> tokenizers.Tokenizer:
    """No decoder at all: words with a space between them."""
    return tokenizers.Tokenizer(models.WordLevel({"a": 0, "stop": 1, "op": 2, "\u00e9": 3}, unk_token="a"))


def _normalized() -> tokenizers.Tokenizer:
    """Special tokens whose text the normalizer changes, one of them in the middle of the bytes of characters."""
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.add_special_tokens([AddedToken(text, normalized=True) for text in ("<|END|>", "<|TURN|>")])
    return tokenizer
