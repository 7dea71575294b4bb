"""Runs the steps of conformance cases with grpcio and the committed stubs; the protocol is in the README above."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from ferrule.v1 import admin_pb2_grpc, executor_pb2_grpc, tokenizer_pb2_grpc

DEADLINE_S = 20.0
LIMIT = 64 << 20
STUBS: dict[str, Callable[[grpc.Channel], Any]] = {
    "ferrule.v1.ModelExecutorService": executor_pb2_grpc.ModelExecutorServiceStub,
    "ferrule.v1.TokenizerService": tokenizer_pb2_grpc.TokenizerServiceStub,
    "ferrule.v1.AdminService": admin_pb2_grpc.AdminServiceStub,
    "grpc.health.v1.Health": health_pb2_grpc.HealthStub,
}
assert error_details_pb2.ErrorInfo.DESCRIPTOR is not None  # its import lets JSON resolve the details of a status


def to_line(kind: str, message: Message) -> str:
    """Return an answer that carries a message."""
    return f"{kind}\t{json_format.MessageToJson(message, indent=None)}"


def end_of(call: Any) -> str:
    """Return the line that tells how a call ended."""
    status = rpc_status.from_call(call)
    if status is None:
        status = status_pb2.Status(code=call.code().value[0], message=call.details() or "")
    return to_line("end", status)


class Runner:
    """Takes commands; at most one stream is open."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.Channel] = {}
        self._frames: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._replies: Any = None
        self._request: type[Message] = Message

    def _method(self, target: str, name: str) -> tuple[Any, type[Message], bool]:
        """Return the stub's method, its request type, and whether requests come as a stream."""
        if target not in self._channels:
            options = [("grpc.max_receive_message_length", LIMIT), ("grpc.max_send_message_length", LIMIT)]
            self._channels[target] = grpc.insecure_channel(target, options=options)
        service, _, method = name.partition("/")
        found = descriptor_pool.Default().FindMethodByName(f"{service}.{method}")
        stub = STUBS[service](self._channels[target])
        return getattr(stub, method), GetMessageClass(found.input_type), found.client_streaming

    def unary(self, target: str, name: str, request: str, *pairs: str) -> str:
        """Call a method with one request and one reply."""
        method, kind, _ = self._method(target, name)
        try:
            reply = method(json_format.Parse(request, kind()), **_options(pairs))
        except grpc.RpcError as error:
            return end_of(error)
        return to_line("message", reply)

    def open(self, target: str, name: str, *pairs: str) -> str:
        """Begin a stream; a method that takes one request begins with it."""
        self._frames = queue.SimpleQueue()
        method, self._request, is_stream = self._method(target, name)

        def start() -> Iterator[Message]:
            request = iter(self._frames.get, None) if is_stream else self._frames.get()
            return method(request, **_options(pairs))  # type: ignore[no-any-return]

        self._replies = start() if is_stream else start
        return "ok"

    def _started(self) -> Any:
        """Return the call, begun by now."""
        if callable(self._replies) and not isinstance(self._replies, grpc.Call):
            self._replies = self._replies()
        return self._replies

    def send(self, request: str) -> str:
        """Write a frame."""
        self._frames.put(json_format.Parse(request, self._request()))
        self._started()
        return "ok"

    def close(self) -> str:
        """Say that no frame follows."""
        self._frames.put(None)
        return "ok"

    def cancel(self) -> str:
        """Give the call up."""
        self._started().cancel()
        return "ok"

    def receive(self) -> str:
        """Wait for a frame, or the end."""
        replies = self._started()
        try:
            return to_line("message", next(replies))
        except StopIteration:
            return to_line("end", status_pb2.Status())
        except grpc.RpcError:
            return end_of(replies)


def _options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of a call; ``grpc-encoding`` is no metadata, but says how the request is compressed."""
    metadata = dict(zip(pairs[::2], pairs[1::2], strict=True))
    is_packed = metadata.pop("grpc-encoding", "") == "gzip"
    compression = grpc.Compression.Gzip if is_packed else None
    return {"timeout": DEADLINE_S, "metadata": list(metadata.items()), "compression": compression}


def main() -> None:
    """Answer each command line with one line."""
    runner = Runner()
    for line in sys.stdin:
        command, *fields = line.rstrip("\n").split("\t")
        sys.stdout.write(f"{getattr(runner, command)(*fields)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
