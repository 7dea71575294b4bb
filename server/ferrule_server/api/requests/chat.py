"""Reads the conversation of ApplyChatTemplate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NoReturn

from ferrule.v1 import tokenizer_pb2
from ferrule_server.api.requests.fields import check_count
from ferrule_server.errors import InvalidRequest
from ferrule_server.text.chat_template import RESERVED_VARIABLES, Conversation
from ferrule_server.text.stand_ins import strings_in

_MAX_MESSAGES: Final = 4096


def check_conversation(request: tokenizer_pb2.ApplyChatTemplateRequest, max_bytes: int) -> int:
    """Return the size of a request after a check of its limits. Cheap: no JSON is parsed.

    Raises:
        InvalidRequest: There are no messages, or too many, or they are too long.
    """
    if request.allow_special_tokens and request.special_tokens_as_text:
        raise InvalidRequest("special_tokens_as_text", "cannot be set beside allow_special_tokens; leave one unset")
    if not request.messages:
        raise InvalidRequest("messages", "must have at least one message")
    check_count("messages", len(request.messages), _MAX_MESSAGES)
    num_bytes = request.ByteSize()
    if num_bytes > max_bytes:
        description = f"have {num_bytes} bytes with tools and variables, the limit is {max_bytes}; shorten them"
        raise InvalidRequest("messages", description)
    return num_bytes


def read_conversation(request: tokenizer_pb2.ApplyChatTemplateRequest) -> Conversation:
    """Return the conversation of a request that :func:`check_conversation` has accepted.

    Raises:
        InvalidRequest: A message has no role, or a JSON field is invalid.
    """
    return Conversation(
        messages=[_message(message, f"messages[{i}].") for i, message in enumerate(request.messages)],
        tools=_tools(request.tools_json) if request.tools_json else None,
        add_generation_prompt=not request.skip_generation_prompt,
        variables=_object(request.variables_json, "variables_json", RESERVED_VARIABLES),
        continue_final_message=request.continue_final_message,
    )


def check_special_tokens(
    request: tokenizer_pb2.ApplyChatTemplateRequest, find: Callable[[str], str | None], conversation: Conversation
) -> None:
    """Refuse a conversation that would bring control tokens of its own into a prompt.

    Args:
        request: The request.
        find: Returns a control token that occurs in a text, or None.
        conversation: What :func:`read_conversation` returned for it, in one of its forms for the template.

    Raises:
        InvalidRequest: A string, decoded from JSON where it is in JSON, contains the text of a control token.
    """
    for field, strings in _strings_by_field(request, conversation):
        if token := find("\n".join(strings)):
            description = (
                f"contains the text of the control token {token}, which would become this token; set "
                "special_tokens_as_text to keep it text"
            )
            raise InvalidRequest(field, description, special_token=token)


def _strings_by_field(
    request: tokenizer_pb2.ApplyChatTemplateRequest, conversation: Conversation
) -> Iterator[tuple[str, Iterable[str]]]:
    for i, (sent, message) in enumerate(zip(request.messages, conversation.messages, strict=True)):
        own = ("role", "content") if sent.content else ("role",)
        extra = {key: value for key, value in message.items() if key not in own}
        yield f"messages[{i}].role", [sent.role]
        yield f"messages[{i}].content", [sent.content]
        yield f"messages[{i}].extra_json", strings_in(extra)
    yield "tools_json", strings_in(conversation.tools)
    yield "variables_json", strings_in(conversation.variables)


def _message(message: tokenizer_pb2.ChatMessage, at: str) -> dict[str, Any]:
    if not message.role:
        raise InvalidRequest(f"{at}role", "must be set, for example to user")
    reserved = ("role", "content") if message.content else ("role",)
    extra = _object(message.extra_json, f"{at}extra_json", reserved)
    return {"role": message.role, "content": message.content, **extra}


def _tools(text: str) -> list[dict[str, Any]]:
    tools = _parsed(text, "tools_json")
    if not isinstance(tools, list):
        raise InvalidRequest("tools_json", "is not a JSON array")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InvalidRequest("tools_json", f"entry {i} is not a JSON object")
    return tools


def _object(text: str, field: str, reserved: tuple[str, ...]) -> dict[str, Any]:
    """Return a JSON object after a check that it sets no reserved key; an empty text is an empty object."""
    value = _parsed(text, field) if text else {}
    if not isinstance(value, dict):
        raise InvalidRequest(field, "is not a JSON object")
    for key in reserved:
        if key in value:
            raise InvalidRequest(field, f"sets {key!r}, which has a field of its own")
    return value


def _parsed(text: str, field: str) -> Any:
    """Return the value of a JSON text. NaN and infinities are not JSON and are refused."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(field, f"is not valid JSON: {reason}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
