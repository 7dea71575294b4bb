# Written by tools/strip_async.py from ../aio/stream.py: change that and run `make sync`.
"""Decoding several caches together over one open stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, overload

from ferrule.v1 import executor_pb2
from ferrule_client import _check, _convert, _messages
from ferrule_client._messages import Appended, Input, PromptOptions
from ferrule_client._public import publish
from ferrule_client._timeouts import USE_DEFAULT, Timeout
from ferrule_client._tip import Tip
from ferrule_client._token_log import TokenLog
from ferrule_client.errors import FerruleError
from ferrule_client.items import Append, Item, Prompt, Verify
from ferrule_client.policy import Policy, check_policy, hinting
from ferrule_client.sync._calls import calls_of, release_all, tip_of
from ferrule_client.sync._closing import Closing
from ferrule_client.sync._connection import Connection
from ferrule_client.sync._exchange import Exchange
from ferrule_client.sync.branches import Branches
from ferrule_client.types import Tokens

if TYPE_CHECKING:
    from ferrule_client.sync.cache import Cache

__all__ = ["Stream"]

Errors = Literal["raise", "return"]
"""What becomes of an item that failed: the first error is raised, or each is returned in the item's place."""

_R = TypeVar("_R")


@hinting
class Stream(Closing):
    """One open StreamDecode: each ``run`` is one frame out and, as a rule, one frame back.

    It is opened at the first use, and opened again if the connection breaks: what was under way is then sent once more,
    which is safe, because an append that already happened is answered as a replay. Not safe to use from two threads
    at once; open a stream per thread.

    Behind a proxy with several instances each instance gets a frame with the items of its own sequences, on a
    StreamDecode of its own, and the answers are put together. If one of them fails, the sequences of the others have
    moved all the same. New sequences are made on the first of them.

    Example::

        with client.stream() as stream, cache.fork(3) as branches:
            outputs = stream.run([Append(branch, policy=greedy()) for branch in branches])
    """

    def __init__(self, connection: Connection, follow: Callable[..., Cache]) -> None:
        self._connection = connection
        self._follow = follow
        self._exchange = Exchange(connection)
        self._calls = self._exchange.calls

    def __del__(self) -> None:
        if self.__dict__.get("_calls"):
            self._exchange.drop()

    @property
    def free_blocks(self) -> int | None:
        """Free blocks in the server's KV pool after the newest step, or None before the first.

        With several instances, those of the one that answered last.
        """
        return self._exchange.free_blocks

    @property
    def num_frames(self) -> int:
        """Frames received so far. Releases may be answered by a frame of their own."""
        return self._exchange.num_frames

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
        checked: Sequence[Any] = items  # Any: of each kind
        caches = [_cache_of(item) for item in items]
        known = [id(cache) for cache in caches if cache is not None]
        if len(set(known)) != len(known):
            raise ValueError("a cache can be in a frame only once; stream.branch makes branches in one frame")
        inputs = [self._prepared(item, timeout) for item in items]
        is_patient = all(one.recover if isinstance(one, Prompt) else calls_of(one.cache).recovers for one in checked)
        attempts = self._exchange.attempts(inputs, timeout, is_patient=is_patient)
        results = self._exchange.perform(caches, inputs, list(release), attempts)
        settled = list(map(self._settled, items, inputs, results))
        if errors == "raise":
            born = [one for item, one in zip(items, settled, strict=True) if isinstance(item, Prompt)]
            self._raise_first(settled, born, "item")
        return settled

    def _prepared(self, item: Any, timeout: Timeout) -> Input:
        if not isinstance(item, Prompt):
            sent = calls_of(item.cache).prepare_item(item, timeout)
            if not isinstance(item, Append) or not item.is_chunk:
                return sent
            assert isinstance(sent, executor_pb2.DecodeInput)
            return _messages.chunk_input(sent, item)
        reads = _messages.Reading(item.parse_special_tokens, item.add_special_tokens and "begin")
        ids = self._connection.ids_of(item.tokens, reads, timeout=timeout, is_patient=item.recover)
        return _messages.prompt_input(ids, self._options(item), item)

    def _settled(self, item: Any, sent: Input, result: Appended | FerruleError) -> Any:
        """Move a cache by what came of its item, or make that of a new sequence; return that, or the error."""
        if isinstance(item, Prompt):
            return result if isinstance(result, FerruleError) else self._new_cache(item, sent, result)
        tip = tip_of(item.cache)
        if isinstance(result, FerruleError):
            tip.doubt(_messages.tokens_of(sent), result)
            return result
        return tip.settled(item, sent, result)

    def _new_cache(self, item: Prompt, sent: Input, result: Appended) -> Cache:
        output = _convert.output_from_message(result)
        assert isinstance(result, executor_pb2.PrefillOutput)
        tip = Tip(output.handle, output, TokenLog(_messages.tokens_of(sent)), _convert.granted_ttl_s(result))
        tip.choose(output, item.policy if item.is_final else None)
        return self._follow(tip, recovery=self._options(item) if item.recover else None)

    def _options(self, item: Prompt) -> PromptOptions:
        """Return how the sequence of a prompt is kept."""
        return _messages.options_of(item, self._connection.durability)

    def branch(
        self,
        parents: Sequence[Cache],
        tokens: Sequence[Tokens | str],
        *,
        parse_special_tokens: bool = False,
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
            parse_special_tokens: As in ``Cache.append``.
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
        for parent in {id(one): one for place, one in enumerate(parents) if firsts[id(one)] != place}.values():
            if tip_of(parent).is_ahead:  # else a branch may repeat what a loop drew there, and be no new sequence
                calls_of(parent).drop_beyond(timeout)
        inputs = [
            calls_of(parent).prepare(
                one,
                policy,
                "fail" if firsts[id(parent)] == place else "fork",
                parses=parse_special_tokens,
                branches=firsts[id(parent)] != place,
                timeout=timeout,
            )
            for place, (parent, one) in enumerate(zip(parents, tokens, strict=True))
        ]
        _check_branches([firsts[id(parent)] for parent in parents], inputs)
        tips = [tip_of(one).branch(one.handle, at_tip=True, ttl_s=tip_of(one).ttl_s) for one in parents]
        is_patient = all(calls_of(parent).recovers for parent in parents)
        attempts = self._exchange.attempts(inputs, timeout, is_patient=is_patient)
        results = self._exchange.perform(parents, inputs, list(release), attempts)
        children = [_child(*one, policy) for one in zip(parents, inputs, tips, results, strict=True)]
        born = [one for one in children if all(one is not parent for parent in parents)]
        self._raise_first(children, born, "place")
        return Branches(self._connection, cast("list[Cache]", children), foreign=parents)

    def _raise_first(self, results: Sequence[object], born: Sequence[object], what: str) -> None:
        """Raise the first error among results; new sequences, which nobody will see, are released then."""
        for place, result in enumerate(results):
            if isinstance(result, FerruleError):
                text = "each one that succeeded has moved on, and new sequences are released"
                result.add_note(f"this was {what} {place} of {len(results)}; {text}")
                born = [one for one in born if not isinstance(one, FerruleError)]
                with contextlib.suppress(FerruleError):  # their leases end them
                    if born:
                        release_all(self._connection, cast("list[Cache]", born))
                raise result

    def close(self) -> None:
        """End the stream. The caches stay as they are. Closing twice changes nothing."""
        self._exchange.close()


def _child(
    parent: Cache, sent: executor_pb2.DecodeInput, tip: Tip, result: Appended | FerruleError, policy: Policy | None
) -> Cache | FerruleError:
    """Return what became of one place of a branching frame: the parent, a cache that follows ``tip``, or the error.

    The parent may have moved by an earlier place; ``tip`` is a branch of where it was before the frame.
    """
    if isinstance(result, FerruleError):
        tip_of(parent).doubt(sent.input_ids, result)
        return result
    output = _convert.output_from_message(result)
    if output.handle.cache_id == parent.handle.cache_id:
        tip_of(parent).moved(sent.input_ids, output, policy)
        return parent
    tip.moved(sent.input_ids, output, policy)
    return parent._sibling(tip)  # noqa: SLF001


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
