"""The device that a fast path and torch share; its work runs in the order of the calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

__all__ = ["Device", "DeviceError", "DeviceGone", "Processor"]


class DeviceError(Exception):
    """The device, its driver or torch refused an operation; others may still work."""


class DeviceGone(DeviceError):
    """A fault that ends the device's context: nothing on it can be trusted, and only a new process can use it again."""


class Device(Protocol):
    """A device. Every method may raise :class:`DeviceError`, and :class:`DeviceGone` if the device no longer works."""

    @property
    def name(self) -> str:
        """The name that its driver reports; empty if it is unknown."""
        ...

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes that this process holds, and the most that it held; read from any thread, never raises."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Order the work of torch in the body after all earlier work of the fast path, and before all later work."""
        ...

    def synchronize(self) -> None:
        """Wait until all work is done."""
        ...

    def translated(self, error: Exception) -> DeviceError | None:
        """Return the error as a :class:`DeviceError`; None if it does not come from the device."""
        ...

    def close(self) -> None:
        """Release everything that this object holds."""
        ...


class Processor:
    """Implements :class:`Device` for the processor, where torch waits for its own work."""

    name = ""
    memory = (0, 0)

    def current(self) -> AbstractContextManager[None]:
        """Do nothing: work is done when a call returns."""
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing: work is done when a call returns."""

    def translated(self, error: Exception) -> DeviceError | None:  # noqa: ARG002  (no error means the processor)
        """Return None: no error comes from the processor itself."""
        return None

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
