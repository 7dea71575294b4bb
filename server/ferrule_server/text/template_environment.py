"""The Jinja environment of chat templates: what ``transformers`` gives them, and a limit on how long they run.

Filters, globals, tags and settings are those of ``transformers.utils.chat_template_utils`` (Hugging Face, Apache-2.0),
so that a template renders to the same bytes. The sandbox keeps a template away from the process; the limit keeps a
conversation from hanging the server: every turn of a loop, every macro, every attribute and every call looks at the
clock. Nothing else in Jinja takes long without one of these, but for work that grows with the size of its input only.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class TemplateTooSlow(Exception):
    """A template has not come to its end in time."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates; safe to share between threads, each of which has a deadline of its own."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._threads = threading.local()
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def start_clock(self, limit_s: float) -> None:
        """Give what this thread renders from now on so many seconds."""
        self._threads.deadline = time.monotonic() + limit_s

    def check_clock(self) -> str:
        """Return an empty text while there is time.

        Raises:
            TemplateTooSlow: There is none left.
        """
        if time.monotonic() > getattr(self._threads, "deadline", float("inf")):
            raise TemplateTooSlow
        return ""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return ``obj.attribute`` as templates see it."""
        self.check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return ``obj[argument]`` as templates see it."""
        self.check_clock()
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in Jinja
        """Call ``obj``, if the sandbox allows it."""
        __self.check_clock()
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Put a look at the clock into every loop and macro; it is no output and changes nothing else."""
        template = super()._parse(source, name, filename)
        bodies: list[nodes.For | nodes.Macro] = [*template.find_all(nodes.For), *template.find_all(nodes.Macro)]
        for node in bodies:
            look = nodes.Call(nodes.EnvironmentAttribute("check_clock"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(look).set_lineno(node.lineno))
        return template


class _GenerationTag(Extension):
    """``{% generation %}``: marks what the assistant said, for training; here it only shows it."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]  # as Jinja's own extensions do

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` without the attributes of the real class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return ``dict.fromkeys``."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """``namespace`` that takes no name with an underscore in front, which leads to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name in the namespace
        self, given = args[0], args[1:]
        attributes: Mapping[Any, Any] = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name with an underscore in front: {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON; Jinja's own filter escapes what would be dangerous in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
    return datetime.now().strftime(format)  # noqa: DTZ005 - local time, as in transformers
