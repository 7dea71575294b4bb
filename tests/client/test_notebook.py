"""How notebooks show caches and outputs: valid HTML, made without a call."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from ferrule import Client, greedy
from tests.client.fake_server import FakeServer


def count_spans(text: str) -> int:
    """Return the number of spans; all tags must be closed in order."""
    return len(list(ET.fromstring(f"<div>{text}</div>".replace("<br>", "<br/>")).iter("span")))


def test_a_cache_is_a_row_of_blocks(fake: FakeServer, fake_client: Client) -> None:
    """As many as it has, the last one as full as it is; what is pending is named."""
    with fake_client.prefill(range(40), policy=greedy()) as cache:
        num_calls = sum(fake.calls.values())
        text = cache._repr_html_()
        assert count_spans(text) == 3 + 1  # blocks of 16 tokens, and the pending token
        assert "50%" in text
        assert f"pending: {int(cache.last.token)}" in text
        assert cache.handle.handle_id in text
        assert cache.handle.cache_id not in text
        assert sum(fake.calls.values()) == num_calls


def test_an_output_is_a_table(client: Client) -> None:
    """What was asked for is there, the most likely tokens with bars."""
    with client.prefill([1, 2, 3], policy=greedy(logprobs=True, top_logprobs=3, logits="float32")) as cache:
        text = cache.last._repr_html_()
        assert count_spans(text) == 3
        for name in ("token", "log-probability", "logits", "1 by 256", "length"):
            assert name in text
