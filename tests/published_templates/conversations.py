"""One conversation in the forms that clients write: what most templates take, and what only some do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.text.conversations import CALL, CLOCK, CONVERSATIONS, WEATHER, said

_TEXT_CALL = {**CALL, "function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}}
_BROKEN_CALL = {**CALL, "function": {**CALL["function"], "arguments": '{"city": "K\u00f6'}}
_RESULT = said("tool", '{"celsius": 7}', tool_call_id="abc123XYZ", name="get_weather")
_THANKS = [said("assistant", "7 degrees."), said("user", "Thanks")]
_QUESTION = said("user", "Weather in K\u00f6ln?")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is rendered: messages, tools, and whether the last message is continued."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    continues: bool = False


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _called(content: Any, *calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [_QUESTION, {"role": "assistant", "content": content, "tool_calls": list(calls)}]


_FORMS: dict[str, list[dict[str, Any]]] = {
    "a user's parts": [said("user") | {"content": _parts("Hello ", "there")}],
    "one part in each message": [
        said("system") | {"content": _parts("Be brief.")},
        said("user") | {"content": _parts("Hi")},
        said("assistant") | {"content": _parts("Hello")},
        said("user") | {"content": _parts("Again")},
    ],
    "a tool's parts": [*_called("", CALL), _RESULT | {"content": _parts("7 degrees")}],
    "no parts": [said("user") | {"content": []}],
    "a developer": [said("developer", "Be brief."), said("user", "Hi")],
    "a developer after a system message": [said("system", "a"), said("developer", "b"), said("user", "c")],
    "a developer's parts": [said("developer") | {"content": _parts("Be ", "brief.")}, said("user", "Hi")],
    "a developer in the middle": [said("user", "a"), said("assistant", "b"), said("developer", "c"), said("user", "d")],
    "null beside a call": _called(None, CALL),
    "null beside a call, and the result": [*_called(None, CALL), _RESULT],
    "null beside a call, and all that follows": [*_called(None, CALL), _RESULT, *_THANKS],
    "null beside two calls": [*_called(None, CALL, {**CALL, "id": "def456UVW"}), _RESULT],
    "null and no call": [said("user", "Hi"), {"role": "assistant", "content": None}, said("user", "Hello?")],
    "null in JSON text": [*_called(None, _TEXT_CALL), _RESULT, *_THANKS],
    "no content beside a call": [_QUESTION, {"role": "assistant", "tool_calls": [CALL]}, _RESULT],
    "arguments as text": [*_called("", _TEXT_CALL), _RESULT, *_THANKS],
    "arguments as text, and the result": [*_called("Looking", _TEXT_CALL), _RESULT],
    "arguments as broken text": [*_called("", _BROKEN_CALL), _RESULT],
    "arguments as an object": [*_called("", CALL), _RESULT, *_THANKS],
    "thoughts beside a call": [
        *_called("", CALL)[:1],
        {**_called("", CALL)[1], "reasoning_content": "It asks for the weather."},
        _RESULT,
    ],
}
_CONTINUED: dict[str, list[dict[str, Any]]] = {
    "an answer begins": [said("user", "Hi"), said("assistant", "Hello, I")],
    "an answer begins after a system message": [said("system", "S"), said("user", "Hi"), said("assistant", "A:")],
    "an answer ends with spaces": [said("user", "Hi"), said("assistant", "  Hello, \n ")],
    "an answer begins in parts": [said("user", "Hi"), said("assistant") | {"content": _parts("Hel", "lo")}],
    "an answer of other turns": [*CONVERSATIONS["several turns"], said("assistant", "caf\u00e9 is")],
    "an answer of the same words": [said(role, "Hi") for role in ("user", "assistant", "user", "assistant")],
    "a thought begins": [said("user", "Hi"), said("assistant", "<think>\nThey say")],
    "an empty answer": [said("user", "Hi"), said("assistant", "")],
    "a null answer": [said("user", "Hi"), {"role": "assistant", "content": None}],
    "a question goes on": [said("user", "What is")],
}  # fmt: skip
ASKED = {
    **{name: Asked(messages) for name, messages in (CONVERSATIONS | _FORMS).items()},
    **{f"{name}, with tools": Asked(one, [WEATHER, CLOCK]) for name, one in (CONVERSATIONS | _FORMS).items()},
    **{name: Asked(messages, continues=True) for name, messages in _CONTINUED.items()},
}
"""By name."""
