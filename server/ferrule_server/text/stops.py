"""Find stop strings in a text that arrives token by token, also across the borders of tokens.

The text is searched as UTF-8. The bytes of a character never begin within another character, so a string occurs in the
bytes exactly where it occurs in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ferrule_server.errors import InvalidRequest
from ferrule_server.suffixes import Suffixes
from ferrule_server.text.stream_decoder import StreamDecoder

if TYPE_CHECKING:
    from ferrule_server.text.tokenizer import Tokenizer


class StopStrings:
    """A set of strings; a call returns a search for them in one text.

    The set is prepared once, in time linear in the length of the strings, and all searches share it.

    Args:
        tokenizer: The tokenizer of the model.
        strings: At least one.
        skip_special_tokens: Leave special tokens out of the text that is searched.
        context: Tokens before the text. They decide how it begins (a leading space), but they are not searched.

    Raises:
        InvalidRequest: A string is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        strings: Sequence[str],
        skip_special_tokens: bool = False,
        context: Sequence[int] = (),
    ) -> None:
        for i, string in enumerate(strings):
            if not string:
                raise InvalidRequest(f"stop_strings[{i}]", "is empty; it would stop before the first token")
        self._tokenizer = tokenizer
        self._strings = Suffixes(string.encode() for string in strings)
        self._skips = skip_special_tokens
        self._context = context

    def __call__(self) -> TextSearch:
        """Return a search that has seen no token."""
        return TextSearch(StreamDecoder(self._tokenizer, self._skips, self._context), self._strings)


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
