"""What was answered to the last append of each sequence, so that a retry is answered without running it again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from ferrule_server.engine.jobs import AppendJob, AppendResult, OutputRequest
from ferrule_server.executor.base import RowOutput

_ROW_BYTES: Final = 200
"""What a row of Python objects takes, apart from its arrays."""


@dataclass(eq=False, slots=True)
class AppendRecord:
    """One append and its answer.

    Attributes:
        start: Length before. num_tokens: how many were appended.
        output: The request as it came (an unseeded one matches an unseeded retry).
        result: What was answered.
        num_bytes: Bytes held by the rows of ``result``.
    """

    start: int
    num_tokens: int
    output: OutputRequest
    result: AppendResult
    num_bytes: int


class ReplayRecords:
    """The record of the last append of each sequence, by handle_id; the only owner of them.

    A record is right as long as it is the sequence's last append: the append rule lets a replay through only for
    tokens that are committed behind ``start``, and whatever put other tokens there was an append and replaced the
    record. Truncates therefore need not touch it.

    Invariant: ``used_bytes`` is the sum of ``num_bytes`` over the records held, and at most ``limit_bytes``: beyond
    it the records of the least recent appends are dropped, and a replay of one of those runs its rows again.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._records: dict[str, AppendRecord] = {}  # the least recent append first
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, handle_id: str, start: int, job: AppendJob, result: AppendResult) -> None:
        """Remember the answer to ``job``, appended behind ``start``, in place of the sequence's previous one."""
        self.forget(handle_id)
        num_bytes = 0
        for row in result.rows:
            num_bytes += _bytes_of(row)
        self._records[handle_id] = AppendRecord(start, len(job.token_ids), job.output, result, num_bytes)
        self.used_bytes += num_bytes
        while self.used_bytes > self._limit_bytes:
            self.forget(next(iter(self._records)))

    def find(self, handle_id: str, start: int, job: AppendJob) -> AppendResult | None:
        """Return what was answered if the last append was ``job`` behind ``start``, marked as replayed, else None."""
        record = self._records.get(handle_id)
        if record is None:
            return None
        if (record.start, record.num_tokens, record.output) != (start, len(job.token_ids), job.output):
            return None
        return dataclasses.replace(record.result, replayed=True)

    def forget(self, handle_id: str) -> None:
        """The sequence is gone, or appended again."""
        if (old := self._records.pop(handle_id, None)) is not None:
            self.used_bytes -= old.num_bytes

    def clear(self) -> None:
        """Every sequence is gone."""
        self._records.clear()
        self.used_bytes = 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        num_bytes = sum(_bytes_of(row) for each in self._records.values() for row in each.result.rows)
        assert num_bytes == self.used_bytes <= self._limit_bytes, f"{num_bytes} bytes held, {self.used_bytes} counted"


def _bytes_of(row: RowOutput) -> int:
    num_bytes = _ROW_BYTES
    if row.logits is not None:
        num_bytes += row.logits.nbytes
    if row.top_ids is not None and row.top_logprobs is not None:
        num_bytes += row.top_ids.nbytes + row.top_logprobs.nbytes
    return num_bytes
