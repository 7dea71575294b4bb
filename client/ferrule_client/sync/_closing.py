# Written by tools/strip_async.py from ../aio/_closing.py: change that and run `make sync`.
"""What ends with its block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Something that leaving ``with`` closes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End it. Closing twice changes nothing."""
