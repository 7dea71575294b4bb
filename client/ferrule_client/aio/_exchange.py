"""Frames of appends on open streams, one for each instance, and again where an answer or a break asks for it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from ferrule.v1 import executor_pb2
from ferrule_client import _convert, _messages
from ferrule_client._messages import Appended, Input
from ferrule_client._retry import Attempts, wait_s
from ferrule_client._route import by_instance, instance_of_handle
from ferrule_client._status import error_from_status
from ferrule_client._timeouts import USE_DEFAULT, Timeout
from ferrule_client._tip import Tip, using
from ferrule_client.aio._calls import calls_of, tip_of
from ferrule_client.aio._connection import Connection
from ferrule_client.aio._stream_call import OpenCall, open_frames
from ferrule_client.errors import (
    CallCancelledError,
    DeadlineExceededError,
    DrainingError,
    FerruleError,
    InstanceUnreachableError,
    InvalidRequestError,
    MaskUnknownError,
    WrongInstanceError,
)

if TYPE_CHECKING:
    from ferrule_client.aio.cache import AsyncCache

_MAX_SEQ = 0xFFFF_FFFF
"""Numbers of items wrap around beyond it."""

Done = dict[int, Appended | FerruleError]
"""Answers by the places of their inputs."""


@dataclass(slots=True, eq=False)
class _Leg:
    """The part of a frame that one instance answers.

    Attributes:
        call: Where it was sent.
        waiting: Places of the inputs that have no answer yet, by what they are called in the frame.
        losers: Sequences that end with it.
        num_releases: Those of them that are not answered yet.
        error: What it failed with, or None.
    """

    call: OpenCall[executor_pb2.StreamDecodeResponse]
    waiting: dict[int, int]
    losers: list[Tip]
    num_releases: int
    error: FerruleError | None = None


class Exchange:
    """Exchanges the appends of caches, which do not move by it, on calls that stay open.

    Items that are refused for the moment are sent again, within the time; so are those whose token mask was dropped
    and those of lost sequences, once these are brought back where their caches do that.

    Attributes:
        calls: The open calls by instance; the empty name until one is known.
        free_blocks: Free blocks in the pool that the newest frame told of, or None.
        num_frames: Frames received so far.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._seq = itertools.count(1)
        self._is_closed = False
        self._in_use = threading.Lock()
        self.calls: dict[str, OpenCall[executor_pb2.StreamDecodeResponse]] = {}
        self.free_blocks: int | None = None
        self.num_frames = 0

    def attempts(
        self, inputs: Sequence[Input], timeout: Timeout = USE_DEFAULT, *, is_patient: bool = False
    ) -> Attempts:
        """Return the deadline and the retries of a frame; patient, if its items wait for a server that went away."""
        made = [one for one in inputs if _messages.creates(one)]
        has_ids = all(one.request_id for one in made)
        return self._connection.attempts(
            timeout,
            creates=bool(made),
            has_request_id=has_ids,
            is_patient=is_patient and bool(inputs),
            on_sequence=any(one.HasField("kv_cache") for one in inputs),
        )

    async def perform(
        self,
        caches: Sequence[AsyncCache | None],
        inputs: Sequence[Input],
        losers: Sequence[AsyncCache],
        attempts: Attempts,
    ) -> list[Appended | FerruleError]:
        """Return what came of the appends, in their order, whose losers end in the same frame.

        If it raises, they are in doubt, and no cache has ended. An append without a cache makes a sequence.
        """
        with using(*(tip_of(cache) for cache in caches if cache is not None)):
            try:
                results = await self.run(inputs, [tip_of(cache) for cache in losers], attempts)
                await self._recover(caches, inputs, results, attempts)
            except BaseException as error:
                for cache, sent in zip(caches, inputs, strict=True):
                    if cache is not None:
                        tip_of(cache).doubt(_messages.tokens_of(sent), error)
                raise
        for cache in losers:
            calls_of(cache).give_up()
        return results

    async def run(
        self, inputs: Sequence[Input], release: Sequence[Tip], attempts: Attempts
    ) -> list[Appended | FerruleError]:
        """Return what came of inputs, in their order.

        Raises:
            RuntimeError: Another task is using the stream.
        """
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("this stream is used by two tasks at once; open one for each with client.stream()")
        done: Done = {}
        try:
            while True:
                await self._answer(inputs, release, done, attempts)
                again = await self._with_masks(inputs, done, attempts) or await self._with_room(done, attempts)
                if not again:
                    return [done[place] for place in range(len(inputs))]
                for place in again:
                    del done[place]
        finally:
            self._in_use.release()

    async def close(self) -> None:
        """End the calls, in order. Closing twice changes nothing."""
        self._is_closed = True
        for call in self._taken():
            await call.close()

    def drop(self) -> None:
        """End the calls at once; what is under way stays unread."""
        for call in self._taken():
            call.cancel()

    def _taken(self) -> list[OpenCall[executor_pb2.StreamDecodeResponse]]:
        calls = list(self.calls.values())
        self.calls.clear()
        return calls

    async def _with_room(self, done: Done, attempts: Attempts) -> list[int]:
        """Wait as long as the items refused for the moment ask for, and return their places.

        Where sequences outlive the server, one that goes down refuses them for the moment too.
        """
        refused = {
            place: one
            for place, one in done.items()
            if isinstance(one, DrainingError) or (isinstance(one, FerruleError) and wait_s(one) is not None)
        }
        if refused:
            try:
                await self._connection.wait(attempts, max(refused.values(), key=lambda error: wait_s(error) or 0.0))
            except FerruleError:  # no further attempt: the refusals are the answers
                return []
        return list(refused)

    async def _with_masks(self, inputs: Sequence[Input], done: Done, attempts: Attempts) -> list[int]:
        """Register masks that were dropped, once on each instance; return the places of the items that need them."""
        lacking = {place: error for place, error in done.items() if isinstance(error, MaskUnknownError)}
        places, again = list(lacking), []
        for group in by_instance([inputs[place] for place in places], self._instance_of).values():
            part = [places[one] for one in group]
            if await self._connection.restore_masks(lacking[part[0]], [inputs[place] for place in part], attempts):
                again += part
        return again

    async def _recover(
        self,
        caches: Sequence[AsyncCache | None],
        inputs: Sequence[Input],
        results: list[Appended | FerruleError],
        attempts: Attempts,
    ) -> None:
        """Bring lost sequences back, send their appends once more, and put what became of them into ``results``."""
        again: dict[int, AsyncCache] = {}
        for place, (cache, sent, error) in enumerate(zip(caches, inputs, results, strict=True)):
            if cache is None or not isinstance(error, FerruleError):
                continue
            try:
                await calls_of(cache).bring_back(error, _convert.handle_from_message(sent.kv_cache), attempts)
            except FerruleError as failure:
                results[place] = failure
                continue
            _messages.aim(sent, cache.handle)
            again[place] = cache
        if not again:
            return
        try:
            answers = await self.run([inputs[place] for place in again], (), attempts)
        except FerruleError as failure:  # those of the others stay answered
            answers = [failure] * len(again)
        for (place, cache), answer in zip(again.items(), answers, strict=True):
            results[place] = answer
            if isinstance(answer, FerruleError):
                tip_of(cache).tell(answer)

    async def _answer(self, inputs: Sequence[Input], release: Sequence[Tip], done: Done, attempts: Attempts) -> None:
        """Exchange frames until every input has its answer in ``done``, by place; on new calls where some break."""
        losers, num_instances = list(release), 0
        while True:
            most = self._connection.handle_limit.most
            now, later = losers[:most], losers[most:]
            if later and not num_instances:
                ends = {self._connection.instance_of_handle(tip.handle) for tip in losers}
                num_instances = len(ends.union(map(self._instance_of, inputs)) - {""}) or 1
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
                self.drop()
                raise
            again = await self._retried(legs, done, attempts, is_alone=num_instances == 1)
            if not (again or later):
                return
            losers = [tip for leg in again for tip in leg.losers] + later

    async def _retried(self, legs: Sequence[_Leg], done: Done, attempts: Attempts, *, is_alone: bool) -> list[_Leg]:
        """Wait before another attempt and return the parts that are sent again.

        Where there is no further attempt, what a part failed with becomes the answer to its items, rather than the end
        of all, if other instances answer other items; and if its sequences are out of reach, as those of caches that
        recover are then brought back.
        """
        broken = {leg: leg.error for leg in legs if leg.error is not None}
        failed = {leg: error for leg, error in broken.items() if not self._was_too_long(leg, error)}
        if not failed:
            return list(broken)
        with contextlib.suppress(FerruleError):
            await self._connection.wait(attempts, next(iter(failed.values())))
            return list(broken)
        for leg, error in failed.items():
            if is_alone and not isinstance(error, (InstanceUnreachableError, WrongInstanceError)):
                raise error
            # Each of the copies will hear the tokens of its own sequence.
            done.update({place: copy.copy(error) for place in leg.waiting.values()})
        return [leg for leg in broken if leg not in failed]

    def _was_too_long(self, leg: _Leg, error: FerruleError) -> bool:
        """Report whether a frame was refused for too many handles to release; they then go in smaller frames."""
        is_about_release = isinstance(error, InvalidRequestError) and error.field == "release"
        return is_about_release and self._connection.handle_limit.shrink(error, len(leg.losers))

    def _open_legs(self, inputs: Sequence[Input], losers: Sequence[Tip], done: Done) -> list[_Leg]:
        """Send what is not answered yet: a frame to each instance that has some of it."""
        waiting = [place for place in range(len(inputs)) if place not in done]
        groups = by_instance([inputs[place] for place in waiting], self._instance_of)
        ends = by_instance(losers, lambda tip: self._connection.instance_of_handle(tip.handle))
        if "" in groups:  # new sequences alone: any instance will do, so the one that is asked anyway
            groups = {next(iter(ends), "") or next(iter(self.calls), ""): groups[""]}
        legs = []
        for instance in dict.fromkeys((*groups, *ends)) or ("",):
            seqs = {next(self._seq) & _MAX_SEQ: waiting[one] for one in groups.get(instance, ())}
            ending = [losers[one] for one in ends.get(instance, ())]
            leg = _Leg(self._open_call(instance), seqs, ending, len(ending))
            items = [_messages.stream_item(seq, inputs[place]) for seq, place in seqs.items()]
            handles = [_convert.handle_to_message(tip.handle) for tip in ending]
            leg.call.send(executor_pb2.StreamDecodeRequest(items=items, release=handles))
            legs.append(leg)
        return legs

    def _instance_of(self, sent: Input) -> str:
        return self._connection.instance_of_handle(sent.kv_cache)

    def _open_call(self, instance: str) -> OpenCall[executor_pb2.StreamDecodeResponse]:
        call = self.calls.get(instance)
        if call is not None and call.is_over:
            call.cancel()
            call = None
        if not (self._is_closed or self._connection.is_closed):
            try:
                call = self.calls[instance] = call or open_frames(self._connection.wire, instance)
            except ValueError:  # gRPC's answer to a channel that was closed just now
                if not self._connection.is_closed:
                    raise
            else:
                return call
        raise CallCancelledError(grpc.StatusCode.CANCELLED, "CANCELLED", "the stream is closed")

    async def _serve(self, leg: _Leg, done: Done, attempts: Attempts, *, is_alone: bool, is_reading: bool) -> None:
        """See that a part of a frame is on its way, or read until it is answered; or note what it failed with."""
        if leg.error is not None:
            return
        try:
            if not is_reading:
                await leg.call.flush(attempts.remaining())
            while is_reading and leg.error is None and (leg.waiting or leg.num_releases > 0):
                frame = await self._connection.receive(leg.call, attempts)
                if isinstance(frame, FerruleError):
                    leg.error = frame
                else:
                    self._take(leg, frame, done)
        except DeadlineExceededError as error:
            if is_alone:
                raise
            leg.error = error
        except grpc.RpcError as error:
            leg.error = self._connection.typed(error, leg.call.instance)
        if leg.error is not None:
            self.calls.pop(leg.call.instance, None)
            leg.call.cancel()

    def _take(self, leg: _Leg, frame: executor_pb2.StreamDecodeResponse, done: Done) -> None:
        """Put the answers of a frame in; they also tell which instance a call has reached."""
        self.num_frames += 1
        self.free_blocks = frame.free_blocks
        leg.num_releases -= len(frame.releases)
        for result in frame.results:
            place, answer = leg.waiting.pop(result.seq), _messages.stream_answer(result)
            done[place] = answer or error_from_status(result.error)
            if answer is not None and not leg.call.instance:
                name = instance_of_handle(answer.kv_cache)
                if name and name not in self.calls:
                    leg.call.instance = name
                    self.calls[name] = self.calls.pop("")
