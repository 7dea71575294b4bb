"""The requests that a cache sends, built from checked arguments. Pure functions, shared by sync and async."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypedDict, cast

import grpc
from google.protobuf.message import Message

from ferrule.v1 import cache_pb2, executor_pb2, policy_pb2, tokenizer_pb2, types_pb2
from ferrule_client import _check, _convert
from ferrule_client._timeouts import Timeout
from ferrule_client.errors import InvalidRequestError, TruncateBeyondError
from ferrule_client.items import Append, DraftDistributions, Prompt, Verify
from ferrule_client.policy import Policy, check_policy, greedy, sample, seeded
from ferrule_client.types import Acceptance, ChatMessage, Durability, Handle, WithText

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

Input = executor_pb2.DecodeInput | executor_pb2.VerifyInput | executor_pb2.UnifiedBatchItem
"""One item of a frame."""

Appended = executor_pb2.DecodeOutput | executor_pb2.VerifyOutput | executor_pb2.PrefillOutput
"""What comes of one."""


_KINDS = {
    executor_pb2.DecodeInput: "decode",
    executor_pb2.VerifyInput: "verify",
    executor_pb2.UnifiedBatchItem: "unified",
}
"""Field of ``StreamItem`` for each input, and of ``StreamResult`` for its output."""

_MAX_LENGTH = 2**32 - 1

Stops = str | int | Sequence[str | int | Sequence[int]]
"""What ends a generation: a text, a token id, or several of texts, ids and runs of ids."""


class Reading(NamedTuple):
    """How a text becomes token ids: whether text of special tokens becomes these, and what is added around it."""

    parses: bool = False
    adds: bool | Literal["begin"] = False


class TextOptions(TypedDict, total=False):
    """How ``AsyncClient.score`` reads its texts, and how long a call may take; each as it says."""

    add_special_tokens: bool
    parse_special_tokens: bool
    timeout: Timeout


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How a new sequence is made; each as in ``AsyncClient.prefill``, and ``durability`` as the client has it."""

    ttl: float | None = None
    reserve_length: int | None = None
    reuse_prefix: bool = True
    publish_prefix: bool = True
    durability: Durability | None = None
    drop_outside_window: bool = False


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What a generation is to draw: ``policy`` is the ``given`` one with a seed, and each branch stops at any stop."""

    given: Policy
    policy: Policy
    max_tokens: int | None
    n: int
    stop_ids: tuple[int, ...]
    stop_sequences: tuple[tuple[int, ...], ...]
    stop: tuple[str, ...]
    ignore_eos: bool
    has_text: bool
    includes_stop: bool = False

    def given_of(self, index: int) -> Policy:
        """Return the policy of a branch as the caller said it: with the branch's own seed if there is one."""
        selection = self.given.selection
        return self.given if selection is None or selection.seed is None else self.policy_of(index)

    @property
    def holds_text(self) -> bool:
        """True: the server holds back text that may begin a stop."""
        return self.has_text and bool(self.stop) and not self.includes_stop

    @property
    def looks_back(self) -> bool:
        """True: what a frame says depends on more than its token, so that it cannot be told from the middle on."""
        return self.has_text or bool(self.stop) or bool(self.stop_sequences)

    def seed_of(self, index: int) -> int | None:
        """Return the seed of a branch, or None where nothing is drawn."""
        seed = None if self.policy.selection is None else self.policy.selection.seed
        return None if seed is None else (seed + index) % 2**64

    def policy_of(self, index: int) -> Policy:
        """Return the policy of a branch, which differs from the first one's in the seed alone."""
        selection = self.policy.selection
        if selection is None or selection.seed is None or not index:
            return self.policy
        return replace(self.policy, selection=replace(selection, seed=self.seed_of(index)))


def generation_plan(
    policy: Policy | None, *, max_tokens: int | None, n: int, stop: Stops, ignore_eos: bool, text: WithText
) -> GenerationPlan:
    """Return what a generation is to draw, from checked arguments. Raises TypeError or ValueError for wrong ones."""
    chosen = choosing(sample() if policy is None else policy)
    _check.whole("max_tokens", max_tokens)
    _check.whole("n", n, 1)
    stops = [stop] if isinstance(stop, (str, int)) else list(stop)
    texts = tuple(one for one in stops if isinstance(one, str))
    ids = _check.token_list([one for one in stops if isinstance(one, int)])
    runs = tuple(tuple(_check.token_list(one)) for one in stops if not isinstance(one, (str, int)))
    if not all(texts) or not all(runs):
        raise ValueError("stop must not hold an empty text or an empty list")
    _check.choice("text", str(text), ["true", "false", "as_drawn"])
    ends = tuple(ids), runs, texts, ignore_eos
    return GenerationPlan(chosen, chosen.with_seed(), max_tokens, n, *ends, bool(text), text == "as_drawn")


def generate_request(
    plan: GenerationPlan,
    *,
    input_ids: Sequence[int],
    kv_cache: types_pb2.KvCacheHandle | None = None,
    on_stale: types_pb2.StalePolicy = types_pb2.STALE_POLICY_UNSPECIFIED,
    index: int = 0,
    num_drawn: int = 0,
    n: int = 1,
    request_id: str = "",
    options: PromptOptions | None = None,
) -> executor_pb2.GenerateRequest:
    """Return the request for a generation, or for the rest of one branch of it.

    Args:
        plan: What is to be drawn.
        input_ids: Tokens to run first.
        kv_cache: The sequence; None: a new one, kept by ``options``.
        on_stale: What to do if it has moved on.
        index: Number of the first of the ``n`` branches.
        num_drawn: Tokens that this one has got already.
        n: Number of branches.
        request_id: Id for what is created.
        options: How a new sequence is kept.
    """
    return executor_pb2.GenerateRequest(
        request_id=request_id,
        input_ids=input_ids,
        kv_cache=kv_cache,
        logits_policy=_convert.policy_to_message(plan.policy_of(index)),
        on_stale=on_stale,
        cache=None if options is None else _cache_options(options),
        max_tokens=None if plan.max_tokens is None else plan.max_tokens - num_drawn,
        n=n,
        stop_token_ids=plan.stop_ids,
        stop_sequences=[policy_pb2.TokenIdList(token_ids=run) for run in plan.stop_sequences],
        stop_strings=plan.stop,
        ignore_eos=plan.ignore_eos,
        return_text=plan.has_text,
        skip_special_tokens=True,
        include_stop_text=plan.includes_stop,
    )


def tokenize_request(text: str, reads: Reading) -> tokenizer_pb2.TokenizeRequest:
    """Return the request for the token ids of a text; raise TypeError or ValueError if it is no text."""
    _check.text(text)
    _check.choice("add_special_tokens", str(reads.adds), ["true", "false", "begin"])
    adds, begins = reads.adds is True, reads.adds == "begin"
    return tokenizer_pb2.TokenizeRequest(
        text=text, parse_special_tokens=reads.parses, add_special_tokens=adds, add_begin_tokens=begins
    )


def chat_request(
    messages: Sequence[ChatMessage],
    variables: Mapping[str, object] | None,
    *,
    tools: Sequence[Mapping[str, object]] = (),
    **flags: bool,
) -> tokenizer_pb2.ApplyChatTemplateRequest:
    """Return the request for a conversation as the chat template writes it; raise TypeError if it is none.

    Args:
        messages: Oldest first.
        variables: More variables for the template.
        tools: Definitions of tools.
        flags: The other fields of the request.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not all(isinstance(one, Mapping) for one in messages):
        raise TypeError('a conversation is a list of messages, such as [{"role": "user", "content": "Hello"}]')
    return tokenizer_pb2.ApplyChatTemplateRequest(
        messages=map(_chat_message, messages),
        tools_json=json.dumps(list(tools)) if tools else "",
        variables_json=json.dumps(dict(variables)) if variables else "",
        **flags,
    )


def _chat_message(message: ChatMessage) -> tokenizer_pb2.ChatMessage:
    """Return the wire form of a message; what is neither its role nor a plain text goes as JSON."""
    extra = dict(message)
    role, content = extra.pop("role", None), extra.pop("content", "")
    if not isinstance(role, str):
        raise TypeError(f"a message needs a text as role, got {role!r}")
    if not isinstance(content, str):
        extra["content"], content = content, ""
    return tokenizer_pb2.ChatMessage(role=role, content=content, extra_json=json.dumps(extra) if extra else "")


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
    """Return the prefill of a new sequence, with an id of its own if none is given. Raises as ``check_scoring``."""
    check_scoring(policy, len(token_ids), all_positions=all_positions)
    item = executor_pb2.PrefillInput(
        request_id=request_id or new_request_id(),
        input_ids=token_ids,
        logits_policy=_convert.policy_to_message(seeded(policy)),
        logits_positions=_positions(all_positions),
        cache=_cache_options(options),
    )
    return executor_pb2.PrefillRequest(input=item)


def _cache_options(options: PromptOptions) -> executor_pb2.CacheOptions:
    _check.whole("reserve_length", options.reserve_length)
    return executor_pb2.CacheOptions(
        ttl=_convert.duration(options.ttl),
        skip_prefix_reuse=options.reuse_prefix is False,
        skip_prefix_publish=options.publish_prefix is False,
        reserve_length=options.reserve_length,
        durability=_convert.durability_to_message(options.durability),
        drop_outside_window=options.drop_outside_window is True,
    )


def prefill_request(
    sent: executor_pb2.DecodeInput, policy: Policy | None, *, all_positions: bool
) -> executor_pb2.PrefillRequest:
    """Return an append, made with the policy, as a prefill."""
    item = executor_pb2.PrefillInput(
        request_id=sent.request_id,
        input_ids=sent.input_ids,
        kv_cache=sent.kv_cache,
        logits_policy=sent.logits_policy if policy else None,
        logits_positions=_positions(all_positions),
        on_stale=sent.on_stale,
    )
    return executor_pb2.PrefillRequest(input=item)


def creates(sent: Input) -> bool:
    """Return whether an append may make a new sequence."""
    is_new = not isinstance(sent, executor_pb2.DecodeInput) and not sent.HasField("kv_cache")
    return is_new or sent.on_stale == types_pb2.STALE_POLICY_FORK


def stream_item(seq: int, sent: Input) -> executor_pb2.StreamItem:
    """Return an append as an item of a frame."""
    kind: dict[str, Any] = {_KINDS[type(sent)]: sent}  # Any: one of ``Input``, by the field that takes it
    return executor_pb2.StreamItem(seq=seq, **kind)


def stream_answer(result: executor_pb2.StreamResult) -> Appended | None:
    """Return what came of an item, or None where it failed."""
    kind = result.WhichOneof("result")
    answer: Appended | None = getattr(result, kind) if kind in _KINDS.values() else None
    return answer


def tokens_of(sent: Input) -> list[int]:
    """Return the tokens that an append may put into its sequence."""
    if isinstance(sent, executor_pb2.UnifiedBatchItem):
        return list(sent.q_tokens)
    if isinstance(sent, executor_pb2.VerifyInput):
        return [*sent.input_ids, *sent.draft_ids]
    return list(sent.input_ids)


def verify_policy(
    policy: Policy | None, acceptance: Acceptance | None, draft_probs: DraftDistributions | None
) -> Policy | None:
    """Return the policy of a verify, which follows from who decides if it is None; raise ValueError if they differ."""
    check_policy(policy)
    rule = _rule(policy, acceptance, draft_probs)
    if policy is None:
        return {"none": None, "rejection": sample()}.get(rule, greedy())
    if rule == "greedy" and (policy.selection is None or not policy.selection.is_greedy):
        raise ValueError("acceptance greedy needs a greedy policy; exact takes any that chooses tokens")
    if rule == "rejection" and (policy.selection is None or policy.selection.is_greedy):
        raise ValueError("acceptance rejection needs a policy of sample()")
    return policy


def _rule(policy: Policy | None, acceptance: Acceptance | None, draft_probs: DraftDistributions | None) -> Acceptance:
    if acceptance is not None:
        _convert.acceptance_to_message(acceptance)
        return cast("Acceptance", acceptance.lower())
    if draft_probs is not None:
        return "rejection"
    return "exact" if policy is None or policy.selection is not None else "none"


def verify_input(sent: executor_pb2.DecodeInput, policy: Policy | None, item: Verify[Any]) -> executor_pb2.VerifyInput:
    """Return an append of certain tokens, ``sent``, and the drafts of an item, by what ``verify_policy`` returned."""
    if not sent.input_ids:
        text = "a verify needs a certain token, one that is not in the sequence yet: give `tokens`"
        raise ValueError(f"{text} (a pending token is one: it is sent first)")
    drafts, distributions = _check.token_list(item.draft), item.draft_probs
    if distributions is not None and len(distributions) != len(drafts):
        text = "draft_probs needs one distribution per draft"
        raise ValueError(f"{text}: there are {len(drafts)} drafts and {len(distributions)} distributions")
    if len(item.masks) and len(item.masks) != len(drafts) + 1:
        raise ValueError(f"masks needs one per row: there are {len(drafts) + 1} rows and {len(item.masks)} masks")
    return executor_pb2.VerifyInput(
        request_id=sent.request_id,
        input_ids=sent.input_ids,
        kv_cache=sent.kv_cache,
        logits_policy=sent.logits_policy if policy else None,
        on_stale=sent.on_stale,
        draft_ids=drafts,
        parents=item.parents,
        acceptance=_convert.acceptance_to_message(_rule(item.policy, item.acceptance, distributions)),
        draft_probs=None if distributions is None else _convert.draft_probs_to_message(distributions),
        token_masks=list(map(_convert.mask_to_message, item.masks)),
        return_row_handles=item.row_handles,
    )


def options_of(item: Prompt, durability: Durability | None) -> PromptOptions:
    """Return how the sequence of a prompt is made."""
    return PromptOptions(
        item.ttl, item.reserve_length, item.reuse_prefix, item.publish_prefix, durability, item.drop_outside_window
    )


def prompt_input(token_ids: Sequence[int], options: PromptOptions, item: Prompt) -> executor_pb2.UnifiedBatchItem:
    """Return a prompt, or its first piece, as an item of a frame. Raises as ``prompt_request``."""
    message = _chunk(token_ids, item)
    message.request_id = new_request_id()
    message.cache.CopyFrom(_cache_options(options))
    return message


def chunk_input(sent: executor_pb2.DecodeInput, item: Append[Any]) -> executor_pb2.UnifiedBatchItem:
    """Return an append, ``sent``, as a piece of a batch that the caller schedules."""
    message = _chunk(sent.input_ids, item)
    message.request_id = sent.request_id
    message.pos_offset = sent.kv_cache.length
    message.kv_cache.CopyFrom(sent.kv_cache)
    message.on_stale = sent.on_stale
    return message


def _chunk(token_ids: Sequence[int], item: Prompt | Append[Any]) -> executor_pb2.UnifiedBatchItem:
    check_scoring(item.policy, len(token_ids), all_positions=item.all_positions)
    return executor_pb2.UnifiedBatchItem(
        q_tokens=token_ids,
        is_final_chunk=item.is_final,
        logits_policy=_convert.policy_to_message(seeded(item.policy)) if item.is_final else None,
        logits_positions=_positions(item.all_positions),
    )


def fork_request(
    handle: Handle, n: int, length: int | None, most: int, ttl: float | None
) -> cache_pb2.ForkCacheRequest:
    """Return the request for ``n`` branches; raise ValueError for numbers out of their range; ``most`` as above."""
    _check.whole("n", n, 1)
    _check.whole("length", length, 1)
    if length is not None and most < length <= handle.length:
        text = f"length: {length} is outside [1, {most}], the cache's length"
        raise InvalidRequestError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", text, {"field": "length"})
    return cache_pb2.ForkCacheRequest(
        kv_cache=_convert.handle_to_message(handle),
        count=n,
        request_id=new_request_id(),
        length=length,
        ttl=_convert.duration(ttl),
    )


def truncate_request(handle: Handle, length: int, most: int) -> cache_pb2.TruncateKvRequest:
    """Return the request to keep ``length`` tokens; refuse like the server what is negative, which cannot be sent.

    So is what is above ``most``, the length of the cache, where the server would not: its handle may cover more.
    """
    if length < 0 or most < length <= handle.length:
        text = f"cannot truncate to {length} tokens: lengths go from 1 to {most}"
        metadata = {"handle_id": handle.handle_id, "new_length": str(length), "length": str(most)}
        raise TruncateBeyondError(grpc.StatusCode.OUT_OF_RANGE, "TRUNCATE_BEYOND", text, metadata)
    _check.whole("length", length)
    return cache_pb2.TruncateKvRequest(kv_cache=_convert.handle_to_message(handle), new_length=length)


def reserve_request(
    handles: Sequence[Handle], lengths: int | Sequence[int], fitting_lengths: int | Sequence[int] | None
) -> cache_pb2.ReserveKvSlotsRequest:
    """Return the request for room up to ``lengths`` now, while ``fitting_lengths`` fit too; one for all, or each."""
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


def aim(request: SequenceRequest | Input, handle: Handle) -> None:
    """Point a request at the sequence that took the place of a lost one; with an id of its own, if it had one."""
    item: Any = getattr(request, "input", request)  # Any: each of these messages has its own fields
    if isinstance(request, cache_pb2.ReserveKvSlotsRequest):
        (item,) = request.requests
    item.kv_cache.CopyFrom(_convert.handle_to_message(handle))
    if getattr(item, "request_id", ""):
        item.request_id = new_request_id()


def inline_masks(messages: Iterable[Message], masks: Mapping[bytes, bytes]) -> bool:
    """Put packed masks in the place of their fingerprints, in messages and whatever these hold; return if any was."""
    found = False
    for message in messages:
        if isinstance(message, policy_pb2.TokenMask):
            if (bits := masks.get(message.fingerprint)) is not None:
                message.inline_bits, found = bits, True
            continue
        for field, value in message.ListFields():
            if field.message_type is not None:
                found |= inline_masks([value] if isinstance(value, Message) else value, masks)
    return found


def check_scoring(policy: Policy | None, num_tokens: int, *, all_positions: bool) -> None:
    """Raise ValueError if ``target_logprobs`` has no row whose next token is known, TypeError if it is no policy."""
    check_policy(policy)
    if policy is not None and policy.target_logprobs and num_tokens > 1 and not all_positions:
        raise ValueError("target_logprobs of several tokens needs all_positions=True: nothing follows the last row")


def _positions(all_positions: bool) -> types_pb2.LogitsPositions:
    return types_pb2.LOGITS_POSITIONS_ALL if all_positions else types_pb2.LOGITS_POSITIONS_LAST


def choosing(policy: Policy) -> Policy:
    """Return a policy that chooses a token; raise ValueError if it chooses none."""
    check_policy(policy)
    if policy.selection is None:
        raise ValueError("this needs a policy that chooses a token, such as greedy() or sample()")
    return policy
