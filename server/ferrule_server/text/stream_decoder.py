"""Decode tokens one by one into text, never half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

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
