"""Sides in turns, each sample between two probes of the read rate; and the records of results. No torch.

A record is one line of JSON: what was measured, its median and spread, and what the machine did meanwhile.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.cpu.cells import Cell
from benchmarks.cpu.machine import DISTURBED_CORES, OtherCores

__all__ = ["Record", "ResultsFile", "Samples", "key_of", "make_record", "sample_sides"]

Record = dict[str, Any]
Measure = Callable[[], float]
Key = tuple[str, str, str, bool]


@dataclass(slots=True)
class Samples:
    """The samples of one side in one cell.

    Attributes:
        values: One for each round, in the cell's unit.
        probe_gbs: The read rate around each sample, in GB/s: the mean of the probes before and after it.
        others: What other processes used while all sides of the cell were measured: samples alone are shorter than
            the ticks that the system counts in.
    """

    values: list[float] = field(default_factory=list)
    probe_gbs: list[float] = field(default_factory=list)
    others: OtherCores = field(default_factory=OtherCores)


def sample_sides(sides: Mapping[str, Measure], num_rounds: int, probe: Measure) -> dict[str, Samples]:
    """Warm every side up once, then measure them in turns for some rounds.

    Args:
        sides: What to measure, by the name of the side.
        num_rounds: Samples of each side.
        probe: Returns the read rate in GB/s.
    """
    for measure in sides.values():
        measure()
    others = OtherCores()
    samples = {name: Samples(others=others) for name in sides}
    with others.counting():
        before = probe()
        for _ in range(num_rounds):
            for name, measure in sides.items():
                samples[name].values.append(measure())
                after = probe()
                samples[name].probe_gbs.append((before + after) / 2)
                before = after
    return samples


def make_record(
    cell: Cell, samples: Samples, identity: Mapping[str, Any], step_bytes: float | None = None, **more: object
) -> Record:
    """Return the record of one side in one cell.

    Args:
        cell: What was measured.
        samples: Its samples.
        identity: What else names the record: ``model``, ``side``, ``is_quick``, versions.
        step_bytes: The bytes that a decode step must read; None if the cell is not limited by reading.
        **more: Further fields.
    """
    made: Record = {
        **identity,
        "cell": cell.name,
        "unit": cell.unit,
        "median": statistics.median(samples.values),
        "min": min(samples.values),
        "max": max(samples.values),
        "num_samples": len(samples.values),
        "read_rate_gbs": statistics.median(samples.probe_gbs) if samples.probe_gbs else None,
        "other_cores": round(samples.others.cores, 3),
        "is_disturbed": samples.others.cores > DISTURBED_CORES,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **more,
    }
    return made if step_bytes is None else made | _read_share(cell, samples, step_bytes)


def _read_share(cell: Cell, samples: Samples, step_bytes: float) -> Record:
    """Return what a decode step reads in GB/s, and the share of the probed rate that this is."""
    rates = [value / cell.batch * step_bytes * 1e-9 for value in samples.values]
    shares = [rate / probed for rate, probed in zip(rates, samples.probe_gbs, strict=True)]
    return {"gbs": statistics.median(rates), "read_share": statistics.median(shares)}


def key_of(record: Mapping[str, Any]) -> Key:
    """Return what two records must have in common for one to replace the other."""
    return (record["model"], record["side"], record["cell"], record["is_quick"])


class ResultsFile:
    """Records in a file of JSON lines; the last record of a key counts.

    Args:
        path: The file, which is made when the first record is added; None: records are kept in memory only.
        retries_disturbed: A record that is marked as disturbed does not count as done.
    """

    def __init__(self, path: Path | None, *, retries_disturbed: bool = False) -> None:
        self._path = path
        self._retries_disturbed = retries_disturbed
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._records: dict[Key, Record] = {key_of(record): record for record in _parsed(lines)}

    @property
    def records(self) -> list[Record]:
        """One record of each key, in the order in which the keys were first seen."""
        return list(self._records.values())

    def has(self, key: Key) -> bool:
        """Return whether there is a record of a key that need not be measured again."""
        record = self._records.get(key)
        return record is not None and not (self._retries_disturbed and record["is_disturbed"])

    def add(self, record: Record) -> None:
        """Append a record."""
        self._records[key_of(record)] = record
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def _parsed(lines: Sequence[str]) -> Iterable[Record]:
    """Yield the records; a line that was cut off by the end of a process is left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and {"model", "side", "cell", "is_quick"} <= record.keys():
            yield record
