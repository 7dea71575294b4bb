"""The report: all parts in one JSON, the bars, the plot; nothing in it that was not measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from benchmarks.gpu.bars import judge, table
from benchmarks.gpu.plot import plot
from benchmarks.gpu.process import Workplace, write
from benchmarks.gpu.timing import Row

_KEYS = {
    "commit": (str,),
    "date": (str,),
    "is_dry": (bool,),
    "device": (dict, type(None)),
    "ceiling_gbs": (float, int, type(None)),
    "parts": (list,),
    "bars": (list,),
    "failures": (list,),
}
_DECODE_KEYS = ("part", "model", "arm", "batch", "context", "steps", "ms", "tok_s", "read_gb", "gbs", "status")


def make_report(workplace: Workplace, device: Row | None) -> Row:
    """Return the report over all parts of this commit and device that have run, in this call and earlier ones."""
    results = workplace.results()
    is_dry = bool(workplace.identity["is_dry"])
    rows = [row for result in results for row in result["rows"]]
    ceiling = None if is_dry else ceiling_of(rows)
    return {
        **{key: value for key, value in workplace.identity.items() if key != "device"},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "ceiling_gbs": ceiling,
        "parts": [_with_shares(result, ceiling) for result in results],
        "bars": judge([] if is_dry else rows, ceiling),
        "failures": [failure for result in results for failure in result["failures"]],
    }


def ceiling_of(rows: Sequence[Row]) -> float | None:
    """Return the best read rate of any reader, in GB/s; None: none was measured."""
    return max((row["gbs"] for row in rows if row.get("kind") == "read" and "gbs" in row), default=None)


def _with_shares(result: Row, ceiling: float | None) -> Row:
    if not ceiling:
        return result
    rows = [
        {**row, "share_of_ceiling": round(row["gbs"] / ceiling, 4)} if row.get("kind") == "decode" else row
        for row in result["rows"]
    ]
    return {**result, "rows": rows}


def problems_of(report: Row) -> list[str]:
    """Return what a reader of the report would trip over: missing keys, wrong kinds, figures that cannot be."""
    found = [
        f"{key} is {report.get(key)!r}"
        for key, kinds in _KEYS.items()
        if key not in report or not isinstance(report[key], kinds)
    ]
    rows = [row for result in report.get("parts", []) for row in result["rows"]]
    found += [
        f"{row.get('part')}: {key} is missing in {row}"
        for row in rows
        if row.get("kind") in ("decode", "wire") and "ms" in row
        for key in _DECODE_KEYS
        if key not in row
    ]
    if report.get("is_dry") and any(bar["value"] is not None for bar in report.get("bars", [])):
        found.append("a dry run measures no bar")
    return found


def save(workplace: Workplace, report: Row) -> list[str]:
    """Write results.json and, where shares are known, share.svg; returns the names of what was written.

    A plot of an earlier run does not stay beside results that are not its own.
    """
    (workplace.output / "share.svg").unlink(missing_ok=True)
    write(workplace.output / "results.json", json.dumps(report, indent=1) + "\n")
    rows = [row for result in report["parts"] for row in result["rows"]]
    if not report["ceiling_gbs"] or not any(row.get("kind") == "decode" for row in rows):
        return ["results.json"]
    title = f"{report['device']['device']}, {report['date'][:10]}, commit {str(report['commit'])[:8]}"
    title += f": share of {report['ceiling_gbs']:.0f} GB/s that were read at most"
    write(workplace.output / "share.svg", plot(rows, report["ceiling_gbs"], title))
    return ["results.json", "share.svg"]


def lines_of(report: Row) -> list[str]:
    """Return the end of the run for people: the ceiling, the bars, what failed."""
    ceiling = f"{report['ceiling_gbs']:.0f} GB/s" if report["ceiling_gbs"] else "not measured"
    head = ["", f"read ceiling: {ceiling}", *table(report["bars"])]
    if report["is_dry"]:
        head.append("a dry run: nothing was executed on a GPU, and none of its times is a figure; so there is no plot")
    elif "H200" not in report["device"]["device"]:
        head.append(f"the bars were set for an H200, this is: {report['device']['device']}")
    failures = [f"FAILED {failure}" for failure in report["failures"]]
    return [*head, *failures, f"{len(failures)} failures" if failures else "nothing failed"]


def line_of(row: Row) -> str:
    """Return one row of a part for people; one of a dry run says so by itself."""
    dry = "(dry) " if row.get("is_dry") else ""
    if row.get("status") not in ("ok", None) or "arm" not in row:
        hidden = ("part", "model", "kernels", "is_dry")
        return dry + "  ".join(f"{key}={value}" for key, value in row.items() if key not in hidden)
    where = f"{dry}{row['arm']:<24} batch {row.get('batch', 1):>3} context {row['context']:>5}"
    if "ms" not in row:
        return f"{where}  {row.get('us', 0):9.2f} us  {row.get('gbs', 0):8.1f} GB/s"
    ms = row["ms"]
    spread = f"{ms['median']:9.3f} ms ({ms['min']:.3f}-{ms['max']:.3f})"
    more = f"  difference={row['difference']}" if "difference" in row else ""
    more += f"  {100 * row['loss']:+.1f} % time against in process" if "loss" in row else ""
    kind = "" if row["kind"] in ("decode", "wire") else f"  [{row['kind']}]"
    return f"{where}  {spread}  {row['tok_s']:10.1f} tok/s  {row['gbs']:8.1f} GB/s{more}{kind}"
