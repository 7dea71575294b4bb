"""JSON log lines: one object, one line, typed fields, whatever is logged."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.log_format import JsonFormatter, set_up


def line_of(message: object, *args: object, level: int = logging.INFO, **attributes: object) -> dict[str, Any]:
    """Return what a record becomes; it must be one line."""
    given_args = args[0] if len(args) == 1 and isinstance(args[0], dict) else args
    record = logging.LogRecord("a.logger", level, __file__, 1, message, given_args, None)
    for name, value in attributes.items():
        setattr(record, name, value)
    text = JsonFormatter().format(record)
    assert len(text.splitlines()) == 1
    assert text.isascii()
    line: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    assert {"time", "level", "logger", "message"} <= set(line)
    return line


class Unwritable:
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def test_a_line_has_time_level_logger_and_message() -> None:
    """The time is RFC 3339, in UTC, with milliseconds."""
    line = line_of("drained", created=1_738_324_800.1239)
    assert line == {
        "time": "2025-01-31T12:00:00.123Z",
        "level": "INFO",
        "logger": "a.logger",
        "message": "drained",
    }
    assert line_of("x", created=1_738_324_800.0)["time"] == "2025-01-31T12:00:00.000Z"


def test_values_behind_keys_are_fields_with_their_types() -> None:
    """Numbers stay numbers; what a width or precision does to the text does nothing to the field."""
    line = line_of(
        "refused %s rpc=%s count=%d grace_s=%.1f mode=%04o name=%r %d%% ok=%s none=%s", "!", "Decode", 3, 25.04, 420,
        "it's", 7, True, None,
    )  # fmt: skip
    assert line["message"] == 'refused ! rpc=Decode count=3 grace_s=25.0 mode=0644 name="it\'s" 7% ok=True none=None'
    expected = {"rpc": "Decode", "count": 3, "grace_s": 25.04, "mode": 420, "name": "it's", "ok": True, "none": None}
    assert {key: line[key] for key in expected} == expected
    assert set(line) == {"time", "level", "logger", "message", *expected}


def test_stars_and_names_in_a_format_are_understood() -> None:
    """Widths from arguments shift the others; a dict gives values by name."""
    line = line_of("a=%*d b=%.*f c=%s", 5, 1, 2, 3.14159, "x")
    assert (line["a"], line["b"], line["c"]) == (1, 3.14159, "x")
    line = line_of("a=%(one)s b=%(two)d", {"one": "x", "two": 2})
    assert (line["message"], line["a"], line["b"]) == ("a=x b=2", "x", 2)


def test_what_is_not_there_has_no_field() -> None:
    """Text has a dash for it."""
    assert "handle_id" not in line_of("refused handle_id=%s", "-")


def test_no_value_takes_the_place_of_our_own_keys() -> None:
    """A message that has a level keeps it beside the line's."""
    line = line_of("level=%s message=%s", "high", "hello")
    assert (line["level"], line["level_"], line["message_"]) == ("INFO", "high", "hello")


def test_fields_of_the_call_come_along() -> None:
    """What the message says wins over what is known of its call."""
    line = line_of("fault rpc=%s", "Prefill", ferrule_call={"rpc": "Decode", "trace_id": "ab"})
    assert (line["rpc"], line["trace_id"]) == ("Prefill", "ab")


def test_exceptions_and_stacks_are_text_in_the_line() -> None:
    """With their line ends, in one line all the same."""
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = line_of("fault", exc_info=sys.exc_info(), stack_info="where\nit was")
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: two\nlines")
    assert line["stack"] == "where\nit was"
    assert "exception" not in line_of("x", exc_info=(None, None, None))


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (2**70, str(2**70)),
        (b"\xff\n", r"b'\xff\n'"),
        ("a\nb\r\u2028c\x00\ud800", "a\nb\r\u2028c\x00\ud800"),
        ('","level":"ERROR', '","level":"ERROR'),
        ([1, float("nan")], "[1, nan]"),
        (Unwritable(), "<Unwritable that cannot be written>"),
    ],
    ids=["nan", "infinity", "large", "bytes", "line ends", "quotes", "list", "unwritable"],
)
def test_odd_values_stay_in_their_field(value: object, written: str) -> None:
    """None breaks the line, forges another, or is no JSON."""
    assert line_of("x value=%s y=%d", value, 3)["value"] == written


@pytest.mark.parametrize(
    ("message", "args"),
    [
        ("a=%d", ("x",)),
        ("a=%s b=%s", ("x",)),
        ("a=%s", ("x", "y")),
        ("100%", ("x",)),
        ("%(a)s", ("x",)),
        ("a=%q", (1,)),
    ],
)
def test_arguments_that_do_not_fit_are_written_all_the_same(message: str, args: tuple[object, ...]) -> None:
    """A mistake in the caller costs the looks of a line, not the line."""
    line = line_of(message, *args)
    assert message in line["message"]
    assert "x" in line["message"] or 1 in args


@settings(max_examples=150)
@given(
    st.one_of(st.text(), st.from_regex(r"([a-z]{0,3}=?%[-+#0 ]?[*\d]?\.?[*\d]?[a-zA-Z%] ?){0,4}", fullmatch=True)),
    st.lists(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()), max_size=4),
)
def test_any_format_with_any_arguments_is_one_line(message: str, args: list[object]) -> None:
    """Nothing that can be logged raises, or is more than one line, or no JSON."""
    line_of(message, *args)
    line_of(Unwritable(), *args)


def test_warnings_and_uncaught_exceptions_are_lines_too() -> None:
    """In a process of its own: on the main thread, on another, in a ``__del__``, and a warning of Python's."""
    code = (
        "import threading, warnings, logging\n"
        "from ferrule_server.log_format import set_up\n"
        "set_up('info', 'json')\n"
        "warnings.warn('old\\nthing')\n"
        "def fail(): raise KeyError('in a thread')\n"
        "thread = threading.Thread(target=fail, name='worker'); thread.start(); thread.join()\n"
        "logging.getLogger('b').debug('not told')\n"
        "class Broken:\n    def __del__(self): raise ValueError('in an end')\n"
        "Broken()\n"
        "raise RuntimeError('at the end')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["WARNING", "CRITICAL", "ERROR", "CRITICAL"]
    assert "old\nthing" in lines[0]["message"]
    assert (lines[1]["kind"], lines[1]["thread"]) == ("KeyError", "worker")
    assert (lines[2]["kind"], "Broken.__del__" in lines[2]["where"]) == ("ValueError", True)
    assert lines[3]["exception"].endswith("RuntimeError: at the end")
    assert done.returncode == 1


def test_text_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time, level, logger, message."""
    stream, root = io.StringIO(), logging.Logger("root")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(logging.getLogger("grpc._cython.cygrpc"), "level", logging.NOTSET)  # as it was, afterwards
    set_up("warning", "text")
    root.warning("a=%d", 1)
    root.info("not told")
    assert stream.getvalue().split(" ", 2)[2] == "WARNING root a=1\n"
