"""What replays need of memory on the device; here on the CPU."""

from __future__ import annotations

import numpy as np

from tools.gpu.device_memory import DeviceMemory
from tools.gpu.gpu import Gpu


def test_allocations_become_what_they_were() -> None:
    """What was placed is there again, what was poison is poison; guards stay whole, other memory stays."""
    memory = DeviceMemory(Gpu(dry_architecture="sm_90a"))
    values = np.arange(12, dtype=np.uint16).reshape(3, 4)
    placed, kept = (memory.put(name, values, offset=32) for name in ("placed", "kept"))
    out = memory.empty("out", (2, 2), np.float32)
    for address in (placed, kept):
        memory.write(address, values + 1)
    memory.write(out, np.ones(4, np.float32))
    memory.reset("placed", "out")
    np.testing.assert_array_equal(memory.get("placed"), values)
    np.testing.assert_array_equal(memory.get("kept"), values + 1)
    assert np.isnan(memory.get("out")).all()
    memory.check_guards()
