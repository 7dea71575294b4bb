"""What is asked of the figures, and which of it is met: parity with what others publish, and what we aim at.

The bars were set for an H200 as tokens/s against an assumed read rate of 4.3 TB/s. What counts is the share of the read
ceiling measured in the same run; tokens/s stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.gpu import models
from benchmarks.gpu.parts import STEPS
from benchmarks.gpu.timing import Row

ASSUMED_GBS = 4300.0
"""Read rate that the bars in tokens/s were set with."""

Verdict = Literal["aim met", "parity met", "missed", "not measured"]
Value = Callable[[Sequence[Row], float | None], float | None]
"""Finds the value of a bar among all rows, given the read ceiling in GB/s."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        name: For people.
        unit: Of the values: ``%`` of the read ceiling, ``us``, ``x`` or ``% loss``.
        parity: What others reach.
        aim: What we aim at.
        value: Finds ours.
        is_lower_better: Of times and losses.
        beside: For people, what stands beside it, such as tokens/s.
    """

    name: str
    unit: str
    parity: float
    aim: float
    value: Value
    is_lower_better: bool = False
    beside: Callable[[Sequence[Row]], str] = lambda rows: ""  # noqa: ARG005

    def verdict(self, value: float | None) -> Verdict:
        """Return what a value is worth."""
        if value is None:
            return "not measured"
        sign = -1 if self.is_lower_better else 1
        if sign * value >= sign * self.aim:
            return "aim met"
        return "parity met" if sign * value >= sign * self.parity else "missed"


def judge(rows: Sequence[Row], ceiling_gbs: float | None) -> list[Row]:
    """Return every bar with its value and verdict.

    Args:
        rows: Of all parts, each with ``part`` and ``model``; those of a dry run are no figures and must not come here.
        ceiling_gbs: Measured; None: no share can be told.
    """
    judged = []
    for bar in BARS:
        value = bar.value(rows, ceiling_gbs)
        judged.append(
            {
                "bar": bar.name,
                "unit": bar.unit,
                "parity": round(bar.parity, 2),
                "aim": round(bar.aim, 2),
                "value": None if value is None else round(value, 3),
                "verdict": bar.verdict(value),
                "beside": bar.beside(rows),
            }
        )
    return judged


def table(judged: Sequence[Row]) -> list[str]:
    """Return the bars as lines for people."""
    lines = [f"{'bar':<58} {'parity':>9} {'aim':>9} {'measured':>9}  verdict"]
    for row in judged:
        value = "-" if row["value"] is None else f"{row['value']:.2f}"
        cells = f"{row['parity']:>9.2f} {row['aim']:>9.2f} {value:>9}"
        lines.append(f"{row['bar'] + ', ' + row['unit']:<58} {cells}  {row['verdict']}  {row['beside']}".rstrip())
    return lines


def find(rows: Sequence[Row], part: str, arm: str, cell: tuple[int, int], kind: str = "decode") -> Row | None:
    """Return the row of a cell (batch, context); None where there is none, or what it says is not right."""
    batch, context = cell
    wanted = {"part": part, "arm": arm, "batch": batch, "context": context, "kind": kind, "status": "ok"}
    return next((row for row in rows if wanted.items() <= row.items()), None)


def _share_bar(model: str, batch: int, context: int, parity: float, aim: float, *, is_share: bool = False) -> Bar:
    """Return a bar on the share of the read ceiling; parity and aim in tokens/s, or as shares themselves."""
    per_token = models.read_bytes(models.config_of(model), batch, context + (STEPS + 1) / 2) / batch / 1e9
    times = 1.0 if is_share else 100 * per_token / ASSUMED_GBS

    def row_of(rows: Sequence[Row]) -> Row | None:
        return find(rows, f"decode:{model}", "ferrule", (batch, context))

    def value(rows: Sequence[Row], ceiling_gbs: float | None) -> float | None:
        row = row_of(rows)
        return None if row is None or not ceiling_gbs else 100 * float(row["gbs"]) / ceiling_gbs

    def beside(rows: Sequence[Row]) -> str:
        row = row_of(rows)
        asked = "" if is_share else f" (set as {parity:.0f} / {aim:.0f})"
        return f"{row['tok_s']} tok/s{asked}" if row else asked.strip(" ()")

    return Bar(
        f"{model} batch {batch} context {context}", "% of ceiling", parity * times, aim * times, value, beside=beside
    )


def _step_bar(model: str, context: int, parity_us: float, aim_us: float) -> Bar:
    def value(rows: Sequence[Row], _: float | None) -> float | None:
        row = find(rows, f"decode:{model}", "ferrule", (1, context))
        return None if row is None else 1000 * float(row["ms"]["median"])

    return Bar(f"{model} shape batch 1 from context {context}", "us", parity_us, aim_us, value, is_lower_better=True)


def _ratio_bar(model: str, parity: float, aim: float) -> Bar:
    """Return a bar against transformers with a static cache, both from the same part."""

    def value(rows: Sequence[Row], _: float | None) -> float | None:
        pair = [find(rows, f"static:{model}", arm, (1, 256)) for arm in ("ferrule", "transformers static")]
        if pair[0] is None or pair[1] is None:
            return None
        return float(pair[1]["ms"]["median"]) / float(pair[0]["ms"]["median"])

    return Bar(f"{model} batch 1 over transformers static + compile", "x", parity, aim, value)


def _loss_bar(model: str, batch: int, parity: float, aim: float) -> Bar:
    """Return a bar on what gRPC takes of Generate, against the same blocks in process, from the same part."""

    def value(rows: Sequence[Row], _: float | None) -> float | None:
        row = find(rows, f"wire:{model}:256", "Generate, branches", (batch, 256), "wire")
        return None if row is None or "loss" not in row else 100 * float(row["loss"])

    name = f"{model} Generate through gRPC, batch {batch}"
    return Bar(name, "% loss", parity, aim, value, is_lower_better=True)


BARS: tuple[Bar, ...] = (
    _share_bar("Qwen3-8B", 1, 256, 200, 240),
    _share_bar("Qwen3-1.7B", 1, 256, 700, 890),
    _share_bar("Qwen3-0.6B", 1, 256, 1400, 1650),
    _step_bar("Llama-3.2-1B", 32, 950, 795),
    _share_bar("Qwen3-8B", 32, 2048, 70, 78, is_share=True),
    _ratio_bar("Qwen3-8B", 1.2, 1.6),
    _ratio_bar("Qwen3-0.6B", 2.0, 3.0),
    *(_loss_bar(model, 1, 5, 1) for model in ("Qwen3-8B", "Qwen3-0.6B")),
    *(_loss_bar(model, 128, 15, 2) for model in ("Qwen3-8B", "Qwen3-0.6B")),
)
