"""Reads a conversation out of a request."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from ferrule.v1 import tokenizer_pb2
from ferrule_server.errors import InvalidRequest
from ferrule_server.text.conversation import RESERVED_VARIABLES, Conversation

_MAX_MESSAGES: Final = 4096


def check_conversation(request: tokenizer_pb2.ApplyChatTemplateRequest, max_bytes: int) -> int:
    """Return the bytes of a request whose conversation is not too large. Cheap: no JSON is parsed.

    Raises:
        InvalidRequest: There is no message, or there are too many or too long ones.
    """
    if not request.messages:
        raise InvalidRequest("messages", "is empty; a conversation has at least one message")
    if len(request.messages) > _MAX_MESSAGES:
        raise InvalidRequest("messages", f"has {len(request.messages)} entries, the limit is {_MAX_MESSAGES}")
    num_bytes = request.ByteSize()
    if num_bytes > max_bytes:
        description = f"have {num_bytes} bytes with tools and variables, the limit is {max_bytes}; shorten them"
        raise InvalidRequest("messages", description)
    return num_bytes


def read_conversation(request: tokenizer_pb2.ApplyChatTemplateRequest) -> Conversation:
    """Return the conversation of a request that :func:`check_conversation` has accepted.

    Raises:
        InvalidRequest: A message has no role, or some JSON is not what it should be.
    """
    return Conversation(
        messages=[_message(message, f"messages[{i}].") for i, message in enumerate(request.messages)],
        tools=_tools(request.tools_json) if request.tools_json else None,
        add_generation_prompt=request.add_generation_prompt if request.HasField("add_generation_prompt") else True,
        variables=_object(request.variables_json, "variables_json", RESERVED_VARIABLES),
    )


def _message(message: tokenizer_pb2.ChatMessage, at: str) -> dict[str, Any]:
    if not message.role:
        raise InvalidRequest(f"{at}role", "is empty; it says who speaks, such as user")
    reserved = ("role", "content") if message.content else ("role",)
    extra = _object(message.extra_json, f"{at}extra_json", reserved)
    return {"role": message.role, "content": message.content, **extra}


def _tools(text: str) -> list[dict[str, Any]]:
    tools = _parsed(text, "tools_json")
    if not isinstance(tools, list):
        raise InvalidRequest("tools_json", "is no JSON array")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InvalidRequest("tools_json", f"entry {i} is no JSON object")
    return tools


def _object(text: str, field: str, reserved: tuple[str, ...]) -> dict[str, Any]:
    """Return a JSON object that sets none of the reserved keys; an empty text is an empty object."""
    value = _parsed(text, field) if text else {}
    if not isinstance(value, dict):
        raise InvalidRequest(field, "is no JSON object")
    for key in reserved:
        if key in value:
            raise InvalidRequest(field, f"sets {key!r}, which has a field of its own")
    return value


def _parsed(text: str, field: str) -> Any:
    """Return what a JSON text says; NaN and infinities, which are no JSON, are refused as such."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(field, f"is no JSON: {reason}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
