"""The arithmetic of the bars of frames, and the frames themselves."""

from __future__ import annotations

import gzip
import zlib

import pytest

from tests.api.hostile import http2
from tests.hostile.fairness import Comparison, Phase
from tests.hostile.framer import Spec
from tests.hostile.frames import FLOODS, Found, outcome_of

CALM = Phase(p50_ms=4.0, p99_ms=9.0, longest_step_ms=8.0, per_s=200.0)


def found(per_s: float, grown_mib: float = 10.0) -> Found:
    """Return what an attack found that left so many of 200 decodes a second."""
    attacked = Phase(8.0, 90.0, 8.0, per_s)
    comparison = Comparison(4, 1, CALM, attacked, CALM, 0.0, {"12": 3}, 0.0, 0.0)
    return Found(comparison, {"server": grown_mib})


@pytest.mark.parametrize(
    ("per_s", "grown_mib", "is_met"), [(90.0, 63.9, True), (89.0, 1.0, False), (200.0, 64.0, False)]
)
def test_bars_are_45_percent_and_64_mib(per_s: float, grown_mib: float, is_met: bool) -> None:
    """Both must be met."""
    assert outcome_of(found(per_s, grown_mib), None).is_met is is_met


def test_a_bare_server_that_suffers_too_lowers_the_bar_and_one_that_does_not_leaves_it() -> None:
    """It keeps half: 45 % of that are 22.5 %."""
    assert outcome_of(found(45.0), found(100.0)).is_met
    assert not outcome_of(found(44.0), found(100.0)).is_met
    assert not outcome_of(found(89.0), found(400.0)).is_met
    assert not outcome_of(found(45.0, 64.0), found(100.0, 900.0)).is_met


def test_a_server_that_was_killed_missed_its_bar() -> None:
    """However the bare one fared."""
    outcome = outcome_of(Found(None, {"server": 1536.5}), None)
    assert not outcome.is_met
    assert "killed" in outcome.summary


def test_statuses_are_named() -> None:
    """As people know them."""
    assert "3 UNIMPLEMENTED" in outcome_of(found(200.0), None).summary


@pytest.mark.parametrize("kind", sorted({flood.kind for flood in FLOODS.values()} - {"bomb"}))
def test_a_flood_is_whole_frames(kind: str) -> None:
    """About 64 KiB of them."""
    chunk, num_frames = Spec(kind, 1, "/a/B", 1, 1.0).chunk(), 0
    assert 32_768 < len(chunk) <= 65_536
    while chunk:
        chunk, num_frames = chunk[9 + int.from_bytes(chunk[:3], "big") :], num_frames + 1
    assert num_frames > 100


def test_bombs_are_what_they_say() -> None:
    """Both formats inflate to zeros, checksums included."""
    assert gzip.decompress(http2.bomb(3)) == zlib.decompress(http2.bomb(3, "deflate")) == bytes(3 << 20)
    assert len(http2.bomb(256)) < 300_000
