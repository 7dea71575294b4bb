"""The client: one connection to one server, and everything that begins there."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType

import grpc
import numpy as np

from ferrule.v1 import cache_pb2, executor_pb2, tokenizer_pb2
from ferrule_client import _check, _convert, _messages
from ferrule_client._batch import Batch
from ferrule_client._calls import SequenceCalls
from ferrule_client._connection import USE_DEFAULT, Connection, Timeout
from ferrule_client._exchange import take
from ferrule_client._lease import LeaseKeeper
from ferrule_client._messages import Append, Appended, PromptOptions
from ferrule_client._parts import Parts, checked_instance
from ferrule_client._retry import RetrySettings
from ferrule_client._route import by_instance
from ferrule_client._status import error_from_status
from ferrule_client._tip import Tip
from ferrule_client._token_log import TokenLog
from ferrule_client._wire import Extra
from ferrule_client.admin import Admin
from ferrule_client.cache import Cache
from ferrule_client.detokenizer import Detokenizer
from ferrule_client.errors import DrainingError, ExecutorError, StartingError, UnavailableError, WrongInstanceError
from ferrule_client.forward import ForwardPass
from ferrule_client.generation import Generation
from ferrule_client.items import Chunk, DecodeItem
from ferrule_client.masks import MaskLike, TokenMask, as_mask
from ferrule_client.policy import Policy, seeded
from ferrule_client.stream import Stream
from ferrule_client.types import (
    CacheMetrics,
    CacheSummary,
    Capabilities,
    ChatMessage,
    ChatPrompt,
    FloatArray,
    Handle,
    Lease,
    ModelInfo,
    OnStale,
    Output,
    Pooling,
    Released,
    Reservation,
    Status,
    TlsConfig,
    Tokens,
    Verification,
)

__all__ = ["DEFAULT_TARGET", "Client"]

DEFAULT_TARGET = "127.0.0.1:50051"
"""Where ``ferrule serve`` listens unless told otherwise."""

_POLL_S = 0.1
_NEVER_READY = ("draining", "failed")


class Client:
    """A connection to one Ferrule server. Safe to use from several threads; the caches it makes are not.

    Make one with ``Client.connect`` and use it in ``with``::

        with Client.connect("127.0.0.1:50051") as client:
            with client.prefill(client.encode("def area(")) as cache:
                print("".join(cache.generate_text(max_tokens=20)))

    Every method takes ``timeout``: seconds for the call with all its retries; None means no limit, and left out it is
    the client's own. Tried again are broken connections, where that is safe, and full queues, ``max_retries`` times at
    most; and a server that is still loading, as long as the timeout allows.

    Attributes:
        admin: Warms the server up, drains it and ends it; needs the admin role.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._keeper = LeaseKeeper(self._renew)
        self._idle_streams: list[Stream] = []
        self.admin = Admin(connection)

    @classmethod
    def connect(
        cls,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        tls: bool | TlsConfig | None = None,
        timeout: float | None = 60.0,
        max_retries: int = 5,
        instance: str | None = None,
        metadata: Extra | None = None,
    ) -> Client:
        """Return a client of the server at ``target``. Nothing is sent yet: the first call connects.

        Args:
            target: ``host:port`` or ``unix:PATH``.
            token: Bearer token to send with every call.
            tls: True for TLS with the system's authorities, a ``TlsConfig`` for your own, None for plain text.
            timeout: Seconds a call may take with its retries, unless it says otherwise; None means no limit.
            max_retries: Times a call is tried again after a broken connection.
            instance: Behind a proxy with several instances: the name of the one that calls are for which name no
                handle, new prompts and ``admin`` too. None: the proxy chooses. Calls on a handle go to its instance.
            metadata: Called in the thread that makes a call, for each attempt and each opening of a stream; returns
                pairs of key and value to send along, such as a trace context. It cannot replace what the client sets
                itself.

        Returns:
            The client; close it, or use it in ``with``.

        Raises:
            TypeError: ``target`` or ``token`` is no text.
            ValueError: One of them is malformed, or another argument out of its range.

        Example:
            ``with Client.connect("unix:/run/ferrule.sock") as client: ...``
        """
        _check.whole("max_retries", max_retries)
        retry = RetrySettings(max_retries=max_retries)
        return cls(Connection(target, token, tls, timeout, retry, instance=instance, extra=metadata))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._connection.target!r}{', closed' if self._connection.is_closed else ''})"

    def close(self) -> None:
        """Close the connection and end the keep-alive thread. Closing twice changes nothing.

        Caches that were not released stay on the server until their lease ends; releasing them later raises.
        """
        try:
            for stream in self._idle_streams:
                stream.close()
        finally:
            self._connection.close()
            self._keeper.close()

    def prefill(
        self,
        tokens: Tokens | str,
        *,
        policy: Policy | None = None,
        ttl: float | None = None,
        all_positions: bool = False,
        reserve_length: int | None = None,
        reuse_prefix: bool = True,
        publish_prefix: bool = True,
        request_id: str = "",
        keep_alive: bool = True,
        recover: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> Cache:
        """Run a prompt into a new sequence and return its cache; ``cache.last`` is the prefill's own output.

        Tried again after a broken connection where the server has the feature ``request_id``, which makes that safe.
        Elsewhere only when the request certainly never ran: the connection was refused, or the server is still
        loading. A prefill whose reply was lost would leave a second sequence behind until its lease ends.

        Args:
            tokens: Token ids, at least one; or a text, which is encoded as ``encode`` does.
            policy: What to return for the last row. None: full logits in float32; with ``no_output()`` nothing
                is computed for it.
            ttl: Lease in seconds, clamped by the server. None: the server's default.
            all_positions: True: a row for every token, for scoring.
            reserve_length: Length in tokens up to which room is reserved now, so that appends cannot run out of it.
            reuse_prefix: False: do not look for the prompt in the prefix cache.
            publish_prefix: False: do not keep its blocks for later prompts.
            request_id: Id of your own, echoed in the output: where the server has the feature ``request_id``, the
                same prompt with the same id is the same sequence, also from another process. Left out, one is made.
            keep_alive: False: the lease is not renewed in the background; every call on the cache still renews it.
            recover: True: when the sequence is lost later on (its lease ran out, the server was started anew), the
                cache and its forks prefill their tokens again by themselves and go on; see ``Cache``.
            timeout: Seconds this may take, retries included.

        Returns:
            The cache. Use it in ``with``, which releases the sequence at the end.

        Raises:
            InvalidRequestError: The prompt is empty, or a token is out of the vocabulary.
            TypeError: The tokens are no ints, or the policy is none.
            ValueError: An argument is out of its range, or ``target_logprobs`` comes without ``all_positions``.
            ContextExceededError: The prompt is longer than the context.
            ResourceExhaustedError: The pool or the queue is full now.
            ExecutorError: Anything else, see ``errors``.

        Example:
            ``with client.prefill("def f(x):", policy=greedy()) as cache: print(cache.last.token)``
        """
        if isinstance(tokens, str):
            ids = self._connection.encode_text(tokens, timeout=timeout, is_patient=recover)
        else:
            ids = _check.token_list(tokens)
        options = PromptOptions(ttl, reserve_length, reuse_prefix, publish_prefix)
        request = _messages.prompt_request(
            ids, options, policy=policy, all_positions=all_positions, request_id=request_id
        )
        attempts = self._connection.attempts(timeout, creates=True, has_request_id=True, is_patient=recover)
        reply = self._connection.run(self._connection.executor.Prefill, request, attempts)
        output = _convert.output_from_message(reply.output)
        tip = Tip(output.handle, last=output, log=TokenLog(ids), ttl_s=_convert.granted_ttl_s(reply.output))
        return self._follow(tip, keep_alive=keep_alive, recovery=options if recover else None)

    def batch_prefill(
        self,
        prompts: Sequence[Tokens],
        *,
        policy: Policy | Sequence[Policy] | None = None,
        ttl: float | None = None,
        all_positions: bool = False,
        reserve_length: int | None = None,
        reuse_prefix: bool = True,
        publish_prefix: bool = True,
        keep_alive: bool = True,
        recover: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Cache | ExecutorError]:
        """Run several prompts together, each into a new sequence; one that fails does not touch the others.

        Args:
            prompts: Token ids of each, at most ``capabilities().max_batch_size`` of them.
            policy: What to return for the last row; one for all, or one for each prompt. None: full logits.
            ttl: As in ``prefill``; so are the settings up to ``recover``.
            all_positions: As in ``prefill``.
            reserve_length: As in ``prefill``.
            reuse_prefix: As in ``prefill``.
            publish_prefix: As in ``prefill``.
            keep_alive: As in ``prefill``.
            recover: As in ``prefill``.
            timeout: Seconds this may take, retries included.

        Returns:
            A cache for each prompt, which wants to be released, or the error that it failed with.

        Raises:
            ExecutorError: The call as a whole failed.
            TypeError: A prompt is no list of ints, or a policy is none.
            ValueError: The sizes differ, or as in ``prefill``.

        Example:
            ``caches = [one for one in client.batch_prefill(prompts) if isinstance(one, Cache)]``
        """
        options = PromptOptions(ttl, reserve_length, reuse_prefix, publish_prefix)
        policies = _per_item(policy, len(prompts))
        inputs = [
            _messages.prompt_request(_check.token_list(one), options, policy=wanted, all_positions=all_positions).input
            for one, wanted in zip(prompts, policies, strict=True)
        ]
        nobody: list[Cache | None] = [None] * len(inputs)
        results = Batch(self._connection).perform(nobody, inputs, timeout, is_patient=recover)
        caches: list[Cache | ExecutorError] = []
        for sent, result in zip(inputs, results, strict=True):
            if isinstance(result, ExecutorError):
                caches.append(result)
                continue
            ttl_s = _convert.granted_ttl_s(result) if isinstance(result, executor_pb2.PrefillOutput) else None
            output = _convert.output_from_message(result)
            tip = Tip(output.handle, last=output, log=TokenLog(sent.input_ids), ttl_s=ttl_s)
            caches.append(self._follow(tip, keep_alive=keep_alive, recovery=options if recover else None))
        return caches

    def batch_decode(
        self,
        caches: Sequence[Cache],
        tokens: Sequence[Tokens],
        *,
        policy: Policy | Sequence[Policy] | None = None,
        on_stale: OnStale = "fail",
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Output | ExecutorError]:
        """Append to several caches together in one call; one that fails does not touch the others.

        ``decode_many`` does the same over a stream that stays open, and raises the first error.

        Args:
            caches: The sequences, each at most once; at most ``capabilities().max_batch_size`` of them.
            tokens: For each cache one token, several, or none (a query).
            policy: One for all, or one for each cache. None: full logits.
            on_stale: What to do with handles that lie behind their tip.
            timeout: Seconds this may take, retries included.

        Returns:
            An output for each cache, or the error that it failed with.

        Raises:
            ExecutorError: The call as a whole failed.
            ValueError: The sizes differ, or a cache comes twice.

        Example:
            ``outputs = client.batch_decode(branches, [7, 8, 9], policy=greedy())``
        """
        policies = _per_item(policy, len(caches))
        if len(tokens) != len(caches):
            raise ValueError(f"tokens needs one entry per cache: {len(caches)} caches, {len(tokens)} entries")
        items = [DecodeItem(*one, on_stale) for one in zip(caches, tokens, policies, strict=True)]
        results = self._run_batch(items, timeout)
        return [one for one in results if isinstance(one, (Output, ExecutorError))]

    def unified(self, items: Sequence[Chunk[Cache]], *, timeout: Timeout = USE_DEFAULT) -> list[Cache | ExecutorError]:
        """Run a batch that the caller schedules, chunks of prompts and decodes mixed, in one step of its own rows.

        Args:
            items: The pieces, with at most ``capabilities().max_step_rows`` tokens together; each cache at most once.
            timeout: Seconds this may take, retries included.

        Returns:
            For each piece its cache, a new one for a new sequence, with the rows as its ``last``; or the error that it
            failed with.

        Raises:
            ExecutorError: The call as a whole failed.
            TypeError: Tokens are no ints, or a policy is none.
            ValueError: A cache comes twice, or an option is out of its range.

        Example:
            ``first, _ = client.unified([Chunk(prompt[:64], is_final=False), Chunk(token, cache, greedy())])``
        """
        results = self._run_batch(items, timeout)
        return [one for one in results if isinstance(one, (Cache, ExecutorError))]

    def _run_batch(
        self, items: Sequence[DecodeItem[Cache] | Chunk[Cache]], timeout: Timeout
    ) -> list[Output | Cache | ExecutorError]:
        caches = [item.cache for item in items]
        known = [id(cache) for cache in caches if cache is not None]
        if len(set(known)) != len(known):
            raise ValueError("a cache can be in a batch only once")
        timeout = self._connection.until(timeout)
        inputs: list[Append] = []
        for item in items:
            if isinstance(item, DecodeItem):
                sent = item.cache.prepare(item.tokens, item.policy, item.on_stale, timeout=timeout)
                inputs.append(sent)
            elif item.cache is not None:
                chunk = item.cache.prepare_chunk(item, timeout=timeout)
                inputs.append(chunk)
            else:
                inputs.append(_messages.chunk_input(None, item, 0))
        is_patient = bool(caches) and all(one is not None and one.recovers for one in caches)
        results = Batch(self._connection).perform(caches, inputs, timeout, is_patient=is_patient)
        return [self._settled(*one) for one in zip(items, inputs, results, strict=True)]

    def _settled(
        self, item: DecodeItem[Cache] | Chunk[Cache], sent: Append, result: Appended | ExecutorError
    ) -> Output | Cache | ExecutorError:
        """Move a cache by what came of its item, or make that of a new sequence."""
        if item.cache is not None:
            taken = take(item.cache.tip, item, sent, result)
            assert not isinstance(taken, Verification)  # no item of a batch is a verify
            return item.cache if isinstance(item, Chunk) and isinstance(taken, Output) else taken
        if isinstance(result, ExecutorError):
            return result
        output = _convert.output_from_message(result)
        tip = Tip(output.handle, last=output, log=TokenLog(_messages.tokens_of(sent)))
        return self._follow(tip, keep_alive=True)

    def forward(
        self,
        tokens: Tokens,
        *,
        policy: Policy | None = None,
        pooling: Pooling | None = None,
        timeout: Timeout = USE_DEFAULT,
    ) -> ForwardPass:
        """Return an iterator over the rows of all positions of an input, in chunks; no cache is kept.

        Args:
            tokens: Token ids, at least one.
            policy: What to return for each row. None: full logits in float32, or with ``pooling`` nothing besides that.
            pooling: Return the hidden states of all rows as one vector too, with the last chunk.
            timeout: Seconds one chunk may take, retries included.

        Returns:
            An iterator over ``ForwardChunk``.

        Raises:
            TypeError: The tokens are no ints, or the policy is none.
            ValueError: ``pooling`` is none of the two.
            ExecutorError: While iterating, as in ``prefill``.

        Example:
            ``logits = np.concatenate([chunk.logits for chunk in client.forward(ids)])``
        """
        request = executor_pb2.ForwardRequest(
            request_id=_messages.new_request_id(),
            input_ids=_check.token_list(tokens),
            logits_policy=None if policy is None and pooling else _convert.policy_to_message(seeded(policy)),
            hidden_pooling=_convert.pooling_to_message(pooling),
        )
        return ForwardPass(self._connection, request, timeout)

    def score(self, tokens: Tokens, *, timeout: Timeout = USE_DEFAULT) -> FloatArray:
        """Return the log-probability of each token of a text but the first one, given those before it.

        Args:
            tokens: Token ids, at least one.
            timeout: Seconds one chunk may take, retries included.

        Returns:
            float32 [number of tokens - 1], natural logarithms under the raw model.

        Raises:
            ExecutorError: As in ``prefill``.

        Example:
            ``perplexity = np.exp(-client.score(ids).mean())``
        """
        rows: list[FloatArray] = [np.zeros(0, np.float32)]
        run = self.forward(tokens, policy=Policy(target_logprobs=True), timeout=timeout)
        while (chunk := run.advance()) is not None:
            if chunk.target_logprobs is not None:
                rows.append(chunk.target_logprobs)
        return np.concatenate(rows)

    def embed(self, tokens: Tokens, pooling: Pooling = "mean", *, timeout: Timeout = USE_DEFAULT) -> FloatArray:
        """Return one vector for a text: the hidden states of its tokens after the final norm, pooled.

        Args:
            tokens: Token ids, at least one.
            pooling: ``mean`` over all tokens, or the ``last`` one's.
            timeout: Seconds one chunk may take, retries included.

        Returns:
            float32 [hidden_size].

        Raises:
            ValueError: ``pooling`` is none of the two.
            ExecutorError: As in ``prefill``.

        Example:
            ``vector = client.embed(client.encode("a text"))``
        """
        vector: FloatArray | None = None
        run = self.forward(tokens, pooling=pooling, timeout=timeout)
        while (chunk := run.advance()) is not None:
            vector = chunk.pooled_hidden_state
        assert vector is not None  # the last chunk has it
        return vector

    def generate(
        self,
        prompt: str | Tokens,
        max_tokens: int | None = None,
        *,
        n: int = 1,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        stop_sequences: Sequence[Sequence[int]] = (),
        ignore_eos: bool = False,
        text: bool | None = None,
        skip_special_tokens: bool = True,
        policy: Policy | None = None,
        ttl: float | None = None,
        reuse_prefix: bool = True,
        publish_prefix: bool = True,
        keep: bool = False,
        recover: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> Generation:
        """Return an iterator over what the server draws behind a prompt, which makes its sequences itself.

        Prompt and draws are one call. At the end, or when the iterator is closed (leave it early in ``with``), its
        sequences are released.

        Args:
            prompt: A text, or token ids.
            max_tokens: As in ``Cache.generate``; so are the settings up to ``policy``.
            n: As in ``Cache.generate``.
            temperature: As in ``Cache.generate``.
            top_k: As in ``Cache.generate``.
            top_p: As in ``Cache.generate``.
            min_p: As in ``Cache.generate``.
            seed: As in ``Cache.generate``.
            stop: As in ``Cache.generate``.
            stop_ids: As in ``Cache.generate``.
            stop_sequences: As in ``Cache.generate``.
            ignore_eos: As in ``Cache.generate``.
            text: True: each token comes with its text. None: if the prompt is one.
            skip_special_tokens: As in ``Cache.generate``.
            policy: As in ``Cache.generate``.
            ttl: Lease in seconds, clamped by the server. None: the server's default.
            reuse_prefix: As in ``prefill``.
            publish_prefix: As in ``prefill``.
            keep: True: the sequences are yours to go on with and to release, ``caches`` of the iterator.
            recover: As in ``prefill``.
            timeout: Seconds one token may take, retries included.

        Returns:
            An iterator over ints that know more; see ``Generation``.

        Raises:
            TypeError: The prompt is neither text nor token ids, or the policy is none.
            ValueError: An argument is out of its range.
            ContextExceededError: While iterating: the prompt does not fit. A context that gets full by the draws ends
                the loop instead, as ``context_full``.
            ExecutorError: While iterating, as in ``prefill``; that of the tokenizer too.

        Example:
            ``print("".join(token.text for token in client.generate("def area(", 20)))``
        """
        plan = _messages.generation_plan(
            policy,
            max_tokens=max_tokens,
            n=n,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop,
            stop_ids=stop_ids,
            stop_sequences=stop_sequences,
            ignore_eos=ignore_eos,
            has_text=isinstance(prompt, str) if text is None else text,
            skip_special_tokens=skip_special_tokens,
        )
        options = PromptOptions(ttl, None, reuse_prefix, publish_prefix)
        _convert.duration(ttl)
        return Generation(
            self._connection,
            plan,
            prompt if isinstance(prompt, str) else _check.token_list(prompt),
            follow=functools.partial(self._follow, keep_alive=True, recovery=options if recover else None),
            options=options,
            is_patient=recover,
            keeps=keep,
            timeout=timeout,
        )

    def adopt(self, handle: Handle, *, keep_alive: bool = True) -> Cache:
        """Return a cache for a handle that came from elsewhere; it owns the sequence from now on.

        Nothing is sent: a handle that is no longer good shows at the first call.

        Args:
            handle: The handle, as somebody's ``cache.detach()`` or ``cache.handle`` gave it.
            keep_alive: False: its lease is not renewed in the background.

        Raises:
            TypeError: It is no handle.

        Example:
            ``with client.adopt(queue.get()) as cache: ...``
        """
        _convert.check_handle(handle)
        return self._follow(Tip(handle), keep_alive=keep_alive)

    def stream(self) -> Stream:
        """Return a new stream, for decoding many caches together, a frame per step.

        Example:
            ``with client.stream() as stream: outputs = stream.decode(caches, tokens)``
        """
        return Stream(self._connection, functools.partial(self._follow, keep_alive=True))

    def decode_many(
        self,
        caches: Sequence[Cache],
        tokens: Sequence[Tokens],
        *,
        policy: Policy | Sequence[Policy] | None = None,
        on_stale: OnStale = "fail",
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Output]:
        """Append to several caches together, on a stream that the client keeps open; a second one if that is in use.

        Args:
            caches: The sequences, each at most once.
            tokens: For each cache one token, several, or none (a query).
            policy: One for all, or one for each cache. None: full logits.
            on_stale: What to do with handles that lie behind their tip.
            timeout: Seconds this may take, retries included.

        Returns:
            One output per cache.

        Raises:
            ExecutorError: As in ``Stream.decode``.
            ValueError: The sizes differ, or a cache comes twice.

        Example:
            ``outputs = client.decode_many(branches, [7, 8, 9], policy=greedy())``
        """
        try:
            stream = self._idle_streams.pop()
        except IndexError:  # the first, or others are using them all
            stream = self.stream()
        try:
            return stream.decode(caches, tokens, policy=policy, on_stale=on_stale, timeout=timeout)
        finally:
            self._idle_streams.append(stream)

    def model_info(self, *, timeout: Timeout = USE_DEFAULT) -> ModelInfo:
        """Return the model's description; asked for once, since it does not change while the server runs."""
        return self._connection.model_info(timeout)

    def capabilities(self, *, timeout: Timeout = USE_DEFAULT) -> Capabilities:
        """Return what the server can do and its limits; asked for once.

        Example:
            ``if "forward_verify" in client.capabilities().features: ...``
        """
        return self._connection.capabilities(timeout)

    def status(self, *, timeout: Timeout = USE_DEFAULT) -> Status:
        """Return how the server is doing now, also while it loads."""
        request = executor_pb2.GetStatusRequest()
        reply = self._connection.unary(self._connection.executor.GetStatus, request, timeout=timeout)
        return _convert.status_from_message(reply.status)

    def wait_until_ready(
        self, *, on_progress: Callable[[Status | None], object] | None = None, timeout: Timeout = USE_DEFAULT
    ) -> Status:
        """Return as soon as the server accepts requests; until then poll its status, also while nobody listens yet.

        Args:
            on_progress: Called with each status on the way, and with None while nobody listens.
            timeout: Seconds to wait.

        Returns:
            The first status that is ready.

        Raises:
            UnavailableError: It did not get ready in time, or never will (it is draining, or has failed); the
                message says what was last seen.

        Example:
            ``client.wait_until_ready(on_progress=lambda status: print(status and status.load_progress))``
        """
        limit_s = self._connection.resolve(timeout)
        end = math.inf if limit_s is None else time.monotonic() + limit_s
        while True:
            status, reason = self._poll_status(end - time.monotonic())
            if status is not None and status.is_ready:
                return status
            if on_progress is not None:
                on_progress(status)
            if time.monotonic() + _POLL_S > end or (status is not None and status.state in _NEVER_READY):
                raise reason
            self._connection.sleep(_POLL_S)

    def _poll_status(self, left_s: float) -> tuple[Status | None, UnavailableError]:
        """Return the status, or None while nobody answers, and the error to raise if this was the last look."""
        try:
            status = self.status(timeout=max(0.05, min(5.0, left_s)))
        except UnavailableError as error:
            return None, error
        return status, _not_ready(status)

    def health(self, service: str = "", *, timeout: Timeout = USE_DEFAULT) -> bool:
        """Return True if the server serves, by the standard gRPC health service.

        Args:
            service: Full name of a service, or empty for the server as a whole.
            timeout: Seconds this may take, retries included.

        Raises:
            UnavailableError: Nobody answers.
            ExecutorError: Anything else, see ``errors``.
        """
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        stub = health_pb2_grpc.HealthStub(self._connection.wire.channel)
        reply = self._connection.unary(stub.Check, health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = False,
        parse_special_tokens: bool = True,
        timeout: Timeout = USE_DEFAULT,
    ) -> list[int]:
        """Return the token ids of a text, by the model's own tokenizer.

        Args:
            text: The text.
            add_special_tokens: True: with what the model expects around a text, such as a begin token.
            parse_special_tokens: False: text that looks like a special token stays ordinary; for text from others.
            timeout: Seconds this may take, retries included.

        Raises:
            TypeError: It is no text.
            ValueError: It cannot be written in UTF-8, because it holds half of a surrogate pair.
            UnsupportedError: The server has no tokenizer.
            ExecutorError: Anything else, see ``errors``.

        Example:
            ``ids = client.encode("def area(")``
        """
        _check.text(text)
        request = tokenizer_pb2.TokenizeRequest(
            text=text, add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens
        )
        reply = self._connection.unary(self._connection.tokenizer.Tokenize, request, timeout=timeout)
        return list(reply.token_ids)

    def decode_tokens(
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
            ExecutorError: Anything else, see ``errors``.
        """
        request = tokenizer_pb2.DetokenizeRequest(
            token_ids=_check.token_list(tokens), skip_special_tokens=skip_special_tokens
        )
        return self._connection.unary(self._connection.tokenizer.Detokenize, request, timeout=timeout).text

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """Return what turns the tokens of a loop of your own into text, never half a character.

        Args:
            context: The tokens before the first one, such as the prompt; the last few are enough.

        Example:
            ``text = client.detokenizer(ids); print(text.push(token), end="")``
        """
        return Detokenizer(self._connection.decode_text, context)

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
        allow_special_tokens: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> ChatPrompt:
        """Return a conversation as the model's chat template writes it, as text and as token ids.

        Args:
            messages: The messages, oldest first, each with ``role`` and ``content`` and whatever else the template
                knows, such as ``tool_calls``.
            tools: Definitions of tools, handed to the template as ``tools``.
            add_generation_prompt: False: end after the last message, without the header that makes the model answer.
            variables: More variables for the template.
            allow_special_tokens: True: text of special tokens in the conversation becomes these tokens; only if you
                trust every author of it. False: such a conversation is refused.
            timeout: Seconds this may take, retries included.

        Raises:
            TypeError: It is no list of messages, one has no text as ``role``, or holds what JSON cannot.
            UnsupportedError: The model has no chat template.
            InvalidRequestError: The template refuses the conversation, or a string of it contains the text of a
                special token: ``field`` says where, and ``metadata["special_token"]`` which.
            ExecutorError: Anything else, see ``errors``.

        Example:
            ``ids = client.apply_chat_template([{"role": "user", "content": "Hello"}]).token_ids``
        """
        request = tokenizer_pb2.ApplyChatTemplateRequest(
            messages=_chat_messages(messages),
            tools_json=json.dumps(list(tools)) if tools else "",
            skip_generation_prompt=not add_generation_prompt,
            variables_json=json.dumps(dict(variables)) if variables else "",
            allow_special_tokens=allow_special_tokens,
        )
        reply = self._connection.unary(self._connection.tokenizer.ApplyChatTemplate, request, timeout=timeout)
        return ChatPrompt(reply.text, tuple(reply.token_ids))

    def register_mask(self, mask: MaskLike, *, timeout: Timeout = USE_DEFAULT) -> TokenMask:
        """Have a mask kept on the server, so that policies name it by 16 bytes; return it, for ``mask=`` of a policy.

        Registering a mask again changes nothing. A server that has dropped it, or was started anew, is given it again
        by this client when it is used, as long as the returned mask is kept.

        Args:
            mask: Token ids, a bool array with an entry per token id, or packed bits.
            timeout: Seconds this may take, retries included.

        Raises:
            QuotaExceededError: It does not fit the caller's quota of mask bytes.
            InvalidRequestError: It is not of the vocabulary's size.
            ValueError: It allows nothing, or a token out of the vocabulary.
            ExecutorError: Anything else, see ``errors``.

        Example:
            ``digits = client.register_mask(client.encode("0123456789"))``
        """
        return self.register_masks([mask], timeout=timeout)[0]

    def register_masks(self, masks: Sequence[MaskLike], *, timeout: Timeout = USE_DEFAULT) -> list[TokenMask]:
        """Have masks kept on the server, many in one call; see ``register_mask``.

        Args:
            masks: As in ``register_mask``, each.
            timeout: Seconds this may take, retries included.

        Returns:
            One registered mask for each.

        Raises:
            ExecutorError: As in ``register_mask``.
        """
        timeout = self._connection.until(timeout)
        given = list(map(as_mask, masks))
        needs_size = any(one.bits is None for one in given)
        vocab_size = self._connection.model_info(timeout).vocab_size if needs_size else 0
        bits = [one.to_bits(vocab_size) for one in given]
        return self._connection.register_masks(bits, self._connection.attempts(timeout))

    def cache_metrics(self, *, timeout: Timeout = USE_DEFAULT) -> CacheMetrics:
        """Return the counters of the server's KV pool: of one's own sequences, with the role admin of all callers.

        Example:
            ``hits = client.cache_metrics().num_prefix_hit_tokens``
        """
        request = cache_pb2.GetCacheMetricsRequest()
        reply = self._connection.unary(self._connection.executor.GetCacheMetrics, request, timeout=timeout)
        return _convert.metrics_from_message(reply.metrics)

    def list_caches(self, *, page_size: int = 0, timeout: Timeout = USE_DEFAULT) -> Iterator[CacheSummary]:
        """Yield the caller's live sequences by loggable id, asking for the next page when it is needed.

        Args:
            page_size: Entries per page; 0 lets the server choose.
            timeout: Seconds each page may take.

        Raises:
            ExecutorError: While iterating, see ``errors``.
        """
        _check.whole("page_size", page_size)
        request = cache_pb2.ListCachesRequest(page_size=page_size)
        while True:
            reply = self._connection.unary(self._connection.executor.ListCaches, request, timeout=timeout)
            yield from map(_convert.summary_from_message, reply.caches)
            if not reply.next_page_token:
                return
            request.page_token = reply.next_page_token

    def keep_alive(
        self, caches: Iterable[Cache | Handle], *, ttl: float | None = None, timeout: Timeout = USE_DEFAULT
    ) -> list[Lease | ExecutorError]:
        """Renew leases, many in one call to each instance. Live caches do this automatically; plain handles do not.

        A list longer than the server's ``max_handles_per_request`` is sent in several calls.

        Args:
            caches: Caches or handles.
            ttl: Lease from now on in seconds, clamped by the server. None: each one's own.
            timeout: Seconds this may take, retries included.

        Returns:
            For each the new lease, or the error that says why there is none.

        Raises:
            ExecutorError: The call as a whole failed. Where there are several, what one failed with stands in the place
                of its leases.
        """
        kept, timeout = list(caches), self._connection.until(timeout)
        self._connection.ask_handle_limit(len(kept), timeout)
        parts = Parts(_handles(kept), self._connection.handle_limit)
        done, failures = self._keep_parts(parts, ttl, timeout)
        for error in failures.values():
            if parts.is_alone and not (kept and isinstance(error, WrongInstanceError)):
                raise error
        leases = [done[place] for place in range(len(kept))]
        for cache, lease in zip(kept, leases, strict=True):
            if isinstance(cache, Cache):
                cache.lease_anew(lease, ttl)
        return leases

    def _keep_parts(
        self, parts: Parts, ttl: float | None, timeout: Timeout
    ) -> tuple[dict[int, Lease | ExecutorError], dict[str, ExecutorError]]:
        """Renew leases part by part.

        Returns:
            What became of each, by its place; and what a call failed with, by the instance it was for. After that the
            instance is not asked for its other parts.
        """
        done: dict[int, Lease | ExecutorError] = {}
        failures: dict[str, ExecutorError] = {}
        for instance, places, handles in parts:
            if instance not in failures:
                request = cache_pb2.KeepAliveRequest(kv_caches=handles, ttl=_convert.duration(ttl))
                try:
                    reply = self._connection.unary(self._connection.executor.KeepAlive, request, timeout=timeout)
                except ExecutorError as error:
                    if parts.shrink(error):
                        continue
                    failures[instance] = error
                else:
                    done.update(zip(places, map(_lease_or_error, reply.results), strict=True))
                    continue
            done.update(dict.fromkeys(places, failures[instance]))
        return done, failures

    def reserve(
        self,
        caches: Iterable[Cache | Handle],
        lengths: int | Sequence[int],
        *,
        fitting: int | Sequence[int] | None = None,
        timeout: Timeout = USE_DEFAULT,
    ) -> Reservation:
        """Take room for appends in several sequences in one call: all of it, or nothing; see ``Cache.reserve``.

        Args:
            caches: Caches or handles, at most ``capabilities().max_handles_per_request``: several calls could not
                guarantee all or nothing.
            lengths: Length in tokens up to which each gets its room now; one for all, or one for each.
            fitting: Larger lengths that must fit the free blocks too, without being taken; one for all, or one for
                each. None: no more than ``lengths``.
            timeout: Seconds this may take, retries included.

        Returns:
            The blocks that each took, and those left.

        Raises:
            BlocksExhaustedError: The pool has too few free blocks now; nothing was taken.
            HandleNotFoundError: One of the sequences is gone; nothing was taken.
            ValueError: The sizes differ, a length is no whole number, or the sequences are on several instances: no
                call takes room on all or none of them.
            ExecutorError: Anything else, as in ``Cache.reserve``.

        Example:
            ``left = client.reserve(branches, 512).free_blocks``
        """
        kept = list(caches)
        handles = [one.tip.live_handle() if isinstance(one, Cache) else one for one in kept]
        _check_one_instance(handles)
        request = _messages.reserve_request(handles, lengths, fitting)
        reply = self._connection.unary(self._connection.executor.ReserveKvSlots, request, timeout=timeout)
        for cache, wanted in zip(kept, request.requests, strict=True):
            if isinstance(cache, Cache):
                cache.has_room(wanted.target_length)
        return _convert.reservation_from_message(reply.reservation)

    def release(self, caches: Iterable[Cache | Handle], *, timeout: Timeout = USE_DEFAULT) -> Released:
        """End sequences, many in one call to each instance, and free their blocks.

        What is gone already is no error; nor is what another instance has, if the way there does not lead to it. A list
        longer than the server's ``max_handles_per_request`` is sent in several calls.

        Args:
            caches: Caches or handles.
            timeout: Seconds this may take, retries included.

        Returns:
            What was freed.

        Raises:
            ExecutorError: The server was not reached; the leases will end the sequences. Where there are several
                instances, those on the others were released.

        Example:
            ``client.release(losers)``
        """
        ended, timeout = list(caches), self._connection.until(timeout)
        for cache in ended:
            if isinstance(cache, Cache):
                cache.give_up()
        released: dict[int, bool] = {}
        freed_blocks = 0
        failures: dict[str, ExecutorError] = {}
        self._connection.ask_handle_limit(len(ended), timeout)
        parts = Parts(_handles(ended), self._connection.handle_limit)
        for instance, places, handles in parts:
            if instance in failures:
                continue
            request = cache_pb2.ReleaseCacheRequest(kv_caches=handles)
            try:
                reply = self._connection.unary(self._connection.executor.ReleaseCache, request, timeout=timeout)
            except WrongInstanceError:  # it goes by another name, or is not there any more: nothing is left to release
                released.update(dict.fromkeys(places, False))
                continue
            except ExecutorError as error:  # those of other instances want to be released all the same
                if not parts.shrink(error):
                    failures[instance] = error
                continue
            released.update(zip(places, [result.released for result in reply.results], strict=True))
            freed_blocks += reply.freed_blocks
        for failure in failures.values():
            raise failure
        return Released(tuple(released[place] for place in range(len(ended))), freed_blocks)

    def _follow(self, tip: Tip, *, keep_alive: bool, recovery: PromptOptions | None = None) -> Cache:
        """Return the cache that follows a sequence from here on."""
        calls = SequenceCalls(self._connection, self._keeper, tip, keep_alive=keep_alive, recovery=recovery)
        return Cache(self._connection, calls)

    def _renew(self, handles: Sequence[Handle], timeout_s: float) -> list[Lease | ExecutorError]:
        """Renew the leases of as many handles as one request may hold, without asking for the server's limit first."""
        return self.keep_alive(handles[: self._connection.handle_limit.most], timeout=timeout_s)


def _per_item(policy: Policy | Sequence[Policy] | None, count: int) -> Sequence[Policy | None]:
    """Return a policy for each item.

    Raises:
        ValueError: There are more or fewer of them.
    """
    policies = list(policy) if isinstance(policy, Sequence) else [policy] * count
    if len(policies) != count:
        raise ValueError(f"policy needs one entry for each: there are {count} and {len(policies)} entries")
    return policies


def _chat_messages(messages: Sequence[ChatMessage]) -> list[tokenizer_pb2.ChatMessage]:
    """Return the wire form of a conversation.

    Raises:
        TypeError: It is no list of messages, or as in ``_chat_message``.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not all(isinstance(one, Mapping) for one in messages):
        raise TypeError('a conversation is a list of messages, such as [{"role": "user", "content": "Hello"}]')
    return [_chat_message(one) for one in messages]


def _chat_message(message: ChatMessage) -> tokenizer_pb2.ChatMessage:
    """Return the wire form of a message; what is neither its role nor a plain text goes as JSON.

    Raises:
        TypeError: It has no text as ``role``, or holds what JSON cannot.
    """
    extra = dict(message)
    role, content = extra.pop("role", None), extra.pop("content", "")
    if not isinstance(role, str):
        raise TypeError(f"a message needs a text as role, got {role!r}")
    if not isinstance(content, str):
        extra["content"], content = content, ""
    return tokenizer_pb2.ChatMessage(role=role, content=content, extra_json=json.dumps(extra) if extra else "")


def _not_ready(status: Status) -> UnavailableError:
    text = f"the server is {status.state}" + (f": {status.load_stage}" if status.load_stage else "")
    if status.state == "draining":
        return DrainingError(grpc.StatusCode.UNAVAILABLE, "DRAINING", text)
    return StartingError(grpc.StatusCode.UNAVAILABLE, "STARTING", text)


def _check_one_instance(handles: Sequence[Handle]) -> None:
    """Make sure that one instance has all sequences.

    Raises:
        ValueError: It has not.
    """
    names = sorted(by_instance(handles, checked_instance))
    if len(names) > 1:
        text = " and ".join(map(repr, names))
        raise ValueError(f"the sequences are on the instances {text}: reserve on each by a call of its own")


def _handles(caches: Sequence[Cache | Handle]) -> list[Handle]:
    """Return the handles of caches, and those that stand among them."""
    return [cache.handle if isinstance(cache, Cache) else cache for cache in caches]


def _lease_or_error(result: cache_pb2.KeepAliveResult) -> Lease | ExecutorError:
    if result.HasField("lease"):
        return _convert.lease_from_message(result.lease)
    return error_from_status(result.error)
