"""The calls of one cache on its sequence, and on a new one of the same tokens when that is lost."""

from __future__ import annotations

import dataclasses
import logging
from typing import TypeVar

import grpc

from ferrule.v1 import cache_pb2
from ferrule_client import _convert, _messages
from ferrule_client._connection import Connection, Timeout
from ferrule_client._lease import LeaseKeeper
from ferrule_client._messages import PromptOptions, SequenceRequest
from ferrule_client._retry import Attempts
from ferrule_client._route import is_lost
from ferrule_client._tip import Tip
from ferrule_client.errors import ExecutorError
from ferrule_client.types import Handle

__all__ = ["SequenceCalls"]

_log = logging.getLogger(__name__)

_Request = TypeVar("_Request", bound=SequenceRequest)
_Reply = TypeVar("_Reply")

_END_S = 5.0
_OTHER_MODEL = "the server runs another model now, for which the same tokens are another state: nothing was recovered"


class SequenceCalls:
    """Runs the calls on one sequence, keeps its lease, and brings it back when it is lost and that was asked for.

    Args:
        connection: Where to call.
        keeper: Renews leases.
        tip: The sequence.
        keep_alive: True: its lease is renewed in the background.
        recovery: How to prefill its tokens again when it is lost; None: that is not done.

    Attributes:
        tip: The sequence.
    """

    def __init__(
        self,
        connection: Connection,
        keeper: LeaseKeeper,
        tip: Tip,
        *,
        keep_alive: bool,
        recovery: PromptOptions | None,
    ) -> None:
        self._connection = connection
        self._keeper = keeper
        self.tip = tip
        self._keep_alive = keep_alive
        self._recovery = recovery
        self._keep()

    @property
    def recovers(self) -> bool:
        """True: a lost sequence is brought back."""
        return self._recovery is not None

    def of_branch(self, tip: Tip, ttl: float | None) -> SequenceCalls:
        """Return the calls of a branch of this sequence, in the same manner.

        Args:
            tip: The branch.
            ttl: The lease in seconds that was asked for, if one was.
        """
        recovery = self._recovery and dataclasses.replace(
            self._recovery, ttl=self._recovery.ttl if ttl is None else ttl, reserve_length=None
        )
        return SequenceCalls(self._connection, self._keeper, tip, keep_alive=self._keep_alive, recovery=recovery)

    def call_once_more(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        timeout: Timeout,
        *,
        creates: bool = False,
    ) -> _Reply:
        """Run one call; when the sequence is lost and brought back, once more on the one that replaces it.

        Args:
            method: A method of the stub.
            request: Its request; aimed at the new sequence if need be.
            timeout: Seconds for everything together.
            creates: True: the call makes new sequences.

        Raises:
            ExecutorError: It failed; one that says the sequence is lost has its tokens.
        """
        has_id = bool(getattr(getattr(request, "input", request), "request_id", ""))
        attempts = self._connection.attempts(timeout, creates=creates, has_request_id=has_id, is_patient=self.recovers)
        try:
            return self._connection.run(method, request, attempts)
        except ExecutorError as error:
            if not is_lost(error, self.tip.handle):
                raise
            self.tip.tell(error)
            self.revive(error, attempts)
        _messages.aim(request, self.tip.handle)
        try:
            return self._connection.run(method, request, attempts)
        except ExecutorError as error:
            self.tip.tell(error)
            raise

    def revive(self, error: ExecutorError, attempts: Attempts) -> None:
        """Bring the lost sequence back, as a new one of the same tokens.

        Args:
            error: What said that it is lost.
            attempts: Those of the call that found out; the prefill has what is left of its time.

        Raises:
            ExecutorError: ``error``, if that is not done or cannot be, or what the prefill failed with.
        """
        token_ids = self.tip.token_ids
        if self._recovery is None or token_ids is None:
            raise error
        request = _messages.recovery_request(token_ids, self._recovery)
        rest = attempts.rest(creates=True, has_request_id=True)
        try:
            output = self._connection.run(self._connection.executor.Prefill, request, rest).output
        except ExecutorError as failure:
            failure.add_note(f"the sequence is lost ({error.reason}), and this is what prefilling it again failed with")
            raise
        before, handle = self.tip.handle, _convert.handle_from_message(output.kv_cache)
        if handle.lineage != before.lineage:
            self._end_stranger(handle)
            error.add_note(_OTHER_MODEL)
            raise error
        ids = before.handle_id, handle.handle_id
        _log.info("recovered handle_id=%s as=%s reason=%s length=%d", *ids, error.reason, handle.length)
        self.tip.revive(handle, _convert.granted_ttl_s(output))
        self._keep()

    def lease_anew(self, asked_s: float | None, granted_s: float | None) -> None:
        """Keep the sequence by its new lease, if it got one.

        Args:
            asked_s: What was asked for, in seconds; None: no other lease than before.
            granted_s: What the server granted, or None if it does not say.
        """
        if self._recovery is not None and asked_s is not None:
            self._recovery = dataclasses.replace(self._recovery, ttl=asked_s)
        if asked_s is not None or granted_s is not None:
            self.tip.ttl_s = granted_s
            self._keep()

    def reserved(self, length: int) -> None:
        """Take note that the sequence has room up to a length, so that the one that replaces it gets it too."""
        if self._recovery is not None:
            most = max(length, self._recovery.reserve_length or 0)
            self._recovery = dataclasses.replace(self._recovery, reserve_length=most)

    def give_up(self) -> None:
        """Mark the sequence as no longer ours."""
        self._keeper.remove(self.tip)
        self.tip.is_released = True

    def _keep(self) -> None:
        if self._keep_alive:
            self._keeper.add(self.tip)

    def _end_stranger(self, handle: Handle) -> None:
        """Release a sequence that nobody wants; if that fails, its lease ends it."""
        request = cache_pb2.ReleaseCacheRequest(kv_caches=[_convert.handle_to_message(handle)])
        try:
            self._connection.unary(self._connection.executor.ReleaseCache, request, timeout=_END_S)
        except ExecutorError as failure:
            _log.debug("release failed handle_id=%s reason=%s", handle.handle_id, failure.reason)
