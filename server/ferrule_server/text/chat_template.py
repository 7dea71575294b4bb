"""Render a conversation with a chat template to the text format on which the model was trained."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ferrule_server.errors import InvalidRequest, ModelError
from ferrule_server.model_files import shown
from ferrule_server.text.template_process import RenderLimits, TemplateProcesses, TookTooLong, TookTooMuch
from ferrule_server.text.template_wire import Outcome
from ferrule_server.text.tokenizer_config import DEFAULT_TEMPLATE, TokenizerConfig

__all__ = ["RESERVED_VARIABLES", "ChatTemplate", "Conversation", "RenderLimits"]

RESERVED_VARIABLES: Final = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that have their own field in a request."""

_TOOL_TEMPLATE: Final = "tool_use"
_STAND_IN: Final = "qxjzvkwp"
_STAND_IN_TURNS: Final = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",))
_ANSWERED_TURN: Final = ("user", "assistant")
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a template, in plain JSON types.

    Attributes:
        messages: Oldest first, at least one, each with a ``role``.
        tools: Definitions of tools; None: no tools, which a template distinguishes from an empty list.
        add_generation_prompt: Add the header that makes the model answer.
        variables: More variables, none of :data:`RESERVED_VARIABLES`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """The chat templates of one model; safe to share between threads.

    They are compiled and rendered in separate processes, with bounded time and memory (``template_process.py``).

    Args:
        config: The configuration of the tokenizer, with at least one template.
        limits: The limits on each rendering.

    Raises:
        ModelError: A template has a syntax error or exceeds the limits to compile, or none of several is the default.
    """

    def __init__(self, config: TokenizerConfig, limits: RenderLimits | None = None) -> None:
        self._limits = limits or RenderLimits()
        self._special_tokens = dict(config.special_tokens)
        self._names = frozenset(config.chat_templates)
        if DEFAULT_TEMPLATE not in self._names:
            raise ModelError(f"the chat templates {shown(sorted(self._names))} have no {DEFAULT_TEMPLATE!r} among them")
        self._processes = TemplateProcesses(config.chat_templates, self._limits)
        self._compile()

    @classmethod
    def load(cls, folder: Path, limits: RenderLimits | None = None) -> ChatTemplate | None:
        """Return the templates of a model folder; None if it has none.

        Raises:
            ModelError: It has templates that cannot be used.
        """
        config = TokenizerConfig.load(folder)
        return cls(config, limits) if config.chat_templates else None

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation, as ``apply_chat_template`` of ``transformers`` gives it.

        Raises:
            InvalidRequest: The template refuses the conversation, or exceeds a limit on time, memory or length.
            OSError: The system cannot start a process for the rendering.
        """
        has_own_template = conversation.tools is not None and _TOOL_TEMPLATE in self._names
        name = _TOOL_TEMPLATE if has_own_template else DEFAULT_TEMPLATE
        try:
            outcome, text = self._processes.render(name, self._variables(conversation))
        except TookTooLong:
            complaint = f"takes more than {self._limits.max_time_s:g} s over this conversation; shorten it"
        except TookTooMuch as error:
            complaint = f"refuses them: {error}; it may take {self._limits.max_memory_bytes >> 20} MiB"
        except (ValueError, TypeError, RecursionError) as error:
            complaint = f"refuses them: {error}"
        else:
            if outcome is Outcome.DONE:
                return text
            complaint = self._complaint(outcome, text)
        raise InvalidRequest("messages", f"the chat template {complaint}")

    def around_messages(self) -> Iterator[list[str]]:
        """Yield for each template what it writes around messages: the texts before, between and after them.

        The messages are those of system, user, assistant and user, or fewer if the template refuses these.
        """
        choices: tuple[list[dict[str, Any]] | None, ...] = (None, []) if _TOOL_TEMPLATE in self._names else (None,)
        for tools in choices:
            yield from itertools.islice(self._gaps(_STAND_IN_TURNS, tools), 1)

    def after_answer(self) -> str:
        """Return what the default template writes after an answer that ends a conversation; empty if it writes none."""
        return next((gaps[-1] for gaps in self._gaps([_ANSWERED_TURN]) if len(gaps) > len(_ANSWERED_TURN)), "")

    def _gaps(
        self, conversations: Iterable[Sequence[str]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Iterator[list[str]]:
        """Yield the texts around messages for each conversation, given by its roles, that the template takes."""
        for roles in conversations:
            messages = [{"role": role, "content": _STAND_IN} for role in roles]
            with contextlib.suppress(InvalidRequest, OSError):
                text = self.render(Conversation(messages, tools, add_generation_prompt=False))
                yield re.split(_STAND_IN, text, flags=re.IGNORECASE)

    def _complaint(self, outcome: Outcome, text: str) -> str:
        if outcome is Outcome.TOO_LONG:
            return f"makes more than {self._limits.max_length} characters of them"
        if outcome is Outcome.NOT_UTF8:
            return "makes half a surrogate pair of them, which UTF-8 cannot carry"
        return f"refuses them: {text}"

    def _compile(self) -> None:
        try:
            complaint = self._processes.compile()
        except TookTooLong:
            complaint = f"the chat templates take more than {self._limits.max_time_s:g} s to compile"
        except TookTooMuch as error:
            complaint = f"the chat templates cannot be compiled: {error}"
        except OSError as error:
            complaint = f"the process that runs chat templates cannot be started: {error}"
        if complaint:
            raise ModelError(complaint)

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        """Return the variables of the template. Those of the client replace special tokens; fields replace both."""
        return {
            "documents": None,
            **self._special_tokens,
            **conversation.variables,
            "messages": [_as_templates_expect(message) for message in conversation.messages],
            "tools": conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt,
        }


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null keys, with its reasoning under each name that templates use."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in _REASONING_KEYS if key in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}
