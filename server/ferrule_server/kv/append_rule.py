"""The append rule: what tokens sent with a handle mean. Pure functions; they change nothing.

For handle ``(id, L, lineage)``, tokens ``t`` and tip = length of the sequence:

=============================================================  =========================================
case                                                           verdict
=============================================================  =========================================
``L`` beyond the tip, or the lineage at ``L`` differs          HandleRewritten
``t`` empty                                                    QUERY
``L`` is the tip                                               APPEND
``t`` is a prefix of the tokens committed after ``L``          REPLAY, whatever ``on_stale`` says
otherwise, also when those tokens are a proper prefix of ``t``  HandleStale, FORK or REWIND as ``on_stale``
=============================================================  =========================================
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf

from ferrule_server.errors import HandleRewritten, HandleStale
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.sequence import Sequence


class Verdict(enum.Enum):
    """What an append means: what :func:`judge` returns, and CREATE and WARM, which need no judgement.

    Attributes:
        reads: It writes no row.
        creates: It makes a sequence, and leaves the one that it names as it is.
        moves: It changes the sequence that it names.
        appends: It adds tokens to a sequence; False: tokens that it has are run again.
    """

    QUERY = "query"
    """No tokens: the last row is run again; nothing is appended."""
    APPEND = "append"
    """The handle is at the tip."""
    REPLAY = "replay"
    """The same tokens were appended before; nothing is appended."""
    FORK = "fork"
    """Branch at the handle's length, then append."""
    REWIND = "rewind"
    """Drop the tokens after the handle's length, then append."""
    CREATE = "create"
    """There is no handle: a new sequence begins with the tokens."""
    WARM = "warm"
    """The tokens of a cold sequence are run again; nothing is appended."""

    def __init__(self, name: str) -> None:
        """Note what each verdict does."""
        self.reads = name in ("query", "replay")
        self.creates = name in ("fork", "create")
        self.moves = not (self.reads or self.creates)
        self.appends = not self.reads and name != "warm"


_STALE_VERDICTS = {StalePolicy.FORK: Verdict.FORK, StalePolicy.REWIND: Verdict.REWIND}


def check_handle(sequence: Sequence, handle: Handle) -> None:
    """Return if the handle names tokens that the sequence still holds.

    Raises:
        HandleRewritten: The sequence is shorter, or holds other tokens now; or no handle has this length.
    """
    if not 1 <= handle.length <= len(sequence.chain.token_ids) or sequence.chain.at(handle.length) != handle.lineage:
        raise HandleRewritten(sequence.handle_id, handle.length, sequence.length)


def judge(
    sequence: Sequence, handle: Handle, token_ids: SequenceOf[int], on_stale: StalePolicy, *, may_replay: bool = True
) -> Verdict:
    """Return what appending ``token_ids`` after ``handle`` means, by the table of this module.

    Args:
        sequence: The sequence of the handle.
        handle: The handle of the request.
        token_ids: The tokens to append; for a verify, the drafts included.
        on_stale: What to do if the handle is before the tip.
        may_replay: False: committed tokens do not show whether this was appended before (a verify appends only the
            accepted drafts).

    Raises:
        HandleStale: By the table; message and metadata contain the tip.
    """
    check_handle(sequence, handle)
    if not token_ids:
        return Verdict.QUERY
    if handle.length == len(sequence.chain.token_ids):
        return Verdict.APPEND
    if may_replay and is_committed(sequence, handle.length, token_ids):
        return Verdict.REPLAY
    verdict = _STALE_VERDICTS.get(on_stale)
    if verdict is None:
        raise HandleStale(sequence.handle_id, handle.length, sequence.length)
    return verdict


def is_committed(sequence: Sequence, start: int, token_ids: SequenceOf[int]) -> bool:
    """Return whether exactly these tokens are committed from ``start`` on."""
    # A slice that ends at the tip is shorter than tokens that go beyond it, hence unequal.
    return sequence.token_ids[start : start + len(token_ids)].tolist() == list(token_ids)
