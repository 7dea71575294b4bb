"""What was answered to the last append of each sequence, so that a retry is answered without running it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ferrule_server.engine.jobs import AppendJob, AppendResult, OutputRequest
from ferrule_server.executor.base import RowOutput
from ferrule_server.quotas import LimitsOf, unlimited

_ROW_BYTES: Final = 200
"""What a row of Python objects takes, apart from its arrays."""


@dataclass(eq=False, slots=True)
class AppendRecord:
    """One append and its answer.

    Attributes:
        principal: Whose bytes they are.
        start: Length before. num_tokens: how many were appended.
        output: The request as it came (an unseeded one matches an unseeded retry).
        seed: The seed that was used, None when nothing was drawn. Kept when the rows are not.
        result: What was answered; None once its rows are dropped.
        num_bytes: Bytes that its rows are counted with: 0 for a single row without arrays.
    """

    principal: str
    start: int
    num_tokens: int
    output: OutputRequest
    seed: int | None
    result: AppendResult | None
    num_bytes: int


class ReplayRecords:
    """The record of the last append of each sequence, by handle_id; the only owner of them.

    A record is right as long as it is the sequence's last append: the append rule lets a replay through only for
    tokens that are committed behind ``start``, and whatever put other tokens there was an append and replaced the
    record. Truncates therefore need not touch it.

    What is small stays as long as the sequence: the seed, and a single row of numbers. What is bulky (arrays, several
    rows) is bounded in bytes: beyond a bound the rows of the least recent appends are dropped, and a replay of one of
    those runs its rows again, with the seed that is still known.

    Invariant: ``used_bytes`` is the sum of ``num_bytes`` over the records held, and at most ``limit_bytes``; what
    is used of a principal is the sum over its own records, and at most its ``retained_bytes``.

    Args:
        limit_bytes: Most bytes of bulky rows of all principals together.
        limits_of: Gives each principal's own bound.
    """

    def __init__(self, limit_bytes: int, limits_of: LimitsOf = unlimited) -> None:
        self._limit_bytes = limit_bytes
        self._limits_of = limits_of
        self._records: dict[str, AppendRecord] = {}
        self._bulky: dict[str, AppendRecord] = {}  # the least recent append first
        self._bulky_of: dict[str, dict[str, AppendRecord]] = {}  # the same by principal
        self._used_bytes_of: dict[str, int] = {}
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def used_bytes_of(self, principal: str) -> int:
        """Return the bytes of bulky rows held for the principal."""
        return self._used_bytes_of.get(principal, 0)

    def keep(self, handle_id: str, start: int, job: AppendJob, result: AppendResult) -> None:
        """Remember the answer to ``job``, appended behind ``start``, in place of the sequence's previous one."""
        if handle_id in self._bulky:
            self._drop_rows(handle_id)
        rows = result.rows
        is_small = not rows or (len(rows) == 1 and rows[0].logits is None and rows[0].top_ids is None)
        num_bytes = 0 if is_small else sum(map(_bytes_of, rows))
        record = AppendRecord(job.principal, start, len(job.token_ids), job.output, result.seed, result, num_bytes)
        self._records[handle_id] = record
        if num_bytes:
            self._hold_rows(handle_id, record)

    def find(self, handle_id: str, start: int, num_tokens: int, output: OutputRequest) -> AppendRecord | None:
        """Return the record of the last append if it put ``num_tokens`` behind ``start`` and answered ``output``."""
        record = self._records.get(handle_id)
        if record is None or (record.start, record.num_tokens, record.output) != (start, num_tokens, output):
            return None
        return record

    def forget(self, handle_id: str) -> None:
        """The sequence is gone."""
        if handle_id in self._bulky:
            self._drop_rows(handle_id)
        self._records.pop(handle_id, None)

    def clear(self) -> None:
        """Every sequence is gone."""
        for each in (self._records, self._bulky, self._bulky_of, self._used_bytes_of):
            each.clear()
        self.used_bytes = 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        used: dict[str, int] = {}
        for handle_id, record in self._records.items():
            num_bytes = sum(map(_bytes_of, record.result.rows)) if record.result and record.num_bytes else 0
            assert num_bytes == record.num_bytes, f"{handle_id} holds {num_bytes} bytes, {record.num_bytes} counted"
            assert (handle_id in self._bulky) == bool(num_bytes), f"{handle_id} is bulky and not listed so"
            if num_bytes:
                used[record.principal] = used.get(record.principal, 0) + num_bytes
        assert used == self._used_bytes_of, f"{used} bytes held, {self._used_bytes_of} counted"
        assert sum(used.values()) == self.used_bytes <= self._limit_bytes, f"{self.used_bytes} bytes counted in all"
        for principal, num_bytes in used.items():
            limit = self._limits_of(principal).retained_bytes
            assert limit is None or num_bytes <= limit, f"{principal} holds {num_bytes} bytes of {limit}"

    def _hold_rows(self, handle_id: str, record: AppendRecord) -> None:
        """Count a bulky record, then drop the rows of older ones until every bound holds."""
        principal = record.principal
        own = self._bulky_of.setdefault(principal, {})
        self._bulky[handle_id] = own[handle_id] = record
        self.used_bytes += record.num_bytes
        self._used_bytes_of[principal] = self._used_bytes_of.get(principal, 0) + record.num_bytes
        while self.used_bytes > self._limit_bytes:
            self._drop_rows(next(iter(self._bulky)))
        limit = self._limits_of(principal).retained_bytes
        while limit is not None and self.used_bytes_of(principal) > limit:
            self._drop_rows(next(iter(own)))

    def _drop_rows(self, handle_id: str) -> None:
        """Give back the bytes of a bulky record; what is small of it stays."""
        record = self._bulky.pop(handle_id)
        own = self._bulky_of[record.principal]
        del own[handle_id]
        self.used_bytes -= record.num_bytes
        self._used_bytes_of[record.principal] -= record.num_bytes
        if not own:
            del self._bulky_of[record.principal], self._used_bytes_of[record.principal]
        record.result, record.num_bytes = None, 0


def _bytes_of(row: RowOutput) -> int:
    num_bytes = _ROW_BYTES
    if row.logits is not None:
        num_bytes += row.logits.nbytes
    if row.top_ids is not None and row.top_logprobs is not None:
        num_bytes += row.top_ids.nbytes + row.top_logprobs.nbytes
    return num_bytes
