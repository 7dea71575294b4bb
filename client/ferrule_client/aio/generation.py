# Written by client/generate_aio.py from client/ferrule_client/generation.py: change that, then run it again.
"""Decode loops: an iterator over tokens, and one over text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING

from ferrule_client import _convert
from ferrule_client.aio._connection import Connection, Timeout
from ferrule_client.aio.detokenizer import AsyncDetokenizer
from ferrule_client.aio.stream import AsyncStream
from ferrule_client.errors import ContextExceededError, ExecutorError
from ferrule_client.policy import Policy
from ferrule_client.types import FinishReason, Output

if TYPE_CHECKING:
    from ferrule_client.aio.cache import AsyncCache

__all__ = ["AsyncGeneration", "AsyncTextGeneration"]


class AsyncGeneration(AsyncIterator[int]):
    """A decode loop on one stream, yielding token ids as they are drawn; made by ``AsyncCache.generate``.

    Invariant: after each token the cache's handle covers every token before it, and ``cache.pending`` is that token.
    Leaving the loop early is fine; the cache can go on in any way from there.

    Attributes:
        finish_reason: Why it ended, or None while it goes on. A token that ends it is yielded.
        tokens: Token ids yielded so far.
    """

    def __init__(
        self,
        cache: AsyncCache,
        connection: Connection,
        policy: Policy,
        *,
        max_tokens: int | None,
        stop_ids: frozenset[int],
        ignore_eos: bool,
        timeout: Timeout,
    ) -> None:
        self._cache = cache
        self._connection = connection
        self._stream = AsyncStream(connection)
        self._policy = policy
        self._max_tokens = max_tokens
        self._eos_ids: frozenset[int] | None = frozenset() if ignore_eos else None  # None: not asked for yet
        self._stop_ids = stop_ids
        self._timeout = timeout
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = "max_tokens" if max_tokens == 0 else None

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def __anext__(self) -> int:
        if self.finish_reason is not None:
            raise StopAsyncIteration
        try:
            timeout = self._connection.until(self._timeout)
            eos_ids = await self._find_eos_ids(timeout)
            output = await self._step(timeout)
        except ContextExceededError:
            await self._finish("context_full")
            raise StopAsyncIteration from None
        except BaseException:
            await self.close()
            raise
        assert output.token is not None, "the policy of a generation has a selection"  # checked in AsyncCache.generate
        self.tokens.append(output.token)
        await self._judge(output.token, eos_ids)
        return output.token

    @property
    def output(self) -> Output | None:
        """The whole output of the newest token: log-probabilities, seed, timing."""
        return self._cache.last

    @property
    def is_final(self) -> bool:
        """True: the newest token ended the text (an end-of-text or stop token)."""
        return self.finish_reason in ("eos", "stop_token")

    async def close(self) -> None:
        """End the loop; the cache stays as it is. Closing twice changes nothing."""
        await self._finish("closed")

    async def _step(self, timeout: Timeout) -> Output:
        """Append what is pending, or query the newest row if nothing is, and take the drawn token as pending."""
        cache = self._cache
        sent = await cache.prepare((), self._policy, timeout=timeout)
        result = (await self._stream.append([cache], [sent], timeout=timeout))[0]
        if isinstance(result, ExecutorError):
            cache.tip.doubt(sent.input_ids, result)
            raise result
        output = _convert.output_from_message(result)
        return cache.tip.moved(sent.input_ids, output, pending=output.tokens[-1:])

    async def _find_eos_ids(self, timeout: Timeout) -> frozenset[int]:
        if self._eos_ids is None:
            info = await self._connection.model_info(timeout, is_patient=self._cache.recovers)
            self._eos_ids = frozenset(info.eos_token_ids + info.stop_token_ids)
        return self._eos_ids

    async def _judge(self, token: int, eos_ids: frozenset[int]) -> None:
        if token in eos_ids:
            await self._finish("eos")
        elif token in self._stop_ids:
            await self._finish("stop_token")
        elif len(self.tokens) == self._max_tokens:
            await self._finish("max_tokens")

    async def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = self.finish_reason or reason
        await self._stream.close()


class AsyncTextGeneration(AsyncIterator[str]):
    """A decode loop yielding pieces of text, never half a character; made by ``AsyncCache.generate_text``."""

    def __init__(self, generation: AsyncGeneration, detokenizer: AsyncDetokenizer) -> None:
        self._generation = generation
        self._detokenizer = detokenizer
        self._has_ended = False

    async def __aenter__(self) -> AsyncTextGeneration:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def __anext__(self) -> str:
        while not self._has_ended:
            piece = await self._next_piece()
            if piece:
                return piece
        raise StopAsyncIteration

    @property
    def tokens(self) -> list[int]:
        """Token ids drawn so far, the one that ended the text included."""
        return self._generation.tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, or None while it goes on."""
        return self._generation.finish_reason

    @property
    def output(self) -> Output | None:
        """The whole output of the newest token: log-probabilities, seed, timing."""
        return self._generation.output

    async def close(self) -> None:
        """End the loop; the cache stays as it is. Closing twice changes nothing."""
        self._has_ended = True
        await self._generation.close()

    async def _next_piece(self) -> str:
        await self._detokenizer.begin()  # a server without a tokenizer says so before a token is drawn
        token = await anext(self._generation, None)
        if token is None or self._generation.is_final:
            self._has_ended = True
            return await self._detokenizer.finish()
        return await self._detokenizer.push(token)
