"""The channel to one server, and calls on it with a deadline, retries and typed errors."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import grpc

from ferrule.v1 import executor_pb2, executor_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from ferrule_client import _check, _convert
from ferrule_client._retry import Attempts, RetrySettings
from ferrule_client._status import error_from_call, no_answer, no_server
from ferrule_client.errors import CallCancelledError, ExecutorError, UnsupportedError
from ferrule_client.types import Capabilities, ModelInfo, TlsConfig

__all__ = ["CHANNEL_OPTIONS", "USE_DEFAULT", "Connection", "FrameReader", "Timeout", "UseDefault"]

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # What we may send is the server's to decide; what we take is bounded, as a guard against nonsense.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 256 << 20),
    # Notice a dead peer while calls are open. Servers refuse pings more often than every 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Retries are ours, where they can tell an append from a creation.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


_HEALTH_CHECK = "/grpc.health.v1.Health/Check"  # called with an empty request, bytes in and bytes out


class UseDefault:
    """Says that a call takes the client's own timeout; None would mean no limit."""

    def __repr__(self) -> str:
        return "<the client's timeout>"


USE_DEFAULT = UseDefault()
Timeout = float | None | UseDefault


class FrameReader(Protocol):
    """The reading side of one StreamDecode."""

    def __next__(self) -> executor_pb2.StreamDecodeResponse: ...

    def cancel(self) -> bool:
        """End the call at once."""
        ...


class Connection:
    """One channel, shared by a client and everything it makes; safe to use from several threads.

    Args:
        target: ``host:port`` or ``unix:PATH``.
        token: Bearer token sent with every call, or None.
        tls: True or a ``TlsConfig`` for TLS, None for plain text.
        timeout: Seconds a call may take unless it says otherwise; None means no limit.
        retry: When calls are tried again.

    Raises:
        TypeError: The target is no text.
        ValueError: The target is malformed, or the timeout not more than 0.
    """

    def __init__(
        self, target: str, token: str | None, tls: bool | TlsConfig | None, timeout: float | None, retry: RetrySettings
    ) -> None:
        self.target = _check.target(target)
        _check.seconds("timeout", timeout)
        self.timeout = None if timeout == math.inf else timeout
        self._retry = retry
        self.is_closed = False
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._model_info: ModelInfo | None = None
        self._capabilities: Capabilities | None = None
        self.channel = _open_channel(target, tls, has_token=bool(token))
        self._probe: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(_HEALTH_CHECK)
        self.executor = executor_pb2_grpc.ModelExecutorServiceStub(self.channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(self.channel)

    def resolve(self, timeout: Timeout) -> float | None:
        """Return the seconds a call may take.

        Raises:
            ValueError: They are not more than 0.
        """
        if isinstance(timeout, UseDefault):
            return self.timeout
        _check.seconds("timeout", timeout)
        return None if timeout == math.inf else timeout

    def attempts(self, timeout: Timeout, *, creates: bool = False) -> Attempts:
        """Return the deadline and the retries of one call."""
        return Attempts(self._retry, self.resolve(timeout), creates=creates)

    def sleep(self, seconds: float) -> None:
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

    def unary(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        *,
        timeout: Timeout = USE_DEFAULT,
        creates: bool = False,
    ) -> _Reply:
        """Run one call, again if that is safe.

        Args:
            method: A method of one of the stubs.
            request: Its request.
            timeout: Seconds for all attempts together.
            creates: True: the call makes new sequences, so that only one that never ran may be tried again.

        Returns:
            The reply.

        Raises:
            ExecutorError: The call failed for good.
        """
        attempts = self.attempts(timeout, creates=creates)
        while True:
            if self.is_closed:
                text = "the client is closed; what it left on the server lives there until the leases end"
                raise CallCancelledError(grpc.StatusCode.CANCELLED, "CANCELLED", text)
            try:
                reply: _Reply | None = method(request, timeout=attempts.remaining(), metadata=self._metadata)
            except grpc.RpcError as error:
                self.sleep(attempts.pause_s(self.typed(error), error))
                continue
            if reply is not None:
                return reply
            # gRPC says OK and has no message: a call that was cut off by its deadline just as it ended.
            self.sleep(attempts.pause_s(no_answer(is_late=attempts.remaining() == 0)))

    def typed(self, error: grpc.RpcError) -> ExecutorError:
        """Return our error for one of gRPC's; where nobody listens, it names the address."""
        ours = error_from_call(error)
        return no_server(self.target, ours.message) if ours.reason == "CONNECTION_FAILED" else ours

    def open_stream(self, requests: Iterator[executor_pb2.StreamDecodeRequest]) -> FrameReader:
        """Open one StreamDecode, without a deadline of its own."""
        return self.executor.StreamDecode(requests, metadata=self._metadata)

    def model_info(self, timeout: Timeout = USE_DEFAULT) -> ModelInfo:
        """Return the model's description, asked for once: it does not change while the server runs."""
        if self._model_info is None:
            reply = self.unary(self.executor.GetModelInfo, executor_pb2.GetModelInfoRequest(), timeout=timeout)
            self._model_info = _convert.model_info_from_message(reply.info)
        return self._model_info

    def capabilities(self, timeout: Timeout = USE_DEFAULT) -> Capabilities:
        """Return what the server can do, asked for once."""
        if self._capabilities is None:
            reply = self.unary(self.executor.GetCapabilities, executor_pb2.GetCapabilitiesRequest(), timeout=timeout)
            self._capabilities = _convert.capabilities_from_message(reply.capabilities)
        return self._capabilities

    def require(self, feature: str, timeout: Timeout = USE_DEFAULT) -> None:
        """Make sure that the server has a feature.

        Raises:
            UnsupportedError: It has not.
        """
        if feature not in self.capabilities(timeout).features:
            text = f"this server does not serve {feature}: it is not in client.capabilities().features"
            metadata = {"feature": feature}
            raise UnsupportedError(grpc.StatusCode.UNIMPLEMENTED, "FEATURE_UNSUPPORTED", text, metadata)

    def decode_text(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Return the text of tokens without special ones, and whether it ends inside a character."""
        request = tokenizer_pb2.TokenizerServiceDecodeRequest(token_ids=token_ids, skip_special_tokens=True)
        reply = self.unary(self.tokenizer.Decode, request)
        return reply.text, reply.ends_mid_character

    def close(self) -> None:
        """Close the channel; calls under way are cancelled. Closing twice changes nothing."""
        self.is_closed = True
        self.channel.close()


def _open_channel(target: str, tls: bool | TlsConfig | None, *, has_token: bool) -> grpc.Channel:
    options: list[tuple[str, int | str]] = list(CHANNEL_OPTIONS)
    if not tls:
        if has_token and not _is_local(target):
            warnings.warn(f"the token travels to {target} in plain text; use tls", stacklevel=4)
        return grpc.insecure_channel(target, options=options)
    config = tls if isinstance(tls, TlsConfig) else TlsConfig()
    if config.server_name:
        options.append(("grpc.ssl_target_name_override", config.server_name))
    credentials = grpc.ssl_channel_credentials(config.root_certificates, config.private_key, config.certificate_chain)
    return grpc.secure_channel(target, credentials, options=options)


def _is_local(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]")
    return target.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")
