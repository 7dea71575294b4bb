"""The control sends what it is told to and burns what it is told to."""

from __future__ import annotations

import socket
import time

from tests.hostile.control import Sink, burn


def test_the_control_sends_at_the_rate_that_it_is_given() -> None:
    """Within a quarter on a busy machine, and it ends in time."""
    with Sink() as sink, socket.create_connection(("127.0.0.1", sink.port)) as connection:
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        num_bytes = burn(connection, seconds=0.5, bytes_per_s=8e6, cpu_per_s=0.2)
        assert time.monotonic() - began_s < 2.0
        assert time.process_time() - began_cpu_s >= 0.05
    assert 3e6 <= num_bytes <= 5e6
