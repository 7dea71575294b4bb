"""The tokenizer of a model folder, with tiny vocabularies trained on the spot."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from ferrule_server.errors import InvalidRequest, ModelError, TokenOutOfVocab
from ferrule_server.text.tokenizer import Tokenizer

CORPUS = ["def f(x):\n    return x\n", "class Queue:\n    pass\n"] * 4


def byte_level() -> tokenizers.Tokenizer:
    """Train a byte-level BPE of 300 tokens with two special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The byte-level tokenizer under test."""
    return Tokenizer(byte_level().to_str())


@pytest.mark.parametrize("text", ["", "def f(x):\n    return x", "naïve, 日本語 🦀\x00", "\ufffd"])
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Any text, whether or not the corpus knew its characters."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_begin_token_is_added_on_request_only(tokenizer: Tokenizer) -> None:
    """add_special_tokens adds what the post-processor adds."""
    plain = tokenizer.encode("def f")
    assert tokenizer.encode("def f", add_special_tokens=True) == [0, *plain]
    assert tokenizer.decode([0, *plain, 1], skip_special_tokens=True) == "def f"
    assert tokenizer.decode([0, *plain, 1]) == "<bos>def f<eos>"


AROUND = {
    "<bos> $A": [0],
    "<bos> $A <eos>": [0],
    "<eos> <bos> $A": [1, 0],
    "<eos> <bos> $A <eos>": [1, 0],
    "$A <eos>": [],
    "$A": [],
}
"""Templates of a post-processor, and what they put before a text."""


def around(template: str) -> tokenizers.Tokenizer:
    """Return the byte-level tokenizer with another post-processor."""
    made = byte_level()
    made.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<bos>", 0), ("<eos>", 1)])
    return made


@pytest.mark.parametrize("template", AROUND)
@pytest.mark.parametrize("text", ["def f", " <eos>", "<eos>", "caf\u00e9", ""])
def test_a_prompt_begins_as_the_tokenizer_has_it(template: str, text: str) -> None:
    """With what is put before a text, be it several tokens, and not what is put after it; also before an empty text."""
    tokenizer, begin = Tokenizer(around(template).to_str()), AROUND[template]
    assert list(tokenizer.begin_ids) == begin
    assert tokenizer.encode_prompt(text, parse_special_tokens=False) == begin + tokenizer.encode(
        text, parse_special_tokens=False
    )
    assert tokenizer.encode_prompt("x" + text) == begin + tokenizer.encode("x" + text)


@pytest.mark.parametrize(
    ("template", "text", "begin"),
    [
        ("<bos> $A", "<bos>def", [0]),
        ("<bos> $A", "<bos><bos>def", [0, 0]),
        ("<bos> $A", "<eos>def", [0, 1]),
        ("<eos> <bos> $A", "<eos><bos>def", [1, 0]),
        ("<eos> <bos> $A", "<bos>def", [1, 0]),
        ("<eos> <bos> $A", "<eos>def", [1, 0, 1]),
    ],
)
def test_a_begin_token_that_is_written_out_is_not_doubled(template: str, text: str, begin: list[int]) -> None:
    """Where the text is parsed; as plain text it is no token, so one is added."""
    tokenizer = Tokenizer(around(template).to_str())
    assert tokenizer.encode_prompt(text) == begin + tokenizer.encode("def")
    plain = tokenizer.encode_prompt(text, parse_special_tokens=False)
    assert plain == AROUND[template] + tokenizer.encode(text, parse_special_tokens=False)


@pytest.mark.parametrize("template", AROUND)
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_begin_tokens_are_those_of_transformers(template: str, flags: dict[str, bool], tmp_path: Path) -> None:
    """Which takes them from tokenizer.json alone: flags of tokenizer_config.json have no effect beside it."""
    from transformers import AutoTokenizer

    around(template).save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, **flags}))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert ours is not None
    for text in ("def f(x)", "", "x"):
        expected = theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=True) == expected
        num_after = template.partition("$A")[2].count("<")
        assert ours.encode_prompt(text) == expected[: len(expected) - num_after]


def test_special_tokens_in_text_of_others_stay_text(tokenizer: Tokenizer) -> None:
    """Parsed by default, ordinary text on request, and the two do not disturb each other."""
    assert tokenizer.encode("<eos>") == [1]
    literal = tokenizer.encode("<eos>", parse_special_tokens=False)
    assert 1 not in literal
    assert tokenizer.decode(literal) == "<eos>"
    assert tokenizer.encode("<eos>") == [1]


@pytest.mark.parametrize("token_id", [300, 2**31, 2**32, 2**70, -1])
def test_unknown_token_is_a_typed_error(tokenizer: Tokenizer, token_id: int) -> None:
    """The error names the place and the token; nothing is dropped in silence."""
    with pytest.raises(TokenOutOfVocab) as raised:
        tokenizer.decode([5, token_id])
    assert raised.value.metadata == {
        "field": "token_ids[1]",
        "token_id": str(token_id),
        "vocab_size": str(tokenizer.vocab_size),
    }


def test_half_a_surrogate_pair_is_a_typed_error(tokenizer: Tokenizer) -> None:
    """Text that no UTF-8 can carry is the caller's mistake."""
    with pytest.raises(InvalidRequest, match="character 2 is half"):
        tokenizer.encode("ab\ud800")


def test_every_split_of_a_character_is_noticed(tokenizer: Tokenizer) -> None:
    """A stream holds a token back exactly while the bytes so far end inside a character."""
    text = "é🦀x日"
    token_ids = tokenizer.encode(text)
    for length in range(len(token_ids) + 1):
        shown = tokenizer.decode(token_ids[:length])
        assert bool(tokenizer.num_incomplete(token_ids[:length])) == (not text.startswith(shown))


def test_bytes_that_nothing_completes_are_not_held_back(tokenizer: Tokenizer) -> None:
    """A stray continuation byte is broken text, not half a character; neither is a special token."""
    lead, stray = tokenizer.encode("é")
    assert not tokenizer.num_incomplete([stray])
    assert tokenizer.num_incomplete([stray, lead])
    assert not tokenizer.num_incomplete(tokenizer.encode("\ufffd"))
    assert not tokenizer.num_incomplete([lead, 1])
    assert tokenizer.decode([stray]) == "\ufffd"


def test_byte_fallback_tokens_are_bytes() -> None:
    """Vocabularies in the style of SentencePiece spell unknown bytes ``<0xE2>``."""
    vocab = {"<unk>": 0, "a": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(inner.to_str())
    token_ids = tokenizer.encode("aé")
    assert [tokenizer.num_incomplete(token_ids[:n]) > 0 for n in range(4)] == [False, False, True, False]
    assert tokenizer.decode(token_ids) == "aé"


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    """A prompt is never cut in silence."""
    inner = byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=64)
    assert Tokenizer(inner.to_str()).encode("def f(x)") == Tokenizer(byte_level().to_str()).encode("def f(x)")


def test_folder_without_a_tokenizer_loads_none(tmp_path: Path) -> None:
    """No tokenizer.json, no tokenizer: the service then says so."""
    assert Tokenizer.load(tmp_path) is None


def test_folder_with_a_tokenizer_loads_it(tmp_path: Path) -> None:
    """The file of the folder is used, added tokens counted."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None
    assert loaded.vocab_size == len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"])


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": 3}'])
def test_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    """The start-up error names the file."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be loaded"):
        Tokenizer.load(tmp_path)


def _backtracking(section: str) -> Tokenizer:
    """Return a tokenizer with an expression that takes exponential time over many ``a`` in one of its parts."""
    described = json.loads(byte_level().to_str())
    replace = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    for token in described["added_tokens"]:
        token["normalized"] = True
    if section == "decoder":
        decoder = {"type": "Sequence", "decoders": [described["decoder"], {"type": "Fuse"}, replace]}
        return Tokenizer(json.dumps({**described, "decoder": decoder}))
    return Tokenizer(json.dumps({**described, "normalizer": replace}))


@pytest.mark.parametrize("call", ["encode", "find", "decode", "text_of"])
def test_a_panic_of_the_library_is_an_ordinary_error(call: str) -> None:
    """Its expressions give up after some ten million steps by a panic, which no ``except Exception`` would catch."""
    text = "a" * 40 + "!"
    tokenizer = _backtracking("decoder" if call in ("decode", "text_of") else "normalizer")
    token_ids = Tokenizer(byte_level().to_str()).encode(text)
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: tokenizer.encode(text),
        "find": lambda: tokenizer.control_texts(text),
        "decode": lambda: tokenizer.decode(token_ids),
        "text_of": lambda: tokenizer.text_of(token_ids),
    }
    with pytest.raises(RuntimeError, match="panicked") as raised:
        calls[call]()
    assert "aaa" not in str(raised.value)
    assert raised.value.__suppress_context__
    assert tokenizer.decode(tokenizer.encode("bc")) == "bc"
