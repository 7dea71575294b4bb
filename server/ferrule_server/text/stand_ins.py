"""Render a conversation in which the text of control tokens stays text.

The text of a control token in a conversation is replaced by a *stand-in*: letters that nobody can know in advance. The
beginning of such a text at the end of a string is replaced too, because the next string could complete it. So all
control tokens in the rendered text are those of the template. They are spelled in another way, in which no author can
write them, the original text is put in place of the stand-ins, and the whole is turned into tokens at once::

    content       a<|im_end|>b
    with          akdjfb
    rendered      <|im_start|>user akdjfb<|im_end|>
    respelled     [17]user akdjfb[18]
    filled        [17]user a<|im_end|>b[18]

To encode the pieces one by one would be simpler, but many tokenizers put a space before each of them.

A template can do anything with a text: cut it, change its letters, count them. So the conversation is also rendered as
it is, and the filled text must be equal to that; otherwise the conversation is refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ferrule_server.errors import InvalidRequest
from ferrule_server.model_files import name_of
from ferrule_server.text.chat_template import ChatTemplate, Conversation

if TYPE_CHECKING:
    from ferrule_server.text.tokenizer import Tokenizer

_SECRET_BYTES: Final = 12
_LETTERS: Final = str.maketrans("0123456789", "ghijklmnop")


def render_as_text(tokenizer: Tokenizer, template: ChatTemplate, conversation: Conversation) -> tuple[str, list[int]]:
    """Return the rendered text and its token ids, in which all control tokens are those of the template.

    Raises:
        InvalidRequest: The template refuses the conversation, or does not keep the text of a control token as it is.
        OSError: The system cannot start a process for the rendering.
    """
    parts = [conversation.messages, conversation.tools, conversation.variables]
    stand_ins = _StandIns(tokenizer.control_texts("\n".join(strings_in(parts))), tokenizer.begun_control)
    try:
        messages, tools, variables = masked = stand_ins.put_into(parts)
    except RecursionError:
        raise InvalidRequest("messages", "are nested too deeply") from None
    if stand_ins.pieces and (others := tokenizer.control_texts("\n".join(strings_in(masked)))):
        raise _refusal(others[0], "in a spelling that only the tokenizer turns into it; remove it")
    text = template.render(conversation)
    if not stand_ins.replaced:
        return text, tokenizer.encode(text)
    frame = template.render(replace(conversation, messages=messages, tools=tools, variables=variables))
    if stand_ins.fill(frame) != text:
        raise _refusal(min(stand_ins.replaced), "and the chat template changes, cuts or measures this text; remove it")
    return text, tokenizer.encode_framed(frame, stand_ins.fill)


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
    """The stand-ins in one conversation; no two texts have the same.

    Args:
        pieces: Texts to replace wherever they occur; they may repeat.
        begun_at_end: Returns the number of characters to replace at the end of a string.

    Attributes:
        pieces: These texts, the longest first.
        replaced: The stand-ins by the texts that they replace.
    """

    def __init__(self, pieces: Iterable[str], begun_at_end: Callable[[str], int]) -> None:
        self._secret = secrets.token_hex(_SECRET_BYTES).translate(_LETTERS)
        self._begun_at_end = begun_at_end
        self.pieces = sorted(set(pieces), key=len, reverse=True)
        self.replaced: dict[str, str] = {}

    def put_into(self, value: Any) -> Any:
        """Return a value of JSON with stand-ins. One call a level: it may be nested deeply."""
        if isinstance(value, str):
            return self._put_into_text(value)
        if isinstance(value, list):
            return list(map(self.put_into, value))
        if isinstance(value, dict):
            return dict(zip(map(self._put_into_text, value), map(self.put_into, value.values()), strict=True))
        return value

    def fill(self, text: str) -> str:
        """Return a text with the replaced texts in the places of their stand-ins."""
        texts = {stand_in: replaced for replaced, stand_in in self.replaced.items()}
        return re.sub(f"{self._secret}[a-p]{{4}}", lambda found: texts.get(found[0], ""), text)

    def _put_into_text(self, text: str) -> str:
        length = len(text) - self._begun_at_end(text)
        text, end = text[:length], text[length:]
        for piece in self.pieces:
            if piece in text:
                text = text.replace(piece, self._stand_in(piece))
        return text + self._stand_in(end) if end else text

    def _stand_in(self, text: str) -> str:
        number = f"{len(self.replaced):04x}".translate(_LETTERS)
        return self.replaced.setdefault(text, self._secret + number)


def _refusal(token: str, why: str) -> InvalidRequest:
    name = name_of(token)
    return InvalidRequest("messages", f"contain the text of the control token {name}, {why}", special_token=name)
