"""The requests that a cache sends, built from checked arguments. Pure functions, shared by sync and async."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from ferrule.v1 import cache_pb2, executor_pb2, types_pb2
from ferrule_client import _check, _convert
from ferrule_client.errors import TruncateBeyondError
from ferrule_client.policy import Policy, check_policy, no_output, sample, seeded
from ferrule_client.types import Acceptance, Handle

__all__ = [
    "PromptOptions",
    "aim",
    "check_scoring",
    "fork_request",
    "generation_policy",
    "new_request_id",
    "prefill_request",
    "prompt_request",
    "recovery_request",
    "reserve_request",
    "truncate_request",
    "verify_request",
]

SequenceRequest = (
    executor_pb2.DecodeRequest
    | executor_pb2.PrefillRequest
    | executor_pb2.ForwardVerifyRequest
    | cache_pb2.ForkCacheRequest
    | cache_pb2.TruncateKvRequest
    | cache_pb2.GetCacheInfoRequest
    | cache_pb2.ReserveKvSlotsRequest
)
"""Requests about one sequence: with ``kv_cache``, or with an ``input`` or one of ``requests`` that has it."""


_MAX_LENGTH = 2**32 - 1


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How a new sequence is made.

    Attributes:
        ttl: Lease in seconds; None: the server's default.
        reserve_length: Length in tokens up to which room is reserved, or None.
        reuse_prefix: True: look for the prompt in the prefix cache.
        publish_prefix: True: keep its blocks for later prompts.
    """

    ttl: float | None = None
    reserve_length: int | None = None
    reuse_prefix: bool = True
    publish_prefix: bool = True


def new_request_id() -> str:
    """Return an id for a call that makes sequences; sent again with it, the call makes them once."""
    return uuid.uuid4().hex


def prompt_request(
    token_ids: Sequence[int],
    options: PromptOptions,
    *,
    policy: Policy | None = None,
    all_positions: bool = False,
    request_id: str = "",
) -> executor_pb2.PrefillRequest:
    """Return the prefill of a new sequence; without a request id it gets one.

    Raises:
        TypeError: The policy is none.
        ValueError: An option is out of its range, or ``target_logprobs`` comes without ``all_positions``.
    """
    check_scoring(policy, len(token_ids), all_positions=all_positions)
    _check.whole("reserve_length", options.reserve_length)
    cache = executor_pb2.CacheOptions(
        ttl=_convert.duration(options.ttl),
        reuse_prefix=options.reuse_prefix,
        publish_prefix=options.publish_prefix,
        reserve_length=options.reserve_length,
    )
    item = executor_pb2.PrefillInput(
        request_id=request_id or new_request_id(),
        input_ids=token_ids,
        logits_policy=_convert.policy_to_message(seeded(policy)),
        logits_positions=_positions(all_positions),
        cache=cache,
    )
    return executor_pb2.PrefillRequest(input=item)


def recovery_request(token_ids: Sequence[int], options: PromptOptions) -> executor_pb2.PrefillRequest:
    """Return the prefill that brings a lost sequence back: its tokens, and no output for them."""
    return prompt_request(token_ids, options, policy=no_output())


def prefill_request(
    sent: executor_pb2.DecodeInput, policy: Policy | None, *, all_positions: bool, ttl: float | None
) -> executor_pb2.PrefillRequest:
    """Return an append as a prefill.

    Args:
        sent: The append.
        policy: The policy it was made with.
        all_positions: True: a row for every token.
        ttl: New lease in seconds, or None.

    Raises:
        ValueError: ``target_logprobs`` of several tokens comes without ``all_positions``, or the lease is no length.
    """
    check_scoring(policy, len(sent.input_ids), all_positions=all_positions)
    item = executor_pb2.PrefillInput(
        request_id=sent.request_id,
        input_ids=sent.input_ids,
        kv_cache=sent.kv_cache,
        logits_policy=sent.logits_policy if policy else None,
        logits_positions=_positions(all_positions),
        cache=executor_pb2.CacheOptions(ttl=_convert.duration(ttl)),
        on_stale=sent.on_stale,
    )
    return executor_pb2.PrefillRequest(input=item)


def verify_request(
    sent: executor_pb2.DecodeInput,
    policy: Policy | None,
    drafts: Sequence[int],
    *,
    acceptance: Acceptance | None,
    parents: Sequence[int],
    draft_probs: npt.NDArray[np.floating] | None,
    row_handles: bool,
) -> executor_pb2.ForwardVerifyRequest:
    """Return an append of certain tokens and drafts.

    Raises:
        ValueError: There is no certain token, or ``acceptance`` is no rule.
    """
    if not sent.input_ids:
        text = "a verify needs a certain token, one that is not in the sequence yet: give `tokens`"
        raise ValueError(f"{text} (after a generate or a verify it is pending and goes along by itself)")
    rule = acceptance or ("exact" if policy is not None and policy.selection is not None else "none")
    item = executor_pb2.VerifyInput(
        input_ids=sent.input_ids,
        kv_cache=sent.kv_cache,
        logits_policy=sent.logits_policy if policy else None,
        on_stale=sent.on_stale,
        draft_ids=drafts,
        parents=parents,
        acceptance=_convert.acceptance_to_message(rule),
        draft_probs=None if draft_probs is None else _convert.draft_probs_to_message(draft_probs),
        return_row_handles=row_handles,
    )
    return executor_pb2.ForwardVerifyRequest(input=item)


def fork_request(handle: Handle, n: int, length: int | None, ttl: float | None) -> cache_pb2.ForkCacheRequest:
    """Return the request for ``n`` branches.

    Raises:
        ValueError: ``n`` or ``length`` is below 1, or ``ttl`` negative.
    """
    _check.whole("n", n, 1)
    _check.whole("length", length, 1)
    return cache_pb2.ForkCacheRequest(
        kv_cache=_convert.handle_to_message(handle),
        count=n,
        request_id=new_request_id(),
        length=length,
        ttl=_convert.duration(ttl),
    )


def truncate_request(handle: Handle, length: int) -> cache_pb2.TruncateKvRequest:
    """Return the request to keep ``length`` tokens.

    Raises:
        TruncateBeyondError: It is negative, which the wire cannot hold; in the words of the server.
        ValueError: It is no whole number.
    """
    if length < 0:
        text = f"cannot truncate to {length} tokens: lengths go from 1 to {handle.length}"
        metadata = {"handle_id": handle.handle_id, "new_length": str(length), "length": str(handle.length)}
        raise TruncateBeyondError(grpc.StatusCode.OUT_OF_RANGE, "TRUNCATE_BEYOND", text, metadata)
    _check.whole("length", length)
    return cache_pb2.TruncateKvRequest(kv_cache=_convert.handle_to_message(handle), new_length=length)


def reserve_request(
    handles: Sequence[Handle], lengths: int | Sequence[int], fitting_lengths: int | Sequence[int] | None
) -> cache_pb2.ReserveKvSlotsRequest:
    """Return the request for room in several sequences.

    Args:
        handles: The sequences.
        lengths: Length of each that is to have its room now; one for all, or one for each.
        fitting_lengths: Length of each that must fit besides, or None.

    Raises:
        ValueError: The sizes differ, or a length is no whole number.
    """
    targets = _per_handle("lengths", lengths, len(handles))
    limits = [None] * len(handles) if fitting_lengths is None else _per_handle("fitting", fitting_lengths, len(handles))
    message = _convert.handle_to_message
    return cache_pb2.ReserveKvSlotsRequest(
        requests=[
            cache_pb2.KvSlotRequest(kv_cache=message(handle), target_length=length, admission_target_length=limit)
            for handle, length, limit in zip(handles, targets, limits, strict=True)
        ]
    )


def _per_handle(name: str, lengths: int | Sequence[int], count: int) -> Sequence[int]:
    values = lengths if isinstance(lengths, Sequence) else [lengths] * count
    if len(values) != count:
        raise ValueError(f"{name} needs one entry per cache: there are {count} caches and {len(values)} entries")
    for value in values:
        if value is None:
            raise ValueError(f"{name} must be whole numbers, got None")
        _check.whole(name, value, 0, _MAX_LENGTH)
    return values


def aim(request: SequenceRequest | executor_pb2.DecodeInput, handle: Handle) -> None:
    """Point a request at the sequence that took the place of a lost one; with an id of its own, if it had one."""
    item: Any = getattr(request, "input", request)  # Any: each of these messages has its own fields
    if isinstance(request, cache_pb2.ReserveKvSlotsRequest):
        (item,) = request.requests
    item.kv_cache.CopyFrom(_convert.handle_to_message(handle))
    if getattr(item, "request_id", ""):
        item.request_id = new_request_id()


def check_scoring(policy: Policy | None, num_tokens: int, *, all_positions: bool) -> None:
    """Make sure that a policy's ``target_logprobs`` has rows whose next token is known.

    Raises:
        TypeError: It is no policy.
        ValueError: It has not: only the last of several tokens would have a row, and nothing follows that one.
    """
    check_policy(policy)
    if policy is not None and policy.target_logprobs and num_tokens > 1 and not all_positions:
        raise ValueError("target_logprobs of several tokens needs all_positions=True: nothing follows the last row")


def generation_policy(
    policy: Policy | None,
    *,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
) -> Policy:
    """Return the policy of a decode loop, with its seed: the one given, or that of the sampling settings.

    Raises:
        TypeError: It is no policy.
        ValueError: It chooses no token, or comes with sampling settings.
    """
    check_policy(policy)
    drawn = sample(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    if policy is not None and drawn != sample():
        raise ValueError("give either a policy or sampling settings, not both")
    chosen = policy or drawn
    if chosen.selection is None:
        raise ValueError("generating needs a policy that chooses tokens, such as greedy() or sample()")
    return chosen.with_seed()


def _positions(all_positions: bool) -> types_pb2.LogitsPositions:
    return types_pb2.LOGITS_POSITIONS_ALL if all_positions else types_pb2.LOGITS_POSITIONS_LAST
