"""The judge is just: what differs is found, so no language passes by a lax comparison."""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.cases import fill, load
from tests.conformance.contract import METHODS, full_name
from tests.conformance.matching import differences
from tests.conformance.play import merged

ROOT = Path(__file__).resolve().parents[2]
INFO = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "HANDLE_STALE", "domain": "ferrule"}
STATUS = {"code": 10, "details": [INFO | {"metadata": {"tip_length": "5"}}]}
STALE = {"code": "ABORTED", "reason": "HANDLE_STALE"}
ROW = base64.b64encode(struct.pack("<3f", 0.0, 0.25, 1.0)).decode()


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ({"length": 3}, {"length": 3, "more": True}),
        ({"replayed": False, "tokens": [], "n": 0, "text": ""}, {}),
        ({"seed": 5}, {"seed": "5"}),
        ({"seed": "18446744073709551615"}, {"seed": "18446744073709551615"}),
        ({"p": 0.1}, {"p": 0.10000000149011612}),
        ({"x": {"$present": False}}, {}),
        ({"x": {"$length": 2}}, {"x": [1, 2]}),
        ({"x": {"$bytes": 12}}, {"x": ROW}),
        ({"x": {"$between": [1, 2]}}, {"x": "1.5s"}),
        ({"x": {"$matches": "a+"}}, {"x": "aaa"}),
        ({"x": {"$not": 1}}, {"x": 2}),
        ({"x": {"$has": [{"a": 1}]}}, {"x": [{"a": 2}, {"a": 1, "b": 0}]}),
        ({"x": {"$without": ["secret"]}}, {"x": [{"a": "b"}]}),
        ({"$float32": {"size": 3, "values": {1: 0.25, 2: 1.0}}}, ROW),
        ({"$status": STALE | {"metadata": {"tip_length": "5"}}}, STATUS),
        ({"$status": {"code": "CANCELLED"}}, {"code": 1}),
    ],
)
def test_what_is_expected_has_no_differences(expected: Any, actual: Any) -> None:
    """Each kind of expectation, met."""
    assert list(differences(expected, actual)) == []


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ({"length": 3}, {"length": 4}),
        ({"length": 3}, {}),
        ({"replayed": True}, {}),
        ({"replayed": False}, {"replayed": True}),
        ({"n": 1}, {"n": True}),
        ({"tokens": [1]}, {"tokens": [1, 2]}),
        ({"tokens": [1]}, {"tokens": [2]}),
        ({"a": {"b": 1}}, {"a": 1}),
        ({"p": 0.1}, {"p": 0.10001}),
        ({"x": {"$present": True}}, {}),
        ({"x": {"$present": False}}, {"x": 0}),
        ({"x": {"$length": 2}}, {}),
        ({"x": {"$bytes": 13}}, {"x": ROW}),
        ({"x": {"$between": [1, 2]}}, {"x": "2.5s"}),
        ({"x": {"$matches": "a"}}, {"x": "aa"}),
        ({"x": {"$not": 0}}, {}),
        ({"x": {"$has": [{"a": 1}]}}, {"x": [{"a": 2}]}),
        ({"x": {"$without": ["a", "secret"]}}, {"x": [{"c": ["a secret"]}]}),
        ({"x": {"$without": ["cacheId"]}}, {"x": [{"cacheId": ""}]}),
        ({"$float32": {"size": 3, "values": {1: 0.25}}}, ROW),
        ({"$float32": {"size": 2}}, ROW),
        ({"$status": STALE}, {}),
        ({"$status": STALE}, {"code": 10}),
        ({"$status": STALE}, STATUS | {"code": 5}),
        ({"$status": {"code": "ABORTED"}}, STATUS),
        ({"$status": STALE | {"reason": "OTHER"}}, STATUS),
        ({"$status": STALE | {"metadata": {"tip_length": "6"}}}, STATUS),
        ({"$status": STALE | {"details": ["RetryInfo"]}}, STATUS),
        ({"$status": STALE}, {"code": 10, "details": [INFO, INFO]}),
        ({"$status": STALE}, {"code": 10, "details": [INFO | {"domain": "other"}]}),
    ],
)
def test_what_is_not_as_expected_is_found(expected: Any, actual: Any) -> None:
    """Each kind of expectation, missed."""
    assert list(differences(expected, actual)) != []


def test_a_matcher_that_is_none_is_refused() -> None:
    """A slip of the pen in a case is no expectation that always holds."""
    with pytest.raises(ValueError, match=r"no matcher \$lenght"):
        list(differences({"x": {"$lenght": 1}}, {"x": [1]}))


def test_references_are_filled_in() -> None:
    """Whole values keep their type; inside a text they become text."""
    saved = {"p": {"output": {"kvCache": {"cacheId": "a.b.c", "length": 3}, "rows": [7, 8]}}}
    handle = "${p.output.kvCache}"
    assert fill(handle, saved) == {"cacheId": "a.b.c", "length": 3}
    assert fill({"x": ["${p.output.rows.1}", "<${p.output.rows.0}>"]}, saved) == {"x": [8, "<7>"]}
    assert fill({"$with": handle, "length": 9}, saved) == {"cacheId": "a.b.c", "length": 9}
    assert fill({"$times": [3, 1]}, saved) == [1, 1, 1]
    assert fill({"$join": ["${p.output.rows}", [9]]}, saved) == [7, 8, 9]
    assert [base64.b64decode(mask) for mask in fill({"$masks": [2, 16]}, saved)] == [b"\x01\x00", b"\x02\x00"]
    with pytest.raises(KeyError):
        fill("${q.output}", saved)


def test_frames_are_merged_however_they_were_cut() -> None:
    """Results by number, branches by index, rows one after another."""
    stream = [{"results": [{"seq": "2"}]}, {"results": [{"seq": "1"}], "releases": [{}]}]
    assert merged(stream) == {"frames": 2, "results": [{"seq": "1"}, {"seq": "2"}], "releases": [{}]}
    frames = [
        {"outputs": [{"index": 1, "outputs": {"tokens": [1], "seed": "7"}, "text": "a"}]},
        {"outputs": [{"outputs": {"tokens": [5]}}, {"index": 1, "outputs": {"tokens": [2]}, "text": "b"}]},
    ]
    branches = merged(frames)["branches"]
    assert branches[0]["outputs"] == {"tokens": [5]}
    assert branches[1] == {"index": 1, "text": "ab", "outputs": {"tokens": [1, 2], "seed": "7"}}


def test_names_of_methods_are_of_one_service() -> None:
    """A name alone is a method of the executor; others need their service. Unknown names are refused."""
    assert full_name("Decode") == "ferrule.v1.ModelExecutorService/Decode"
    assert full_name("TokenizerService/Detokenize") == "ferrule.v1.TokenizerService/Detokenize"
    assert full_name("Health/Watch") == "grpc.health.v1.Health/Watch"
    for wrong in ("Tokenize", "TokenizerService/Decode", "Service/Decode", "AdminService/Decode", "decode", ""):
        with pytest.raises(LookupError):
            full_name(wrong)


def test_cases_cover_the_contract() -> None:
    """Each method of each service, each reason that this server can be made to give, each name once."""
    cases = load()
    assert len(cases) >= 90
    assert len({case.name for case in cases}) == len(cases)
    steps = [step for case in cases for step in case.steps]
    called = {full_name(step[key]) for step in steps for key in ("call", "open") if key in step}
    assert sorted(METHODS.keys() - called - NOT_CALLED) == []
    assert called.isdisjoint(NOT_CALLED)
    assert {name.partition("/")[0] for name in METHODS} == SERVICES
    text = repr(steps)
    assert [reason for reason in REASONS if f"'{reason}'" not in text] == []


def test_the_contract_is_what_the_protos_say() -> None:
    """No service stands in a file of protos/ that the cases do not know."""
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "protos" / "ferrule").rglob("*.proto"))]
    names = {f"ferrule.v1.{name}" for text in texts for name in re.findall(r"^service (\w+)", text, re.MULTILINE)}
    assert names == {name for name in SERVICES if name.startswith("ferrule.")}
    assert len(re.findall(r"^  rpc ", "".join(texts), re.MULTILINE)) == sum("ferrule" in name for name in METHODS)


SERVICES = {
    "ferrule.v1.ModelExecutorService",
    "ferrule.v1.TokenizerService",
    "ferrule.v1.AdminService",
    "grpc.health.v1.Health",
}
NOT_CALLED = {name for name in METHODS if name == "grpc.health.v1.Health/List"}
"""Of newer versions of the health protocol, and not ours."""
REASONS = (
    "INVALID_FIELD",
    "TOKEN_OUT_OF_VOCAB",
    "REQUEST_ID_REUSED",
    "REPLY_TOO_LARGE",
    "TOKEN_MISSING",
    "TOKEN_INVALID",
    "ROLE_REQUIRED",
    "HANDLE_UNKNOWN",
    "HANDLE_EXPIRED",
    "EPOCH_CHANGED",
    "MASK_UNKNOWN",
    "WRONG_INSTANCE",
    "HANDLE_STALE",
    "TRUNCATE_BEYOND",
    "CONTEXT_EXCEEDED",
    "EXCEEDS_POOL",
    "KV_GIVEN_BACK",
    "QUOTA_HANDLES",
    "QUOTA_KV_TOKENS",
    "QUOTA_QUEUED_ROWS",
    "QUOTA_MASK_BYTES",
    "KV_BLOCKS_EXHAUSTED",
    "QUEUE_FULL",
    "DRAINING",
    "FEATURE_UNSUPPORTED",
)
"""Not among them: HANDLE_LOST, NON_FINITE_LOGITS and ENGINE_FAULT need a fault, SLOW_CONSUMER a slow reader, STARTING
a slow start, the quotas that are rates (QUOTA_PREFILL_RATE and others) a clock, REQUEST_TIMEOUT a slow sender,
REQUEST_TOO_LARGE the limit of a method; tests of the server have them."""
