"""Text that comes token by token: the pieces are the whole, and none of them ends in half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.text.drawn_text import StreamDecoder, prepare_search
from ferrule_server.text.tokenizer import Tokenizer
from tests.text.vocabularies import KINDS, token, vocabulary

NUMBERS = st.lists(st.integers(0, 2**20), max_size=120)


def tokens_of(tokenizer: Tokenizer, numbers: list[int]) -> list[int]:
    """Return tokens of the vocabulary, any of them, after any other."""
    return [number % tokenizer.vocab_size for number in numbers]


def certain(tokenizer: Tokenizer, token_ids: list[int], skips: bool) -> str:
    """Return the text of tokens up to a character that is not whole: the definition, by ``decode`` of all of them."""
    text = tokenizer.decode(token_ids, skip_special_tokens=skips)
    return text[: len(text) - tokenizer.num_incomplete(list(tokenizer.shown(token_ids, skips)))]


@pytest.mark.parametrize("kind", KINDS)
@given(numbers=NUMBERS, skips=st.booleans())
@settings(max_examples=60)
def test_pieces_are_the_whole_text_at_every_token(kind: str, numbers: list[int], skips: bool) -> None:
    """After each token all that is certain is out, and at the end everything."""
    tokenizer = vocabulary(kind)
    token_ids = tokens_of(tokenizer, numbers)
    decoder, text = StreamDecoder(tokenizer, skips), ""
    for length, token_id in enumerate(token_ids, 1):
        text += decoder.push(token_id)
        assert text == certain(tokenizer, token_ids[:length], skips)
    text += decoder.finish()
    assert text == tokenizer.decode(token_ids, skip_special_tokens=skips)
    assert decoder.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
@given(context=st.lists(st.integers(0, 2**20), min_size=1, max_size=6), numbers=NUMBERS)
@settings(max_examples=30)
def test_a_text_goes_on_after_its_context(kind: str, context: list[int], numbers: list[int]) -> None:
    """With the space that a text of its own would drop, and with the rest of a character that the context began."""
    tokenizer = vocabulary(kind)
    before, token_ids = tokens_of(tokenizer, context), tokens_of(tokenizer, numbers)
    decoder = StreamDecoder(tokenizer, context=before)
    pieces = [decoder.push(token_id) for token_id in token_ids]
    whole = certain(tokenizer, before, skips=False) + "".join(pieces) + decoder.finish()
    assert whole == tokenizer.decode([*before, *token_ids])


@pytest.mark.parametrize("kind", ["shipped", "byte_level", "llama", "gemma"])
@given(text=st.text(max_size=60))
@settings(max_examples=60)
def test_any_text_comes_whole_character_by_character(kind: str, text: str) -> None:
    """Encoded, streamed and put together it is the same text, and no U+FFFD appears that was not in it."""
    tokenizer = vocabulary(kind)
    token_ids = tokenizer.encode(text, parse_special_tokens=False)
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in token_ids]
    assert decoder.finish() == ""
    assert "".join(pieces) == tokenizer.decode(token_ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_half_a_character_is_flushed_at_the_end(kind: str) -> None:
    """Held back while it may become whole, then U+FFFD."""
    tokenizer = vocabulary(kind)
    token_ids = tokenizer.encode("b\U0001f980")[:-1]
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in token_ids]
    assert "".join(pieces) == "b"
    assert set(decoder.finish()) == {"\ufffd"}


def test_text_before_half_a_character_is_not_held_back() -> None:
    """What is broken for good is said at once, what may become whole is not."""
    tokenizer = vocabulary("byte_level")
    lead, *_, last = tokenizer.encode("\U0001f916")
    decoder = StreamDecoder(tokenizer)
    assert (decoder.push(last), decoder.push(lead)) == ("\ufffd", "")
    assert decoder.push(tokenizer.encode("x")[0]) == "\ufffdx"


def test_a_token_beyond_the_vocabulary_adds_nothing() -> None:
    """A model may have more rows than its tokenizer has tokens."""
    tokenizer = vocabulary("byte_level")
    decoder = StreamDecoder(tokenizer)
    lead, *rest = tokenizer.encode("\U0001f916")
    pieces = [decoder.push(token_id) for token_id in (lead, tokenizer.vocab_size, 2**31, *rest)]
    assert ("".join(pieces), pieces[-1]) == ("\U0001f916", "\U0001f916")


def test_the_window_stays_short() -> None:
    """A token costs the same after a hundred thousand others."""
    tokenizer = vocabulary("llama")
    decoder = StreamDecoder(tokenizer)
    for token_id in tokenizer.encode("a stop \U0001f980" * 1000):
        decoder.push(token_id)
        assert len(decoder._window) <= 24


def test_a_broken_byte_spoils_no_whole_character() -> None:
    """Among byte-fallback tokens in a row what was shown stays shown; a run that is all broken is as elsewhere."""
    tokenizer = vocabulary("gemma")
    byte = {value: 1 + value for value in range(256)}
    assert tokenizer.decode([byte[0x41], byte[0xE2]]) == "A\ufffd"
    assert tokenizer.decode([byte[0xE2], byte[0x98]]) == "\ufffd\ufffd"
    assert tokenizer.decode([byte[0xFF], byte[0xE2], byte[0x98], byte[0x83], byte[0x80]]) == "\ufffd\u2603\ufffd"


@given(numbers=NUMBERS, stop=st.sampled_from(["stop", "<|END|>", "<|end|>", "st", "\u65e5"]), skips=st.booleans())
@settings(max_examples=100)
def test_special_tokens_are_skipped_by_their_ids_everywhere(numbers: list[int], stop: str, skips: bool) -> None:
    """Also if the normalizer changes their text: the whole text, the stream and the search for stops have one rule."""
    tokenizer = vocabulary("normalized")
    special = [token(tokenizer, text) for text in ("<|END|>", "<|TURN|>", "<s>", "</s>")]
    token_ids = [part for number in numbers for part in (number % tokenizer.vocab_size, special[number % len(special)])]
    expected = tokenizer.decode(token_ids, skip_special_tokens=skips)
    if skips:
        assert expected == tokenizer.decode([one for one in token_ids if one not in special])
    decoder = StreamDecoder(tokenizer, skips)
    assert "".join(map(decoder.push, token_ids)) + decoder.finish() == expected
    search = prepare_search(tokenizer, [stop], skips)()
    assert any(map(search.feed, token_ids)) == (stop in certain(tokenizer, token_ids, skips))
