"""From gRPC failures and ``google.rpc.Status`` messages to the tree of ``errors``."""

from __future__ import annotations

import re
from urllib.parse import unquote

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ferrule_client import errors as e

BY_REASON: dict[str, type[e.FerruleError]] = {
    "CANCELLED": e.CallCancelledError,
    "CONNECTION_FAILED": e.UnavailableError,
    "CONNECTION_LOST": e.UnavailableError,
    "CONTEXT_EXCEEDED": e.ContextExceededError,
    "DEADLINE_EXCEEDED": e.DeadlineExceededError,
    "DRAINING": e.DrainingError,
    "DURABILITY_LOST": e.DurabilityLostError,
    "ENGINE_FAULT": e.InternalError,
    "EPOCH_CHANGED": e.EpochChangedError,
    "EXCEEDS_POOL": e.ExceedsPoolError,
    "FEATURE_UNSUPPORTED": e.UnsupportedError,
    "HANDLE_EXPIRED": e.HandleExpiredError,
    "HANDLE_LOST": e.HandleLostError,
    "HANDLE_STALE": e.HandleStaleError,
    "HANDLE_UNKNOWN": e.HandleNotFoundError,
    "INSTANCE_UNREACHABLE": e.InstanceUnreachableError,
    "INVALID_FIELD": e.InvalidRequestError,
    "KV_BLOCKS_EXHAUSTED": e.BlocksExhaustedError,
    "KV_GIVEN_BACK": e.KvGivenBackError,
    "MASK_UNKNOWN": e.MaskUnknownError,
    "MESSAGE_TOO_LARGE": e.MessageTooLargeError,
    "NON_FINITE_LOGITS": e.NonFiniteLogitsError,
    "QUEUE_FULL": e.QueueFullError,
    "REPLY_TOO_LARGE": e.ReplyTooLargeError,
    "REQUEST_ID_REUSED": e.RequestIdReusedError,
    "REQUEST_TIMEOUT": e.RequestTimeoutError,
    "REQUEST_TOO_LARGE": e.RequestTooLargeError,
    "RESTORING": e.RestoringError,
    "ROLE_REQUIRED": e.AuthError,
    "RPC_UNKNOWN": e.UnsupportedError,
    "SLOW_CONSUMER": e.SlowConsumerError,
    "STARTING": e.StartingError,
    "TOKEN_INVALID": e.AuthError,
    "TOKEN_MISSING": e.AuthError,
    "TOKEN_OUT_OF_VOCAB": e.TokenOutOfVocabError,
    "TRUNCATE_BEYOND": e.TruncateBeyondError,
    "WRONG_INSTANCE": e.WrongInstanceError,
}
"""Class of each reason of the contract; ``QUOTA_*`` is a family and handled apart."""

BY_CODE: dict[grpc.StatusCode, type[e.FerruleError]] = {
    grpc.StatusCode.CANCELLED: e.CallCancelledError,
    grpc.StatusCode.DEADLINE_EXCEEDED: e.DeadlineExceededError,
    grpc.StatusCode.INTERNAL: e.InternalError,
    grpc.StatusCode.INVALID_ARGUMENT: e.InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: e.OutOfRangeError,
    grpc.StatusCode.PERMISSION_DENIED: e.AuthError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: e.ResourceExhaustedError,
    grpc.StatusCode.UNAUTHENTICATED: e.AuthError,
    grpc.StatusCode.UNAVAILABLE: e.UnavailableError,
    grpc.StatusCode.UNIMPLEMENTED: e.UnsupportedError,
}
"""Class for a reason this client does not know."""

# SLOW_CONSUMER ends a whole stream: what was under way on it ran, and only its answers were thrown away.
_UNCLEAR = (e.CallCancelledError, e.DeadlineExceededError, e.InternalError, e.SlowConsumerError, e.UnavailableError)

# What a proxy makes of a dead server, and grpc.aio of a frame that could not be written any more.
_BROKEN = ("RST_STREAM", "Internal error from Core")

_CODES = {code.value[0]: code for code in grpc.StatusCode}

# Texts of Envoy, as UNAVAILABLE, for a call that it could not hand to any server: there is none of those it may
# choose from, the one it chose does not take connections, or Envoy's own limits are reached.
_PROXY_NEVER_SENT = (
    "no healthy upstream",
    "reset reason: remote connection failure",
    "reset reason: local connection failure",
    "reset reason: connection timeout",
    "reset reason: overflow",
)

# Texts of gRPC core for a call that never left this machine. They have been stable for years; were one to change,
# a creating call would only be retried less often.
_NEVER_SENT = (
    "failed to connect to all addresses",
    "Connection refused",
    "connection refused",
    "resolution failed",
    "empty address list",
    *_PROXY_NEVER_SENT,
)

_WHY_NOT = (
    ("connection refused", "connection refused"),
    ("no such file", "no such socket"),
    ("permission denied", "permission denied"),
    ("resolution failed", "name not found"),
    ("domain name not found", "name not found"),
    ("unreachable", "network unreachable"),
    ("timed out", "timed out"),
    ("certificate_verify_failed", "its certificate is not trusted"),
    ("peer name", "its certificate is for another name"),
    ("hostname verification", "its certificate is for another name"),
    ("wrong_version_number", "it does not speak TLS"),
    ("ssl", "TLS handshake failed"),
    ("socket closed", "it hung up"),
    ("connection reset", "it hung up"),
    ("create security handshaker", "unusable TLS settings"),
)

_ADDRESS = re.compile(r"ipv[46]:(\S+):\s")

# If a server refuses a TLS handshake, gRPC only learns that it hung up.
_TLS_ADVICE = {
    "its certificate is not trusted": (
        "no authority that was named (root_certificates of TlsConfig, --tls-ca, FERRULE_TLS_CA) has signed it, or "
        "where none was, none that the system trusts"
    ),
    "its certificate is for another name": (
        "connect by the name in it, or give that as server_name of TlsConfig, --tls-server-name"
    ),
    "it does not speak TLS": "connect without tls",
    "TLS handshake failed": "compare both sides' certificates",
    "unusable TLS settings": "the certificates or the key given to TLS are not PEM, or do not belong together",
    "it hung up": "it may require TLS, or a client certificate that is valid, not expired, of an authority it trusts",
}


def error_from_call(error: object) -> e.FerruleError:
    """Return the typed error of what gRPC raised for a call; sync calls raise objects that are a ``grpc.Call`` too.

    Its class follows the ``ErrorInfo`` reason, or one of the client's own if gRPC itself failed the call without any.
    """
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return e.InternalError(grpc.StatusCode.UNKNOWN, "UNKNOWN", str(error))
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # a proxy rewrote the code or the message: the details no longer belong to them
        status = None
    if status is not None:
        return error_from_status(status)
    return _without_details(error.code(), error.details() or "")


def error_from_status(status: status_pb2.Status) -> e.FerruleError:
    """Return the typed error of a ``google.rpc.Status``, as it stands in the items of batches and streams."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    info, retry, request = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        for message in (info, retry, request):
            if detail.Is(message.DESCRIPTOR):
                detail.Unpack(message)
    if not info.reason:
        return _without_details(code, status.message)
    metadata = dict(info.metadata)
    if request.field_violations:
        metadata.setdefault("field", request.field_violations[0].field)
    error = _class_of(code, info.reason)(code, info.reason, status.message, metadata)
    if isinstance(error, (e.ResourceExhaustedError, e.UnavailableError)) and retry.HasField("retry_delay"):
        error.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return error


def is_transport_break(error: e.FerruleError) -> bool:
    """Report whether the call failed on the way, so that another attempt may succeed.

    Directly a dead server is UNAVAILABLE without details; behind a proxy it is INTERNAL with RST_STREAM. The server may
    or may not have run the call. After REQUEST_TIMEOUT it certainly did not: the request never arrived.
    """
    return error.reason in ("CONNECTION_FAILED", "CONNECTION_LOST", "INSTANCE_UNREACHABLE", "REQUEST_TIMEOUT")


def may_have_happened(error: BaseException) -> bool:
    """Return whether a request that failed like this may still have been run: nobody said that it was not."""
    if not isinstance(error, e.FerruleError) or type(error) is e.FerruleError:
        return True
    return isinstance(error, _UNCLEAR) and not isinstance(error, (e.RequestTimeoutError, e.RestoringError))


def no_answer(*, is_late: bool) -> e.FerruleError:
    """Return the error for a call that ended well but without its reply; late, if its deadline has passed."""
    code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.UNAVAILABLE
    return _without_details(code, "the call ended without an answer")


def cut_off(details: str) -> e.UnavailableError:
    """Return the error for a call that the other side cancelled."""
    text = f"the call was cut off by the server, or on the way ({details})"
    return e.UnavailableError(grpc.StatusCode.CANCELLED, "CONNECTION_LOST", text)


def behind_proxy(target: str, instance: str, details: str) -> e.UnavailableError | None:
    """Return the error for a proxy at ``target`` that cannot reach a server; None: these are no proxy's words."""
    if not any(text in details for text in _PROXY_NEVER_SENT):
        return None
    metadata, code = {"target": target, "details": details}, grpc.StatusCode.UNAVAILABLE
    if not instance:
        return e.UnavailableError(code, "CONNECTION_FAILED", f"the proxy at {target} reaches no server", metadata)
    text = f"the proxy at {target} cannot reach instance {instance!r}; a process that ended took its sequences along"
    return e.InstanceUnreachableError(code, "INSTANCE_UNREACHABLE", text, {**metadata, "instance": instance})


def no_server(target: str, details: str) -> e.UnavailableError:
    """Return the error for an address where no server answers; gRPC's own long text is in its metadata."""
    cause = next((short for text, short in _WHY_NOT if text in details.lower()), "cannot connect")
    if cause == "connection refused":
        cause += _by_whom(target, details)
    text = f'no server at {target} ({cause}); start one with "ferrule serve", or name another target'
    metadata = {"target": target, "cause": cause, "details": details}
    if (advice := _TLS_ADVICE.get(cause)) is not None:
        text = f"the server at {target} cannot be used: {cause}; {advice}"
        metadata["advice"] = advice
    return e.UnavailableError(grpc.StatusCode.UNAVAILABLE, "CONNECTION_FAILED", text, metadata)


def _by_whom(target: str, details: str) -> str:
    """Name the address that refused, where the target is a name: gRPC tells of the last of its addresses only."""
    found = _ADDRESS.search(details)
    address = unquote(found[1]) if found else ""
    return f" by {address}, the last address tried" if address and address not in target else ""


def _class_of(code: grpc.StatusCode, reason: str) -> type[e.FerruleError]:
    if reason.startswith("QUOTA_"):
        return e.QuotaExceededError
    return BY_REASON.get(reason) or BY_CODE.get(code, e.FerruleError)


def _without_details(code: grpc.StatusCode, message: str) -> e.FerruleError:
    """Name an error that gRPC made by itself."""
    reason = code.name
    if code is grpc.StatusCode.UNAVAILABLE:
        reason = "CONNECTION_FAILED" if any(text in message for text in _NEVER_SENT) else "CONNECTION_LOST"
    elif code is grpc.StatusCode.INTERNAL and any(text in message for text in _BROKEN):
        reason = "CONNECTION_LOST"
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        reason = "MESSAGE_TOO_LARGE"
    elif code is grpc.StatusCode.UNIMPLEMENTED:
        reason = "RPC_UNKNOWN"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"the timeout passed before the answer came; give the call a longer timeout ({message})"
    return _class_of(code, reason)(code, reason, message)
