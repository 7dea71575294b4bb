"""Tokens to text as they come, never half a character."""

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

    Invariant: the text of the context and the pieces so far, one after the other, are the text of the context and the
    tokens so far (``Tokenizer.decode`` of them), but for a character at its end that is not whole yet.

    A token's text depends on its neighbours: one character can be spread over several tokens, and many tokenizers drop
    a space at the beginning. So a window of tokens is decoded each time and what is new at its end handed out (the
    prefix and read offsets of vLLM's and text-generation-inference's detokenizers)::

        window   [c c c | t t t t t t t]        c = tokens whose text is out, kept as neighbours
        text      .............|......xx        handed out | new | not a whole character yet

    A window that has grown long begins anew with its last few tokens, so that a token costs a few microseconds whatever
    came before. Not for several threads at once.

    Args:
        tokenizer: Of the model.
        skip_special_tokens: Leave special tokens out.
        context: Tokens before the first one, of which the last few are used; their text is not handed out.
    """

    __slots__ = ("_num_out", "_skips", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._window = _last_shown(tokenizer, skip_special_tokens, context)
        self._num_out = len(self._certain_text()) if self._window else 0

    def push(self, token_id: int) -> str:
        """Take one more token and return the text that is certain now, often one word, possibly empty.

        A token that the tokenizer does not know, which a model with a larger vocabulary may draw, adds nothing.
        """
        for shown in self._tokenizer.shown((token_id,), self._skips):
            return self._push_shown(shown)
        return ""

    def finish(self) -> str:
        """Return what is left: U+FFFD for a character that never became whole. A second call returns nothing."""
        if not self._window:
            return ""
        text = self._tokenizer.text_of(self._window)
        piece = text[self._num_out :]
        self._num_out = len(text)
        return piece

    def _push_shown(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._certain_text()
        piece = text[self._num_out :]
        self._num_out = max(self._num_out, len(text))
        if len(self._window) >= _WINDOW:
            self._window = self._window[-_OVERLAP:]
            self._num_out = len(self._certain_text())
        return piece

    def _certain_text(self) -> str:
        """Return the window's text without the character it ends in the middle of."""
        text = self._tokenizer.text_of(self._window)
        if not text.endswith(_REPLACEMENT):
            return text
        return text[: len(text) - self._tokenizer.num_incomplete(self._window)]


def _last_shown(tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int]) -> list[int]:
    """Return the last few tokens of the context that have a text, looking back no further than a window."""
    return list(tokenizer.shown(context[-_WINDOW:], skip_special_tokens))[-_OVERLAP:]
