"""The outlet: where finished jobs leave the engine thread, at once or when a journal has confirmed them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from ferrule_server.engine.bridge.delivery import Delivery
from ferrule_server.engine.bridge.gate import Finished
from ferrule_server.engine.jobs import Job
from ferrule_server.engine.metrics.durability import DurabilityFigures


class Outlet(Protocol):
    """Takes finished jobs, and knows the journal that they may depend on. Engine thread, but for the figures."""

    @property
    def has_journal(self) -> bool:
        """Whether sequences can survive the process."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether what depends on the journal is refused."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether :meth:`tend` should be called without waiting for requests."""
        ...

    @property
    def has_open(self) -> bool:
        """Whether something has to be handed over though no job is finished."""
        ...

    @property
    def num_durable(self) -> int:
        """Number of live durable sequences; from any thread."""
        ...

    @property
    def masks(self) -> Mapping[tuple[str, bytes], bytes]:
        """Packed bits of restored token masks, by principal and fingerprint."""
        ...

    def check(self, job: Job[object], /) -> None:
        """Return if a job may begin; raises DurabilityLost."""

    def concerns(self, job: Job[object], /) -> bool:
        """Return whether the outcome of a job may depend on the journal."""
        ...

    def tend(self) -> list[Finished] | None:
        """Tend the journal, once in each round; return the outcomes that are lost if it has just been lost."""
        ...

    def hand_over(self, finished: list[Finished], /) -> None:
        """Deliver outcomes, or hold them until they are confirmed."""

    def close(self) -> None:
        """Write what is left, and answer what still waits."""

    def figures(self, num_recomputed_tokens: int, /) -> DurabilityFigures | None:
        """Return the figures of the journal; from any thread."""
        ...


class Direct:
    """The outlet without a journal: every outcome is delivered at once.

    Args:
        delivery: Takes them.
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
