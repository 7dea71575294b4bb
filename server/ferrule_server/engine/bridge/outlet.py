"""The outlet: where finished jobs leave the engine thread, at once or when a journal has confirmed them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ferrule_server.engine.bridge.delivery import Delivery
from ferrule_server.engine.bridge.gate import Finished
from ferrule_server.engine.jobs import Job
from ferrule_server.engine.metrics.durability import DurabilityFigures


class Direct:
    """The outlet without a journal: every outcome is delivered at once. The other one is ``durable/confirmations.py``.

    Args:
        delivery: Takes them.

    Attributes:
        has_journal: Whether sequences can survive the process. is_lost: whether what depends on the journal is refused.
        has_work: Whether :meth:`tend` should be called without waiting for requests.
        has_open: Whether something has to be handed over though no job is finished.
        num_durable: Number of live durable sequences.
        masks: Packed bits of restored token masks, by principal and fingerprint.
        hand_over: Takes finished jobs.
    """

    has_journal: Final = False
    is_lost: Final = False
    has_work: Final = False
    has_open: Final = False
    num_durable: Final = 0

    def __init__(self, delivery: Delivery) -> None:
        self.masks: Mapping[tuple[str, bytes], bytes] = {}
        self.hand_over = delivery.hand_over

    def check(self, _: Job[object]) -> None:
        """Let every job begin."""

    def concerns(self, _: Job[object]) -> bool:
        """Return False."""
        return False

    def tend(self) -> list[Finished] | None:
        """Return None."""
        return None

    def close(self) -> None:
        """Do nothing."""

    def figures(self, _: int) -> DurabilityFigures | None:
        """Return None."""
        return None
