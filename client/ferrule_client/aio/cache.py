# Written by client/generate_aio.py from client/ferrule_client/cache.py: change that, then run it again.
"""The cache: the object that moves along one sequence on the server."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from ferrule.v1 import cache_pb2, executor_pb2, types_pb2
from ferrule_client import _check, _convert, _messages
from ferrule_client._retry import Attempts
from ferrule_client._tip import Tip, using
from ferrule_client._token_log import common_length
from ferrule_client.aio._calls import SequenceCalls
from ferrule_client.aio._connection import USE_DEFAULT, Connection, Timeout
from ferrule_client.aio.generation import AsyncGeneration, AsyncTextGeneration
from ferrule_client.cache import _branches
from ferrule_client.errors import ExecutorError, WrongInstanceError
from ferrule_client.items import Chunk, DraftDistributions, VerifyItem
from ferrule_client.masks import MaskLike
from ferrule_client.policy import Policy, no_output
from ferrule_client.types import Acceptance, CacheInfo, Handle, Lease, OnStale, Output, Released, Tokens, Verification

__all__ = ["AsyncCache"]

_log = logging.getLogger(__name__)

_EXIT_S = 5.0
_NUM_CONTEXT = 8


class AsyncCache:
    """One sequence on the server, and the handle at its newest state.

    Made by ``AsyncClient.prefill``, ``AsyncCache.fork`` or ``AsyncClient.adopt``. A handle is a value and never
    changes; a cache is the thing that moves: each call that appends replaces ``handle``. Leaving ``async with``
    releases the sequence.

    **Pending.** A token that the model has drawn is not in its KV cache until it is sent back. ``decode`` leaves that
    to you: it appends exactly the tokens you give. The loops, ``generate`` and ``verify``, hand tokens out and keep
    the newest in ``pending``. Whatever comes next sends it first, so that these just work::

        async for token in cache.generate(max_tokens=20): ...
        await cache.decode(question_ids)             # appends the last token of the loop, then the question
        async for token in cache.generate(): ...     # goes on after the question

    and a fork takes it along. ``truncate`` drops it. So never feed the last token of a loop back by hand.

    **Doubt.** An append that raised did not happen, as far as the cache goes: ``handle`` and ``pending`` are as before.
    After a timeout, a broken connection or a cancellation the server may have run it all the same. Then send the same
    tokens again, which is answered as a replay and doubles nothing; or go on with others: the cache makes the server
    drop what landed of the first ones, and nothing else. ``truncate(cache.length)`` drops it at once.

    **Loss.** A sequence can be gone: its lease ran out, or the server was started anew. Calls then raise
    ``HandleNotFoundError``, which has the ``token_ids`` to prefill again; behind a proxy that does not reach its
    instance any more ``InstanceUnreachableError``, which has them too. A cache made with ``recover=True``, and every
    fork of it, prefills by itself in the middle of any call, a loop's too: where a proxy has another instance, there;
    else it waits until the call's timeout for the server that went away. Its tokens, ``pending`` and seeds stay, so a
    loop goes on with the draws it would have made, as far as KV that is prefilled equals KV that was decoded: they can
    differ by rounding. Handles kept from before the loss are no longer good.

    Not safe to use from two tasks at once (fork it instead); two caches of one client are. A call that would move
    the sequence while another one does is refused with a RuntimeError.

    Attributes:
        tip: The state shared with streams and generations; not for callers.
    """

    def __init__(self, connection: Connection, calls: SequenceCalls) -> None:
        self._connection = connection
        self._calls = calls
        self.tip = calls.tip

    async def __aenter__(self) -> AsyncCache:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._connection.is_closed and not self.is_released:
            text = f"left {self!r} after its client was closed; its KV stays on the server until the lease ends"
            warnings.warn(text, ResourceWarning, stacklevel=2)
        try:
            await self.release(timeout=_EXIT_S)
        except ExecutorError as failure:  # the lease ends the sequence; the body's own error must stay visible
            _log.debug("release failed handle_id=%s reason=%s", self.handle.handle_id, failure.reason)

    def __repr__(self) -> str:
        state = "released" if self.tip.is_released else f"length={self.length}, pending={len(self.pending)}"
        return f"AsyncCache({self.handle.handle_id}, {state})"

    def __del__(self) -> None:
        if "tip" in self.__dict__ and not self.tip.is_released:
            text = f"{self!r} was never released; its KV stays on the server until the lease ends: use `async with`"
            self._calls.give_up()
            warnings.warn(text, ResourceWarning, source=self, stacklevel=1)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an AsyncCache cannot be pickled or copied: send cache.detach(), and client.adopt(handle) over there"
        )

    @property
    def handle(self) -> Handle:
        """The handle at the tip: a value to keep, compare or send elsewhere.

        In the middle of a generation that was left early it may be a few tokens off ``length``; the next call that
        moves the cache, such as ``truncate(cache.length)``, sees to it.
        """
        return self.tip.handle

    @property
    def length(self) -> int:
        """Tokens in the KV cache; ``pending`` does not count."""
        return self.tip.length

    @property
    def pending(self) -> tuple[int, ...]:
        """Tokens handed out by a loop and not in the KV cache yet: none, or one. The next append sends them first."""
        return self.tip.pending[-1:]

    @property
    def last(self) -> Output | None:
        """The newest output, at first the prefill's own. None for an adopted handle and after a truncate."""
        return self.tip.last

    @property
    def token_ids(self) -> list[int] | None:
        """The first ``length`` tokens, as this cache knows them, without asking the server.

        None for an adopted handle, until ``info(token_ids=True)`` has told them.
        """
        return self.tip.seen_ids

    @property
    def is_released(self) -> bool:
        """True: the sequence was released or given away."""
        return self.tip.is_released

    @property
    def recovers(self) -> bool:
        """True: a lost sequence is brought back by itself; see ``recover`` of ``AsyncClient.prefill``."""
        return self._calls.recovers

    @property
    def num_recoveries(self) -> int:
        """Times the sequence was lost and its tokens were prefilled into a new one."""
        return self.tip.num_recoveries

    async def decode(
        self,
        tokens: Tokens,
        *,
        policy: Policy | None = None,
        on_stale: OnStale = "fail",
        timeout: Timeout = USE_DEFAULT,
    ) -> Output:
        """Append tokens and return the row of the last one; the handle covers them afterwards.

        A retry after a lost reply never appends twice: the server answers it as a replay. When this raises, also
        after a timeout, the cache has not moved: send the same tokens again, or go on with others (see the class).

        Args:
            tokens: One token id, or several; what is pending is appended before them.
            policy: What to return for the row. None: full logits in float32.
            on_stale: What to do if somebody else appended to this sequence meanwhile. ``fork`` makes this cache
                follow the new branch.
            timeout: Seconds this may take, retries included.

        Returns:
            The output. A token that the policy chose is yours to append, or not.

        Raises:
            HandleNotFoundError: The sequence is gone: prefill again.
            HandleStaleError: Somebody else has moved the sequence on.
            DeadlineExceededError: The timeout passed; send the same tokens again, or go on with others.
            TypeError: The tokens are no ints, or the policy is none.
            ValueError: Another argument is out of its range.
            InvalidRequestError: A token is out of the vocabulary, or the policy is not allowed.
            ContextExceededError: The context is full.
            ResourceExhaustedError: The pool or the queue is full now.
            ExecutorError: Anything else, see ``errors``.

        Example:
            ``output = await cache.decode(output.token, policy=greedy())``
        """
        timeout = self._connection.until(timeout)
        sent = await self.prepare(tokens, policy, on_stale, timeout=timeout)
        request = executor_pb2.DecodeRequest(input=sent)
        with self.tip.sending(sent.input_ids):
            reply = await self._calls.call_once_more(
                self._connection.executor.Decode, request, timeout, creates=_branches(sent)
            )
        return self.tip.moved(sent.input_ids, _convert.output_from_message(reply.output))

    async def query(self, policy: Policy | None = None, *, timeout: Timeout = USE_DEFAULT) -> Output:
        """Return the newest row again, under another policy; nothing is appended but what was pending.

        Args:
            policy: What to return for the row. None: full logits in float32.
            timeout: Seconds this may take, retries included.

        Returns:
            The output.

        Raises:
            ExecutorError: As in ``decode``.

        Example:
            ``best = (await cache.query(greedy(top_logprobs=5))).top_logprobs[0]``
        """
        return await self.decode((), policy=policy, timeout=timeout)

    async def prefill(
        self,
        tokens: Tokens,
        *,
        policy: Policy | None = None,
        all_positions: bool = False,
        ttl: float | None = None,
        on_stale: OnStale = "fail",
        timeout: Timeout = USE_DEFAULT,
    ) -> Output:
        """Append many tokens, in chunks if need be, optionally with a row for each of them.

        Args:
            tokens: Token ids; what is pending is appended before them.
            policy: What to return for the rows. None: full logits in float32.
            all_positions: True: a row for every token, not only the last one.
            ttl: New lease in seconds; None keeps the sequence's own.
            on_stale: As in ``decode``.
            timeout: Seconds this may take, retries included.

        Returns:
            The output.

        Raises:
            ValueError: ``target_logprobs`` of several tokens without ``all_positions``; else as in ``decode``.
            ExecutorError: As in ``decode``.

        Example:
            ``scores = (await cache.prefill(ids, policy=Policy(target_logprobs=True),
            all_positions=True)).target_logprobs``
        """
        timeout = self._connection.until(timeout)
        sent = await self.prepare(tokens, policy, on_stale, timeout=timeout)
        request = _messages.prefill_request(sent, policy, all_positions=all_positions, ttl=ttl)
        with self.tip.sending(sent.input_ids):
            reply = await self._calls.call_once_more(
                self._connection.executor.Prefill, request, timeout, creates=_branches(sent)
            )
        self._calls.lease_anew(ttl, _convert.granted_ttl_s(reply.output))
        return self.tip.moved(sent.input_ids, _convert.output_from_message(reply.output))

    async def follow(self, tokens: Tokens, *, policy: Policy | None = None, timeout: Timeout = USE_DEFAULT) -> int:
        """Make the sequence hold exactly these tokens: drop what differs, run what is lacking, keep the rest.

        What a conversation needs that is rendered anew for each turn. When it raises, what differs may be dropped
        already.

        Args:
            tokens: All token ids that the sequence is to hold; what is pending counts as there.
            policy: What to return for the newest row, as ``last``, if anything is run. None: nothing.
            timeout: Seconds this may take, retries included.

        Returns:
            How many of them it held before.

        Raises:
            ValueError: It has not even the first token in common: prefill a new one.
            ExecutorError: As in ``decode``.

        Example:
            ``await cache.follow((await client.apply_chat_template(chat)).token_ids)``
        """
        timeout = self._connection.until(timeout)
        ids = _check.token_list(tokens)
        if self.token_ids is None:
            await self.info(token_ids=True, timeout=timeout)
        held = self.token_ids or []
        text = [*held, *self.pending]
        same = common_length(text, ids)
        num_kept = min(same, len(held))
        if num_kept == 0:
            raise ValueError("the sequence has not even the first of these tokens: prefill a new one")
        lacking = ids[same:]
        if same < len(text) or len(ids) == len(held):
            await self.truncate(num_kept, timeout=timeout)
            lacking = ids[num_kept:]
        if lacking or self.pending:
            await self.prefill(lacking, policy=policy or no_output(), timeout=timeout)
        return num_kept

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        tokens: Tokens = (),
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
        text: bool = False,
        skip_special_tokens: bool = True,
        policy: Policy | None = None,
        on_stale: OnStale = "fail",
        timeout: Timeout = USE_DEFAULT,
    ) -> AsyncGeneration:
        """Return an iterator over tokens drawn by the server, which runs the loop and streams them.

        Nothing runs before the first ``next``. After each token the handle covers every token before it and
        ``pending`` is the token itself; see the class for how to go on. Cancelling and ``break`` leave the cache
        usable.

        Args:
            max_tokens: Most tokens to draw for each branch; None: until a stop or the end of the context.
            tokens: Tokens to append first, behind what is pending, such as the next question.
            n: Number of branches: the first one on this cache, each other on a new one, ``caches`` of the iterator;
                those want to be released.
            temperature: Divides the logits; 0 is greedy, None is 1.
            top_k: Keeps the k most likely tokens.
            top_p: Keeps the smallest set of most likely tokens that reaches this probability.
            min_p: Keeps tokens at least this times as likely as the most likely one.
            seed: Seed of the draws; None draws one, to be read from ``seed`` of the iterator. Each further branch uses
                the next one.
            stop: Texts that end a branch, wherever they begin; they are part of its text. Needs a tokenizer.
            stop_ids: Tokens that end a branch, besides the model's own.
            stop_sequences: Runs of tokens that end a branch.
            ignore_eos: True: do not stop at the model's own stop tokens.
            text: True: each token comes with what it adds to the text, never half a character. Needs a tokenizer.
            skip_special_tokens: False: special tokens are written out in the text.
            policy: Any policy with a selection, in place of the sampling settings above: penalties, masks, logprobs.
            on_stale: As in ``decode``.
            timeout: Seconds one token may take, retries included.

        Returns:
            An iterator over ints that know more, with ``branches``, ``finish_reason``, ``text`` and ``close``. A token
            that ends a branch is handed out.

        Raises:
            TypeError: The tokens are no ints, or the policy is none.
            ValueError: The policy has no selection, or comes with sampling settings; a number is out of its range.
            ContextExceededError: While iterating: the input does not fit, and nothing of it was appended. A context
                that gets full by the draws ends the loop instead, as ``context_full``.
            ExecutorError: While iterating, as in ``decode``.

        Example:
            ``tokens = [token async for token in cache.generate(max_tokens=32, temperature=0.7, seed=1)]``
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
            has_text=text,
            skip_special_tokens=skip_special_tokens,
        )
        _convert.stale_to_message(on_stale)
        return AsyncGeneration(
            self._connection,
            plan,
            _check.token_list(tokens),
            cache=self,
            on_stale=on_stale,
            is_patient=self.recovers,
            timeout=timeout,
        )

    def generate_text(
        self,
        max_tokens: int | None = None,
        *,
        tokens: Tokens = (),
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        stop_sequences: Sequence[Sequence[int]] = (),
        ignore_eos: bool = False,
        policy: Policy | None = None,
        on_stale: OnStale = "fail",
        timeout: Timeout = USE_DEFAULT,
    ) -> AsyncTextGeneration:
        """Return an iterator over pieces of text, never half a character; the loop is that of ``generate``.

        The text comes from the server's tokenizer. Special tokens, the one that ends the text among them, are not
        written out; ``tokens`` of the iterator has every id.

        Args:
            max_tokens: As in ``generate``.
            tokens: As in ``generate``.
            temperature: As in ``generate``.
            top_k: As in ``generate``.
            top_p: As in ``generate``.
            min_p: As in ``generate``.
            seed: As in ``generate``.
            stop: As in ``generate``.
            stop_ids: As in ``generate``.
            stop_sequences: As in ``generate``.
            ignore_eos: As in ``generate``.
            policy: As in ``generate``.
            on_stale: As in ``generate``.
            timeout: As in ``generate``.

        Returns:
            An iterator with ``tokens``, ``finish_reason`` and ``close``.

        Raises:
            UnsupportedError: While iterating: the server has no tokenizer.
            ExecutorError: While iterating, as in ``decode``.

        Example:
            ``print("".join([piece async for piece in cache.generate_text(max_tokens=32)]))``
        """
        generation = self.generate(
            max_tokens,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop,
            stop_ids=stop_ids,
            stop_sequences=stop_sequences,
            ignore_eos=ignore_eos,
            text=True,
            policy=policy,
            on_stale=on_stale,
            timeout=timeout,
        )
        context = (*self.tip.log.tail(_NUM_CONTEXT), *self.tip.pending, *_check.token_list(tokens))
        return AsyncTextGeneration(generation, self._connection, context)

    async def verify(
        self,
        draft: Sequence[int],
        *,
        tokens: Tokens = (),
        policy: Policy | None = None,
        acceptance: Acceptance | None = None,
        parents: Sequence[int] = (),
        draft_probs: DraftDistributions | None = None,
        masks: Sequence[MaskLike] = (),
        row_handles: bool = False,
        on_stale: OnStale = "fail",
        timeout: Timeout = USE_DEFAULT,
    ) -> Verification:
        """Run draft tokens, keep those that hold, and return how many did.

        Afterwards the handle covers the certain tokens and the accepted drafts, and ``next_token``, if there is one,
        is ``pending``: a loop of ``verify`` calls needs no other bookkeeping.

        Args:
            draft: Draft token ids, a chain or a tree; may be empty.
            tokens: Certain tokens that are not in the sequence yet, appended after what is pending. Together at
                least one.
            policy: What to return for the rows, and the distribution that the acceptance works with.
            acceptance: Who decides. ``greedy``: drafts hold while they are the most likely token. ``exact``: while they
                are what the policy would have chosen. ``rejection``: speculative sampling, after which the text has
                exactly the distribution of the policy. ``none``: you; everything is appended. None: ``rejection`` where
                there are ``draft_probs``, else ``exact`` if the policy chooses tokens, else ``none``.
            parents: Row that each draft follows (row 0 is the last certain token, row r is draft r). Empty: a chain.
            draft_probs: Distributions that the drafts were drawn from, for ``rejection``: an array
                [drafts, vocab_size], or for each draft its probabilities by token id. None: the drafts were chosen with
                certainty.
            masks: Tokens that may follow each row (drafts + 1), in place of the policy's mask.
            row_handles: True: return a handle at row 0 and at each appended draft.
            on_stale: As in ``decode``.
            timeout: Seconds this may take, retries included.

        Returns:
            What became of the drafts.

        Raises:
            UnsupportedError: The server does not serve it, or not with a tree.
            ValueError: There is no certain token, ``acceptance`` is no rule or does not go with the policy, or there
                are more or fewer distributions or masks than needed.
            ExecutorError: As in ``decode``.

        Example:
            ``accepted = (await cache.verify(draft_model.propose(4), policy=greedy())).accepted_count``
        """
        timeout = self._connection.until(timeout)
        item = VerifyItem(
            self,
            _check.token_list(draft),
            tokens,
            policy,
            acceptance,
            parents,
            draft_probs,
            masks,
            row_handles,
            on_stale,
        )
        sent = await self.prepare_verify(item, timeout=timeout)
        request = executor_pb2.ForwardVerifyRequest(input=sent)
        with self.tip.sending([*sent.input_ids, *sent.draft_ids]):
            reply = await self._calls.call_once_more(
                self._connection.executor.ForwardVerify, request, timeout, creates=_branches(sent)
            )
        verification = _convert.verification_from_message(reply.output)
        return self.tip.verified(sent.input_ids, item.draft, parents, verification)

    async def fork(
        self,
        n: int = 1,
        *,
        length: int | None = None,
        ttl: float | None = None,
        timeout: Timeout = USE_DEFAULT,
    ) -> list[AsyncCache]:
        """Return ``n`` new caches that share this one's blocks; nothing is copied until a branch writes.

        Branches that start at the tip take the pending token along. Give each branch its own seed.

        Args:
            n: Number of branches.
            length: Tokens at which to branch. None: at the tip.
            ttl: Lease of each branch in seconds. None: that of this sequence.
            timeout: Seconds this may take, retries included.

        Returns:
            The branches; each is a sequence of its own and wants to be released.

        Raises:
            InvalidRequestError: ``n`` is above the server's limit, or ``length`` above the cache's.
            ValueError: ``n`` or ``length`` is below 1, or ``ttl`` negative.
            ExecutorError: As in ``decode``.

        Example:
            ``async with contextlib.AsyncExitStack() as stack: branches = [await stack.enter_async_context(b) for b in
            await cache.fork(3)]``
        """
        wanted = self.tip.length if length is None and not self.tip.is_exact else length
        request = _messages.fork_request(self.tip.at(wanted or 0), n, wanted, ttl)
        reply = await self._calls.call_once_more(self._connection.executor.ForkCache, request, timeout, creates=True)
        at_tip, ttl_s = length is None, _convert.granted_ttl_s(reply)
        handles = map(_convert.handle_from_message, reply.kv_caches)
        return [self.sibling(self.tip.branch(one, at_tip=at_tip, ttl_s=ttl_s), ttl=ttl) for one in handles]

    async def truncate(self, length: int, *, timeout: Timeout = USE_DEFAULT) -> int:
        """Shorten the sequence to exactly ``length`` tokens and return the number of blocks that became free.

        What was pending is dropped; ``truncate(cache.length)`` does only that.

        Args:
            length: Tokens to keep, from 1 to ``cache.length``.
            timeout: Seconds this may take, retries included.

        Returns:
            Blocks that went back to the pool; those shared with other sequences do not count.

        Raises:
            TruncateBeyondError: ``length`` is out of that range.
            ExecutorError: As in ``decode``.

        Example:
            ``await cache.truncate(cache.length - 3)``
        """
        request = _messages.truncate_request(self.tip.at(min(length, self.length)), length)
        self.tip.interrupt()
        with using(self.tip):
            reply = await self._calls.call_once_more(self._connection.executor.TruncateKv, request, timeout)
        self.tip.cut(_convert.handle_from_message(reply.kv_cache))
        return reply.freed_blocks

    async def reserve(self, length: int, *, timeout: Timeout = USE_DEFAULT) -> int:
        """Take room for appends up to ``length`` tokens now, and return the number of blocks that it took.

        Until then appends cannot run out of blocks, however full the pool gets. The room is kept until the release,
        also by ``truncate``; forks do not inherit it. Asking again for as much or less takes nothing.

        Args:
            length: Length of the sequence in tokens; not how many more.
            timeout: Seconds this may take, retries included.

        Returns:
            Blocks taken from the pool.

        Raises:
            BlocksExhaustedError: The pool has too few free blocks now; nothing was taken.
            QuotaExceededError: It would pass the caller's quota of KV tokens.
            OutOfRangeError: ``length`` is beyond the context or the whole pool.
            ValueError: ``length`` is no whole number.
            ExecutorError: As in ``decode``.

        Example:
            ``await cache.reserve(cache.length + 256)``
        """
        request = _messages.reserve_request([self.tip.live_handle()], length, None)
        reply = await self._calls.call_once_more(self._connection.executor.ReserveKvSlots, request, timeout)
        self.has_room(length)
        return _convert.reservation_from_message(reply.reservation).new_blocks[0]

    async def info(self, *, token_ids: bool = False, blocks: bool = False, timeout: Timeout = USE_DEFAULT) -> CacheInfo:
        """Return the server's state of the sequence; renews its lease and changes nothing else.

        Args:
            token_ids: True: with all token ids.
            blocks: True: with block ids and reference counts.
            timeout: Seconds this may take, retries included.

        Returns:
            The state, with the handle at the sequence's own tip.

        Raises:
            HandleNotFoundError: The sequence is gone.
            ExecutorError: Anything else, see ``errors``.

        Example:
            ``shared = (await cache.info()).num_shared_blocks``
        """
        request = cache_pb2.GetCacheInfoRequest(
            kv_cache=_convert.handle_to_message(self.tip.live_handle()),
            include_token_ids=token_ids,
            include_blocks=blocks,
        )
        reply = await self._calls.call_once_more(self._connection.executor.GetCacheInfo, request, timeout)
        info = _convert.cache_info_from_message(reply.info)
        if token_ids:
            self.tip.learn(info.handle, info.token_ids)
        return info

    async def release(self, *, timeout: Timeout = USE_DEFAULT) -> Released:
        """End the sequence and free its blocks. Leaving ``async with`` does it; releasing twice changes nothing.

        Args:
            timeout: Seconds this may take, retries included.

        Returns:
            What was freed.

        Raises:
            ExecutorError: The server was not reached, or the client is closed; the lease will end the sequence.

        Example:
            ``freed = (await cache.release()).freed_blocks``
        """
        if self.is_released:
            return Released((False,), 0)
        self.give_up()
        request = cache_pb2.ReleaseCacheRequest(kv_caches=[_convert.handle_to_message(self.handle)])
        try:
            reply = await self._connection.unary(self._connection.executor.ReleaseCache, request, timeout=timeout)
        except WrongInstanceError:  # its instance goes by another name, or is not there any more
            return Released((False,), 0)
        return Released(tuple(result.released for result in reply.results), reply.freed_blocks)

    def detach(self) -> Handle:
        """Give the sequence away and return its handle: no release, no keep-alive, no warning from here on.

        Whoever gets the handle goes on with ``AsyncClient.adopt``; until then the lease runs. A pending token is not in
        the handle: pass it on too, or append it first.

        Raises:
            RuntimeError: A generation was left early and the handle is not at ``length``.

        Example:
            ``queue.put(cache.detach())``
        """
        if not self.tip.is_exact:
            raise RuntimeError("the handle is not that of the newest token: call cache.truncate(cache.length) first")
        return self.give_up().handle

    async def prepare(
        self,
        tokens: Tokens,
        policy: Policy | None,
        on_stale: OnStale = "fail",
        *,
        drafts: Sequence[int] = (),
        draws: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> executor_pb2.DecodeInput:
        """Return the message of the next append. For streams and loops; not for callers.

        If an earlier append is in doubt and this one is no repetition of it, what landed is to be dropped: the append
        rewinds, provided that nothing but our own doubtful tokens stands behind the handle. It rewinds also when they
        have not landed (yet), because they may still be on their way; the server takes appends one by one.

        Args:
            tokens: As in ``decode``.
            policy: As in ``decode``.
            on_stale: As in ``decode``.
            drafts: Tokens that are sent besides and may be appended too.
            draws: True: the server goes on with tokens that it draws, so that no tokens are no query.
            timeout: Seconds that a look at the sequence may take, if one is needed.
        """
        ids = _check.token_list(tokens)
        if self.tip.num_unseen:
            newest = self.tip.pending
            await self.truncate(self.tip.length, timeout=timeout)
            self.tip.pending = newest
        sent = self.tip.decode_input(ids, policy, on_stale)
        if not sent.input_ids and not draws:
            return sent
        self.tip.interrupt()
        if self.tip.is_ahead and sent.on_stale == types_pb2.STALE_POLICY_FAIL:
            return self.tip.decode_input(ids, policy, "rewind")
        is_new = self.tip.contradicts([*sent.input_ids, *drafts]) or (draws and bool(self.tip.doubts))
        if is_new and sent.on_stale == types_pb2.STALE_POLICY_FAIL and await self._holds_only_doubts(timeout):
            return self.tip.decode_input(ids, policy, "rewind")
        return sent

    async def prepare_verify(
        self, item: VerifyItem[AsyncCache], *, timeout: Timeout = USE_DEFAULT
    ) -> executor_pb2.VerifyInput:
        """Return the message of a verify. For streams; not for callers.

        Args:
            item: What is asked for.
            timeout: As in ``prepare``.
        """
        policy = _messages.verify_policy(item.policy, item.acceptance, item.draft_probs)
        drafts = _check.token_list(item.draft)
        base = await self.prepare(item.tokens, policy, item.on_stale, drafts=drafts, timeout=timeout)
        return _messages.verify_input(base, policy, item)

    async def prepare_chunk(
        self, item: Chunk[AsyncCache], *, timeout: Timeout = USE_DEFAULT
    ) -> executor_pb2.UnifiedBatchItem:
        """Return the message of a chunk. For streams and batches; not for callers.

        Args:
            item: What is asked for.
            timeout: As in ``prepare``.
        """
        base = await self.prepare(item.tokens, None, item.on_stale, timeout=timeout)
        return _messages.chunk_input(base, item, base.kv_cache.length)

    def sibling(self, tip: Tip, *, ttl: float | None = None) -> AsyncCache:
        """Return a cache of its own for a branch of this one. For streams; not for callers.

        Args:
            tip: The branch.
            ttl: The lease in seconds that was asked for, if one was.
        """
        return AsyncCache(self._connection, self._calls.of_branch(tip, ttl))

    def give_up(self) -> Tip:
        """Mark the sequence as no longer ours and return its tip. For streams and the client; not for callers."""
        self.tip.interrupt()
        self._calls.give_up()
        return self.tip

    def has_room(self, length: int) -> None:
        """Take note of room that was reserved. For the client; not for callers."""
        self._calls.reserved(length)

    async def revive(self, error: ExecutorError, attempts: Attempts) -> None:
        """Bring a lost sequence back, as a new one of the same tokens. For streams; not for callers.

        Args:
            error: What said that it is lost.
            attempts: Those of the call that found out; the prefill has what is left of its time.

        Raises:
            ExecutorError: ``error``, if this cache does not recover or cannot, or what the prefill failed with.
        """
        await self._calls.revive(error, attempts)

    def lease_anew(self, lease: Lease | ExecutorError, ttl: float | None) -> None:
        """Take over a lease that was renewed apart from the cache. For the client; not for callers.

        Args:
            lease: What became of it.
            ttl: What was asked for, in seconds, if another one was.
        """
        if isinstance(lease, Lease):
            self._calls.lease_anew(ttl, lease.ttl_s)

    async def _holds_only_doubts(self, timeout: Timeout) -> bool:
        with using(self.tip):
            return self.tip.explains((await self.info(token_ids=True, timeout=timeout)).token_ids[self.length :])
