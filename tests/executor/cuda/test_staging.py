"""Staging: whatever the order of fills, copies and reads, nobody reads what was meant for another step."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ferrule_server.executor.cuda.gpu import GpuError
from ferrule_server.executor.cuda.layout import Layout
from ferrule_server.executor.cuda.staging import Download, DownloadRing, UploadRing
from tests.executor.cuda.fake_gpu import FakeGpu

LAYOUT = Layout([("a", torch.int32, (5,)), ("b", torch.float32, (4, 2))])
ALL = slice(0, LAYOUT.num_bytes)


class Rings:
    """Both rings around one memory of the device, so that what goes up comes down."""

    def __init__(self) -> None:
        self.gpu = FakeGpu()
        self.target: Tensor = self.gpu.allocate("target", (LAYOUT.num_bytes,), torch.uint8)
        self.uploads = UploadRing(self.gpu, "inputs", self.target, LAYOUT)
        self.downloads = DownloadRing(self.gpu, "results", self.target, LAYOUT)

    def send(self, number: int) -> None:
        """Fill both fields with a number and put the copy into the stream."""
        for values in self.uploads.fill().values():
            values[...] = number
        self.uploads.upload(ALL)

    @property
    def values(self) -> list[int]:
        """Field ``a`` on the device, as far as the stream has come."""
        values: list[int] = LAYOUT.views(self.target)["a"].tolist()
        return values


def numbers_of(download: Download) -> set[float]:
    """Return all values of both fields."""
    return {value for values in download.read().values() for value in values.reshape(-1).tolist()}


@given(st.lists(st.sampled_from(["step", "step without results", "read", "wait"]), max_size=30))
def test_every_step_reads_its_own_numbers(actions: list[str]) -> None:
    """Up to two results unread; the double fails where a slot changes before its copy has run."""
    rings = Rings()
    unread: deque[tuple[int, Download]] = deque()
    for number, action in enumerate(actions):
        if action == "wait":
            rings.gpu.record().wait()
        elif action == "read" or (action == "step" and not rings.downloads.has_room):
            if unread:
                sent, download = unread.popleft()
                assert numbers_of(download) == {sent}
        else:
            rings.send(number)
            if action == "step":
                unread.append((number, rings.downloads.download(ALL)))
    assert [numbers_of(download) for _, download in unread] == [{number} for number, _ in unread]
    rings.gpu.synchronize()


def test_two_steps_are_filled_without_waiting() -> None:
    """The third one waits for the copy of the first, and for no more."""
    rings = Rings()
    rings.send(1)
    rings.send(2)
    assert "wait" not in rings.gpu.names()
    rings.uploads.fill()
    assert rings.gpu.names().count("wait") == 1
    assert rings.values == [1] * 5
    rings.gpu.synchronize()
    assert rings.values == [2] * 5


def test_a_slot_that_was_not_copied_is_given_again() -> None:
    """As when a step could not be filled: nothing of it is in the stream."""
    rings = Rings()
    rings.uploads.fill()["a"][...] = 7
    assert (rings.uploads.fill()["a"] == 7).all()
    rings.uploads.upload(ALL)
    with pytest.raises(AssertionError, match="filled before it is copied"):
        rings.uploads.upload(ALL)


def test_only_spans_are_copied() -> None:
    """To the same places, both ways; the rest of the target stays, the rest of a slot says nothing."""
    rings = Rings()
    rings.send(1)
    for values in rings.uploads.fill().values():
        values[...] = 2
    begin = LAYOUT.fields["b"].offset
    rings.uploads.upload(slice(0, LAYOUT.end_of("a", 2)), slice(begin, LAYOUT.end_of("b", 1)))
    download = rings.downloads.download(slice(0, LAYOUT.end_of("a", 3)))
    rings.gpu.synchronize()
    assert rings.values == [2, 2, 1, 1, 1]
    assert LAYOUT.views(rings.target)["b"].tolist() == [[2, 2], [1, 1], [1, 1], [1, 1]]
    assert download.read()["a"].tolist()[:3] == [2, 2, 1]
    assert [call.num_bytes for call in rings.gpu.calls("upload")] == [LAYOUT.num_bytes, 8, 8]
    assert [call.num_bytes for call in rings.gpu.calls("download")] == [12]


def test_a_copy_that_was_refused_leaves_the_slot_safe() -> None:
    """The first of two spans is in the stream: the slot is not given out before that copy is done."""
    rings = Rings()
    rings.gpu.fail("upload", GpuError("refused"), nth=2)
    for values in rings.uploads.fill().values():
        values[...] = 3
    with pytest.raises(GpuError, match="refused"):
        rings.uploads.upload(slice(0, 4), slice(4, 8))
    rings.send(4)
    rings.gpu.synchronize()
    assert rings.values == [4] * 5


def test_results_are_read_once() -> None:
    """What they are views of is used again afterwards."""
    rings = Rings()
    rings.send(1)
    download = rings.downloads.download(ALL)
    download.read()
    assert download.is_read
    with pytest.raises(AssertionError, match="read once"):
        download.read()


def test_no_third_result_is_put_over_an_unread_one() -> None:
    """Older ones first, in order."""
    rings = Rings()
    rings.send(1)
    first, second = (rings.downloads.download(ALL) for _ in range(2))
    assert not rings.downloads.has_room
    with pytest.raises(AssertionError, match="unread"):
        rings.downloads.download(ALL)
    second.read()
    assert not rings.downloads.has_room
    first.read()
    assert rings.downloads.has_room


def test_results_that_failed_count_as_read() -> None:
    """There will be no others."""
    rings = Rings()
    download = rings.downloads.download(ALL)
    rings.gpu.fail("wait", GpuError("something before them failed"))
    with pytest.raises(GpuError, match="before them"):
        download.read()
    assert download.is_read


def test_what_is_filled_lies_in_pinned_memory() -> None:
    """Two slots each way, of the size of the layout."""
    rings = Rings()
    assert [call.num_bytes for call in rings.gpu.calls("allocate_pinned")] == [LAYOUT.num_bytes] * 4
    first = rings.uploads.fill()["b"]
    assert (first.dtype, first.shape) == (np.dtype(np.float32), (4, 2))
