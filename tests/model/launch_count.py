"""Counts the operations of torch that would be launches on a GPU, without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NO_LAUNCH = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default", "detach.default", "empty.memory_format", "empty_like.default", "expand.default",
        "select.int", "slice.Tensor", "split.Tensor", "t.default", "transpose.int", "unbind.int", "unsqueeze.default",
        "view.default", "_unsafe_view.default",
    )
)  # fmt: skip
"""Views and allocations."""

ONE_LAUNCH = frozenset({"aten.rms_norm.default", "aten.linear.default"})
"""Compositions that are one kernel on CUDA: the fused norm, and a product of cuBLAS with the bias in its epilogue."""


class LaunchCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, by name, each operation that is not a view or an allocation.

    Compositions are taken apart first, so that none counts as one launch by mistake. Tensors are on the ``meta``
    device: they have a shape and no memory, and operations choose no path by their device. (Fake CUDA tensors would
    be closer, but a build of torch without CUDA refuses to slice them.)

    Attributes:
        launches: How often each operation ran.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,  # an OpOverload, for which torch has no public type
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run an operation, or its parts, and count it."""
        name = str(func)
        if name not in ONE_LAUNCH:
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if name not in NO_LAUNCH:
            self.launches[name] += 1
        return func(*args, **(kwargs or {}))


def count_launches(run: Callable[[], object]) -> Counter[str]:
    """Return how often each operation is launched by a call."""
    count = LaunchCount()
    with torch.inference_mode(), count:
        run()
    return count.launches
