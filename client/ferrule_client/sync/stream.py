# Written by tools/strip_async.py from ../aio/stream.py: change that and run `make sync`.
"""Decoding several caches together over one open stream."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, overload

import grpc

from ferrule.v1 import executor_pb2
from ferrule_client import _check, _convert, _messages
from ferrule_client._messages import Appended, Input
from ferrule_client._public import publish
from ferrule_client._retry import Attempts
from ferrule_client._route import by_instance, instance_of_handle
from ferrule_client._status import error_from_status
from ferrule_client._timeouts import USE_DEFAULT, Timeout
from ferrule_client._tip import Tip
from ferrule_client._token_log import TokenLog
from ferrule_client.errors import (
    CallCancelledError,
    DeadlineExceededError,
    FerruleError,
    InvalidRequestError,
    UnavailableError,
)
from ferrule_client.items import Append, Item, Prompt, Verify
from ferrule_client.policy import Policy, check_policy
from ferrule_client.sync._calls import calls_of, tip_of
from ferrule_client.sync._connection import Connection
from ferrule_client.sync._exchange import Done, Exchange, as_answers
from ferrule_client.sync._stream_call import StreamCall
from ferrule_client.sync.branches import Branches
from ferrule_client.types import Output, Tokens, Verification

if TYPE_CHECKING:
    from ferrule_client.sync.cache import Cache

__all__ = ["Stream"]

_MAX_SEQ = 0xFFFF_FFFF
"""Numbers of items wrap around beyond it."""

Errors = Literal["raise", "return"]
"""What becomes of an item that failed: the first error is raised, or each is returned in the item's place."""

_R = TypeVar("_R")


class Stream:
    """One open StreamDecode: each ``run`` is one frame out and, as a rule, one frame back.

    It is opened at the first use, and opened again if the connection breaks: what was under way is then sent once more,
    which is safe, because an append that already happened is answered as a replay. Not safe to use from two threads
    at once; open a stream per thread.

    Behind a proxy with several instances each instance gets a frame with the items of its own sequences, on a
    StreamDecode of its own, and the answers are put together. If one of them fails, the sequences of the others have
    moved all the same. New sequences are made on the first of them.

    Attributes:
        free_blocks: Free blocks in the server's KV pool after the newest step, or None before the first; with several
            instances, in the pool of the one that answered last.
        num_frames: Frames received so far. Releases may be answered by a frame of their own.

    Example::

        with client.stream() as stream, cache.fork(3) as branches:
            outputs = stream.run([Append(branch, policy=greedy()) for branch in branches])
    """

    def __init__(self, connection: Connection, follow: Callable[..., Cache]) -> None:
        self._connection = connection
        self._follow = follow
        self._calls: dict[str, StreamCall] = {}  # by instance; the empty name until one is known
        self._seq = itertools.count(1)
        self._is_closed = False
        self._in_use = threading.Lock()
        self.free_blocks: int | None = None
        self.num_frames = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_calls"):
            self._drop_calls()

    @overload
    def run(
        self,
        items: Sequence[Prompt],
        *,
        errors: Literal["raise"] = "raise",
        release: Iterable[Cache] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Cache]: ...

    @overload
    def run(
        self,
        items: Sequence[Prompt],
        *,
        errors: Literal["return"],
        release: Iterable[Cache] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Cache | FerruleError]: ...

    @overload
    def run(
        self,
        items: Sequence[Item[_R]],
        *,
        errors: Literal["raise"] = "raise",
        release: Iterable[Cache] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[_R]: ...

    @overload
    def run(
        self,
        items: Sequence[Item[_R]],
        *,
        errors: Literal["return"],
        release: Iterable[Cache] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[_R | FerruleError]: ...

    def run(
        self,
        items: Sequence[Item[Any]],
        *,
        errors: Errors = "raise",
        release: Iterable[Cache] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Any]:
        """Run prompts, appends and verifies, in any combination, all in one frame.

        Every cache whose item succeeded has moved, also if this raises for another one.

        Args:
            items: What to run; each cache at most once.
            errors: ``raise``: raise the first error of an item. ``return``: return each error in its item's place.
            release: Caches to end in the same frame, before the items are judged: their blocks serve these.
            timeout: Seconds this may take, retries included.

        Returns:
            For each item, in their order: the cache of a ``Prompt``, the output of an ``Append``, the verification of
            a ``Verify``.

        Raises:
            FerruleError: An item failed, with a note that says which; prompts of this frame that succeeded are
                released then. Or the stream failed: each append may or may not have happened, and repeating it is safe.
            PendingTokenError: As in ``Cache.append``.
            TypeError: An item is of another type.
            ValueError: A cache comes twice, or an item is out of its range.

        Example:
            ``output, check = stream.run([Append(a, 5, greedy()), Verify(b, [7, 8])])``
        """
        _check.choice("errors", errors, get_args(Errors))
        timeout = self._connection.until(timeout)
        caches = [_cache_of(item) for item in items]
        _check_once(caches)
        inputs = [self._prepared(item, timeout) for item in items]
        is_patient = all(_is_patient(item) for item in items)
        results = self._append(caches, inputs, release=release, is_patient=is_patient, timeout=timeout)
        settled = list(map(self._settled, items, inputs, results))
        if errors == "raise":
            born = [one for item, one in zip(items, settled, strict=True) if isinstance(item, Prompt)]
            self._raise_first(settled, born, "item")
        return settled

    def _prepared(self, item: Item[Any], timeout: Timeout) -> Input:
        if isinstance(item, Append):
            return calls_of(item.cache).prepare_append(item, timeout=timeout)
        if isinstance(item, Verify):
            return calls_of(item.cache).prepare_verify(item, timeout=timeout)
        assert isinstance(item, Prompt)
        ids = (
            self._connection.encode_text(item.tokens, timeout=timeout, is_patient=item.recover)
            if isinstance(item.tokens, str)
            else _check.token_list(item.tokens)
        )
        return _messages.prompt_input(ids, item)

    def _settled(
        self, item: Item[Any], sent: Input, result: Appended | FerruleError
    ) -> Cache | Output | Verification | FerruleError:
        """Move a cache by what came of its item, or make that of a new sequence."""
        if isinstance(item, Prompt):
            return result if isinstance(result, FerruleError) else self._new_cache(item, sent, result)
        assert isinstance(item, (Append, Verify))
        tip, tokens = tip_of(item.cache), _messages.tokens_of(sent)
        if isinstance(result, FerruleError):
            tip.doubt(tokens, result)
            return result
        if isinstance(item, Append):
            return tip.moved(tokens, _convert.output_from_message(result), item.policy if item.is_final else None)
        assert isinstance(result, _messages.VerifyOutput)  # the answer is of the kind of the input
        assert isinstance(sent, executor_pb2.VerifyInput)
        verification = _convert.verification_from_message(result)
        return tip.verified(sent.input_ids, sent.draft_ids, item.parents, verification, item.policy or tip.policy)

    def _new_cache(self, item: Prompt, sent: Input, result: Appended) -> Cache:
        output = _convert.output_from_message(result)
        assert isinstance(result, executor_pb2.PrefillOutput)
        ttl_s = _convert.granted_ttl_s(result)
        tip = Tip(output.handle, last=output, log=TokenLog(_messages.tokens_of(sent)), ttl_s=ttl_s)
        tip.choose(output, item.policy if item.is_final else None)
        options = _messages.PromptOptions(item.ttl, item.reserve_length, item.reuse_prefix, item.publish_prefix)
        return self._follow(tip, recovery=options if item.recover else None)

    def branch(
        self,
        parents: Sequence[Cache],
        tokens: Sequence[Tokens | str],
        *,
        policy: Policy | None = None,
        release: Iterable[Cache] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> Branches:
        """Append to caches that may come several times, all in one frame: beam search.

        Of the places that name one parent, the first appends to it and returns the parent itself, moved; each of the
        others branches where the parent was and returns a new cache. ``last`` of each is its own output. Two places
        of one parent need different tokens: two sequences of the same tokens are made with ``Cache.fork``.

        Args:
            parents: The sequences to continue, in any order, each as often as it has children.
            tokens: For each place its tokens, as in ``Cache.append``.
            policy: What to return for each row. None: nothing.
            release: Caches to end in the same frame, before the others are judged: the losers, none of the parents.
            timeout: Seconds this may take, retries included.

        Returns:
            One cache per place. Leaving ``with`` of them releases the new ones.

        Raises:
            FerruleError: An item failed (the first error is raised, with a note that says which), or the stream did.
                New branches of this call are released then, as far as their answers came; parents that succeeded
                have moved.
            ValueError: The sizes differ, or two places would be the same sequence.

        Example:
            ``beams = stream.branch([root, root, root], [a, b, c], policy=Policy(top_logprobs=6))``
        """
        if len(tokens) != len(parents):
            raise ValueError(f"tokens needs one entry per parent: there are {len(parents)} and {len(tokens)} entries")
        check_policy(policy)
        timeout = self._connection.until(timeout)
        firsts = {id(parent): place for place, parent in reversed(list(enumerate(parents)))}
        inputs = [
            calls_of(parent).prepare(
                one,
                policy,
                "fail" if firsts[id(parent)] == place else "fork",
                branches=firsts[id(parent)] != place,
                timeout=timeout,
            )
            for place, (parent, one) in enumerate(zip(parents, tokens, strict=True))
        ]
        _check_branches([firsts[id(parent)] for parent in parents], inputs)
        logs = [tip_of(parent).log.branch() for parent in parents]
        is_patient = all(calls_of(parent).recovers for parent in parents)
        results = self._append(parents, inputs, release=release, is_patient=is_patient, timeout=timeout)
        children = [_child(*one, policy) for one in zip(parents, inputs, logs, results, strict=True)]
        born = [one for one in children if all(one is not parent for parent in parents)]
        self._raise_first(children, born, "place")
        return Branches(self._connection, cast("list[Cache]", children), foreign=parents)

    def _raise_first(self, results: Sequence[object], born: Sequence[object], what: str) -> None:
        """Raise the first error among results; new sequences, which nobody will see, are released then."""
        for place, result in enumerate(results):
            if isinstance(result, FerruleError):
                text = "each one that succeeded has moved on, and new sequences are released"
                result.add_note(f"this was {what} {place} of {len(results)}; {text}")
                self._forget([one for one in born if not isinstance(one, FerruleError)])
                raise result

    def _append(
        self,
        caches: Sequence[Cache | None],
        inputs: Sequence[Input],
        *,
        release: Iterable[Cache],
        is_patient: bool,
        timeout: Timeout,
    ) -> list[Appended | FerruleError]:
        """Exchange the appends of caches, which do not move by it.

        If the stream fails, its appends are in doubt, and what was to be released is still ours. Sequences that are
        lost are brought back if their caches do that, and their appends are sent once more.
        """
        attempts = self._attempts(inputs, timeout, is_patient=is_patient and bool(inputs))
        return Exchange(self._connection, self._send, attempts).perform(caches, inputs, list(release))

    def _forget(self, caches: Sequence[Any]) -> None:
        """Release sequences that nobody will see; if that fails too, their leases end them."""
        tips = [calls_of(cache).give_up() for cache in caches]
        if tips:
            with contextlib.suppress(FerruleError):
                self._exchange([], release=tips)

    def _exchange(
        self,
        inputs: Sequence[Input],
        *,
        release: Sequence[Tip] = (),
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Appended | FerruleError]:
        """Send inputs as one frame and return their results, in their order. The level below ``run``.

        Args:
            inputs: Messages of the contract; with seeds, so that a retry draws the same tokens.
            release: Sequences to end in the same frame.
            timeout: Seconds this may take, retries included.

        Returns:
            The output or the error of each input.

        Raises:
            FerruleError: The stream failed.
            RuntimeError: Another thread is using the stream.
        """
        return Exchange(self._connection, self._send, self._attempts(inputs, timeout)).run(inputs, release)

    def _attempts(self, inputs: Sequence[Input], timeout: Timeout, *, is_patient: bool = False) -> Attempts:
        made = [one for one in inputs if _messages.creates(one)]
        has_ids = all(one.request_id for one in made)
        return self._connection.attempts(timeout, creates=bool(made), has_request_id=has_ids, is_patient=is_patient)

    def _send(self, inputs: Sequence[Input], release: Sequence[Tip], done: Done, attempts: Attempts) -> None:
        """Send frames until every input has its answer in ``done``, unless another thread is doing that."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("this stream is used by two threads at once; open one for each with client.stream()")
        try:
            self._answer(inputs, release, done, attempts)
        finally:
            self._in_use.release()

    def _answer(self, inputs: Sequence[Input], release: Sequence[Tip], done: Done, attempts: Attempts) -> None:
        """Exchange frames until every input has its answer in ``done``, by place; on new calls where some break."""
        losers, num_instances = list(release), 0
        while True:
            most = self._connection.handle_limit.most
            now, later = losers[:most], losers[most:]
            if later:
                num_instances = num_instances or self._count_instances(inputs, losers)
            try:
                # What is too much for one frame is answered before the next frame leaves: asyncio's gRPC forgets why a
                # call was refused if it was writing another frame at that moment.
                legs = self._open_legs([] if later else inputs, now, done)
                num_instances = num_instances or len(legs)
                # Several are all on their way before anything is read; one is read at once, which sends it too.
                for is_reading in (True,) if len(legs) == 1 else (False, True):
                    for leg in legs:
                        self._serve(leg, done, attempts, is_alone=num_instances == 1, is_reading=is_reading)
            except BaseException:  # a timeout, or Ctrl-C: what is under way stays unread
                self._drop_calls()
                raise
            again = self._retried(legs, done, attempts, num_instances)
            if not (again or later):
                return
            losers = [tip for leg in again for tip in leg.losers] + later

    def _retried(self, legs: Sequence[_Leg], done: Done, attempts: Attempts, num_instances: int) -> list[_Leg]:
        """Wait before another attempt and return the parts that are sent again.

        Where there is no further attempt, what a part failed with becomes the answer to its items.
        """
        broken = {leg: leg.error for leg in legs if leg.error is not None}
        failed = {leg: error for leg, error in broken.items() if not self._was_too_long(leg, error)}
        first = next(iter(failed), None)
        if first is not None:
            try:
                self._connection.wait(attempts, failed[first], first.cause)
            except FerruleError:
                for leg, error in failed.items():
                    done.update(as_answers(error, leg.waiting.values(), num_instances))
                return [leg for leg in broken if leg not in failed]
        return list(broken)

    def _was_too_long(self, leg: _Leg, error: FerruleError) -> bool:
        """Report whether a frame was refused for too many handles to release; they then go in smaller frames."""
        is_about_release = isinstance(error, InvalidRequestError) and error.field == "release"
        return is_about_release and self._connection.handle_limit.shrink(error, len(leg.losers))

    def close(self) -> None:
        """End the stream. The caches stay as they are. Closing twice changes nothing."""
        self._is_closed = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.close()

    def _open_legs(self, inputs: Sequence[Input], losers: Sequence[Tip], done: Done) -> list[_Leg]:
        """Send what is not answered yet: a frame to each instance that has some of it."""
        waiting = [place for place in range(len(inputs)) if place not in done]
        groups = by_instance([inputs[place] for place in waiting], self._instance_of)
        ends = by_instance(losers, lambda tip: self._connection.instance_of_handle(tip.handle))
        if "" in groups:  # new sequences alone: any instance will do, so the one that is asked anyway
            groups = {next(iter(ends), "") or next(iter(self._calls), ""): groups[""]}
        legs = []
        for instance in dict.fromkeys((*groups, *ends)) or ("",):
            places = [waiting[one] for one in groups.get(instance, ())]
            seqs = {next(self._seq) & _MAX_SEQ: place for place in places}
            leg = _Leg(instance, self._open_call(instance), seqs, [losers[one] for one in ends.get(instance, ())])
            items = [_messages.stream_item(seq, inputs[place]) for seq, place in leg.waiting.items()]
            handles = [_convert.handle_to_message(tip.handle) for tip in leg.losers]
            leg.call.send(executor_pb2.StreamDecodeRequest(items=items, release=handles))
            legs.append(leg)
        return legs

    def _count_instances(self, inputs: Sequence[Input], losers: Sequence[Tip]) -> int:
        ends = {self._connection.instance_of_handle(tip.handle) for tip in losers}
        return len(ends.union(map(self._instance_of, inputs)) - {""}) or 1

    def _instance_of(self, sent: Input) -> str:
        return self._connection.instance_of_handle(sent.kv_cache)

    def _serve(self, leg: _Leg, done: Done, attempts: Attempts, *, is_alone: bool, is_reading: bool) -> None:
        """See that a part of a frame is on its way, or read until it is answered; or note what it failed with."""
        if leg.error is not None:
            return
        try:
            if not is_reading:
                leg.call.flush(attempts.remaining())
            while is_reading and (leg.waiting or leg.num_releases > 0):
                self._take(leg, leg.call.receive(attempts.remaining()), done)
        except DeadlineExceededError as error:
            if is_alone:
                raise
            self._drop_call(leg)
            leg.error = error
        except grpc.RpcError as error:
            self._drop_call(leg)
            leg.error, leg.cause = self._connection.typed(error, leg.instance), error
        except StopIteration:
            self._drop_call(leg)
            text = "the server ended the stream before it answered"
            leg.error = UnavailableError(grpc.StatusCode.UNAVAILABLE, "CONNECTION_LOST", text)

    def _take(self, leg: _Leg, frame: executor_pb2.StreamDecodeResponse, done: Done) -> None:
        """Put the answers of a frame in; they also tell which instance a call has reached."""
        self.num_frames += 1
        self.free_blocks = frame.free_blocks
        leg.num_releases -= len(frame.releases)
        for result in frame.results:
            place, answer = leg.waiting.pop(result.seq), _messages.stream_answer(result)
            done[place] = answer or error_from_status(result.error)
            if answer is not None and not leg.instance:
                leg.instance = instance_of_handle(answer.kv_cache)
                if leg.instance and leg.instance not in self._calls:
                    self._calls[leg.instance] = self._calls.pop("")

    def _open_call(self, instance: str) -> StreamCall:
        if not (self._is_closed or self._connection.is_closed):
            call = self._calls.get(instance)
            if call is not None and call.is_over:
                call.cancel()
                call = None
            call = call or self._new_call(instance)
            if call is not None:
                self._calls[instance] = call
                return call
        raise CallCancelledError(grpc.StatusCode.CANCELLED, "CANCELLED", "the stream is closed")

    def _new_call(self, instance: str) -> StreamCall | None:
        """Return a new call; None: the client was closed just now."""
        try:
            return StreamCall(self._connection.wire, instance)
        except ValueError:  # gRPC's answer to a closed channel
            if not self._connection.is_closed:
                raise
            return None

    def _drop_call(self, leg: _Leg) -> None:
        self._calls = {instance: call for instance, call in self._calls.items() if call is not leg.call}
        leg.call.cancel()

    def _drop_calls(self) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel()


class _Leg:
    """The part of a frame that one instance answers.

    Attributes:
        instance: Its name; empty: not known yet.
        call: Where it was sent.
        waiting: Places of the inputs that have no answer yet, by what they are called in the frame.
        losers: Sequences that end with it.
        num_releases: Those of them that are not answered yet.
        error: What it failed with, or None.
        cause: The gRPC error that caused it, or None.
    """

    __slots__ = ("call", "cause", "error", "instance", "losers", "num_releases", "waiting")

    def __init__(self, instance: str, call: StreamCall, waiting: dict[int, int], losers: Sequence[Tip]) -> None:
        self.instance = instance
        self.call = call
        self.waiting = waiting
        self.losers = losers
        self.num_releases = len(losers)
        self.error: FerruleError | None = None
        self.cause: grpc.RpcError | None = None


def _is_patient(item: Item[Any]) -> bool:
    """Return whether an item waits for a server that went away."""
    return item.recover if isinstance(item, Prompt) else calls_of(item.cache).recovers  # type: ignore[attr-defined]


def _child(
    parent: Cache,
    sent: executor_pb2.DecodeInput,
    log: TokenLog,
    result: Appended | FerruleError,
    policy: Policy | None,
) -> Cache | FerruleError:
    """Return what became of one place of a branching frame: the parent itself, a new cache, or the error.

    Args:
        parent: Its parent; it may have moved by an earlier place.
        sent: What was sent.
        log: The parent's tokens before the frame, for this child alone.
        result: The answer.
        policy: The policy of all.
    """
    if isinstance(result, FerruleError):
        tip_of(parent).doubt(sent.input_ids, result)
        return result
    output = _convert.output_from_message(result)
    if output.handle.cache_id == parent.handle.cache_id:
        tip_of(parent).moved(sent.input_ids, output, policy)
        return parent
    log.extend(sent.input_ids)
    return parent._sibling(tip_of(parent).child(output, log, policy))  # noqa: SLF001


def _cache_of(item: Item[Any]) -> Any:
    """Return the cache of an item; None: it makes a sequence.

    Raises:
        TypeError: It is not an item.
    """
    if isinstance(item, (Append, Verify)):
        return item.cache
    if isinstance(item, Prompt):
        return None
    raise TypeError(f"an item is a Prompt, an Append or a Verify, got {type(item).__name__}")


def _check_once(caches: Sequence[Cache | None]) -> None:
    known = [id(cache) for cache in caches if cache is not None]
    if len(set(known)) != len(known):
        raise ValueError("a cache can be in a frame only once; stream.branch makes branches in one frame")


def _check_branches(firsts: Sequence[int], inputs: Sequence[executor_pb2.DecodeInput]) -> None:
    """Make sure that every place of a frame is a sequence of its own.

    Args:
        firsts: For each place the first place with the same parent.
        inputs: What is sent for each place.

    Raises:
        ValueError: Two would be one.
    """
    for place, first in enumerate(firsts):
        if place == first:
            continue
        ids, beside = list(inputs[place].input_ids), list(inputs[first].input_ids)
        if not ids or not beside or ids == beside[: len(ids)]:
            text = f"places {first} and {place} have the same parent and would be the same sequence"
            raise ValueError(f"{text}: give them different tokens, or make the second one with cache.fork()")


publish(globals(), ("Stream",))
