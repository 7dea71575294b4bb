"""Find in which form a chat template takes messages, and bring messages into that form.

Clients write one conversation in several ways, and each template takes only some of them:

* a content that is a text, or a list of parts of which each is a text;
* the arguments of a tool call as an object, or as the text of one in JSON, which is OpenAI's form;
* a content that is null beside tool calls, or no content;
* instructions by the role ``developer``, or by ``system``.

The forms are found once for each template, from renderings of a few conversations of *stand-ins*, words that no
template contains. A form is usable if its stand-ins appear in the text. If both forms are, the text decides: Python's
notation of a list or an object in it, or JSON that is quoted once more, shows that the template takes the other one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""Renders messages; an empty text if the template refuses them."""
_Change = Callable[[Any], Any]

STAND_IN: Final = "qxjzvkwp"
_STRANGER: Final = "qxrole"
_KEY: Final = "qxkey"
_NAME: Final = "qxtool"
TOOLS: Final = [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"properties": {}}}}]
"""For templates that refuse conversations without tools."""
_CALL_ID: Final = "qxcall123"
"""Some templates refuse an id that is not nine letters and digits."""
_USER: Final[Message] = {"role": "user", "content": "word"}
_RESULT: Final[Message] = {"role": "tool", "content": "word", "tool_call_id": _CALL_ID, "name": _NAME}
_QUOTED_TYPE: Final = re.compile("""['"]type['"]""")


def without_null_content(message: Message) -> Message:
    """Return a message without its content if that is null."""
    return {key: value for key, value in message.items() if key != "content" or value is not None}


def with_empty_content(message: Message) -> Message:
    """Return a message with an empty text as its content if it has none, as templates need that add to it."""
    return {**message, "content": ""} if message.get("content") is None else message


def _same(value: Any) -> Any:
    return value


def _joined(content: Any) -> Any:
    """Return a list of texts as one text; anything else, also a list with a picture, as it is."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    texts = [part["text"] for part in content if part.get("type") == "text" and isinstance(part.get("text"), str)]
    return "".join(texts) if len(texts) == len(content) else content


def _wrapped(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _parsed(arguments: Any) -> Any:
    """Return the object of a JSON text; a text that is not one, as it is."""
    try:
        value = json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _written(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


@dataclass(frozen=True, slots=True)
class MessageForms:
    """The forms that one template takes. By default each message stays as it is.

    Attributes:
        contents: By role, what brings a content into its form; other roles have the form of ``user``.
        arguments: What brings the arguments of a tool call into their form.
        keeps_null: A null content is kept in a message without and with calls of tools. False: it is left out.
        knows_developer: The role ``developer`` is kept. False: it becomes ``system``.
    """

    contents: Mapping[str, _Change] = field(default_factory=dict)
    arguments: _Change = _same
    keeps_null: tuple[bool, bool] = (True, True)
    knows_developer: bool = True

    def adapted(self, message: Message) -> Message:
        """Return a message in these forms, with a null content as it is."""
        role = message["role"]
        role = "system" if role == "developer" and not self.knows_developer else role
        content, calls = message.get("content"), message.get("tool_calls")
        content = self.contents.get(role, self.contents.get("user", _same))(content)
        calls = list(map(self._call, calls)) if isinstance(calls, list) else calls
        changed = {"role": role, "content": content, "tool_calls": calls}
        return {**message, **{key: value for key, value in changed.items() if key in message}}

    def without_bad_null(self, message: Message) -> Message:
        """Return a message without its content if that is null and the template does not take it."""
        return message if self.keeps_null[bool(message.get("tool_calls"))] else without_null_content(message)

    def _call(self, call: Any) -> Any:
        """Return a tool call; its arguments are in its ``function``, or beside its name."""
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        function = {**function, "arguments": self.arguments(function["arguments"])}
        return {**call, "function": function} if "function" in call else function


def find_forms(render: Render) -> MessageForms:
    """Return the forms that a template takes, by about 20 renderings of stand-ins."""
    forms = _with_content(render, MessageForms(), "user", _USER)
    forms = _with_content(render, forms, "system", {"role": "system"}, _USER)
    forms = _with_content(render, forms, "assistant", _USER, {"role": "assistant"})
    forms = replace(forms, arguments=_argument_form(render, forms))
    forms = _with_content(render, forms, "tool", _USER, _called({}), _RESULT)
    nulls = {"role": "assistant", "content": None}, _called({}, None)
    keeps_null = _keeps_null(render, forms, nulls[0]), _keeps_null(render, forms, nulls[1])
    return replace(forms, keeps_null=keeps_null, knows_developer=_knows_developer(render, forms))


def _with_content(render: Render, forms: MessageForms, role: str, *messages: Message) -> MessageForms:
    """Return the forms with that of the contents of one role; it stays that of ``user`` if none is usable."""
    shown, num_types = [], []
    for content in (2 * STAND_IN, 2 * _wrapped(STAND_IN)):
        own = {"content": content}
        text = render([{**one, **own} if one["role"] == role else forms.adapted(one) for one in messages])
        shown.append(text.lower().count(STAND_IN) > 1)
        num_types.append(len(_QUOTED_TYPE.findall(text)))
    usable = shown[0], shown[1] and num_types[1] <= num_types[0]
    form = {(True, True): _same, (True, False): _joined, (False, True): _wrapped}.get(usable)
    return replace(forms, contents={**forms.contents, role: form}) if form else forms


def _argument_form(render: Render, forms: MessageForms) -> _Change:
    """Return the form of arguments, from the first content beside them with which one is usable."""
    for content in ("", None, "word"):
        messages = (
            [_USER, _called(one, content), _RESULT] for one in ({_KEY: STAND_IN}, f'{{"{_KEY}": "{STAND_IN}"}}')
        )
        by_object, by_text = (render(list(map(forms.adapted, one))) for one in messages)
        if STAND_IN in by_object and (STAND_IN not in by_text or f'\\"{_KEY}' in by_text):
            return _parsed
        if STAND_IN in by_text:
            return _same if STAND_IN in by_object and f"'{_KEY}'" not in by_object else _written
    return _same


def _keeps_null(render: Render, forms: MessageForms, message: Message) -> bool:
    """Return whether a template neither refuses the null content of a message nor writes Python's word for it."""
    messages = forms.adapted(_USER), forms.adapted(message)
    kept, left_out = render(messages), render([*map(without_null_content, messages)])
    return kept != "" and kept.count("None") <= left_out.count("None")


def _knows_developer(render: Render, forms: MessageForms) -> bool:
    """Return whether a developer's message is rendered otherwise than one of a role that does not exist.

    True also if the template renders no system message, which it would become.
    """
    content, user = forms.contents.get("system", _same)(STAND_IN), forms.adapted(_USER)
    texts = (render([{"role": role, "content": content}, user]) for role in ("developer", _STRANGER, "system"))
    developer, stranger, system = (text.lower() for text in texts)
    is_other = STAND_IN in developer and developer != stranger.replace(_STRANGER, "developer")
    return is_other or STAND_IN not in system


def _called(arguments: Any, content: str | None = "") -> Message:
    """Return the message of an assistant that calls a tool."""
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
