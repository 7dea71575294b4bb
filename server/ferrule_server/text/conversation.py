"""A conversation as chat templates are given it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

RESERVED_VARIABLES: Final = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that have a field of their own in a request."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is given, of plain JSON types.

    Attributes:
        messages: Oldest first, at least one, each with a ``role``.
        tools: Definitions; None: no tools, which to a template is not the same as an empty list.
        add_generation_prompt: Add the header that makes the model answer.
        variables: More variables, none of :data:`RESERVED_VARIABLES`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
