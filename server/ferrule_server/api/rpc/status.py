"""The table from domain errors to gRPC status codes, and the ``google.rpc.Status`` that is sent with them.

Every error of ours is a ``google.rpc.Status`` with exactly one ``ErrorInfo{reason, domain "ferrule", metadata}``,
``BadRequest`` if it names a field, and ``RetryInfo`` if waiting helps. Details stay below :data:`MAX_DETAILS_BYTES`:
gRPC carries them in trailing metadata, and 20 KB there replace any error by another one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping

import grpc
from google.rpc import error_details_pb2, status_pb2

from ferrule_server import errors
from ferrule_server.api.rpc.observe import Call

_LOG = logging.getLogger(__name__)

DOMAIN = "ferrule"
MAX_DETAILS_BYTES = 4096
_MAX_MESSAGE_CHARS = 480
_MAX_VALUE_CHARS = 160
_MAX_METADATA = 12

STATUS_TABLE: Mapping[type[errors.FerruleError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SeedRequired: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RequestTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.TokenMissing: grpc.StatusCode.UNAUTHENTICATED,
    errors.TokenInvalid: grpc.StatusCode.UNAUTHENTICATED,
    errors.RoleRequired: grpc.StatusCode.PERMISSION_DENIED,
    errors.HandleUnknown: grpc.StatusCode.NOT_FOUND,
    errors.MaskUnknown: grpc.StatusCode.NOT_FOUND,
    errors.WrongInstance: grpc.StatusCode.ABORTED,
    errors.HandleStale: grpc.StatusCode.ABORTED,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.FeatureUnsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.NonFiniteLogits: grpc.StatusCode.INTERNAL,
    errors.EngineFault: grpc.StatusCode.INTERNAL,
    errors.FerruleError: grpc.StatusCode.INTERNAL,
}
"""The status code of each error class; a class that is not listed has the code of its nearest listed ancestor."""


def code_of(error: errors.FerruleError) -> grpc.StatusCode:
    """Return the status code of an error: that of the nearest class in :data:`STATUS_TABLE`."""
    code = next((STATUS_TABLE[each] for each in type(error).__mro__ if each in STATUS_TABLE), None)
    assert code is not None, f"{type(error).__name__} is no FerruleError"
    return code


def to_status(error: errors.FerruleError) -> status_pb2.Status:
    """Return the ``google.rpc.Status`` of an error, always below :data:`MAX_DETAILS_BYTES`."""
    status = _status_of(error, _MAX_VALUE_CHARS)
    if status.ByteSize() > MAX_DETAILS_BYTES:
        status = _status_of(error, 40)
    return status


def fault_of(failure: BaseException, rpc: str) -> errors.EngineFault:
    """Log an unexpected exception with its traceback, and return the error that the caller gets.

    The traceback leaves out refusals: see :func:`~ferrule_server.errors.without_refusals`.
    """
    fault_id = secrets.token_hex(4)
    _LOG.error("fault rpc=%s fault_id=%s", rpc, fault_id, exc_info=errors.without_refusals(failure))
    return errors.EngineFault(fault_id)


def log_refused(rpc: str, error: errors.FerruleError, principal: str, count: int = 1, call: Call | None = None) -> None:
    """Log one line about a refused call: names and numbers, never token contents or cache ids.

    Args:
        rpc: The method.
        error: The error; the first one if several items of a stream are refused for one reason.
        principal: The principal of the caller.
        count: Number of items that were refused.
        call: The call; if the error names no handle, the line has the handle of the call.
    """
    handle_id, trace_id = (call.handle_id, call.trace_id) if call is not None else ("", "")
    is_expected = isinstance(error, errors.Starting)  # each client waits for it, again and again
    _LOG.log(
        logging.INFO if is_expected else logging.WARNING,
        "refused rpc=%s code=%s reason=%s handle_id=%s principal=%s trace_id=%s count=%d",
        rpc,
        code_of(error).name,
        error.reason,
        error.metadata.get("handle_id", handle_id) or "-",
        principal,
        trace_id or "-",
        count,
    )


def _status_of(error: errors.FerruleError, max_value_chars: int) -> status_pb2.Status:
    code: tuple[int, str] = code_of(error).value
    status = status_pb2.Status(code=code[0], message=_shortened(error.message, _MAX_MESSAGE_CHARS))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    for key, value in list(error.metadata.items())[:_MAX_METADATA]:
        info.metadata[key[:64]] = _shortened(value, max_value_chars)
    status.details.add().Pack(info)
    if isinstance(error, errors.InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shortened(error.field, max_value_chars), description=_shortened(error.description, max_value_chars)
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return status


def _shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
