"""The tokenizer gives back every string and keeps indentation cheap."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tools.training.tokenizer import END_OF_TEXT, encode_documents, end_of_text_id, train_tokenizer

_TRAINED = train_tokenizer(["def f(x):\n    if x:\n        return x\n" * 9], vocab_size=280)


@settings(max_examples=200, database=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_every_string_survives_the_round_trip(text: str) -> None:
    """All 256 bytes are in the vocabulary, so nothing is ever unknown."""
    ids = _TRAINED.encode(text, add_special_tokens=False).ids
    if END_OF_TEXT not in text:
        assert _TRAINED.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["", "\n", "\t\tx\r\n  y", "a   \n\n\n        b", "é\u00a0🙂\x00\u2028", "x" * 97])
def test_awkward_white_space_and_bytes_survive(text: str) -> None:
    """Tabs, carriage returns, trailing blanks, emoji and control characters come back as they went in."""
    assert _TRAINED.decode(_TRAINED.encode(text).ids) == text


def test_newline_and_indentation_are_one_token() -> None:
    """A step into a block costs one token however deep the block is."""
    encoding = _TRAINED.encode("def f(x):\n    if x:\n        return x")
    assert "Ċ" + "Ġ" * 4 in encoding.tokens
    assert "Ċ" + "Ġ" * 8 in encoding.tokens


def test_documents_are_closed_by_end_of_text(tokenizer: Tokenizer) -> None:
    """The stream has one end-of-text token per document, at its end, and nothing is lost."""
    stream = encode_documents(tokenizer, ["a = 1\n", "", "b = 2\n"])
    end = end_of_text_id(tokenizer)
    assert [int(token) for token in stream].count(end) == 3
    assert stream[-1] == end
    assert tokenizer.decode(stream.tolist()) == "a = 1\nb = 2\n"


def test_saved_tokenizer_encodes_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A resumed run reads back exactly the vocabulary it started with."""
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    text = "def add_3(left, right):\n    return left\n"
    assert Tokenizer.from_file(path).encode(text).ids == tokenizer.encode(text).ids


def test_refuses_a_vocabulary_without_room_for_the_bytes() -> None:
    """A vocabulary that could not encode everything is an error."""
    with pytest.raises(ValueError, match="cannot hold 256 bytes"):
        train_tokenizer(["x"], vocab_size=256)
