"""Find the text of special tokens in text that others have written."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, models, normalizers

from ferrule_server.model_files import name_of


class SpecialTokenFinder:
    """Finds texts that a tokenizer would turn into one of its special tokens; safe to share between threads.

    The search is that of ``tokenizers`` for added tokens, one automaton over all of them: its time is linear in the
    text, whatever the text and the tokens are, and other threads run meanwhile (1 MiB: 15 to 110 ms).

    Invariant: if a tokenizer makes a special token of a part of a text, that text has a match. Flags about the
    neighbours of a token are ignored, because a template may put any neighbour there.

    Args:
        tokenizer: The tokenizer. It is read and not kept.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        special = [token for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        self._searches = [_search(special, None)] if special else []
        normalized = [token for token in special if token.normalized]
        if normalized and tokenizer.normalizer is not None:
            self._searches.append(_search(normalized, tokenizer.normalizer))

    def find(self, text: str) -> str | None:
        """Return the special token whose text occurs first in a text, by a bounded name; None: there is none."""
        readable = text.encode(errors="replace").decode()
        for search in self._searches:
            (encoding,) = search.encode_batch_fast([readable], add_special_tokens=False)
            token_id = next(filter(None, encoding.ids), None)
            if token_id is not None:
                return name_of(search.id_to_token(token_id))
        return None


def _search(tokens: list[AddedToken], normalizer: normalizers.Normalizer | None) -> tokenizers.Tokenizer:
    """Return a tokenizer that makes 0 of all text but these tokens, which are normalized if there is a normalizer."""
    search = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    if normalizer is not None:
        search.normalizer = normalizer
    is_normalized = normalizer is not None
    search.add_special_tokens([AddedToken(token.content, normalized=is_normalized) for token in tokens])
    return search
