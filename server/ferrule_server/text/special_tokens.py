"""Find the text of control tokens in text that others have written."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from typing import Final

import tokenizers
from tokenizers import AddedToken, models, normalizers

_MAX_BEGINNING: Final = 256


class SpecialTokenFinder:
    """Finds texts that a tokenizer would turn into one of some added tokens; safe to share between threads.

    The search is that of ``tokenizers`` for added tokens, one automaton over all of them: its time is linear in the
    text, whatever the text and the tokens are, and other threads run meanwhile (1 MiB: 15 to 110 ms).

    Invariant: if a tokenizer makes one of the tokens of a part of a text, that text has a match. Flags about the
    neighbours of a token are ignored, because a template may put any neighbour there.

    Args:
        tokens: The tokens.
        normalizer: The normalizer of the tokenizer.
    """

    def __init__(self, tokens: Collection[AddedToken], normalizer: normalizers.Normalizer | None) -> None:
        self._searches = [_search(tokens, None)] if tokens else []
        normalized = [token for token in tokens if token.normalized]
        if normalized and normalizer is not None:
            self._searches.append(_search(normalized, normalizer))
        self._signs = sorted(token.content for token in tokens if not token.content[:1].isalnum())
        self._longest = min(_MAX_BEGINNING, max(map(len, self._signs), default=1))

    def found(self, text: str) -> Iterator[str]:
        """Yield the tokens whose text occurs in a text, by their exact text, as often as they occur."""
        readable = text.encode(errors="replace").decode()
        for search in self._searches:
            (encoding,) = search.encode_batch_fast([readable], add_special_tokens=False)
            yield from map(search.id_to_token, filter(None, encoding.ids))

    def begun_at_end(self, text: str) -> int:
        """Return how many characters at the end of a text begin a token, without being one; longer ones first.

        Tokens that begin with a letter or digit are left out, because most words would begin one.
        """
        for length in range(min(len(text), self._longest - 1), 0, -1):
            place = bisect_left(self._signs, end := text[-length:])
            if place < len(self._signs) and self._signs[place].startswith(end):
                return length
        return 0


def _search(tokens: Collection[AddedToken], normalizer: normalizers.Normalizer | None) -> tokenizers.Tokenizer:
    """Return a tokenizer that makes 0 of all text but these tokens, which are normalized if there is a normalizer."""
    search = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    if normalizer is not None:
        search.normalizer = normalizer
    is_normalized = normalizer is not None
    search.add_special_tokens([AddedToken(token.content, normalized=is_normalized) for token in tokens])
    return search
