"""Pinned memory of the host in rings: nothing is overwritten before the copy that reads it is done.

A copy that was put into the stream runs later. So the host fills one slot while the copy out of the other may still be
waiting, and before it fills that one again it waits for the event behind its copy. Likewise what a step returned may
still be on its way while the next step's copy is put behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ferrule_server.executor.cuda.gpu import Event, Gpu
from ferrule_server.executor.cuda.layout import Array, Layout

_NUM_SLOTS = 2


class UploadRing:
    """Where the host writes what the next steps read.

    Invariant: a slot is handed out only when the copies out of it are done.

    Args:
        gpu: Whose stream copies.
        name: For people.
        target: uint8 [layout.num_bytes] on the device.
        layout: Of the target.
    """

    def __init__(self, gpu: Gpu, name: str, target: Tensor, layout: Layout) -> None:
        self._gpu = gpu
        self._target = target
        self._memory = [gpu.allocate_pinned(f"{name} {i}", layout.num_bytes) for i in range(_NUM_SLOTS)]
        self._arrays = [layout.arrays(memory) for memory in self._memory]
        self._copied: list[Event | None] = [None] * _NUM_SLOTS
        self._slot = 0
        self._is_filled = False

    def fill(self) -> Mapping[str, Array]:
        """Return the fields of the next slot, to be written before :meth:`upload`; they hold what an older step left.

        Asked again before an upload it returns the same ones.

        Raises:
            GpuError: The copy out of it failed.
        """
        event = self._copied[self._slot]
        if event is not None:
            event.wait()
            self._copied[self._slot] = None
        self._is_filled = True
        return self._arrays[self._slot]

    def upload(self, *spans: slice) -> None:
        """Copy spans of bytes of the slot to the same places of the target; the slot is not written any more.

        Raises:
            GpuError: The stream refused it.
        """
        assert self._is_filled, "a slot is filled before it is copied"
        self._is_filled = False
        try:
            for span in spans:
                self._gpu.upload(self._target[span], self._memory[self._slot][span])
        finally:
            # Also where the second copy was refused: the first is in the stream.
            self._copied[self._slot] = self._gpu.record()
        self._slot = (self._slot + 1) % _NUM_SLOTS


class Download:
    """Results on their way to the host."""

    def __init__(self, arrays: Mapping[str, Array], event: Event) -> None:
        self._arrays = arrays
        self._event: Event | None = event

    @property
    def is_read(self) -> bool:
        """Whether they were waited for."""
        return self._event is None

    def read(self) -> Mapping[str, Array]:
        """Wait for them and return the fields; valid until the next call of :meth:`DownloadRing.download`, once.

        Raises:
            GpuError: Something before them in the stream failed. They count as read.
        """
        assert self._event is not None, "results are read once"
        event, self._event = self._event, None
        event.wait()
        return self._arrays


class DownloadRing:
    """Where what steps return arrives.

    Invariant: no copy goes to a slot whose results were not read.

    Args:
        gpu: Whose stream copies.
        name: For people.
        source: uint8 [layout.num_bytes] on the device.
        layout: Of the source.
    """

    def __init__(self, gpu: Gpu, name: str, source: Tensor, layout: Layout) -> None:
        self._gpu = gpu
        self._source = source
        self._memory = [gpu.allocate_pinned(f"{name} {i}", layout.num_bytes) for i in range(_NUM_SLOTS)]
        self._arrays = [layout.arrays(memory) for memory in self._memory]
        self._pending: list[Download | None] = [None] * _NUM_SLOTS
        self._slot = 0

    @property
    def has_room(self) -> bool:
        """Whether :meth:`download` may be called: fewer than two results are unread."""
        pending = self._pending[self._slot]
        return pending is None or pending.is_read

    def download(self, *spans: slice) -> Download:
        """Copy spans of bytes of the source to the same places of a slot; no span waits like any other.

        Raises:
            GpuError: The stream refused it.
        """
        assert self.has_room, "the results of two steps are unread; read the older ones first"
        for span in spans:
            self._gpu.download(self._memory[self._slot][span], self._source[span])
        download = Download(self._arrays[self._slot], self._gpu.record())
        self._pending[self._slot] = download
        self._slot = (self._slot + 1) % _NUM_SLOTS
        return download
