# Written by client/generate_aio.py from client/ferrule_client/generation.py: change that, then run it again.
"""Generations: the server draws, the tokens stream in, and the caches move along with what was handed out."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import grpc

from ferrule.v1 import executor_pb2
from ferrule_client import _convert, _messages
from ferrule_client._messages import GenerationPlan, PromptOptions
from ferrule_client._retry import Attempts
from ferrule_client._route import instance_of_handle, is_lost
from ferrule_client._status import may_have_happened
from ferrule_client._tip import Tip, using
from ferrule_client._token_log import TokenLog
from ferrule_client.aio._connection import Connection, Timeout
from ferrule_client.aio._drawing import AsyncBranch, Course, Event, Leg, Start
from ferrule_client.aio.detokenizer import AsyncDetokenizer
from ferrule_client.errors import (
    ContextExceededError,
    ExecutorError,
    HandleStaleError,
    InstanceUnreachableError,
    UnavailableError,
)
from ferrule_client.generation import _error_of
from ferrule_client.types import DrawnToken, FinishReason, OnStale, Output

if TYPE_CHECKING:
    from ferrule_client.aio.cache import AsyncCache

__all__ = ["AsyncBranch", "AsyncGeneration", "AsyncTextGeneration"]

_log = logging.getLogger(__name__)

_END_S = 5.0
_MAX_REPEATS = 10
_REPLACEMENT = "\ufffd"
_WINDOW = 16


class AsyncGeneration(AsyncIterator[DrawnToken]):
    """Tokens as the server draws them; made by ``AsyncCache.generate`` and ``AsyncClient.generate``.

    Each is an int, the token id, that also knows its text, its log-probabilities and its branch::

        async for token in cache.generate(20, text=True):
            print(token.text, end="")

    Nothing runs before the first one is asked for. Invariant: after each token its cache's handle covers every token
    before it, and ``cache.pending`` is that token. Leaving the loop early is fine: whatever the cache does next goes on
    from there, and what the server had drawn beyond is dropped. A broken connection is resumed, so that no token
    is lost or comes twice. A cache that is moved in the middle of the loop is gone on with from where it is then.

    Where there are several branches, one that fails is noted in its ``error`` and the others go on. Once all have
    failed, the last error is raised; what they had drawn is in ``branches`` all the same.

    Attributes:
        branches: The continuations; one, unless ``n`` said otherwise.
    """

    def __init__(
        self,
        connection: Connection,
        plan: GenerationPlan,
        prompt: str | Sequence[int],
        *,
        cache: AsyncCache | None = None,
        on_stale: OnStale = "fail",
        follow: Callable[[Tip], AsyncCache] | None = None,
        options: PromptOptions | None = None,
        is_patient: bool = False,
        keeps: bool = True,
        timeout: Timeout,
    ) -> None:
        self._connection = connection
        self._plan = plan
        self._prompt = prompt if isinstance(prompt, str) else None
        self._tokens = () if isinstance(prompt, str) else tuple(prompt)
        self._on_stale = on_stale
        self._follow = follow
        self._options = options
        self._is_patient = is_patient
        self._keeps = keeps
        self._timeout = timeout
        self._request_id = _messages.new_request_id()
        self._prompt_log = TokenLog(self._tokens)
        self._whole: executor_pb2.GenerateRequest | None = None
        self._num_repeats = 0
        self._has_begun = False
        self._events: deque[Event] = deque()
        self._legs: deque[Leg] = deque()
        self.branches = [AsyncBranch(n, plan.seed_of(n), None if n else cache) for n in range(plan.n)]
        self._courses = [Course(branch) for branch in self.branches]
        if plan.max_tokens == 0:
            self._finish_all("max_tokens")

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        for leg in self.__dict__.get("_legs", ()):
            if not leg.call.is_over:
                leg.call.cancel()

    async def __anext__(self) -> DrawnToken:
        token = await self.advance()
        if token is None:
            raise StopAsyncIteration
        return token

    @property
    def tokens(self) -> list[int]:
        """Token ids handed out so far, of the first branch."""
        return self.branches[0].tokens

    @property
    def text(self) -> str:
        """Their text, if it was asked for."""
        return self.branches[0].text

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
        """Tokens of the prompt that came out of the prefix cache; there with the first token."""
        return self.branches[0].cached_tokens

    @property
    def output(self) -> Output | None:
        """The whole output of the newest token of the first branch: log-probabilities, seed, timing."""
        return self.branches[0].cache.last if self.branches[0].has_cache else None

    @property
    def caches(self) -> list[AsyncCache]:
        """The sequences of all branches, as far as anything has come of them."""
        return [branch.cache for branch in self.branches if branch.has_cache]

    async def advance(self) -> DrawnToken | None:
        """Return the next token of any branch, or None when all have ended; what ``next`` does, without its error."""
        try:
            while self._events or not self._has_ended():
                if not self._events:
                    await self._fill()
                    continue
                token = await self._hand_out(self._events.popleft())
                if token is not None:
                    return token
        except BaseException:
            await self.close()
            raise
        await self._end()
        return None

    async def read(self) -> AsyncGeneration:
        """Draw to the end and return this."""
        while await self.advance() is not None:
            pass
        return self

    async def close(self) -> None:
        """End the generation; the caches stay at what was handed out. Closing twice changes nothing."""
        self._finish_all("closed")
        self._events.clear()
        await self._end()

    def _has_ended(self) -> bool:
        return all(branch.finish_reason is not None for branch in self.branches)

    def _finish_all(self, reason: FinishReason) -> None:
        for branch in self.branches:
            branch.finish_reason = branch.finish_reason or reason

    async def _end(self) -> None:
        """Let go of the calls, and of the sequences that nobody is to keep."""
        while self._legs:
            leg = self._legs.popleft()
            if not leg.call.is_over:
                leg.call.cancel()
        for cache in self.caches:
            cache.tip.running = None
            if not self._keeps and not cache.is_released:
                await self._release(cache)

    async def _release(self, cache: AsyncCache) -> None:
        try:
            await cache.release(timeout=_END_S)
        except ExecutorError as failure:  # its lease ends it
            _log.debug("release failed handle_id=%s reason=%s", cache.handle.handle_id, failure.reason)

    async def _fill(self) -> None:
        """Wait for one frame and put what it holds into the queue; on a new call when one breaks."""
        timeout = self._connection.until(self._timeout)
        attempts = self._attempts(timeout)
        while not self._events and not self._has_ended():
            await self._open_what_lacks(timeout)
            if not self._legs:
                return
            self._legs.rotate(-1)
            leg = self._legs[-1]
            try:
                with using(*(cache.tip for cache in self.caches)):
                    frame = await leg.call.receive(attempts.remaining())
            except grpc.RpcError as error:
                leg.call.cancel()
                await self._survive(leg, leg.courses, self._connection.typed(error, leg.call.instance), attempts, error)
            except StopAsyncIteration:
                leg.call.cancel()
                text = "the server ended the generation before its end"
                lost = UnavailableError(grpc.StatusCode.UNAVAILABLE, "CONNECTION_LOST", text)
                await self._survive(leg, leg.courses, lost, attempts)
            else:
                self._note(leg, frame)

    def _attempts(self, timeout: Timeout) -> Attempts:
        creates = not all(branch.has_cache for branch in self.branches)
        return self._connection.attempts(timeout, creates=creates, has_request_id=True, is_patient=self._is_patient)

    async def _open_what_lacks(self, timeout: Timeout) -> None:
        """Open one call for all branches at first, then one for each that has lost its own."""
        for leg in [leg for leg in self._legs if leg.call.is_over]:
            self._legs.remove(leg)
        waiting = [one for one in self._courses if one.goes_on and one.leg not in self._legs]
        for course in waiting:
            course.leave()
        if waiting and not self._has_begun:
            self._whole = await self._first_request(timeout)
            self._open(self._whole, self._courses)
            return
        if self._whole is not None and not all(course.branch.has_cache for course in waiting):
            self._repeat_whole(self._whole)
            return
        for course in waiting:
            branch = course.branch
            if not branch.has_cache:
                text = "the connection broke before the branch had its first token"
                error = UnavailableError(grpc.StatusCode.UNAVAILABLE, "CONNECTION_LOST", text)
                self._fail([course], error, "error")
            elif self._plan.looks_back and course.start is not None and branch.tokens:
                self._open(self._once_more(branch, course.start), [course], is_repeat=True)
            else:
                course.start = None
                self._open(await self._rest(branch, timeout), [course])

    def _repeat_whole(self, request: executor_pb2.GenerateRequest) -> None:
        """Make the first call again, which finds the branches that it has made; some are not known here yet."""
        self._num_repeats += 1
        if self._num_repeats == _MAX_REPEATS or any(course.is_moved for course in self._courses):
            self._whole = None
        self._open(request, self._courses, is_repeat=True)

    def _open(
        self, request: executor_pb2.GenerateRequest, courses: Sequence[Course], *, is_repeat: bool = False
    ) -> None:
        owners = (instance_of_handle(course.branch.cache.handle) for course in courses if course.branch.has_cache)
        instance = next(owners, "")  # the instance of one branch has the others too
        call = self._connection.open_replies(self._connection.executor.Generate, request, instance)
        leg = Leg(call, request, courses, is_repeat=is_repeat)
        self._legs.append(leg)
        for course in courses:
            if course.goes_on:
                course.enter(leg)

    async def _first_request(self, timeout: Timeout) -> executor_pb2.GenerateRequest:
        plan, (first, *_) = self._plan, self._courses
        if self._prompt is not None:
            ids = await self._connection.encode_text(self._prompt, timeout=timeout, is_patient=self._is_patient)
            self._prompt, self._tokens, self._prompt_log = None, tuple(ids), TokenLog(ids)
        if not first.branch.has_cache:
            return _messages.generate_request(
                plan, input_ids=self._tokens, n=plan.n, request_id=self._request_id, options=self._options
            )
        cache = first.branch.cache
        sent = await cache.prepare(self._tokens, plan.policy, self._on_stale, draws=True, timeout=timeout)
        self._prompt_log = cache.tip.log.branch()
        self._prompt_log.extend(sent.input_ids)
        first.start = Start(sent.kv_cache, tuple(sent.input_ids))
        return _messages.generate_request(
            plan,
            input_ids=sent.input_ids,
            kv_cache=sent.kv_cache,
            on_stale=sent.on_stale,
            n=plan.n,
            request_id=self._request_id,
        )

    async def _rest(self, branch: AsyncBranch, timeout: Timeout) -> executor_pb2.GenerateRequest:
        """Return the request for what follows the newest token of a branch."""
        policy = self._plan.policy_of(branch.index)
        sent = await branch.cache.prepare(self._fed(branch), policy, draws=True, timeout=timeout)
        return _messages.generate_request(
            self._plan,
            input_ids=sent.input_ids,
            kv_cache=sent.kv_cache,
            on_stale=sent.on_stale,
            index=branch.index,
            num_drawn=len(branch.tokens),
            request_id=sent.request_id,
        )

    def _once_more(self, branch: AsyncBranch, start: Start) -> executor_pb2.GenerateRequest:
        """Return the request for a branch once more, from its start: the tokens that are out are answered as a replay.

        For texts, and stops that may have begun before the newest token: a call knows only what it has drawn itself.
        """
        return _messages.generate_request(
            self._plan, input_ids=start.input_ids, kv_cache=start.kv_cache, index=branch.index
        )

    def _fed(self, branch: AsyncBranch) -> tuple[int, ...]:
        """Return the tokens that go in before the next one of a branch, besides what is pending."""
        is_first = branch.index == 0 and not branch.tokens and self._follow is None
        return self._tokens if is_first else ()

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
            is_new = not branch.has_cache
            if is_new:
                self._follow_branch(course, message)
            outputs = _convert.drawn_from_message(frame, message)
            known = branch.tokens[num_seen : num_seen + len(outputs)]
            if [output.token for output in outputs[: len(known)]] != known:  # KV was computed anew; rounding decided
                course.start = self._whole = None
                leg.call.cancel()
                return
            leg.num_seen[message.index] += len(outputs)
            leg.texts[message.index] += message.text
            self._queue(leg, course, outputs[len(known) :], message, is_new=is_new)

    def _queue(
        self,
        leg: Leg,
        course: Course,
        outputs: Sequence[Output],
        message: executor_pb2.GenerateOutput,
        *,
        is_new: bool,
    ) -> None:
        reason = _convert.finish_from_message(message.finish_reason)
        error = _error_of(message, reason, keeps=self._keeps)
        text = leg.texts[message.index][len(course.branch.text) :]
        for output in outputs[:-1]:
            self._events.append(Event(course, leg, output, "", False, is_new, None, None))
        if outputs or text or reason is not None:
            last = outputs[-1] if outputs else None
            self._events.append(Event(course, leg, last, text, True, False, reason, error))

    def _follow_branch(self, course: Course, message: executor_pb2.GenerateOutput) -> None:
        """Make the cache of a branch whose first frame has come."""
        log = self._prompt_log.branch()
        log.extend(message.outputs.tokens[:-1])
        if log.end != message.resume_from.length:
            log.forget(message.resume_from.length)
        tip = Tip(_convert.handle_from_message(message.resume_from), log=log)
        tip.is_ahead, tip.running, course.was_ahead = True, course.give_way, False
        tip.num_unseen = max(0, len(message.outputs.tokens) - 1)
        course.branch.attach(self.branches[0].cache.sibling(tip) if self._follow is None else self._follow(tip))
        if len(message.outputs.tokens) <= 1:
            course.start = Start(message.resume_from, ())

    async def _hand_out(self, event: Event) -> DrawnToken | None:
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
            await self._survive(event.leg, [course], event.error, attempts, reason=event.finish_reason)
        elif event.finish_reason is not None:
            branch.finish_reason = event.finish_reason
            course.end()
        if event.leg.has_ended:
            await event.leg.call.close()
        return token

    def _deliver(self, event: Event, output: Output) -> DrawnToken:
        branch = event.course.branch
        (token,) = output.tokens
        if output.seed is None and branch.seed is not None:
            output = dataclasses.replace(output, seed=branch.seed)
        if event.is_counted:
            branch.cache.tip.told(token, output)
        else:
            fed = self._fed(branch)
            output = branch.cache.tip.drew(token, output, fed=fed, is_covered=event.is_covered)
        branch.tokens.append(token)
        return DrawnToken(token, branch.index, event.text, output)

    async def _survive(
        self,
        leg: Leg,
        courses: Sequence[Course],
        error: ExecutorError,
        attempts: Attempts,
        cause: grpc.RpcError | None = None,
        *,
        reason: FinishReason = "error",
    ) -> None:
        """Arrange that what broke is opened again, or end it.

        Args:
            leg: The call that it happened on.
            courses: The branches that it concerns.
            error: What happened.
            attempts: Those of the token that is waited for.
            cause: The gRPC error behind it.
            reason: What a branch that ends by it ended for.

        Raises:
            ExecutorError: ``error``, where with it all branches have failed.
        """
        courses = [one for one in courses if one.goes_on and not one.is_moved]
        if not courses:
            return
        course = courses[0]
        try:
            if await self._can_go_on(leg, course, error, attempts):
                return
            try:
                await self._connection.wait(attempts, error, cause)
            except InstanceUnreachableError:
                await self._move_on(courses, error, attempts)
        except ExecutorError as final:
            if not (may_have_happened(error) or leg.has_replied):
                leg.restore()
            elif isinstance(error, HandleStaleError):  # somebody else has moved it: what stands there is not ours
                course.branch.cache.tip.is_ahead = False
            if isinstance(final, ContextExceededError) and any(one.branch.tokens for one in courses):
                self._fail(courses, None, "context_full")  # without a token, it is the input that does not fit
                return
            self._fail(courses, final, reason)
            if all(one.branch.error is not None for one in self._courses):
                raise

    async def _move_on(self, courses: Sequence[Course], error: ExecutorError, attempts: Attempts) -> None:
        """Bring back the branches whose instance nobody reaches any more; one that has no sequence yet cannot be.

        Raises:
            ExecutorError: ``error``, if there is none that can.
        """
        known = [course for course in courses if course.branch.has_cache]
        if not known:
            raise error
        self._whole = None
        for course in known:
            await self._revive(course, error, attempts)

    @staticmethod
    async def _revive(course: Course, error: ExecutorError, attempts: Attempts) -> None:
        course.branch.cache.tip.tell(error)
        await course.branch.cache.revive(error, attempts)
        course.start = None

    async def _can_go_on(self, leg: Leg, course: Course, error: ExecutorError, attempts: Attempts) -> bool:
        """Tell whether the call can be made again at once, after doing what that takes."""
        is_dead = isinstance(error, InstanceUnreachableError)  # or not for long: that shows when no attempt is left
        if not is_dead and course.branch.has_cache and is_lost(error, course.branch.cache.handle):
            await self._revive(course, error, attempts)
            return True
        if isinstance(error, HandleStaleError) and leg.is_repeat:
            course.start = None  # what stands there is not what was drawn, so the rest is drawn from the newest token
            return True
        return await self._connection.restore_masks(error, [leg.request], attempts)

    @staticmethod
    def _fail(courses: Sequence[Course], error: ExecutorError | None, reason: FinishReason) -> None:
        for course in courses:
            course.branch.finish_reason, course.branch.error = reason, error


class AsyncTextGeneration(AsyncIterator[str]):
    """A generation yielding pieces of text, never half a character; made by ``AsyncCache.generate_text``.

    The text is the server's, which knows only what it has drawn in this generation. So where one was left inside a
    character and the next one goes on in it, the tokenizer is asked once more for that piece; and at the end, whether
    a character is lacking its rest, or the model has written U+FFFD itself.
    """

    def __init__(self, generation: AsyncGeneration, connection: Connection, context: Sequence[int]) -> None:
        self._generation = generation
        self._connection = connection
        self._context = context
        self._num_out = 0
        self._has_ended = False

    async def __aenter__(self) -> AsyncTextGeneration:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def __anext__(self) -> str:
        while not self._has_ended:
            piece = await self._next_piece()
            if piece:
                return piece
        raise StopAsyncIteration

    @property
    def tokens(self) -> list[int]:
        """Token ids drawn so far, the one that ended the text included."""
        return self._generation.tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, or None while it goes on."""
        return self._generation.finish_reason

    @property
    def output(self) -> Output | None:
        """The whole output of the newest token: log-probabilities, seed, timing."""
        return self._generation.output

    @property
    def seed(self) -> int | None:
        """Seed of the draws, or None where nothing is drawn."""
        return self._generation.seed

    async def close(self) -> None:
        """End the loop; the cache stays as it is. Closing twice changes nothing."""
        self._has_ended = True
        await self._generation.close()

    async def _next_piece(self) -> str:
        self._has_ended = await self._generation.advance() is None
        piece = self._generation.text[self._num_out :]
        is_first = self._num_out == 0
        self._num_out = len(self._generation.text)
        if is_first and piece.startswith(_REPLACEMENT):
            piece = await self._text_behind_context()
        if piece.endswith(_REPLACEMENT) and self._generation.finish_reason is not None and await self._is_cut():
            return piece.rstrip(_REPLACEMENT)
        return piece

    async def _text_behind_context(self) -> str:
        """Return the text of the tokens so far, of which the first ones end a character that began before them."""
        detokenizer = AsyncDetokenizer(self._decode, self._context)
        text = ""
        for token in self._generation.tokens:
            text += await detokenizer.push(token)
        return text

    async def _is_cut(self) -> bool:
        """Tell whether the text ends inside a character, which its last tokens alone show."""
        return (await self._decode([*self._context, *self._generation.tokens][-_WINDOW:]))[1]

    async def _decode(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        return await self._connection.decode_text(token_ids)
