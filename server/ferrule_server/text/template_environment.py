"""The Jinja environment of chat templates: that of ``transformers``, in a sandbox.

Filters, globals, tags and settings are those of ``transformers.utils.chat_template_utils`` (Hugging Face, Apache-2.0),
so that a template renders to the same bytes. Only ``lipsum`` is missing, because it makes text of any length. The
sandbox denies a template access to the process. The process that renders it (``template_worker.py``) bounds its time
and memory. Products and powers are also checked here, which gives a better message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, ClassVar, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MAX_PRODUCT_LENGTH: Final = 4 << 20
_MAX_INT_BITS: Final = 1 << 16


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates."""

    intercepted_binops = frozenset({"*", "**"})  # and so not computed when a template is compiled

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return a product or a power.

        Raises:
            jinja2.exceptions.SecurityError: It is too large.
        """
        _check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """``{% generation %}``: marks the text of the assistant for training. Here the text is only shown."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]  # like the extensions of Jinja

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
    """``namespace`` that refuses names that begin with an underscore, because they lead to the internals of Python."""

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
        raise jinja2.exceptions.SecurityError(f"a name in a namespace must not begin with an underscore: {name!r}")


def _check_product(operator: str, left: Any, right: Any) -> None:
    """Refuse a product or a power that would fill the memory.

    Raises:
        jinja2.exceptions.SecurityError: It would.
    """
    is_too_large = False
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
        is_too_large = num_bits > _MAX_INT_BITS
    elif operator == "*":
        times, items = (left, right) if isinstance(left, int) else (right, left)
        is_sized = isinstance(times, int) and isinstance(items, str | bytes | list | tuple)
        is_too_large = is_sized and len(items) * times > _MAX_PRODUCT_LENGTH
    if is_too_large:
        raise jinja2.exceptions.SecurityError(f"the result of {operator!r} is too large")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. The filter of Jinja would also escape the characters that are special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may pass it by name
    return datetime.now().strftime(format)  # noqa: DTZ005 - local time, as in transformers
