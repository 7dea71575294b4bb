"""Format of log lines: ``--log-format text``, or one JSON object per line for machines.

The fields of a JSON line come from the format and the arguments of the logging call::

    _LOG.info("drain asked for live_sequences=%d grace_s=%.1f", 3, 25.0)

    {"time": "2025-01-31T12:00:00.000Z", "level": "INFO", "logger": "ferrule_server.api.serve",
     "message": "drain asked for live_sequences=3 grace_s=25.0", "live_sequences": 3, "grace_s": 25.0}

For any values, the output is one line of valid JSON, and formatting never raises: a log must work when something is
wrong.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import logging
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace, TracebackType
from typing import Any, Final

TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"

CALL_FIELDS: Final = "ferrule_call"
"""Attribute of a record with the fields of its call; a filter of the API layer sets it."""

_OWN: Final = frozenset({"time", "level", "logger", "message", "exception", "stack"})
_NOTHING: Final = "-"
"""Stands for a missing value in a line of text; JSON leaves the field out."""
_MAX_INT: Final = 1 << 53
"""Larger integers are written as text, because readers of JSON may round them."""
_NOISY_LOGGER: Final = "grpc._cython.cygrpc"
"""At DEBUG, it logs for each call that it has found the event loop."""
_PLACEHOLDER: Final = re.compile(
    r"(?:(?P<key>[A-Za-z_]\w*)=)?%(?:\((?P<name>[^)]*)\))?[#0\- +]*(?P<width>\*|\d*)"
    r"(?:\.(?P<precision>\*|\d*))?[hlL]?(?P<kind>[a-zA-Z%])"
)

_LOG = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, in ASCII; never raises."""
        try:
            return json.dumps(_line_of(record, self), allow_nan=False)
        except Exception as failure:  # noqa: BLE001  (an incomplete line is better than none)
            line = {**_head(record), "message": _text(record.msg), "exception": f"not formatted: {_text(failure)}"}
            return json.dumps(line)


def set_up(level: str, log_format: str) -> None:
    """Send the log to stderr: as text, or as JSON that includes warnings and uncaught exceptions.

    A second call replaces the first one.

    Args:
        level: Level of the root logger: ``debug``, ``info``, ``warning`` or ``error``.
        log_format: ``text`` or ``json``.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format == "json"
    handler.setFormatter(JsonFormatter() if is_json else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger(_NOISY_LOGGER).setLevel(max(logging.INFO, logging.getLogger().level))
    tell_hang_ups_quietly()
    if is_json:
        logging.captureWarnings(capture=True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_of_thread
        sys.unraisablehook = _log_unraisable
        logging.raiseExceptions = False  # a line that cannot be written would become a traceback


@contextlib.contextmanager
def written_by(write: Callable[[str], object]) -> Iterator[None]:
    """Have ``write`` write the log, for as long as something else is drawn where the log goes."""
    file: Any = SimpleNamespace(write=write, flush=lambda: None)
    with contextlib.ExitStack() as stack:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                stack.callback(handler.setStream, handler.setStream(file))
        yield


def tell_hang_ups_quietly() -> None:
    """Log a reply to a client that is gone as one line at DEBUG, in place of gRPC's own error."""
    logging.getLogger(_NOISY_LOGGER).addFilter(_is_no_hang_up)


def _is_no_hang_up(record: logging.LogRecord) -> bool:
    """Return whether to keep a record of gRPC: all but the error about a reply to a client that is gone."""
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None or kind.__name__ != "ExecuteBatchError":
        return True
    _LOG.debug("client hung up: the reply could not be sent")
    return False


def is_json() -> bool:
    """Return whether the log is JSON; nothing else may then be written to stderr."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _LOG.critical("uncaught kind=%s", kind.__name__, exc_info=(kind, error, trace))


def _log_uncaught_of_thread(given: threading.ExceptHookArgs) -> None:
    error = given.exc_value or given.exc_type()
    name = given.thread.name if given.thread is not None else _NOTHING
    _LOG.critical("uncaught kind=%s thread=%s", given.exc_type.__name__, name, exc_info=error)


def _log_unraisable(given: sys.UnraisableHookArgs) -> None:
    """Log an exception that nothing can catch, such as that of a ``__del__``."""
    error = given.exc_value or given.exc_type()
    what = given.err_msg or "Exception ignored in"
    _LOG.error("unraisable kind=%s where=%r", given.exc_type.__name__, f"{what}: {given.object!r}", exc_info=error)


def _line_of(record: logging.LogRecord, formatter: logging.Formatter) -> dict[str, object]:
    line = _head(record)
    for key, value in (*_call_fields(record), *_fields_of(record)):
        if value != _NOTHING:
            line[f"{key}_" if key in _OWN else key] = value
    if record.exc_info and record.exc_info[0] is not None:
        line["exception"] = formatter.formatException(record.exc_info)
    elif record.exc_text:
        line["exception"] = record.exc_text
    if record.stack_info:
        line["stack"] = record.stack_info
    return line


def _head(record: logging.LogRecord) -> dict[str, object]:
    when = dt.datetime.fromtimestamp(record.created, dt.UTC)
    return {
        "time": when.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z",
        "level": record.levelname,
        "logger": record.name,
        "message": _message_of(record),
    }


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001  (the arguments do not fit the format, or cannot be written)
        return f"{_text(record.msg)} {_text(record.args)}"


def _call_fields(record: logging.LogRecord) -> list[tuple[str, object]]:
    fields = getattr(record, CALL_FIELDS, None)
    return [(str(key), _value_of(value)) for key, value in fields.items()] if isinstance(fields, Mapping) else []


def _fields_of(record: logging.LogRecord) -> list[tuple[str, object]]:
    """Return the key and value of each ``key=%s`` in the format of a record, values unchanged."""
    if not record.args:
        return []
    args = record.args if isinstance(record.args, tuple | Mapping) else (record.args,)
    return [(key, _value_of(args[at])) for key, at in _places(str(record.msg)) if _has(args, at)]  # type: ignore[index]


def _has(args: tuple[object, ...] | Mapping[str, object], at: int | str) -> bool:
    return at in args if isinstance(args, Mapping) else isinstance(at, int) and at < len(args)


@functools.lru_cache(maxsize=512)
def _places(message_format: str) -> tuple[tuple[str, int | str], ...]:
    """Return each key in a format, and the index or name of its argument."""
    places: list[tuple[str, int | str]] = []
    index = 0
    for found in _PLACEHOLDER.finditer(message_format):
        if found["kind"] == "%":
            continue
        index += (found["width"] == "*") + (found["precision"] == "*")
        if found["key"] is not None:
            places.append((found["key"], index if found["name"] is None else found["name"]))
        index += 1
    return tuple(places)


def _value_of(value: object) -> object:
    """Return a value that JSON can represent; other values become text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -_MAX_INT <= value <= _MAX_INT else _text(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _text(value)
    return _text(value)


def _text(value: object) -> str:
    """Return ``str(value)``, or the name of its type if that fails."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001  (its __str__ may raise anything)
        return f"<{type(value).__name__} that cannot be written>"
