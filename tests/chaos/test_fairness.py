"""One principal floods prefill; another decodes and hardly notices.

The bar: while the flood lasts, the p99 of the other's decodes is at most its unloaded p99 plus the longest step of the
flood. *Unloaded* is the same principal with the same streams on the same server while nobody else is there, measured
before and after the flood and taken together. Latencies are those of the client, in a process of its own.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.chaos.figures import report
from tests.chaos.load import Measured, percentile, run_loads, summary, undisturbed
from tests.chaos.server_process import ServerProcess
from tests.chaos.timed_server import read_steps

pytestmark = pytest.mark.slow

ALONE_S = 6.0
FLOOD_S = 12.0
TIMED = ("--step-ms=10", "--row-us=50", "--executor=paged-reference", "--max-context=2048", "--kv-memory=64MiB")
"""Steps as on a device: 10 ms and 50 us for each row, during which the interpreter is free."""
SHIPPED = ("--kv-memory=256MiB",)
"""The model that ships, computed on the same cores as everything else."""
NO_PACE = "--max-step-time=60s"


@pytest.mark.parametrize(
    ("arguments", "streams", "min_decodes_per_s", "min_prefill_per_s"),
    [(TIMED, 1, 20.0, 2000.0), (TIMED, 4, 80.0, 2000.0), (SHIPPED, 4, 40.0, 300.0)],
    ids=["timed, 1 stream", "timed, 4 streams", "shipped, 4 streams"],
)
def test_a_flood_of_prompts_costs_another_principals_decodes_one_step_at_most(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    arguments: tuple[str, ...],
    streams: int,
    *,
    min_decodes_per_s: float,
    min_prefill_per_s: float,
) -> None:
    """p99 under the flood <= unloaded p99 + the longest step of the flood; neither starves."""
    paced = _campaign(tmp_path, streams, *arguments)
    report(f"fairness, {request.node.callspec.id}", **paced)
    assert paced["p99_ms"] <= paced["bar_ms"]
    assert paced["decodes_per_s"] >= min_decodes_per_s, "a quiet run proves nothing"
    assert paced["prefill_tokens_per_s"] >= min_prefill_per_s, "a quiet run proves nothing, and prompts must get on"


def test_without_the_pace_decodes_pay_for_the_flood(tmp_path: Path) -> None:
    """The ablation: with steps as long as prompts like, most decodes take three of their steps, not two as with it.

    The bar is no measure here: it moves with the longest step, and decodes may wait for one such step or for two.
    """
    unpaced = _campaign(tmp_path, 4, *TIMED, NO_PACE)
    report("fairness, pace switched off", **unpaced)
    assert unpaced["p50_ms"] > 3 * unpaced["unloaded_p50_ms"]


def _campaign(folder: Path, streams: int, *arguments: str) -> dict[str, float]:
    tokens, steps_file = folder / "tokens", folder / "steps"
    tokens.write_text("".join(f"{hashlib.sha256(name.encode()).hexdigest()} {name}\n" for name in ("calm", "flood")))
    calm = {"kind": "decode", "token": "calm", "count": streams, "tokens": 64}
    alone = {**calm, "seconds": ALONE_S}
    flood = {"token": "flood", "count": 8, "tokens": 1500, "delay": 1.5, "seconds": FLOOD_S}
    server = ServerProcess(
        folder / "log",
        f"--steps={steps_file}",
        f"--token-file={tokens}",
        *arguments,
        program="tests.chaos.timed_server",
    )
    with undisturbed() as is_undisturbed, server:
        unloaded = run_loads(server.target, calm=alone)["calm"].latencies_ms
        loaded = run_loads(server.target, calm={**calm, "seconds": FLOOD_S + 3.0}, flood=flood)
        unloaded += run_loads(server.target, calm=alone)["calm"].latencies_ms
    figures = _figures(unloaded, loaded["calm"], loaded["flood"], steps_file)
    return {**figures, "real_time": is_undisturbed}


def _figures(unloaded: list[float], calm: Measured, flood: Measured, steps_file: Path) -> dict[str, float]:
    """Return what was measured in the time that both were there."""
    begin_s = max(calm.span_s[0], flood.span_s[0])
    end_s = min(calm.span_s[1], flood.span_s[1])
    latencies = calm.within(begin_s, end_s)
    steps = [step.elapsed_s * 1e3 for step in read_steps(steps_file) if begin_s <= step.began_s <= end_s]
    return {
        "bar_ms": round(percentile(unloaded, 0.99) + max(steps), 2),
        "unloaded_p50_ms": summary(unloaded)["p50"],
        "unloaded_p99_ms": summary(unloaded)["p99"],
        "p50_ms": summary(latencies)["p50"],
        "p99_ms": summary(latencies)["p99"],
        "median_step_ms": round(percentile(steps, 0.5), 2),
        "longest_step_ms": round(max(steps), 2),
        "decodes_per_s": round(len(latencies) / (end_s - begin_s), 1),
        "prefill_tokens_per_s": round(flood.counts.get("tokens", 0) / flood.seconds, 1),
    }
