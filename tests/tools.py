"""What tests take from the machine: programs that it may lack, and machine code that other tests have compiled."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import pytest

KERNEL_CACHE: Final = str(Path("~/.cache/ferrule").expanduser())
"""For servers with a home of their own."""


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
