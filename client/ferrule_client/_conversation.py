"""A conversation with a model: messages on this side, one sequence on the server that follows them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ferrule_client._token_log import common_length
from ferrule_client.cache import Cache
from ferrule_client.client import Client
from ferrule_client.generation import TextGeneration
from ferrule_client.policy import no_output
from ferrule_client.types import FinishReason

__all__ = ["Answer", "Conversation", "DrawSettings"]


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """How answers are drawn; as in ``Cache.generate_text``."""

    max_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None


@dataclass(slots=True)
class Answer:
    """What the model said in one turn.

    Attributes:
        text: Of the answer. tokens: its ids.
        finish_reason: Why it ended; ``stopped``: the reader wanted no more.
        seed: Of the draws.
        num_prompt_tokens: Tokens of the conversation up to the answer.
        num_reused_tokens: Of these, how many the sequence held already.
        loop_s: Seconds from the question to the last token, the prompt's own run included.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | str | None = None
    seed: int | None = None
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    loop_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens drawn for each second."""
        return len(self.tokens) / self.loop_s if self.loop_s else 0.0


class Conversation:
    """Messages, and the one sequence whose KV is kept from turn to turn. Leaving ``with`` releases the sequence.

    Each turn renders the whole conversation by the model's chat template, finds how far its tokens are those that the
    sequence holds, takes the sequence back to there, and sends the rest. Mostly that is the new message alone; after
    an undo, or where the template writes an answer otherwise than it was drawn (without its thoughts, say), it is more.

    Invariant: ``_token_ids`` begins with the tokens of the sequence, and goes on with those pending.

    Args:
        client: To talk through.
        settings: How answers are drawn.
        system: The system message; empty: none.
        variables: More variables for the template.

    Attributes:
        messages: What was said, without the system message.
        system: The system message from the next turn on.
    """

    def __init__(
        self, client: Client, settings: DrawSettings, system: str = "", variables: Mapping[str, Any] | None = None
    ) -> None:
        self._client = client
        self._settings = settings
        self._variables = variables
        self._cache: Cache | None = None
        self._token_ids: list[int] = []
        self.system = system
        self.messages: list[dict[str, str]] = []

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.__exit__(kind, error, tb)

    @property
    def all_messages(self) -> list[dict[str, str]]:
        """The messages, the system message first if there is one."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.messages

    def ask(self, text: str, on_piece: Callable[[str], None]) -> Answer:
        """Say something and return the answer; with an answer of no token, nothing was said.

        Args:
            text: The user's message.
            on_piece: Called with each piece of the answer as it comes. A KeyboardInterrupt from here on ends the
                answer and not the conversation.

        Raises:
            ExecutorError: A call failed; the messages are as before.
        """
        question = {"role": "user", "content": text}
        prompt = self._client.apply_chat_template([*self.all_messages, question], variables=self._variables)
        answer = Answer(num_prompt_tokens=len(prompt.token_ids))
        start = time.perf_counter()
        cache, answer.num_reused_tokens = self._taken_back(prompt.token_ids)
        self._draw(cache, prompt.token_ids, answer, on_piece)
        answer.loop_s = time.perf_counter() - start
        if answer.tokens:
            self.messages += [question, {"role": "assistant", "content": answer.text}]
        return answer

    def undo(self) -> bool:
        """Take back the last turn; False: there is none."""
        had_any = bool(self.messages)
        del self.messages[-2:]
        return had_any

    def reset(self) -> None:
        """Take back every turn; the system message stays."""
        self.messages.clear()

    def _taken_back(self, token_ids: Sequence[int]) -> tuple[Cache, int]:
        """Return a sequence that holds a beginning of these tokens and nothing else, and the length of that."""
        same = common_length(self._token_ids, token_ids)
        if self._cache is None or same == 0:
            return self._begun(token_ids), 0
        if same < len(self._token_ids):
            self._cache.truncate(same)
            self._token_ids = list(token_ids[:same])
        return self._cache, same

    def _begun(self, token_ids: Sequence[int]) -> Cache:
        """Return a new sequence of all tokens but the last one, which goes with the draws."""
        if self._cache is not None:
            self._cache.release()
            self._cache = None
        prompt = list(token_ids[:-1] or token_ids)
        repeats = self._settings.seed is not None  # cached KV differs by rounding, which can change the text
        self._cache = self._client.prefill(prompt, policy=no_output(), reuse_prefix=not repeats, recover=True)
        self._token_ids = prompt
        return self._cache

    def _draw(self, cache: Cache, token_ids: Sequence[int], answer: Answer, on_piece: Callable[[str], None]) -> None:
        wanted = self._settings
        seed = secrets.randbits(52) if wanted.seed is None and wanted.temperature != 0 else wanted.seed  # exact in JSON
        loop = cache.generate_text(
            wanted.max_tokens,
            tokens=token_ids[len(self._token_ids) :],
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            min_p=wanted.min_p,
            seed=seed,
        )
        try:
            _read(loop, answer, on_piece)
        finally:
            loop.close()
            answer.tokens = list(loop.tokens)
            # What failed or was stopped may have run a part of it: the cache knows how much.
            num_held = cache.length + len(cache.pending)
            self._token_ids = [*token_ids, *answer.tokens][:num_held]


def _read(loop: TextGeneration, answer: Answer, on_piece: Callable[[str], None]) -> None:
    try:
        for piece in loop:
            answer.text += piece
            on_piece(piece)
        answer.finish_reason = loop.finish_reason
    except KeyboardInterrupt:
        answer.finish_reason = "stopped"
    answer.seed = loop.seed
