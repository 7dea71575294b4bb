"""VerifyInput read: drafts, their distributions, who decides, and every refusal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ferrule.v1 import executor_pb2, policy_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.planned import PlannedAppend
from ferrule_server.engine.jobs import Acceptance, Drafts
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import DraftDistribution
from ferrule_server.kv.handle import StalePolicy
from tests.api.reading import field_refused, make_reader

Policy = policy_pb2.LogitsReturnPolicy
Probs = executor_pb2.DraftProbs
Sparse = executor_pb2.SparseProbs

VOCAB_SIZE = 17
HANDLE = types_pb2.KvCacheHandle(cache_id="i.e.s", length=3, lineage=bytes(16))
GREEDY = Policy(greedy_argmax=policy_pb2.GreedyArgmax())
SAMPLE = Policy(sample=policy_pb2.Sample(seed=1))
EXACT = executor_pb2.ACCEPTANCE_RULE_EXACT
REJECTION = executor_pb2.ACCEPTANCE_RULE_REJECTION


def _read(limits: ApiLimits | None = None, **fields: Any) -> PlannedAppend:  # of VerifyInput
    given = {"kv_cache": HANDLE, "input_ids": [5], "draft_ids": [1, 2, 3], "logits_policy": GREEDY, **fields}
    message = executor_pb2.VerifyInput(**given)
    return make_reader(VOCAB_SIZE, limits=limits, max_context=200).verifies.read(message, "input.", "alice")


def _drafts(**fields: Any) -> Drafts:  # of VerifyInput
    drafts = _read(**fields).job.drafts
    assert drafts is not None
    return drafts


def _masks(count: int) -> list[policy_pb2.TokenMask]:
    return [policy_pb2.TokenMask(allowed_ids=policy_pb2.TokenIdList(token_ids=[i % 17])) for i in range(count)]


def _dense(rows: Any, dtype: types_pb2.DataType = types_pb2.DATA_TYPE_FLOAT32) -> Probs:
    values = np.asarray(rows, np.float32)
    if dtype == types_pb2.DATA_TYPE_BFLOAT16:
        data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    else:
        data = values.astype("<f2" if dtype == types_pb2.DATA_TYPE_FLOAT16 else "<f4").tobytes()
    return Probs(dense=types_pb2.Tensor(dtype=dtype, shape=values.shape, data=data))


def _rows() -> Any:
    """Three distributions over 17 tokens whose values every type holds exactly."""
    rows = np.zeros((3, VOCAB_SIZE), np.float32)
    rows[0, [0, 1]] = 0.25, 0.75
    rows[1, [2, 16]] = 0.5
    rows[2, 3] = 1.0
    return rows


SPARSE = Sparse(row_sizes=[2, 2, 1], token_ids=[1, 0, 16, 2, 3], probs=[0.75, 0.25, 0.5, 0.5, 1.0])


# ---- what is taken --------------------------------------------------------------------------------------------------


def test_a_verify_is_an_append_with_drafts() -> None:
    """Certain tokens first; without a rule the client decides."""
    planned = _read(input_ids=[5, 6], on_stale=types_pb2.STALE_POLICY_REWIND, request_id="r")
    job = planned.job
    assert (job.token_ids, job.on_stale, job.request_id) == ((5, 6, 1, 2, 3), StalePolicy.REWIND, "r")
    assert job.drafts == Drafts(3)
    assert not job.output.all_positions


@pytest.mark.parametrize("draft_ids", [[], [4]])
def test_few_drafts_or_none_are_taken(draft_ids: list[int]) -> None:
    """Without drafts it is a decode that is told of as a verify."""
    drafts = _drafts(draft_ids=draft_ids, acceptance=EXACT, return_row_handles=True)
    assert drafts == Drafts(len(draft_ids), Acceptance.EXACT, wants_row_handles=True)


def test_as_many_drafts_as_advertised_are_taken_and_one_more_is_not() -> None:
    """64, unless the server is made with another limit."""
    limit = ApiLimits().max_draft_tokens
    assert _drafts(draft_ids=[1] * limit).count == limit
    with pytest.raises(FerruleError, match=r"input\.draft_ids: has 65 drafts, the limit is 64"):
        _read(draft_ids=[1] * (limit + 1))


def test_a_chain_may_be_spelled_out() -> None:
    """Draft r follows row r - 1."""
    assert _read(parents=[0, 1, 2]).job.drafts == Drafts(3)


@pytest.mark.parametrize("parents", [[0, 0, 0], [0, 1, 1], [0, 0, 2]])
def test_a_tree_is_not_served(parents: list[int]) -> None:
    """It is said to be a feature that is missing, not a mistake."""
    with pytest.raises(FerruleError) as caught:
        _read(parents=parents)
    assert (caught.value.reason, caught.value.metadata["feature"]) == ("FEATURE_UNSUPPORTED", "tree")


def test_each_row_may_have_a_mask_of_its_own() -> None:
    """One more than drafts."""
    drafts = _drafts(token_masks=_masks(4), acceptance=EXACT)
    assert [int(np.flatnonzero(np.unpackbits(mask.bits, bitorder="little"))[0]) for mask in drafts.row_masks] == [
        0,
        1,
        2,
        3,
    ]


def _check_distributions(distributions: tuple[DraftDistribution, ...]) -> None:
    for distribution, row in zip(distributions, _rows(), strict=True):
        probs = distribution.probs
        if distribution.token_ids is not None:
            probs = np.zeros(VOCAB_SIZE)
            probs[distribution.token_ids] = distribution.probs
        assert probs.tolist() == row.tolist()
        assert distribution.probs.dtype == np.float64
        assert not distribution.probs.flags.writeable


@pytest.mark.parametrize(
    "dtype", [types_pb2.DATA_TYPE_FLOAT32, types_pb2.DATA_TYPE_BFLOAT16, types_pb2.DATA_TYPE_FLOAT16]
)
def test_dense_distributions_come_in_three_types(dtype: types_pb2.DataType) -> None:
    """Little-endian, row after row."""
    drafts = _drafts(acceptance=REJECTION, logits_policy=SAMPLE, draft_probs=_dense(_rows(), dtype))
    assert drafts.acceptance is Acceptance.REJECTION
    _check_distributions(drafts.distributions)


def test_sparse_distributions_hold_what_is_not_0() -> None:
    """In any order of their tokens."""
    drafts = _drafts(acceptance=REJECTION, logits_policy=SAMPLE, draft_probs=Probs(sparse=SPARSE))
    _check_distributions(drafts.distributions)
    assert len({distribution.digest for distribution in drafts.distributions}) == 3


def test_equal_distributions_are_equal() -> None:
    """So that a repeated verify is known to be one."""
    first, second = (_drafts(acceptance=REJECTION, logits_policy=SAMPLE, draft_probs=_dense(_rows())) for _ in range(2))
    assert first == second
    rows = _rows()
    rows[1, [2, 16]] = 0.25, 0.75
    assert _drafts(acceptance=REJECTION, logits_policy=SAMPLE, draft_probs=_dense(rows)) != first


def test_rejection_without_distributions_takes_drafts_as_chosen_with_certainty() -> None:
    """As the contract says of unset ``draft_probs``."""
    assert _drafts(acceptance=REJECTION, logits_policy=SAMPLE) == Drafts(3, Acceptance.REJECTION)


def test_rejection_at_temperature_0_is_exact() -> None:
    """All of p lies on one token: the same drafts hold, and no variate is needed."""
    frozen = Policy(sample=policy_pb2.Sample(temperature=0.0))
    drafts = _drafts(acceptance=REJECTION, logits_policy=frozen, draft_probs=_dense(_rows()))
    assert drafts == Drafts(3, Acceptance.EXACT)
    with pytest.raises(FerruleError, match="adds up"):
        _read(acceptance=REJECTION, logits_policy=frozen, draft_probs=_dense(_rows() * 2))


# ---- what is refused ------------------------------------------------------------------------------------------------


def _changed(row: int, token: int, value: float) -> Probs:
    rows = _rows()
    rows[row, token] = value
    return _dense(rows)


def _sparse(**fields: Any) -> Probs:  # of SparseProbs
    given = {
        "row_sizes": SPARSE.row_sizes,
        "token_ids": SPARSE.token_ids,
        "probs": SPARSE.probs,
        **fields,
    }
    return Probs(sparse=Sparse(**given))


def _tensor(**fields: Any) -> Probs:  # of Tensor
    dense = _dense(_rows()).dense
    given = {"dtype": dense.dtype, "shape": dense.shape, "data": dense.data, **fields}
    return Probs(dense=types_pb2.Tensor(**given))


DRAWN: dict[str, Any] = {"acceptance": REJECTION, "logits_policy": SAMPLE}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no handle": ({"kv_cache": None}, "kv_cache"),
    "no certain token": ({"input_ids": []}, "input_ids"),
    "token out of the vocabulary": ({"input_ids": [1, 17]}, "input_ids[1]"),
    "draft out of the vocabulary": ({"draft_ids": [1, 2, 99]}, "draft_ids[2]"),
    "stale policy": ({"on_stale": 7}, "on_stale"),
    "request id": ({"request_id": "x" * 129}, "request_id"),
    "parents of fewer": ({"parents": [0, 1]}, "parents"),
    "parent is itself": ({"parents": [0, 2, 2]}, "parents[1]"),
    "parent is later": ({"parents": [0, 1, 9]}, "parents[2]"),
    "rule": ({"acceptance": 9}, "acceptance"),
    "exact without a selection": ({"acceptance": EXACT, "logits_policy": Policy()}, "logits_policy"),
    "rejection without a distribution": ({"acceptance": REJECTION}, "logits_policy"),
    "distributions for nobody": ({"draft_probs": _dense(_rows())}, "draft_probs"),
    "distributions for exact": ({"draft_probs": _dense(_rows()), "acceptance": EXACT}, "draft_probs"),
    "fewer masks": ({"token_masks": _masks(3)}, "token_masks"),
    "more masks": ({"token_masks": _masks(5)}, "token_masks"),
    "masks of no selection": ({"token_masks": _masks(4), "logits_policy": Policy(entropy=True)}, "token_masks"),
    "empty mask": (
        {"token_masks": [*_masks(3), policy_pb2.TokenMask(inline_bits=bytes(3))]},
        "token_masks[3].inline_bits",
    ),
    "draft of no chance": (
        DRAWN | {"draft_probs": _dense(_rows()), "draft_ids": [1, 2, 4]},
        "draft_probs.dense.data",
    ),
    "sparse draft of no chance": (
        DRAWN | {"draft_probs": _sparse(), "draft_ids": [1, 7, 3]},
        "draft_probs.sparse.token_ids",
    ),
    **{
        name: (DRAWN | {"draft_probs": probs}, f"draft_probs{field}")
        for name, probs, field in (
            ("no distributions", Probs(), ""),
            ("dense type", _tensor(dtype=types_pb2.DATA_TYPE_INT8), ".dense.dtype"),
            ("dense shape", _tensor(shape=[17, 3]), ".dense.shape"),
            ("dense rows", _dense(_rows()[:2]), ".dense.shape"),
            ("dense size", _tensor(data=b"1234"), ".dense.data"),
            ("nan", _changed(1, 5, math.nan), ".dense.data"),
            ("infinite", _changed(1, 5, math.inf), ".dense.data"),
            ("negative", _changed(1, 5, -1e-6), ".dense.data"),
            ("no distribution", _changed(1, 5, 0.002), ".dense.data"),
            ("sparse rows", _sparse(row_sizes=[2, 3]), ".sparse.row_sizes"),
            ("sparse sizes", _sparse(row_sizes=[2, 2, 2]), ".sparse.token_ids"),
            ("sparse sizes beyond all", _sparse(row_sizes=[2**32 - 1, 2, 2]), ".sparse.row_sizes"),
            ("fewer probs", _sparse(probs=[1.0]), ".sparse.probs"),
            ("sparse id out of the vocabulary", _sparse(token_ids=[1, 0, 17, 2, 3]), ".sparse.token_ids[2]"),
            ("sparse id twice", _sparse(token_ids=[1, 0, 2, 2, 3]), ".sparse.token_ids"),
            ("sparse prob of 0", _sparse(probs=[0.75, 0.25, 1.0, 0.0, 1.0]), ".sparse.probs[3]"),
            ("sparse nan", _sparse(probs=[0.75, math.nan, 1.0, 0.5, 1.0]), ".sparse.probs[1]"),
            ("sparse sum", _sparse(probs=[0.75, 0.25, 0.5, 0.4, 1.0]), ".sparse.probs"),
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_by_its_path(name: str) -> None:
    """With the reason that a client can act on."""
    fields, field = REFUSED[name]
    assert field_refused(name, lambda: _read(**fields)) == f"input.{field}"


def test_a_distribution_may_miss_1_by_a_rounding() -> None:
    """A thousandth, not two."""
    rows = _rows()
    rows[2, 3] = 0.9991
    _read(**DRAWN, draft_probs=_dense(rows))


@pytest.mark.parametrize("dtype", [types_pb2.DATA_TYPE_BFLOAT16, types_pb2.DATA_TYPE_FLOAT16])
@pytest.mark.parametrize("vocab_size", [17, 50_000])
def test_a_distribution_may_miss_1_by_the_rounding_of_its_type(dtype: types_pb2.DataType, vocab_size: int) -> None:
    """Peaked and flat ones, as a client gets them that rounds each probability: 0.998 of bfloat16 is 0.996."""
    flat = np.full(vocab_size, 1.0 / vocab_size)
    peaked = flat * 0.002
    peaked[3] += 0.998
    message = executor_pb2.VerifyInput(
        kv_cache=HANDLE,
        input_ids=[5],
        draft_ids=[3, 3],
        logits_policy=SAMPLE,
        acceptance=REJECTION,
        draft_probs=_dense([flat, peaked], dtype),
    )
    make_reader(vocab_size, max_context=200).verifies.read(message, "input.", "alice")


def test_more_tokens_than_a_context_are_refused_unread() -> None:
    """Certain ones and drafts together."""
    with pytest.raises(FerruleError) as caught:
        _read(input_ids=[1] * 198)
    assert caught.value.reason == "CONTEXT_EXCEEDED"


def test_rows_of_all_drafts_count_in_the_reply() -> None:
    """REPLY_TOO_LARGE before anything runs."""
    limits = ApiLimits(max_reply_bytes=1200)
    _read(limits, logits_policy=Policy(full_logits=policy_pb2.FullLogits()), draft_ids=[1])
    with pytest.raises(FerruleError) as caught:
        _read(limits, logits_policy=Policy(full_logits=policy_pb2.FullLogits()), draft_ids=[1] * 6)
    assert (caught.value.reason, caught.value.metadata["field"]) == ("REPLY_TOO_LARGE", "input.logits_policy")
