"""Find the text of control tokens in text that others have written."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import tokenizers
from tokenizers import AddedToken, models, normalizers


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
        self._signs = {"&", *filter(_is_sign, "".join(token.content for token in tokens))}

    def found(self, text: str) -> Iterator[str]:
        """Yield the tokens whose text occurs in a text, by their exact text, as often as they occur."""
        readable = text.encode(errors="replace").decode()
        for search in self._searches:
            (encoding,) = search.encode_batch_fast([readable], add_special_tokens=False)
            yield from map(search.id_to_token, filter(None, encoding.ids))

    def signs_in(self, text: str, found: Collection[str]) -> set[str]:
        """Return the characters of a text that distinguish tokens from words; ``found`` is what :meth:`found` yielded.

        These are the visible characters of tokens that are no letters, digits or ``_``; all such characters if others
        may be normalized to them; ``&``, of which filters of HTML make others; and the first of a token without one.
        """
        signs = self._signs.union(token[:1] for token in found if not any(map(_is_sign, token)))
        return {one for one in {*text} if one in signs or (len(self._searches) > 1 and _is_sign(one))}


def _is_sign(character: str) -> bool:
    return not (character.isalnum() or character.isspace() or character == "_")


def _search(tokens: Collection[AddedToken], normalizer: normalizers.Normalizer | None) -> tokenizers.Tokenizer:
    """Return a tokenizer that makes 0 of all text but these tokens, which are normalized if there is a normalizer."""
    search = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    if normalizer is not None:
        search.normalizer = normalizer
    is_normalized = normalizer is not None
    search.add_special_tokens([AddedToken(token.content, normalized=is_normalized) for token in tokens])
    return search
