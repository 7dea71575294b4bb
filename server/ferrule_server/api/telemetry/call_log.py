"""Logs calls: fields for every line that a call writes, and at DEBUG one line for each call."""

from __future__ import annotations

import logging

from ferrule_server.api.rpc.observe import Call, current_call
from ferrule_server.log_format import CALL_FIELDS

_LOG = logging.getLogger(__name__)


class CallFields(logging.Filter):
    """Adds the fields of a call to each record that its task logs; for the handlers of the root logger.

    Lines of the engine thread have no such fields: a step serves many calls.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass the record, with the fields if there is a call."""
        call = current_call()
        if call is not None:
            setattr(record, CALL_FIELDS, _fields_of(call))
        return True


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
        handler.addFilter(CallFields())
    return CallLog()


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
