"""Appends of many caches sent together, by a stream or a batch, and again where an answer asks for it."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ferrule_client import _convert, _messages
from ferrule_client._messages import Appended, Input
from ferrule_client._retry import Attempts, wait_s
from ferrule_client._route import is_lost
from ferrule_client._tip import Tip, using
from ferrule_client.aio._calls import calls_of, tip_of
from ferrule_client.aio._connection import Connection
from ferrule_client.errors import FerruleError, InstanceUnreachableError, WrongInstanceError

if TYPE_CHECKING:
    from ferrule_client.aio.cache import AsyncCache

__all__ = ["Done", "Exchange", "as_answers"]

Done = dict[int, Appended | FerruleError]
"""Answers by the places of their inputs."""

_Send = Callable[[Sequence[Input], Sequence[Tip], Done, Attempts], Awaitable[None]]
"""Sends every input that has no answer yet, together with the sequences to end, and puts the answers in."""


class Exchange:
    """Exchanges the appends of caches, which do not move by it.

    Items that are refused for the moment are sent again, within the time; so are those whose token mask was dropped
    and those of lost sequences, once these are brought back where their caches do that.

    Args:
        connection: Waits, and registers masks.
        send: Sends what has no answer.
        attempts: Those of the call.
    """

    def __init__(self, connection: Connection, send: _Send, attempts: Attempts) -> None:
        self._connection = connection
        self._send = send
        self._attempts = attempts

    async def perform(
        self, caches: Sequence[AsyncCache | None], inputs: Sequence[Input], losers: Sequence[AsyncCache] = ()
    ) -> list[Appended | FerruleError]:
        """Return what came of the appends, in their order; when it raises, they are in doubt.

        Args:
            caches: The cache of each; None: it makes a sequence.
            inputs: The appends.
            losers: Caches to end in the same frame.
        """
        with using(*(tip_of(cache) for cache in caches if cache is not None)):
            try:
                results = await self.run(inputs, [tip_of(cache) for cache in losers])
                await self._recover(caches, inputs, results)
            except BaseException as error:
                for cache, sent in zip(caches, inputs, strict=True):
                    if cache is not None:
                        tip_of(cache).doubt(_messages.tokens_of(sent), error)
                raise
        for cache in losers:
            calls_of(cache).give_up()
        return results

    async def run(self, inputs: Sequence[Input], release: Sequence[Tip] = ()) -> list[Appended | FerruleError]:
        """Return what came of inputs, in their order."""
        done: Done = {}
        while True:
            await self._send(inputs, release, done, self._attempts)
            if not await self._waited_for_masks(inputs, done) and not await self._waited_for_room(done):
                return [done[place] for place in range(len(inputs))]

    async def _waited_for_room(self, done: Done) -> bool:
        """Wait as long as the items refused for the moment ask for, take them out of ``done``, and tell if any are."""
        refused = {place: one for place, one in done.items() if isinstance(one, FerruleError) and _is_passing(one)}
        if not refused:
            return False
        try:
            await self._connection.wait(self._attempts, max(refused.values(), key=lambda error: wait_s(error) or 0.0))
        except FerruleError:  # no further attempt: the refusals are the answers
            return False
        for place in refused:
            del done[place]
        return True

    async def _waited_for_masks(self, inputs: Sequence[Input], done: Done) -> bool:
        """Register masks that were dropped, take the items that need them out of ``done``, and tell if any are."""
        repeated = False
        for place, error in list(done.items()):
            if isinstance(error, FerruleError) and await self._connection.restore_masks(
                error, [inputs[place]], self._attempts
            ):
                del done[place]
                repeated = True
        return repeated

    async def _recover(
        self, caches: Sequence[AsyncCache | None], inputs: Sequence[Input], results: list[Appended | FerruleError]
    ) -> None:
        """Bring lost sequences back, send their appends once more, and put what became of them into ``results``."""
        again: list[int] = []
        for place, error in enumerate(results):
            cache, sent = caches[place], inputs[place]
            if cache is None or not isinstance(error, FerruleError):
                continue
            if not is_lost(error, _convert.handle_from_message(sent.kv_cache)):
                continue
            tip_of(cache).tell(error)
            try:
                if sent.kv_cache.cache_id == cache.handle.cache_id:  # else an earlier place has brought it back
                    await calls_of(cache).revive(error, self._attempts)
            except FerruleError as failure:
                results[place] = failure
                continue
            _messages.aim(sent, cache.handle)
            again.append(place)
        if again:
            await self._repeat(again, caches, inputs, results)

    async def _repeat(
        self,
        places: Sequence[int],
        caches: Sequence[AsyncCache | None],
        inputs: Sequence[Input],
        results: list[Appended | FerruleError],
    ) -> None:
        """Send the appends of some places again, once; when the stream fails, those of the others stay answered."""
        try:
            answers = await self.run([inputs[place] for place in places])
        except FerruleError as failure:
            answers = [failure] * len(places)
        for place, answer in zip(places, answers, strict=True):
            cache = caches[place]
            results[place] = answer
            if isinstance(answer, FerruleError) and cache is not None:
                tip_of(cache).tell(answer)


def as_answers(error: FerruleError, places: Iterable[int], num_instances: int) -> Done:
    """Return what a call failed with as the answer to each of its items, rather than as the end of all.

    That it is where other instances answer other items, and where the sequences are out of reach: those of caches that
    recover are then brought back.

    Args:
        error: What it failed with.
        places: Those of its items.
        num_instances: How many instances were asked.

    Raises:
        FerruleError: ``error``, if it is the end.
    """
    if num_instances == 1 and not isinstance(error, (InstanceUnreachableError, WrongInstanceError)):
        raise error
    return {place: copy.copy(error) for place in places}  # each will hear the tokens of its own sequence


def _is_passing(error: FerruleError) -> bool:
    return wait_s(error) is not None
