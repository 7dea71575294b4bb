"""What Prometheus is given: valid, tested by its own tool, and explained in the documents."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

from tests.tools import tool
from tools.compose.compose_file import ROOT

DEPLOY = ROOT / "deploy"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]


@pytest.mark.parametrize(
    "arguments",
    [["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]],
    ids=" ".join,
)
def test_promtool_finds_nothing_wrong(arguments: list[str]) -> None:
    """Rules, their unit tests, and the configuration that loads them."""
    command = [tool("promtool"), *arguments]
    checked = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_is_seen_to_fire() -> None:
    """In the unit tests; a rule that cannot fire is worse than none."""
    fired = {
        case["alertname"]
        for test in yaml.safe_load((DEPLOY / "alerts_test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in RULES}


def test_every_alert_says_what_to_do() -> None:
    """It names the server, and says how urgent it is."""
    for rule in RULES:
        assert rule["labels"]["severity"] in {"page", "ticket"}, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description", "action"}, rule["alert"]
        assert "$labels.instance" in rule["annotations"]["summary"] or rule["alert"] == "FerruleNoServer"
