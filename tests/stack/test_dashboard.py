"""The dashboard: what its program writes, and readable. tests/docker asks a real Prometheus for each of its queries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.stack.promql import DASHBOARD, filled_in
from tools.compose.compose_file import ROOT


def test_the_dashboard_is_what_is_written_for_it() -> None:
    """``python deploy/grafana/dashboard.py`` was run after the last change."""
    command = [sys.executable, str(ROOT / "deploy" / "grafana" / "dashboard.py"), "-"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert made == DASHBOARD.read_text()


def test_panels_can_be_read(tmp_path: Path) -> None:
    """Each has a unit, says what it shows, and shares its place with no other; each query has a name for its series."""
    cells: set[tuple[int, int]] = set()
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        covered = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not covered & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= covered
        if panel["type"] == "row":
            continue
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["legendFormat"] or target["format"] == "table"
            assert "$instance" in target["expr"] or "envoy_" in target["expr"] or "ALERTS" in target["expr"]
            assert "$" not in filled_in(target["expr"])
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
