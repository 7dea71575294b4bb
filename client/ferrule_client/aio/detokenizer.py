"""Tokens to text, piece by piece, never half a character; made by ``AsyncClient.detokenizer``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from ferrule_client._public import publish

__all__ = ["AsyncDetokenizer"]

_REPLACEMENT = "\ufffd"
_WINDOW = 64
_OVERLAP = 8

DecodeText = Callable[[Sequence[int]], Awaitable[tuple[str, bool]]]


class AsyncDetokenizer:
    """Turns a growing list of tokens into a growing text.

    A token's text depends on its neighbours: one character can be spread over several tokens, and some tokenizers
    drop a space at the beginning. So a window of tokens is decoded as a whole each time, and what is new at its end
    is handed out::

        window   [c c c | t t t t t t t]        c = context, tokens whose text is out already
        text      .............|......          handed out | new

    While the window ends inside a character, nothing is handed out. When it has grown long, it starts over with its
    last few tokens as context, which keeps the cost of a token constant.

    Args:
        decode: Decodes tokens; tells also whether the last one ends inside a character.
        context: Tokens before the first one, of which the last few are used; their text is not handed out.
    """

    def __init__(self, decode: DecodeText, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-_OVERLAP:])
        self._num_out: int | None = None  # characters of the window's text that are out; None: not asked for yet

    async def begin(self) -> int:
        """Find out what the context says, which the first ``push`` does otherwise; return its length in characters."""
        if self._num_out is None:
            self._num_out = await self._length_of_window()
        return self._num_out

    async def push(self, token: int) -> str:
        """Take one more token and return the text that is certain now, often one word, possibly empty."""
        num_out = await self.begin()
        self._window.append(token)
        text, ends_mid_character = await self._decode(self._window)
        if ends_mid_character:
            return ""
        new = text[num_out:]
        self._num_out = len(text)
        if len(self._window) >= _WINDOW:
            self._window = self._window[-_OVERLAP:]
            self._num_out = await self._length_of_window()
        return new

    async def finish(self) -> str:
        """Return what was held back and is certain: all but the character that never got its end."""
        if not self._window:
            return ""
        num_out = await self.begin()
        text, ends_mid_character = await self._decode(self._window)
        certain = text.rstrip(_REPLACEMENT) if ends_mid_character else text
        self._num_out = max(num_out, len(certain))
        return certain[num_out:]

    async def _length_of_window(self) -> int:
        """Return how much of the window's text is out: all but a character it ends in the middle of."""
        if not self._window:
            return 0
        text, ends_mid_character = await self._decode(self._window)
        return len(text.rstrip(_REPLACEMENT) if ends_mid_character else text)


publish(globals(), ("AsyncDetokenizer",))
