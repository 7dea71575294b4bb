"""What the client knows about the newest state of one sequence. Shared by a cache, its generations and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

from ferrule.v1 import executor_pb2, types_pb2
from ferrule_client import _check, _convert, _messages
from ferrule_client._messages import Appended, Input
from ferrule_client._status import may_have_happened
from ferrule_client._token_log import TokenLog
from ferrule_client.errors import (
    DeadlineExceededError,
    FerruleError,
    HandleNotFoundError,
    InstanceUnreachableError,
    PendingTokenError,
)
from ferrule_client.items import Append, Item, Verify
from ferrule_client.policy import Policy, seeded
from ferrule_client.types import Handle, OnStale, Output, Pending, Token

_R = TypeVar("_R")

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


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Tip:
    """The moving end of one sequence.

    The text that a caller has seen is the first ``length`` tokens of ``handle``, then ``pending``: the newest token
    that the server has chosen, which is not in the KV cache yet and is sent before whatever is appended next. A frame
    of a generation may bring several tokens but one handle, which covers all of them but the last. While they are
    handed out, ``handle`` is ahead of what was seen, and ``beyond`` begins with the pending token::

        text     [ length ................. | pending: t1 ]
        handle   [ length ................. | beyond:  t1 t2 t3 ]             t4 becomes pending once they are out

    Attributes:
        handle: Covers the first ``length`` tokens, then those of ``beyond``.
        last: Output of the newest call, or None for an adopted handle.
        log: The first ``length`` token ids, as far as they are known.
        ttl_s: The granted lease in seconds, or None if the server has not said it.
        beyond: Tokens of a frame that ``handle`` covers though it was not handed out whole yet.
        is_cutting: True: a truncate that drops ``beyond`` was sent, and no answer came: ``handle`` may be stale.
        pending: The token that the server has chosen and that is not in the KV cache yet, if there is one.
        policy: The policy that chose a token last; None: none has.
        doubts: Tokens of appends whose answer never came: after ``handle`` stands one of them, a beginning of one
            (a verify that took some of its drafts), or nothing. An append that succeeds ends them.
        is_ahead: True: a generation drew on the server, and more may stand there than was handed out; what is appended
            next drops it. An append that is not a replay ends this.
        running: Ends the generation that draws on the sequence now; None: none does.
        is_released: True: the sequence is gone, or no longer ours.
        is_in_use: True: a call is moving it; a second one meanwhile would go by a state that is about to pass.
        num_recoveries: Times the sequence was lost and its tokens were prefilled into a new one.
        durability: What the server has said of it last: ``none`` or ``journaled``; empty: nothing.
    """

    handle: Handle
    last: Output | None = None
    log: TokenLog = field(default_factory=TokenLog)
    ttl_s: float | None = None
    beyond: tuple[int, ...] = ()
    is_cutting: bool = False
    pending: tuple[int, ...] = ()
    policy: Policy | None = None
    doubts: frozenset[tuple[int, ...]] = frozenset()
    is_ahead: bool = False
    running: Callable[[], None] | None = None
    is_released: bool = False
    is_in_use: bool = False
    num_recoveries: int = 0
    durability: str = ""

    def __post_init__(self) -> None:
        self._check_log()

    @property
    def length(self) -> int:
        """Tokens handed out that are in the KV cache."""
        return self.handle.length - len(self.beyond)

    @property
    def pending_token(self) -> Token | None:
        """The token that the server has chosen and that is not in the KV cache yet, or None."""
        return Token(self.pending[0], self.last) if self.pending and self.last is not None else None

    @property
    def token_ids(self) -> list[int] | None:
        """The first ``length`` token ids, or None if some of them never passed through here."""
        return self.log.to_list() if self.log.is_whole else None

    def branch(self, handle: Handle, *, at_tip: bool, redraw: bool = False, ttl_s: float | None = None) -> Tip:
        """Return the tip of a branch. At the tip the pending token is pending there too, unless it is drawn again."""
        pending = self.pending if at_tip and not redraw else ()
        last, log = self.last if at_tip else None, self.log.branch(handle.length)
        return Tip(handle, last, log, ttl_s, pending=pending, policy=self.policy)

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
            ValueError: ``pending`` is not one of the three words, or they begin with an earlier token of the sequence.
        """
        _check.choice("pending", pending, get_args(Pending))
        if pending == "drop":
            return list(tokens)
        if pending == "auto" and tokens:
            if self.is_pending(given[0]):
                tokens = tokens[1:]
            elif self.pending == (tokens[0],):
                raise PendingTokenError(tokens[0])
            else:
                self._check_new(given[0])
        return [*self.pending, *tokens]

    def _check_new(self, token: object) -> None:
        """Refuse a token that was chosen at an earlier place of this sequence: to append it again is a mistake."""
        if not isinstance(token, Token) or token.output.handle.cache_id != self.handle.cache_id:
            return
        if token.position < self.length:
            text = f"token {int(token)} was chosen for position {token.position} of this sequence and is there already"
            raise ValueError(f"{text}; to append the same id again pass int(token)")

    def is_pending(self, token: object) -> bool:
        """Return whether a token is the pending one: chosen at this place, after these tokens."""
        if not isinstance(token, Token) or self.last is None or self.pending != (token,):
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
            request_id=_messages.new_request_id() if stale == types_pb2.STALE_POLICY_FORK else "",
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
        beyond: Sequence[int] = (),
    ) -> Output:
        """Take over the state after an append and return its output.

        Args:
            appended: The tokens that went into the sequence, the formerly pending ones included.
            output: What the server answered.
            policy: The policy of the append: if it chose a token, that is pending.
            pending: Tokens that are pending by other rules.
            beyond: Tokens that the new handle covers besides.
        """
        self.doubts = self._doubts_after(tuple(appended), output)
        if appended and not output.replayed:
            self.is_ahead = False
        self.handle, self.beyond, self.is_cutting = output.handle, tuple(beyond), False
        self.last, self.pending = output, tuple(pending)
        self.log.extend(appended)
        self._check_log()
        self.choose(output, policy)
        return output

    def drew(self, token: int, output: Output, *, fed: Sequence[int], beyond: Sequence[int]) -> Output:
        """Take over one token that a generation drew, which is pending from here on, and return its output.

        Args:
            token: The token.
            output: What came with it.
            fed: Tokens that went in before the first one, after what was pending.
            beyond: As in ``moved``.
        """
        before = (*self.pending, *fed)
        if not (before or self.beyond) and output.handle.cache_id == self.handle.cache_id:  # as exact as it gets
            output, beyond = replace(output, handle=self.handle, ahead=0), ()
        self.moved(before, output, pending=(token,), beyond=beyond)
        self.is_ahead = True
        return output

    def settled(self, item: Item[_R], sent: Input, result: Appended) -> _R:
        """Take over the state after an append or a verify, and return what that brought."""
        settled: Any  # of the kind of the item
        if isinstance(item, Append):
            output = _convert.output_from_message(result)
            settled = self.moved(_messages.tokens_of(sent), output, item.policy if item.is_final else None)
        else:
            assert isinstance(item, Verify)
            assert isinstance(sent, executor_pb2.VerifyInput)
            assert isinstance(result, executor_pb2.VerifyOutput)
            settled = _convert.verification_from_message(result)
            output, certain, drafts = settled.output, sent.input_ids, sent.draft_ids
            num_held = max(0, output.handle.length - self.length - len(certain))
            path = [drafts[row - 1] for row in settled.accepted_indices] if len(item.parents) else drafts
            chosen = output.tokens[-1:] if settled.has_next else ()
            self.moved([*certain, *path[:num_held]], output, pending=chosen)
            self.policy = (item.policy if settled.has_next else None) or self.policy
        return settled  # type: ignore[no-any-return]

    def cut(self, handle: Handle) -> None:
        """Take over the state after a truncate: exactly the tokens of ``handle``, nothing pending.

        A generation that was ended just before may still get a token in, so ``is_ahead`` stays.
        """
        self.log.cut(handle.length)
        self.handle, self.beyond, self.is_cutting = handle, (), False
        self.last, self.pending, self.doubts = None, (), frozenset()
        self._check_log()

    def learn(self, handle: Handle, token_ids: Sequence[int]) -> None:
        """Take note of the tokens of a state that the server told; those of another state than ours say nothing."""
        if handle == self.handle and not self.log.is_whole:
            self.log = TokenLog(token_ids[: self.length])

    def revive(self, handle: Handle, ttl_s: float | None) -> None:
        """Take over a new sequence of the same tokens."""
        self.handle, self.ttl_s = handle, ttl_s
        self.doubts, self.is_ahead, self.is_cutting = frozenset(), False, False
        self.num_recoveries += 1

    def _check_log(self) -> None:
        """Forget the text if it is not as long as the sequence: what the server holds decides."""
        if self.log.end != self.length:
            self.log.forget(self.length)

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
        num = len(appended)
        return frozenset(one[num:] for one in self.doubts if len(one) > num and one[:num] == appended)
