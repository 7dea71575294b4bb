"""Server views made up for tests of what shows them."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

from ferrule.admin import BlockMap, CacheMetrics, Histogram, PrincipalView, SequenceView, ServerView
from ferrule.types import Status
from ferrule_cli.top.figures import Look

BOUNDS = (0.001, 0.002, 0.004, 0.008)
_TYPES = {"int": 0, "float": 0.0, "str": "", "bool": False, "tuple[int, ...]": ()}


def blank(cls: type, **given: Any) -> Any:
    """Return a dataclass with zeros, empty texts and Nones where nothing is given."""
    values = {field.name: _TYPES.get(str(field.type)) for field in dataclasses.fields(cls)}
    return cls(**(values | given))


def histogram(*counts: int) -> Histogram:
    """Return counts over BOUNDS; their sum is made up."""
    padded = (*counts, *[0] * (len(BOUNDS) + 1 - len(counts)))
    return Histogram(upper_bounds=BOUNDS, counts=padded, sum=0.001 * sum(padded))


def sequence(index: int = 0, **given: Any) -> SequenceView:
    """Return a live sequence."""
    made = {"handle_id": f"{index:016x}", "principal": "alice", "length": 40, "num_blocks": 3, "num_shared_blocks": 2}
    view: SequenceView = blank(SequenceView, **(made | {"expires_in_s": 30.0, "ttl_s": 60.0, "age_s": 4.0} | given))
    return view


def principal(name: str, **given: Any) -> PrincipalView:
    """Return a principal."""
    view: PrincipalView = blank(PrincipalView, principal=name, **given)
    return view


def server_view(uptime_s: float = 100.0, cells: bytes | None = b"\0\1\2\3", **given: Any) -> ServerView:
    """Return a view; what Status or CacheMetrics have goes there."""
    names = {cls: {field.name for field in dataclasses.fields(cls)} for cls in (Status, CacheMetrics, ServerView)}
    status: dict[str, Any] = {"state": "busy", "instance": "here", "epoch": "e1", "executor": "torch"}
    metrics: dict[str, Any] = {"used_blocks": 40, "shared_blocks": 15, "cached_blocks": 10}
    own: dict[str, Any] = {"num_refused": {}, "sequences": ()}
    for name, value in given.items():
        part = own if name in names[ServerView] else status if name in names[Status] else metrics
        assert any(name in known for known in names.values()), name
        part[name] = value
    block_map = (
        None if cells is None else BlockMap(cell_blocks=1, cells=cells, fill=bytes(255 * (c > 1) for c in cells))
    )
    histograms = [name for name in names[ServerView] if name.endswith("_seconds")]
    own = {"principals": (), "time": datetime.now(UTC), **{name: histogram() for name in histograms}} | own
    view: ServerView = blank(
        ServerView,
        uptime_s=uptime_s,
        status=blank(Status, **status),
        cache_metrics=blank(CacheMetrics, **({"empty_blocks": 50} | metrics)),
        block_map=block_map,
        **own,
    )
    return view


def look(uptime_s: float = 100.0, note: str = "", model_id: str = "demo", **given: Any) -> Look:
    """Return a look at such a view, by a clock of our own that is 1000 s ahead."""
    view = server_view(uptime_s, **given)
    return Look(uptime_s + 1000.0, view.status, view, note, model_id, 512)
