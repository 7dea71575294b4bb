"""ForwardVerify through a real server: what holds is kept, the rest leaves nothing, the distribution is the model's."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from ferrule.v1 import cache_pb2, executor_pb2, policy_pb2, types_pb2
from tests.api.harness import FULL, GREEDY, PROMPT, RunningServer, decode_item, read_status, refused

EXACT, REJECTION = executor_pb2.ACCEPTANCE_RULE_EXACT, executor_pb2.ACCEPTANCE_RULE_REJECTION
REWIND = types_pb2.STALE_POLICY_REWIND
Floats = npt.NDArray[np.float64]


def sampled(seed: int, **fields: Any) -> policy_pb2.LogitsReturnPolicy:
    """Return a policy that draws."""
    return policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(seed=seed, **fields))


def verify_of(
    handle: types_pb2.KvCacheHandle, *input_ids: int, drafts: Sequence[int] = (), **fields: Any
) -> executor_pb2.VerifyInput:
    """Return a VerifyInput."""
    policy = fields.pop("policy", GREEDY)
    return executor_pb2.VerifyInput(
        kv_cache=handle, input_ids=input_ids, draft_ids=drafts, logits_policy=policy, **fields
    )


def verify(server: RunningServer, message: executor_pb2.VerifyInput) -> executor_pb2.VerifyOutput:
    """Call ForwardVerify."""
    return server.stub.ForwardVerify(executor_pb2.ForwardVerifyRequest(input=message), timeout=20).output


def _loop(
    server: RunningServer, handle: types_pb2.KvCacheHandle, token: int, count: int, policy: Any = GREEDY
) -> list[int]:
    """Return the tokens that decoding one by one gives behind ``token``, on a branch of the handle."""
    branch, tokens = server.fork(handle)[0], [token]
    for _ in range(count):
        output = server.decode(branch, tokens[-1], policy=policy)
        branch = output.kv_cache
        tokens.append(output.outputs.tokens[0])
    server.release(branch)
    return tokens[1:]


# ---- who decides ----------------------------------------------------------------------------------------------------


def test_verifies_share_a_step_with_decodes_on_a_stream(server: RunningServer) -> None:
    """One frame in, one step, one frame out, each result of the kind of its item; errors come in their own."""
    handles = [server.prefill((*PROMPT, i)).kv_cache for i in range(4)]
    expected = [_loop(server, handle, 7, 3) for handle in handles]
    stream = server.open_stream()
    stream.send(
        verify_of(handles[0], 7, drafts=expected[0][:2], acceptance=EXACT, request_id="v"),
        decode_item(handles[1], 7),
        verify_of(handles[2], 7, drafts=[expected[2][0], 255 - expected[2][1]], acceptance=EXACT),
        executor_pb2.UnifiedBatchItem(q_tokens=[7, 8], kv_cache=handles[3], logits_policy=GREEDY, request_id="u"),
        executor_pb2.UnifiedBatchItem(q_tokens=[5, 6], logits_policy=FULL, is_final_chunk=False),
        verify_of(handles[0], 7, drafts=[1], parents=[1]),
        executor_pb2.UnifiedBatchItem(q_tokens=[5, 6], pos_offset=1),
    )
    results: dict[int, executor_pb2.StreamResult] = {}
    while len(results) < 7:
        results.update((result.seq, result) for result in stream.read().results)
    assert [results[seq].WhichOneof("result") for seq in range(7)] == [
        "verify",
        "decode",
        "verify",
        "unified",
        "unified",
        "error",
        "error",
    ]
    assert (results[0].verify.request_id, results[3].unified.request_id) == ("v", "u")
    assert list(results[0].verify.outputs.tokens) == expected[0]
    assert list(results[1].decode.outputs.tokens) == expected[1][:1]
    assert (results[2].verify.accepted_count, results[2].verify.next_token) == (1, expected[2][1])
    assert not results[4].unified.HasField("outputs")
    assert results[4].unified.kv_cache.length == 2
    ran: list[Any] = [results[0].verify, results[1].decode, *(results[seq].unified for seq in (3, 4))]
    assert {each.timing.step_rows for each in ran} == {3 + 1 + 3 + 2 + 2}
    assert read_status(results[5].error).fields == ("items[5].verify.parents[0]",)
    assert read_status(results[6].error).fields == ("items[6].unified.pos_offset",)
    assert stream.rest() == []


# ---- the distribution stays the model's -----------------------------------------------------------------------------

_IDS = (3, 40, 77, 128, 200, 251)
_NUM_HANDLES, _NUM_ROUNDS = 60, 40
_TEMPERATURE = 1.7
_BIAS = {3: 1.5, 40: -0.5, 77: 0.3, 128: 2.5, 251: 1.0}
"""The model's own distribution is nearly flat over these ids."""
_MASK = policy_pb2.TokenMask(allowed_ids=policy_pb2.TokenIdList(token_ids=_IDS))


def _distribution(server: RunningServer, handle: types_pb2.KvCacheHandle, *input_ids: int) -> Floats:
    """Return the distribution of the token behind some tokens, over the ids allowed, in float64."""
    branch = server.fork(handle)[0]
    tensor = server.decode(branch, *input_ids, policy=FULL).outputs.logits
    server.release(branch)
    logits = np.frombuffer(tensor.data, "<f4").astype(np.float64)[list(_IDS)]
    logits = (logits + [_BIAS.get(token, 0.0) for token in _IDS]) / _TEMPERATURE
    weights: Floats = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights


def _chi_square(counts: Floats, distribution: Floats) -> float:
    expected = counts.sum() * distribution
    return float(((counts - expected) ** 2 / expected).sum())


@functools.cache
def _critical(num_free: int) -> float:
    """Return the value that chi-square passes once in ten thousand times (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * num_free)
    return float(num_free * (1 - spread + 3.719 * spread**0.5) ** 3)


def _drafted(
    kind: str, chance: np.random.Generator, distributions: dict[tuple[int, ...], Floats]
) -> tuple[list[int], Any]:
    """Return two drafts and what is told of the distributions they were drawn from."""
    if kind == "certain":
        return [_IDS[0], _IDS[1]], None
    first = int(chance.choice(len(_IDS), p=distributions[()]))
    second = int(chance.choice(len(_IDS), p=distributions[(first,)]))
    rows = [distributions[()], distributions[(first,)]]
    drafts = [_IDS[first], _IDS[second]]
    if kind == "sparse":
        kept = [[(token, value) for token, value in zip(_IDS, row, strict=True) if value > 0] for row in rows]
        return drafts, executor_pb2.DraftProbs(
            sparse=executor_pb2.SparseProbs(
                row_sizes=[len(row) for row in kept],
                token_ids=[token for row in kept for token, _ in row],
                probs=[value for row in kept for _, value in row],
            )
        )
    dense = np.zeros((2, 256), "<f4")
    for place, row in enumerate(rows):
        dense[place, list(_IDS)] = row
    tensor = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[2, 256], data=dense.tobytes())
    return drafts, executor_pb2.DraftProbs(dense=tensor)


def _q_distributions(chance: np.random.Generator) -> dict[tuple[int, ...], Floats]:
    """Return distributions of drafts, far from those of the model: one for the first, one after each first."""
    distributions: dict[tuple[int, ...], Floats] = {}
    for key in ((), *((i,) for i in range(len(_IDS)))):
        weights = chance.dirichlet(np.ones(len(_IDS)))
        weights[int(chance.integers(len(_IDS)))] = 0.0
        distributions[key] = weights / weights.sum()
    return distributions


def _emitted(server: RunningServer, handle: types_pb2.KvCacheHandle, kind: str) -> Iterator[list[int]]:
    """Yield what a few thousand verifies emit, each with a seed of its own, many to a frame."""
    chance = np.random.default_rng(sum(map(ord, kind)))
    distributions = _q_distributions(chance)
    handles = server.fork(handle, _NUM_HANDLES)
    stream = server.open_stream()
    for round_number in range(_NUM_ROUNDS):
        items = []
        for place, branch in enumerate(handles):
            drafts, told = _drafted(kind, chance, distributions)
            seed = 1_000_000 * len(kind) + round_number * _NUM_HANDLES + place
            policy = sampled(seed, temperature=_TEMPERATURE, token_mask=_MASK, logit_bias=_BIAS)
            more = {} if told is None else {"draft_probs": told}
            items.append(
                verify_of(branch, 7, drafts=drafts, acceptance=REJECTION, policy=policy, on_stale=REWIND, **more)
            )
        stream.send(*items)
        num_results = 0
        while num_results < len(items):
            for result in stream.read().results:
                num_results += 1
                assert result.verify.kv_cache.length == handle.length + 1 + result.verify.accepted_count
                assert not result.verify.replayed
                yield list(result.verify.outputs.tokens)
    stream.rest()


@pytest.mark.parametrize("kind", ["dense", "sparse", "certain"])
def test_what_rejection_emits_has_the_distribution_of_the_model(server: RunningServer, kind: str) -> None:
    """The first token, and the one behind each first draft that held, by chi-square over a few thousand verifies."""
    handle = server.prefill().kv_cache
    first = np.zeros(len(_IDS))
    behind = {token: np.zeros(len(_IDS)) for token in _IDS}
    num_accepted = 0
    for tokens in _emitted(server, handle, kind):
        first[_IDS.index(tokens[0])] += 1
        num_accepted += len(tokens) - 1
        if len(tokens) > 1:
            behind[tokens[0]][_IDS.index(tokens[1])] += 1
    distribution = _distribution(server, handle, 7)
    assert first.sum() == _NUM_HANDLES * _NUM_ROUNDS
    assert _chi_square(first, distribution) < _critical(len(_IDS) - 1)
    assert _chi_square(first, np.full(len(_IDS), 1 / len(_IDS))) > _critical(
        len(_IDS) - 1
    )  # it can tell distributions apart
    assert 0 < num_accepted < 2 * first.sum()
    num_tested = 0
    for token, counts in behind.items():
        second = _distribution(server, handle, 7, token)
        if counts.sum() * second.min() < 5:
            continue
        num_tested += 1
        assert _chi_square(counts, second) < _critical(len(_IDS) - 1)
    assert num_tested >= (1 if kind == "certain" else 3)


def test_no_mask_of_another_is_known(server: RunningServer) -> None:
    """A fingerprint that nobody registered is unknown, in a row's mask too."""
    handle = server.prefill().kv_cache
    bits = bytes([255] * 32)
    (known,) = server.stub.RegisterTokenMask(cache_pb2.RegisterTokenMaskRequest(masks=[bits])).fingerprints
    for fingerprint, reason in ((known, None), (bytes(16), "MASK_UNKNOWN")):
        masks = [policy_pb2.TokenMask(fingerprint=fingerprint)] * 2
        message = verify_of(handle, 7, drafts=[1], acceptance=EXACT, token_masks=masks, on_stale=REWIND)
        if reason is None:
            assert verify(server, message).HasField("next_token")
            continue
        with refused() as refusals:
            verify(server, message)
        assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.NOT_FOUND, reason)
