# Written by client/generate_aio.py from client/ferrule_client/stream.py: change that, then run it again.
"""Decoding several caches together over one open stream."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import grpc

from ferrule.v1 import executor_pb2
from ferrule_client import _convert, _messages
from ferrule_client._messages import Append, Appended
from ferrule_client._retry import Attempts
from ferrule_client._route import by_instance, instance_of_handle
from ferrule_client._status import error_from_status
from ferrule_client._tip import Tip
from ferrule_client._token_log import TokenLog
from ferrule_client.aio._connection import USE_DEFAULT, Connection, Timeout
from ferrule_client.aio._exchange import Done, Exchange, as_answers, take
from ferrule_client.aio._stream_call import StreamCall
from ferrule_client.errors import (
    CallCancelledError,
    DeadlineExceededError,
    ExecutorError,
    InvalidRequestError,
    UnavailableError,
)
from ferrule_client.items import Chunk, DecodeItem, DraftDistributions, VerifyItem
from ferrule_client.policy import Policy, check_policy
from ferrule_client.stream import _check_branches, _check_items, _moved
from ferrule_client.types import Acceptance, OnStale, Output, Tokens, Verification

if TYPE_CHECKING:
    from ferrule_client.aio.cache import AsyncCache

__all__ = ["AsyncStream"]

_MAX_SEQ = 0xFFFF_FFFF
"""Numbers of items wrap around beyond it."""


class AsyncStream:
    """One open StreamDecode: each ``decode`` is one frame out and, as a rule, one frame back.

    Opened at the first use, and opened again when the connection breaks: what was under way is then sent once more,
    which is safe, because an append that already happened is answered as a replay. Not safe to use from two tasks
    at once; open a stream per task.

    Behind a proxy with several instances a frame goes to each instance that has sequences of it: what that one has is
    a frame of its own, on a StreamDecode of its own, and the answers are put together. If one of them fails, the
    sequences of the others have moved all the same. New sequences are made at the first of them.

    Attributes:
        free_blocks: Free blocks in the server's KV pool after the newest step, or None before the first; of several
            instances, in the pool of the one that answered last.
        num_frames: Frames received so far.

    Example::

        async with client.stream() as stream:
            outputs = await stream.decode(branches, tokens, policy=greedy())
    """

    def __init__(self, connection: Connection, follow: Callable[[Tip], AsyncCache]) -> None:
        self._connection = connection
        self._follow = follow
        self._calls: dict[str, StreamCall] = {}  # by instance; an empty name, as long as none is known
        self._seq = itertools.count(1)
        self._is_closed = False
        self._in_use = threading.Lock()
        self.free_blocks: int | None = None
        self.num_frames = 0

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_calls"):
            self._drop_calls()

    async def decode(
        self,
        caches: Sequence[AsyncCache],
        tokens: Sequence[Tokens],
        *,
        policy: Policy | Sequence[Policy] | None = None,
        on_stale: OnStale = "fail",
        release: Iterable[AsyncCache] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Output]:
        """Append to every cache, all in one frame, and return the outputs in the order of the caches.

        Every cache whose append succeeded has moved, also when this raises for another one.

        Args:
            caches: The sequences, each at most once.
            tokens: For each cache one token, several, or none (a query of its newest row).
            policy: What to return for each row; one for all, or one for each cache. None: full logits.
            on_stale: What to do with handles that lie behind their tip.
            release: Caches to end in the same frame, before the others are judged: their blocks serve these.
            timeout: Seconds this step may take, retries included.

        Returns:
            One output per cache.

        Raises:
            ExecutorError: An item failed (the first one is raised, with a note that says which), or the stream did.
            ValueError: The sizes differ, or a cache comes twice.

        Example:
            ``outputs = await stream.decode(branches, [out.token for out in outputs], policy=greedy())``
        """
        results = await self.try_decode(
            caches, tokens, policy=policy, on_stale=on_stale, release=release, timeout=timeout
        )
        for place, result in enumerate(results):
            if isinstance(result, ExecutorError):
                result.add_note(f"this was cache {place} of {len(results)}; each one that succeeded has moved on")
                raise result
        return [result for result in results if isinstance(result, Output)]

    async def try_decode(
        self,
        caches: Sequence[AsyncCache],
        tokens: Sequence[Tokens],
        *,
        policy: Policy | Sequence[Policy] | None = None,
        on_stale: OnStale = "fail",
        release: Iterable[AsyncCache] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Output | ExecutorError]:
        """Append as ``decode`` does, and return the error of each cache that failed in its place.

        Args:
            caches: As in ``decode``.
            tokens: As in ``decode``.
            policy: As in ``decode``.
            on_stale: As in ``decode``.
            release: As in ``decode``.
            timeout: As in ``decode``.

        Returns:
            An output or an error per cache, in the order of the caches.

        Raises:
            ExecutorError: The stream failed; each append may or may not have happened, and repeating it is safe.
            ValueError: The sizes differ, or a cache comes twice.
        """
        _check_once(caches)
        timeout = self._connection.until(timeout)
        policies = _per_cache(policy, caches)
        _check_sizes(caches, tokens, policies)
        inputs = [
            await cache.prepare(one, wanted, on_stale, timeout=timeout)
            for cache, one, wanted in zip(caches, tokens, policies, strict=True)
        ]
        results = await self.append(caches, inputs, release=release, timeout=timeout)
        return [_moved(cache.tip, one, result) for cache, one, result in zip(caches, inputs, results, strict=True)]

    async def verify(
        self,
        caches: Sequence[AsyncCache],
        drafts: Sequence[Sequence[int]],
        *,
        tokens: Sequence[Tokens] | None = None,
        policy: Policy | Sequence[Policy] | None = None,
        acceptance: Acceptance | None = None,
        draft_probs: Sequence[DraftDistributions] | None = None,
        on_stale: OnStale = "fail",
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Verification]:
        """Check drafts of every cache, all in one frame; see ``AsyncCache.verify``.

        Args:
            caches: The sequences, each at most once.
            drafts: For each cache its draft token ids.
            tokens: For each cache certain tokens before them, behind what is pending. None: none.
            policy: One for all, or one for each cache.
            acceptance: As in ``AsyncCache.verify``, for all.
            draft_probs: For each cache the distributions of its drafts. None: as in ``AsyncCache.verify``.
            on_stale: What to do with handles that lie behind their tip.
            timeout: Seconds this step may take, retries included.

        Returns:
            What became of the drafts, one per cache.

        Raises:
            ExecutorError: An item failed (the first one is raised, with a note that says which), or the stream did.
            ValueError: The sizes differ, a cache comes twice, or as in ``AsyncCache.verify``.
        """
        policies, certain = _per_cache(policy, caches), [()] * len(caches) if tokens is None else tokens
        distributions = [None] * len(caches) if draft_probs is None else draft_probs
        for name, given in (
            ("drafts", drafts),
            ("tokens", certain),
            ("policy", policies),
            ("draft_probs", distributions),
        ):
            _check_size(name, given, caches)
        items = [
            VerifyItem(cache, draft, one, wanted, acceptance, draft_probs=distribution, on_stale=on_stale)
            for cache, draft, one, wanted, distribution in zip(
                caches, drafts, certain, policies, distributions, strict=True
            )
        ]
        results = await self.run(items, timeout=timeout)
        for place, result in enumerate(results):
            if isinstance(result, ExecutorError):
                result.add_note(f"this was cache {place} of {len(results)}; each one that succeeded has moved on")
                raise result
        return [result for result in results if isinstance(result, Verification)]

    async def run(
        self,
        items: Sequence[DecodeItem[AsyncCache] | VerifyItem[AsyncCache] | Chunk[AsyncCache]],
        *,
        release: Iterable[AsyncCache] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Output | Verification | AsyncCache | ExecutorError]:
        """Run decodes, verifies and chunks, in any mix, all in one frame.

        Args:
            items: What to run; each cache at most once.
            release: Caches to end in the same frame, before the others are judged.
            timeout: Seconds this step may take, retries included.

        Returns:
            For each item, in their order: an output for a decode, a verification for a verify, the cache for a chunk
            (a new one for a new sequence, which wants to be released), or the error of one that failed.

        Raises:
            ExecutorError: The stream failed; each append may or may not have happened, and repeating it is safe.
            TypeError: An item is none of the three.
            ValueError: A cache comes twice, or an item is not as it must be.

        Example:
            ``output, check = await stream.run([DecodeItem(a, 5, greedy()), VerifyItem(b, [7, 8], 6, greedy())])``
        """
        timeout = self._connection.until(timeout)
        _check_items(items)
        caches = [item.cache for item in items]
        _check_once(caches)
        inputs = [await self._prepared(item, timeout) for item in items]
        results = await self.append(caches, inputs, release=release, timeout=timeout)
        return list(map(self._settled, items, inputs, results))

    async def _prepared(
        self, item: DecodeItem[AsyncCache] | VerifyItem[AsyncCache] | Chunk[AsyncCache], timeout: Timeout
    ) -> Append:
        if isinstance(item, VerifyItem):
            return await item.cache.prepare_verify(item, timeout=timeout)
        if isinstance(item, DecodeItem):
            return await item.cache.prepare(item.tokens, item.policy, item.on_stale, timeout=timeout)
        if item.cache is not None:
            return await item.cache.prepare_chunk(item, timeout=timeout)
        return _messages.chunk_input(None, item, 0)

    def _settled(
        self,
        item: DecodeItem[AsyncCache] | VerifyItem[AsyncCache] | Chunk[AsyncCache],
        sent: Append,
        result: Appended | ExecutorError,
    ) -> Output | Verification | AsyncCache | ExecutorError:
        """Move a cache by what came of its item, or make that of a new sequence."""
        if item.cache is not None:
            taken = take(item.cache.tip, item, sent, result)
            return item.cache if isinstance(item, Chunk) and isinstance(taken, Output) else taken
        if isinstance(result, ExecutorError):
            return result
        output = _convert.output_from_message(result)
        return self._follow(Tip(output.handle, last=output, log=TokenLog(_messages.tokens_of(sent))))

    async def branch(
        self,
        parents: Sequence[AsyncCache],
        tokens: Sequence[Tokens],
        *,
        policy: Policy | Sequence[Policy] | None = None,
        release: Iterable[AsyncCache] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[AsyncCache]:
        """Append to caches that may come several times, all in one frame: beam search.

        Of the places that name one parent, the first appends to it and returns the parent itself, moved; each of the
        others branches where the parent stood and returns a new cache. ``last`` of each is its own output. On the
        wire the others are FORK items; such an item whose tokens repeat the first one's would be answered as a replay
        of it, not with a branch, and is refused here: two sequences of the same tokens are made with
        ``AsyncCache.fork``.

        Args:
            parents: The sequences to go on from, in any order, each as often as it has children.
            tokens: For each place one token, or several; what is pending is appended before them.
            policy: What to return for each row; one for all, or one for each place. None: full logits.
            release: Caches to end in the same frame, before the others are judged: the losers.
            timeout: Seconds this step may take, retries included.

        Returns:
            One cache per place; the new ones want to be released.

        Raises:
            ExecutorError: An item failed (the first one is raised, with a note that says which), or the stream did.
                New branches of this call are released then, as far as their answers came; parents that succeeded
                have moved.
            ValueError: The sizes differ, or two places would be the same sequence.

        Example:
            ``beams = await stream.branch([root, root, root], [a, b, c], policy=greedy(top_logprobs=6))``
        """
        timeout = self._connection.until(timeout)
        policies = _per_cache(policy, parents)
        _check_sizes(parents, tokens, policies)
        firsts = {id(parent): place for place, parent in reversed(list(enumerate(parents)))}
        inputs = [
            await parent.prepare(one, wanted, "fail" if firsts[id(parent)] == place else "fork", timeout=timeout)
            for place, (parent, one, wanted) in enumerate(zip(parents, tokens, policies, strict=True))
        ]
        _check_branches([firsts[id(parent)] for parent in parents], inputs)
        logs = [parent.tip.log.branch() for parent in parents]
        results = await self.append(parents, inputs, release=release, timeout=timeout)
        children = list(map(_child, parents, inputs, logs, results))
        for place, child in enumerate(children):
            if isinstance(child, ExecutorError):
                child.add_note(f"this was place {place} of {len(children)}; new branches of this frame are released")
                born = [one for one in children if not isinstance(one, ExecutorError)]
                await self._forget([one for one in born if all(one is not parent for parent in parents)])
                raise child
        return [child for child in children if not isinstance(child, ExecutorError)]

    async def append(
        self,
        caches: Sequence[AsyncCache | None],
        inputs: Sequence[Append],
        *,
        release: Iterable[AsyncCache] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Appended | ExecutorError]:
        """Exchange the appends of caches, which do not move by it. For ``branch`` and loops; not for callers.

        When the stream fails, its appends are in doubt and what was to go is still ours. Sequences that are lost are
        brought back where their caches do that, and their appends are sent once more.
        """
        attempts = self._attempts(inputs, timeout, is_patient=_are_patient(caches))
        return await Exchange(self._connection, self._send, attempts).perform(caches, inputs, list(release))

    async def _forget(self, caches: Sequence[AsyncCache]) -> None:
        """Release branches that nobody will see; where that fails too, their leases end them."""
        tips = [cache.give_up() for cache in caches]
        if tips:
            with contextlib.suppress(ExecutorError):
                await self.exchange([], release=tips)

    async def exchange(
        self,
        inputs: Sequence[Append],
        *,
        release: Sequence[Tip] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Appended | ExecutorError]:
        """Send inputs as one frame and return their results, in their order. The level below ``decode``.

        Args:
            inputs: Messages of the contract; with seeds, so that a retry draws the same tokens.
            release: Sequences to end in the same frame.
            timeout: Seconds this may take, retries included.

        Returns:
            The output or the error of each input.

        Raises:
            ExecutorError: The stream failed.
            RuntimeError: Another task is using the stream.
        """
        return await Exchange(self._connection, self._send, self._attempts(inputs, timeout)).run(inputs, release)

    def _attempts(self, inputs: Sequence[Append], timeout: Timeout, *, is_patient: bool = False) -> Attempts:
        made = [one for one in inputs if _messages.creates(one)]
        has_ids = all(one.request_id for one in made)
        return self._connection.attempts(timeout, creates=bool(made), has_request_id=has_ids, is_patient=is_patient)

    async def _send(self, inputs: Sequence[Append], release: Sequence[Tip], done: Done, attempts: Attempts) -> None:
        """Send frames until every input has its answer in ``done``, unless another task is doing that."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("this stream is used by two tasks at once; open one for each with client.stream()")
        try:
            await self._answer(inputs, release, done, attempts)
        finally:
            self._in_use.release()

    async def _answer(self, inputs: Sequence[Append], release: Sequence[Tip], done: Done, attempts: Attempts) -> None:
        """Exchange frames until every input has its answer in ``done``, by place; on new calls where some break."""
        losers, num_instances = list(release), 0
        while True:
            most = self._connection.handle_limit.most
            now, later = losers[:most], losers[most:]
            if later:
                num_instances = num_instances or self._count_instances(inputs, losers)
            try:
                # What is too much for one frame is answered before the next frame leaves: asyncio's gRPC forgets why a
                # call was refused if it was writing another frame at that moment.
                legs = self._open_legs([] if later else inputs, now, done)
                num_instances = num_instances or len(legs)
                # Several are all on their way before anything is read; one is read at once, which sends it too.
                for is_reading in (True,) if len(legs) == 1 else (False, True):
                    for leg in legs:
                        await self._serve(leg, done, attempts, is_alone=num_instances == 1, is_reading=is_reading)
            except BaseException:  # a timeout, or a cancellation: what is under way stays unread
                self._drop_calls()
                raise
            again = await self._retried(legs, done, attempts, num_instances)
            if not (again or later):
                return
            losers = [tip for leg in again for tip in leg.losers] + later

    async def _retried(self, legs: Sequence[_Leg], done: Done, attempts: Attempts, num_instances: int) -> list[_Leg]:
        """Wait before another attempt and return the parts that are sent again.

        Where there is no further attempt, what a part failed with becomes the answer to its items.
        """
        broken = {leg: leg.error for leg in legs if leg.error is not None}
        failed = {leg: error for leg, error in broken.items() if not self._was_too_long(leg, error)}
        first = next(iter(failed), None)
        if first is not None:
            try:
                await self._connection.wait(attempts, failed[first], first.cause)
            except ExecutorError:
                for leg, error in failed.items():
                    done.update(as_answers(error, leg.waiting.values(), num_instances))
                return [leg for leg in broken if leg not in failed]
        return list(broken)

    def _was_too_long(self, leg: _Leg, error: ExecutorError) -> bool:
        """Report whether a frame was refused for too many handles to release; they then go in smaller frames."""
        is_about_release = isinstance(error, InvalidRequestError) and error.field == "release"
        return is_about_release and self._connection.handle_limit.shrink(error, len(leg.losers))

    async def close(self) -> None:
        """End the stream. The caches stay as they are. Closing twice changes nothing."""
        self._is_closed = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            await call.close()

    def _open_legs(self, inputs: Sequence[Append], losers: Sequence[Tip], done: Done) -> list[_Leg]:
        """Send what is not answered yet: a frame to each instance that has some of it."""
        waiting = [place for place in range(len(inputs)) if place not in done]
        groups = by_instance([inputs[place] for place in waiting], self._instance_of)
        ends = by_instance(losers, lambda tip: self._connection.instance_of_handle(tip.handle))
        if "" in groups:  # new sequences alone: any instance will do, so the one that is asked anyway
            groups = {next(iter(ends), "") or next(iter(self._calls), ""): groups[""]}
        legs = []
        for instance in dict.fromkeys((*groups, *ends)) or ("",):
            places = [waiting[one] for one in groups.get(instance, ())]
            seqs = {next(self._seq) & _MAX_SEQ: place for place in places}
            leg = _Leg(instance, self._open_call(instance), seqs, [losers[one] for one in ends.get(instance, ())])
            items = [_messages.stream_item(seq, inputs[place]) for seq, place in leg.waiting.items()]
            handles = [_convert.handle_to_message(tip.handle) for tip in leg.losers]
            leg.call.send(executor_pb2.StreamDecodeRequest(items=items, release=handles))
            legs.append(leg)
        return legs

    def _count_instances(self, inputs: Sequence[Append], losers: Sequence[Tip]) -> int:
        ends = {self._connection.instance_of_handle(tip.handle) for tip in losers}
        return len(ends.union(map(self._instance_of, inputs)) - {""}) or 1

    def _instance_of(self, sent: Append) -> str:
        return self._connection.instance_of_handle(sent.kv_cache)

    async def _serve(self, leg: _Leg, done: Done, attempts: Attempts, *, is_alone: bool, is_reading: bool) -> None:
        """See that a part of a frame is on its way, or read until it is answered; or note what it failed with."""
        if leg.error is not None:
            return
        try:
            if not is_reading:
                await leg.call.flush(attempts.remaining())
            while is_reading and (leg.waiting or leg.num_releases > 0):
                self._take(leg, await leg.call.receive(attempts.remaining()), done)
        except DeadlineExceededError as error:
            if is_alone:
                raise
            self._drop_call(leg)
            leg.error = error
        except grpc.RpcError as error:
            self._drop_call(leg)
            leg.error, leg.cause = self._connection.typed(error, leg.instance), error
        except StopAsyncIteration:
            self._drop_call(leg)
            text = "the server ended the stream before it answered"
            leg.error = UnavailableError(grpc.StatusCode.UNAVAILABLE, "CONNECTION_LOST", text)

    def _take(self, leg: _Leg, frame: executor_pb2.StreamDecodeResponse, done: Done) -> None:
        """Put the answers of a frame in; they also tell which instance a call has reached."""
        self.num_frames += 1
        self.free_blocks = frame.free_blocks
        leg.num_releases -= len(frame.releases)
        for result in frame.results:
            place, answer = leg.waiting.pop(result.seq), _messages.stream_answer(result)
            done[place] = answer or error_from_status(result.error)
            if answer is not None and not leg.instance:
                leg.instance = instance_of_handle(answer.kv_cache)
                if leg.instance and leg.instance not in self._calls:
                    self._calls[leg.instance] = self._calls.pop("")

    def _open_call(self, instance: str) -> StreamCall:
        if not (self._is_closed or self._connection.is_closed):
            call = self._calls.get(instance)
            if call is not None and call.is_over:
                call.cancel()
                call = None
            call = call or self._new_call(instance)
            if call is not None:
                self._calls[instance] = call
                return call
        raise CallCancelledError(grpc.StatusCode.CANCELLED, "CANCELLED", "the stream is closed")

    def _new_call(self, instance: str) -> StreamCall | None:
        """Return a new call; None: the client was closed just now."""
        try:
            return StreamCall(self._connection.wire, instance)
        except ValueError:  # gRPC's answer to a closed channel
            if not self._connection.is_closed:
                raise
            return None

    def _drop_call(self, leg: _Leg) -> None:
        self._calls = {instance: call for instance, call in self._calls.items() if call is not leg.call}
        leg.call.cancel()

    def _drop_calls(self) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel()


class _Leg:
    """The part of a frame that one instance answers.

    Attributes:
        instance: Its name; empty: not known yet.
        call: Where it was sent.
        waiting: Places of the inputs that have no answer yet, by what they are called in the frame.
        losers: Sequences that end with it.
        num_releases: Those of them that are not answered yet.
        error: What it failed with, or None.
        cause: The gRPC error behind it, or None.
    """

    __slots__ = ("call", "cause", "error", "instance", "losers", "num_releases", "waiting")

    def __init__(self, instance: str, call: StreamCall, waiting: dict[int, int], losers: Sequence[Tip]) -> None:
        self.instance = instance
        self.call = call
        self.waiting = waiting
        self.losers = losers
        self.num_releases = len(losers)
        self.error: ExecutorError | None = None
        self.cause: grpc.RpcError | None = None


def _are_patient(caches: Sequence[AsyncCache | None]) -> bool:
    """Tell whether all caches wait for a server that went away."""
    return bool(caches) and all(one is not None and one.recovers for one in caches)


def _child(
    parent: AsyncCache,
    sent: executor_pb2.DecodeInput,
    log: TokenLog,
    result: Appended | ExecutorError,
) -> AsyncCache | ExecutorError:
    """Return what became of one place of a branching frame: the parent itself, a new cache, or the error.

    Args:
        parent: Its parent; it may have moved by an earlier place.
        sent: What was sent.
        log: The parent's tokens before the frame, for this child alone.
        result: The answer.
    """
    if isinstance(result, ExecutorError):
        parent.tip.doubt(sent.input_ids, result)
        return result
    output = _convert.output_from_message(result)
    if output.handle.cache_id == parent.handle.cache_id:
        parent.tip.moved(sent.input_ids, output)
        return parent
    log.extend(sent.input_ids)
    return parent.sibling(parent.tip.child(output, log))


def _per_cache(policy: Policy | Sequence[Policy] | None, caches: Sequence[AsyncCache]) -> list[Policy | None]:
    if isinstance(policy, Sequence):
        return list(policy)
    check_policy(policy)
    return [policy] * len(caches)


def _check_sizes(caches: Sequence[AsyncCache], tokens: Sequence[Tokens], policies: Sequence[Policy | None]) -> None:
    _check_size("tokens", tokens, caches)
    _check_size("policy", policies, caches)


def _check_size(name: str, given: Sequence[object], caches: Sequence[AsyncCache]) -> None:
    if len(given) != len(caches):
        raise ValueError(f"{name} needs one entry per cache: there are {len(caches)} caches and {len(given)} entries")


def _check_once(caches: Sequence[AsyncCache | None]) -> None:
    known = [id(cache) for cache in caches if cache is not None]
    if len(set(known)) != len(known):
        raise ValueError("a cache can be in a frame only once; stream.branch makes branches in one frame")
