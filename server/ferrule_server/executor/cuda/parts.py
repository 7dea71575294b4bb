"""The parts of the path over the kernels: if a kernel is refused, only what its part serves runs another way.

:data:`PARTS` declares all of them. What runs instead: another choice of tokens, in torch, from the logits of the
kernels; if that is not enough, torch runs the step. Copies are made by torch, and steps without graphs are launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ferrule_server.executor.cuda.choices import OutputKind
from ferrule_server.executor.cuda.gpu import Refused
from ferrule_server.executor.cuda.graphs import GRAPHS, GraphKey
from ferrule_server.executor.cuda.kernel_choice import MAX_GEMM_ROWS, MAX_GEMV_ROWS
from ferrule_server.kernels.cuda.spec import ModelShape

__all__ = ["COPIES", "PARTS", "KernelPart", "WorkingParts", "part_of"]


@dataclass(frozen=True, slots=True)
class KernelPart:
    """Kernels that fail together.

    Attributes:
        name: For people.
        kernels: Names of the kernel functions.
        serves: Whether steps of a key need the part, for a model of a shape; None: no step needs it.
    """

    name: str
    kernels: frozenset[str]
    serves: Callable[[GraphKey, ModelShape], bool] | None


def _chooses(least: OutputKind) -> Callable[[GraphKey, ModelShape], bool]:
    return lambda key, _: least <= key.kind


ESSENTIAL: Final = frozenset({"embed", "attention", "add_norm", "argmax"})
"""Kernels that every step needs, or nearly every one: without them there is no path."""

COPIES: Final = "copies of blocks"

PARTS: Final = (
    KernelPart("steps of 1 or 2 rows", frozenset({"gemv", "head"}), lambda key, _: key.num_rows <= MAX_GEMV_ROWS),
    KernelPart(
        f"steps of {MAX_GEMV_ROWS + 1} to {MAX_GEMM_ROWS} rows",
        frozenset({"gemm"}),
        lambda key, _: MAX_GEMV_ROWS < key.num_rows <= MAX_GEMM_ROWS,
    ),
    KernelPart("sampling", frozenset({"shape_and_select", "draw"}), _chooses(OutputKind.SAMPLE)),
    KernelPart("log-probabilities", frozenset({"log_sum_exp"}), _chooses(OutputKind.SCORE)),
    KernelPart("top log-probabilities", frozenset({"gather_top_k"}), _chooses(OutputKind.TOP)),
    KernelPart(COPIES, frozenset({"copy_blocks"}), None),
    KernelPart("graphs", frozenset({GRAPHS}), None),
)

_PART_OF: Final[Mapping[str, KernelPart]] = {kernel: part for part in PARTS for kernel in part.kernels}


def part_of(kernel: str) -> str:
    """Return the name of the part that a kernel function belongs to; empty if there is no path without it."""
    part = _PART_OF.get(kernel)
    return "" if part is None else part.name


class WorkingParts:
    """The parts that work: all of them, but for those that have failed.

    Args:
        shape: The model's.
        failures: Parts that do not work from the start, with the reasons.

    Attributes:
        failures: Parts that have failed, with the reasons; replaced as a whole, so any thread may read it.
    """

    def __init__(self, shape: ModelShape, failures: Mapping[str, str]) -> None:
        self._shape = shape
        self.failures = dict(failures)

    def drop(self, name: str, reason: str) -> None:
        """Do without a part from now on."""
        self.failures = {**self.failures, name: reason}

    def serve(self, key: GraphKey) -> bool:
        """Whether no part that steps of a key need has failed."""
        return not any(
            part.serves is not None and part.serves(key, self._shape) for part in PARTS if part.name in self.failures
        )

    def largest_kind(self, key: GraphKey) -> OutputKind:
        """Return the largest kind of outputs that kernels can serve in a step; torch selects what is larger."""
        kinds = (kind for kind in reversed(OutputKind) if kind is not OutputKind.TORCH)
        return next((kind for kind in kinds if self.serve(replace(key, kind=kind))), OutputKind.GREEDY)


def refused_part(error: Exception) -> str:
    """Return the part that an error takes out; empty if it takes out the whole path."""
    return part_of(error.subject) if isinstance(error, Refused) else ""
