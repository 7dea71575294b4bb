"""One request on the client library: a prompt, its branches, their tokens, and the release of all its handles."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from ferrule_cli.load.loops import Refused
from ferrule_cli.load.options import Mode
from ferrule_cli.load.records import Record
from ferrule_client.aio.cache import AsyncCache
from ferrule_client.aio.client import AsyncClient
from ferrule_client.aio.generation import AsyncGeneration
from ferrule_client.aio.stream import AsyncStream
from ferrule_client.errors import FerruleError
from ferrule_client.items import Append
from ferrule_client.policy import greedy
from ferrule_client.types import Handle

__all__ = ["LEASE_S", "Requests", "Shape"]

_log = logging.getLogger(__name__)

LEASE_S = 15.0
"""A sequence whose handle was lost lives so long; the leases of the others are renewed."""
_CREATION_S = 2.0
_RELEASE_S = 5.0
_RELEASE_PAUSES_S = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """What each request is.

    Attributes:
        mode: ``generate``: the server draws the tokens, in one call; ``stream``: the client sends a frame per token.
        new_tokens: Tokens drawn by each branch.
        num_branches: Continuations of each prompt.
        vocab_size: Size of the vocabulary, from which the tokens of prompts are drawn.
        seed: Seed of the prompts.
    """

    mode: Mode
    new_tokens: int
    num_branches: int
    vocab_size: int
    seed: int


@dataclass(slots=True)
class Requests:
    """Makes requests with a client, and counts what was tried again.

    Invariant: every handle that a request received is released when the request ends, or is in ``left``.

    Attributes:
        client: The client; it tries again as it was told to.
        shape: What each request is.
        retries: Times that an attempt of a call was repeated, by the reason that it failed with.
        left: Handles whose release failed; :meth:`release_left` tries again.
        streams: Open streams that no request uses now.
    """

    client: AsyncClient
    shape: Shape
    retries: Counter[str] = field(default_factory=Counter)
    left: list[Handle] = field(default_factory=list)
    streams: list[AsyncStream] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Have the client report its retries."""
        self.client._connection.on_retry = lambda error: self.retries.update([error.reason])  # noqa: SLF001 - ours

    async def make(self, number: int, record: Record) -> None:
        """Make one request with a prompt of its own, and note its tokens.

        Raises:
            Refused: The server refused it, or a branch ended before its last token.
        """
        draw = random.Random(f"{self.shape.seed}-{number}")  # noqa: S311 - no secret
        prompt = draw.choices(range(self.shape.vocab_size), k=record.prompt_length)
        try:
            await (self._generate if self.shape.mode == "generate" else self._stream)(prompt, record)
        except FerruleError as error:
            raise Refused(error.reason, getattr(error, "retry_after_s", None)) from error

    async def close(self) -> int:
        """Close the streams and release what is left; return as ``release_left``."""
        await asyncio.gather(*(stream.close() for stream in self.streams))
        return await self.release_left()

    async def release_left(self) -> int:
        """Release the handles whose release failed; return how many are left to the end of their leases."""
        for pause_s in _RELEASE_PAUSES_S:
            if self.left:
                await asyncio.sleep(pause_s)
                handles, self.left = self.left, []
                await self._release(handles)
        return len(self.left)

    async def _generate(self, prompt: list[int], record: Record) -> None:
        if self.shape.num_branches > 1:
            await self._generate_branches(prompt, record)
            return
        drawing = self.client.generate(
            prompt,
            self.shape.new_tokens,
            policy=greedy(),
            ignore_eos=True,
            ttl=LEASE_S,
            reuse_prefix=False,
            publish_prefix=False,
            keep=True,
        )
        await self._draw(drawing, record)

    async def _generate_branches(self, prompt: list[int], record: Record) -> None:
        """Prefill, and draw the branches from that handle.

        One call for all of it would be possible too. But if its fork were refused, the sequence of the prompt would
        live until its lease ended: nobody would have its handle.
        """
        caches: list[AsyncCache] = []
        try:
            await _to_the_end(self._prefill(prompt, record, caches))
            num_left, num_branches = self.shape.new_tokens - 1, self.shape.num_branches
            await self._draw(caches[0].generate(num_left, n=num_branches, policy=greedy(), ignore_eos=True), record)
        finally:
            await self._release([one for one in caches if not one.is_released])

    async def _draw(self, drawing: AsyncGeneration, record: Record) -> None:
        """Draw all tokens of a generation and release its sequences."""

        async def draw(*, is_begin: bool) -> None:
            while not (is_begin and all(branch.has_cache for branch in drawing.branches)):
                if (token := await drawing.advance()) is None:
                    return
                _note(record, token.index)

        try:
            await _to_the_end(draw(is_begin=True))
            await draw(is_begin=False)
        finally:
            await drawing.close()
            await self._release([branch.cache for branch in drawing.branches if branch.has_cache])
        for branch in drawing.branches:
            if branch.error is not None:
                raise branch.error
            if branch.finish_reason != "max_tokens":
                raise Refused(str(branch.finish_reason).upper())

    async def _stream(self, prompt: list[int], record: Record) -> None:
        caches: list[AsyncCache] = []

        async def create() -> None:
            await self._prefill(prompt, record, caches)
            if self.shape.num_branches > 1:
                caches.extend(await caches[0].fork(self.shape.num_branches - 1))

        stream = self.streams.pop() if self.streams else self.client.stream()
        try:
            await _to_the_end(create())
            for _ in range(self.shape.new_tokens - 1):
                await stream.run([Append(cache, policy=greedy()) for cache in caches])
                for branch in range(len(caches)):
                    _note(record, branch)
        finally:
            self.streams.append(stream)
            await self._release(caches)

    async def _prefill(self, prompt: list[int], record: Record, caches: list[AsyncCache]) -> None:
        """Run a prompt, which draws the first token, and append its cache to ``caches``."""
        wanted = greedy()
        cache = await self.client.prefill(prompt, policy=wanted, ttl=LEASE_S, reuse_prefix=False, publish_prefix=False)
        caches.append(cache)
        _note(record, 0)

    async def _release(self, held: Sequence[AsyncCache] | Sequence[Handle]) -> None:
        """Release sequences; those of a release that failed, or was cancelled, are in ``left``."""
        handles = [one if isinstance(one, Handle) else one.handle for one in held]
        self.left += handles
        try:
            if held:
                await self.client.release(held, timeout=_RELEASE_S)
        except FerruleError as error:
            _log.debug("release failed handles=%d reason=%s", len(held), error.reason)
        else:
            self.left = [one for one in self.left if one not in handles]


def _note(record: Record, branch: int) -> None:
    record.note(branch, asyncio.get_running_loop().time())


async def _to_the_end(creation: Coroutine[Any, Any, None]) -> None:
    """Await what creates sequences. If the caller is cancelled, give the handles two seconds to arrive.

    The server drops a creation that was cancelled before it ran. But a handle that was already on its way would be
    lost, and its sequence would live until its lease ended.
    """
    task = asyncio.ensure_future(creation)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=_CREATION_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
