"""GenerateRequest and ForwardRequest read: how far, how many, what ends it, and every refusal."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ferrule.v1 import executor_pb2, policy_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.policy import OutputPlan
from ferrule_server.api.requests.streaming import stop_ids_of
from ferrule_server.api.services import executor as executor_service
from ferrule_server.engine.jobs import ForwardJob, GenerateJob, Pooling
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import OutputSpec, SampleSpec
from ferrule_server.kv.handle import StalePolicy
from ferrule_server.text.tokenizer import Tokenizer
from tests.api.harness import DEMO_FOLDER, FULL
from tests.api.reading import field_refused, make_reader

Policy = policy_pb2.LogitsReturnPolicy
Ids = policy_pb2.TokenIdList

HANDLE = types_pb2.KvCacheHandle(cache_id="i.e.s", length=3, lineage=bytes(16))


def _generate(
    limits: ApiLimits | None = None,
    tokenizer: Tokenizer | None = None,
    **fields: Any,  # of GenerateRequest
) -> tuple[GenerateJob, OutputPlan]:
    request = executor_pb2.GenerateRequest(**{"input_ids": [1, 2], **fields})
    return make_reader(limits=limits, tokenizer=tokenizer, eos_ids=(7, 8)).streams.generate(request, "alice")


def _forward(limits: ApiLimits | None = None, **fields: Any) -> tuple[ForwardJob, OutputPlan]:  # of ForwardRequest
    request = executor_pb2.ForwardRequest(**{"input_ids": [1, 2, 3], "logits_policy": FULL, **fields})
    return make_reader(limits=limits).streams.forward(request, "alice")


# ---- Generate -------------------------------------------------------------------------------------------------------


def test_a_plain_request_draws_by_the_defaults_until_the_model_stops() -> None:
    """One branch, no logits, no limit of its own."""
    planned = _generate()
    job = planned[0]
    assert job.output.spec == OutputSpec(sample=SampleSpec())
    assert not job.output.is_seeded
    assert (job.num_branches, job.stop.max_tokens, job.stop.eos_ids) == (1, 0, frozenset((7, 8)))
    assert (job.stop.token_ids, job.stop.sequences, job.stop.new_text_stop) == (frozenset(), (), None)
    assert (job.token_ids, job.handle, job.on_stale) == ((1, 2), None, StalePolicy.FAIL)


def test_everything_asked_for_arrives() -> None:
    """Handle, policy, branches, stops, lease."""
    planned = _generate(
        request_id="g",
        kv_cache=HANDLE,
        logits_policy=Policy(greedy_argmax=policy_pb2.GreedyArgmax(), full_logits=policy_pb2.FullLogits()),
        on_stale=types_pb2.STALE_POLICY_REWIND,
        cache=executor_pb2.CacheOptions(ttl={"seconds": 9}, reserve_length=99),
        max_tokens=12,
        n=3,
        stop_token_ids=[5, 6],
        stop_sequences=[Ids(token_ids=[1, 2]), Ids(token_ids=[3])],
        ignore_eos=True,
    )
    job = planned[0]
    assert job.handle is not None
    assert job.output.spec == OutputSpec(greedy=True, full_logits=True)
    assert (job.request_id, job.on_stale, job.ttl_s, job.num_branches) == ("g", StalePolicy.REWIND, 9.0, 3)
    assert job.new.reserved_length == 0  # of an existing sequence only the lease counts
    assert (job.stop.max_tokens, job.stop.eos_ids, job.stop.token_ids) == (12, frozenset(), frozenset((5, 6)))
    assert job.stop.sequences == ((1, 2), (3,))


def test_how_a_new_sequence_is_kept_arrives() -> None:
    """Room, and both hints about prefixes."""
    options = executor_pb2.CacheOptions(reserve_length=40, skip_prefix_reuse=True, skip_prefix_publish=True)
    job = _generate(cache=options)[0]
    assert (job.new.reserved_length, job.new.reuse_prefix, job.new.publish_prefix) == (40, False, False)
    job = _generate()[0]
    assert (job.new.reserved_length, job.new.reuse_prefix, job.new.publish_prefix) == (0, True, True)


def test_a_policy_that_chooses_nothing_draws() -> None:
    """What it asks for comes with each token; the caller's message is not changed."""
    policy = Policy(entropy=True, top_logprobs=2)
    spec = _generate(logits_policy=policy)[0].output.spec
    assert spec == OutputSpec(sample=SampleSpec(), entropy=True, num_top_logprobs=2)
    assert policy == Policy(entropy=True, top_logprobs=2)


def test_a_query_needs_no_tokens() -> None:
    """The first token is drawn from the handle's last row."""
    assert _generate(input_ids=[], kv_cache=HANDLE)[0].token_ids == ()


def test_it_runs_ahead_of_its_reader_by_a_few_thousand_tokens() -> None:
    """Not without end; rows that are large count as such."""
    job = _generate()[0]
    assert 1000 < job.window.limit_bytes / job.row_bytes < 10_000
    large = _generate(logits_policy=FULL)[0]
    assert large.row_bytes - job.row_bytes == 4 * 97


def test_text_needs_a_tokenizer() -> None:
    """Without one it is said to be a feature that is missing."""
    for fields in ({"return_text": True}, {"stop_strings": ["x"]}):
        with pytest.raises(FerruleError) as caught:
            _generate(**fields)
        assert caught.value.reason == "FEATURE_UNSUPPORTED"
        assert caught.value.metadata["feature"] in fields
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    planned = _generate(tokenizer=tokenizer, return_text=True, skip_special_tokens=True, stop_strings=["x", "\u4e16"])
    assert planned[0].stop.new_text_stop is not None
    assert planned[0].stop.new_text_stop().feed(1) in (True, False)


GENERATE_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to begin with": ({"input_ids": []}, "input_ids"),
    "token out of the vocabulary": ({"input_ids": [97]}, "input_ids[0]"),
    "handle": ({"kv_cache": types_pb2.KvCacheHandle(cache_id="i")}, "kv_cache.length"),
    "request id": ({"request_id": "x" * 129}, "request_id"),
    "stale policy": ({"on_stale": 9}, "on_stale"),
    "policy": ({"logits_policy": Policy(top_logprobs=9999)}, "logits_policy.top_logprobs"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "too many branches": ({"n": 257}, "n"),
    "room": ({"cache": executor_pb2.CacheOptions(reserve_length=1)}, "cache.reserve_length"),
    "stop token out of the vocabulary": ({"stop_token_ids": [3, 97]}, "stop_token_ids[1]"),
    "stop tokens": ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    "stop sequences": ({"stop_sequences": [Ids(token_ids=[1])] * 65}, "stop_sequences"),
    "empty sequence": ({"stop_sequences": [Ids()]}, "stop_sequences[0].token_ids"),
    "long sequence": (
        {"stop_sequences": [Ids(token_ids=[1]), Ids(token_ids=[1] * 1025)]},
        "stop_sequences[1].token_ids",
    ),
    "token of a sequence out of the vocabulary": (
        {"stop_sequences": [Ids(token_ids=[1, 97])]},
        "stop_sequences[0].token_ids[1]",
    ),
    "stop strings": ({"stop_strings": ["a"] * 65}, "stop_strings"),
    "empty string": ({"stop_strings": ["a", ""]}, "stop_strings[1]"),
    "long string": ({"stop_strings": ["\u4e16" * 342]}, "stop_strings[0]"),
}


@pytest.mark.parametrize("name", GENERATE_REFUSED)
def test_a_generate_that_makes_no_sense_is_refused_by_its_path(name: str) -> None:
    """Before anything runs."""
    fields, field = GENERATE_REFUSED[name]
    assert field_refused(name, lambda: _generate(tokenizer=Tokenizer.load(DEMO_FOLDER), **fields)) == field


def test_a_context_or_a_reply_that_is_too_large_is_refused() -> None:
    """A row must fit into a message."""
    with pytest.raises(FerruleError) as caught:
        _generate(input_ids=[1] * 513)
    assert caught.value.reason == "CONTEXT_EXCEEDED"
    with pytest.raises(FerruleError) as caught:
        _generate(ApiLimits(max_reply_bytes=800), logits_policy=FULL)
    assert caught.value.reason == "REPLY_TOO_LARGE"


# ---- Forward --------------------------------------------------------------------------------------------------------


def test_a_forward_has_rows_of_all_positions() -> None:
    """Full logits where nothing else is said."""
    job = _forward(request_id="f")[0]
    assert job.output.spec == OutputSpec(full_logits=True)
    assert job.output.all_positions
    assert (job.token_ids, job.pooling, job.request_id) == ((1, 2, 3), Pooling.NONE, "f")


def test_chunks_fit_into_messages() -> None:
    """As many rows as a frame of the limit holds, at most a step of them, one at least."""
    assert _forward(input_ids=[1] * 500)[0].chunk_rows == 32
    row_bytes = _forward()[0].row_bytes
    limits = ApiLimits(max_stream_frame_bytes=5 * row_bytes + 1)
    assert _forward(limits, input_ids=[1] * 500)[0].chunk_rows == 5
    assert _forward(ApiLimits(max_stream_frame_bytes=100), input_ids=[1] * 500)[0].chunk_rows == 1
    job = _forward(limits, input_ids=[1] * 500)[0]
    assert job.window.limit_bytes >= 2 * job.chunk_rows * job.row_bytes


@pytest.mark.parametrize(
    ("pooling", "read"),
    [
        (executor_pb2.HIDDEN_POOLING_MEAN, Pooling.MEAN),
        (executor_pb2.HIDDEN_POOLING_LAST, Pooling.LAST),
    ],
)
def test_pooling_leaves_the_rows_out_unless_they_are_asked_for(
    pooling: executor_pb2.HiddenPooling, read: Pooling
) -> None:
    """An empty policy is the pooled vector alone."""
    for policy in (None, Policy()):
        job = _forward(hidden_pooling=pooling, logits_policy=policy)[0]
        assert (job.output.spec, job.output.all_positions, job.pooling) == (None, True, read)
        assert job.row_bytes == 0
        assert job.window.is_open
    scored = _forward(hidden_pooling=pooling, logits_policy=Policy(target_logprobs=True))[0]
    assert scored.output.wants_targets
    assert scored.output.spec == OutputSpec()


FORWARD_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no token": ({"input_ids": []}, "input_ids"),
    "token out of the vocabulary": ({"input_ids": [1, 97]}, "input_ids[1]"),
    "request id": ({"request_id": "x" * 129}, "request_id"),
    "pooling": ({"hidden_pooling": 9}, "hidden_pooling"),
    "nothing comes back": ({"logits_policy": Policy()}, "logits_policy"),
    "policy": ({"logits_policy": Policy(logprobs=True), "hidden_pooling": 1}, "logits_policy.logprobs"),
}


@pytest.mark.parametrize("name", FORWARD_REFUSED)
def test_a_forward_that_makes_no_sense_is_refused_by_its_path(name: str) -> None:
    """Before anything runs."""
    fields, field = FORWARD_REFUSED[name]
    assert field_refused(name, lambda: _forward(**fields)) == field


def test_a_row_of_a_forward_must_fit_into_a_message() -> None:
    """And its tokens into the context."""
    with pytest.raises(FerruleError) as caught:
        _forward(ApiLimits(max_reply_bytes=800))
    assert caught.value.reason == "REPLY_TOO_LARGE"
    with pytest.raises(FerruleError) as caught:
        _forward(input_ids=[1] * 513)
    assert caught.value.reason == "CONTEXT_EXCEEDED"


def _serving(tokenizer: Tokenizer | None) -> Any:
    return SimpleNamespace(inputs=SimpleNamespace(tokenizer=tokenizer))


@pytest.mark.parametrize("skips", [False, True])
def test_the_text_of_a_generate_has_special_tokens_unless_skipped(skips: bool) -> None:
    """As the request says."""
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    request = executor_pb2.GenerateRequest(return_text=True, skip_special_tokens=skips)
    new_text = executor_service._new_text(_serving(tokenizer), request, ())
    assert new_text is not None
    text = new_text()
    text.push(0)
    assert (text.take() == "") is skips


@pytest.mark.parametrize("includes", [False, True])
def test_the_text_of_a_generate_has_its_stop_only_if_it_is_included(includes: bool) -> None:
    """As the request says."""
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    request = executor_pb2.GenerateRequest(return_text=True, stop_strings=["two"], include_stop_text=includes)
    new_text = executor_service._new_text(_serving(tokenizer), request, ())
    assert new_text is not None
    text = new_text()
    for token_id in tokenizer.encode("one two three"):
        text.push(token_id)
    assert text.end(is_stopped=True) == ("one two three" if includes else "one ")


@pytest.mark.parametrize(
    ("eos_ids", "eos_id", "answer_end", "stop_ids"),
    [
        ((2,), None, (7,), (2, 7)),
        ((2,), 3, (7,), (2, 3, 7)),
        ((2, 7), None, (7,), (2, 7)),
        ((), 7, (7,), (7,)),
        ((2,), None, (), (2,)),
        ((2,), 99, (99,), (2,)),
    ],
)
def test_the_template_names_a_stop_where_the_files_name_none(
    eos_ids: tuple[int, ...],
    eos_id: int | None,
    answer_end: tuple[int, ...],
    stop_ids: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The control token right after an answer, unless it is known; never a token that the model cannot draw."""
    caplog.set_level(logging.INFO)
    model = cast("Any", SimpleNamespace(config=SimpleNamespace(eos_ids=eos_ids, vocab_size=10)))
    tokenizer = cast("Any", SimpleNamespace(eos_id=eos_id, answer_end=answer_end))
    assert stop_ids_of(model, tokenizer) == stop_ids
    is_found = 7 in stop_ids and 7 not in (*eos_ids, eos_id)
    assert caplog.messages == ["event=stop_token_from_template token_id=7"] * is_found
    assert stop_ids_of(model, None) == eos_ids
