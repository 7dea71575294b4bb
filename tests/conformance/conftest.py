"""The servers of the cases, started once for all tests that want them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.servers import Servers


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start a server of a kind when it is first asked for."""
    with Servers(tmp_path_factory.mktemp("conformance")) as running:
        yield running
