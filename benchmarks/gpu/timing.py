"""Time of decode steps: several arms in turns, so that a slow phase of the machine falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Row = dict[str, Any]


class Arm(Protocol):
    """Something that decodes: ours or a peer."""

    name: str

    def prepare(self, batch: int, context: int, num_steps: int) -> None:
        """Give ``batch`` sequences ``context`` tokens of KV each and room for the steps; run everything once."""
        ...

    def decode(self, num_steps: int) -> None:
        """Decode greedily from ``context`` on, over what an earlier call wrote; ends when the device has."""
        ...


def synchronize(device: torch.device) -> None:
    """Wait for the device; faults show here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(values: Sequence[float], digits: int = 5) -> Row:
    """Return the median with its spread and the number of samples."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "samples": len(values),
    }


def seconds_of(work: Callable[[], object]) -> float:
    """Return what a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def alternate(arms: Sequence[Arm], num_steps: int, num_rounds: int) -> dict[str, list[float]]:
    """Return ms per step of every arm and round: A B, B A, A B, ...; one round before is not counted."""
    found: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for round_ in range(num_rounds + 1):
        for arm in arms if round_ % 2 else reversed(arms):
            taken_s = seconds_of(lambda arm=arm: arm.decode(num_steps))  # type: ignore[misc]
            if round_:
                found[arm.name].append(1000 * taken_s / num_steps)
    return found


def ms_per_step(times: Sequence[Sequence[float]]) -> float:
    """Return ms from token to token while every sequence is being continued.

    Args:
        times: Of every sequence, when each of its tokens came, in seconds, ascending.

    Raises:
        ValueError: They were not continued together.
    """
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    num_tokens = sum(begin < at <= end for one in times for at in one)
    if not num_tokens:
        raise ValueError("the sequences ran one after the other")
    return 1000 * (end - begin) * len(times) / num_tokens
