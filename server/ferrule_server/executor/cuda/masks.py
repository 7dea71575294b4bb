"""Token masks on the GPU: a fixed number of places, those least recently used given up first.

Masks are known by their fingerprints alone, so that nothing here keeps one alive. An upload is put into the stream
behind the steps that still read what lay in its place; its source, pinned memory laid out as the places are, is not
written again before it was read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from torch import Tensor

from ferrule_server.executor.base import TokenMask
from ferrule_server.executor.cuda.gpu import Event, Gpu

__all__ = ["DeviceMasks"]


class DeviceMasks:
    """Which mask lies at which place.

    Invariant: ``_slots`` names distinct places, least recently used first; a place's event is behind its last upload.

    Args:
        gpu: That they are on.
        masks: uint8 [num_masks, bytes of a mask, a multiple of 16], on the GPU; bits beyond the vocabulary mean
            nothing there.
    """

    def __init__(self, gpu: Gpu, masks: Tensor) -> None:
        self._gpu = gpu
        self._masks = masks
        self._staged = gpu.allocate_pinned("masks", masks.numel()).view(masks.shape)
        self._bytes = self._staged.numpy()
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(reversed(range(len(masks))))
        self._events: dict[int, Event] = {}

    def slots_for(self, masks: Iterable[TokenMask]) -> dict[bytes, int]:
        """Return the places of masks, by fingerprint, and put the uploads of those that had none into the stream.

        Args:
            masks: Those of a step; no more distinct ones than there are places.

        Raises:
            GpuError: An upload failed; this object is of no use any more.
        """
        wanted = {mask.fingerprint: mask for mask in masks}
        assert len(wanted) <= len(self._masks), f"{len(wanted)} masks of one step, room for {len(self._masks)}"
        for fingerprint in wanted.keys() & self._slots.keys():
            self._slots.move_to_end(fingerprint)
        missing = [mask for fingerprint, mask in wanted.items() if fingerprint not in self._slots]
        slots = {mask.fingerprint: self._take() for mask in missing}
        if missing:
            self._upload(missing, list(slots.values()))
            self._slots.update(slots)
        return {fingerprint: self._slots[fingerprint] for fingerprint in wanted}

    def has_all(self, masks: Iterable[TokenMask]) -> bool:
        """Whether masks have their places, so that :meth:`slots_for` uploads nothing and waits for nothing."""
        return all(mask.fingerprint in self._slots for mask in masks)

    def _take(self) -> int:
        """Return a place that nobody has, or no longer."""
        return self._free.pop() if self._free else self._slots.popitem(last=False)[1]

    def _upload(self, masks: Sequence[TokenMask], slots: Sequence[int]) -> None:
        """Copy masks to their places."""
        for mask, slot in zip(masks, slots, strict=True):
            if slot in self._events:
                self._events.pop(slot).wait()
            self._bytes[slot, : len(mask.bits)] = mask.bits
        for first, end in _runs(sorted(slots)):
            self._gpu.upload(self._masks[first:end].view(-1), self._staged[first:end].view(-1))
        event = self._gpu.record()
        self._events.update(dict.fromkeys(slots, event))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges of such that follow one another."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
