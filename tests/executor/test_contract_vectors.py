"""The test vectors of the contract (protos/test_vectors.json) are what the executor draws, in numpy and in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrule_server.executor.base import DraftDistribution, DraftSpec, OutputSpec, RowOutput, SampleSpec
from ferrule_server.executor.sampling.device_outputs import DeviceOutputs
from ferrule_server.executor.sampling.distributions import sampling_distribution
from ferrule_server.executor.sampling.philox import Purpose, uniform

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "protos" / "test_vectors.json").read_text("utf-8"))
LOGITS = np.array(VECTORS["logits"], np.float32)


def _sample(case: dict[str, Any]) -> SampleSpec:
    names = ("temperature", "top_k", "top_p", "min_p")
    return SampleSpec(**{name: case[name] for name in names}, seed=int(case["seed"]))


def _select(case: dict[str, Any], spec: OutputSpec, *, is_exact: bool) -> RowOutput:
    """Return what a row gives whose token is drawn at the position of the case."""
    outputs = DeviceOutputs(torch.device("cpu"), is_exact=is_exact)
    hidden = torch.zeros(1, 1)
    (row,) = outputs.select(torch.from_numpy(LOGITS[None].copy()), hidden, [case["position"] - 1], [spec])
    return row


def _draft(case: dict[str, Any]) -> DraftSpec:
    if case["q"] is None:
        return DraftSpec(case["draft"])
    token_ids = np.array([int(token) for token in case["q"]], np.int32)
    return DraftSpec(case["draft"], DraftDistribution(b"", token_ids, np.array(list(case["q"].values()))))


def test_draws_are_those_of_the_contract() -> None:
    """Seed, position and purpose give the number that the contract says."""
    for case in VECTORS["draws"]:
        assert uniform(int(case["seed"]), case["position"], Purpose(case["purpose"])) == case["u"]


@pytest.mark.parametrize("is_exact", [True, False])
def test_samples_are_those_of_the_contract(is_exact: bool) -> None:
    """The tokens kept, and the one drawn."""
    for case in VECTORS["samples"]:
        distribution = sampling_distribution(LOGITS, _sample(case), float(LOGITS.max()))
        assert np.flatnonzero(distribution.weights).tolist() == case["kept"]
        assert _select(case, OutputSpec(sample=_sample(case)), is_exact=is_exact).token == case["token"]


@pytest.mark.parametrize("is_exact", [True, False])
def test_drafts_are_decided_as_in_the_contract(is_exact: bool) -> None:
    """Accepted or not, and the token in place of one that is not."""
    for case in VECTORS["drafts"]:
        row = _select(case, OutputSpec(sample=_sample(case), draft=_draft(case)), is_exact=is_exact)
        assert (row.is_accepted, row.token) == (case["accepted"], case["token"])
