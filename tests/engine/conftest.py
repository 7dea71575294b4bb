"""An engine, and servers that follow each other on one journal."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import Harness


@pytest.fixture
def harness() -> Iterator[Harness]:
    """A running engine over a fake executor, sound when the test is over."""
    with Harness() as harness:
        yield harness


class Servers:
    """Servers one after the other on one journal; each is ended as by kill -9: the next one reads a copy."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        self.now: Harness | None = None

    def start(self, **settings: object) -> Harness:
        """Start the first server."""
        self.now = Harness(durable=self._path / str(self._count), **settings)  # type: ignore[arg-type]
        self.now.engine.start()
        return self.now

    def crash(self, **settings: object) -> Harness:
        """Read the journal as it is now in another server; the one before is not asked to do anything."""
        before, old = self._path / str(self._count), self.now
        self._count += 1
        while True:
            with contextlib.suppress(shutil.Error):  # a segment that is not read any more was just deleted
                shutil.copytree(before, self._path / str(self._count))
                break
            shutil.rmtree(self._path / str(self._count))
        if old is not None:
            old.engine.close()
        return self.start(**settings)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Servers that are closed at the end, and whose invariants hold."""
    servers = Servers(tmp_path)
    yield servers
    if servers.now is not None:
        servers.now.engine.close()
        servers.now.check_integrity()
