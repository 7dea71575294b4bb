"""The methods that cases can call, taken from the compiled protos: nothing is listed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from grpc_health.v1 import health_pb2

from ferrule.v1 import admin_pb2, executor_pb2, tokenizer_pb2

_FILES: Final = (executor_pb2, tokenizer_pb2, admin_pb2, health_pb2)


def _methods() -> Mapping[str, bool]:
    return {
        f"{service.full_name}/{method.name}": method.client_streaming or method.server_streaming
        for file in _FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


METHODS: Final[Mapping[str, bool]] = _methods()
"""Whether it has a stream, by ``package.Service/Method``: the names of methods alone are not unique."""


def full_name(call: str) -> str:
    """Return ``package.Service/Method``; a case may leave out the package, and the executor's service.

    Raises:
        LookupError: There is no such method.
    """
    wanted = call if "/" in call else f"ModelExecutorService/{call}"
    found = [name for name in METHODS if name == wanted or name.endswith(f".{wanted}")]
    if len(found) != 1:
        raise LookupError(f"no method {call}")
    return found[0]
