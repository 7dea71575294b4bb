"""Logs calls: fields for every line that a call writes, and at DEBUG one line for each call."""

from __future__ import annotations

import logging

from ferrule_server.api.rpc.observe import Call, current_call
from ferrule_server.log_format import CALL_FIELDS

_LOG = logging.getLogger(__name__)


class CallLog:
    """Logs each call as it ends, at DEBUG; an ``Observer``."""

    def begin(self, call: Call) -> None:
        """Do nothing: the line is written at the end."""

    def end(self, call: Call) -> None:
        """Log the line."""
        if not _LOG.isEnabledFor(logging.DEBUG):
            return
        _LOG.debug(
            "call rpc=%s code=%s reason=%s principal=%s handle_id=%s duration_ms=%.3f trace_id=%s",
            call.rpc,
            call.code.name if call.code is not None else "-",
            call.reason or "-",
            call.principal or "-",
            call.handle_id or "-",
            round(call.duration_ns * 1e-6, 3),
            call.trace_id or "-",
        )


def watch_calls() -> CallLog:
    """Add the fields of calls to their log lines, and return the observer that logs calls."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_with_fields)
    return CallLog()


def _with_fields(record: logging.LogRecord) -> bool:
    """Add the fields of the call whose task logs; lines of the engine thread have none: a step serves many calls."""
    call = current_call()
    if call is not None:
        setattr(record, CALL_FIELDS, _fields_of(call))
    return True


def _fields_of(call: Call) -> dict[str, str]:
    """Return the fields that identify a call; unknown ones are left out."""
    fields = {
        "rpc": call.rpc,
        "principal": call.principal,
        "handle_id": call.handle_id,
        "trace_id": call.trace_id,
        "span_id": call.trace.span_id if call.trace is not None else "",
    }
    return {key: value for key, value in fields.items() if value}
