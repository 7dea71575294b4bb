"""What the memory of the host is for, decided before weights are read: what cannot fit is one error, at once.

Weights and pool are known to the byte. The reserve is what the bundled model takes besides them, measured at rest, so
nothing is refused that would fit: the activations of long prompts, file pages and the driver of a GPU are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ferrule_server.errors import ConfigError
from ferrule_server.host import MemoryLimit

RESERVE_BYTES: Final = 224 << 20
"""Of the interpreter, PyTorch and the buffers of a step."""
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """The uses of the host's memory, and what bounds it.

    Attributes:
        limits: The tightest first.
        weights: Bytes of the weights.
        weights_source: What decides them, for people.
        loading: Bytes of the largest matrix, which exists twice while it is packed, before there is a pool.
        kv_pool: Bytes of the blocks; 0 if they are on a GPU.
        kv_source: What decides them, for people.
        reserve: Bytes of everything else, an estimate.
    """

    limits: Sequence[MemoryLimit]
    weights: int
    weights_source: str
    loading: int
    kv_pool: int = 0
    kv_source: str = ""
    reserve: int = RESERVE_BYTES

    def with_pool(self, wanted_bytes: int | None, usual_bytes: int, least_bytes: int) -> HostPlan:
        """Return this plan with a pool.

        Args:
            wanted_bytes: Its size by the settings; None: the usual size, or three quarters of what is left for it if
                that is less.
            usual_bytes: The usual size.
            least_bytes: The smallest size that can be used.
        """
        if wanted_bytes is not None:
            return replace(self, kv_pool=wanted_bytes, kv_source="--kv-memory")
        left = (self.limits[0].free_bytes - self.weights - self.reserve) * 3 // 4 if self.limits else usual_bytes
        kv_pool = max(least_bytes, min(usual_bytes, left))
        source = "the default" if kv_pool == usual_bytes else "what is left for it, as --kv-memory is not set"
        return replace(self, kv_pool=kv_pool, kv_source=source)

    @property
    def needed(self) -> int:
        """The most bytes at a time."""
        return self.weights + max(self.loading, self.kv_pool) + self.reserve

    @property
    def fits(self) -> bool:
        """Whether the limits allow it."""
        return not self.limits or self.needed <= self.limits[0].free_bytes

    def table(self) -> str:
        """Return the plan for people: a line for each use and each limit, in GiB, aligned."""
        rows = [
            ("weights", self.weights, self.weights_source),
            ("KV pool", self.kv_pool, self.kv_source),
            ("while loading", self.loading - self.kv_pool, "the largest matrix twice, before there is a pool"),
            ("reserve", self.reserve, "the interpreter, libraries and buffers, an estimate"),
            ("needed", self.needed, ""),
            *(("available", it.free_bytes, f"of {gib(it.total_bytes)}: {it.name}") for it in self.limits),
        ]
        kept = [row for row in rows if row[1] > 0 or row[0] == "available"]
        return "\n".join(f"  {name:<14}{gib(size):>12}  {source}".rstrip() for name, size, source in kept)

    def check(self) -> None:
        """Return if the memory suffices.

        Raises:
            ConfigError: It does not; the message has the table, and what to do.
        """
        if self.fits:
            return
        available = self.limits[0].free_bytes
        left = (available - self.weights - self.reserve) >> 20
        pool = f"lower --kv-memory to {left}MiB or less, " if self.kv_pool > self.loading and left > 0 else ""
        raise ConfigError(
            f"{gib(self.needed)} of memory are needed, and {gib(available)} are available:\n{self.table()}\n{pool}"
            "take a smaller model, or --weights int8 or int4 if its weights are floats, raise the limit, or end other"
            " programs"
        )


def gib(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    return f"{num_bytes / _GIB:.2f} GiB"
