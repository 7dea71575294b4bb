"""The device that a fast path and torch share; its work runs in the order of the calls."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class DeviceError(Exception):
    """The device, its driver or torch refused an operation; others may still work."""


class DeviceGone(DeviceError):
    """A fault that ends the device's context: nothing on it can be trusted, and only a new process can use it again."""


class Device(Protocol):
    """A device. Every method may raise :class:`DeviceError`, and :class:`DeviceGone` if the device no longer works."""

    @property
    def name(self) -> str:
        """The name that its driver reports; empty if it is unknown."""

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes that this process holds, and the most that it held; read from any thread, never raises."""

    def current(self) -> AbstractContextManager[None]:
        """Order the work of torch in the body after all earlier work of the fast path, and before all later work."""

    def synchronize(self) -> None:
        """Wait until all work is done."""

    def translated(self, error: Exception) -> DeviceError | None:
        """Return the error as a :class:`DeviceError`; None if it does not come from the device."""

    def close(self) -> None:
        """Release everything that this object holds."""
