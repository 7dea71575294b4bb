"""The measurements of ``ferrule bench``."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferrule_client.policy import greedy
from ferrule_client.sync.client import Client

__all__ = ["SIZES", "Figure", "Run", "measure", "rate_of", "read_rate"]

SIZES = (1, 4, 16, 32)  # sequences that are decoded together
_CONTEXT = 128
_PREFILL = 512
_SAMPLES = 3
_WARM_STEPS = 4
_LEAST_STEPS = 4
_MOST_STEPS = 4096
_MESSAGE_GAP_S = 0.0005  # tokens of one message come sooner after each other than this
_PROBE_BYTES = 128 << 20
_PROBE_PASSES = 2


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure."""

    name: str  # for people
    unit: str  # tokens/s or ms
    samples: tuple[float, ...]
    step_bytes: float = 0.0  # bytes of weights and KV that a decode step must read; 0: it has no meaning
    num_sequences: int = 0  # sequences that were decoded together; 0: it has no meaning

    @property
    def median(self) -> float:
        """The median sample."""
        return statistics.median(self.samples)

    def share(self, read_bytes_per_s: float | None) -> float | None:
        """Return how much of a read rate the steps have used; None: it has no meaning, or the rate is unknown."""
        if not read_bytes_per_s or not self.step_bytes:
            return None
        return self.median / self.num_sequences * self.step_bytes / read_bytes_per_s


@dataclass(frozen=True, slots=True)
class Run:
    """What a run has measured of a server."""

    model: str
    executor: str
    dtype: str  # of the weights
    device: str  # for people
    server_version: str
    parameter_bytes: int  # bytes of the weights
    read_bytes_per_s: float | None  # read rate of this machine's memory; None: the server may run on another one
    figures: tuple[Figure, ...]  # in the order in which they were measured


def read_rate() -> float:
    """Return the bytes per second that all cores together read from memory, the best of some attempts."""
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    arrays = [np.ones(_PROBE_BYTES // 8) for _ in range(num_threads)]  # of zeros there would be one page

    def read(array: Any) -> None:
        for _ in range(_PROBE_PASSES):
            array.max()

    def attempt() -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(read, arrays))
        return num_threads * _PROBE_PASSES * _PROBE_BYTES / (time.perf_counter() - begin)

    return max(attempt() for _ in range(5))


def measure(client: Client, seconds: float, read_bytes_per_s: float | None, *, on_figure: Callable[[str], None]) -> Run:
    """Return all figures of a server, each measured for some seconds, and its name given to ``on_figure`` before."""
    info, capabilities, status = client.model_info(), client.capabilities(), client.status()
    length, slots = info.max_sequence_length, capabilities.total_blocks * capabilities.block_size
    context, prefill = min(_CONTEXT, length // 2), min(_PREFILL, length - 1)
    random = np.random.default_rng()
    figures: list[Figure] = []
    seconds /= _SAMPLES

    def prompt(length: int) -> list[int]:
        tokens: list[int] = random.integers(0, info.vocab_size, length).tolist()
        return tokens  # the prefix cache has none that begins so

    on_figure(name := f"first token, {context}")
    figures.append(Figure(name, "ms", _repeat(lambda: 1e3 * _first_token(client, prompt(context)), seconds)))
    on_figure(name := f"prefill {prefill}")
    figures.append(Figure(name, "tokens/s", _repeat(lambda: prefill / _prefill(client, prompt(prefill)), seconds)))
    for size in SIZES:
        steps = min(length - context - 1, slots // size - context - 2 * capabilities.block_size, _MOST_STEPS)
        if steps < _WARM_STEPS + _LEAST_STEPS:
            continue
        on_figure(name := f"decode {size}")
        samples = tuple(_decode(client, prompt(context), size, steps, seconds) for _ in range(_SAMPLES))
        step_bytes = capabilities.parameter_bytes + size * context * capabilities.kv_bytes_per_token
        figures.append(Figure(name, "tokens/s", samples, step_bytes if capabilities.parameter_bytes else 0.0, size))
    return Run(
        model=info.model_id,
        executor=status.executor,
        dtype=info.dtype,
        device=info.device_name or info.device_type,
        server_version=status.server_version,
        parameter_bytes=capabilities.parameter_bytes,
        read_bytes_per_s=read_bytes_per_s,
        figures=tuple(figures),
    )


def _repeat(sample: Callable[[], float], seconds: float) -> tuple[float, ...]:
    """Return samples of some time, at least three; the first one warms up."""
    sample()
    samples: list[float] = []
    end = time.perf_counter() + seconds * _SAMPLES
    while len(samples) < _SAMPLES or time.perf_counter() < end:
        samples.append(sample())
    return tuple(samples)


def _first_token(client: Client, prompt: list[int]) -> float:
    begin = time.perf_counter()
    with client.generate(prompt, 1, reuse_prefix=False, publish_prefix=False, policy=greedy()) as tokens:
        next(tokens)
        return time.perf_counter() - begin


def _prefill(client: Client, prompt: list[int]) -> float:
    begin = time.perf_counter()
    with client.prefill(prompt, reuse_prefix=False, publish_prefix=False):
        return time.perf_counter() - begin


def _decode(client: Client, prompt: list[int], size: int, steps: int, seconds: float) -> float:
    """Return the tokens per second of some sequences that are drawn together."""
    times: list[float] = []
    tokens = client.generate(
        prompt, steps, n=size, policy=greedy(), ignore_eos=True, reuse_prefix=False, publish_prefix=False
    )
    num_warm = size * _WARM_STEPS
    with tokens:
        for _ in tokens:
            times.append(time.perf_counter())
            if len(times) > num_warm + size * _LEAST_STEPS and times[-1] - times[num_warm] > seconds:
                break
    return rate_of(times, num_warm)


def rate_of(times: Sequence[float], num_warm: int) -> float:
    """Return tokens per second, from the end of one message to the end of another, without ``num_warm`` at least.

    Tokens that come in one message have the same time, about, so a message is counted with the time before it.
    """
    at = np.asarray(times)
    ends = np.flatnonzero(np.diff(at) > _MESSAGE_GAP_S)
    ends = ends[ends >= num_warm - 1]
    first, last = (ends[0], ends[-1]) if len(ends) > 1 else (num_warm - 1, len(at) - 1)
    return float((last - first) / (at[last] - at[first]))
