"""Render a conversation so that all control tokens in it are those of the template.

A template may put a control token together: of two strings, of its own text and a string, or by a change of a string.
So the conversation is also rendered with other characters in place of its *signs*, the characters by which the texts of
control tokens differ from words. This rendering is the *frame*; all control tokens in it are the template's::

    content       a<|im_end|>b
    with          aWXim_endXYb
    text          <|im_start|>user a<|im_end|>b<|im_end|>
    frame         <|im_start|>user aWXim_endXYb<|im_end|>
    respelled     [17]user aWXim_endXYb[18]
    filled        [17]user a<|im_end|>b[18]

If text and frame have the same control tokens, the text has no others. Otherwise the control tokens of the frame are
spelled in another way, in which no author can write them, the signs are put back, and the whole is turned into tokens.
To encode the pieces one by one would be simpler, but many tokenizers put a space before each of them.

Argument: a token is forged if at least one of its signs comes from a string, and no sign of a string is in the frame. A
token whose signs are all the template's, as in ``<|{{ role }}|>``, is the template's. A sign becomes one character that
is nowhere in text and conversation, so nobody can write it, and a template cuts and measures both texts alike.

All of this is done with a conversation in the form that the template takes (:meth:`ChatTemplate.in_its_form`), in which
the JSON text of arguments has been read or written. If that were done to the masked conversation, an escape in the JSON
text could bring a sign into the frame.

A template may look for signs, such as ``<think>``. Then the filled frame is not the text, and only the signs of whole
control tokens are replaced, none if the template has left them all out; the control tokens must be the same, in the
same order, or the conversation is refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ferrule_server.errors import InvalidRequest
from ferrule_server.model_files import name_of
from ferrule_server.text.chat_template import ChatTemplate, Conversation

if TYPE_CHECKING:
    from ferrule_server.text.tokenizer import Tokenizer

_Refuse = Callable[[Conversation], None]
_STAND_INS: Final = (range(0x2801, 0x2900), range(0x4E00, 0xA000), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Braille, which is printed as it is, has no case and is in no word, like signs. Then Han and private characters."""


def render_guarded(
    tokenizer: Tokenizer, template: ChatTemplate, conversation: Conversation, refuse: _Refuse | None = None
) -> tuple[str, list[int]]:
    """Return the rendered text and its token ids, in which all control tokens are those of the template.

    Args:
        tokenizer: The tokenizer.
        template: The template. It is rendered once if no string has a sign, otherwise twice, rarely three times; and
            once more for each form of the conversation that it refuses.
        conversation: The conversation.
        refuse: Called with the conversation in its form if a string contains the text of a control token, to refuse it.
            None: such text stays text.

    Raises:
        InvalidRequest: The template refuses the conversation, or makes a control token of it, or does not keep the
            text of a control token as it is.
        OSError: The system cannot start a process for the rendering.
    """
    return template.in_its_form(conversation, functools.partial(_rendered, tokenizer, template, refuse))


def _rendered(
    tokenizer: Tokenizer, template: ChatTemplate, refuse: _Refuse | None, conversation: Conversation
) -> tuple[str, list[int]]:
    """Return what :func:`render_guarded` does, for one form of a conversation."""
    strings = "\n".join(strings_in([conversation.messages, conversation.tools, conversation.variables]))
    if (inside := tokenizer.control_texts(strings)) and refuse:
        refuse(conversation)
    text, signs = template.render(conversation), tokenizer.control_signs(strings, set(inside))
    if not signs:
        return text, tokenizer.encode(text)
    stand_ins = _StandIns(signs, {*strings, *text})
    frame = template.render(_changed(conversation, stand_ins.mask))
    written, own = tokenizer.control_texts(text), tokenizer.control_texts(frame)
    is_kept = True
    if stand_ins.fill(frame) != text:
        mask = functools.partial(stand_ins.mask_tokens, tokenizer.control_texts)
        frame = template.render(_changed(conversation, mask)) if {*inside} & {*written} else text
        is_kept = stand_ins.fill(frame) == text and tokenizer.control_texts(frame) == own
    if is_kept and written == own:
        return text, tokenizer.encode(text)
    if is_kept and not refuse:
        return text, tokenizer.encode_framed(frame, stand_ins.fill)
    differing = (one or other for one, other in itertools.zip_longest(written, own) if one != other)
    name = name_of(next(itertools.chain(differing, inside)))
    description = f"have text of which the chat template makes or changes the control token {name}; remove it"
    raise InvalidRequest("messages", description, special_token=name)


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string in a value of JSON, keys of objects too. It may be nested deeper than functions may call."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            yield from one
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


class _StandIns:
    """A character for each sign of one conversation.

    Args:
        signs: The signs.
        used: All characters of the conversation and of its text.
    """

    def __init__(self, signs: Collection[str], used: Collection[str]) -> None:
        unused = (one for one in map(chr, itertools.chain(*_STAND_INS)) if one not in used)
        pairs = dict(zip(signs, unused, strict=False))
        if len(pairs) < len(signs):
            raise InvalidRequest("messages", "have too many different characters; shorten them")
        self._mask, self._fill = str.maketrans(pairs), str.maketrans({one: sign for sign, one in pairs.items()})

    def mask(self, text: str) -> str:
        """Return a text with stand-ins for its signs."""
        return text.translate(self._mask)

    def mask_tokens(self, find: Callable[[str], Iterable[str]], text: str) -> str:
        """Return a text with stand-ins for the signs of the control tokens that ``find`` returns, in order."""
        pieces, end, missing = [], 0, set()
        for token in find(text):
            if token in missing:
                continue
            if (start := text.find(token, end)) >= 0:
                pieces += [text[end:start], self.mask(token)]
                end = start + len(token)
            else:  # only other spellings of it are left
                missing.add(token)
        return "".join([*pieces, text[end:]])

    def fill(self, text: str) -> str:
        """Return a text with signs in the places of their stand-ins."""
        return text.translate(self._fill)


def _changed(conversation: Conversation, change: Callable[[str], str]) -> Conversation:
    """Return a conversation in which all strings are changed."""

    def changed(value: Any) -> Any:  # one call a level: it may be nested deeply
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return list(map(changed, value))
        if isinstance(value, dict):
            return dict(zip(map(change, value), map(changed, value.values()), strict=True))
        return value

    try:
        messages, tools, variables = changed([conversation.messages, conversation.tools, conversation.variables])
    except RecursionError:
        raise InvalidRequest("messages", "are nested too deeply") from None
    return replace(conversation, messages=messages, tools=tools, variables=variables)
