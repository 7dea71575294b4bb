"""Reads GenerateRequest and ForwardRequest, which are answered piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ferrule.v1 import executor_pb2, policy_pb2
from ferrule_server.api.requests.fields import FieldReader, by_number, check_count, choice
from ferrule_server.api.requests.policy import NO_ROWS, OutputPlan, PolicyReader
from ferrule_server.engine.jobs import ForwardJob, GenerateJob, Pooling, StopRules, Window
from ferrule_server.errors import FeatureUnsupported, InvalidRequest
from ferrule_server.executor.base import ModelDescription
from ferrule_server.text.drawn_text import TextSearch, prepare_search

if TYPE_CHECKING:
    from ferrule_server.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_WAITING_BYTES: Final = 1024
"""Memory of a token that waits to be written, without its row: a frame with a handle, and its objects."""
_POOLINGS: Final = by_number(executor_pb2.HiddenPooling, (Pooling.MEAN, Pooling.LAST), Pooling.NONE)


@dataclass(frozen=True, slots=True)
class StreamReader:
    """Turns Generate and Forward requests into jobs.

    Attributes:
        _fields: Reads the fields that many requests have.
        _policies: Reads policies.
        _max_step_rows: Most rows in one step.
        _stop_ids: The model's own stop tokens.
        _tokenizer: The model's tokenizer; None: it has none.
    """

    _fields: FieldReader
    _policies: PolicyReader
    _max_step_rows: int
    _stop_ids: frozenset[int]
    _tokenizer: Tokenizer | None

    # ---- Generate ---------------------------------------------------------------------------------------------------

    def generate(self, request: executor_pb2.GenerateRequest, principal: str) -> tuple[GenerateJob, OutputPlan]:
        """Return the job of a Generate, and how the rows of its frames are written.

        Raises:
            InvalidRequest, TokenOutOfVocab, ReplyTooLarge, ContextExceeded: A field is out of its range.
            MaskUnknown: A mask is not registered.
            FeatureUnsupported: The request requires a tokenizer, and the model has none.
        """
        fields = self._fields
        handle, token_ids, on_stale, request_id = fields.prompt(request, "")
        if request.return_text and self._tokenizer is None:
            raise FeatureUnsupported("return_text", "the loaded model has no tokenizer; leave return_text out")
        plan = self._generate_plan(request.logits_policy, principal)
        job = GenerateJob(
            principal,
            token_ids,
            handle,
            plan.output,
            self._stop(request, token_ids),
            Window(max(self._fields.limits.stream_window_bytes, plan.row_bytes)),
            on_stale,
            request_id=request_id,
            num_branches=self._num_branches(request),
            row_bytes=plan.row_bytes + _WAITING_BYTES,
        )
        fields.keep(job, request.cache, "")
        return job, plan

    def _generate_plan(self, policy: policy_pb2.LogitsReturnPolicy, principal: str) -> OutputPlan:
        """Return the plan for each token; without a selection the token is sampled with the defaults."""
        if policy.WhichOneof("selection") is None:
            sampled = policy_pb2.LogitsReturnPolicy()
            sampled.CopyFrom(policy)
            sampled.sample.SetInParent()
            policy = sampled
        plan = self._policies.read(policy, "", principal)
        self._fields.reply_bytes(1, plan.row_bytes, "", "")  # one token must fit into a message
        return plan

    def _num_branches(self, request: executor_pb2.GenerateRequest) -> int:
        count, limit = request.n if request.HasField("n") else 1, self._fields.limits.max_fork_count
        if not 1 <= count <= limit:
            raise InvalidRequest("n", f"{count} is outside [1, {limit}]")
        return count

    def _stop(self, request: executor_pb2.GenerateRequest, token_ids: tuple[int, ...]) -> StopRules:
        for name in ("stop_token_ids", "stop_sequences", "stop_strings"):
            check_count(name, len(getattr(request, name)), self._fields.limits.max_stops)
        if request.HasField("max_tokens") and not request.max_tokens:
            raise InvalidRequest(
                "max_tokens", "must be at least 1; leave it unset to draw until something else ends it"
            )
        return StopRules(
            request.max_tokens,
            frozenset() if request.ignore_eos else self._stop_ids,
            frozenset(self._fields.token_ids(request.stop_token_ids, "", "stop_token_ids")),
            tuple(self._sequence(each, index) for index, each in enumerate(request.stop_sequences)),
            self._text_stop(request, token_ids),
        )

    def _sequence(self, message: policy_pb2.TokenIdList, index: int) -> tuple[int, ...]:
        at = f"stop_sequences[{index}]."
        _check_length(len(message.token_ids), self._fields.limits.max_stop_tokens, "tokens", f"{at}token_ids")
        return self._fields.token_ids(message.token_ids, at, "token_ids")

    def _text_stop(
        self, request: executor_pb2.GenerateRequest, token_ids: tuple[int, ...]
    ) -> Callable[[], TextSearch] | None:
        if not request.stop_strings:
            return None
        for index, text in enumerate(request.stop_strings):
            _check_length(len(text.encode()), self._fields.limits.max_stop_bytes, "bytes", f"stop_strings[{index}]")
        if self._tokenizer is None:
            raise FeatureUnsupported("stop_strings", "the loaded model has no tokenizer; send stop_sequences")
        return prepare_search(self._tokenizer, request.stop_strings, request.skip_special_tokens, token_ids)

    # ---- Forward ----------------------------------------------------------------------------------------------------

    def forward(self, request: executor_pb2.ForwardRequest, principal: str) -> tuple[ForwardJob, OutputPlan]:
        """Return the job of a Forward, and how the rows of its frames are written.

        Raises:
            InvalidRequest, TokenOutOfVocab, ReplyTooLarge, ContextExceeded: A field is out of its range.
            MaskUnknown: A mask is not registered.
        """
        fields = self._fields
        token_ids = fields.token_ids(request.input_ids, "", "input_ids")
        if not token_ids:
            raise InvalidRequest("input_ids", "must have at least one token")
        fields.check_request_id(request.request_id, "")
        pooling = choice(_POOLINGS, request.hidden_pooling, "hidden_pooling", "HiddenPooling")
        plan = self._forward_plan(request, pooling, principal)
        chunk_rows = self._chunk_rows(plan.row_bytes, len(token_ids))
        window = Window(max(self._fields.limits.stream_window_bytes, 2 * chunk_rows * plan.row_bytes))
        request_id = request.request_id
        job = ForwardJob(principal, token_ids, plan.output, window, chunk_rows, plan.row_bytes, pooling, request_id)
        return job, plan

    def _forward_plan(self, request: executor_pb2.ForwardRequest, pooling: Pooling, principal: str) -> OutputPlan:
        """Return the plan for each row; no rows are returned if the request asks only for the pooled vector."""
        plan = self._policies.read(request.logits_policy, "", principal, all_positions=True)
        if plan is NO_ROWS:
            if pooling is Pooling.NONE:
                text = "asks for nothing: set one of its fields, such as full_logits, or hidden_pooling"
                raise InvalidRequest("logits_policy", text)
            return OutputPlan(replace(NO_ROWS.output, all_positions=True), NO_ROWS.dtype, 0)
        self._fields.reply_bytes(1, plan.row_bytes, request.request_id, "")  # one row must fit into a message
        return plan

    def _chunk_rows(self, row_bytes: int, num_tokens: int) -> int:
        """Return the most rows of one frame, at least one however large a row is."""
        fitting = self._fields.limits.max_stream_frame_bytes // max(1, row_bytes)
        return max(1, min(fitting, self._max_step_rows, num_tokens))


def _check_length(length: int, limit: int, unit: str, path: str) -> None:
    if not 1 <= length <= limit:
        raise InvalidRequest(path, f"has {length} {unit}, not 1 to {limit}")


def stop_ids_of(model: ModelDescription, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the tokens that end a text by default: those of the model and the end of a turn of its tokenizer.

    A control token that the chat template writes right after an answer is one too.
    """
    stop_ids, own = model.config.eos_ids, None if tokenizer is None else tokenizer.eos_id
    for found in () if tokenizer is None else (own, *tokenizer.answer_end):
        if found is not None and found < model.config.vocab_size and found not in stop_ids:
            stop_ids = (*stop_ids, found)
            if found != own:
                _log.info("event=stop_token_from_template token_id=%d", found)
    return stop_ids
