"""Steps whose rows ask for different things: what chooses for each row, and what that costs beside the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ferrule_server.executor.base import DraftSpec, OutputSpec, SampleSpec, StepBatch
from ferrule_server.executor.sampling.device_outputs import DeviceOutputs
from tests.executor.cuda.toy_runner import GREEDY, Toy, next_tokens, rows_of

FULL = OutputSpec(full_logits=True)
HIDDEN = OutputSpec(hidden_state=True)
BOTH = OutputSpec(greedy=True, full_logits=True)
MANY = OutputSpec(greedy=True, num_top_logprobs=1025)
"""More than the kernels have room for."""
DRAFT = OutputSpec(sample=SampleSpec(seed=2), draft=DraftSpec(5))


def batch_of(specs: Sequence[OutputSpec]) -> StepBatch:
    """Return a decode of so many rows."""
    tokens = [(3 * n + 1) % 67 for n in range(len(specs))]
    return replace(rows_of(tokens, [n % 16 for n in range(len(specs))]), output_specs=tuple(specs))


@dataclass
class Costs(TorchDispatchMode):
    """What torch does between the calls of the GPU, where the stream does not run: launches, and copies that wait."""

    toy: Toy
    num_launches: int = 0
    num_waits: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        aliases = [result.alias_info for result in func._schema.returns]
        is_view = all(alias is not None and not alias.is_write for alias in aliases)
        self.num_launches += self._counts and not is_view
        return func(*args, **(kwargs or {}))

    @property
    def _counts(self) -> bool:
        return self.toy.gpu._depth > 0 and not self.toy.gpu._stream.is_running

    @contextmanager
    def counted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Count; values that the host asks for and copies to it wait for the GPU."""

        def waiting(method: Callable[..., object]) -> Callable[..., object]:
            def wait(tensor: torch.Tensor, *args: object, **options: object) -> object:
                self.num_waits += self._counts
                return method(tensor, *args, **options)

            return wait

        for name in ("tolist", "cpu", "item"):
            monkeypatch.setattr(torch.Tensor, name, waiting(getattr(torch.Tensor, name)))
        with self:
            yield


@pytest.mark.parametrize(
    ("specs", "downloads", "num_launches", "num_waits"),
    [
        pytest.param([GREEDY] * 32, ["results"], 0, 0, id="32 greedy"),
        pytest.param([GREEDY] * 31 + [FULL], ["logits", "results"], 0, 0, id="31 greedy, 1 with full logits"),
        pytest.param([FULL] * 32, ["logits", "results"], 0, 0, id="32 with full logits"),
        pytest.param([FULL, GREEDY] * 16, ["logits", "results"], 1, 0, id="16 with full logits between others"),
        pytest.param([BOTH] * 31 + [HIDDEN], ["logits", "normed", "results"], 0, 0, id="full logits and hidden"),
        pytest.param([GREEDY] * 31 + [MANY], ["results"], None, 3, id="31 greedy, 1 that torch selects"),
    ],
)
def test_what_a_step_costs_beside_its_graph(
    specs: list[OutputSpec],
    downloads: list[str],
    num_launches: int | None,
    num_waits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One upload, one replay, one copy for each thing that is asked for, one wait; torch works for its rows alone."""
    toy = Toy(max_rows=32)
    toy.runner._outputs = DeviceOutputs(torch.device("cpu"), is_exact=False)
    batch = batch_of(specs)
    toy.runner.run(batch)
    toy.capture()
    toy.gpu.log.clear()
    costs = Costs(toy)
    with costs.counted(monkeypatch):
        toy.runner.run(batch)
    names = toy.gpu.names()
    assert [names.count(name) for name in ("upload", "replay", "wait", "launch", "synchronize")] == [1, 1, 1, 0, 0]
    assert [call.subject for call in toy.gpu.calls("download")] == downloads
    assert costs.num_waits == num_waits
    assert costs.num_launches > 0 if num_launches is None else costs.num_launches == num_launches


def test_kernels_choose_for_the_rows_that_they_can_serve() -> None:
    """Tokens, paths and whole rows of every row are its own, whatever its neighbours ask for."""
    toy = Toy(max_rows=16)
    specs = [GREEDY, MANY, FULL, replace(MANY, full_logits=True), DRAFT, replace(GREEDY, hidden_state=True)]
    batch = batch_of(specs)
    result = toy.runner.run(batch)
    expected = next_tokens(batch.token_ids.tolist(), batch.positions.tolist())
    by_torch = [False, True, False, True, True, False]
    assert list(result.paths) == ["kernels+torch" if torch_row else "kernels" for torch_row in by_torch]
    assert [row.token for row in result.rows][:4] == [*expected[:2], None, expected[3]]
    assert result.rows[5].token == expected[5]
    assert [row.position for row in result.rows] == (batch.positions + 1).tolist()
    assert [row.logits is not None for row in result.rows] == [spec.full_logits for spec in specs]
    assert [row.hidden_state is not None for row in result.rows] == [spec.hidden_state for spec in specs]
    assert [row.is_accepted is not None for row in result.rows] == [spec.draft is not None for spec in specs]
    for i in (2, 3):
        logits = result.rows[i].logits
        assert logits is not None
        assert int(np.argmax(logits)) == expected[i]
    top_ids = result.rows[1].top_ids
    assert top_ids is not None
    assert (len(top_ids), top_ids[0]) == (67, expected[1])
