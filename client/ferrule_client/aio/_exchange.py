# Written by client/generate_aio.py from client/ferrule_client/_exchange.py: change that, then run it again.
"""Appends of many caches sent together, by a stream or a batch, and again where an answer asks for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from ferrule_client import _convert, _messages
from ferrule_client._exchange import Done, _is_passing, as_answers
from ferrule_client._messages import Append, Appended
from ferrule_client._retry import Attempts, wait_s
from ferrule_client._route import is_lost
from ferrule_client._tip import Tip, using
from ferrule_client.aio._connection import Connection
from ferrule_client.errors import ExecutorError
from ferrule_client.items import Chunk, DecodeItem, VerifyItem
from ferrule_client.types import Output, Verification

if TYPE_CHECKING:
    from ferrule_client.aio.cache import AsyncCache

__all__ = ["Done", "Exchange", "as_answers", "take"]


"""Answers by the places of their inputs."""

_Send = Callable[[Sequence[Append], Sequence[Tip], Done, Attempts], Awaitable[None]]
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
        self, caches: Sequence[AsyncCache | None], inputs: Sequence[Append], losers: Sequence[AsyncCache] = ()
    ) -> list[Appended | ExecutorError]:
        """Return what came of the appends, in their order; when it raises, they are in doubt.

        Args:
            caches: The cache of each; None: it makes a sequence.
            inputs: The appends.
            losers: Caches to end in the same frame.
        """
        with using(*(cache.tip for cache in caches if cache is not None)):
            try:
                results = await self.run(inputs, [cache.tip for cache in losers])
                await self._recover(caches, inputs, results)
            except BaseException as error:
                for cache, sent in zip(caches, inputs, strict=True):
                    if cache is not None:
                        cache.tip.doubt(_messages.tokens_of(sent), error)
                raise
        for cache in losers:
            cache.give_up()
        return results

    async def run(self, inputs: Sequence[Append], release: Sequence[Tip] = ()) -> list[Appended | ExecutorError]:
        """Return what came of inputs, in their order."""
        done: Done = {}
        while True:
            await self._send(inputs, release, done, self._attempts)
            if not await self._waited_for_masks(inputs, done) and not await self._waited_for_room(done):
                return [done[place] for place in range(len(inputs))]

    async def _waited_for_room(self, done: Done) -> bool:
        """Wait as long as the items refused for the moment ask for, take them out of ``done``, and tell if any are."""
        refused = {place: one for place, one in done.items() if isinstance(one, ExecutorError) and _is_passing(one)}
        if not refused:
            return False
        try:
            await self._connection.wait(self._attempts, max(refused.values(), key=lambda error: wait_s(error) or 0.0))
        except ExecutorError:  # no further attempt: the refusals are the answers
            return False
        for place in refused:
            del done[place]
        return True

    async def _waited_for_masks(self, inputs: Sequence[Append], done: Done) -> bool:
        """Register masks that were dropped, take the items that need them out of ``done``, and tell if any are."""
        repeated = False
        for place, error in list(done.items()):
            if isinstance(error, ExecutorError) and await self._connection.restore_masks(
                error, [inputs[place]], self._attempts
            ):
                del done[place]
                repeated = True
        return repeated

    async def _recover(
        self, caches: Sequence[AsyncCache | None], inputs: Sequence[Append], results: list[Appended | ExecutorError]
    ) -> None:
        """Bring lost sequences back, send their appends once more, and put what became of them into ``results``."""
        again: list[int] = []
        for place, error in enumerate(results):
            cache, sent = caches[place], inputs[place]
            if cache is None or not isinstance(error, ExecutorError):
                continue
            if not is_lost(error, _convert.handle_from_message(sent.kv_cache)):
                continue
            cache.tip.tell(error)
            try:
                if sent.kv_cache.cache_id == cache.handle.cache_id:  # else an earlier place has brought it back
                    await cache.revive(error, self._attempts)
            except ExecutorError as failure:
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
        inputs: Sequence[Append],
        results: list[Appended | ExecutorError],
    ) -> None:
        """Send the appends of some places again, once; when the stream fails, those of the others stay answered."""
        try:
            answers = await self.run([inputs[place] for place in places])
        except ExecutorError as failure:
            answers = [failure] * len(places)
        for place, answer in zip(places, answers, strict=True):
            cache = caches[place]
            results[place] = answer
            if isinstance(answer, ExecutorError) and cache is not None:
                cache.tip.tell(answer)


# each will hear the tokens of its own sequence


def take(
    tip: Tip,
    item: DecodeItem[AsyncCache] | VerifyItem[AsyncCache] | Chunk[AsyncCache],
    sent: Append,
    result: Appended | ExecutorError,
) -> Output | Verification | ExecutorError:
    """Move a sequence by what came of its item."""
    if isinstance(result, ExecutorError):
        tip.doubt(_messages.tokens_of(sent), result)
        return result
    if isinstance(item, VerifyItem):
        assert isinstance(result, _messages.VerifyOutput)  # the answer is of the kind of the input
        certain = _messages.tokens_of(sent)[: -len(item.draft) or None]
        return tip.verified(certain, item.draft, item.parents, _convert.verification_from_message(result))
    return tip.moved(_messages.tokens_of(sent), _convert.output_from_message(result))
