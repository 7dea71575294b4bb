"""The list of all attacks, in the order in which they run."""

from __future__ import annotations

from typing import Final

from tests.hostile import fairness, frames, lines, memory, strangers
from tests.hostile.verdicts import Attack

ATTACKS: Final[tuple[Attack, ...]] = (
    *strangers.ATTACKS,
    *frames.ATTACKS,
    *fairness.ATTACKS,
    *memory.ATTACKS,
    *lines.ATTACKS,
)


def chosen(names: list[str]) -> list[Attack]:
    """Return the attacks with these names, or all without any; ``fairness`` stands for all of its kind.

    Raises:
        ValueError: No attack has one of the names.
    """
    unknown = [name for name in names if not any(_is_named(attack, name) for attack in ATTACKS)]
    if unknown:
        raise ValueError(f"no attack is called {', '.join(unknown)}; --list shows the names")
    return [attack for attack in ATTACKS if not names or any(_is_named(attack, name) for name in names)]


def _is_named(attack: Attack, name: str) -> bool:
    return attack.name == name or attack.name.startswith(f"{name}.")
