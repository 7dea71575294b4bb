"""The attacks as tests; ``make test-hostile`` runs them with a summary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.figures import report
from tests.hostile.registry import ATTACKS
from tests.hostile.servers import dirty_lines
from tests.hostile.verdicts import Attack, Campaign


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_server_withstands(attack: Attack, tmp_path: Path) -> None:
    """The bar of the attack is met, and the logs are clean."""
    campaign = Campaign(tmp_path, is_quick=True)
    outcome = attack.run(campaign)
    report(attack.name, summary=outcome.summary, bar=outcome.bar)
    assert outcome.is_met, f"{outcome.summary}; bar: {outcome.bar}"
    assert dirty_lines(campaign.logs) == []
