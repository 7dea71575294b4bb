"""One record for each recently active principal, so that no principal sees the counts of another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

MAX_RECORDS: Final = 1024
"""Most principals with a record; beyond it the least recently active principal loses its record."""

_Record = TypeVar("_Record")


class PerPrincipal(Generic[_Record]):
    """Records by principal. Changed by one thread; other threads may read.

    Invariant: at most ``max_records`` principals have one. A principal whose record was dropped starts again at zero.

    Args:
        make: Returns an empty record.
        max_records: How many are kept.
    """

    __slots__ = ("_make", "_max_records", "_records")

    def __init__(self, make: Callable[[], _Record], max_records: int = MAX_RECORDS) -> None:
        self._make = make
        self._max_records = max_records
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def of(self, principal: str) -> _Record:
        """Return the principal's record for a change; the principal becomes the most recently active one."""
        record = self._records.get(principal)
        if record is None:
            record = self._records[principal] = self._make()
            if len(self._records) > self._max_records:
                self._records.popitem(last=False)
        else:
            self._records.move_to_end(principal)
        return record

    def recent(self) -> list[str]:
        """Return the principals with a record, the most recently active one first."""
        return list(reversed(self._records))

    def look(self, principal: str) -> _Record:
        """Return the principal's record for reading only; an empty one if it has none."""
        record = self._records.get(principal)
        return self._make() if record is None else record
