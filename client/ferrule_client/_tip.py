"""What the client knows about the newest state of one sequence. Shared by a cache, its generations and streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

from ferrule.v1 import executor_pb2, types_pb2
from ferrule_client import _check, _convert
from ferrule_client._messages import new_request_id
from ferrule_client._status import may_have_happened
from ferrule_client._token_log import TokenLog
from ferrule_client.errors import (
    DeadlineExceededError,
    FerruleError,
    HandleNotFoundError,
    InstanceUnreachableError,
    PendingTokenError,
)
from ferrule_client.policy import Policy, seeded
from ferrule_client.types import Handle, OnStale, Output, Pending, Token, Verification

__all__ = ["Tip", "using"]

_ADVICE = "the cache has not moved: send the same tokens again, which doubles nothing, or go on with others"


@contextmanager
def using(*tips: Tip) -> Iterator[None]:
    """Keep other calls away from sequences while the body moves them; one may be named several times.

    Raises:
        RuntimeError: Another call is moving one of them.
    """
    for tip in tips:
        if tip.is_in_use:
            text = f"two calls at once on the cache of {tip.handle!r}"
            raise RuntimeError(f"{text}: wait for the first, or give each a fork of its own")
    try:
        for tip in tips:
            tip.is_in_use = True
        yield
    finally:
        for tip in tips:
            tip.is_in_use = False


class Tip:
    """The moving end of one sequence.

    The text that a caller has seen is what ``handle`` covers followed by ``pending``: tokens that were handed out and
    that ``handle`` does not cover. Whatever is appended next is sent after them. As a rule there are none or one, the
    newest, which is not in the KV cache yet. A frame of a generation may bring several tokens, but one handle, which
    covers all of them but the last; while it is handed out, ``handle`` lags behind::

        text   [ handle .............. | pending: t0 t1 t2 ]          t0 and t1 are in the KV cache, t2 is not
        ahead  [ ahead_handle .................................. ]    the frame's own handle, t3 and t4 still to come

    Attributes:
        handle: Covers tokens that are in the KV cache: all of those handed out, unless it lags behind.
        pending: Tokens that the server has chosen and that ``handle`` does not cover.
        policy: The policy that chose a token last; None: none has.
        ahead_handle: While ``handle`` lags behind: one of the same sequence that does not. None: it does not lag.
        num_unseen: Tokens that ``handle`` covers beyond ``length``: where the first frame of a new branch brings
            several, there is no handle of an earlier state.
        last: Output of the newest call, or None for an adopted handle.
        doubts: Tokens of appends whose answer never came: after ``handle`` stands one of them, a beginning of one
            (a verify that took some of its drafts), or nothing. An append that succeeds ends them.
        is_ahead: True: a generation drew on the server, and more may stand there than was handed out; what is appended
            next drops it. An append that is not a replay ends this.
        running: Ends the generation that draws on the sequence now; None: none does.
        is_released: True: the sequence is gone, or no longer ours.
        is_in_use: True: a call is moving it; a second one meanwhile would go by a state that is about to pass.
        log: The token ids up to ``handle``, as far as they are known.
        ttl_s: The granted lease in seconds, or None if the server has not said it.
        num_recoveries: Times the sequence was lost and its tokens were prefilled into a new one.
    """

    __slots__ = (
        "__weakref__",
        "ahead_handle",
        "doubts",
        "handle",
        "is_ahead",
        "is_in_use",
        "is_released",
        "last",
        "log",
        "num_recoveries",
        "num_unseen",
        "pending",
        "policy",
        "running",
        "ttl_s",
    )

    def __init__(
        self, handle: Handle, *, last: Output | None = None, log: TokenLog | None = None, ttl_s: float | None = None
    ) -> None:
        self.handle = handle
        self.last = last
        self.pending: tuple[int, ...] = ()
        self.policy: Policy | None = None
        self.ahead_handle: Handle | None = None
        self.num_unseen = 0
        self.doubts: frozenset[tuple[int, ...]] = frozenset()
        self.is_ahead = False
        self.running: Callable[[], None] | None = None
        self.is_released = False
        self.is_in_use = False
        self.log = TokenLog(start=handle.length) if log is None else log
        self.ttl_s = ttl_s
        self.num_recoveries = 0

    @property
    def length(self) -> int:
        """Tokens handed out that are in the KV cache."""
        return self.handle.length - self.num_unseen + max(0, len(self.pending) - 1)

    @property
    def pending_token(self) -> Token | None:
        """The token that the server has chosen and that is not in the KV cache yet, or None."""
        if not self.pending or self.last is None:
            return None
        return Token(self.pending[-1], self.last)

    @property
    def is_exact(self) -> bool:
        """True: ``handle`` covers the first ``length`` tokens, as it does but in the middle of a generation."""
        return self.handle.length == self.length

    @property
    def seen_ids(self) -> list[int] | None:
        """The first ``length`` token ids, or None if some of them never passed through here."""
        return [*self.log.to_list(), *self.pending[:-1]][: self.length] if self.log.is_whole else None

    @property
    def token_ids(self) -> list[int] | None:
        """The token ids that ``handle`` covers, or None if some of them never passed through here."""
        return self.log.to_list() if self.log.is_whole else None

    def at(self, length: int) -> Handle:
        """Return a handle of a sequence that is still ours, which covers so many of the tokens handed out.

        Raises:
            RuntimeError: It was released.
        """
        handle = self.live_handle()
        return self.ahead_handle if self.ahead_handle is not None and length > handle.length else handle

    def branch(self, handle: Handle, *, at_tip: bool, redraw: bool = False, ttl_s: float | None = None) -> Tip:
        """Return the tip of a branch. At the tip the pending token is pending there too, unless it is drawn again."""
        log = self.log.branch()
        log.extend(self.pending[:-1])
        log.cut(handle.length)
        tip = Tip(handle, last=self.last if at_tip else None, log=log, ttl_s=ttl_s)
        tip.pending = self.pending[-1:] if at_tip and not redraw else ()
        tip.policy = self.policy
        return tip

    def child(self, output: Output, log: TokenLog, policy: Policy | None) -> Tip:
        """Return the tip of a branch that an append made.

        Args:
            output: What the server answered.
            log: Its token ids.
            policy: The policy of the append.
        """
        if log.end != output.handle.length:
            log.forget(output.handle.length)
        tip = Tip(output.handle, last=output, log=log, ttl_s=self.ttl_s)
        tip.policy = self.policy
        tip.choose(output, policy)
        return tip

    def choose(self, output: Output, policy: Policy | None) -> None:
        """Make the token that an append has chosen pending, if its policy chose one."""
        if policy is not None and policy.selection is not None:
            self.policy = policy
            self.pending = output.tokens[-1:]

    def joined(self, tokens: Sequence[int], given: Sequence[int], pending: Pending) -> list[int]:
        """Return what an append of ``tokens`` sends: the pending token first, unless it is replaced.

        Args:
            tokens: The token ids as plain ints.
            given: The same as the caller gave them, which may begin with the pending ``Token`` itself.
            pending: What to do with the pending token.

        Raises:
            PendingTokenError: They begin with an int equal to the pending token.
            ValueError: ``pending`` is not one of the three words.
        """
        _check.choice("pending", pending, get_args(Pending))
        if pending == "drop":
            return [*self.pending[:-1], *tokens]
        if pending == "auto" and tokens:
            if self.is_pending(given[0]):
                tokens = tokens[1:]
            elif self.pending[-1:] == (tokens[0],):
                raise PendingTokenError(tokens[0])
            else:
                self._check_new(given[0])
        return [*self.pending, *tokens]

    def _check_new(self, token: object) -> None:
        """Make sure that a token is not one that the sequence holds already.

        Raises:
            ValueError: It was chosen at an earlier place of this sequence, so it is a mistake to append it again.
        """
        if not isinstance(token, Token) or token.output.handle.cache_id != self.handle.cache_id:
            return
        if token.position < self.length:
            text = f"token {int(token)} was chosen for position {token.position} of this sequence and is there already"
            raise ValueError(f"{text}; to append the same id again pass int(token)")

    def is_pending(self, token: object) -> bool:
        """Return whether a token is the pending one: chosen at this place, after these tokens."""
        if not isinstance(token, Token) or self.last is None or self.pending[-1:] != (token,):
            return False
        own = Token(token, self.last)
        if token.output is self.last:
            return True
        is_here = token.position == own.position
        if own.lineage is None or token.lineage is None:
            return is_here and token.output.handle.cache_id == self.handle.cache_id
        return is_here and token.lineage == own.lineage

    def decode_input(
        self, token_ids: Sequence[int], policy: Policy | None, on_stale: OnStale = "fail"
    ) -> executor_pb2.DecodeInput:
        """Return the append of tokens, the pending ones included; of no tokens it reads the newest row again.

        Raises:
            RuntimeError: The sequence was released.
        """
        stale = _convert.stale_to_message(on_stale)
        return executor_pb2.DecodeInput(
            request_id=new_request_id() if stale == types_pb2.STALE_POLICY_FORK else "",
            input_ids=token_ids,
            kv_cache=_convert.handle_to_message(self.live_handle()),
            logits_policy=_convert.policy_to_message(seeded(policy)),
            on_stale=stale,
        )

    def live_handle(self) -> Handle:
        """Return the handle of a sequence that is still ours.

        Raises:
            RuntimeError: It was released.
        """
        if self.is_released:
            raise RuntimeError(f"the sequence of {self.handle!r} was released")
        return self.handle

    def interrupt(self) -> None:
        """End the generation that draws on the sequence, because something else is about to move it."""
        if self.running is not None and not self.is_in_use:
            end, self.running = self.running, None
            end()

    @contextmanager
    def sending(self, sent: Sequence[int]) -> Iterator[None]:
        """Remember tokens as doubtful when the body, which sends them, fails without a clear answer.

        Raises:
            RuntimeError: Another call is moving the sequence.
        """
        with using(self):
            try:
                yield
            except BaseException as error:
                self.doubt(sent, error)
                raise

    def doubt(self, sent: Sequence[int], error: BaseException) -> None:
        """Remember that an append failed, if it may have happened all the same."""
        if sent and may_have_happened(error):
            self.doubts |= {tuple(sent)}
            if isinstance(error, DeadlineExceededError) and _ADVICE not in getattr(error, "__notes__", ()):
                error.add_note(_ADVICE)

    def contradicts(self, tokens: Sequence[int]) -> bool:
        """Return whether tokens differ from a doubtful append, so that they are not a repetition of it."""
        return any(tuple(tokens) != doubt[: len(tokens)] for doubt in self.doubts)

    def explains(self, beyond: tuple[int, ...]) -> bool:
        """Return whether what the server has after the handle is nothing but a doubtful append of ours."""
        return not beyond or any(beyond == doubt[: len(beyond)] for doubt in self.doubts)

    def moved(
        self,
        appended: Sequence[int],
        output: Output,
        policy: Policy | None = None,
        *,
        pending: Sequence[int] = (),
    ) -> Output:
        """Take over the state after an append and return its output.

        Args:
            appended: The tokens that went into the sequence, the formerly pending ones included.
            output: What the server answered.
            policy: The policy of the append: if it chose a token, that is pending.
            pending: Tokens that are pending by other rules.
        """
        self.doubts = self._doubts_after(tuple(appended), output)
        if appended and not output.replayed:
            self.is_ahead = False
        self.handle, self.ahead_handle = output.handle, None
        self.last = output
        self.pending = tuple(pending)
        self.log.extend(appended)
        if self.log.end != output.handle.length:  # what the server holds decides; a text that differs is no text
            self.log.forget(output.handle.length)
        self.choose(output, policy)
        return output

    def told(self, token: int, output: Output) -> None:
        """Take over one more token of the first frame of a new branch, but the last one."""
        self.num_unseen -= len(self.pending)
        self.last, self.pending = output, (token,)

    def drew(self, token: int, output: Output, *, fed: Sequence[int] = (), is_covered: bool = True) -> Output:
        """Take over one token that a generation drew, which is pending from here on, and return its output.

        Args:
            token: The token.
            output: What came with it.
            fed: Tokens that went in before the first one, after what was pending.
            is_covered: True: the handle of ``output`` covers all before the token. False: that one comes with a later
                token, and the handle stays where it is.
        """
        before = () if self.num_unseen else (*self.pending, *fed)
        self.num_unseen = 0
        if is_covered:
            self.moved(before, output, pending=(token,))
        else:
            self.ahead_handle = output.handle
            self.pending = (*before, token)
            self.last = output = dataclasses.replace(output, handle=self.handle, ahead=len(self.pending) - 1)
        self.is_ahead = True
        return output

    def verified(
        self,
        certain: Sequence[int],
        drafts: Sequence[int],
        parents: Sequence[int],
        verification: Verification,
        policy: Policy | None = None,
    ) -> Verification:
        """Take over the state after a verify and return what it brought; its next token is pending from here on.

        Args:
            certain: The tokens that went into the sequence before the drafts.
            drafts: The drafts.
            parents: Row that each draft follows; empty: a chain.
            verification: What the server answered.
            policy: The policy that chose its next token.
        """
        output = verification.output
        num_held = max(0, output.handle.length - self.handle.length - len(certain))
        path = [drafts[row - 1] for row in verification.accepted_indices] if len(parents) else drafts
        self.moved([*certain, *path[:num_held]], output, pending=output.tokens[-1:] if verification.has_next else ())
        if verification.has_next and policy is not None:
            self.policy = policy
        return verification

    def cut(self, handle: Handle) -> None:
        """Take over the state after a truncate: exactly the tokens of ``handle``, nothing pending.

        A generation that was ended just before may still get a token in, so ``is_ahead`` stays.
        """
        self.log.extend(self.pending[:-1])
        self.log.cut(handle.length)
        self.handle, self.ahead_handle, self.num_unseen = handle, None, 0
        self.last = None
        self.pending = ()
        self.doubts = frozenset()

    def learn(self, handle: Handle, token_ids: Sequence[int]) -> None:
        """Take note of the tokens of a state that the server told; those of another state than ours say nothing."""
        if handle == self.handle and not self.log.is_whole:
            self.log = TokenLog(token_ids)

    def revive(self, handle: Handle, ttl_s: float | None) -> None:
        """Take over a new sequence of the same tokens, or of all that were handed out but the pending one."""
        if handle.length > self.handle.length:
            self.log.extend(self.pending[:-1])
            self.pending = self.pending[-1:]
        self.handle, self.ahead_handle = handle, None
        self.ttl_s = ttl_s
        self.doubts = frozenset()
        self.is_ahead = False
        self.num_recoveries += 1

    def tell(self, error: FerruleError) -> None:
        """Put on an error that says the sequence is gone what it takes to prefill it again."""
        if isinstance(error, (HandleNotFoundError, InstanceUnreachableError)):
            error.token_ids = self.token_ids
            error.pending = self.pending

    def _doubts_after(self, appended: tuple[int, ...], output: Output) -> frozenset[tuple[int, ...]]:
        """Return what is still in doubt: of appends that were repeated in part, the rest."""
        if not appended:
            return self.doubts
        if not output.replayed or output.handle.cache_id != self.handle.cache_id:
            return frozenset()
        num, begins = output.handle.length - self.handle.length, len(appended)
        return frozenset(one[num:] for one in self.doubts if len(one) > num and one[:begins] == appended)
