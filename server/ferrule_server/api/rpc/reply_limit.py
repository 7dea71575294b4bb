"""The largest reply that the client of a call accepts.

gRPC discards a reply that is larger than its client accepts, after the call has run. A request whose reply could be
larger is refused instead, before anything runs.
"""

from __future__ import annotations

from typing import Final

from ferrule_server.api.rpc.calls import Context
from ferrule_server.errors import InvalidRequest, ReplyTooLarge

REPLY_BYTES_KEY: Final = "ferrule-max-reply-bytes"
"""Key of the metadata in which a client says how large a message it accepts, in bytes."""
USUAL_REPLY_BYTES: Final = 4 << 20
"""What every client accepts, whatever it says: the default of gRPC's implementations."""
_UNBOUNDED: Final = 1 << 62
_MOST_DIGITS: Final = 18


def check_reply(context: Context, num_bytes: int, field: str, most_bytes: int = _UNBOUNDED) -> None:
    """Check that the client of a call accepts a reply of this size.

    Args:
        context: The call. Its metadata is read only for replies beyond the usual size.
        num_bytes: Upper bound of the size of the reply.
        field: Path of the field that makes the reply large.
        most_bytes: Largest reply of the server, unless that was checked before.

    Raises:
        ReplyTooLarge: The client may not accept the reply, or the server does not send it.
        InvalidRequest: The metadata is not a number.
    """
    if num_bytes > min(most_bytes, USUAL_REPLY_BYTES):
        limit_bytes = min(most_bytes, _accepted_bytes(context))
        if num_bytes > limit_bytes:
            raise ReplyTooLarge(field, num_bytes, limit_bytes)


def _accepted_bytes(context: Context) -> int:
    """Return the number in the metadata of a call, at least the usual size, below which nobody is asked."""
    for key, value in context.invocation_metadata() or ():
        if key == REPLY_BYTES_KEY:
            if not (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS):
                raise InvalidRequest(REPLY_BYTES_KEY, f"must be a number of bytes, got {value[:64]!r}")
            return max(int(value), USUAL_REPLY_BYTES)
    return USUAL_REPLY_BYTES
