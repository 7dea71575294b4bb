"""How settings are declared: kinds of values, and the texts of ``--help``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ferrule_server.errors import ConfigError
from ferrule_server.settings import (
    COUNT,
    CREDENTIALS,
    SIZE,
    TEXT,
    TIME,
    Group,
    Kind,
    Setting,
    matching,
    one_of,
    setting_of,
    settings_of,
    texts_of,
)

_OURS = Group("ours")


@dataclass(frozen=True)
class _Inner:
    depth: int | None = _OURS.optional("--depth", COUNT.within("1"), "as deep as needed")
    """most levels"""


@dataclass(frozen=True)
class _Outer:
    """A dataclass of settings."""

    wait_s: float = _OURS.setting("--wait", TIME, "20ms")
    """longest wait,
    over two lines
    """
    inner: _Inner = _Inner(depth=3)
    mode: str = _OURS.setting("--mode", one_of("fast", "safe"), "safe")
    """how it runs (default: {default}, for now)"""
    has_colour: bool = _OURS.switch("--no-colour", default=True)
    """write plain text"""


def test_a_declaration_gives_flag_variable_and_default() -> None:
    """In the order of the fields, those of an inner dataclass at its place."""
    assert [it.flag for it in settings_of(_Outer)] == ["--wait", "--depth", "--mode", "--no-colour"]
    assert [it.variable for it in settings_of(_Inner)] == ["FERRULE_DEPTH"]
    assert (_Outer().wait_s, _Outer().mode, _Outer().has_colour, _Inner().depth) == (0.02, "safe", True, None)


def test_docstrings_are_the_texts_of_help() -> None:
    """With the default, at the end unless the text has a place for it; a switch shows none."""
    texts = {name: " ".join(text.split()) for name, text in texts_of(_Outer).items()}
    assert texts == {
        "wait": "longest wait, over two lines (default: 20ms)",
        "depth": "most levels (default: as deep as needed)",
        "mode": "how it runs (default: safe, for now)",
        "no_colour": "write plain text",
    }


def test_a_switch_turns_its_default_round() -> None:
    """By flag, which stands for 1, and by variable."""
    *_, no_colour = settings_of(_Outer)
    assert no_colour.value("--no-colour", "1") is False
    assert no_colour.value("FERRULE_NO_COLOUR", "off") is True


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (COUNT.within("2", "8"), "9", "from 2 to 8"),
        (COUNT.within("2"), "1", "at least 2"),
        (SIZE.within("1MiB", "1GiB"), "1023KiB", "from 1MiB to 1GiB"),
        (TIME.within("0s", "1h"), "61m", "from 0s to 1h"),
        (one_of("a", "b"), "c", "one of a, b"),
        (matching("X", "x+", "one x or more"), "y", "one x or more"),
    ],
)
def test_a_value_beyond_its_kind_is_refused(kind: Kind[object], text: str, words: str) -> None:
    """The message begins with the name that the value was given by."""
    with pytest.raises(ConfigError, match=f"^--it {text!r}: must be {words}$"):
        Setting("--it", kind, "", "").value("--it", text)


def test_bounds_belong_to_the_values() -> None:
    """Both of them."""
    kind = TIME.within("5s", "1m")
    assert (kind.read("5s"), kind.read("60s")) == (5.0, 60.0)


def test_an_empty_variable_is_unset_but_for_credentials() -> None:
    """An empty flag is a value."""
    plain, secret = Setting("--a", TEXT, "", ""), Setting("--b", CREDENTIALS, "", "")
    assert plain.given(None, {}) is secret.given(None, {}) is None
    assert plain.given(None, {"FERRULE_A": " "}) is None
    assert plain.given("", {"FERRULE_A": "x"}) == ("--a", "")
    for flag, environment in ((None, {"FERRULE_B": ""}), (" ", {"FERRULE_B": "x"})):
        with pytest.raises(ConfigError, match="is empty: give the path of a file, or leave it out"):
            secret.value(*secret.given(flag, environment) or ("", "x"))


def test_a_field_that_is_no_setting_has_none() -> None:
    """It holds settings itself."""
    fields = _Outer.__dataclass_fields__
    assert setting_of(fields["inner"]) is None
    assert setting_of(fields["mode"]) is not None
