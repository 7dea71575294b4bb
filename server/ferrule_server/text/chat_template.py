"""Render a conversation with a chat template to the text format on which the model was trained."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from ferrule_server.errors import InvalidRequest, ModelError
from ferrule_server.model_files import shown
from ferrule_server.text import message_forms
from ferrule_server.text.message_forms import STAND_IN, TOOLS, Message, MessageForms
from ferrule_server.text.template_process import RenderLimits, TemplateProcesses, TookTooLong, TookTooMuch
from ferrule_server.text.template_wire import Outcome
from ferrule_server.text.tokenizer_config import DEFAULT_TEMPLATE, TokenizerConfig

RESERVED_VARIABLES: Final = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that have their own field in a request."""

_TOOL_TEMPLATE: Final = "tool_use"
_STAND_IN_TURNS: Final = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",))
_ANSWERED_TURN: Final = ("user", "assistant")
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
_FIND_TIME_S: Final = 5.0
"""Longest time in which the forms of messages are found; usual templates take some milliseconds."""
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class TemplateRefuses(InvalidRequest):
    """The template fails with a conversation, or refuses it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a template, in plain JSON types.

    Attributes:
        messages: Oldest first, at least one, each with a ``role``.
        tools: Definitions of tools; None: no tools, which a template distinguishes from an empty list.
        add_generation_prompt: Add the header that makes the model answer.
        variables: More variables, none of :data:`RESERVED_VARIABLES`.
        continue_final_message: The text ends after the content of the last message, which the model continues: without
            what ends the turn, and without the header of ``add_generation_prompt``.
        is_adapted: The messages are in a form of :meth:`ChatTemplate.in_its_form`; they are rendered as they are.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    is_adapted: bool = False


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
        self._mark = f"{STAND_IN}{secrets.token_hex(8)} "  # nobody can write it
        self._compile()
        self._forms = {name: self._find_forms(name) for name in self._names & {DEFAULT_TEMPLATE, _TOOL_TEMPLATE}}

    @classmethod
    def load(cls, folder: Path, limits: RenderLimits | None = None) -> ChatTemplate | None:
        """Return the templates of a model folder; None if it has none.

        Raises:
            ModelError: It has templates that cannot be used.
        """
        config = TokenizerConfig.load(folder)
        return cls(config, limits) if config.chat_templates else None

    def in_its_form(self, conversation: Conversation, use: Callable[[Conversation], _Result]) -> _Result:
        """Return what ``use`` returns for a conversation in the first form that the template does not refuse.

        The first one is in the form that the template was found to take (``message_forms.py``). Then all null contents
        are kept, then all are left out, then all are empty texts. The last one is as it was given. Forms that are the
        same are used once.

        Raises:
            TemplateRefuses: It refuses all of them. This is its error about the first one.
        """
        if conversation.is_adapted:
            return use(conversation)
        forms, given = self._forms[self._name(conversation)], list(conversation.messages)
        kept = list(map(forms.adapted, given))
        ways = (forms.without_bad_null, dict, message_forms.without_null_content, message_forms.with_empty_content)
        choices = [*([way(message) for message in kept] for way in ways), given]
        refusals = []
        for i, messages in enumerate(choices):
            if messages not in choices[:i]:
                try:
                    return use(replace(conversation, messages=messages, is_adapted=True))
                except TemplateRefuses as error:
                    refusals.append(error)
        raise refusals[0]

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation, as ``apply_chat_template`` of ``transformers`` gives it.

        It is rendered :meth:`in_its_form`.

        Raises:
            InvalidRequest: The template refuses the conversation, or exceeds a limit on time, memory or length; or the
                last message has no text in the rendering that could be continued.
            OSError: The system cannot start a process for the rendering.
        """
        return self.in_its_form(conversation, self._render)

    def ignores_tools(self, conversation: Conversation, text: str) -> bool:
        """Return whether tools are given and the text of a conversation is the same without them.

        Raises:
            OSError: As for :meth:`render`.
        """
        with contextlib.suppress(InvalidRequest):
            return bool(conversation.tools) and text == self.render(replace(conversation, tools=None))
        return False

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
            messages = [{"role": role, "content": STAND_IN} for role in roles]
            with contextlib.suppress(InvalidRequest, OSError):
                text = self.render(Conversation(messages, tools, add_generation_prompt=False))
                yield re.split(STAND_IN, text, flags=re.IGNORECASE)

    def _render(self, conversation: Conversation) -> str:
        """Return the text of a conversation in one of its forms."""
        try:
            outcome, text = self._processes.render(self._name(conversation), self._variables(conversation))
        except TookTooLong:
            complaint = f"takes more than {self._limits.max_time_s:g} s over this conversation; shorten it"
        except TookTooMuch as error:
            complaint = f"refuses them: {error}; it may take {self._limits.max_memory_bytes >> 20} MiB"
        except (ValueError, TypeError, RecursionError) as error:
            complaint = f"refuses them: {error}"
        else:
            if outcome is Outcome.DONE:
                return self._cut(text) if conversation.continue_final_message else text
            complaint = self._complaint(outcome, text)
            if outcome is Outcome.REFUSED:
                raise TemplateRefuses("messages", f"the chat template {complaint}")
        raise InvalidRequest("messages", f"the chat template {complaint}")

    def _name(self, conversation: Conversation) -> str:
        has_own_template = conversation.tools is not None and _TOOL_TEMPLATE in self._names
        return _TOOL_TEMPLATE if has_own_template else DEFAULT_TEMPLATE

    def _find_forms(self, name: str) -> MessageForms:
        """Return the forms of messages that a template takes; if it takes too long, all stay as they are."""
        deadline_s = time.monotonic() + _FIND_TIME_S

        def render(messages: Sequence[Message]) -> str:
            for tools in (None, TOOLS):
                if time.monotonic() > deadline_s:
                    raise TookTooLong
                outcome, text = self._processes.render(name, self._variables(Conversation(messages, tools)))
                if outcome is Outcome.DONE:
                    return text
            return ""

        try:
            return message_forms.find_forms(render)
        except (TookTooLong, TookTooMuch, OSError):
            _log.warning("event=message_forms template=%s error=too slow", name)
            return MessageForms()

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
        messages = [_as_templates_expect(message) for message in conversation.messages]
        if conversation.continue_final_message:
            messages[-1]["content"] = _marked(messages[-1].get("content"), self._mark)
        return {
            "documents": None,
            **self._special_tokens,
            **conversation.variables,
            "messages": messages,
            "tools": conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt and not conversation.continue_final_message,
        }

    def _cut(self, text: str) -> str:
        """Return a text up to its last mark. The rest is trimmed if the template has trimmed the mark."""
        head, mark, tail = text.rpartition(self._mark.strip())
        if not mark:
            raise InvalidRequest("messages", "end with a content that the chat template leaves out, so it cannot go on")
        return head if tail.startswith(" ") else head.rstrip()


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null keys but its content, with its reasoning under each name that templates use."""
    present = {key: value for key, value in message.items() if value is not None or key == "content"}
    reasoning = next((present[key] for key in _REASONING_KEYS if key in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _marked(content: Any, mark: str) -> Any:
    """Return a content with a mark behind the text at its end.

    Raises:
        InvalidRequest: It does not end with a text.
    """
    match content:
        case str():
            return content + mark
        case [*parts, {"text": str() as text} as last]:
            return [*parts, {**last, "text": text + mark}]
    raise InvalidRequest("messages", "end with a message without a text, so it cannot be continued")
