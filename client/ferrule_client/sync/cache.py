# Written by tools/strip_async.py from ../aio/cache.py: change that and run `make sync`.
"""The cache: the object that moves along one sequence on the server."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn, overload

from ferrule_client import _convert, _messages
from ferrule_client import _notebook as notebook
from ferrule_client._messages import Reading, Stops
from ferrule_client._public import publish
from ferrule_client._timeouts import USE_DEFAULT, Timeout
from ferrule_client._tip import Tip
from ferrule_client.errors import FerruleError
from ferrule_client.items import Append, DraftDistributions, Verify
from ferrule_client.masks import MaskLike
from ferrule_client.policy import Policy, greedy, hinting
from ferrule_client.sync._calls import SequenceCalls, release_all
from ferrule_client.sync._connection import Connection
from ferrule_client.sync.branches import Branches
from ferrule_client.sync.generation import Generation
from ferrule_client.types import (
    Acceptance,
    CacheInfo,
    Handle,
    OnStale,
    Output,
    Pending,
    Released,
    Token,
    Tokens,
    Verification,
    WithText,
)

__all__ = ["Cache"]

_log = logging.getLogger(__name__)

_EXIT_S = 5.0


@hinting
class Cache:
    r"""One sequence on the server, and the handle at its newest state.

    Made by ``Client.prefill``, ``Cache.fork`` or ``Client.adopt``. A handle is a value and never
    changes; a cache is the thing that moves: each call that appends replaces ``handle``. Leaving ``with``
    releases the sequence.

    **Pending.** A token that the server has chosen is not in the KV cache until it is sent back. Whatever chose it
    (``prefill``, ``append``, ``step``, ``verify``, a loop), it is *pending*: the next append sends it first. So these
    need no bookkeeping::

        with client.prefill("def area(", policy=greedy()) as cache:
            for _ in range(20):
                output = cache.step()              # appends the pending token, chooses the next one
            cache.append("\n\ndef volume(")          # appends the pending token, then the text

    To pass the token by hand confirms it, and it is sent once: ``cache.append(output.token)``. An int that equals it
    raises ``PendingTokenError``, because nothing says whether the text has it once or twice. ``pending="drop"``
    replaces it. A fork takes it along; ``truncate`` drops it. After k steps k tokens were chosen, and ``token_ids`` has
    the first k - 1 of them; ``append(())`` appends the last. A loop yields the tokens that follow the pending one.

    **Doubt.** An append that raised did not happen as far as the cache is concerned: ``handle`` and ``pending`` are as
    before. After a timeout, a broken connection or Ctrl-C the server may have run it all the same. Then send
    the same tokens again, which the server answers as a replay, so nothing is appended twice; or go on with others, and
    the cache has the server drop what landed of the first ones. ``truncate(cache.length)`` drops it at once.

    **Loss.** A sequence can be gone: its lease ran out, or the server was restarted. Calls then raise
    ``HandleNotFoundError``, which has the ``token_ids`` to prefill again; behind a proxy that does not reach the
    instance any more ``InstanceUnreachableError``, which has them too. A cache made with ``recover=True``, and every
    fork of it, prefills automatically in the middle of any call, also of a loop: on another instance if the proxy has
    one, else it waits until the call's timeout for the server that went away. Its tokens, ``pending`` and seeds stay.
    A loop then goes on with the draws it would have made, except where prefilled and decoded KV round differently.
    Handles from before the loss are no longer valid.

    Not safe to use from two threads at once (fork it instead); two caches of one client are. A call that would move the
    sequence while another one does raises RuntimeError.
    """

    def __init__(self, connection: Connection, calls: SequenceCalls) -> None:
        self._connection = connection
        self._calls = calls
        self._tip = calls.tip

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._connection.is_closed and not self.is_released:
            text = f"left {self!r} after its client was closed; its KV stays on the server until the lease ends"
            warnings.warn(text, ResourceWarning, stacklevel=2)
        try:
            self.release(timeout=_EXIT_S)
        except FerruleError as failure:  # the lease ends the sequence; the body's own error must stay visible
            _log.debug("release failed handle_id=%s reason=%s", self.handle.handle_id, failure.reason)

    def __repr__(self) -> str:
        state = "released" if self.is_released else f"length={self.length}, pending={self.pending}"
        return f"Cache({self.handle.handle_id}, {state})"

    def _repr_html_(self) -> str:
        return notebook.cache_html(self._tip, self._connection.block_size)

    def __del__(self) -> None:
        if "_tip" in self.__dict__ and not self.is_released:
            text = f"{self!r} was never released; its KV stays on the server until the lease ends: use `with`"
            self._calls.give_up()
            warnings.warn(text, ResourceWarning, source=self, stacklevel=1)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Cache cannot be pickled or copied: send cache.detach(), and adopt the handle there")

    @property
    def handle(self) -> Handle:
        """The handle at the tip: a value to keep, compare or send elsewhere.

        In the middle of a generation that was left early it may be a few tokens off ``length``; the next call that
        moves the cache, such as ``truncate(cache.length)``, puts that right.
        """
        return self._tip.handle

    @property
    def length(self) -> int:
        """Tokens in the KV cache; ``pending`` does not count."""
        return self._tip.length

    @property
    def pending(self) -> Token | None:
        """The token that the server has chosen and that the next append sends first, or None."""
        return self._tip.pending_token

    @property
    def last(self) -> Output:
        """The newest output, at first that of the prefill.

        Raises:
            RuntimeError: There is none: the handle was adopted, or the sequence truncated.
        """
        if self._tip.last is None:
            raise RuntimeError(
                "there is no output: the sequence was adopted or truncated; cache.step() chooses a token"
            )
        return self._tip.last

    @property
    def token_ids(self) -> list[int]:
        """The first ``length`` token ids, without asking the server.

        Raises:
            RuntimeError: They are not known: the handle was adopted, and ``info(token_ids=True)`` was not called yet.
        """
        ids = self._tip.token_ids
        if ids is None:
            raise RuntimeError("the tokens are not known, as of an adopted handle: call cache.info(token_ids=True)")
        return ids

    @property
    def is_released(self) -> bool:
        """True: the sequence was released or given away."""
        return self._tip.is_released

    @property
    def num_recoveries(self) -> int:
        """Times the sequence was lost and its tokens were prefilled into a new one."""
        return self._tip.num_recoveries

    def append(
        self,
        tokens: Tokens | str,
        *,
        parse_special_tokens: bool = False,
        policy: Policy | None = None,
        pending: Pending = "auto",
        all_positions: bool = False,
        on_stale: OnStale = "fail",
        timeout: Timeout = USE_DEFAULT,
    ) -> Output:
        r"""Append tokens and return the output of the last one; the handle covers them afterwards.

        A retry after a lost reply never appends twice: the server answers it as a replay. If this raises, also after a
        timeout, the cache has not moved: send the same tokens again, or go on with others (see the class).

        Args:
            tokens: One token id, several, or a text, which is encoded without special tokens around it. The pending
                token is sent before them; without any tokens, it alone.
            parse_special_tokens: As in ``Client.prefill``: leave it out for text from others, such as the result
                of a tool.
            policy: What to return for the row. None: nothing. A token that it chooses is pending afterwards.
            pending: What to do with a pending token. ``auto``: send it first, and once if ``tokens`` begins with that
                ``Token``. ``send``: send it first, whatever follows. ``drop``: replace it.
            all_positions: True: a row for every token that is sent, the pending one included, not only the last one.
            on_stale: What to do if somebody else appended to this sequence meanwhile. ``fork`` makes this cache follow
                the new branch.
            timeout: Seconds this may take, retries included.

        Raises:
            PendingTokenError: The tokens begin with an int equal to the pending token.
            HandleNotFoundError: The sequence is gone: prefill again.
            HandleStaleError: Somebody else has appended to the sequence.
            DeadlineExceededError: The timeout passed; send the same tokens again, or go on with others.
            TypeError: ``tokens`` or ``policy`` is of another type.
            ValueError: Another argument is out of its range, or ``target_logprobs`` of several tokens comes without
                ``all_positions``.
            InvalidRequestError: A token is out of the vocabulary, or the policy is not allowed.
            ContextExceededError: The context is full.
            ResourceExhaustedError: The pool or the queue is full now.
            FerruleError: Anything else, see ``errors``.

        Example:
            ``output = cache.append("\n\n", policy=greedy())``
        """
        item = Append(
            self,
            tokens,
            policy,
            pending,
            all_positions,
            on_stale=on_stale,
            parse_special_tokens=parse_special_tokens,
        )
        return self._calls.perform(item, timeout)

    decode = append

    def step(self, policy: Policy | None = None, *, redraw: bool = False, timeout: Timeout = USE_DEFAULT) -> Output:
        """Append the pending token and choose the next one; the loop of a client that decides each step.

        If no token is pending, the first one is chosen from the newest row and nothing is appended. The model's own
        stop tokens are tokens like any other here; only ``generate`` ends at them.

        After a failure call it again as it is: the pending token is still the same, and it is appended once. A policy
        without a seed may then choose another token than the one whose reply was lost.

        Args:
            policy: How to choose. None: the policy that chose last on this cache, or ``greedy()``.
            redraw: True: append nothing, and choose another token in the place of the pending one. A policy with a
                fixed seed needs another seed for it.
            timeout: Seconds this may take, retries included.

        Returns:
            The output; its ``token`` is pending.

        Raises:
            ValueError: The policy chooses no token.
            FerruleError: As in ``append``.

        Example:
            ``tokens = [cache.step(sample(temperature=0.7)).token for _ in range(20)]``
        """
        policy = _messages.choosing(policy or self._tip.policy or greedy())
        return self.append((), policy=policy, pending="drop" if redraw else "auto", timeout=timeout)

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        tokens: Tokens | str = (),
        parse_special_tokens: bool = False,
        policy: Policy | None = None,
        pending: Pending = "auto",
        n: int = 1,
        stop: Stops = (),
        ignore_eos: bool = False,
        text: WithText = False,
        on_stale: OnStale = "fail",
        timeout: Timeout = USE_DEFAULT,
    ) -> Generation:
        """Return an iterator over tokens drawn by the server, which runs the loop and streams them.

        Nothing runs before the first token is asked for. After each token the handle covers every token before it and
        the token itself is pending. Ctrl-C and ``break`` leave the cache usable.

        Args:
            max_tokens: Most tokens to draw for each branch; 0: nothing is sent at all. None: until a stop or the end of
                the context.
            tokens: Token ids or a text to append first, such as the next question.
            parse_special_tokens: As in ``append``.
            policy: How to choose. None: ``sample()``.
            pending: As in ``append``.
            n: Number of branches: the first one on this cache, each other on a new one; see ``caches`` of the iterator.
                Branch i draws with the seed of the policy plus i.
            stop: What ends a branch besides the model's own stop tokens: a text, a token id, or a list of texts, token
                ids and runs of token ids. Texts are found wherever they begin and need a tokenizer.
            ignore_eos: True: do not stop at the model's own stop tokens.
            text: True: each token has what it adds to the text, never half a character. Needs a tokenizer.
                ``pieces`` of the iterator sets it. The token of an end adds none, and the text ends before a ``stop``
                that is a text; what may begin one waits. ``"as_drawn"``: with that stop, and what follows it in the
                last token.
            on_stale: As in ``append``.
            timeout: Seconds one token may take, retries included.

        Returns:
            An iterator over tokens, with ``pieces``, ``read``, ``branches``, ``finish_reason`` and ``close``. A token
            that ends a branch is part of it.

        Raises:
            TypeError: An argument is of another type.
            ValueError: The policy chooses no token, or a number is out of its range.
            ContextExceededError: While iterating: the input does not fit, and nothing of it was appended. If the drawn
                tokens fill the context, the loop ends as ``context_full`` instead.
            FerruleError: While iterating, as in ``append``.

        Example:
            ``text = cache.generate(32, policy=sample(temperature=0.7), text=True).read().text``
        """
        plan = _messages.generation_plan(
            policy, max_tokens=max_tokens, n=n, stop=stop, ignore_eos=ignore_eos, text=text
        )
        _convert.stale_to_message(on_stale)
        return Generation(
            self._connection,
            plan,
            tokens,
            reads=Reading(parse_special_tokens),
            follow=self._sibling,
            cache=self,
            on_stale=on_stale,
            pending=pending,
            is_patient=self._calls.recovers,
            timeout=timeout,
        )

    def verify(
        self,
        draft: Sequence[int],
        *,
        tokens: Tokens | str = (),
        parse_special_tokens: bool = False,
        policy: Policy | None = None,
        acceptance: Acceptance | None = None,
        parents: Sequence[int] = (),
        draft_probs: DraftDistributions | None = None,
        masks: Sequence[MaskLike] = (),
        row_handles: bool = False,
        pending: Pending = "auto",
        on_stale: OnStale = "fail",
        timeout: Timeout = USE_DEFAULT,
    ) -> Verification:
        """Run draft tokens, keep those that hold, and return how many did.

        Afterwards the handle covers the certain tokens and the accepted drafts, and ``next_token`` is pending: a loop
        of ``verify`` calls needs no other bookkeeping. The model's own stop tokens do not end it.

        Args:
            draft: Draft token ids, a chain or a tree; may be empty. They follow the pending token, which is left out.
            tokens: Certain tokens that are not in the sequence yet, appended after the pending one. Together at least
                one.
            parse_special_tokens: As in ``append``.
            policy: What to return for the rows, and the distribution that the acceptance works with. None:
                ``sample()`` if there are ``draft_probs``, else ``greedy()``.
            acceptance: Who decides. ``greedy``: drafts hold while they are the most likely token. ``exact``: while they
                are what the policy would have chosen. ``rejection``: speculative sampling, after which the text has
                exactly the distribution of the policy. ``none``: you; everything is appended. None: ``rejection`` if
                there are ``draft_probs``, else ``exact``, or ``none`` if the policy chooses no tokens.
            parents: Row that each draft follows (row 0 is the last certain token, row r is draft r). Empty: a chain.
            draft_probs: Distributions that the drafts were drawn from, for ``rejection``: an array
                [drafts, vocab_size], or for each draft its probabilities by token id. None: the drafts were chosen with
                certainty.
            masks: Tokens that may follow each row (drafts + 1), in place of the policy's mask.
            row_handles: True: return a handle at row 0 and at each appended draft.
            pending: As in ``append``.
            on_stale: As in ``append``.
            timeout: Seconds this may take, retries included.

        Raises:
            PendingTokenError: ``tokens`` begin with an int equal to the pending token, or ``draft`` with the pending
                ``Token`` itself.
            UnsupportedError: The server does not serve it, or not with a tree.
            ValueError: There is no certain token, ``acceptance`` is not a rule or does not go with the policy, or there
                are more or fewer distributions or masks than needed.
            FerruleError: As in ``append``.

        Example:
            ``accepted = cache.verify(propose(cache.token_ids, 4)).accepted_count``
        """
        item = Verify(
            self,
            draft,
            tokens,
            policy,
            acceptance,
            parents,
            draft_probs,
            masks,
            row_handles,
            pending,
            on_stale,
            parse_special_tokens,
        )
        return self._calls.perform(item, timeout)

    @overload
    def fork(
        self,
        n: None = None,
        *,
        length: int | None = None,
        ttl: float | None = None,
        redraw: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> Cache: ...

    @overload
    def fork(
        self,
        n: int,
        *,
        length: int | None = None,
        ttl: float | None = None,
        redraw: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> Branches: ...

    def fork(
        self,
        n: int | None = None,
        *,
        length: int | None = None,
        ttl: float | None = None,
        redraw: bool = False,
        timeout: Timeout = USE_DEFAULT,
    ) -> Cache | Branches:
        """Return a new cache, or ``n`` of them, that share this one's blocks; a block is copied when a branch writes.

        Args:
            n: Number of branches. None: one, returned as a cache.
            length: Tokens at which to branch, without a pending token. None: at the tip.
            ttl: Lease of each branch in seconds. None: that of this sequence.
            redraw: True: leave the pending token out, so that each branch chooses its own. False: branches at the tip
                take it along.
            timeout: Seconds this may take, retries included.

        Returns:
            The cache, or the branches: a sequence of caches, and a context manager that releases them.

        Raises:
            InvalidRequestError: ``n`` is above the server's limit, or ``length`` above the cache's.
            ValueError: ``n`` or ``length`` is below 1, or ``ttl`` negative.
            FerruleError: As in ``append``.

        Example:
            ``with cache.fork(3) as branches: ...``
        """
        at_tip, timeout = length is None, self._connection.until(timeout)
        if self._tip.is_cutting:
            self._calls.drop_beyond(timeout)
        wanted = self._tip.length if at_tip and self._tip.beyond else length
        request = _messages.fork_request(self._tip.live_handle(), 1 if n is None else n, wanted, self._tip.length, ttl)
        reply = self._calls.call_once_more(self._connection.executor.ForkCache, request, timeout, creates=True)
        ttl_s = _convert.granted_ttl_s(reply)
        handles = map(_convert.handle_from_message, reply.kv_caches)
        tips = [self._tip.branch(one, at_tip=at_tip, redraw=redraw, ttl_s=ttl_s) for one in handles]
        caches = [self._sibling(tip, ttl) for tip in tips]
        return caches[0] if n is None else Branches(self._connection, caches)

    def truncate(self, length: int, *, timeout: Timeout = USE_DEFAULT) -> int:
        """Shorten the sequence to exactly ``length`` tokens and return the number of blocks that became free.

        The pending token is dropped; ``truncate(cache.length)`` does only that. If no answer comes, truncate again
        before anything else: the handle may name tokens that are gone.

        Args:
            length: Tokens to keep, from 1 to ``cache.length``.
            timeout: Seconds this may take, retries included.

        Returns:
            Blocks that went back to the pool; those shared with other sequences do not count.

        Raises:
            TruncateBeyondError: ``length`` is out of that range.
            FerruleError: As in ``append``.

        Example:
            ``cache.truncate(cache.length - 3)``
        """
        return self._calls.truncate(length, timeout=timeout)

    def reserve(self, length: int, *, timeout: Timeout = USE_DEFAULT) -> int:
        """Reserve room for appends up to ``length`` tokens now, and return the number of blocks that it took.

        Until then appends cannot run out of blocks, however full the pool gets. The room is kept until the release,
        also by ``truncate``; forks do not inherit it. Asking again for as much or less takes nothing.

        Args:
            length: Length of the sequence in tokens; not how many more.
            timeout: Seconds this may take, retries included.

        Raises:
            BlocksExhaustedError: The pool has too few free blocks now; nothing was taken.
            QuotaExceededError: It would exceed the caller's quota of KV tokens.
            OutOfRangeError: ``length`` is beyond the context or the whole pool.
            ValueError: ``length`` is not a whole number.
            FerruleError: As in ``append``.

        Example:
            ``cache.reserve(cache.length + 256)``
        """
        request = _messages.reserve_request([self._tip.live_handle()], length, None)
        reply = self._calls.call_once_more(self._connection.executor.ReserveKvSlots, request, timeout)
        self._calls.reserved(length)
        return _convert.reservation_from_message(reply.reservation).new_blocks[0]

    def info(self, *, token_ids: bool = False, blocks: bool = False, timeout: Timeout = USE_DEFAULT) -> CacheInfo:
        """Return the server's state of the sequence; renews its lease and changes nothing else.

        Args:
            token_ids: True: with all token ids.
            blocks: True: with block ids and reference counts.
            timeout: Seconds this may take, retries included.

        Returns:
            The state, with the handle at the sequence's own tip.

        Raises:
            HandleNotFoundError: The sequence is gone.
            FerruleError: Anything else, see ``errors``.

        Example:
            ``shared = cache.info().num_shared_blocks``
        """
        return self._calls.info(token_ids=token_ids, blocks=blocks, timeout=timeout)

    def release(self, *, timeout: Timeout = USE_DEFAULT) -> Released:
        """End the sequence and free its blocks. Leaving ``with`` does it; releasing twice changes nothing.

        Args:
            timeout: Seconds this may take, retries included.

        Raises:
            FerruleError: The server was not reached, or the client is closed; the lease will end the sequence.

        Example:
            ``freed = cache.release().freed_blocks``
        """
        if self.is_released:
            return Released((False,), 0)
        return release_all(self._connection, [self], timeout)

    def detach(self) -> Handle:
        """Give the sequence away and return its handle: no release, no keep-alive, no warning from here on.

        The new owner continues with ``Client.adopt``; until then the lease runs. The handle does not include a
        pending token: pass it on too, or append it first. If a loop was left early or an append was not answered, the
        sequence may hold more than the handle: truncate first, or have the new owner append with
        ``on_stale="rewind"``.

        Raises:
            RuntimeError: A generation was left early and the handle is not at ``length``.

        Example:
            ``queue.put(cache.detach())``
        """
        if self._tip.beyond:
            raise RuntimeError("the handle is not that of the newest token: call cache.truncate(cache.length) first")
        return self._calls.give_up().handle

    def _sibling(self, tip: Tip, ttl: float | None = None) -> Cache:
        """Return the cache of a branch of this sequence, for whose lease so many seconds were asked for, if any."""
        return Cache(self._connection, self._calls.of_branch(tip, ttl))


publish(globals(), ("Cache",))
