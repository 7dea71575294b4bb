"""Verification: which drafts of a verify hold, once its rows are there.

Rows are numbered from the last certain token on, and each says which token follows it::

    tokens   t0   d1   d2   d3          d1 and d2 hold, d3 does not: row 2 chose x in its place
    row       0    1    2    3
    chosen   d1   d2    x    -          committed: t0 d1 d2, answered: rows 0 to 2, next_token x
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from ferrule_server.engine.jobs import Acceptance, Drafts, Verified
from ferrule_server.executor.base import RowOutput
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.store import KvStore


def verify(drafts: Drafts, draft_ids: SequenceOf[int], rows: SequenceOf[RowOutput]) -> Verified:
    """Return which of the drafts hold, by the rule that the request names.

    A row that is not finite chooses nothing: no draft after it holds, and it is the last one that counts.

    Args:
        drafts: Says by which rule: EXACT or REJECTION.
        draft_ids: The drafts, a chain.
        rows: What row 0 and each draft's row gave.
    """
    is_exact = drafts.acceptance is Acceptance.EXACT
    count = 0
    while count < len(draft_ids) and (rows[count].token == draft_ids[count] if is_exact else rows[count].is_accepted):
        count += 1
    return Verified(count, rows[count].token)


def num_appended(drafts: Drafts, verified: Verified) -> int:
    """Return how many drafts are appended: those accepted, or all where the client decides."""
    return drafts.count if drafts.acceptance is Acceptance.NONE else verified.accepted_count


def with_row_handles(
    verified: Verified, drafts: Drafts, store: KvStore, sequence: Sequence, length_after: int
) -> Verified:
    """Return it with the handles at row 0 and at each appended draft, if they are asked for.

    Args:
        verified: What became of the drafts.
        drafts: Says whether handles are wanted.
        store: Where the tokens are committed.
        sequence: Which they are part of.
        length_after: Length behind the last one appended.
    """
    if not drafts.wants_row_handles:
        return verified
    first = length_after - num_appended(drafts, verified)
    return replace(verified, row_handles=tuple(store.handle_at(sequence, n) for n in range(first, length_after + 1)))


def with_tokens(verified: Verified, draft_ids: SequenceOf[int], rows: SequenceOf[RowOutput]) -> list[RowOutput]:
    """Return the rows of a verify that were run again, choosing what was answered then.

    In other company a row's logits may differ in their last bits; what is committed does not change for it.

    Args:
        verified: What was answered.
        draft_ids: The drafts.
        rows: Those of row 0 and of the accepted drafts.
    """
    tokens = (*draft_ids[: verified.accepted_count], verified.next_token)
    pairs = zip(rows, tokens, strict=True)
    return [row if row.token == token or not row.is_finite else replace(row, token=token) for row, token in pairs]
