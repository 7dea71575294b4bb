# Written by tools/strip_async.py from ../aio/_connection.py: change that and run `make sync`.
"""Calls to one server with a deadline, retries and typed errors."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from ferrule.v1 import cache_pb2, executor_pb2, tokenizer_pb2, types_pb2
from ferrule_client import _check, _convert
from ferrule_client._channel import Extra
from ferrule_client._messages import Reading, inline_masks, tokenize_request
from ferrule_client._parts import HandleLimit
from ferrule_client._retry import Attempts, RetrySettings
from ferrule_client._route import instance_of, instance_of_handle
from ferrule_client._status import behind_proxy, cut_off, error_from_call, no_answer, no_server
from ferrule_client._timeouts import USE_DEFAULT, Timeout, Until, UseDefault
from ferrule_client.errors import (
    CallCancelledError,
    FerruleError,
    InstanceUnreachableError,
    MaskUnknownError,
    UnavailableError,
    WrongInstanceError,
)
from ferrule_client.masks import TokenMask
from ferrule_client.sync._stream_call import OpenCall, open_replies
from ferrule_client.sync._wire import Wire
from ferrule_client.types import Capabilities, ChatPrompt, Durability, Handle, ModelInfo, TlsConfig, Tokens

_log = logging.getLogger(__name__)

REQUEST_IDS = "request_id"
"""The feature of a server that makes the sequences of one request id once."""

DURABLE = "durable_handles"
"""The feature of a server whose sequences outlive it."""

_GONE_S = 5.0
"""How long one attempt at an instance that was found unreachable is enough, for the calls on its other sequences."""

_ASK_S = 2.0
"""How long the limit of handles may be asked for; a call that does not learn it goes on with the assumed one."""

_USUAL_BLOCK_SIZE = 16

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class Connection:
    """One channel, shared by a client and everything it makes; safe to use from several threads.

    Its arguments are those of the client; calls that name no handle are for ``instance``.

    Attributes:
        durability: The level of new sequences; None: the server's default.
        on_retry: Called with what an attempt failed with, before each wait for the next attempt.
    """

    def __init__(
        self,
        target: str,
        token: str | None,
        tls: bool | TlsConfig | None,
        timeout: float | None,
        retry: RetrySettings,
        *,
        instance: str | None = None,
        extra: Extra | None = None,
        durability: Durability | None = None,
    ) -> None:
        self.target = _check.target(target)
        _check.seconds("timeout", timeout)
        _check.token(token)
        _check.instance(instance)
        _convert.durability_to_message(durability)
        self.durability = durability
        self._instance = instance or ""
        self._unreachable: dict[str, float] = {}
        self.timeout = None if timeout == math.inf else timeout
        self._retry = retry
        self.is_closed = False
        self.on_retry: Callable[[FerruleError], object] | None = None
        self._model_info: ModelInfo | None = None
        self._capabilities: Capabilities | None = None
        self.handle_limit = HandleLimit()
        self._masks: weakref.WeakValueDictionary[bytes, TokenMask] = weakref.WeakValueDictionary()
        self.wire = Wire(target, token, tls, extra)
        self.executor, self.tokenizer, self.admin = self.wire.executor, self.wire.tokenizer, self.wire.admin

    @property
    def block_size(self) -> int:
        """Tokens in a block of the KV pool: the server's own size if it has said it, else the usual one."""
        return _USUAL_BLOCK_SIZE if self._capabilities is None else self._capabilities.block_size

    def resolve(self, timeout: Timeout) -> float | None:
        """Return the seconds a call may take.

        Raises:
            ValueError: They are not more than 0.
        """
        if isinstance(timeout, UseDefault):
            return self.timeout
        if isinstance(timeout, Until):
            return max(0.0, timeout.end_s - time.monotonic())
        _check.seconds("timeout", timeout)
        return None if timeout == math.inf else timeout

    def until(self, timeout: Timeout) -> Until | None:
        """Return a time limit as the moment it ends, for all the calls that one method may make."""
        limit_s = self.resolve(timeout)
        return None if limit_s is None else Until(time.monotonic() + limit_s)

    def attempts(
        self,
        timeout: Timeout,
        *,
        creates: bool = False,
        has_request_id: bool = False,
        is_patient: bool = False,
        on_sequence: bool = False,
    ) -> Attempts:
        """Return the deadline and the retries of one call."""
        return Attempts(
            self._retry,
            self.resolve(timeout),
            creates=creates,
            has_request_id=has_request_id,
            is_patient=is_patient,
            on_sequence=on_sequence,
            is_durable=None if self._capabilities is None else DURABLE in self._capabilities.features,
        )

    def wait(self, attempts: Attempts, error: FerruleError) -> None:
        """Wait before the next attempt.

        Whether the server honours request ids is asked for only here, when a creation has broken, and once; so is
        whether its sequences outlive it, when it goes down under a call on one.

        Raises:
            FerruleError: ``error``, which the last attempt failed with, if there is to be no further one.
        """
        if attempts.needs_to_know(error):
            attempts.is_repeatable = self._has_feature(REQUEST_IDS, attempts)
        if attempts.needs_durability(error):
            attempts.is_durable = self._has_feature(DURABLE, attempts)
        is_dead = isinstance(error, InstanceUnreachableError) and not attempts.waits_for(error)
        if is_dead and time.monotonic() < self._unreachable.get(error.metadata["instance"], 0.0):
            raise error
        try:
            pause_s = attempts.pause_s(error)
        except InstanceUnreachableError as dead:
            if attempts.has_tried_all:  # else this call had no time: that says nothing to those that have
                self._unreachable[dead.instance] = time.monotonic() + _GONE_S
            raise
        if self.on_retry is not None:
            self.on_retry(error)
        self.sleep(pause_s)

    def sleep(self, seconds: float) -> None:
        """Wait before another attempt."""
        self.wire.pause(seconds)

    def unary(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        *,
        timeout: Timeout = USE_DEFAULT,
        creates: bool = False,
        has_request_id: bool = False,
    ) -> _Reply:
        """Run one call, again if that is safe.

        Args:
            method: A method of one of the stubs.
            request: Its request.
            timeout: Seconds for all attempts together.
            creates: True: the call makes new sequences.
            has_request_id: True: such a call carries an id, the same in all its attempts.

        Raises:
            FerruleError: The call failed for good.
        """
        return self.run(method, request, self.attempts(timeout, creates=creates, has_request_id=has_request_id))

    def run(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        attempts: Attempts,
        instance: str = "",
    ) -> _Reply:
        """Run one call as ``unary`` does, with attempts that may be under way, at an instance or that of its handle."""
        instance, told = instance or self.instance_of(request), ""
        while True:
            self._check_open()
            try:
                reply = self.wire.call(method, request, attempts.remaining(), instance)
            except grpc.RpcError as error:
                ours = self.typed(error, instance)
                if isinstance(ours, WrongInstanceError) and not told and ours.instance not in (None, instance):
                    instance = told = ours.instance or ""  # once: it is told where the sequence is
                elif not self.restore_masks(ours, [request], attempts):
                    self.wait(attempts, ours)
                continue
            except ValueError:  # gRPC's answer to a channel that was closed just now
                if not self.is_closed:
                    raise
                continue
            if reply is not None:
                return reply
            self.wait(attempts, no_answer(is_late=attempts.remaining() == 0))

    def instance_of(self, request: object) -> str:
        """Return the instance that a request is for; empty: any."""
        return instance_of(request) or self._instance

    def instance_of_handle(self, handle: Handle | types_pb2.KvCacheHandle) -> str:
        """Return the instance that a call on a sequence is for; empty: any."""
        return instance_of_handle(handle) or self._instance

    def open_replies(
        self, method: grpc.UnaryStreamMultiCallable[_Request, _Reply], request: _Request, instance: str = ""
    ) -> OpenCall[_Reply]:
        """Open a call that answers with a stream of replies, at an instance or that of its handle; without retries.

        Raises:
            CallCancelledError: The client is closed.
        """
        self._check_open()
        try:
            return open_replies(self.wire, method, request, instance or self.instance_of(request))
        except ValueError:  # gRPC's answer to a channel that was closed just now
            self._check_open()
            raise

    def receive(self, call: OpenCall[_Reply], attempts: Attempts) -> _Reply | FerruleError:
        """Return the next reply of an open call, or the error that it broke by.

        Raises:
            DeadlineExceededError: Nothing came in time.
            CallCancelledError: The call or the client was closed meanwhile.
        """
        try:
            return call.receive(attempts.remaining())
        except grpc.RpcError as error:
            return self.typed(error, call.instance)
        except StopIteration:
            text = "the server ended the call before its end"
            return UnavailableError(grpc.StatusCode.UNAVAILABLE, "CONNECTION_LOST", text)

    def typed(self, error: grpc.RpcError, instance: str = "") -> FerruleError:
        """Return our error for one of gRPC's, which is its cause.

        Where nobody listens, it names the address, or the instance behind it. A call that was cancelled, though not by
        closing this client, broke like a connection: the server, or a proxy, went down under it.
        """
        ours = error_from_call(error)
        if ours.reason == "CONNECTION_FAILED":
            ours = behind_proxy(self.target, instance, ours.message) or no_server(self.target, ours.message)
        elif isinstance(ours, CallCancelledError) and not self.is_closed:
            ours = cut_off(ours.message)
        ours.__cause__ = error.with_traceback(None)  # else each would keep the other alive
        return ours

    def model_info(self, timeout: Timeout = USE_DEFAULT, *, is_patient: bool = False) -> ModelInfo:
        """Return the model's description, asked for once: it does not change while the server runs."""
        if self._model_info is None:
            attempts = self.attempts(timeout, is_patient=is_patient)
            reply = self.run(self.executor.GetModelInfo, executor_pb2.GetModelInfoRequest(), attempts)
            self._model_info = _convert.model_info_from_message(reply.info)
        return self._model_info

    def capabilities(self, timeout: Timeout = USE_DEFAULT) -> Capabilities:
        """Return what the server can do, asked for once."""
        return self._capabilities or self._ask_capabilities(self.attempts(timeout))

    def ask_handle_limit(self, num_handles: int, timeout: Timeout) -> None:
        """Ask the server how many handles a request may hold, once, if a list is longer than the assumed limit.

        If the server does not say in a quarter of the time, the assumed limit stands, and refusals lower it.
        """
        if num_handles <= self.handle_limit.most or self.handle_limit.is_asked:
            return
        self.handle_limit.is_asked = True
        limit_s = self.resolve(timeout)
        ask_s = _ASK_S if limit_s is None else max(0.001, min(_ASK_S, limit_s / 4))
        try:
            self._ask_capabilities(self.attempts(ask_s))
        except FerruleError as error:
            _log.debug("limit of handles unknown reason=%s", error.reason)

    def register_masks(self, bits: Sequence[bytes], attempts: Attempts, instance: str = "") -> list[TokenMask]:
        """Have packed masks kept on the server, or one instance, and return them with their names.

        They are registered again when it drops them.
        """
        most = max(1, (self._capabilities or self._ask_capabilities(attempts)).max_masks_per_request)
        masks: list[TokenMask] = []
        for start in range(0, len(bits), most):
            part = bits[start : start + most]
            request = cache_pb2.RegisterTokenMaskRequest(masks=part)
            reply = self.run(self.executor.RegisterTokenMask, request, attempts.rest(), instance)
            for one, name in zip(part, reply.fingerprints, strict=True):
                masks.append(self._masks.get(name) or TokenMask(bits=one, fingerprint=name))
                self._masks[name] = masks[-1]
        return masks

    def restore_masks(self, error: FerruleError, requests: Sequence[object], attempts: Attempts) -> bool:
        """Register masks of ours again that the server has dropped; tell whether the requests may be sent once more.

        Of several servers the one that has the sequence is given them. A request that names no handle may reach another
        one next time, so if registering has not helped it, it takes the masks along.
        """
        if not isinstance(error, MaskUnknownError) or not attempts.may_restore_masks():
            return False
        messages = [one for one in requests if isinstance(one, Message)]
        sent = b"".join(one.SerializeToString() for one in messages)
        ours = {name: mask for name, mask in list(self._masks.items()) if name in sent}
        if not ours:
            return False
        instance = self.instance_of(messages[0])
        if not instance and attempts.num_mask_restores > 1:
            return inline_masks(messages, {name: mask.bits or b"" for name, mask in ours.items()})
        bits = [mask.bits or b"" for mask in ours.values()]
        return self.register_masks(bits, attempts.rest(), instance) == list(ours.values())

    def decode_text(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Return the text of drawn tokens without special ones, and whether it ends inside a character.

        It belongs to a loop over a sequence, so it waits for the server as the loop's other calls do.
        """
        request = tokenizer_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=True)
        reply = self.run(self.tokenizer.Detokenize, request, self.attempts(USE_DEFAULT, on_sequence=True))
        return reply.text, reply.ends_mid_character

    def encode_text(self, text: str, reads: Reading, *, timeout: Timeout = USE_DEFAULT, **waits: bool) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            reads: How it becomes token ids.
            timeout: Seconds for all attempts together.
            waits: ``is_patient`` and ``on_sequence`` of ``Attempts``: the text of a call waits for the server as the
                call itself does.

        Raises:
            TypeError: It is not a text.
            ValueError: It cannot be written in UTF-8.
        """
        request = tokenize_request(text, reads)
        reply = self.run(self.tokenizer.Tokenize, request, self.attempts(timeout, **waits))
        return list(reply.token_ids)

    def ids_of(self, tokens: Tokens | str, reads: Reading, *, timeout: Timeout, **waits: bool) -> list[int]:
        """Return the ids of tokens or of a text. Arguments and errors are those of ``encode_text``, ``token_list``."""
        if not isinstance(tokens, str):
            return _check.token_list(tokens)
        return self.encode_text(tokens, reads, timeout=timeout, **waits)

    def render(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, timeout: Timeout, *, on_sequence: bool = False
    ) -> ChatPrompt:
        """Return a conversation as the chat template writes it; ``on_sequence``: that of a chat, which recovers."""
        attempts = self.attempts(timeout, is_patient=on_sequence, on_sequence=on_sequence)
        reply = self.run(self.tokenizer.ApplyChatTemplate, request, attempts)
        return ChatPrompt(reply.text, tuple(reply.token_ids), reply.tools_ignored)

    def close(self) -> None:
        """Close the channel; calls under way are cancelled. Closing twice changes nothing."""
        self.is_closed = True
        self.wire.close()

    def _check_open(self) -> None:
        if self.is_closed:
            text = "the client is closed; what it left on the server lives there until the leases end"
            raise CallCancelledError(grpc.StatusCode.CANCELLED, "CANCELLED", text)

    def _ask_capabilities(self, attempts: Attempts) -> Capabilities:
        reply = self.run(self.executor.GetCapabilities, executor_pb2.GetCapabilitiesRequest(), attempts)
        self._capabilities = _convert.capabilities_from_message(reply.capabilities)
        self.handle_limit.advertise(self._capabilities.max_handles_per_request)
        return self._capabilities

    def _has_feature(self, feature: str, attempts: Attempts) -> bool:
        """Return whether the server has a feature; no, if it cannot be asked in the time that is left."""
        try:
            capabilities = self._capabilities or self._ask_capabilities(attempts.rest())
        except FerruleError as error:
            _log.debug("capabilities unknown after a call broke reason=%s", error.reason)
            return False
        return feature in capabilities.features
