"""Write the dashboard that Grafana shows, ``dashboards/ferrule.json``: ``python deploy/grafana/dashboard.py``.

The panels stand in ``rows.py``, a few lines each, because the JSON has hundreds for the same. A test compares the two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from panel import SOURCE, Panel
from rows import ROWS

OUTPUT: Final = Path(__file__).parent / "dashboards" / "ferrule.json"
_WIDTH: Final = 24


def dashboard() -> dict[str, Any]:
    """Return the whole of it."""
    return {
        "uid": "ferrule",
        "title": "Ferrule",
        "description": "Traffic, latency, the KV pool, the prefix cache, handles, executors, Envoy.",
        "tags": ["ferrule"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {"list": _variables()},
        "annotations": {"list": [_starts()]},
        "panels": list(_placed(ROWS)),
    }


def _variables() -> list[dict[str, Any]]:
    everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "current": {"selected": True, "text": "Prometheus", "value": "prometheus"},
        },
        {
            "name": "instance",
            "label": "Server",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": "label_values(ferrule_info, instance)", "refId": "instances"},
            "definition": "label_values(ferrule_info, instance)",
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": everything,
            "refresh": 2,
            "sort": 1,
        },
    ]


def _starts() -> dict[str, Any]:
    return {
        "name": "Starts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "blue",
        "expr": 'changes(ferrule_start_timestamp_seconds{instance=~"$instance"}[$__rate_interval]) > 0',
        "titleFormat": "{{instance}} started",
    }


def _placed(rows: dict[str, tuple[Panel, ...]]) -> Iterator[dict[str, Any]]:
    """Yield every row and panel with its number and its place, panels from left to right."""
    number = y = 0
    for title, panels in rows.items():
        number += 1
        place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        y += 1
        x = 0
        for panel, after in zip(panels, [*panels[1:], None], strict=True):
            number += 1
            yield panel.to_json(number, x, y)
            x += panel.width
            if after is None or x + after.width > _WIDTH:
                x, y = 0, y + panel.height


def text(content: dict[str, Any]) -> str:
    """Return it as the file has it."""
    return json.dumps(content, indent=2) + "\n"


def main() -> None:
    """Write the file, or the standard output if the argument is ``-``."""
    if sys.argv[1:] == ["-"]:
        sys.stdout.write(text(dashboard()))
    else:
        OUTPUT.write_text(text(dashboard()), encoding="utf-8")


if __name__ == "__main__":
    main()
