"""What touches the network: the channel to one server, its calls and pauses, without retries or types of ours."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import grpc

from ferrule.v1 import admin_pb2_grpc, executor_pb2, executor_pb2_grpc, tokenizer_pb2_grpc
from ferrule_client._nudge import NUDGE_TIMEOUT_S, Nudger
from ferrule_client._route import INSTANCE_KEY
from ferrule_client.types import TlsConfig

__all__ = [
    "CHANNEL_OPTIONS",
    "HEALTH_CHECK",
    "Extra",
    "FrameReader",
    "Labels",
    "Metadata",
    "ReplyReader",
    "Wire",
    "secrets_of",
    "warn_of_plain_token",
]

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")

_MAX_REPLY_BYTES = 256 << 20

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # What we may send is the server's to decide; what we take is bounded, as a guard against nonsense.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", _MAX_REPLY_BYTES),
    # Notice a dead peer while calls are open. Servers refuse pings more often than every 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # gRPC waits at least this long for the answer to a ping: 60 s unless set
    ("grpc.http2.max_pings_without_data", 0),
    # Retries are ours, where they can tell an append from a creation.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
"""Called with an empty request, bytes in and bytes out."""


Metadata = tuple[tuple[str, str | bytes], ...]
"""What travels with a call besides its message."""

Extra = Callable[[], Iterable[tuple[str, str | bytes]]]
"""Returns what the caller wants to travel with the call that is made now."""

_MOST_KNOWN = 256


class Labels:
    """Makes what travels with each call: the token, the instance that it is for, and what the caller adds.

    Each call also says how large a reply the channel takes, else the server would refuse replies beyond 4 MiB.

    Args:
        token: Bearer token sent with every call, or None.
        extra: Called for each attempt, in the thread that makes the call; None: nothing is added. What we set
            ourselves it cannot change.
    """

    def __init__(self, token: str | None, extra: Extra | None) -> None:
        self._always: Metadata = (("ferrule-max-reply-bytes", str(_MAX_REPLY_BYTES)),)
        if token:
            self._always = (*self._always, ("authorization", f"Bearer {token}"))
        self._extra = extra
        self._known: dict[str, Metadata] = {"": self._always}

    def of(self, instance: str) -> Metadata:
        """Return the metadata of a call.

        Args:
            instance: The one it is for; empty: any.
        """
        known = self._known.get(instance) or self._of_new(instance)
        if self._extra is None:
            return known
        ours = [key for key, _ in known]
        return (*known, *((key, value) for key, value in self._extra() if key not in ours))

    def _of_new(self, instance: str) -> Metadata:
        if not instance:
            return self._always
        if len(self._known) > _MOST_KNOWN:  # handles that came from elsewhere may name anything
            self._known.clear()
        made = self._known[instance] = (*self._always, (INSTANCE_KEY, instance))
        return made


class FrameReader(Protocol):
    """The reading side of one StreamDecode."""

    def __next__(self) -> executor_pb2.StreamDecodeResponse: ...

    def cancel(self) -> bool:
        """End the call at once."""
        ...


_Message_co = TypeVar("_Message_co", covariant=True)


class ReplyReader(Protocol[_Message_co]):
    """The reading side of one call that answers with a stream of replies."""

    def __next__(self) -> _Message_co: ...

    def cancel(self) -> bool:
        """End the call at once."""
        ...


class Wire:
    """One channel and the stubs on it; safe to use from several threads.

    Args:
        target: ``host:port`` or ``unix:PATH``, checked.
        token: Bearer token sent with every call, or None.
        tls: True or a ``TlsConfig`` for TLS, None for plain text.
        extra: Metadata for each call besides, or None.

    Attributes:
        labels: Makes the metadata of calls, in whose thread a call is made.
    """

    def __init__(self, target: str, token: str | None, tls: bool | TlsConfig | None, extra: Extra | None) -> None:
        self.labels = Labels(token, extra)
        self.channel = _open_channel(target, tls, has_token=bool(token))
        self._probe: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(HEALTH_CHECK)
        self.nudger = Nudger(functools.partial(_look, self._probe))
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
        """Run one call once and return the reply.

        Args:
            method: A method of a stub.
            request: Its request.
            timeout: Seconds it may take; None means no limit.
            instance: The one it is for; empty: any.

        Returns:
            The reply. None: gRPC said OK and had no message, for a call cut off by its deadline just as it ended.

        Raises:
            grpc.RpcError: The call failed.
        """
        metadata = self.labels.of(instance)
        with self.nudger:
            return method(request, timeout=timeout, metadata=metadata)

    def open_stream(self, requests: Iterator[executor_pb2.StreamDecodeRequest], metadata: Metadata) -> FrameReader:
        """Open one StreamDecode, without a deadline of its own."""
        return self.executor.StreamDecode(requests, metadata=metadata)

    def open_replies(
        self, method: grpc.UnaryStreamMultiCallable[_Request, _Reply], request: _Request, metadata: Metadata
    ) -> ReplyReader[_Reply]:
        """Open one call that answers with a stream of replies, without a deadline of its own."""
        return method(request, metadata=metadata)

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
        self.nudger.close()
        self.channel.close()


def _look(probe: grpc.UnaryUnaryMultiCallable[bytes, bytes]) -> None:
    """Send something over a channel; what comes of it, the calls on it hear by themselves."""
    with contextlib.suppress(grpc.RpcError, ValueError):
        probe(b"", timeout=NUDGE_TIMEOUT_S)


def _open_channel(target: str, tls: bool | TlsConfig | None, *, has_token: bool) -> grpc.Channel:
    if not tls:
        if has_token:
            warn_of_plain_token(target)
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    credentials, options = secrets_of(tls)
    return grpc.secure_channel(target, credentials, options=options)


def secrets_of(tls: bool | TlsConfig) -> tuple[grpc.ChannelCredentials, list[tuple[str, int | str]]]:
    """Return the credentials of an encrypted channel, and all its options."""
    config = tls if isinstance(tls, TlsConfig) else TlsConfig()
    options: list[tuple[str, int | str]] = list(CHANNEL_OPTIONS)
    if config.server_name:
        options.append(("grpc.ssl_target_name_override", config.server_name))
    keys = (config.root_certificates, config.private_key, config.certificate_chain)
    return grpc.ssl_channel_credentials(*keys), options


def warn_of_plain_token(target: str) -> None:
    """Warn where ``connect`` was called, if the token would leave this machine unencrypted."""
    host = target.rpartition(":")[0].strip("[]")
    is_local = target.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")
    if not is_local:
        warnings.warn(f"the token travels to {target} in plain text; use tls", stacklevel=6)
