"""What the log tells of calls: fields for every line that a call writes, and at DEBUG one line for each call."""

from __future__ import annotations

import logging

from ferrule_server.api.rpc.observe import Call, current_call
from ferrule_server.log_format import CALL_FIELDS

_LOG = logging.getLogger(__name__)


class CallFields(logging.Filter):
    """Gives each record the fields of the call that its task serves; for the handlers of the root logger.

    Lines of the engine's side belong to no one call: a step serves many.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Let the record pass, with the fields where there is a call."""
        call = current_call()
        if call is not None:
            setattr(record, CALL_FIELDS, fields_of(call))
        return True


class CallLog:
    """Logs each call as it ends, at DEBUG; an ``Observer``."""

    def begin(self, call: Call) -> None:
        """Nothing is known yet."""

    def end(self, call: Call) -> None:
        """Write the line."""
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
    """Have every line of a call carry its fields, and return what logs calls."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(CallFields())
    return CallLog()


def fields_of(call: Call) -> dict[str, str]:
    """Return what tells a line of one call from that of another; what is not known is left out."""
    fields = {
        "rpc": call.rpc,
        "principal": call.principal,
        "handle_id": call.handle_id,
        "trace_id": call.trace_id,
        "span_id": call.trace.span_id if call.trace is not None else "",
    }
    return {key: value for key, value in fields.items() if value}
