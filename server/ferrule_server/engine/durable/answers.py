"""Answers to appends as the journal keeps them: the numbers of each row, and digests of what was requested."""

from __future__ import annotations

from struct import Struct

from ferrule_server.durability.records import Answer, DraftsAnswer, Row
from ferrule_server.engine.appends.records import AppendRecord, digest_of, has_arrays, numbers_of
from ferrule_server.engine.jobs import AppendResult, OutputRequest, Verified
from ferrule_server.executor.base import RowOutput
from ferrule_server.kv.sequence import Sequence

_SINGLE = Struct("<f")
_pack_single, _unpack_single = _SINGLE.pack, _SINGLE.unpack


class Policies:
    """Digests of output requests; that of the request before is at hand, since most tokens repeat it."""

    def __init__(self) -> None:
        self._last: tuple[OutputRequest, bytes] | None = None

    def digest_of(self, output: OutputRequest) -> bytes:
        """Return the digest of a request."""
        if self._last is None or self._last[0] is not output:
            self._last = (output, digest_of(output))
        return self._last[1]


def answer_of(record: AppendRecord, policies: Policies) -> Answer:
    """Return what a retry of the append that a record describes needs; ``policies``: digests of requests."""
    result, output, answered = record.result, record.output, None
    if record.drafts is not None:
        digest = record.drafts if isinstance(record.drafts, bytes) else digest_of(record.drafts)
        verified = result.verified or Verified()
        answered = DraftsAnswer(
            digest, record.num_certain, record.draft_ids, verified.accepted_count, verified.next_token
        )
    policy = output if isinstance(output, bytes) else policies.digest_of(output)
    kept = result.rows if len(result.rows) == 1 else numbers_of(result.rows)
    is_whole = record.is_whole and len(kept) == len(result.rows) and not has_arrays(result.rows)
    rows = tuple(map(_row_of, kept))
    return Answer(record.start, record.num_tokens, policy, result.seed, rows, is_whole, answered)


def record_of(answer: Answer, sequence: Sequence) -> AppendRecord:
    """Return the record of the last append of a restored sequence, which still has the tokens of that append."""
    rows = tuple(RowOutput(*row[:5], entropy=row.entropy, is_accepted=row.is_accepted) for row in answer.rows)
    result = AppendResult(sequence.handle_at(answer.start + answer.num_tokens), rows, answer.seed)
    record = AppendRecord(sequence.principal, answer.start, answer.policy, result, answer.is_whole)
    if (drafts := answer.drafts) is not None:
        result.verified = Verified(drafts.accepted_count, drafts.next_token)
        record.drafts, record.draft_ids = drafts.digest, drafts.draft_ids
    return record


def _row_of(row: RowOutput) -> Row:
    """Return the numbers of a row as replies have them: in single precision."""
    return Row(
        row.position,
        row.token,
        _single(row.model_logprob),
        _single(row.sampled_logprob),
        _single(row.target_logprob),
        _single(row.entropy),
        row.is_accepted,
    )


def _single(number: float | None) -> float | None:
    return None if number is None else _unpack_single(_pack_single(number))[0]
