"""Decide which tokens of a model are control tokens: the tokens that text of others must never become.

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
from tokenizers import AddedToken


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
