"""LogitsReturnPolicy read: every part, every bound, and what a row takes in a reply."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ferrule.v1 import executor_pb2, policy_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.planned import PlannedAppend
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import SampleSpec, Shaping
from tests.api.reading import field_refused, make_reader

Policy = policy_pb2.LogitsReturnPolicy
Greedy = policy_pb2.GreedyArgmax
Sample = policy_pb2.Sample
Mask = policy_pb2.TokenMask

VOCAB_SIZE = 97
NUM_MASK_BYTES = 13
HANDLE = types_pb2.KvCacheHandle(cache_id="i.e.s", length=3, lineage=bytes(16))
AT = "items[3].decode."


def _read(policy: Policy, vocab_size: int = VOCAB_SIZE, limits: ApiLimits | None = None) -> PlannedAppend:
    message = executor_pb2.DecodeInput(kv_cache=HANDLE, input_ids=[1], logits_policy=policy)
    return make_reader(vocab_size, limits=limits).decode(message, AT, "alice")


def _shaping(policy: Policy) -> Shaping | None:
    spec = _read(policy).job.output.spec
    assert spec is not None
    return spec.shaping


def _ids(*token_ids: int) -> Mask:
    return Mask(allowed_ids=policy_pb2.TokenIdList(token_ids=token_ids))


def _bits(*token_ids: int, num_bytes: int = NUM_MASK_BYTES) -> bytes:
    bits = np.zeros(num_bytes, np.uint8)
    for token_id in token_ids:
        bits[token_id // 8] |= 1 << token_id % 8
    return bits.tobytes()


# ---- what is asked for ----------------------------------------------------------------------------------------------


def test_a_policy_that_asks_for_nothing_gets_nothing() -> None:
    """An empty policy and one whose fields all have their defaults compute no row."""
    for policy in (Policy(), Policy(top_logprobs=0, entropy=False)):
        planned = _read(policy)
        assert planned.job.output.spec is None
        assert planned.plan.row_bytes == 0


@pytest.mark.parametrize(
    "policy",
    [
        Policy(greedy_argmax=Greedy()),
        Policy(sample=Sample()),
        Policy(top_logprobs=3),
        Policy(logprob_token_ids=[1]),
        Policy(target_logprobs=True),
        Policy(entropy=True),
        Policy(hidden_state=True),
    ],
    ids=str,
)
def test_whatever_is_asked_for_leaves_the_logits_out(policy: Policy) -> None:
    """And with ``full_logits`` they come too."""
    spec = _read(policy).job.output.spec
    assert spec is not None
    assert not spec.full_logits
    policy.full_logits.SetInParent()
    spec = _read(policy).job.output.spec
    assert spec is not None
    assert spec.full_logits


def test_every_part_arrives() -> None:
    """All at once."""
    policy = Policy(
        full_logits=policy_pb2.FullLogits(dtype=types_pb2.DATA_TYPE_FLOAT16),
        sample=Sample(temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, seed=2**64 - 1),
        logprobs=True,
        top_logprobs=5,
        logprob_token_ids=[9, 0, 9],
        target_logprobs=True,
        entropy=True,
        hidden_state=True,
    )
    planned = _read(policy)
    output, spec = planned.job.output, planned.job.output.spec
    assert spec is not None
    assert (output.is_seeded, output.wants_targets, planned.plan.dtype) == (True, True, types_pb2.DATA_TYPE_FLOAT16)
    assert spec.sample == SampleSpec(0.5, 7, 0.75, 0.25, 2**64 - 1)
    assert (spec.full_logits, spec.logprobs, spec.num_top_logprobs, spec.logprob_ids) == (True, True, 5, (9, 0, 9))
    assert (spec.entropy, spec.hidden_state, spec.shaping) == (True, True, None)


def test_sampling_without_a_seed_has_none() -> None:
    """Zero is a seed like any other."""
    assert not _read(Policy(sample=Sample())).job.output.is_seeded
    assert _read(Policy(sample=Sample(seed=0))).job.output.is_seeded


def test_temperature_0_is_greedy_with_all_that_shapes() -> None:
    """Penalties, bias and mask hold; there is no draw and so no seed to be given."""
    policy = Policy(sample=Sample(temperature=0.0, frequency_penalty=0.5, logit_bias={3: -1.0}, token_mask=_ids(3, 5)))
    output = _read(policy).job.output
    assert output.spec is not None
    assert output.spec.greedy
    assert output.spec.sample is None
    assert output.is_seeded
    assert output.spec.shaping is not None
    assert (output.spec.shaping.frequency_penalty, output.spec.shaping.bias) == (0.5, ((3, -1.0),))


# ---- shaping --------------------------------------------------------------------------------------------------------


def test_what_changes_nothing_is_no_shaping() -> None:
    """So that it costs nothing: neutral penalties, biases of 0, a start without a penalty."""
    assert _shaping(Policy(greedy_argmax=Greedy(repetition_penalty=1.0, penalty_start=7))) is None
    neutral = Sample(repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=-0.0, logit_bias={5: 0.0})
    assert _shaping(Policy(sample=neutral)) is None


def test_penalties_and_their_start_are_read() -> None:
    """Of both selections."""
    greedy = Policy(greedy_argmax=Greedy(repetition_penalty=1.25, penalty_start=4))
    assert _shaping(greedy) == Shaping(repetition_penalty=1.25, penalty_start=4)
    sample = Policy(
        sample=Sample(repetition_penalty=0.5, frequency_penalty=-1.5, presence_penalty=2.0, penalty_start=9)
    )
    assert _shaping(sample) == Shaping(0.5, -1.5, 2.0, 9)


def test_biases_come_in_the_order_of_their_tokens() -> None:
    """Equal policies are equal shapings, whatever the order on the wire."""
    shaping = _shaping(Policy(sample=Sample(logit_bias={90: 1.0, 2: -3.0, 45: 0.5})))
    assert shaping == Shaping(bias=((2, -3.0), (45, 0.5), (90, 1.0)))


@pytest.mark.parametrize("mask", [_ids(1, 8, 96, 8), Mask(inline_bits=_bits(1, 8, 96))], ids=["ids", "bits"])
@pytest.mark.parametrize("kind", ["greedy", "sample"])
def test_a_mask_is_the_same_set_in_either_form(kind: str, mask: Mask) -> None:
    """Bit i of byte j is token 8 j + i, and bits beyond the vocabulary mean nothing."""
    selection = {"greedy_argmax": Greedy(token_mask=mask)} if kind == "greedy" else {"sample": Sample(token_mask=mask)}
    shaping = _shaping(Policy(**selection))
    assert shaping is not None
    assert shaping.mask is not None
    assert shaping.mask.bits.tobytes() == _bits(1, 8, 96)
    over = Policy(greedy_argmax=Greedy(token_mask=Mask(inline_bits=_bits(1, 8, 96, 97, 103))))
    assert _shaping(over) == Shaping(mask=shaping.mask)


# ---- what is refused ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Policy, str]] = {
    "logprobs of no token": (Policy(logprobs=True), "logprobs"),
    "logprobs of no token, top": (Policy(logprobs=True, top_logprobs=1), "logprobs"),
    "too many top": (Policy(top_logprobs=1025), "top_logprobs"),
    "too many ids": (Policy(logprob_token_ids=[1] * 1025), "logprob_token_ids"),
    "id out of the vocabulary": (Policy(logprob_token_ids=[1, 97]), "logprob_token_ids[1]"),
    "int8 logits": (Policy(full_logits=policy_pb2.FullLogits(dtype=types_pb2.DATA_TYPE_INT8)), "full_logits.dtype"),
    "logits of no type": (
        Policy(full_logits=policy_pb2.FullLogits(dtype=77)),  # type: ignore[arg-type]
        "full_logits.dtype",
    ),
    "top_p 0": (Policy(sample=Sample(top_p=0.0)), "sample.top_p"),
    "min_p": (Policy(sample=Sample(min_p=1.5)), "sample.min_p"),
    **{
        f"{name} {value}": (Policy(sample=Sample(**{name: value})), f"sample.{name}")  # type: ignore[arg-type]
        for name in ("temperature", "top_p", "min_p", "repetition_penalty")
        for value in (math.nan, math.inf, -math.inf, -1.0, -0.1)
    },
    "top_p above 1": (Policy(sample=Sample(top_p=1.01)), "sample.top_p"),
    "repetition of greedy": (Policy(greedy_argmax=Greedy(repetition_penalty=-1.0)), "greedy_argmax.repetition_penalty"),
    "frequency": (Policy(sample=Sample(frequency_penalty=math.inf)), "sample.frequency_penalty"),
    "presence": (Policy(sample=Sample(presence_penalty=math.nan)), "sample.presence_penalty"),
    "penalty at temperature 0": (
        Policy(sample=Sample(temperature=0.0, presence_penalty=math.nan)),
        "sample.presence_penalty",
    ),
    "top_p at temperature 0": (Policy(sample=Sample(temperature=0.0, top_p=2.0)), "sample.top_p"),
    "bias inf": (Policy(sample=Sample(logit_bias={3: -math.inf})), "sample.logit_bias[3]"),
    "bias nan": (Policy(sample=Sample(logit_bias={3: math.nan})), "sample.logit_bias[3]"),
    "bias out of the vocabulary": (Policy(sample=Sample(logit_bias={97: 0.0})), "sample.logit_bias[97]"),
    "too many biases": (Policy(sample=Sample(logit_bias=dict.fromkeys(range(4097), 1.0))), "sample.logit_bias"),
    "mask of no form": (Policy(sample=Sample(token_mask=Mask())), "sample.token_mask"),
    "no ids": (Policy(sample=Sample(token_mask=_ids())), "sample.token_mask.allowed_ids.token_ids"),
    "mask id out of the vocabulary": (
        Policy(greedy_argmax=Greedy(token_mask=_ids(1, 2**32 - 1))),
        "greedy_argmax.token_mask.allowed_ids.token_ids[1]",
    ),
    "more ids than tokens": (
        Policy(greedy_argmax=Greedy(token_mask=_ids(*[1] * 98))),
        "greedy_argmax.token_mask.allowed_ids.token_ids",
    ),
    "short bits": (
        Policy(greedy_argmax=Greedy(token_mask=Mask(inline_bits=bytes([255] * 12)))),
        "greedy_argmax.token_mask.inline_bits",
    ),
    "long bits": (
        Policy(greedy_argmax=Greedy(token_mask=Mask(inline_bits=bytes([255] * 14)))),
        "greedy_argmax.token_mask.inline_bits",
    ),
    "empty bits": (
        Policy(greedy_argmax=Greedy(token_mask=Mask(inline_bits=bytes(13)))),
        "greedy_argmax.token_mask.inline_bits",
    ),
    "bits beyond the last token alone": (
        Policy(greedy_argmax=Greedy(token_mask=Mask(inline_bits=_bits(97)))),
        "greedy_argmax.token_mask.inline_bits",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_out_of_range_is_refused_by_its_path(name: str) -> None:
    """Never taken for something near it; twice the same, so that nothing bad is remembered."""
    policy, field = REFUSED[name]
    for _ in range(2):
        assert field_refused(name, lambda: _read(policy)) == f"{AT}logits_policy.{field}"


# ---- masks by name --------------------------------------------------------------------------------------------------


def test_a_registered_mask_stands_for_its_principals_own() -> None:
    """The same bytes of a policy are looked up for each caller, however often they came."""
    reader = make_reader(VOCAB_SIZE)
    request_bits = _bits(2, 3)
    (fingerprint,) = reader.masks.register("alice", [reader._masks.packed(request_bits, "")])
    policy = Policy(greedy_argmax=Greedy(token_mask=Mask(fingerprint=fingerprint)))
    message = executor_pb2.DecodeInput(kv_cache=HANDLE, input_ids=[1], logits_policy=policy)
    for _ in range(2):
        spec = reader.decode(message, AT, "alice").job.output.spec
        assert spec is not None
        assert spec.shaping is not None
        assert spec.shaping.mask is not None
        assert spec.shaping.mask.bits.tobytes() == request_bits
        with pytest.raises(FerruleError) as caught:
            reader.decode(message, AT, "bob")
        assert caught.value.reason == "MASK_UNKNOWN"


def test_a_policy_that_came_before_costs_one_look_up() -> None:
    """The same object comes back, for any principal: it is what the decode hot path stands on."""
    reader = make_reader(VOCAB_SIZE)
    policy = Policy(sample=Sample(temperature=0.5, token_mask=_ids(4, 5)), logprobs=True)
    message = executor_pb2.DecodeInput(kv_cache=HANDLE, input_ids=[1], logits_policy=policy)
    assert reader.decode(message, AT, "alice").plan is reader.decode(message, "input.", "bob").plan


def test_what_is_remembered_is_bounded() -> None:
    """In number and in size: large policies are read again."""
    reader = make_reader(VOCAB_SIZE)
    for seed in range(3000):
        policy = Policy(sample=Sample(seed=seed))
        reader.decode(executor_pb2.DecodeInput(kv_cache=HANDLE, input_ids=[1], logits_policy=policy), AT, "alice")
    assert len(reader._policies._remembered) <= 512
    large = Policy(logprob_token_ids=range(90), top_logprobs=1, sample=Sample(logit_bias=dict.fromkeys(range(40), 1.0)))
    message = executor_pb2.DecodeInput(kv_cache=HANDLE, input_ids=[1], logits_policy=large)
    assert reader.decode(message, AT, "alice").plan is not reader.decode(message, AT, "alice").plan
