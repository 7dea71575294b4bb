"""What ends with its block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Something that leaving ``async with`` closes."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """End it. Closing twice changes nothing."""
