"""One panel of a dashboard, and the PromQL that panels have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

SOURCE: Final = {"type": "prometheus", "uid": "$datasource"}
GREEN, AMBER, RED = "green", "orange", "red"


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel.

    Attributes:
        expression: In PromQL; ``{}`` stands for the servers that were chosen, ``{, x="y"}`` for these and more.
        legend: What its series are called.
        is_table: Wanted at one moment, not over time.
    """

    expression: str
    legend: str
    is_table: bool = False

    def to_json(self, reference: str, kind: str) -> dict[str, Any]:
        """Return it as Grafana has it."""
        expression = self.expression.replace("{}", '{instance=~"$instance"}').replace("{,", '{instance=~"$instance",')
        at_once = self.is_table or kind in ("stat", "gauge")
        return {
            "refId": reference,
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": self.legend,
            "instant": self.is_table,
            "range": not self.is_table,
            "format": "table" if self.is_table else ("heatmap" if kind == "heatmap" else "time_series"),
            **({} if not at_once else {"exemplar": False}),
        }


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title, description: What it shows, and how to read it.
        unit: Of its axis, by Grafana's name.
        queries: What is asked.
        kind: Of panel.
        width: Of the 24 columns. height: in Grafana's rows.
        is_stacked: Series add up.
        thresholds: (value, colour) from which values are bad.
        maximum: Upper end of the axis.
        is_logarithmic: Powers of ten on the axis.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    is_stacked: bool = False
    thresholds: tuple[tuple[float, str], ...] = ()
    maximum: float | None = None
    is_logarithmic: bool = False

    def to_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Return it as Grafana has it, at a place."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [query.to_json(chr(65 + index), self.kind) for index, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _OPTIONS[self.kind],
            **self._transformations(),
        }

    def _defaults(self) -> dict[str, Any]:
        steps = [
            {"value": None, "color": GREEN},
            *({"value": value, "color": color} for value, color in self.thresholds),
        ]
        result: dict[str, Any] = {"unit": self.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
        if self.kind == "timeseries":
            result["custom"] = {
                "fillOpacity": 30 if self.is_stacked else 8,
                "lineWidth": 1,
                "showPoints": "never",
                "stacking": {"mode": "normal" if self.is_stacked else "none"},
                "thresholdsStyle": {"mode": "dashed" if self.thresholds else "off"},
                "scaleDistribution": {"type": "log", "log": 10} if self.is_logarithmic else {"type": "linear"},
            }
            result["color"] = {"mode": "palette-classic"}
        if self.is_logarithmic or self.kind == "table":
            del result["min"]
        if self.maximum is not None:
            result["max"] = self.maximum
        return result

    def _transformations(self) -> dict[str, Any]:
        if self.kind != "table":
            return {}
        hidden = dict.fromkeys(("Time", "job", "Value"), True)
        return {"transformations": [{"id": "organize", "options": {"excludeByName": hidden}}]}


_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "gauge": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "showThresholdMarkers": True},
    "heatmap": {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
        "yAxis": {"unit": "s"},
        "cellGap": 1,
        "tooltip": {"mode": "single", "yHistogram": True},
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}


def rate(metric: str, by: str = "", match: str = "") -> str:
    """Return how fast a counter grows, summed over servers or by labels."""
    labels = f"{{, {match}}}" if match else "{}"
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{labels}[$__rate_interval]))"


def quantiles(metric: str, *shares: float) -> tuple[Query, ...]:
    """Return quantiles of a histogram over all servers that were chosen."""
    buckets = rate(f"{metric}_bucket", "le")
    return tuple(Query(f"histogram_quantile({share:g}, {buckets})", f"p{share * 100:g}") for share in shares)


def mean(metric: str) -> str:
    """Return the mean of what a histogram has seen."""
    return f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}"


def stat(title: str, description: str, unit: str, expression: str, *thresholds: tuple[float, str]) -> Panel:
    """Return one number."""
    return Panel(title, description, unit, (Query(expression, title),), "stat", 4, 4, thresholds=thresholds)
