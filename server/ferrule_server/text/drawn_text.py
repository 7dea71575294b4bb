"""The text of tokens that are drawn one by one, never half a character, and the stop strings that end it.

Stop strings are found across the borders of tokens too. The text is searched as UTF-8: the bytes of a character never
begin within another character, so a string occurs in the bytes exactly where it occurs in the text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

from ferrule_server.suffixes import Suffixes

if TYPE_CHECKING:
    from ferrule_server.text.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"
_WINDOW: Final = 24
_OVERLAP: Final = 6


class StreamDecoder:
    """Turns tokens that come one by one into pieces of text.

    Invariant: the text of the context plus the pieces so far equals ``Tokenizer.decode`` of the context and the tokens
    so far, except for an incomplete character at the end.

    The text of a token depends on its neighbours: a character can be spread over several tokens, and many tokenizers
    drop a space at the beginning. So a window of tokens is decoded each time, and the new text at its end is returned
    (the prefix and read offsets of the detokenizers of vLLM and text-generation-inference)::

        window   [c c c | t t t t t t t]        c = tokens whose text was returned, kept as neighbours
        text      .............|......xx        returned | new | not a complete character yet

    A long window is cut to its last few tokens, so that a token costs a few microseconds at any position. An instance
    is not safe to share between threads.

    Args:
        tokenizer: The tokenizer of the model.
        skip_special_tokens: Leave special tokens out.
        context: Tokens before the first one. The last few are used as neighbours; their text is not returned.
    """

    __slots__ = ("_num_out", "_skips", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._window = list(tokenizer.shown(context[-_WINDOW:], skip_special_tokens))[-_OVERLAP:]
        self._num_out = len(self._certain_text()) if self._window else 0

    def push(self, token_id: int) -> str:
        """Take one more token and return the text that is now certain, often one word, possibly empty.

        A token that the tokenizer does not know adds nothing; a model with a larger vocabulary may draw one.
        """
        shown = [*self._tokenizer.shown((token_id,), self._skips)]
        if not shown:
            return ""
        self._window += shown
        text = self._certain_text()
        piece = text[self._num_out :]
        self._num_out = max(self._num_out, len(text))
        if len(self._window) >= _WINDOW:
            self._window = self._window[-_OVERLAP:]
            self._num_out = len(self._certain_text())
        return piece

    def finish(self) -> str:
        """Return the rest: U+FFFD for a character that stayed incomplete. A second call returns nothing."""
        if not self._window:
            return ""
        text = self._tokenizer.text_of(self._window)
        piece = text[self._num_out :]
        self._num_out = len(text)
        return piece

    def _certain_text(self) -> str:
        """Return the text of the window without an incomplete character at its end."""
        text = self._tokenizer.text_of(self._window)
        if not text.endswith(_REPLACEMENT):
            return text
        return text[: len(text) - self._tokenizer.num_incomplete(self._window)]


def prepare_search(
    tokenizer: Tokenizer, strings: Sequence[str], skip_special_tokens: bool = False, context: Sequence[int] = ()
) -> Callable[[], TextSearch]:
    """Return a function that begins a search for strings in one text.

    The strings are prepared once, in time linear in their length, and all searches share them.

    Args:
        tokenizer: The tokenizer of the model.
        strings: At least one, none of them empty.
        skip_special_tokens: Leave special tokens out of the text that is searched.
        context: Tokens before the text. They decide how it begins (a leading space), but they are not searched.

    Raises:
        ValueError: A string is empty. It would be found nowhere, although every text contains it.
    """
    if "" in strings:
        raise ValueError("a stop string is empty")
    prepared = Suffixes(string.encode() for string in strings)
    return lambda: TextSearch(StreamDecoder(tokenizer, skip_special_tokens, context), prepared)


class TextSearch:
    """Searches the text of tokens for strings; implements ``engine.jobs.TextStop``.

    A byte of text costs at most one binary search in the strings.

    Invariant: ``_tail`` is the end of the text so far, newest byte first, without an incomplete character. It is one
    byte shorter than the longest string, because the rest of a match comes with later tokens.

    Args:
        decoder: A decoder that has seen no token of the text.
        strings: At least one, in UTF-8.
    """

    __slots__ = ("_decoder", "_strings", "_tail", "_tail_length")

    def __init__(self, decoder: StreamDecoder, strings: Suffixes) -> None:
        self._decoder = decoder
        self._strings = strings
        self._tail = b""
        self._tail_length = max(strings.longest - 1, 0)

    def feed(self, token_id: int) -> bool:
        """Take the next token and return whether it completes one of the strings."""
        piece = self._decoder.push(token_id)
        if not piece:
            return False
        added = piece.encode()[::-1]
        text = added + self._tail
        self._tail = text[: self._tail_length]
        return self._strings.is_within(text, len(added))


class StopCut:
    """Decides how much of a text that grows is certain to come before a stop string; it has no state of its own.

    Args:
        strings: The stop strings, none of them empty.
    """

    def __init__(self, strings: Collection[str]) -> None:
        self._sorted = sorted({*strings})
        self._firsts = frozenset(string[0] for string in self._sorted)
        self._longest = max(map(len, self._sorted), default=0)

    def num_certain(self, text: str) -> int:
        """Return how many characters of a text without a stop string cannot be part of one, whatever follows."""
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        return next((start for start in starts if self._may_begin(text, start)), len(text))

    def end(self, text: str) -> int | None:
        """Return where the text ends; None: it has no stop string.

        The stop string that ends first counts, however the text was split into tokens. Of several that end together it
        is the longest, because the others leave a part of it.
        """
        found = ((start + len(one), start) for one in self._sorted if (start := text.find(one)) >= 0)
        return min(found, default=(0, None))[1]

    def _may_begin(self, text: str, start: int) -> bool:
        """Return whether a string begins with the rest of a text: such strings follow it in their order."""
        if text[start] not in self._firsts:
            return False
        rest = text[start:]
        place = bisect_left(self._sorted, rest)
        return place < len(self._sorted) and self._sorted[place].startswith(rest)


class BranchText:
    """The text of a branch, piece by piece, without the stop string that ends it.

    Invariant: what was returned is a beginning of the branch's whole text, and no stop string overlaps it.

    Args:
        decoder: A decoder that has seen no token of the branch.
        cut: Finds where the text ends; None: all of it is returned.
    """

    __slots__ = ("_cut", "_decoder", "_held")

    def __init__(self, decoder: StreamDecoder, cut: StopCut | None = None) -> None:
        self._decoder = decoder
        self._cut = cut
        self._held = ""

    def push(self, token_id: int) -> None:
        """Take the next token."""
        self._held += self._decoder.push(token_id)

    def take(self) -> str:
        """Return the text that is certain now, possibly empty; the branch continues."""
        num = len(self._held) if self._cut is None else self._cut.num_certain(self._held)
        piece, self._held = self._held[:num], self._held[num:]
        return piece

    def end(self, *, is_stopped: bool) -> str:
        """Return the rest of the text, up to a stop string if the branch ``is_stopped`` by one, or by tokens."""
        stop = self._cut.end(self._held) if self._cut is not None and is_stopped else None
        return self._held + self._decoder.finish() if stop is None else self._held[:stop]
