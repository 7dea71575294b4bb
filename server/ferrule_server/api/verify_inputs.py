"""Reads VerifyInput: certain tokens, drafts behind them, and who decides which of these hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ferrule.v1 import executor_pb2, policy_pb2
from ferrule_server.api.draft_laws import DraftLawReader
from ferrule_server.api.fields import FieldReader
from ferrule_server.api.mask_inputs import MaskReader
from ferrule_server.api.planned import PlannedAppend
from ferrule_server.api.policy import OutputPlan, PolicyReader
from ferrule_server.engine.jobs import Acceptance, AppendJob, Drafts
from ferrule_server.errors import ContextExceeded, FeatureUnsupported, InvalidRequest
from ferrule_server.executor.base import DraftLaw, TokenMask

_RULES: Final[Mapping[int, Acceptance]] = {
    executor_pb2.ACCEPTANCE_RULE_UNSPECIFIED: Acceptance.NONE,
    executor_pb2.ACCEPTANCE_RULE_NONE: Acceptance.NONE,
    executor_pb2.ACCEPTANCE_RULE_EXACT: Acceptance.EXACT,
    executor_pb2.ACCEPTANCE_RULE_REJECTION: Acceptance.REJECTION,
}
_INDEX_BYTES: Final = 5
_HANDLE_BYTES: Final = 160


class VerifyReader:
    """Turns verifies into appends with drafts.

    Args:
        fields: Reads what they have in common with others.
        policies: Reads what comes back.
        masks: Reads the masks of single rows.
    """

    def __init__(self, fields: FieldReader, policies: PolicyReader, masks: MaskReader) -> None:
        self._fields = fields
        self._policies = policies
        self._masks = masks
        self._laws = DraftLawReader(fields.vocab_size)

    def read(self, message: executor_pb2.VerifyInput, at: str, principal: str) -> PlannedAppend:
        """Return the job of a verify.

        Raises:
            InvalidRequest, TokenOutOfVocab, ReplyTooLarge, ContextExceeded: A field is out of its range.
            MaskUnknown: A mask is not registered.
            FeatureUnsupported: The drafts are a tree.
        """
        if not message.HasField("kv_cache"):
            raise InvalidRequest(f"{at}kv_cache", "must be set: a verify appends to a sequence")
        handle = self._fields.handle(message.kv_cache, at)
        input_ids = self._fields.token_ids(message.input_ids, at, "input_ids", handle.length)
        if not input_ids:
            raise InvalidRequest(f"{at}input_ids", "a verify needs at least one certain token before its drafts")
        draft_ids = self._draft_ids(message.draft_ids, at)
        num_tokens = len(input_ids) + len(draft_ids)
        if num_tokens > self._fields.max_context:
            raise ContextExceeded(handle.length + num_tokens, self._fields.max_context)
        _check_chain(message.parents, len(draft_ids), f"{at}parents")
        if message.request_id:
            self._fields.check_request_id(message.request_id, at)
        plan = self._policies.read(message.logits_policy, at, principal)
        reply_bytes = self._reply_bytes(message, plan)
        self._fields.check_reply(reply_bytes, f"{at}logits_policy")
        job = AppendJob(
            principal,
            input_ids + draft_ids,
            handle,
            plan.output,
            self._fields.on_stale(message.on_stale, at),
            request_id=message.request_id,
            drafts=self._drafts(message, draft_ids, plan, at, principal),
        )
        return PlannedAppend(job, plan, reply_bytes, at)

    def _draft_ids(self, draft_ids: Sequence[int], at: str) -> tuple[int, ...]:
        limit = self._fields.limits.max_draft_tokens
        if len(draft_ids) > limit:
            raise InvalidRequest(f"{at}draft_ids", f"has {len(draft_ids)} drafts, the limit is {limit}")
        return self._fields.token_ids(draft_ids, at, "draft_ids")

    def _drafts(
        self, message: executor_pb2.VerifyInput, draft_ids: tuple[int, ...], plan: OutputPlan, at: str, principal: str
    ) -> Drafts:
        acceptance = _acceptance(message, plan, at)
        laws = self._draft_laws(message, draft_ids, at)
        if acceptance is Acceptance.REJECTION and plan.output.spec is not None and plan.output.spec.sample is None:
            # Temperature 0: all of p lies on one token. min(1, p / q) is then 1 for that draft and 0 for others, and
            # the rest of p over q is that token: the very same as EXACT, without a variate.
            acceptance, laws = Acceptance.EXACT, ()
        return Drafts(
            len(draft_ids),
            acceptance,
            laws,
            self._row_masks(message, plan, at, principal),
            message.return_row_handles,
        )

    def _draft_laws(
        self, message: executor_pb2.VerifyInput, draft_ids: tuple[int, ...], at: str
    ) -> tuple[DraftLaw, ...]:
        if not message.HasField("draft_probs"):
            return ()
        path = f"{at}draft_probs"
        if message.acceptance != executor_pb2.ACCEPTANCE_RULE_REJECTION:
            raise InvalidRequest(path, "only ACCEPTANCE_RULE_REJECTION looks at the laws of drafts")
        return self._laws.read(message.draft_probs, draft_ids, path)

    def _row_masks(
        self, message: executor_pb2.VerifyInput, plan: OutputPlan, at: str, principal: str
    ) -> tuple[TokenMask, ...]:
        masks, path = message.token_masks, f"{at}token_masks"
        if not masks:
            return ()
        if len(masks) != len(message.draft_ids) + 1:
            raise InvalidRequest(path, f"has {len(masks)} masks for {len(message.draft_ids) + 1} rows")
        if not _has_selection(plan):
            raise InvalidRequest(path, "needs a selection in logits_policy that they apply to")
        return tuple(self._masks.read(mask, f"{path}[{index}]", principal) for index, mask in enumerate(masks))

    def _reply_bytes(self, message: executor_pb2.VerifyInput, plan: OutputPlan) -> int:
        num_rows = len(message.draft_ids) + 1
        row_bytes = plan.row_bytes + _INDEX_BYTES + (_HANDLE_BYTES if message.return_row_handles else 0)
        return self._fields.reply_bytes(num_rows, row_bytes, message.request_id)


def _acceptance(message: executor_pb2.VerifyInput, plan: OutputPlan, at: str) -> Acceptance:
    """Return who decides, once the policy has what the rule works with."""
    acceptance = _RULES.get(message.acceptance)
    if acceptance is None:
        raise InvalidRequest(f"{at}acceptance", f"{message.acceptance} is no AcceptanceRule")
    if acceptance is Acceptance.EXACT and not _has_selection(plan):
        raise InvalidRequest(f"{at}logits_policy", "ACCEPTANCE_RULE_EXACT needs a selection (greedy_argmax or sample)")
    if acceptance is Acceptance.REJECTION and not _is_drawn(message.logits_policy):
        raise InvalidRequest(f"{at}logits_policy", "ACCEPTANCE_RULE_REJECTION needs the selection sample")
    return acceptance


def _is_drawn(policy: policy_pb2.LogitsReturnPolicy) -> bool:
    return bool(policy.WhichOneof("selection") == "sample")


def _has_selection(plan: OutputPlan) -> bool:
    spec = plan.output.spec
    return spec is not None and (spec.greedy or spec.sample is not None)


def _check_chain(parents: Sequence[int], num_drafts: int, path: str) -> None:
    """Return if each draft follows the one before it.

    Raises:
        InvalidRequest: A draft follows itself or a later one, or is missing.
        FeatureUnsupported: They make a tree.
    """
    if not parents:
        return
    if len(parents) != num_drafts:
        raise InvalidRequest(path, f"has {len(parents)} entries for {num_drafts} drafts")
    for index, parent in enumerate(parents):
        if parent > index:
            raise InvalidRequest(f"{path}[{index}]", f"row {parent} is not before row {index + 1}, the draft's own")
    if any(parent != index for index, parent in enumerate(parents)):
        raise FeatureUnsupported("tree", "a tree of drafts is not served here; send one chain of it")
