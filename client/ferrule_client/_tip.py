"""What the client knows about the newest state of one sequence. Shared by a cache, its generations and streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ferrule.v1 import executor_pb2
from ferrule_client import _convert
from ferrule_client._status import may_have_happened
from ferrule_client.errors import DeadlineExceededError
from ferrule_client.policy import Policy, seeded
from ferrule_client.types import Handle, OnStale, Output

__all__ = ["Tip"]

_NUM_RECENT = 8
_ADVICE = "the cache has not moved: send the same tokens again, which doubles nothing, or go on with others"


class Tip:
    """The moving end of one sequence.

    The text that a caller has seen is what ``handle`` covers followed by ``pending``: tokens that were handed out and
    are not in the KV cache yet (none, or one). Whatever is appended next is sent behind them.

    Attributes:
        handle: Covers every token that is in the KV cache.
        pending: Tokens handed out by a generation or a verify and not appended yet.
        last: Output of the newest call, or None for an adopted handle.
        doubts: Tokens of appends whose answer never came: behind ``handle`` stands one of them, a beginning of one
            (a verify that took some of its drafts), or nothing. An append that succeeds ends them.
        is_released: True: the sequence is gone, or no longer ours.
        recent: The newest token ids up to ``handle``, as far as they passed through here, at most 8. They give a
            detokenizer its left context.
    """

    __slots__ = ("__weakref__", "doubts", "handle", "is_released", "last", "pending", "recent")

    def __init__(self, handle: Handle, *, last: Output | None = None, recent: Sequence[int] = ()) -> None:
        self.handle = handle
        self.last = last
        self.pending: tuple[int, ...] = ()
        self.doubts: frozenset[tuple[int, ...]] = frozenset()
        self.is_released = False
        self.recent = tuple(recent[-_NUM_RECENT:])

    def branch(self, handle: Handle, *, at_tip: bool) -> Tip:
        """Return the tip of a branch; one that starts at the tip takes the pending tokens along."""
        tip = Tip(handle, last=self.last if at_tip else None, recent=self.recent if at_tip else ())
        tip.pending = self.pending if at_tip else ()
        return tip

    def decode_input(
        self, tokens: Sequence[int], policy: Policy | None, on_stale: OnStale = "fail"
    ) -> executor_pb2.DecodeInput:
        """Return the append of the pending tokens and then ``tokens``; of nothing at all, it is a query.

        Raises:
            RuntimeError: The sequence was released.
        """
        if self.is_released:
            raise RuntimeError(f"the sequence of {self.handle!r} was released")
        return executor_pb2.DecodeInput(
            input_ids=[*self.pending, *tokens],
            kv_cache=_convert.handle_to_message(self.handle),
            logits_policy=_convert.policy_to_message(seeded(policy)),
            on_stale=_convert.stale_to_message(on_stale),
        )

    @contextmanager
    def sending(self, sent: Sequence[int]) -> Iterator[None]:
        """Remember tokens as doubtful when the body, which sends them, fails without a clear answer."""
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
        """Tell whether tokens differ from a doubtful append, so that they are no repetition of it."""
        return any(tuple(tokens) != doubt[: len(tokens)] for doubt in self.doubts)

    def explains(self, beyond: tuple[int, ...]) -> bool:
        """Tell whether what the server has behind the handle is nothing but a doubtful append of ours."""
        return not beyond or any(beyond == doubt[: len(beyond)] for doubt in self.doubts)

    def moved(self, appended: Sequence[int], output: Output, *, pending: Sequence[int] = ()) -> Output:
        """Take over the state after an append and return its output.

        Args:
            appended: The tokens that went into the sequence, the formerly pending ones included.
            output: What the server answered.
            pending: Tokens handed out with this output.
        """
        self.doubts = self._doubts_after(tuple(appended), output)
        self.handle = output.handle
        self.last = output
        self.pending = tuple(pending)
        self.recent = (*self.recent, *appended)[-_NUM_RECENT:]
        return output

    def cut(self, handle: Handle) -> None:
        """Take over the state after a truncate: exactly the tokens of ``handle``, nothing pending."""
        self.handle = handle
        self.last = None
        self.pending = ()
        self.doubts = frozenset()
        self.recent = ()

    def _doubts_after(self, appended: tuple[int, ...], output: Output) -> frozenset[tuple[int, ...]]:
        """Return what is still in doubt: of appends that were repeated in part, the rest."""
        if not appended:
            return self.doubts
        if not output.replayed or output.handle.cache_id != self.handle.cache_id:
            return frozenset()
        num, begins = output.handle.length - self.handle.length, len(appended)
        return frozenset(one[num:] for one in self.doubts if len(one) > num and one[:begins] == appended)
