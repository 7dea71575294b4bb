"""What a campaign measured: one line of JSON on stdout, which ``pytest -s`` shows and tests/chaos/RECORD.md quotes."""

from __future__ import annotations

import json
import os


def report(campaign: str, **figures: object) -> None:
    """Print the figures of one campaign."""
    print(json.dumps({"campaign": campaign, **figures}, default=str), flush=True)


def seed_of_run() -> int:
    """Return the seed: that of ``FERRULE_CHAOS_SEED``, so that a run can be repeated, else always the same one."""
    return int(os.environ.get("FERRULE_CHAOS_SEED", "20260"))
