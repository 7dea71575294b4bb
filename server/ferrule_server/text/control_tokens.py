"""Control tokens, which text of others must never become: decide which tokens they are, and find their text in it.

Control tokens are *added* tokens of the tokenizer: those marked special; begin, end, padding and stop tokens that the
files of the model name; and those that the chat template writes around messages. DeepSeek-R1-Distill, Yi and Dolphin
do not mark the tokens that end a turn as special.

A template may also write what is not a sign between messages, and what anybody may write. So these stay text, unless
they are marked special:

* a token of spaces, and a token that is a word or a punctuation mark: Gemma has a token for each run of newlines;
* a pair of tokens, such as ``<think>`` and ``</think>``, that encloses no message. Some templates write an empty pair
  into each turn of the assistant, or the closing token alone. ``[INST]`` and ``[/INST]`` enclose a message.

A named token that is not an added token is a control token if it is a sign, such as ``</s>`` in a vocabulary; otherwise
it is an ordinary word, which any text may contain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, models, normalizers


def control_tokens(
    tokenizer: tokenizers.Tokenizer, named: Collection[int | str], renderings: Iterable[Sequence[str]]
) -> dict[int, AddedToken]:
    """Return the control tokens of a model by id.

    Args:
        tokenizer: Its tokenizer, which is only read.
        named: Begin, end, padding and stop tokens that its files name, by id or text.
        renderings: What its chat templates write around messages: for each, the texts before, between and after them.
    """
    added = tokenizer.get_added_tokens_decoder()
    signs = {token_id for gaps in renderings for token_id in _markers(tokenizer, added, gaps)}.union(named)
    found = {i: token for i, token in added.items() if token.special or _is_in(signs, i, token.content)}
    words = {i: word for word, i in tokenizer.get_vocab().items() if i not in added and _is_in(named, i, word)}
    return found | {i: AddedToken(word, normalized=False) for i, word in words.items() if _is_sign(word)}


def _is_in(signs: Collection[int | str], token_id: int, content: str) -> bool:
    return not content.isspace() and (token_id in signs or content in signs)


def _markers(tokenizer: tokenizers.Tokenizer, added: Mapping[int, AddedToken], gaps: Sequence[str]) -> Iterator[int]:
    """Yield the added tokens in the gaps that mark where a message begins or ends."""
    written = [{*tokenizer.encode(gap, add_special_tokens=False).ids} & added.keys() for gap in gaps]
    pairs = _pairs({token.content: token_id for token_id, token in added.items()})
    for token_id in set().union(*written):
        opening, closing = pairs.get(token_id, (None, None))
        opened = [i for i, ids in enumerate(written) if opening in ids and closing not in ids]
        closed = [i for i, ids in enumerate(written) if closing in ids and opening not in ids]
        is_around_messages = token_id not in pairs or (opened and closed and opened[0] < closed[-1])
        if is_around_messages and _is_sign(added[token_id].content):
            yield token_id


def _pairs(ids: Mapping[str, int]) -> dict[int, tuple[int, int]]:
    """Return the opening and the closing token of each token of a pair, whose texts differ by one slash."""
    pairs = {}
    for content, closing in ids.items():
        opening = ids.get(content.replace("/", "", 1), closing)
        if opening != closing:
            pairs[opening] = pairs[closing] = (opening, closing)
    return pairs


def _is_sign(content: str) -> bool:
    """Return whether a text has letters or digits, and other visible characters too."""
    visible = "".join(content.replace("\u2581", " ").split())
    return not visible.isalnum() and any(map(str.isalnum, visible))


class ControlTokenFinder:
    """Finds texts that a tokenizer would turn into control tokens; safe to share between threads.

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
        self._signs = {"&", *filter(_is_visible_sign, "".join(token.content for token in tokens))}

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
        signs = self._signs.union(token[:1] for token in found if not any(map(_is_visible_sign, token)))
        return {one for one in {*text} if one in signs or (len(self._searches) > 1 and _is_visible_sign(one))}


def _is_visible_sign(character: str) -> bool:
    return not (character.isalnum() or character.isspace() or character == "_")


def _search(tokens: Collection[AddedToken], normalizer: normalizers.Normalizer | None) -> tokenizers.Tokenizer:
    """Return a tokenizer that makes 0 of all text but these tokens, which are normalized if there is a normalizer."""
    search = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    if normalizer is not None:
        search.normalizer = normalizer
    is_normalized = normalizer is not None
    search.add_special_tokens([AddedToken(token.content, normalized=is_normalized) for token in tokens])
    return search
