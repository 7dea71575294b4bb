"""Prometheus as tests ask it, and the queries of the dashboard with their variables filled in."""

from __future__ import annotations

import json
import math
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards" / "ferrule.json"


class Prometheus:
    """One that runs.

    Args:
        address: Its host and port.
    """

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1"

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer that is a success."""
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the value of each series, now; those without a value left out."""
        found = [
            (series["metric"], float(series["value"][1])) for series in self.ask("query", query=expression)["result"]
        ]
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    def wait_for(self, is_so: Callable[[], bool], what: str = "", timeout_s: float = 30) -> None:
        """Ask until something is so: a machine that has much to do misses a scrape."""
        end = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < end, f"Prometheus does not see it: {what}"
            time.sleep(0.25)


def panels() -> Iterator[tuple[str, str]]:
    """Yield the title of a panel and an expression, for every query of the dashboard, its variables filled in."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], filled_in(target["expr"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = variable["definition"].removeprefix("label_values(").removesuffix(")").split(", ")
            yield f"variable {variable['name']}", f"group by ({label}) ({metric})"


def filled_in(expression: str) -> str:
    """Return an expression as Grafana sends it with all servers chosen."""
    return expression.replace("$instance", ".*").replace("$__rate_interval", "15s")
