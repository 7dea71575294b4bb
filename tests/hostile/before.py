"""Figures of an independent attack on the server of 2026-11-22, before any of its findings was mended.

Taken on two shared cores, with the bundled model in float32 and ``--executor torch``. The victim alone: p50 4.1 ms, p99
9.2 ms.
"""

from __future__ import annotations

from typing import Final

BEFORE: Final[dict[str, str]] = {
    "fairness.keep_alive": "p99 46 ms (1 connection), 233 ms (4)",
    "fairness.stream_frames": "p99 124 ms (1 connection), 444 ms (6)",
    "fairness.release_cache": "p99 118 ms (4 connections)",
    "fairness.reserve_slots": "p99 127 ms (4 connections)",
    "fairness.batch_decode": "p99 229 ms (6 connections)",
    "fairness.register_masks": "p99 231 ms (4 connections)",
    "fairness.prefill_16m": "p99 513 ms (2 connections)",
    "fairness.logit_bias": "p99 662 ms (2 connections)",
    "fairness.encode_10mb": "p99 290 ms (4 connections)",
    "fairness.tokenizer_decode": "p99 1 143 ms (8 connections)",
    "fairness.get_cache_info": "p99 14 ms (16 connections)",
    "fairness.list_caches": "p99 20 ms (16 connections)",
    "fairness.idle_streams": "p99 6 ms (1 connection)",
    "fairness.forward": "p99 189 ms (8 connections)",
    "stop_strings": "p99 40 -> 123 ms",
    "strangers.prefill": "374 -> 6 822 MB",
    "strangers.health": "as strangers.prefill",
    "certificates": "3 of 3 names taken for another",
    "text_queue": "DEADLINE_EXCEEDED after 60 s, 357 -> 2 001 MB",
    "mask_memory": "227 MB for 64 MiB counted",
    "model_folders": "12 tracebacks, 5 hangs",
    "templates": "16 take 1 to 6 GB, 2 do not end",
    "request_ids": "1 sequence made, 3 replays of other content",
    "killed_clients": "4 and 7 ERROR lines, 1 token id",
    "slow_heads": "61 of 61 scrapes refused",
    "counters": "exact prompt lengths and hits",
}
"""By name of the attack; attacks without an entry were not part of it."""
