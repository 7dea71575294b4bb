"""Chat templates: a conversation becomes the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2

from ferrule_server.errors import InvalidRequest, ModelError
from ferrule_server.text.conversation import Conversation
from ferrule_server.text.template_environment import ChatEnvironment, TemplateTooSlow
from ferrule_server.text.tokenizer_config import DEFAULT_TEMPLATE, TokenizerConfig

_TOOL_TEMPLATE: Final = "tool_use"
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
_MAX_COMPLAINT_LENGTH: Final = 500


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may take.

    Attributes:
        max_length: Longest text, in characters.
        max_time_s: Longest time.
    """

    max_length: int = 4 << 20
    max_time_s: float = 2.0


class ChatTemplate:
    """The chat templates of one model; safe to share between threads.

    Args:
        config: Of the model; it has at least one template.
        limits: On each rendering.

    Raises:
        ModelError: A template has a syntax error, or there are several and no default one.
    """

    def __init__(self, config: TokenizerConfig, limits: RenderLimits | None = None) -> None:
        self._limits = limits or RenderLimits()
        self._environment = ChatEnvironment()
        self._special_tokens = dict(config.special_tokens)
        self._templates = {name: self._compiled(name, source) for name, source in config.chat_templates.items()}
        if DEFAULT_TEMPLATE not in self._templates:
            raise ModelError(f"the chat templates {sorted(self._templates)} have no {DEFAULT_TEMPLATE!r} among them")

    @classmethod
    def load(cls, folder: Path, limits: RenderLimits | None = None) -> ChatTemplate | None:
        """Return the templates of a model folder, or None where it has none.

        Raises:
            ModelError: They are there and cannot be used.
        """
        config = TokenizerConfig.load(folder)
        return cls(config, limits) if config.chat_templates else None

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation, as ``apply_chat_template`` of ``transformers`` gives it.

        Raises:
            InvalidRequest: The template refuses the conversation, takes too long over it or makes too much of it.
        """
        template = self._chosen(conversation)
        variables = self._variables(conversation)
        self._environment.start_clock(self._limits.max_time_s)
        try:
            text = self._joined(template.root_render_func(template.new_context(variables)))
            text.encode()
        except TemplateTooSlow:
            text = f"the chat template takes more than {self._limits.max_time_s:g} s over this conversation; shorten it"
            raise InvalidRequest("messages", text) from None
        except UnicodeEncodeError as error:
            raise InvalidRequest("messages", "hold half a surrogate pair, which no UTF-8 can carry") from error
        except InvalidRequest:
            raise
        except Exception as error:  # the template is code of the model's, which may fail in any way over these messages
            raise InvalidRequest("messages", f"the chat template refuses them: {_complaint(error)}") from error
        return text

    def _joined(self, pieces: Iterator[str]) -> str:
        text, length = [], 0
        for piece in pieces:
            self._environment.check_clock()
            length += len(piece)
            if length > self._limits.max_length:
                description = f"the chat template makes more than {self._limits.max_length} characters of them"
                raise InvalidRequest("messages", description)
            text.append(piece)
        return "".join(text)

    def _chosen(self, conversation: Conversation) -> jinja2.Template:
        if conversation.tools is not None and _TOOL_TEMPLATE in self._templates:
            return self._templates[_TOOL_TEMPLATE]
        return self._templates[DEFAULT_TEMPLATE]

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        """Return what the template sees: the client's variables win over special tokens, the fields over both."""
        return {
            "documents": None,
            **self._special_tokens,
            **conversation.variables,
            "messages": [_as_templates_expect(message) for message in conversation.messages],
            "tools": conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt,
        }

    def _compiled(self, name: str, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
        except (ArithmeticError, RecursionError, ValueError) as error:  # of constants worked out beforehand
            raise ModelError(f"chat template {name!r}: {_complaint(error)}") from error


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without keys that are null, its reasoning under every name that templates read it by."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in _REASONING_KEYS if key in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _complaint(error: Exception) -> str:
    """Return what a template says, or what Python says of it, in one line that is not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_COMPLAINT_LENGTH else text[:_MAX_COMPLAINT_LENGTH] + "..."
