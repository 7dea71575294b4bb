"""How a setting is declared: flag, environment variable, kind of value, default and help text in one place.

A setting is a field of a dataclass that a :class:`Group` makes; its docstring is its text in ``--help``::

    _LIMITS = Group("memory and limits")

    max_step_rows: int = _LIMITS.setting("--max-step-rows", COUNT, "512")

The flag ``--max-step-rows``, the variable ``FERRULE_MAX_STEP_ROWS`` and the default 512 come from this declaration.
A default is written as a user would write it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from ferrule_server.errors import ConfigError

PREFIX: Final = "FERRULE_"
"""Begins the name of every environment variable."""

_SIZE_UNITS: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIME_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")
_METADATA: Final = "setting"

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_Number = TypeVar("_Number", bound=float)


@dataclass(frozen=True, slots=True)
class Kind(Generic[_T_co]):
    """A kind of value.

    Attributes:
        metavar: Stands for the value in ``--help``; a flag without one is a switch.
        read: Returns the value of a text, or raises a ValueError that says what is accepted.
        is_never_empty: An empty variable is refused; otherwise it counts as unset.
    """

    metavar: str
    read: Callable[[str], _T_co]
    is_never_empty: bool = False

    def then(self: Kind[str], convert: Callable[[str], _T]) -> Kind[_T]:
        """Return the kind of the values that are made of the texts of this one."""
        return Kind(self.metavar, lambda text: convert(self.read(text)))

    def within(self: Kind[_Number], low: str, high: str = "") -> Kind[_Number]:
        """Return the kind of the values from ``low`` to ``high``, both written as values are."""
        least, most = self.read(low), self.read(high) if high else float("inf")
        words = f"must be from {low} to {high}" if high else f"must be at least {low}"

        def read(text: str) -> _Number:
            if not least <= (value := self.read(text)) <= most:
                raise ValueError(words)
            return value

        return replace(self, read=read)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        flag: Such as ``--kv-memory``.
        kind: Of its value.
        default: As ``--help`` shows it; empty if it shows none.
        group: Heading of ``--help`` that the setting stands below; empty for a setting that is not shown.
    """

    flag: str
    kind: Kind[Any]  # the field has the type of the value
    default: str
    group: str

    @property
    def name(self) -> str:
        """The flag as an identifier, such as ``kv_memory``."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable, such as ``FERRULE_KV_MEMORY``."""
        return f"{PREFIX}{self.name.upper()}"

    def given(self, flag: str | None, environment: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the name that the setting was given by and its text, or None if it was not given.

        Args:
            flag: Text of the flag; None if there was none.
            environment: Consulted if there was no flag.
        """
        if flag is not None:
            return self.flag, flag
        text = environment.get(self.variable)
        return None if text is None or not (text.strip() or self.kind.is_never_empty) else (self.variable, text)

    def value(self, origin: str, text: str) -> Any:
        """Return the value of a text.

        Raises:
            ConfigError: The text is unusable, or empty and the kind is never empty; the message begins with ``origin``.
        """
        if self.kind.is_never_empty and not text.strip():
            raise ConfigError(f"{origin} is empty: give the path of a file, or leave it out")
        try:
            return self.kind.read(text)
        except ValueError as error:
            raise ConfigError(f"{origin} {text!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class Group:
    """Declares the settings below one heading of ``--help``."""

    heading: str

    def setting(self, flag: str, kind: Kind[_T], default: str) -> _T:
        """Return a field with a default."""
        return field(default=kind.read(default), metadata={_METADATA: Setting(flag, kind, default, self.heading)})

    def optional(self, flag: str, kind: Kind[_T], unset: str = "") -> _T | None:
        """Return a field that is None if the setting is not given; ``unset`` says what holds then."""
        return field(default=None, metadata={_METADATA: Setting(flag, kind, unset, self.heading)})

    def switch(self, flag: str, *, default: bool = False) -> bool:
        """Return a field that the flag turns into the opposite of its default."""
        kind = Kind("", lambda text: parse_boolean(text) is not default)
        return field(default=default, metadata={_METADATA: Setting(flag, kind, "", self.heading)})


def setting_of(declared: Field[Any]) -> Setting | None:
    """Return the setting that a field declares; None for a field that holds a dataclass of settings."""
    return declared.metadata.get(_METADATA)


def settings_of(declared: Any) -> Iterator[Setting]:
    """Yield the settings of a dataclass and of those in it, in their order."""
    for item in fields(declared):
        setting = setting_of(item)
        yield from settings_of(item.default) if setting is None else (setting,)


def texts_of(declared: Any) -> dict[str, str]:
    """Return the texts of ``--help`` by the names of settings: the docstrings of their fields, read from the source.

    The default is put in place of ``{default}``, or at the end of a text without ``(default:``.
    """
    module = ast.parse(inspect.getsource(sys.modules[declared.__module__]))
    body = next(it.body for it in module.body if isinstance(it, ast.ClassDef) and it.name == declared.__name__)
    doc_of = {
        ast.unparse(it.target): ast.literal_eval(doc.value)
        for it, doc in pairwise(body)
        if isinstance(it, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
    texts: dict[str, str] = {}
    for item in fields(declared):
        if (setting := setting_of(item)) is None:
            texts |= texts_of(type(item.default))
        else:
            texts[setting.name] = _with_default(doc_of[item.name], setting.default)
    return texts


def _with_default(text: str, default: str) -> str:
    if default and "(default:" not in text:
        text = f"{text.rstrip()} (default: {{default}})"
    return text.replace("{default}", default)


def one_of(*words: str) -> Kind[str]:
    """Return the kind whose values are these words; they hold no special characters of regular expressions."""
    pattern = "|".join(words)
    return matching(pattern, pattern, f"one of {', '.join(words)}")


def matching(metavar: str, pattern: str, words: str) -> Kind[str]:
    """Return the kind of the texts that a regular expression matches; ``words`` say what is accepted."""

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {words}")
        return text

    return Kind(metavar, read)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``512MiB``.

    Raises:
        ValueError: The unit is missing or unknown.
    """
    return int(_quantity(text, _SIZE_UNITS, "KiB, MiB, GiB or TiB, such as 512MiB; 1G is written 1GiB"))


def parse_duration(text: str) -> float:
    """Return the seconds of a time such as ``20ms``, ``90s``, ``30m`` or ``1h``.

    Raises:
        ValueError: The unit is missing or unknown.
    """
    return _quantity(text, _TIME_UNITS, "ms, s, m or h, such as 30m")


def _quantity(text: str, units: Mapping[str, float], words: str) -> float:
    """Return a number with one of these units; ``words`` name them in the error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"must be a number with {words}")
    return float(match[1]) * units[match[2]]


def parse_path(text: str) -> Path:
    """Return a path, its ``~`` expanded.

    Raises:
        ValueError: The text is empty, or there is no such home directory.
    """
    if not text:
        raise ValueError("must be a path")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("the home directory of this user is not known") from None


def _positive_size(text: str) -> int:
    if (size := parse_size(text)) == 0:
        raise ValueError("must be at least one byte")
    return size


def parse_boolean(text: str) -> bool:
    """Return whether a text such as ``1`` or ``off`` means yes.

    Raises:
        ValueError: It means neither.
    """
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError("must be 1 or 0")
    return text.lower() in _TRUE


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


TEXT: Final = Kind("NAME", str)
NAMES: Final = Kind("NAME,...", _names)
COUNT: Final = matching("N", "[0-9]+", "a whole number").then(int)
POSITIVE: Final = COUNT.within("1")
SHARE: Final = matching("SHARE", r"\s*(\d*\.?\d+|\d+\.)\s*", "a number such as 0.9").then(float)
SIZE: Final = Kind("SIZE", parse_size)
POSITIVE_SIZE: Final = Kind("SIZE", _positive_size)
TIME: Final = Kind("TIME", parse_duration)
FILE: Final = Kind("FILE", parse_path)
FOLDER: Final = Kind("FOLDER", parse_path)
CREDENTIALS: Final = Kind("FILE", parse_path, is_never_empty=True)
"""A variable that expands to nothing must not leave the server open."""
ON_OR_OFF: Final = matching("on|off", "(?i:on|off)", "on or off").then(parse_boolean)
