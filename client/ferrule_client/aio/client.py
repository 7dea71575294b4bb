"""The client: one connection to one server, and everything that begins there."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Literal, Unpack, overload

import grpc
import numpy as np

from ferrule.v1 import cache_pb2, executor_pb2, tokenizer_pb2
from ferrule_client import _check, _convert, _messages
from ferrule_client._channel import Extra
from ferrule_client._messages import PromptOptions, Reading, Stops, TextOptions
from ferrule_client._parts import Parts, checked_instance
from ferrule_client._public import publish
from ferrule_client._retry import RetrySettings
from ferrule_client._route import by_instance
from ferrule_client._status import error_from_status
from ferrule_client._timeouts import USE_DEFAULT, Timeout
from ferrule_client._tip import Tip
from ferrule_client._token_log import TokenLog
from ferrule_client.aio._calls import SequenceCalls, calls_of, release_all, tip_of
from ferrule_client.aio._closing import Closing
from ferrule_client.aio._connection import Connection
from ferrule_client.aio._lease import LeaseKeeper
from ferrule_client.aio._opening import opening
from ferrule_client.aio.admin import AsyncAdmin
from ferrule_client.aio.cache import AsyncCache
from ferrule_client.aio.chat import AsyncChat
from ferrule_client.aio.detokenizer import AsyncDetokenizer
from ferrule_client.aio.forward import AsyncForwardPass
from ferrule_client.aio.generation import AsyncGeneration
from ferrule_client.aio.stream import AsyncStream
from ferrule_client.errors import DrainingError, FerruleError, StartingError, UnavailableError, WrongInstanceError
from ferrule_client.items import Append
from ferrule_client.masks import MaskLike, TokenMask, as_mask
from ferrule_client.policy import Policy, greedy, hinting, logits, seeded
from ferrule_client.types import (
    CacheSummary,
    Capabilities,
    ChatMessage,
    ChatPrompt,
    Durability,
    FloatArray,
    Handle,
    Lease,
    ModelInfo,
    Output,
    Pooling,
    Released,
    Reservation,
    Score,
    Status,
    TlsConfig,
    Tokens,
    WithText,
)

__all__ = ["DEFAULT_TARGET", "AsyncClient"]

DEFAULT_TARGET = "127.0.0.1:50051"
"""Where ``ferrule serve`` listens by default."""

_POLL_S = 0.1
_NEVER_READY = ("draining", "failed")
_MAX_FORKS = 64  # as many continuations are scored in one frame


@hinting
class AsyncClient(Closing):
    """A connection to one Ferrule server. Safe to use from several tasks; the caches it makes are not.

    Use it in ``async with``. Nothing is sent yet: the first call connects::

        async with AsyncClient("127.0.0.1:50051") as client:
            async for piece in client.generate("def area(", 20).pieces():
                print(piece, end="")

    Every method takes ``timeout``: seconds for the call with all its retries; None means no limit, and the default is
    the client's own. Broken connections are tried again if that is safe, and full queues, at most ``max_retries``
    times; a server that is still loading is waited for as long as the timeout allows. A call that fails raises a
    ``FerruleError``, see ``ferrule.errors``; each method lists the kinds that are worth catching there.

    Args:
        target: ``host:port`` or ``unix:PATH``.
        token: Bearer token to send with every call.
        tls: True for TLS with the system's authorities, a ``TlsConfig`` for your own, None for plain text.
        timeout: Seconds a call may take with its retries, unless it says otherwise; None means no limit.
        max_retries: Times a call is tried again after a broken connection. Where the connection is refused, a call on a
            cache that has a timeout does not count: it waits for the server until then, and continues if the cache has
            survived.
        instance: Behind a proxy with several instances: the name of the one for calls without a handle, such as new
            prompts and ``admin``. None: the proxy chooses. Calls on a handle go to its instance.
        metadata: Called in the task that makes a call, for each attempt and each opening of a stream. It returns pairs
            of key and value to send along, such as a trace context. It cannot replace what the client sets itself.
        durability: For new sequences: ``journaled``: they survive the server process, and a server without a journal
            refuses them with ``UnsupportedError``; ``none``: they end with it. None: ``journaled`` on a server with
            ``--durable``, else ``none``.

    Attributes:
        admin: Calls for operators; see ``ferrule.admin``.

    Raises:
        TypeError: ``target`` or ``token`` is not a text.
        ValueError: One of them is malformed, or another argument out of its range.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        tls: bool | TlsConfig | None = None,
        timeout: float | None = 60.0,
        max_retries: int = 5,
        instance: str | None = None,
        metadata: Extra | None = None,
        durability: Durability | None = None,
    ) -> None:
        _check.whole("max_retries", max_retries)
        retry = RetrySettings(max_retries=max_retries)
        self._connection = Connection(
            target, token, tls, timeout, retry, instance=instance, extra=metadata, durability=durability
        )
        self._keeper = LeaseKeeper(self._renew)
        self.admin = AsyncAdmin(self._connection)

    def __repr__(self) -> str:
        return f"AsyncClient({self._connection.target!r}{', closed' if self._connection.is_closed else ''})"

    async def close(self) -> None:
        """Close the connection and end the keep-alive task. Closing twice changes nothing.

        Caches that were not released stay on the server until their lease ends; releasing them later raises.
        """
        await self._connection.close()
        await self._keeper.close()

    @opening
    async def prefill(
        self,
        tokens: Tokens | str,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = False,
        policy: Policy | None = None,
        ttl: float | None = None,
        all_positions: bool = False,
        reserve_length: int | None = None,
        reuse_prefix: bool = True,
        publish_prefix: bool = True,
        drop_outside_window: bool = False,
        request_id: str = "",
        keep_alive: bool = True,
        recover: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> AsyncCache:
        """Run a prompt into a new sequence and return its cache; ``cache.last`` is the prefill's own output.

        Tried again after a broken connection where the server has the feature ``request_id``, which makes that safe.
        Elsewhere only when the request certainly never ran: the connection was refused, or the server is still
        loading. A prefill whose reply was lost would leave a second sequence behind until its lease ends.

        Args:
            tokens: Token ids, at least one; or a text.
            add_special_tokens: True: a text begins with the tokens that the model's tokenizer puts before one, such as
                a begin token; those that it puts after one are left out, because the text continues. False: the text
                alone. Token ids are never changed.
            parse_special_tokens: True: text that looks like a special token (``<|im_end|>``) becomes that token; only
                for text that you wrote. False: it stays ordinary text, so text from others cannot begin a turn.
            policy: What to return for the last row. None: nothing. A token that it chooses is pending afterwards.
            ttl: Lease in seconds, clamped by the server. None: the server's default.
            all_positions: True: a row for every token, for scoring.
            reserve_length: Length in tokens up to which room is reserved now, so that appends cannot run out of it.
            reuse_prefix: False: do not look for the prompt in the prefix cache.
            publish_prefix: False: do not keep its blocks for later prompts.
            drop_outside_window: True: the sequence and its forks give back KV that lies far outside the window of the
                model (``attention_window`` of its info), so a long one needs no more memory than a few windows. What
                needs older KV then raises ``KvGivenBackError``.
            request_id: Id of your own, to repeat the call safely after a timeout; echoed in the output. If the server
                has the feature ``request_id``, the same prompt with the same id is the same sequence, also from another
                process. Left out, one is made.
            keep_alive: False: the lease is not renewed in the background; every call on the cache still renews it.
            recover: True: when the sequence is lost later on (its lease ran out, the server was restarted), the
                cache and its forks prefill their tokens again automatically and go on; see ``AsyncCache``.
            timeout: Seconds this may take, retries included.

        Returns:
            The cache. Use it in ``async with``, which releases the sequence at the end.

        Raises:
            InvalidRequestError: The prompt is empty, or a token is out of the vocabulary.
            TypeError: The tokens are not ints, or the policy is not a policy.
            ValueError: An argument is out of its range, or ``target_logprobs`` comes without ``all_positions``.
            ContextExceededError: The prompt is longer than the context.
            ResourceExhaustedError: The pool or the queue is full now.

        Example:
            ``async with client.prefill("def f(x):", policy=greedy()) as cache: print(cache.pending)``
        """
        reads = Reading(parse_special_tokens, add_special_tokens and "begin")
        ids = await self._connection.ids_of(tokens, reads, timeout=timeout, is_patient=recover)
        options = PromptOptions(
            ttl, reserve_length, reuse_prefix, publish_prefix, self._connection.durability, drop_outside_window
        )
        request = _messages.prompt_request(
            ids, options, policy=policy, all_positions=all_positions, request_id=request_id
        )
        attempts = self._connection.attempts(timeout, creates=True, has_request_id=True, is_patient=recover)
        reply = await self._connection.run(self._connection.executor.Prefill, request, attempts)
        output = _convert.output_from_message(reply.output)
        tip = Tip(output.handle, last=output, log=TokenLog(ids), ttl_s=_convert.granted_ttl_s(reply.output))
        tip.choose(output, policy)
        return self._follow(tip, keep_alive=keep_alive, recovery=options if recover else None)

    def forward(
        self,
        tokens: Tokens | str,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = False,
        policy: Policy | None = None,
        pooling: Pooling | None = None,
        timeout: Timeout = USE_DEFAULT,
    ) -> AsyncForwardPass:
        """Return an iterator over the rows of all positions of an input, as ``ForwardChunk``s; no cache is kept.

        Args:
            tokens: Token ids, at least one, or a text.
            add_special_tokens: As in ``prefill``.
            parse_special_tokens: As in ``prefill``.
            policy: What to return for each row. None: ``logits()``, or with ``pooling`` nothing besides that.
            pooling: Return the hidden states of all rows as one vector too, with the last chunk.
            timeout: Seconds one chunk may take, retries included.

        Raises:
            TypeError: The tokens are not ints, or the policy is not a policy.
            ValueError: ``pooling`` is not one of the two.
            FerruleError: While iterating, as in ``prefill``.

        Example:
            ``logits = np.concatenate([chunk.logits for chunk in client.forward(ids)])``
        """
        reads = Reading(parse_special_tokens, add_special_tokens and "begin")
        return self._forward(tokens, reads, policy if policy or pooling else logits(), pooling, timeout)

    @overload
    async def score(self, tokens: Tokens | str, **options: Unpack[TextOptions]) -> FloatArray: ...

    @overload
    async def score(
        self, tokens: Tokens | str, continuations: Sequence[Tokens | str], **options: Unpack[TextOptions]
    ) -> list[Score]: ...

    async def score(
        self,
        tokens: Tokens | str,
        continuations: Sequence[Tokens | str] | None = None,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> FloatArray | list[Score]:
        """Return the log-probability of each token of a text but the first one, given those before it.

        With a begin token, which is the first one then, all tokens of the text itself have one.

        With ``continuations`` the text is their common context, and what is returned is a ``Score`` for each of them.
        The context is run once, or found in the prefix cache, and the continuations are run together on forks of it,
        which are released at the end. The numbers are those of scoring each whole text, as far as the model's kernels
        round equally in batches of other sizes: equal to about 1e-5 with float32, to about 0.2 with bfloat16.

        Args:
            tokens: Token ids, at least one, or a text.
            continuations: Token ids or texts, each to be scored after ``tokens``. A text is encoded alone, without
                special tokens around it, so it begins with the space before its first word.
            add_special_tokens: As in ``prefill``.
            parse_special_tokens: As in ``prefill``.
            timeout: Seconds one chunk may take, retries included; with ``continuations``, one call.

        Returns:
            float32 [number of tokens - 1], natural logarithms under the raw model; or a ``Score`` per continuation.

        Raises:
            TypeError: The continuations are one text and no list of them.
            ValueError: There are continuations and the context has no token.
            FerruleError: As in ``prefill``. Nothing stays on the server.

        Example:
            ``perplexity = np.exp(-(await client.score("a text")).mean())``
            ``totals = [score.total for score in await client.score("2 + 2 =", [" 4", " 5"])]``
        """
        reads = Reading(parse_special_tokens, add_special_tokens and "begin")
        if isinstance(continuations, str):
            raise TypeError("continuations must be a list of texts or of token ids; put a single text into a list")
        if continuations is not None:
            context = await self._connection.ids_of(tokens, reads, timeout=timeout)
            alone = Reading(parse_special_tokens)
            texts = [await self._connection.ids_of(one, alone, timeout=timeout) for one in continuations]
            return await self._score_each(context, texts, timeout)
        rows: list[FloatArray] = [np.zeros(0, np.float32)]
        run = self._forward(tokens, reads, Policy(target_logprobs=True), None, timeout)
        while (chunk := await run.advance()) is not None:
            if "target_logprobs" in chunk.arrays:  # the last row of a text has none
                rows.append(chunk.target_logprobs)
        return np.concatenate(rows)

    async def embed(
        self,
        tokens: Tokens | str,
        pooling: Pooling = "mean",
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> FloatArray:
        """Return one vector for a text: the hidden states of its tokens after the final norm, pooled.

        Args:
            tokens: Token ids, at least one, or a text.
            pooling: ``mean`` over all tokens, or the ``last`` one's.
            add_special_tokens: True: with all tokens that the model's tokenizer puts around a text, those after it
                too, because an embedded text does not continue. False: the text alone.
            parse_special_tokens: As in ``prefill``.
            timeout: Seconds one chunk may take, retries included.

        Returns:
            float32 [hidden_size].

        Raises:
            ValueError: ``pooling`` is not one of the two.

        Example:
            ``vector = await client.embed("a text")``
        """
        vector: FloatArray | None = None
        reads = Reading(parse_special_tokens, add_special_tokens)
        run = self._forward(tokens, reads, None, pooling, timeout)
        while (chunk := await run.advance()) is not None:
            vector = chunk.arrays.get("pooled_hidden_state")
        assert vector is not None  # the last chunk has it
        return vector

    def generate(
        self,
        prompt: Tokens | str,
        max_tokens: int | None = None,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = False,
        policy: Policy | None = None,
        n: int = 1,
        stop: Stops = (),
        ignore_eos: bool = False,
        text: WithText | None = None,
        ttl: float | None = None,
        reuse_prefix: bool = True,
        publish_prefix: bool = True,
        drop_outside_window: bool = False,
        keep: bool = False,
        recover: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> AsyncGeneration:
        """Return an iterator over the tokens that the server draws after a prompt; see ``AsyncGeneration``.

        Prompt and draws are one call, which makes its sequences itself. At the end, or when the iterator is closed
        (leave it early in ``async with``), they are released.

        Args:
            prompt: A text, or token ids.
            max_tokens: As in ``AsyncCache.generate``; so are the arguments up to ``text``.
            add_special_tokens: As in ``prefill``.
            parse_special_tokens: As in ``prefill``.
            policy: As in ``AsyncCache.generate``.
            n: As in ``AsyncCache.generate``.
            stop: As in ``AsyncCache.generate``.
            ignore_eos: As in ``AsyncCache.generate``.
            text: As in ``AsyncCache.generate``. None: if the prompt is a text or a ``ChatPrompt``.
            ttl: Lease in seconds, clamped by the server. None: the server's default.
            reuse_prefix: As in ``prefill``.
            publish_prefix: As in ``prefill``.
            drop_outside_window: As in ``prefill``.
            keep: True: the sequences are yours to continue and to release, ``caches`` of the iterator.
            recover: As in ``prefill``.
            timeout: Seconds one token may take, retries included.

        Raises:
            TypeError: An argument is of another type.
            ValueError: An argument is out of its range.
            ContextExceededError: While iterating: the prompt does not fit. If the drawn tokens fill the context, the
                loop ends as ``context_full`` instead.
            FerruleError: While iterating, as in ``prefill``; also what the tokenizer failed with.

        Example:
            ``text = (await client.generate("def area(", 20, policy=greedy()).read()).text``
        """
        plan = _messages.generation_plan(
            policy,
            max_tokens=max_tokens,
            n=n,
            stop=stop,
            ignore_eos=ignore_eos,
            text=isinstance(prompt, (str, ChatPrompt)) if text is None else text,
        )
        options = PromptOptions(
            ttl, None, reuse_prefix, publish_prefix, self._connection.durability, drop_outside_window
        )
        _convert.duration(ttl)
        return AsyncGeneration(
            self._connection,
            plan,
            prompt,
            reads=Reading(parse_special_tokens, add_special_tokens and "begin"),
            follow=functools.partial(self._follow, recovery=options if recover else None),
            options=options,
            is_patient=recover,
            keeps=keep,
            timeout=timeout,
        )

    def chat(
        self,
        system: str = "",
        *,
        policy: Policy | None = None,
        max_tokens: int = 256,
        variables: Mapping[str, object] | None = None,
    ) -> AsyncChat:
        """Return a new conversation by the model's chat template; see ``AsyncChat``. Nothing is sent yet.

        Args:
            system: The system message; empty: none.
            policy: How answers are drawn. None: ``sample()``.
            max_tokens: Most tokens of an answer.
            variables: More variables for the template.

        Example:
            ``async with client.chat("Answer briefly.") as chat: print(await chat.send("Hello"))``
        """
        return AsyncChat(self, self._connection, system, policy=policy, max_tokens=max_tokens, variables=variables)

    def adopt(self, handle: Handle, *, keep_alive: bool = True) -> AsyncCache:
        """Return a cache for a handle that came from elsewhere; it owns the sequence from now on.

        Nothing is sent: a handle that is no longer good shows at the first call.

        A handle covers what is in the KV cache and nothing else, so no token is pending, whatever was pending where it
        came from. Save that token beside the handle and pass it to the first call, as ``cache.append(token)`` or
        ``tokens=`` of ``generate``; otherwise another one is chosen in its place. Tokens and policy of the other cache
        are not known here either.

        Args:
            handle: The handle, as somebody's ``cache.detach()`` or ``cache.handle`` gave it.
            keep_alive: False: its lease is not renewed in the background.

        Raises:
            TypeError: It is not a handle.

        Example:
            ``async with client.adopt(queue.get()) as cache: ...``
        """
        _convert.check_handle(handle)
        return self._follow(Tip(handle), keep_alive=keep_alive)

    def stream(self) -> AsyncStream:
        """Return a new stream, for running many caches together, a frame per step.

        Example:
            ``async with client.stream() as stream: caches = await stream.run([Prompt("a"), Prompt("b")])``
        """
        return AsyncStream(self._connection, self._follow)

    async def model_info(self, *, timeout: Timeout = USE_DEFAULT) -> ModelInfo:
        """Return the model's description; asked for once, since it does not change while the server runs."""
        return await self._connection.model_info(timeout)

    async def capabilities(self, *, timeout: Timeout = USE_DEFAULT) -> Capabilities:
        """Return what the server can do and its limits; asked for once.

        Example:
            ``if "forward_verify" in (await client.capabilities()).features: ...``
        """
        return await self._connection.capabilities(timeout)

    async def status(self, *, timeout: Timeout = USE_DEFAULT) -> Status:
        """Return how the server is doing now, also while it loads."""
        request = executor_pb2.GetStatusRequest()
        reply = await self._connection.unary(self._connection.executor.GetStatus, request, timeout=timeout)
        return _convert.value(Status, reply.status)

    async def wait_until_ready(
        self, *, on_progress: Callable[[Status | None], object] | None = None, timeout: Timeout = USE_DEFAULT
    ) -> Status:
        """Return as soon as the server accepts requests; until then poll its status, also while no server listens yet.

        Args:
            on_progress: Called with each status on the way, and with None while no server listens.
            timeout: Seconds to wait.

        Returns:
            The first status that is ready.

        Raises:
            UnavailableError: It did not get ready in time, or never will (it is draining, or has failed); the
                message says what was last seen.

        Example:
            ``await client.wait_until_ready(on_progress=lambda status: print(status and status.load_progress))``
        """
        limit_s = self._connection.resolve(timeout)
        end = math.inf if limit_s is None else time.monotonic() + limit_s
        while True:
            status, reason = await self._poll_status(end - time.monotonic())
            if status is not None and status.is_ready:
                return status
            if on_progress is not None:
                on_progress(status)
            if time.monotonic() + _POLL_S > end or (status is not None and status.state in _NEVER_READY):
                raise reason
            await self._connection.sleep(_POLL_S)

    async def _poll_status(self, left_s: float) -> tuple[Status | None, UnavailableError]:
        """Return the status, or None while no server answers, and the error to raise if this was the last look."""
        try:
            status = await self.status(timeout=max(0.05, min(5.0, left_s)))
        except UnavailableError as error:
            return None, error
        text = f"the server is {status.state}" + (f": {status.load_stage}" if status.load_stage else "")
        kind, reason = (DrainingError, "DRAINING") if status.state == "draining" else (StartingError, "STARTING")
        return status, kind(grpc.StatusCode.UNAVAILABLE, reason, text)

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool | Literal["begin"] = False,
        parse_special_tokens: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> list[int]:
        """Return the token ids of a text, by the model's own tokenizer.

        Args:
            text: The text.
            add_special_tokens: True: with all tokens that the model's tokenizer puts around a text. ``"begin"``: with
                those before the text alone, as ``prefill`` adds them to a prompt. False: the text alone.
            parse_special_tokens: As in ``prefill``.
            timeout: Seconds this may take, retries included.

        Raises:
            TypeError: It is not a text.
            ValueError: It cannot be written in UTF-8, because it holds half of a surrogate pair.
            UnsupportedError: The server has no tokenizer.

        Example:
            ``ids = await client.tokenize("def area(", add_special_tokens="begin")``
        """
        reads = Reading(parse_special_tokens, add_special_tokens)
        return await self._connection.encode_text(text, reads, timeout=timeout)

    async def detokenize(
        self, tokens: Tokens, *, skip_special_tokens: bool = False, timeout: Timeout = USE_DEFAULT
    ) -> str:
        """Return the text of token ids. A last character without its end comes out as U+FFFD.

        Args:
            tokens: Token ids.
            skip_special_tokens: True: leave special tokens out.
            timeout: Seconds this may take, retries included.

        Raises:
            UnsupportedError: The server has no tokenizer.
            TokenOutOfVocabError: A token is not in the vocabulary.
        """
        request = tokenizer_pb2.DetokenizeRequest(
            token_ids=_check.token_list(tokens), skip_special_tokens=skip_special_tokens
        )
        reply = await self._connection.unary(self._connection.tokenizer.Detokenize, request, timeout=timeout)
        return reply.text

    def detokenizer(self, context: Sequence[int] = ()) -> AsyncDetokenizer:
        """Return what turns the tokens of a loop of your own into text, never half a character.

        Args:
            context: The tokens before the first one, such as the prompt; the last few are enough.

        Example:
            ``text = client.detokenizer(ids); print(text.push(token), end="")``
        """
        return AsyncDetokenizer(self._connection.decode_text, context)

    async def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
        allow_special_tokens: bool = False,
        special_tokens_as_text: bool = False,
        continue_final_message: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> ChatPrompt:
        """Return a conversation as the model's chat template writes it, as text and as token ids.

        Args:
            messages: The messages, oldest first, each with ``role`` and ``content`` and whatever else the template
                knows, such as ``tool_calls``.
            tools: Definitions of tools, handed to the template as ``tools``. ``tools_ignored`` of the result says that
                it does not use them.
            add_generation_prompt: False: end after the last message, without the header that makes the model answer.
            variables: More variables for the template.
            allow_special_tokens: True: text of special tokens in the conversation becomes these tokens; only if you
                trust every author of it. False: such a conversation is refused.
            special_tokens_as_text: True: such text stays ordinary text instead, which passes on what others wrote.
            continue_final_message: True: the text ends after the content of the last message, so that the model
                continues it, such as an answer of which you wrote the beginning. No header is added then.
            timeout: Seconds this may take, retries included.

        Raises:
            TypeError: It is not a list of messages, one has no text as ``role``, or holds what JSON cannot.
            UnsupportedError: The model has no chat template.
            InvalidRequestError: The template refuses the conversation, or a string of it contains the text of a
                special token: ``field`` says where, and ``metadata["special_token"]`` which.

        Example:
            ``ids = (await client.apply_chat_template([{"role": "user", "content": "Hello"}])).token_ids``
        """
        request = _messages.chat_request(
            messages,
            variables,
            tools=tools,
            skip_generation_prompt=not add_generation_prompt,
            allow_special_tokens=allow_special_tokens,
            special_tokens_as_text=special_tokens_as_text,
            continue_final_message=continue_final_message,
        )
        return await self._connection.render(request, timeout)

    async def register_mask(self, mask: MaskLike, *, timeout: Timeout = USE_DEFAULT) -> TokenMask:
        """Have a mask kept on the server, so that policies name it by 16 bytes; return it, for ``mask=`` of a policy.

        Registering a mask again changes nothing. A server that has dropped it, or was restarted, is given it again
        by this client when it is used, as long as the returned mask is kept.

        Args:
            mask: Token ids, a bool array with an entry per token id, or packed bits.
            timeout: Seconds this may take, retries included.

        Raises:
            QuotaExceededError: It does not fit the caller's quota of mask bytes.
            InvalidRequestError: It is not of the vocabulary's size.
            ValueError: It allows nothing, or a token out of the vocabulary.

        Example:
            ``digits = await client.register_mask(await client.tokenize("0123456789"))``
        """
        timeout = self._connection.until(timeout)
        given = as_mask(mask)
        vocab_size = 0 if given.bits is not None else (await self._connection.model_info(timeout)).vocab_size
        attempts = self._connection.attempts(timeout)
        (registered,) = await self._connection.register_masks([given.to_bits(vocab_size)], attempts)
        return registered

    async def list_caches(
        self, *, page_size: int = 0, with_handles: bool = False, timeout: Timeout = USE_DEFAULT
    ) -> AsyncIterator[CacheSummary]:
        """Yield the caller's live sequences by loggable id, asking for the next page when it is needed.

        The iterator can be read once; keep a list of it to look at it again.

        Args:
            page_size: Entries per page; 0 lets the server choose.
            with_handles: Each has its ``handle``, for ``client.adopt``: a program that lost its own can go on.
            timeout: Seconds each page may take.

        Example:
            ``lengths = [one.length async for one in client.list_caches()]``
        """
        _check.whole("page_size", page_size)
        request = cache_pb2.ListCachesRequest(page_size=page_size, with_handles=with_handles)
        while True:
            reply = await self._connection.unary(self._connection.executor.ListCaches, request, timeout=timeout)
            for one in map(_convert.summary_from_message, reply.caches):
                yield one
            if not reply.next_page_token:
                return
            request.page_token = reply.next_page_token

    async def keep_alive(
        self, caches: Iterable[AsyncCache | Handle], *, ttl: float | None = None, timeout: Timeout = USE_DEFAULT
    ) -> list[Lease | FerruleError]:
        """Renew leases, many in one call to each instance. Live caches do this automatically; plain handles do not.

        A list longer than the server's ``max_handles_per_request`` is sent in several calls.

        Args:
            caches: Caches or handles.
            ttl: Lease from now on in seconds, clamped by the server. None: each one's own.
            timeout: Seconds this may take, retries included.

        Returns:
            For each the new lease, or the error that says why there is none.

        Raises:
            FerruleError: The call as a whole failed. Where there are several, what one failed with stands in the place
                of its leases.
        """
        kept, timeout = list(caches), self._connection.until(timeout)
        await self._connection.ask_handle_limit(len(kept), timeout)
        handles = [one.handle if isinstance(one, AsyncCache) else one for one in kept]
        parts = Parts(handles, self._connection.handle_limit)
        done, failures = await self._keep_parts(parts, ttl, timeout)
        for error in failures.values():
            if parts.is_alone and not (kept and isinstance(error, WrongInstanceError)):
                raise error
        leases = [done[place] for place in range(len(kept))]
        for cache, lease in zip(kept, leases, strict=True):
            if isinstance(cache, AsyncCache):
                calls_of(cache).renewed(lease, ttl)
        return leases

    async def _keep_parts(
        self, parts: Parts, ttl: float | None, timeout: Timeout
    ) -> tuple[dict[int, Lease | FerruleError], dict[str, FerruleError]]:
        """Renew leases part by part; an instance whose call failed is not asked for its other parts.

        Return what became of each, by its place; and what a call failed with, by the instance it was for.
        """
        done: dict[int, Lease | FerruleError] = {}
        failures: dict[str, FerruleError] = {}
        for instance, places, handles in parts:
            if instance not in failures:
                request = cache_pb2.KeepAliveRequest(kv_caches=handles, ttl=_convert.duration(ttl))
                try:
                    reply = await self._connection.unary(self._connection.executor.KeepAlive, request, timeout=timeout)
                except FerruleError as error:
                    if parts.shrink(error):
                        continue
                    failures[instance] = error
                else:
                    done.update(zip(places, map(_lease_or_error, reply.results), strict=True))
                    continue
            done.update(dict.fromkeys(places, failures[instance]))
        return done, failures

    async def reserve(
        self,
        caches: Iterable[AsyncCache | Handle],
        lengths: int | Sequence[int],
        *,
        fitting: int | Sequence[int] | None = None,
        timeout: Timeout = USE_DEFAULT,
    ) -> Reservation:
        """Take room for appends in several sequences in one call: all of it, or nothing; see ``AsyncCache.reserve``.

        Args:
            caches: Caches or handles, at most ``capabilities().max_handles_per_request``: several calls could not
                guarantee all or nothing.
            lengths: Length in tokens up to which each gets its room now; one for all, or one for each.
            fitting: Larger lengths that must fit the free blocks too, without being taken; one for all, or one for
                each. None: no more than ``lengths``.
            timeout: Seconds this may take, retries included.

        Raises:
            BlocksExhaustedError: The pool has too few free blocks now; nothing was taken.
            HandleNotFoundError: One of the sequences is gone; nothing was taken.
            ValueError: The sizes differ, a length is not a whole number, or the sequences are on several instances: no
                call takes room on all or none of them.
            FerruleError: Anything else, as in ``AsyncCache.reserve``.

        Example:
            ``left = (await client.reserve(branches, 512)).free_blocks``
        """
        kept = list(caches)
        handles = [tip_of(one).live_handle() if isinstance(one, AsyncCache) else one for one in kept]
        if len(names := sorted(by_instance(handles, checked_instance))) > 1:
            text = " and ".join(map(repr, names))
            raise ValueError(f"the sequences are on the instances {text}: reserve on each by a call of its own")
        request = _messages.reserve_request(handles, lengths, fitting)
        reply = await self._connection.unary(self._connection.executor.ReserveKvSlots, request, timeout=timeout)
        for cache, wanted in zip(kept, request.requests, strict=True):
            if isinstance(cache, AsyncCache):
                calls_of(cache).reserved(wanted.target_length)
        return _convert.reservation_from_message(reply.reservation)

    async def release(self, caches: Iterable[AsyncCache | Handle], *, timeout: Timeout = USE_DEFAULT) -> Released:
        """End sequences, many in one call to each instance, and free their blocks.

        What is gone already is no error; nor is what another instance has, if the way there does not lead to it. A list
        longer than the server's ``max_handles_per_request`` is sent in several calls.

        Args:
            caches: Caches or handles.
            timeout: Seconds this may take, retries included.

        Raises:
            FerruleError: The server was not reached; the leases will end the sequences. Where there are several
                instances, those on the others were released.

        Example:
            ``await client.release(losers)``
        """
        return await release_all(self._connection, list(caches), timeout)

    async def _score_each(self, context: list[int], texts: list[list[int]], timeout: Timeout) -> list[Score]:
        """Return the score of each text after a context.

        The context's last token is sent with each text, because its row predicts the first token of the text.
        """
        if not context:
            raise ValueError("continuations need a context of at least one token")
        policy, runs, outputs = greedy(target_logprobs=True), [[context[-1], *one] for one in texts], list[Output]()
        if len(context) == 1:  # nothing is before that token, so there is nothing to fork
            for run in runs:
                async with self.prefill(run, policy=policy, all_positions=True, timeout=timeout) as cache:
                    outputs.append(cache.last)
        else:
            most = min(_MAX_FORKS, (await self.capabilities(timeout=timeout)).max_fork_count)
            async with self.prefill(context[:-1], recover=True, timeout=timeout) as trunk, self.stream() as stream:
                for first in range(0, len(runs), most):
                    part = runs[first : first + most]
                    async with trunk.fork(len(part), timeout=timeout) as branches:
                        pairs = zip(branches, part, strict=True)
                        items = [Append(branch, run, policy, all_positions=True) for branch, run in pairs]
                        outputs += await stream.run(items, timeout=timeout)
        return list(map(_score, texts, outputs))

    def _forward(
        self, tokens: Tokens | str, reads: Reading, policy: Policy | None, pooling: Pooling | None, timeout: Timeout
    ) -> AsyncForwardPass:
        """Return the pass over an input; a text is read first."""
        request = executor_pb2.ForwardRequest(
            request_id=_messages.new_request_id(),
            input_ids=[] if isinstance(tokens, str) else _check.token_list(tokens),
            logits_policy=_convert.policy_to_message(seeded(policy)),
            hidden_pooling=_convert.pooling_to_message(pooling),
        )
        text = tokens if isinstance(tokens, str) else None
        return AsyncForwardPass(self._connection, request, text, timeout, reads)

    def _follow(self, tip: Tip, *, keep_alive: bool = True, recovery: PromptOptions | None = None) -> AsyncCache:
        """Return the cache that follows a sequence from here on."""
        calls = SequenceCalls(self._connection, self._keeper, tip, keep_alive=keep_alive, recovery=recovery)
        return AsyncCache(self._connection, calls)

    async def _renew(self, handles: Sequence[Handle], timeout_s: float) -> list[Lease | FerruleError]:
        """Renew the leases of as many handles as one request may hold, without asking for the server's limit first."""
        return await self.keep_alive(handles[: self._connection.handle_limit.most], timeout=timeout_s)


def _score(ids: list[int], output: Output) -> Score:
    """Return the score of tokens from the rows of the token before them and of themselves."""
    logprobs = output.target_logprobs if ids else np.zeros(0, np.float32)
    return Score(tuple(ids), logprobs, output.tokens[: len(ids)])


def _lease_or_error(result: cache_pb2.KeepAliveResult) -> Lease | FerruleError:
    if result.HasField("lease"):
        return _convert.value(Lease, result.lease)
    return error_from_status(result.error)


publish(globals(), ("AsyncClient",))
