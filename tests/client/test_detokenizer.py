"""Tokens to text in pieces: the pieces add up to the whole, whatever the cuts."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given

from ferrule.types import Detokenizer
from tests.client.fake_server import bytes_to_text


def decode(token_ids: Sequence[int]) -> tuple[str, bool]:
    """Decode byte tokens."""
    return bytes_to_text(list(token_ids))


def decode_sentences(token_ids: Sequence[int]) -> tuple[str, bool]:
    """Decode as tokenizers do that drop the space before the first word."""
    return " ".join(f"w{token}" for token in token_ids), False


@given(text=st.text(max_size=200), context=st.text(max_size=20))
def test_pieces_add_up_to_the_text(text: str, context: str) -> None:
    """Whatever came before, the pieces are exactly the new text, and none holds half a character."""
    detokenizer = Detokenizer(decode, list(context.encode()))
    pieces = [detokenizer.push(token) for token in text.encode()]
    assert "".join(pieces) + detokenizer.finish() == text
    assert len(max(pieces, key=len, default="")) <= 1


def test_spaces_between_words_survive_a_long_text() -> None:
    """Neither the beginning nor a new window swallows a space."""
    detokenizer = Detokenizer(decode_sentences, [7])
    pieces = [detokenizer.push(token) for token in range(500)]
    assert "".join(pieces) == "".join(f" w{token}" for token in range(500))


def test_cost_of_a_token_does_not_grow() -> None:
    """The window is bounded, however long the text."""
    sizes: list[int] = []

    def measured(token_ids: Sequence[int]) -> tuple[str, bool]:
        sizes.append(len(token_ids))
        return decode(token_ids)

    detokenizer = Detokenizer(measured, b"x" * 1000)
    for _ in range(1000):
        detokenizer.push(ord("a"))
    assert max(sizes) <= 64
    assert len(sizes) < 1100


def test_text_can_end_inside_a_character_that_the_context_began() -> None:
    """The first half was nobody's text yet, so it comes out with the second."""
    euro = "€".encode()
    detokenizer = Detokenizer(decode, [ord("a"), *euro[:2]])
    assert detokenizer.push(euro[2]) == "€"


def test_invalid_bytes_come_out_as_replacements() -> None:
    """What can never become a character is not held back for ever."""
    detokenizer = Detokenizer(decode)
    assert detokenizer.push(0xFF) == "\ufffd"
    assert detokenizer.push(ord("a")) == "a"
    assert detokenizer.push(0xE2) == ""
    assert detokenizer.finish() == ""
