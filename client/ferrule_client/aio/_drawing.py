"""What a generation keeps of each of its branches, and of the calls that draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrule.v1 import executor_pb2
from ferrule_client.aio._calls import tip_of
from ferrule_client.aio._stream_call import OpenCall
from ferrule_client.errors import FerruleError
from ferrule_client.types import FinishReason, Output

if TYPE_CHECKING:
    from ferrule_client.aio.cache import AsyncCache


class AsyncBranch:
    """One continuation in the making; a generation has one, or several with a seed each.

    Attributes:
        index: Its number, from 0.
        tokens: Token ids handed out so far.
        text: Their text, if it was asked for.
        seed: Seed of its draws, or None where nothing is drawn.
        finish_reason: Why it ended, or None while it goes on.
        error: What it failed with, if it did.
        cached_tokens: Tokens of the prompt that came out of the prefix cache; there with the first token.
    """

    def __init__(self, index: int, seed: int | None, cache: AsyncCache | None) -> None:
        self.index = index
        self.seed = seed
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.error: FerruleError | None = None
        self.cached_tokens = 0
        self._cache = cache

    def __repr__(self) -> str:
        return f"AsyncBranch({self.index}, {self.state})"

    @property
    def state(self) -> str:
        """How far it is, for people: ``12 tokens, running``, or why it ended."""
        return f"{len(self.tokens)} tokens, {self.finish_reason or 'running'}"

    @property
    def has_cache(self) -> bool:
        """True: it has a sequence. That of a new one is there with its first token."""
        return self._cache is not None

    @property
    def cache(self) -> AsyncCache:
        """Its sequence; ``pending`` of it is the newest token.

        Raises:
            RuntimeError: Nothing has come of it yet.
        """
        if self._cache is None:
            raise RuntimeError(f"branch {self.index} has no sequence yet: it is there with its first token")
        return self._cache

    def attach(self, cache: AsyncCache) -> None:
        """Take a sequence, once the first token has come."""
        self._cache = cache


class Course:
    """How one branch comes about.

    Attributes:
        branch: What the caller sees of it.
        leg: The call that draws it now; None: none does.
        start: The request that draws it from where it began once more, if that is of use and it can.
        is_moved: True: the caller has moved its sequence by another call.
        was_ahead: True: the server had drawn tokens before that were not handed out, and it may end among them. None:
            to be told at the next call, because there was none yet or the caller has moved its sequence since.
    """

    def __init__(self, branch: AsyncBranch) -> None:
        self.branch = branch
        self.leg: Leg | None = None
        self.start: executor_pb2.GenerateRequest | None = None
        self.is_moved = False
        self.was_ahead: bool | None = None

    @property
    def goes_on(self) -> bool:
        """True: it has not ended."""
        return self.branch.finish_reason is None

    def enter(self, leg: Leg) -> None:
        """Be drawn by a call from here on."""
        self.leg, self.is_moved = leg, False
        if self.branch.has_cache:
            tip = tip_of(self.branch.cache)
            self.was_ahead = tip.is_ahead and self.was_ahead is not False
            tip.is_ahead, tip.running = True, self.give_way

    def leave(self) -> None:
        """Be drawn by no call for now, so that the next one interrupts none."""
        if self.branch.has_cache and tip_of(self.branch.cache).running == self.give_way:
            tip_of(self.branch.cache).running = None

    def end(self) -> None:
        """Have come to the end: what the server may have beyond was there before."""
        tip = tip_of(self.branch.cache)
        tip.is_ahead, tip.running = bool(self.was_ahead), None

    def give_way(self) -> None:
        """End the call that draws it, because the caller moves the sequence by another one."""
        self.is_moved, self.start, self.was_ahead = True, None, None
        if self.leg is not None:
            self.leg.call.cancel()


class Leg:
    """One open call, and the branches that it draws.

    Attributes:
        call: The call.
        request: What it asked for.
        courses: The branches, by the numbers that the call knows them by.
        is_repeat: True: it draws its branches from the start once more.
        has_replied: True: a frame has come.
        were_ahead: For each branch whether its sequence was ahead before.
        num_seen: For each branch the tokens that the server has told, in this call and those before it.
        texts: For each branch their text.
    """

    def __init__(
        self,
        call: OpenCall[executor_pb2.GenerateResponse],
        request: executor_pb2.GenerateRequest,
        courses: Sequence[Course],
        *,
        is_repeat: bool,
    ) -> None:
        branches = [course.branch for course in courses]
        self.call = call
        self.request = request
        self.courses = courses
        self.is_repeat = is_repeat
        self.has_replied = False
        self.were_ahead = [one.has_cache and tip_of(one.cache).is_ahead for one in branches]
        self.num_seen = [0 if is_repeat else len(one.tokens) for one in branches]
        self.texts = ["" if is_repeat else one.text for one in branches]

    @property
    def has_ended(self) -> bool:
        """True: none of its branches waits for anything of it."""
        return not any(course.goes_on and course.leg is self for course in self.courses)

    def restore(self) -> None:
        """Take back that sequences may be ahead: the call was refused, so nothing has been drawn."""
        for course, was_ahead in zip(self.courses, self.were_ahead, strict=True):
            if course.branch.has_cache:
                tip_of(course.branch.cache).is_ahead = was_ahead


@dataclass(frozen=True, slots=True)
class Event:
    """One token of one branch, its end, or both, waiting to be handed out.

    Attributes:
        course: The branch.
        leg: The call that it came by.
        output: The token; None: an end without one.
        frame: All tokens that came with it; the handle of ``output`` covers all but the last.
        text: What is added to the branch's text.
        finish_reason: Why the branch ends; None: it goes on.
        error: What it fails with, if it does.
    """

    course: Course
    leg: Leg
    output: Output | None
    frame: Sequence[int]
    text: str = ""
    finish_reason: FinishReason | None = None
    error: FerruleError | None = None
