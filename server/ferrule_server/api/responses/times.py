"""Times as protobuf messages."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def duration(seconds: float) -> Duration:
    """Return a duration, rounded to nanoseconds."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def timestamp(unix_ns: int) -> Timestamp:
    """Return a wall-clock time."""
    message = Timestamp()
    message.FromNanoseconds(unix_ns)
    return message
