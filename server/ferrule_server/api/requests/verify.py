"""Reads VerifyInput: certain tokens, the drafts after them, and the rule that accepts drafts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from ferrule.v1 import executor_pb2, types_pb2
from ferrule_server.api.requests.fields import WIRE_TYPES, FieldReader, by_number, choice, id_array
from ferrule_server.api.requests.masks import MaskReader
from ferrule_server.api.requests.planned import PlannedAppend
from ferrule_server.api.requests.policy import OutputPlan, PolicyReader
from ferrule_server.engine.jobs import Acceptance, AppendJob, Drafts
from ferrule_server.errors import ContextExceeded, FeatureUnsupported, InvalidRequest
from ferrule_server.executor.base import DraftDistribution, Float32Array, Int32Array, TokenMask

_RULES: Final = by_number(executor_pb2.AcceptanceRule, Acceptance, Acceptance.NONE)
_INDEX_BYTES: Final = 5
_HANDLE_BYTES: Final = 256


class VerifyReader:
    """Turns verifies into appends with drafts.

    Args:
        fields: Reads the fields that many requests have.
        policies: Reads policies.
        masks: Reads the masks of single rows.
    """

    def __init__(self, fields: FieldReader, policies: PolicyReader, masks: MaskReader) -> None:
        self._fields = fields
        self._policies = policies
        self._masks = masks

    def read(self, message: executor_pb2.VerifyInput, at: str, principal: str) -> PlannedAppend:
        """Return the job of a verify.

        Raises:
            InvalidRequest, TokenOutOfVocab, ReplyTooLarge, ContextExceeded: A field is out of its range.
            MaskUnknown: A mask is not registered.
            FeatureUnsupported: The drafts are a tree.
        """
        handle, input_ids, on_stale, request_id = self._fields.prompt(message, at, is_new=False)
        assert handle is not None, "the field is set"
        if not input_ids:
            raise InvalidRequest(f"{at}input_ids", "must have at least one certain token before the drafts")
        num_drafts, limit = len(message.draft_ids), self._fields.limits.max_draft_tokens
        if num_drafts > limit:
            raise InvalidRequest(f"{at}draft_ids", f"has {num_drafts} drafts, the limit is {limit}")
        draft_ids = self._fields.token_ids(message.draft_ids, at, "draft_ids")
        num_tokens = len(input_ids) + num_drafts
        if num_tokens > self._fields.max_context:
            raise ContextExceeded(handle.length + num_tokens, self._fields.max_context)
        _check_chain(message.parents, num_drafts, f"{at}parents")
        plan = self._policies.read(message.logits_policy, at, principal)
        row_bytes = plan.row_bytes + _INDEX_BYTES + (_HANDLE_BYTES if message.return_row_handles else 0)
        reply_bytes = self._fields.reply_bytes(num_drafts + 1, row_bytes, request_id, at)
        job = AppendJob(
            principal,
            input_ids + draft_ids,
            handle,
            plan.output,
            on_stale,
            request_id=request_id,
            drafts=self._drafts(message, draft_ids, plan, at, principal),
        )
        return PlannedAppend(job, plan, reply_bytes, at)

    def _drafts(
        self, message: executor_pb2.VerifyInput, draft_ids: tuple[int, ...], plan: OutputPlan, at: str, principal: str
    ) -> Drafts:
        acceptance = _acceptance(message, plan, at)
        distributions = self._draft_distributions(message, draft_ids, at)
        if acceptance is Acceptance.REJECTION and plan.output.spec is not None and plan.output.spec.sample is None:
            # Temperature 0: p is 1 for one token. So min(1, p / q) is 1 for that draft and 0 for others, and the
            # residual of p over q is that token. This is the same as EXACT, without a random variate.
            acceptance, distributions = Acceptance.EXACT, ()
        masks = self._row_masks(message, plan, at, principal)
        return Drafts(len(draft_ids), acceptance, distributions, masks, message.return_row_handles)

    def _draft_distributions(
        self, message: executor_pb2.VerifyInput, draft_ids: tuple[int, ...], at: str
    ) -> tuple[DraftDistribution, ...]:
        """Return the distribution that each draft was sampled from, in order; none if none is sent.

        Raises:
            InvalidRequest: The rule does not use them, no form is set, the sizes are wrong, a row is not a
                distribution, or a draft has probability 0.
            TokenOutOfVocab: An id is not in the vocabulary.
        """
        if not message.HasField("draft_probs"):
            return ()
        path, probs, vocab_size = f"{at}draft_probs", message.draft_probs, self._fields.vocab_size
        if message.acceptance != executor_pb2.ACCEPTANCE_RULE_REJECTION:
            raise InvalidRequest(path, "must not be set: only ACCEPTANCE_RULE_REJECTION uses it")
        form = probs.WhichOneof("probs")
        if form == "dense":
            return _dense(probs.dense, draft_ids, vocab_size, f"{path}.dense")
        if form == "sparse":
            return _sparse(probs.sparse, draft_ids, vocab_size, f"{path}.sparse")
        raise InvalidRequest(path, "one of dense and sparse must be set")

    def _row_masks(
        self, message: executor_pb2.VerifyInput, plan: OutputPlan, at: str, principal: str
    ) -> tuple[TokenMask, ...]:
        masks, path = message.token_masks, f"{at}token_masks"
        if not masks:
            return ()
        if len(masks) != len(message.draft_ids) + 1:
            raise InvalidRequest(path, f"has {len(masks)} masks for {len(message.draft_ids) + 1} rows")
        if not _has_selection(plan):
            raise InvalidRequest(path, "requires a selection in logits_policy")
        return tuple(self._masks.read(mask, f"{path}[{index}]", principal) for index, mask in enumerate(masks))


def _acceptance(message: executor_pb2.VerifyInput, plan: OutputPlan, at: str) -> Acceptance:
    """Return the acceptance rule after a check that the policy has the selection that it requires."""
    acceptance = choice(_RULES, message.acceptance, f"{at}acceptance", "AcceptanceRule")
    if acceptance is Acceptance.EXACT and not _has_selection(plan):
        text = "ACCEPTANCE_RULE_EXACT requires a selection (greedy_argmax or sample)"
        raise InvalidRequest(f"{at}logits_policy", text)
    if acceptance is Acceptance.REJECTION and message.logits_policy.WhichOneof("selection") != "sample":
        raise InvalidRequest(f"{at}logits_policy", "ACCEPTANCE_RULE_REJECTION requires the selection sample")
    return acceptance


def _has_selection(plan: OutputPlan) -> bool:
    spec = plan.output.spec
    return spec is not None and (spec.greedy or spec.sample is not None)


def _check_chain(parents: Sequence[int], num_drafts: int, path: str) -> None:
    """Check that each draft follows the one before it.

    Raises:
        InvalidRequest: A draft follows itself or a later draft, or has no entry.
        FeatureUnsupported: The drafts form a tree.
    """
    if not parents:
        return
    if len(parents) != num_drafts:
        raise InvalidRequest(path, f"has {len(parents)} entries for {num_drafts} drafts")
    for index, parent in enumerate(parents):
        if parent > index:
            raise InvalidRequest(f"{path}[{index}]", f"row {parent} is not before row {index + 1}, the draft's own")
    if any(parent != index for index, parent in enumerate(parents)):
        raise FeatureUnsupported("tree", "trees of drafts are not supported; send one chain")


_TOLERANCE: Final = 1e-3
"""How far the sum of a distribution may be from 1, besides the rounding of its type."""
_DIGEST_BYTES: Final = 16
_ROUNDINGS: Final[Mapping[int, tuple[float, float]]] = {
    types_pb2.DATA_TYPE_FLOAT32: (0.0, 0.0),
    types_pb2.DATA_TYPE_BFLOAT16: (2.0**-7, 0.0),  # covers truncation of the low bits too
    types_pb2.DATA_TYPE_FLOAT16: (2.0**-10, 2.0**-24),  # below 2^-14 the steps are constant
}
"""The rounding error of a probability in each type: relative, and absolute."""


def _dense(
    tensor: types_pb2.Tensor, draft_ids: Sequence[int], vocab_size: int, path: str
) -> tuple[DraftDistribution, ...]:
    rows = _tensor_rows(tensor, (len(draft_ids), vocab_size), path)
    relative, absolute = _ROUNDINGS[tensor.dtype]
    tolerance = _TOLERANCE + relative + absolute * vocab_size
    distributions = []
    for index, (row, draft_id) in enumerate(zip(rows, draft_ids, strict=True)):
        where = f"row {index}"
        _check_distribution(row, f"{path}.data", where, tolerance)
        if not row[draft_id] > 0.0:
            raise InvalidRequest(f"{path}.data", f"{where} gives its own draft, token {draft_id}, probability 0")
        distributions.append(_distribution(None, row))
    return tuple(distributions)


def _sparse(
    message: executor_pb2.SparseProbs, draft_ids: Sequence[int], vocab_size: int, path: str
) -> tuple[DraftDistribution, ...]:
    ends = _row_ends(message, len(draft_ids), vocab_size, path)
    ids = id_array(message.token_ids, vocab_size, f"{path}.token_ids")
    probs = np.fromiter(message.probs, np.float32, len(message.probs))
    if (out := np.flatnonzero(~((probs > 0.0) & (probs <= 1.0)))).size:
        raise InvalidRequest(f"{path}.probs[{int(out[0])}]", f"must be in (0, 1], got {probs[out[0]]}")
    distributions = []
    for index, (begin, end, draft_id) in enumerate(zip([0, *ends], ends, draft_ids, strict=False)):
        row_ids, row = ids[begin:end], probs[begin:end]
        where = f"row {index}"
        is_named = np.zeros(vocab_size, np.bool_)
        is_named[row_ids] = True
        if np.count_nonzero(is_named) != len(row_ids):
            raise InvalidRequest(f"{path}.token_ids", f"{where} has an id twice")
        _check_distribution(row, f"{path}.probs", where)
        if not is_named[draft_id]:
            raise InvalidRequest(f"{path}.token_ids", f"{where} gives its own draft, token {draft_id}, probability 0")
        distributions.append(_distribution(row_ids.astype(np.int32), row))
    return tuple(distributions)


def _row_ends(message: executor_pb2.SparseProbs, num_rows: int, vocab_size: int, path: str) -> list[int]:
    """Return the end of each row after a check that all sizes agree."""
    sizes = message.row_sizes
    if len(sizes) != num_rows:
        raise InvalidRequest(f"{path}.row_sizes", f"has {len(sizes)} rows for {num_rows} drafts")
    if sizes and max(sizes) > vocab_size:
        text = f"{max(sizes)} is more than the {vocab_size} tokens of the vocabulary"
        raise InvalidRequest(f"{path}.row_sizes", text)
    total = sum(sizes)
    for name, size in (("token_ids", len(message.token_ids)), ("probs", len(message.probs))):
        if size != total:
            raise InvalidRequest(f"{path}.{name}", f"has {size} entries, the row_sizes add up to {total}")
    return list(accumulate(sizes))


def _tensor_rows(tensor: types_pb2.Tensor, shape: tuple[int, int], path: str) -> Float32Array:
    """Return the values of a tensor after a check of its shape: float32 [rows, vocab_size]."""
    wire_type = WIRE_TYPES.get(tensor.dtype)
    if wire_type is None:
        raise InvalidRequest(f"{path}.dtype", f"{tensor.dtype} is not FLOAT32, BFLOAT16 or FLOAT16")
    if tuple(tensor.shape) != shape:
        raise InvalidRequest(f"{path}.shape", f"{list(tensor.shape)[:8]} is not {list(shape)}: drafts, vocabulary")
    num_bytes = shape[0] * shape[1] * wire_type.itemsize
    if len(tensor.data) != num_bytes:
        raise InvalidRequest(f"{path}.data", f"has {len(tensor.data)} bytes, the shape needs {num_bytes}")
    values = np.frombuffer(tensor.data, wire_type).reshape(shape)
    if tensor.dtype == types_pb2.DATA_TYPE_BFLOAT16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def _check_distribution(probs: Float32Array, path: str, where: str, tolerance: float = _TOLERANCE) -> None:
    """Refuse a row that is not a distribution; NaN and infinity are refused too."""
    if not (probs >= 0.0).all():
        raise InvalidRequest(path, f"{where} has a value that is negative or not a number")
    total = float(probs.sum(dtype=np.float64))
    if not abs(total - 1.0) <= tolerance:
        raise InvalidRequest(path, f"{where} adds up to {total}, not to 1 within {tolerance:.2g}")


def _distribution(token_ids: Int32Array | None, row: Float32Array) -> DraftDistribution:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"dense" if token_ids is None else b"sparse")
    if token_ids is not None:
        digest.update(token_ids.tobytes())
        token_ids.flags.writeable = False
    digest.update(row.tobytes())
    probs: npt.NDArray[np.float64] = row.astype(np.float64)
    probs.flags.writeable = False
    return DraftDistribution(digest.digest(), token_ids, probs)
