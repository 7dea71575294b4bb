"""Reads GenerateRequest: where the loop begins, how tokens are chosen, and what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ferrule.v1 import executor_pb2, policy_pb2
from ferrule_server.api.requests.fields import FieldReader
from ferrule_server.api.requests.planned import PlannedGenerate
from ferrule_server.api.requests.policy import OutputPlan, PolicyReader
from ferrule_server.engine.jobs import GenerateJob, StopRules, Window
from ferrule_server.errors import FeatureUnsupported, InvalidRequest
from ferrule_server.executor.base import ModelDescription
from ferrule_server.text.stops import StopStrings

if TYPE_CHECKING:
    from ferrule_server.text.tokenizer import Tokenizer

_WAITING_BYTES: Final = 1024
"""What a token that waits to be written takes besides what it asks for: a frame with a handle, and its objects."""


class GenerateReader:
    """Turns requests for a decode loop into jobs.

    Args:
        fields: Reads what they have in common with others.
        policies: Reads what comes with each token.
        stop_ids: The model's own stop tokens.
        tokenizer: None: the model has none.
    """

    def __init__(
        self,
        fields: FieldReader,
        policies: PolicyReader,
        stop_ids: Sequence[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._fields = fields
        self._limits = fields.limits
        self._policies = policies
        self._stop_ids = frozenset(stop_ids)
        self._tokenizer = tokenizer

    def read(self, request: executor_pb2.GenerateRequest, principal: str) -> PlannedGenerate:
        """Return the job of a Generate.

        Raises:
            InvalidRequest, TokenOutOfVocab, ReplyTooLarge, ContextExceeded: A field is out of its range.
            MaskUnknown: A mask is not registered.
            FeatureUnsupported: It needs a tokenizer, and there is none.
        """
        fields = self._fields
        handle = fields.handle(request.kv_cache, "") if request.HasField("kv_cache") else None
        token_ids = fields.token_ids(request.input_ids, "", "input_ids", 0 if handle is None else handle.length)
        if handle is None and not token_ids:
            raise InvalidRequest("input_ids", "a new sequence needs at least one token")
        fields.check_request_id(request.request_id, "")
        if request.return_text and self._tokenizer is None:
            raise FeatureUnsupported("return_text", "the served model has no tokenizer; leave return_text out")
        plan = self._plan(request.logits_policy, principal)
        cache = fields.cache(request.cache, "", len(token_ids), is_new=handle is None)
        job = GenerateJob(
            principal,
            token_ids,
            handle,
            plan.output,
            self._stop(request, token_ids),
            Window(max(self._limits.stream_window_bytes, plan.row_bytes)),
            fields.on_stale(request.on_stale, ""),
            cache.ttl_s,
            request.request_id,
            reserved_length=cache.reserved_length,
            reuse_prefix=cache.reuse_prefix,
            publish_prefix=cache.publish_prefix,
            num_branches=self._num_branches(request),
            row_bytes=plan.row_bytes + _WAITING_BYTES,
        )
        return PlannedGenerate(job, plan, request.return_text, request.skip_special_tokens)

    def _plan(self, policy: policy_pb2.LogitsReturnPolicy, principal: str) -> OutputPlan:
        """Return what comes with each token; without a selection it is drawn with the defaults."""
        if policy.none:
            raise InvalidRequest("logits_policy.none", "Generate returns its tokens at least; leave it out")
        if policy.WhichOneof("selection") is None:
            drawn = policy_pb2.LogitsReturnPolicy()
            drawn.CopyFrom(policy)
            drawn.sample.SetInParent()
            policy = drawn
        plan = self._policies.read(policy, "", principal)
        self._fields.check_reply(self._fields.reply_bytes(1, plan.row_bytes, ""), "logits_policy")
        return plan

    def _num_branches(self, request: executor_pb2.GenerateRequest) -> int:
        count, limit = request.n if request.HasField("n") else 1, self._limits.max_fork_count
        if not 1 <= count <= limit:
            raise InvalidRequest("n", f"{count} is outside [1, {limit}]")
        return count

    # ---- what ends it -----------------------------------------------------------------------------------------------

    def _stop(self, request: executor_pb2.GenerateRequest, token_ids: tuple[int, ...]) -> StopRules:
        for name in ("stop_token_ids", "stop_sequences", "stop_strings"):
            count = len(getattr(request, name))
            if count > self._limits.max_stops:
                raise InvalidRequest(name, f"has {count} entries, the limit is {self._limits.max_stops}")
        return StopRules(
            request.max_tokens,
            frozenset() if request.ignore_eos else self._stop_ids,
            frozenset(self._fields.token_ids(request.stop_token_ids, "", "stop_token_ids")),
            tuple(self._sequence(each, index) for index, each in enumerate(request.stop_sequences)),
            self._text_stop(request, token_ids),
        )

    def _sequence(self, message: policy_pb2.TokenIdList, index: int) -> tuple[int, ...]:
        at = f"stop_sequences[{index}]."
        self._check_length(len(message.token_ids), "tokens", f"{at}token_ids")
        return self._fields.token_ids(message.token_ids, at, "token_ids")

    def _text_stop(self, request: executor_pb2.GenerateRequest, token_ids: tuple[int, ...]) -> StopStrings | None:
        if not request.stop_strings:
            return None
        for index, text in enumerate(request.stop_strings):
            self._check_length(len(text.encode()), "bytes", f"stop_strings[{index}]")
        if self._tokenizer is None:
            raise FeatureUnsupported("stop_strings", "the served model has no tokenizer; send stop_sequences")
        return StopStrings(self._tokenizer, request.stop_strings, request.skip_special_tokens, token_ids)

    def _check_length(self, length: int, unit: str, path: str) -> None:
        if not 1 <= length <= self._limits.max_stop_length:
            raise InvalidRequest(path, f"has {length} {unit}, not 1 to {self._limits.max_stop_length}")


def stop_ids_of(model: ModelDescription, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the tokens at which a text ends by default: the model's, and its tokenizer's, a turn's end."""
    config, own = model.config, None if tokenizer is None else tokenizer.eos_id
    if own is None or own >= config.vocab_size or own in config.eos_ids:
        return config.eos_ids
    return (*config.eos_ids, own)
