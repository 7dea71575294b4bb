"""Settings in a TOML file: the keys are the flags without their dashes, the values have the types of TOML.

For example::

    model = "~/models/Qwen3-0.6B"
    kv-memory = "4GiB"
    max-context = 8192
    reflection = true

    [client]                       # for the commands that use a server; the server skips it
    target = "127.0.0.1:50051"

The keys of the server may also be in a table ``[serve]``.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ferrule_server.errors import ConfigError
from ferrule_server.settings import Setting, parse_boolean

_CLIENT: Final = "client"
_SERVE: Final = "serve"
_SWITCH, _ON_OR_OFF, _NAMES, _NUMBERS = "", "on|off", "NAME,...", ("N", "SHARE")
"""Values in ``--help`` that stand for other types of TOML than texts."""


def read_config_file(path: Path, settings: Iterable[Setting]) -> dict[str, tuple[str, str]]:
    """Return what a file sets: by the name of a setting, where it is set and the text that a flag would have.

    Raises:
        ConfigError: The file cannot be read, is not TOML, has an unknown key or the same one twice, or a value has the
            wrong type.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"{path}: not TOML: {error}") from None
    if isinstance(table.get(_CLIENT), dict):
        del table[_CLIENT]
    if isinstance(table.get(_SERVE), dict):
        served = table.pop(_SERVE)
        if twice := ", ".join(sorted(table.keys() & served)):
            raise ConfigError(f"{path}: set twice, in [{_SERVE}] and above it: {twice}")
        table |= served
    known = {_key(setting): setting for setting in settings}
    values: dict[str, tuple[str, str]] = {}
    for key, value in table.items():
        if key not in known:
            shown = [name for name in known if known[name].group]
            raise ConfigError(f"{path}: unknown setting {key!r}{meant(key, shown)}")
        if (text := _text_of(value, known[key].kind.metavar)) is None:
            given = json.dumps(value, ensure_ascii=False, default=str)
            raise ConfigError(f"{path}: {key} must be {_words(known[key].kind.metavar)}, not {given}")
        values[known[key].name] = (f"{path}: {key}", text)
    return values


def meant(given: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a message about an unknown name: the known one that is most similar, if any is."""
    near = difflib.get_close_matches(given, list(known), 1)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""


def config_line(setting: Setting, given: tuple[str, str] | None) -> str:
    """Return the line of a file that sets what was given; if nothing was, a comment with the default."""
    metavar = setting.kind.metavar
    if given is None:
        default = setting.default or ("none" if metavar else "false")
        return f"# {_key(setting)}: {default}"
    origin, text = given
    value = json.dumps(text, ensure_ascii=False)
    if metavar == _SWITCH:
        value = "true" if parse_boolean(text) else "false"
    elif metavar in _NUMBERS:
        value = text
    return f"{_key(setting)} = {value}  # {origin}"


def _key(setting: Setting) -> str:
    return setting.flag.removeprefix("--")


def _text_of(value: object, metavar: str) -> str | None:
    """Return a value as the text of a flag; None: it has the wrong type."""
    if isinstance(value, bool):
        return {_SWITCH: str(int(value)), _ON_OR_OFF: "on" if value else "off"}.get(metavar)
    if metavar in _NUMBERS:
        return str(value) if isinstance(value, int | float) else None
    if metavar == _NAMES and isinstance(value, list) and all(isinstance(name, str) for name in value):
        return ",".join(value)
    return value if isinstance(value, str) and metavar != _SWITCH else None


def _words(metavar: str) -> str:
    words = {_SWITCH: "true or false", _NAMES: "a list of texts", "N": "a whole number", "SHARE": "a number"}
    return words.get(metavar, "a text in quotes")
