# Written by tools/strip_async.py from ../aio/generation.py: change that and run `make sync`.
"""Generations: the server draws, the tokens stream in, and the caches move along with what was handed out."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import grpc

from ferrule.v1 import executor_pb2, types_pb2
from ferrule_client import _check, _convert, _messages
from ferrule_client._messages import GenerationPlan, PromptOptions, Reading
from ferrule_client._public import publish
from ferrule_client._retry import Attempts
from ferrule_client._route import instance_of_handle, is_lost
from ferrule_client._status import error_from_status, may_have_happened
from ferrule_client._timeouts import Timeout
from ferrule_client._tip import Tip, using
from ferrule_client._token_log import TokenLog
from ferrule_client.errors import (
    BlocksExhaustedError,
    ContextExceededError,
    FerruleError,
    HandleStaleError,
    InstanceUnreachableError,
    UnavailableError,
)
from ferrule_client.sync._calls import calls_of, tip_of
from ferrule_client.sync._closing import Closing
from ferrule_client.sync._connection import Connection
from ferrule_client.sync._drawing import Branch, Course, Event, Leg
from ferrule_client.sync.branches import Branches
from ferrule_client.sync.detokenizer import Detokenizer
from ferrule_client.types import FinishReason, OnStale, Output, Pending, Token, Tokens

if TYPE_CHECKING:
    from ferrule_client.sync.cache import Cache

__all__ = ["Branch", "Generation"]

_MAX_REPEATS = 10
_REPLACEMENT = "\ufffd"
_WINDOW = 16
_NUM_CONTEXT = 8


class Generation(Iterator[Token], Closing):
    """Tokens as the server draws them; made by ``Cache.generate`` and ``Client.generate``.

    Each is an int, the token id, that also knows its text, its log-probabilities and its branch::

        for token in cache.generate(20, text=True):
            print(token.text, end="")

    Nothing runs before the first token is asked for. Invariant: after each token its cache's handle covers every token
    before it, and the token is pending. Leaving the loop early is fine: whatever the cache does next continues from
    there, and what the server has drawn beyond is dropped. After a broken connection the loop resumes, so that no token
    is lost or comes twice. If the cache is moved in the middle of the loop, the loop continues from where it is then.

    If one of several branches fails, that is noted in its ``error`` and the others continue. Once all have failed, the
    last error is raised; what they had drawn is still in ``branches``.

    Attributes:
        branches: The continuations; one, unless ``n`` said otherwise.
    """

    def __init__(
        self,
        connection: Connection,
        plan: GenerationPlan,
        prompt: Tokens | str,
        *,
        reads: Reading,
        follow: Callable[[Tip], Cache],
        cache: Cache | None = None,
        on_stale: OnStale = "fail",
        pending: Pending = "auto",
        options: PromptOptions | None = None,
        is_patient: bool = False,
        keeps: bool = True,
        timeout: Timeout,
    ) -> None:
        self._connection = connection
        self._plan = plan
        self._prompt = prompt
        self._reads = reads
        self._tokens: tuple[int, ...] = () if isinstance(prompt, str) else tuple(_check.token_list(prompt))
        self._on_stale = on_stale
        self._pending = pending
        self._follow = follow
        self._is_new = cache is None
        self._options = options
        self._is_patient = is_patient
        self._keeps = keeps
        self._timeout = timeout
        self._request_id = _messages.new_request_id()
        self._prompt_log = TokenLog()
        self._whole: executor_pb2.GenerateRequest | None = None
        self._num_repeats = 0
        self._has_begun = False
        self._has_run = False
        self._events: deque[Event] = deque()
        self._legs: deque[Leg] = deque()
        self.branches = [Branch(n, plan.seed_of(n), None if n else cache) for n in range(plan.n)]
        self._courses = [Course(branch) for branch in self.branches]
        if plan.max_tokens == 0:
            self._finish_all("max_tokens")

    def __del__(self) -> None:
        for leg in self.__dict__.get("_legs", ()):
            leg.call.cancel()

    def __repr__(self) -> str:
        states = [branch.state for branch in self.branches] if self._has_run or self._has_ended() else ["not run"]
        return f"Generation({'; '.join(states)})"

    def __next__(self) -> Token:
        token = self.advance()
        if token is None:
            raise StopIteration
        return token

    @property
    def tokens(self) -> list[int]:
        """Token ids handed out so far, of the first branch.

        Raises:
            RuntimeError: The generation has not run.
        """
        return self._drawn().tokens

    @property
    def text(self) -> str:
        """Their text.

        Raises:
            AttributeError: It was not asked for.
            RuntimeError: The generation has not run.
        """
        if not self._plan.has_text:
            raise AttributeError("there is no text: ask for it with text=True")
        return self._drawn().text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first branch ended, or None while it goes on. A token that ends it is handed out."""
        return self.branches[0].finish_reason

    @property
    def seed(self) -> int | None:
        """Seed of the first branch, or None where nothing is drawn."""
        return self.branches[0].seed

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came out of the prefix cache; there with the first token.

        Raises:
            RuntimeError: The generation has not run.
        """
        return self._drawn().cached_tokens

    @property
    def output(self) -> Output:
        """The output of the newest token of the first branch: log-probabilities, seed, timing.

        Raises:
            RuntimeError: There is no token yet.
        """
        return self._drawn().cache.last

    @property
    def caches(self) -> Branches:
        """The sequences of all branches that have a token, which ``with`` releases; see ``Branches``."""
        caches = [branch.cache for branch in self.branches if branch.has_cache]
        return Branches(self._connection, caches, foreign=() if self._is_new else caches[:1])

    def advance(self) -> Token | None:
        """Return the next token of any branch, or None when all have ended; what ``next`` does, without its error."""
        self._has_run = True
        try:
            while self._events or not self._has_ended():
                if not self._events:
                    self._fill()
                    continue
                token = self._hand_out(self._events.popleft())
                if token is not None:
                    return token
        except BaseException:
            self.close()
            raise
        self._end()
        return None

    def pieces(self) -> Iterator[str]:
        """Yield the text of the first branch piece by piece, never half a character.

        Special tokens, such as one that ends the text, are left out; ``tokens`` has all ids. If the tokens before the
        first one end inside a character, its rest is part of the first piece.

        Raises:
            RuntimeError: The loop has begun without ``text=True``.
            UnsupportedError: The server has no tokenizer.
            FerruleError: As while iterating over tokens.

        Example:
            ``for piece in cache.generate(32).pieces(): print(piece, end="")``
        """
        if not self._plan.has_text:
            if self._has_begun or self._legs:
                raise RuntimeError("the loop has begun without text: ask for it with text=True")
            self._plan = dataclasses.replace(self._plan, has_text=True)
        num_out = 0
        has_ended = False
        while not has_ended:
            has_ended = self.advance() is None
            piece = self.text[num_out:]
            if num_out == 0 and piece.startswith(_REPLACEMENT):
                text, rest = self._text_drawn(self.branches[0]), piece.lstrip(_REPLACEMENT)
                piece = text[: text.find(rest, 1) + len(rest)] if self._plan.holds_text and rest in text[1:] else text
            if piece.endswith(_REPLACEMENT) and self.finish_reason is not None and self._is_cut():
                piece = piece.rstrip(_REPLACEMENT)
            num_out = len(self.text)
            if piece:
                yield piece

    def _text_drawn(self, branch: Branch) -> str:
        """Return the text of a branch's tokens after those before them, up to a character that is not whole."""
        context = self._prompt_log.tail(_NUM_CONTEXT)
        num_before = Detokenizer(self._connection.decode_text, context).begin()
        text, is_cut = self._connection.decode_text([*context, *branch.tokens])
        return (text.rstrip(_REPLACEMENT) if is_cut else text)[num_before:]

    def _is_cut(self) -> bool:
        """Return whether the text ends inside a character, which its last tokens alone show."""
        context = self._prompt_log.tail(_NUM_CONTEXT)
        _, ends_mid_character = self._connection.decode_text([*context, *self.tokens][-_WINDOW:])
        return ends_mid_character

    def read(self) -> Generation:
        """Draw to the end and return this generation.

        Example:
            ``text = client.generate("def area(", 32).read().text``
        """
        while self.advance() is not None:
            pass
        return self

    def close(self) -> None:
        """End the generation; the caches stay at what was handed out. Closing twice changes nothing."""
        self._finish_all("closed")
        self._events.clear()
        self._end()

    def _drawn(self) -> Branch:
        """Return the first branch; raise RuntimeError if nothing was asked of the server yet."""
        if not (self._has_run or self._has_ended()):
            raise RuntimeError("the generation has not run: call read(), or iterate over its tokens or pieces()")
        return self.branches[0]

    def _has_ended(self) -> bool:
        return all(branch.finish_reason is not None for branch in self.branches)

    def _finish_all(self, reason: FinishReason) -> None:
        for branch in self.branches:
            branch.finish_reason = branch.finish_reason or reason

    def _end(self) -> None:
        """Let go of the calls, and of the sequences that are not to be kept."""
        while self._legs:
            self._legs.popleft().call.cancel()
        caches = self.caches
        for cache in caches:
            tip_of(cache).running = None
        if not self._keeps:
            caches.__exit__(None, None, None)

    def _fill(self) -> None:
        """Wait for one frame and put what it holds into the queue; on a new call when one breaks."""
        timeout = self._connection.until(self._timeout)
        attempts = self._attempts(timeout)
        while not self._events and not self._has_ended():
            self._open_what_lacks(timeout)
            if not self._legs:
                return
            self._legs.rotate(-1)
            leg = self._legs[-1]
            with using(*(tip_of(cache) for cache in self.caches)):
                frame = self._connection.receive(leg.call, attempts)
            if isinstance(frame, FerruleError):
                leg.call.cancel()
                self._survive(leg, leg.courses, frame, attempts)
            else:
                self._note(leg, frame)

    def _attempts(self, timeout: Timeout) -> Attempts:
        creates = not all(branch.has_cache for branch in self.branches)
        has_cache = any(branch.has_cache for branch in self.branches)
        return self._connection.attempts(
            timeout, creates=creates, has_request_id=True, is_patient=self._is_patient, on_sequence=has_cache
        )

    def _open_what_lacks(self, timeout: Timeout) -> None:
        """Open one call for all branches at first, then one for each that has lost its own."""
        for leg in [leg for leg in self._legs if leg.call.is_closed]:
            self._legs.remove(leg)
        waiting = [one for one in self._courses if one.goes_on and one.leg not in self._legs]
        for course in waiting:
            course.leave()
        if waiting and not self._has_begun:
            is_repeat = self._whole is not None and self._plan.n > 1
            self._whole = self._first_request(timeout)
            self._open(self._whole, self._courses, is_repeat=is_repeat)
            return
        if self._whole is not None and not all(course.branch.has_cache for course in waiting):
            request, self._num_repeats = self._whole, self._num_repeats + 1  # it finds the branches that it has made
            if self._num_repeats == _MAX_REPEATS or any(course.is_moved for course in self._courses):
                self._whole = None
            self._open(request, self._courses, is_repeat=True)
            return
        for course in waiting:
            branch = course.branch
            if not branch.has_cache:
                text = "the connection broke before the branch had its first token"
                error = UnavailableError(grpc.StatusCode.UNAVAILABLE, "CONNECTION_LOST", text)
                self._fail([course], error, "error")
            elif course.start is not None and branch.tokens:
                self._open(course.start, [course], is_repeat=True)
            else:
                course.start = None
                request = self._rest(branch, timeout)
                drawn = self._text_drawn(branch) if self._plan.holds_text and branch.tokens else ""
                self._open(request, [course]).texts = [drawn if drawn.startswith(branch.text) else branch.text]

    def _open(
        self, request: executor_pb2.GenerateRequest, courses: Sequence[Course], *, is_repeat: bool = False
    ) -> Leg:
        owners = (instance_of_handle(course.branch.cache.handle) for course in courses if course.branch.has_cache)
        instance = next(owners, "")  # the instance of one branch has the others too
        call = self._connection.open_replies(self._connection.executor.Generate, request, instance)
        leg = Leg(call, request, courses, is_repeat=is_repeat)
        self._legs.append(leg)
        for course in courses:
            if course.goes_on:
                course.enter(leg)
        return leg

    def _first_request(self, timeout: Timeout) -> executor_pb2.GenerateRequest:
        plan, (first, *_) = self._plan, self._courses
        if not first.branch.has_cache:
            ids = self._connection.ids_of(self._prompt, self._reads, timeout=timeout, is_patient=self._is_patient)
            self._prompt = self._tokens = tuple(ids)
            self._prompt_log = TokenLog(self._tokens)
            return _messages.generate_request(
                plan, input_ids=self._tokens, n=plan.n, request_id=self._request_id, options=self._options
            )
        cache = first.branch.cache
        tip = tip_of(cache)
        sent = calls_of(cache).prepare(
            self._prompt,
            plan.policy,
            self._on_stale,
            parses=self._reads.parses,
            pending=self._pending,
            draws=True,
            timeout=timeout,
        )
        num_before = 0 if self._pending == "drop" else len(tip.pending)
        self._tokens = tuple(sent.input_ids[num_before:])
        if self._whole is not None and plan.n > 1 and sent.kv_cache == self._whole.kv_cache:
            sent.on_stale = self._whole.on_stale  # the same again: its request_id finds the branches that it has made
        tip.policy = plan.given
        self._prompt_log = tip_of(cache).log.branch()
        self._prompt_log.extend(sent.input_ids)
        self._begin(first, sent.kv_cache, sent.input_ids)
        return _messages.generate_request(
            plan,
            input_ids=sent.input_ids,
            kv_cache=sent.kv_cache,
            on_stale=sent.on_stale,
            n=plan.n,
            request_id=self._request_id,
        )

    def _rest(self, branch: Branch, timeout: Timeout) -> executor_pb2.GenerateRequest:
        """Return the request for what follows the newest token of a branch."""
        fed, drops = self._before(branch)
        pending: Pending = "drop" if drops else "send"
        policy = self._plan.policy_of(branch.index)
        sent = calls_of(branch.cache).prepare(fed, policy, pending=pending, draws=True, timeout=timeout)
        return _messages.generate_request(
            self._plan,
            input_ids=sent.input_ids,
            kv_cache=sent.kv_cache,
            on_stale=sent.on_stale,
            index=branch.index,
            num_drawn=len(branch.tokens),
            request_id=sent.request_id,
        )

    def _begin(self, course: Course, kv_cache: types_pb2.KvCacheHandle, input_ids: Sequence[int]) -> None:
        """Note where a branch begins, if it may be drawn from there again, so that its tokens come as a replay.

        For texts, and stops that may have begun before the newest token: a call knows only what it has drawn itself.
        """
        if self._plan.looks_back:
            course.start = _messages.generate_request(
                self._plan, input_ids=input_ids, kv_cache=kv_cache, index=course.branch.index
            )

    def _before(self, branch: Branch) -> tuple[tuple[int, ...], bool]:
        """Return what goes in before the next token of a branch, and whether the pending token is replaced.

        Both concern only the first token on a cache that was there before.
        """
        if branch.index or branch.tokens or self._is_new:
            return (), False
        return self._tokens, self._pending == "drop"

    def _note(self, leg: Leg, frame: executor_pb2.GenerateResponse) -> None:
        """Put what a frame holds into the queue, but for tokens that are out already."""
        is_first = not leg.has_replied
        self._has_begun = leg.has_replied = True
        for message in frame.outputs:
            course = leg.courses[message.index]
            if is_first and leg.request.input_ids and not message.replayed:  # what stood beyond is dropped
                course.was_ahead = False
            branch, num_seen = course.branch, leg.num_seen[message.index]
            branch.cached_tokens = max(branch.cached_tokens, message.cached_tokens)
            if not branch.has_cache:
                self._follow_branch(course, message)
            outputs = _convert.drawn_from_message(frame, message)
            known = branch.tokens[num_seen : num_seen + len(outputs)]
            if [output.token for output in outputs[: len(known)]] != known:  # KV was computed again; rounding decided
                course.start = self._whole = None
                leg.call.cancel()
                return
            leg.num_seen[message.index] += len(outputs)
            leg.texts[message.index] += message.text
            self._queue(leg, course, outputs[len(known) :], message)

    def _queue(self, leg: Leg, course: Course, outputs: Sequence[Output], message: executor_pb2.GenerateOutput) -> None:
        reason, frame = _convert.finish_from_message(message.finish_reason), tuple(message.outputs.tokens)
        text = leg.texts[message.index][len(course.branch.text) :]
        self._events.extend(Event(course, leg, output, frame) for output in outputs[:-1])
        if outputs or text or reason is not None:
            last, error = outputs[-1] if outputs else None, _error_of(message, reason, keeps=self._keeps)
            self._events.append(Event(course, leg, last, frame, text, reason, error))

    def _follow_branch(self, course: Course, message: executor_pb2.GenerateOutput) -> None:
        """Make the cache of a branch whose first frame has come."""
        handle, beyond = _convert.handle_from_message(message.resume_from), tuple(message.outputs.tokens[:-1])
        tip = Tip(handle, log=self._prompt_log.branch(), beyond=beyond, policy=self._plan.given_of(course.branch.index))
        tip.is_ahead, tip.running, course.was_ahead = True, course.give_way, False
        course.branch.attach(self._follow(tip))
        if not beyond:
            self._begin(course, message.resume_from, ())

    def _hand_out(self, event: Event) -> Token | None:
        """Move a branch by one event and return its token; None: it has none, or is no longer wanted."""
        course, branch = event.course, event.course.branch
        if course.is_moved or event.leg is not course.leg:
            return None
        token = None if event.output is None else self._deliver(event, event.output)
        branch.text += event.text
        if event.error is not None:
            course.leg = None
            assert event.finish_reason is not None  # an error is an end
            attempts = self._attempts(self._connection.until(self._timeout))
            self._survive(event.leg, [course], event.error, attempts, reason=event.finish_reason)
        elif event.finish_reason is not None:
            branch.finish_reason = event.finish_reason
            course.end()
        if event.leg.has_ended:
            event.leg.call.close()
        return token

    def _deliver(self, event: Event, output: Output) -> Token:
        branch = event.course.branch
        (token,) = output.tokens
        if output.seed is None and branch.seed is not None:
            output = dataclasses.replace(output, seed=branch.seed)
        tip = tip_of(branch.cache)
        fed, drops = self._before(branch)
        if drops:
            tip.pending = ()
        output = tip.drew(token, output, fed=fed, beyond=event.frame[output.ahead - 1 : -1])
        branch.tokens.append(token)
        return Token(token, output, branch.index, event.text)

    def _survive(
        self,
        leg: Leg,
        courses: Sequence[Course],
        error: FerruleError,
        attempts: Attempts,
        *,
        reason: FinishReason = "error",
    ) -> None:
        """Arrange that what broke on a call is opened again for some of its branches, or end these for a reason.

        Raises:
            FerruleError: ``error``, where with it all branches have failed.
        """
        courses = [one for one in courses if one.goes_on and not one.is_moved]
        if not courses:
            return
        course = courses[0]
        try:
            if self._can_go_on(leg, course, error, attempts):
                return
            try:
                self._connection.wait(attempts, error)
            except InstanceUnreachableError:
                self._move_on(courses, error, attempts)
        except FerruleError as final:
            if not (may_have_happened(error) or leg.has_replied):
                leg.restore()
            elif isinstance(error, HandleStaleError):  # somebody else has moved it: what stands there is not ours
                tip_of(course.branch.cache).is_ahead = False
            if isinstance(final, ContextExceededError) and any(one.branch.tokens for one in courses):
                self._fail(courses, None, "context_full")  # without a token, it is the input that does not fit
                return
            self._fail(courses, final, reason)
            if all(one.branch.error is not None for one in self._courses):
                raise

    def _move_on(self, courses: Sequence[Course], error: FerruleError, attempts: Attempts) -> None:
        """Bring back the branches whose instance nobody reaches any more; one that has no sequence yet cannot be.

        Raises:
            FerruleError: ``error``, if there is none that can.
        """
        known = [course for course in courses if course.branch.has_cache]
        if not known:
            raise error
        self._whole = None
        for course in known:
            self._revive(course, error, attempts)

    @staticmethod
    def _revive(course: Course, error: FerruleError, attempts: Attempts) -> None:
        calls_of(course.branch.cache).bring_back(error, course.branch.cache.handle, attempts)
        course.start = None

    def _can_go_on(self, leg: Leg, course: Course, error: FerruleError, attempts: Attempts) -> bool:
        """Return whether the call can be made again at once, after doing what that takes."""
        is_dead = isinstance(error, InstanceUnreachableError)  # or not for long: that shows when no attempt is left
        if not is_dead and course.branch.has_cache and is_lost(error, course.branch.cache.handle):
            self._revive(course, error, attempts)
            return True
        if isinstance(error, HandleStaleError) and leg.is_repeat and self._has_begun:
            course.start = None  # what stands there is not what was drawn, so the rest is drawn from the newest token
            return True
        return self._connection.restore_masks(error, [leg.request], attempts)

    @staticmethod
    def _fail(courses: Sequence[Course], error: FerruleError | None, reason: FinishReason) -> None:
        for course in courses:
            course.branch.finish_reason, course.branch.error = reason, error


def _error_of(message: executor_pb2.GenerateOutput, reason: FinishReason | None, *, keeps: bool) -> FerruleError | None:
    """Return what a branch failed with, if it did."""
    if reason == "error" or message.HasField("error"):
        return error_from_status(message.error)
    if reason == "kv_blocks_exhausted":
        text = "the KV pool has no block left; what was drawn so far is good: "
        text += "release something, or go on later" if keeps else "it is in branches, its sequences are released"
        return BlocksExhaustedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_BLOCKS_EXHAUSTED", text)
    return None


publish(globals(), ("Branch", "Generation"))
