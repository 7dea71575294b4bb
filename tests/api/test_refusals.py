"""Refused items are logged by reason, and a flood of them does not flood the log."""

from __future__ import annotations

import pytest

from ferrule_server.api.rpc.refusals import Refusals
from ferrule_server.errors import Draining, QueueFull


def test_a_flood_is_a_line_a_second_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """What was held back is counted in the next line; nothing is lost."""
    refusals = Refusals("StreamDecode", "alice")
    for _ in range(100):
        refusals.add(QueueFull(9, 9))
        refusals.log()
    refusals.add(Draining())
    refusals.log(is_last=True)
    refusals.log(is_last=True)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition("count=")[2] for line in lines] == ["1", "99", "1"]
    assert "QUEUE_FULL" in lines[1]
    assert "DRAINING" in lines[2]
