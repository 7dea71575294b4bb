"""The calls of one cache on its sequence, and on a new one of the same tokens when that is lost."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
import grpc.aio
import numpy as np

from ferrule.v1 import cache_pb2, executor_pb2, types_pb2
from ferrule_client import _check, _convert, _messages
from ferrule_client._messages import PromptOptions, SequenceRequest
from ferrule_client._parts import Parts
from ferrule_client._retry import Attempts
from ferrule_client._route import is_lost
from ferrule_client._timeouts import USE_DEFAULT, Timeout
from ferrule_client._tip import Tip, using
from ferrule_client.aio._connection import Connection
from ferrule_client.aio._lease import LeaseKeeper
from ferrule_client.errors import FerruleError, PendingTokenError, WrongInstanceError
from ferrule_client.items import Append, Item, Verify
from ferrule_client.policy import Policy
from ferrule_client.types import CacheInfo, Handle, Lease, OnStale, Pending, Released, Tokens

if TYPE_CHECKING:
    from ferrule_client.aio.cache import AsyncCache

_log = logging.getLogger(__name__)

_Request = TypeVar("_Request", bound=SequenceRequest)
_Reply = TypeVar("_Reply")
_R = TypeVar("_R")

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
    """

    def __init__(
        self, connection: Connection, keeper: LeaseKeeper, tip: Tip, *, keep_alive: bool, recovery: PromptOptions | None
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
        """Return the calls of a branch of this sequence, for whose lease so many seconds were asked for, if any."""
        recovery = self._recovery and dataclasses.replace(
            self._recovery, ttl=self._recovery.ttl if ttl is None else ttl, reserve_length=None
        )
        return SequenceCalls(self._connection, self._keeper, tip, keep_alive=self._keep_alive, recovery=recovery)

    async def perform(self, item: Item[_R], timeout: Timeout) -> _R:
        """Run an append or a verify by a call of its own and return what it brought, an output or a verification."""
        timeout, stub = self._connection.until(timeout), self._connection.executor
        sent = await self.prepare_item(item, timeout)
        method: Any  # of the kind of the item, as its request and its reply
        request: Any
        if isinstance(sent, executor_pb2.VerifyInput):
            method, request = stub.ForwardVerify, executor_pb2.ForwardVerifyRequest(input=sent)
        else:
            assert isinstance(item, Append)
            _messages.check_scoring(item.policy, len(sent.input_ids), all_positions=item.all_positions)
            method, request = stub.Decode, executor_pb2.DecodeRequest(input=sent)
            if len(sent.input_ids) > 1 or item.all_positions:
                method = stub.Prefill
                request = _messages.prefill_request(sent, item.policy, all_positions=item.all_positions)
        with using(self.tip):
            try:
                reply = await self.call_once_more(method, request, timeout, creates=_messages.creates(sent))
            except BaseException as error:
                self.tip.doubt(_messages.tokens_of(sent), error)
                raise
        return self.tip.settled(item, sent, reply.output)

    async def prepare(
        self,
        tokens: Tokens | str,
        policy: Policy | None,
        on_stale: OnStale = "fail",
        *,
        parses: bool = False,
        pending: Pending = "auto",
        drafts: Sequence[int] = (),
        draws: bool = False,
        branches: bool = False,
        timeout: Timeout,
    ) -> executor_pb2.DecodeInput:
        """Return the message of the next append.

        If an earlier append is in doubt and this one does not repeat it, what landed is to be dropped: the append
        rewinds, provided that only our own doubtful tokens follow the handle. It rewinds also if they have not landed
        yet, because they may still be on their way; the server takes appends one by one.

        Args:
            tokens: As in ``Cache.append``; so are the arguments up to ``pending``.
            policy: How the token after them is chosen.
            on_stale: What to do if somebody else appended meanwhile.
            parses: True: text of special tokens becomes these tokens.
            pending: What to do with a pending token.
            drafts: Tokens that are sent besides and may be appended too.
            draws: True: what is appended depends on draws, so it repeats no append in doubt; and without tokens it is
                still an append.
            branches: True: a new branch is wanted in any case.
            timeout: Seconds that requests may take which this needs.
        """
        tip = self.tip
        reads = _messages.Reading(parses)
        ids = await self._connection.ids_of(tokens, reads, timeout=timeout, is_patient=self.recovers, on_sequence=True)
        if isinstance(tokens, str):
            tokens, pending = ids, "send" if pending == "auto" else pending
        given: Any = tokens if isinstance(tokens, (Sequence, np.ndarray)) else [tokens]  # Any: ints of any kind
        sent = tip.decode_input(tip.joined(ids, given, pending), policy, on_stale)
        if tip.beyond:
            await self.drop_beyond(timeout)
            _messages.aim(sent, tip.handle)
        if not sent.input_ids and not draws and not (tip.pending and pending == "drop"):
            return sent
        tip.interrupt()
        if branches or not (sent.input_ids or draws):
            return sent
        is_new = tip.contradicts([*sent.input_ids, *drafts]) or (draws and bool(tip.doubts))
        if tip.is_ahead or (is_new and await self._holds_only_doubts(timeout)):
            sent.on_stale, sent.request_id = types_pb2.STALE_POLICY_REWIND, ""
            _messages.aim(sent, tip.handle)  # looking may have brought a lost sequence back
        return sent

    async def prepare_item(
        self, item: Item[Any], timeout: Timeout
    ) -> executor_pb2.DecodeInput | executor_pb2.VerifyInput:
        """Return the message of an append or a verify."""
        assert isinstance(item, (Append, Verify))
        sends = functools.partial(
            self.prepare,
            item.tokens,
            on_stale=item.on_stale,
            parses=item.parse_special_tokens,
            pending=item.pending,
            timeout=timeout,
        )
        if isinstance(item, Append):
            return await sends(policy=item.policy)
        policy = _messages.verify_policy(item.policy, item.acceptance, item.draft_probs)
        drafts = _check.token_list(item.draft)
        if drafts and item.pending != "drop" and self.tip.is_pending(item.draft[0]):
            raise PendingTokenError(drafts[0])
        base = await sends(policy=policy, drafts=drafts, draws=True)
        return _messages.verify_input(base, policy, item)

    async def drop_beyond(self, timeout: Timeout) -> None:
        """Drop what a loop drew beyond the newest token that was handed out, which stays pending."""
        newest, self.tip.is_cutting = (self.tip.pending, self.tip.last), True
        await self.truncate(self.tip.length, timeout=timeout)
        self.tip.pending, self.tip.last = newest

    async def truncate(self, length: int, *, timeout: Timeout = USE_DEFAULT) -> int:
        """Shorten the sequence as ``Cache.truncate`` does."""
        tip, timeout = self.tip, self._connection.until(timeout)
        if tip.is_cutting and length != tip.length:
            await self.drop_beyond(timeout)
        request = _messages.truncate_request(tip.live_handle(), length, tip.length)
        tip.interrupt()
        with using(tip):
            reply = await self.call_once_more(self._connection.executor.TruncateKv, request, timeout)
        tip.cut(_convert.handle_from_message(reply.kv_cache))
        return reply.freed_blocks

    async def info(self, *, token_ids: bool = False, blocks: bool = False, timeout: Timeout = USE_DEFAULT) -> CacheInfo:
        """Return the server's state of the sequence as ``Cache.info`` does."""
        request = cache_pb2.GetCacheInfoRequest(
            kv_cache=_convert.handle_to_message(self.tip.live_handle()),
            include_token_ids=token_ids,
            include_blocks=blocks,
        )
        reply = await self.call_once_more(self._connection.executor.GetCacheInfo, request, timeout)
        info = _convert.cache_info_from_message(reply.info)
        self.tip.durability = info.durability
        if token_ids:
            self.tip.learn(info.handle, info.token_ids)
        return info

    async def _holds_only_doubts(self, timeout: Timeout) -> bool:
        with using(self.tip):
            info = await self.info(token_ids=True, timeout=timeout)
        return self.tip.explains(info.token_ids[self.tip.length :])

    async def call_once_more(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Reply],
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
            FerruleError: It failed; one that says the sequence is lost has its tokens.
        """
        has_id = bool(getattr(getattr(request, "input", request), "request_id", ""))
        attempts = self._connection.attempts(
            timeout, creates=creates, has_request_id=has_id, is_patient=self.recovers, on_sequence=True
        )
        handle = self.tip.handle
        try:
            return await self._connection.run(method, request, attempts)
        except FerruleError as error:
            await self.bring_back(error, handle, attempts)
        _messages.aim(request, self.tip.handle)
        try:
            return await self._connection.run(method, request, attempts)
        except FerruleError as error:
            self.tip.tell(error)
            raise

    async def bring_back(self, error: FerruleError, handle: Handle, attempts: Attempts) -> None:
        """Bring the sequence back as a new one of the same tokens, if that was not done since.

        Args:
            error: What a call failed with.
            handle: What the call named.
            attempts: Those of the call; the prefill has what is left of its time.

        Raises:
            FerruleError: ``error``, if it does not say that the sequence is lost, or that is not done or cannot be; or
                what the prefill failed with.
        """
        if not is_lost(error, handle):
            raise error
        self.tip.tell(error)
        if handle.cache_id != self.tip.handle.cache_id:
            return
        token_ids = self.tip.token_ids
        if self._recovery is None or token_ids is None:
            raise error
        request = _messages.prompt_request([*token_ids, *self.tip.beyond], self._recovery)
        rest = attempts.rest(creates=True, has_request_id=True)
        try:
            reply = await self._connection.run(self._connection.executor.Prefill, request, rest)
        except FerruleError as failure:
            failure.add_note(f"the sequence is lost ({error.reason}), and this is what prefilling it again failed with")
            raise
        new = _convert.handle_from_message(reply.output.kv_cache)
        if handle.cache_id != self.tip.handle.cache_id:  # another call has done it meanwhile
            await self._end_stranger(new)
            return
        if new.lineage != self.tip.handle.lineage:
            await self._end_stranger(new)
            error.add_note(_OTHER_MODEL)
            raise error
        ids = handle.handle_id, new.handle_id
        _log.info("recovered handle_id=%s as=%s reason=%s length=%d", *ids, error.reason, new.length)
        self.tip.revive(new, _convert.granted_ttl_s(reply.output))
        self.tip.interrupt()  # what a loop has still to hand out names the lost sequence
        self._keep()

    def renewed(self, lease: Lease | FerruleError, asked_s: float | None) -> None:
        """Take over a lease that was renewed apart from the cache, for as many seconds as were asked for, if any."""
        if not isinstance(lease, Lease):
            return
        if self._recovery is not None and asked_s is not None:
            self._recovery = dataclasses.replace(self._recovery, ttl=asked_s)
        self.tip.ttl_s = lease.ttl_s
        self._keep()

    def reserved(self, length: int) -> None:
        """Take note that the sequence has room up to a length, so that the one that replaces it gets it too."""
        if self._recovery is not None:
            most = max(length, self._recovery.reserve_length or 0)
            self._recovery = dataclasses.replace(self._recovery, reserve_length=most)

    def give_up(self) -> Tip:
        """Mark the sequence as no longer ours and return its tip."""
        self.tip.interrupt()
        self._keeper.remove(self.tip)
        self.tip.is_released = True
        return self.tip

    def _keep(self) -> None:
        if self._keep_alive:
            self._keeper.add(self.tip)

    async def _end_stranger(self, handle: Handle) -> None:
        """Release a sequence that is not needed; if that fails, its lease ends it."""
        request = cache_pb2.ReleaseCacheRequest(kv_caches=[_convert.handle_to_message(handle)])
        try:
            await self._connection.unary(self._connection.executor.ReleaseCache, request, timeout=_END_S)
        except FerruleError as failure:
            _log.debug("release failed handle_id=%s reason=%s", handle.handle_id, failure.reason)


def calls_of(cache: AsyncCache) -> SequenceCalls:
    """Return the calls of a cache."""
    return cache._calls  # noqa: SLF001  (the class is the user's, its calls are this package's)


def tip_of(cache: AsyncCache) -> Tip:
    """Return what is known of the newest state of a cache."""
    return calls_of(cache).tip


def _ended(cache: AsyncCache | Handle) -> Handle:
    """Return a handle, or give a cache up and return its handle; anything else is refused with the handles."""
    calls: SequenceCalls | None = getattr(cache, "_calls", None)
    return cast("Handle", cache) if calls is None else calls.give_up().handle


async def release_all(
    connection: Connection, caches: Sequence[AsyncCache | Handle], timeout: Timeout = USE_DEFAULT
) -> Released:
    """End sequences, many in one call to each instance; see ``Client.release``.

    Raises:
        FerruleError: A server was not reached. Sequences on other instances were released.
    """
    timeout = connection.until(timeout)
    handles = [_ended(one) for one in caches]
    released: dict[int, bool] = {}
    freed_blocks = 0
    failures: dict[str, FerruleError] = {}
    await connection.ask_handle_limit(len(handles), timeout)
    parts = Parts(handles, connection.handle_limit)
    for instance, places, messages in parts:
        if instance in failures:
            continue
        request = cache_pb2.ReleaseCacheRequest(kv_caches=messages)
        try:
            reply = await connection.unary(connection.executor.ReleaseCache, request, timeout=timeout)
        except WrongInstanceError:  # it has another name now, or is not there any more: nothing is left to release
            released.update(dict.fromkeys(places, False))
            continue
        except FerruleError as error:  # sequences of other instances are to be released all the same
            if not parts.shrink(error):
                failures[instance] = error
            continue
        released.update(zip(places, [result.released for result in reply.results], strict=True))
        freed_blocks += reply.freed_blocks
    for failure in failures.values():
        raise failure
    return Released(tuple(released[place] for place in range(len(handles))), freed_blocks)
