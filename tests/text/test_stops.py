"""Stop strings: found at the first token after which one of them is in the text of the tokens so far."""

from __future__ import annotations

import sys
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ferrule_server.engine.jobs import StopRules, TextStop
from ferrule_server.text.drawn_text import BranchText, StopCut, StreamDecoder, prepare_search
from ferrule_server.text.tokenizer import Tokenizer
from tests.text.test_stream_decoder import certain, tokens_of
from tests.text.vocabularies import KINDS, token, vocabulary

NUMBERS = st.lists(st.integers(0, 2**20), min_size=1, max_size=80)


def first_stop(stop: TextStop, token_ids: list[int]) -> int | None:
    """Return how many tokens it takes until ``stop`` is found."""
    return next((length for length, token_id in enumerate(token_ids, 1) if stop.feed(token_id)), None)


def by_definition(tokenizer: Tokenizer, strings: list[str], token_ids: list[int], skips: bool) -> int | None:
    """Return the same by decoding all tokens each time."""
    for length in range(1, len(token_ids) + 1):
        text = certain(tokenizer, token_ids[:length], skips)
        if any(string in text for string in strings):
            return length
    return None


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), numbers=NUMBERS, skips=st.booleans())
@settings(max_examples=80)
def test_found_at_the_first_token_that_completes_one(
    kind: str, data: st.DataObject, numbers: list[int], skips: bool
) -> None:
    """Any tokens, any pieces of their text as the strings, and strings that never come."""
    tokenizer = vocabulary(kind)
    token_ids = tokens_of(tokenizer, numbers)
    text = tokenizer.decode(token_ids, skip_special_tokens=skips)
    assume(text)
    strings = [_piece(data, text) for _ in range(data.draw(st.integers(1, 3)))] + ["never\u2603so"]
    found = first_stop(prepare_search(tokenizer, strings, skips)(), token_ids)
    assert found == by_definition(tokenizer, strings, token_ids, skips)


def _piece(data: st.DataObject, text: str) -> str:
    start = data.draw(st.integers(0, len(text) - 1))
    return text[start : start + data.draw(st.integers(1, 12))]


@pytest.mark.parametrize("kind", ["shipped", "byte_level", "llama", "gemma"])
@pytest.mark.parametrize("string", ["stop", "\n\n", "\U0001f980!", "\u65e5\u672c\u8a9e", "</s>", "p \u00e9"])
def test_a_string_across_tokens_is_found_in_encoded_text(kind: str, string: str) -> None:
    """Beginning and ending anywhere within tokens."""
    tokenizer = vocabulary(kind)
    token_ids = tokenizer.encode(f"def f(x): no{string}pe", parse_special_tokens=False)
    found = first_stop(prepare_search(tokenizer, [string])(), token_ids)
    assert found is not None
    assert found == by_definition(tokenizer, [string], token_ids, skips=False)
    assert string in tokenizer.decode(token_ids[:found])
    assert string not in tokenizer.decode(token_ids[: found - 1])


def test_special_tokens_are_searched_unless_they_are_skipped() -> None:
    """They are part of the text as they are written."""
    tokenizer = vocabulary("byte_level")
    token_ids = [*tokenizer.encode("a"), *tokenizer.encode("</s>"), *tokenizer.encode("b")]
    assert first_stop(prepare_search(tokenizer, ["</s>"])(), token_ids) == 2
    assert first_stop(prepare_search(tokenizer, ["</s>"], skip_special_tokens=True)(), token_ids) is None
    assert first_stop(prepare_search(tokenizer, ["ab"], skip_special_tokens=True)(), token_ids) == 3


def test_the_context_is_not_searched_but_begins_the_text() -> None:
    """Its words stop nothing; a space after it counts."""
    tokenizer = vocabulary("llama")
    context, word = [token(tokenizer, "\u2581stop")], token(tokenizer, "\u2581a")
    assert not prepare_search(tokenizer, ["stop"], context=context)().feed(word)
    assert not prepare_search(tokenizer, ["p a"], context=context)().feed(word)
    assert prepare_search(tokenizer, [" a"], context=context)().feed(word)
    assert not prepare_search(tokenizer, [" a"])().feed(word)


def test_each_branch_searches_its_own_text() -> None:
    """What one has seen another has not; the engine's rules take the maker as it is."""
    tokenizer = vocabulary("byte_level")
    rules = StopRules(new_text_stop=prepare_search(tokenizer, ["ab"]))
    assert rules.new_text_stop is not None
    one, other = rules.new_text_stop(), rules.new_text_stop()
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    assert not one.feed(a)
    assert not other.feed(b)
    assert one.feed(b)


def test_an_empty_string_is_refused() -> None:
    """It would be found in nothing."""
    with pytest.raises(ValueError, match="empty"):
        prepare_search(vocabulary("byte_level"), ["x", ""])


def test_memory_stays_with_the_longest_string() -> None:
    """However long the text gets."""
    tokenizer = vocabulary("byte_level")
    search = prepare_search(tokenizer, ["x" * 40, "never"])()
    for token_id in tokenizer.encode("return " * 4000):
        assert not search.feed(token_id)
    assert sys.getsizeof(search._tail) < 200
    assert len(search._tail) == 39


def text_before(strings: list[str], text: str) -> str:
    """Return the text before the stop that ends first, by the definition; all of it if there is none."""
    for end in range(1, len(text) + 1):
        if ending := [string for string in strings if text[:end].endswith(string)]:
            return text[: end - max(map(len, ending))]
    return text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), numbers=NUMBERS, skips=st.booleans(), per_frame=st.integers(1, 5))
@settings(max_examples=80)
def test_a_branch_ends_before_its_stop(
    kind: str, data: st.DataObject, numbers: list[int], skips: bool, per_frame: int
) -> None:
    """However many tokens a frame has, nothing of a stop is returned, and no more waits than what may begin one."""
    tokenizer = vocabulary(kind)
    token_ids = tokens_of(tokenizer, numbers)
    whole = tokenizer.decode(token_ids, skip_special_tokens=skips)
    assume(whole)
    strings = [_piece(data, whole) for _ in range(data.draw(st.integers(1, 4)))] + ["never\u2603so"]
    length = first_stop(prepare_search(tokenizer, strings, skips)(), token_ids)
    drawn = token_ids[:length]
    so_far = [certain(tokenizer, drawn[:num], skips) for num in range(len(drawn) + 1)]
    expected = (
        tokenizer.decode(drawn, skip_special_tokens=skips) if length is None else text_before(strings, so_far[-1])
    )
    text, pieces = BranchText(StreamDecoder(tokenizer, skips), StopCut(strings)), ""
    for num, token_id in enumerate(drawn, 1):
        text.push(token_id)
        if num % per_frame == 0 and num < len(drawn):
            pieces += text.take()
            assert expected.startswith(pieces)
            held = so_far[num][len(pieces) :]
            assert held == "" or any(len(held) < len(one) and one.startswith(held) for one in strings)
    assert pieces + text.end(is_stopped=length is not None) == expected


@given(strings=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1), texts=st.lists(st.text("abc", max_size=3)))
def test_text_that_may_begin_a_stop_waits(strings: list[str], texts: list[str]) -> None:
    """Stops that overlap themselves and each other: the longest end that begins one, and nothing before it."""
    cut, held = StopCut(strings), ""
    for text in texts:
        held += text
        if any(string in held for string in strings):
            assert cut.end(held) == len(text_before(strings, held))
            break
        num = cut.num_certain(held)
        assert num == next(i for i in range(len(held) + 1) if any(one.startswith(held[i:]) for one in strings))
        held = held[num:]


def test_without_stops_nothing_waits() -> None:
    """Nor where the text of stops is wanted."""
    tokenizer = vocabulary("byte_level")
    text = BranchText(StreamDecoder(tokenizer))
    for token_id in tokenizer.encode("a stop"):
        text.push(token_id)
    assert text.take() == "a stop"
    assert text.end(is_stopped=True) == ""


def test_long_stops_cost_little() -> None:
    """64 stops of a kibibyte that differ at their ends, over a text that begins all of them at every place."""
    cut, held = StopCut(["a" * 1000 + f"{number:024}" for number in range(64)]), ""
    start = time.process_time()
    for _ in range(2000):
        held = (held + "aaaa")[cut.num_certain(held + "aaaa") :]
    assert len(held) == 1000
    assert time.process_time() - start < 2
