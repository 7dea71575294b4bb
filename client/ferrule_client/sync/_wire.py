"""What touches the network: the channel to one server, its calls and pauses, without retries or types of ours."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol, TypeVar

import grpc

from ferrule.v1 import admin_pb2_grpc, executor_pb2, executor_pb2_grpc, tokenizer_pb2_grpc
from ferrule_client._channel import (
    CHANNEL_OPTIONS,
    HEALTH_CHECK,
    Extra,
    Labels,
    Metadata,
    secrets_of,
    warn_of_plain_token,
)
from ferrule_client.types import TlsConfig

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


_Message_co = TypeVar("_Message_co", covariant=True)


class Reader(Protocol[_Message_co]):
    """The reading side of a call that answers with a stream."""

    def __next__(self) -> _Message_co: ...

    def cancel(self) -> bool:
        """End the call at once."""
        ...


class Wire:
    """One channel and the stubs on it; safe to use from several threads.

    Its arguments are those of ``Connection``; ``labels`` makes the metadata of calls, in whose thread a call is made.
    """

    def __init__(self, target: str, token: str | None, tls: bool | TlsConfig | None, extra: Extra | None) -> None:
        self.labels = Labels(token, extra)
        self.channel = _open_channel(target, tls, has_token=bool(token))
        self._probe: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(HEALTH_CHECK)
        self.executor = executor_pb2_grpc.ModelExecutorServiceStub(self.channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        timeout: float | None,
        instance: str = "",
    ) -> _Reply | None:
        """Run one call once, in at most so many seconds, and return the reply.

        None: gRPC said OK and had no message, for a call cut off by its deadline just as it ended.
        """
        return method(request, timeout=timeout, metadata=self.labels.of(instance))

    def open_stream(
        self, requests: Iterator[executor_pb2.StreamDecodeRequest], metadata: Metadata
    ) -> Reader[executor_pb2.StreamDecodeResponse]:
        """Open one StreamDecode, without a deadline of its own."""
        return self.executor.StreamDecode(requests, metadata=metadata)

    def pause(self, seconds: float) -> None:
        """Wait, and let the channel go on connecting meanwhile.

        A sync channel makes progress only while a call waits on it: between calls that fail at once, a server that
        came up is found 5 to 10 s late (measured with grpcio 1.75). So a health check waits for it; its answer, if
        there is one, does not matter.
        """
        end = time.monotonic() + seconds
        # Not there in time, without a health service, or closed by another thread: all the same here.
        with contextlib.suppress(grpc.RpcError, ValueError):
            self._probe(b"", timeout=seconds, wait_for_ready=True)
        time.sleep(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Close the channel; calls under way are cancelled. Closing twice changes nothing."""
        self.channel.close()


def _open_channel(target: str, tls: bool | TlsConfig | None, *, has_token: bool) -> grpc.Channel:
    if not tls:
        if has_token:
            warn_of_plain_token(target)
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    credentials, options = secrets_of(tls)
    return grpc.secure_channel(target, credentials, options=options)
