"""What the settings of a server say of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ferrule_server.executor.base import BLOCK_SIZE
from ferrule_server.executor.cuda.buffers import Limits
from ferrule_server.kernels.cuda.spec import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """What the settings say of a GPU.

    Attributes:
        device: As torch writes it: ``cuda:0``.
        free_bytes: Of its memory, what nobody uses yet.
        total_bytes: Of its memory.
        dtype: Of weights, activations and KV.
        max_context: Longest sequence in tokens.
        max_step_rows: Most rows of a step.
        memory_fraction: How much of ``total_bytes`` may be used.
        kv_memory_bytes: Of the KV pool; None: what is left.
        wants_kernels: False leaves everything to torch, and nobody wonders why.
        reason: Why the kernels may not run although they are wanted; empty: they may.
        is_deterministic: Bits must not depend on what else is in a step.
        kernel_cache: Folder in which the outcome of a test of early launch is kept; None: in the user's cache folder.
        kernel_bundle: Bundle of kernels, or folder of bundles; None: those that are installed.
        build: Returns a bundle for a model and a compute capability where none is installed, or raises GpuError.
        early_launch: Whether kernels may start while the one before them runs: ``on``, ``off``, or ``auto``: if a test
            has shown that this GPU does it right.
        has_graphs: Steps are captured in CUDA graphs.
    """

    device: str
    free_bytes: int
    total_bytes: int
    dtype: torch.dtype
    max_context: int
    max_step_rows: int = 512
    memory_fraction: float = 0.9
    kv_memory_bytes: int | None = None
    wants_kernels: bool = True
    reason: str = ""
    is_deterministic: bool = False
    kernel_cache: Path | None = None
    kernel_bundle: Path | None = None
    build: Callable[[ModelShape, tuple[int, int]], Path] | None = None
    early_launch: str = "auto"
    has_graphs: bool = True

    @property
    def limits(self) -> Limits:
        """Of steps on the kernels: the longest sequence fits."""
        return Limits(max_blocks=-(-self.max_context // BLOCK_SIZE))
