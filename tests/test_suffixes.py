"""Suffix sets: they say what a plain search says, at a cost that no set of strings can raise."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_server.engine.generation.stops import StopCheck
from ferrule_server.engine.jobs import Finish, StopRules
from ferrule_server.suffixes import Suffixes
from ferrule_server.text.drawn_text import StreamDecoder, TextSearch

ALPHABET = "ab\u00e9\u65e5\U0001f980"
WORDS = st.text(ALPHABET, min_size=1, max_size=6)
PIECES = st.lists(st.text(ALPHABET, max_size=5), max_size=30)
TOKENS = st.lists(st.integers(254, 257), max_size=40)
RUNS = st.lists(st.lists(st.integers(254, 257), min_size=1, max_size=6).map(tuple), min_size=1, max_size=5)


class Pieces:
    """A decoder that knows what comes."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        """Return the piece of that number."""
        return self._pieces[token_id]


def search_in(pieces: list[str], strings: list[str]) -> TextSearch:
    """Return a search whose token i brings piece i."""
    return TextSearch(cast("StreamDecoder", Pieces(pieces)), Suffixes(string.encode() for string in strings))


def first(count: int, found: Callable[[int], bool]) -> int | None:
    """Return the first of ``count`` numbers for which something is found."""
    return next((index for index in range(count) if found(index)), None)


@given(PIECES, st.lists(WORDS, min_size=1, max_size=8))
def test_strings_are_found_in_the_piece_that_completes_one(pieces: list[str], strings: list[str]) -> None:
    """Overlapping, nested, prefixes and suffixes of each other, several bytes a character, pieces without text."""
    search = search_in(pieces, strings)
    found = first(len(pieces), search.feed)
    assert found == first(len(pieces), lambda index: any(s in "".join(pieces[: index + 1]) for s in strings))


@given(TOKENS, RUNS)
def test_runs_of_tokens_are_found_at_their_last_token(tokens: list[int], runs: list[tuple[int, ...]]) -> None:
    """Also where the bytes of two tokens hold those of a third between them."""
    stops = StopCheck(StopRules(sequences=tuple(runs)))
    found = first(len(tokens), lambda index: stops.after(tokens[index]) is Finish.STOP_SEQUENCE)
    texts = [tuple(tokens[: index + 1]) for index in range(len(tokens))]
    assert found == first(len(tokens), lambda index: any(texts[index][-len(run) :] == run for run in runs))


def _worst_sets() -> dict[str, list[str]]:
    spaces = " " * 1024
    return {
        "quadratic in a plain search": [" " * (190 + i) + "b" + " " * (300 + i) for i in range(63)] + ["x" * 1024],
        "equal but for their beginnings": [chr(33 + i) + " " * 1023 for i in range(64)],
        "equal but for their middles": [f"{spaces[:i]}b{spaces[i + 1 :]}" for i in range(63)] + ["\u65e5" + spaces[3:]],
        "one within the other": ["b" + " " * (960 + i) for i in range(63)],
    }


@pytest.mark.parametrize("name", _worst_sets())
def test_no_set_of_strings_makes_a_token_expensive(name: str) -> None:
    """The largest sets that a request may bring, over the text that costs most: microseconds, not milliseconds."""
    search = search_in([" "], _worst_sets()[name])
    costs = []
    for _ in range(12):
        begun = thread_time()
        assert not any(search.feed(0) for _ in range(200))
        costs.append((thread_time() - begun) / 200)
    assert min(costs) < 50e-6


def test_no_set_of_sequences_makes_a_token_expensive() -> None:
    """The same for runs of tokens: 64 of 1024."""
    stops = StopCheck(StopRules(sequences=tuple((index + 1, *[0] * 1023) for index in range(64))))
    costs = []
    for _ in range(12):
        begun = thread_time()
        assert not any(stops.after(0) for _ in range(200))
        costs.append((thread_time() - begun) / 200)
    assert min(costs) < 50e-6
