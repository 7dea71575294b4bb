"""Programs that some tests want and a machine may lack: they are skipped then, or fail where that is asked for."""

from __future__ import annotations

import os
import shutil

import pytest


def tool(name: str) -> str:
    """Return the path of a program; without it skip the test, or fail it where FERRULE_REQUIRE_TOOLS=1.

    Args:
        name: As a shell finds it: ``promtool``, ``chromium``, ``go``.
    """
    path = shutil.which(name)
    if path is not None:
        return path
    message = f"{name} is not installed: make test-stack installs it"
    if os.environ.get("FERRULE_REQUIRE_TOOLS") == "1":
        pytest.fail(message)
    pytest.skip(message)
