"""The models in the cache of the hub on this disk, and whether they load."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.model.hub.models import cached_models
from ferrule_server.model_check.report import check_folder

__all__ = ["Cached", "list_cached"]


@dataclass(frozen=True, slots=True)
class Cached:
    """A model in the cache.

    Attributes:
        model: ``org/name``.
        disk_bytes: Size of its files, those of all commits together.
        loads: Whether it loads.
        reason: Why it does not; empty if it does.
    """

    model: str
    disk_bytes: int
    loads: bool
    reason: str


def list_cached() -> list[Cached]:
    """Return the models in the cache, by name."""
    found = []
    for name, cache in cached_models():
        folder = cache.newest()
        reason = "its weights are not complete in the cache" if folder is None else check_folder(folder)
        found.append(Cached(name, cache.disk_bytes(), not reason, reason))
    return found
