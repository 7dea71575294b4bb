"""The cells of the processor's benchmarks: what is measured, under one name for every side. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["CELLS", "PEER_CELLS", "QUICK", "Cell", "Effort", "fitting", "num_pool_tokens", "select"]

Kind = Literal["decode", "prefill", "stream", "neighbour", "rss"]
_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement.

    Attributes:
        kind: ``decode``: greedy steps in process; ``stream``: the same through gRPC; ``neighbour``: the share of the
            quiet decode rate that is left beside a busy process; ``prefill``: one prompt; ``rss``: peak memory.
        batch: Number of sequences; 0 if it has no meaning.
        context: Tokens before the first decode step, or tokens of the prompt; 0 if it has no meaning.
    """

    kind: Kind
    batch: int = 0
    context: int = 0

    @property
    def name(self) -> str:
        """The name that results are kept under, such as ``decode b1 c128`` or ``prefill 512``."""
        if self.kind == "prefill":
            return f"prefill {self.context}"
        return f"{self.kind} b{self.batch} c{self.context}" if self.batch else self.kind

    @property
    def unit(self) -> str:
        """The unit of the values."""
        return {"rss": "MiB", "neighbour": "x"}.get(self.kind, "tok/s")

    @property
    def is_lower_better(self) -> bool:
        """Whether a smaller value is the better one."""
        return self.kind == "rss"


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure a cell.

    Attributes:
        num_rounds: Samples of each side, in turns.
        num_steps: Decode steps in a sample; the sample is the median step.
        neighbour_s: Seconds of decoding, with a busy process and without.
        num_probe_passes: Passes over memory in a probe of its rate.
    """

    num_rounds: int = 5
    num_steps: int = 32
    neighbour_s: float = 1.0
    num_probe_passes: int = 5


QUICK = Effort(num_rounds=1, num_steps=8, neighbour_s=0.2, num_probe_passes=1)


PEER_CELLS = (
    Cell("decode", 1, _CONTEXT),
    Cell("decode", 1, 1024),
    Cell("decode", 1, 4096),
    Cell("decode", 1, 16384),
    *(Cell("decode", batch, _CONTEXT) for batch in (4, 8, 16, 32)),
    Cell("prefill", context=512),
    Cell("prefill", context=2048),
    Cell("rss"),
)
"""What peers are measured at."""

CELLS = (
    *PEER_CELLS[:-1],
    Cell("neighbour", 1, _CONTEXT),
    Cell("stream", 1, _CONTEXT),
    Cell("stream", 16, _CONTEXT),
    Cell("rss"),
)
"""What our own executors are measured at; the cells of one kind of resource stand together."""


def select(cells: Iterable[Cell], pattern: str) -> list[Cell]:
    """Return the cells whose name holds a match of a regular expression."""
    return [cell for cell in cells if re.search(pattern, cell.name)]


def fitting(cells: Iterable[Cell], max_context: int, num_steps: int) -> list[Cell]:
    """Return the cells whose sequences, decoded by ``num_steps`` tokens, are no longer than ``max_context`` tokens."""
    return [cell for cell in cells if _length(cell, num_steps) <= max_context]


def num_pool_tokens(cells: Iterable[Cell], num_steps: int, block_size: int) -> int:
    """Return the KV slots that the largest of some cells needs, in whole blocks of each sequence."""
    lengths = [(max(1, cell.batch), -(-_length(cell, num_steps) // block_size)) for cell in cells]
    return max((batch * num_blocks * block_size for batch, num_blocks in lengths), default=block_size)


def _length(cell: Cell, num_steps: int) -> int:
    return cell.context + (num_steps if cell.batch else 0)
