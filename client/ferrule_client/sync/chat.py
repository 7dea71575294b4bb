# Written by tools/strip_async.py from ../aio/chat.py: change that and run `make sync`.
"""A conversation with a model: messages here, and one sequence on the server that follows them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ferrule_client import _check, _messages
from ferrule_client._public import publish
from ferrule_client._timeouts import USE_DEFAULT, Timeout
from ferrule_client._token_log import common_length
from ferrule_client.errors import HandleNotFoundError
from ferrule_client.policy import Policy, sample
from ferrule_client.sync._closing import Closing
from ferrule_client.sync.cache import Cache
from ferrule_client.sync.generation import Generation
from ferrule_client.types import Answer, Handle

if TYPE_CHECKING:
    from ferrule_client.sync._connection import Connection
    from ferrule_client.sync.client import Client

__all__ = ["Chat"]


class Chat(Closing):
    """Messages, and the one sequence whose KV is kept from turn to turn; made by ``Client.chat``.

    Leaving ``with`` releases the sequence::

        with client.chat("Answer briefly.") as chat:
            print(chat.send("What is a ferrule?"))
            chat.undo()                                       # forgets that turn
            with chat.fork() as other:                  # both go on from here
                print(other.send("And a grommet?"))

    Each turn renders the whole conversation by the model's chat template, finds how many of its tokens the sequence
    holds, truncates the sequence there, and sends the rest. Mostly that is the new message alone. After an undo, or if
    the template writes an answer otherwise than it was drawn (without its thoughts, for instance), it is more. To edit
    what was said, change ``messages``: the next turn runs what differs. To have the last question answered again, call
    ``undo`` and ``send`` it again.

    Nobody can write a turn of another: the text of special tokens in a message stays ordinary text.

    Attributes:
        messages: What was said, without the system message: dicts with ``role`` and ``content``, which may be changed.
        system: The system message from the next turn on; empty: none.
        policy: How the next answers are drawn.
        max_tokens: Most tokens of an answer.
    """

    def __init__(
        self,
        client: Client,
        connection: Connection,
        system: str = "",
        *,
        policy: Policy | None = None,
        max_tokens: int = 256,
        variables: Mapping[str, object] | None = None,
    ) -> None:
        self._client = client
        self._connection = connection
        self._variables = variables
        self._cache: Cache | None = None
        self._token_ids: list[int] = []  # those of the sequence, then the pending one
        self.system = system
        self.policy = sample() if policy is None else policy
        self.max_tokens = max_tokens
        self.messages: list[dict[str, str]] = []

    def __repr__(self) -> str:
        return f"Chat({len(self.messages)} messages, {len(self._token_ids)} tokens)"

    @property
    def handle(self) -> Handle | None:
        """The handle of the conversation so far, or None before the first turn."""
        return None if self._cache is None else self._cache.handle

    @property
    def all_messages(self) -> list[dict[str, str]]:
        """The messages, the system message first if there is one."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.messages

    def send(
        self, text: str, *, on_text: Callable[[str], object] | None = None, timeout: Timeout = USE_DEFAULT
    ) -> Answer:
        """Say something and return the answer. If no token was drawn, nothing was said.

        Args:
            text: The user's message.
            on_text: Called with each piece of the answer as it comes. A KeyboardInterrupt from then on ends the answer
                and not the conversation.
            timeout: Seconds that the template, and then each token, may take.

        Raises:
            UnsupportedError: The model has no chat template.
            FerruleError: A call failed; the messages are as before.

        Example:
            ``print(chat.send("What is a ferrule?"))``
        """
        question = {"role": "user", "content": text}
        conversation = [*self.all_messages, question]
        request = _messages.chat_request(conversation, self._variables, special_tokens_as_text=True)
        prompt = self._connection.render(request, timeout, on_sequence=self._cache is not None)
        start = time.perf_counter()
        try:
            cache, num_reused = self._taken_back(prompt.token_ids, timeout)
            answer = Answer(num_prompt_tokens=len(prompt.token_ids), num_reused_tokens=num_reused)
            self._draw(cache, prompt.token_ids, answer, on_text, timeout)
        except HandleNotFoundError:  # it could not be brought back, so the next turn begins a sequence
            self.close()
            raise
        answer.elapsed_s = time.perf_counter() - start
        if answer.tokens:
            self.messages += [question, {"role": "assistant", "content": answer.text}]
        return answer

    def undo(self, num_turns: int = 1) -> int:
        """Forget the last turns and return how many that were; the KV is truncated at the next turn.

        Args:
            num_turns: How many turns, each a question and its answer.
        """
        _check.whole("num_turns", num_turns, 1)
        num_kept = max(0, len(self.messages) - 2 * num_turns)
        num_undone = (len(self.messages) - num_kept + 1) // 2
        del self.messages[num_kept:]
        return num_undone

    def fork(self) -> Chat:
        """Return a chat that goes on from here on its own; both share the KV of what was said.

        Raises:
            FerruleError: As in ``Cache.fork``.

        Example:
            ``other = chat.fork()``
        """
        child = copy.copy(self)
        child.messages = [dict(message) for message in self.messages]
        child._token_ids = list(self._token_ids)  # noqa: SLF001
        if self._cache is not None:
            child._cache = self._cache.fork()  # noqa: SLF001
        return child

    def close(self) -> None:
        """Release the sequence; a later turn makes a new one. Closing twice changes nothing."""
        cache, self._cache = self._cache, None
        self._token_ids = []
        if cache is not None:
            cache.__exit__(None, None, None)

    def _taken_back(self, token_ids: Sequence[int], timeout: Timeout) -> tuple[Cache, int]:
        """Return a sequence that holds a beginning of these tokens and nothing else, and the length of that."""
        same = common_length(self._token_ids, token_ids)
        if self._cache is None or same == 0:
            return self._begun(token_ids, timeout), 0
        if same < len(self._token_ids):
            self._cache.truncate(same, timeout=timeout)
            self._token_ids = list(token_ids[:same])
        return self._cache, same

    def _begun(self, token_ids: Sequence[int], timeout: Timeout) -> Cache:
        """Return a new sequence of all tokens but the last one, which goes with the draws."""
        self.close()
        prompt = list(token_ids[:-1] or token_ids)
        chosen = self.policy.selection
        repeats = chosen is not None and chosen.seed is not None  # cached KV can round otherwise and change the text
        self._cache = self._client.prefill(prompt, reuse_prefix=not repeats, recover=True, timeout=timeout)
        self._token_ids = prompt
        return self._cache

    def _draw(
        self,
        cache: Cache,
        token_ids: Sequence[int],
        answer: Answer,
        on_text: Callable[[str], object] | None,
        timeout: Timeout,
    ) -> None:
        rest = token_ids[len(self._token_ids) :]
        loop = cache.generate(
            self.max_tokens, tokens=rest, policy=self.policy, pending="send", text=True, timeout=timeout
        )
        try:
            _read(loop, answer, on_text)
        finally:
            loop.close()
            answer.tokens = list(loop.tokens)
            # What failed or was stopped may have run a part of it: the cache knows how much.
            num_held = cache.length + (cache.pending is not None)
            self._token_ids = [*token_ids, *answer.tokens][:num_held]


def _read(loop: Generation, answer: Answer, on_text: Callable[[str], object] | None) -> None:
    try:
        for piece in loop.pieces():
            answer.text += piece
            if on_text is not None:
                on_text(piece)
        answer.finish_reason = loop.finish_reason
    except KeyboardInterrupt:
        answer.finish_reason = "closed"
    answer.seed = loop.seed


publish(globals(), ("Chat",))
