"""Decode loops: an iterator over tokens, and one over text."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from ferrule_client import _convert
from ferrule_client._connection import Connection, Timeout
from ferrule_client.detokenizer import Detokenizer
from ferrule_client.errors import ContextExceededError, ExecutorError
from ferrule_client.policy import Policy
from ferrule_client.stream import Stream
from ferrule_client.types import FinishReason, Output

if TYPE_CHECKING:
    from ferrule_client.cache import Cache

__all__ = ["Generation", "TextGeneration"]


class Generation(Iterator[int]):
    """A decode loop on one stream, yielding token ids as they are drawn; made by ``Cache.generate``.

    Invariant: after each token the cache's handle covers every token before it, and ``cache.pending`` is that token.
    Leaving the loop early is fine; the cache can go on in any way from there.

    Attributes:
        finish_reason: Why it ended, or None while it goes on. A token that ends it is yielded.
        tokens: Token ids yielded so far.
    """

    def __init__(
        self,
        cache: Cache,
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
        self._stream = Stream(connection)
        self._policy = policy
        self._max_tokens = max_tokens
        self._eos_ids: frozenset[int] | None = frozenset() if ignore_eos else None  # None: not asked for yet
        self._stop_ids = stop_ids
        self._timeout = timeout
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = "max_tokens" if max_tokens == 0 else None

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __next__(self) -> int:
        if self.finish_reason is not None:
            raise StopIteration
        try:
            timeout = self._connection.until(self._timeout)
            eos_ids = self._find_eos_ids(timeout)
            output = self._step(timeout)
        except ContextExceededError:
            self._finish("context_full")
            raise StopIteration from None
        except BaseException:
            self.close()
            raise
        assert output.token is not None, "the policy of a generation has a selection"  # checked in Cache.generate
        self.tokens.append(output.token)
        self._judge(output.token, eos_ids)
        return output.token

    @property
    def output(self) -> Output | None:
        """The whole output of the newest token: log-probabilities, seed, timing."""
        return self._cache.last

    @property
    def is_final(self) -> bool:
        """True: the newest token ended the text (an end-of-text or stop token)."""
        return self.finish_reason in ("eos", "stop_token")

    def close(self) -> None:
        """End the loop; the cache stays as it is. Closing twice changes nothing."""
        self._finish("closed")

    def _step(self, timeout: Timeout) -> Output:
        """Append what is pending, or query the newest row if nothing is, and take the drawn token as pending."""
        cache = self._cache
        sent = cache.prepare((), self._policy, timeout=timeout)
        result = self._stream.append([cache], [sent], timeout=timeout)[0]
        if isinstance(result, ExecutorError):
            cache.tip.doubt(sent.input_ids, result)
            raise result
        output = _convert.output_from_message(result)
        return cache.tip.moved(sent.input_ids, output, pending=output.tokens[-1:])

    def _find_eos_ids(self, timeout: Timeout) -> frozenset[int]:
        if self._eos_ids is None:
            info = self._connection.model_info(timeout, is_patient=self._cache.recovers)
            self._eos_ids = frozenset(info.eos_token_ids + info.stop_token_ids)
        return self._eos_ids

    def _judge(self, token: int, eos_ids: frozenset[int]) -> None:
        if token in eos_ids:
            self._finish("eos")
        elif token in self._stop_ids:
            self._finish("stop_token")
        elif len(self.tokens) == self._max_tokens:
            self._finish("max_tokens")

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = self.finish_reason or reason
        self._stream.close()


class TextGeneration(Iterator[str]):
    """A decode loop yielding pieces of text, never half a character; made by ``Cache.generate_text``."""

    def __init__(self, generation: Generation, detokenizer: Detokenizer) -> None:
        self._generation = generation
        self._detokenizer = detokenizer
        self._has_ended = False

    def __enter__(self) -> TextGeneration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __next__(self) -> str:
        while not self._has_ended:
            piece = self._next_piece()
            if piece:
                return piece
        raise StopIteration

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

    def close(self) -> None:
        """End the loop; the cache stays as it is. Closing twice changes nothing."""
        self._has_ended = True
        self._generation.close()

    def _next_piece(self) -> str:
        self._detokenizer.begin()  # a server without a tokenizer says so before a token is drawn
        token = next(self._generation, None)
        if token is None or self._generation.is_final:
            self._has_ended = True
            return self._detokenizer.finish()
        return self._detokenizer.push(token)
