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
from tests.api.harness import EPOCH, FULL, GREEDY, INSTANCE, PROMPT, RunningServer, decode_item, read_status, refused

EXACT, REJECTION = executor_pb2.ACCEPTANCE_RULE_EXACT, executor_pb2.ACCEPTANCE_RULE_REJECTION
NONE = executor_pb2.ACCEPTANCE_RULE_NONE
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


def test_without_a_rule_all_drafts_are_appended_and_all_rows_come_back(server: RunningServer) -> None:
    """The rows are those of decoding one by one; the client goes on from the row handle it likes."""
    handle = server.prefill().kv_cache
    branch = server.fork(handle)[0]
    output = verify(server, verify_of(handle, 7, 8, drafts=[9, 10], policy=FULL, return_row_handles=True))
    rows, lineages = [], []
    for tokens in ((7, 8), (9,), (10,)):
        decoded = server.decode(branch, *tokens, policy=FULL)
        branch = decoded.kv_cache
        rows.append(decoded.outputs.logits.data)
        lineages.append(branch.lineage)
    assert output.outputs.num_rows == 3
    assert output.outputs.logits.data == b"".join(rows)
    assert (output.accepted_count, output.HasField("next_token"), list(output.accepted_indices)) == (0, False, [])
    assert [each.lineage for each in output.row_handles] == lineages
    assert output.row_handles[-1] == output.kv_cache
    assert output.kv_cache.length == handle.length + 4
    assert output.timing.run_ns > 0
    again = server.decode(output.row_handles[1], 33, on_stale=REWIND).kv_cache
    assert (again.cache_id, again.length) == (handle.cache_id, handle.length + 4)


def test_greedy_drafts_hold_up_to_the_first_that_the_model_would_not_choose(server: RunningServer) -> None:
    """What comes back is what a decode loop gives; what was rejected leaves no token and no block."""
    handle = server.prefill().kv_cache
    loop = _loop(server, handle, 7, 5)
    for num_right in range(5):
        branch = server.fork(handle)[0]
        wrong = [(loop[num_right] + 1) % 256] * (4 - num_right)
        num_free = server.free_blocks
        output = verify(
            server, verify_of(branch, 7, drafts=loop[:num_right] + wrong, acceptance=EXACT, return_row_handles=True)
        )
        assert output.accepted_count == num_right
        assert list(output.accepted_indices) == list(range(1, num_right + 1))
        assert list(output.outputs.tokens) == loop[: num_right + 1]
        assert output.next_token == loop[num_right]
        assert output.outputs.num_rows == num_right + 1
        info = server.info(branch, include_token_ids=True)
        assert list(info.token_ids) == [*PROMPT, 7, *loop[:num_right]]
        assert info.kv_cache == output.kv_cache == output.row_handles[-1]
        assert len(output.row_handles) == num_right + 1
        assert num_free - server.free_blocks <= 1  # the copy of the block that branch and prompt shared
        following = server.decode(output.kv_cache, output.next_token, policy=FULL)
        plain = server.fork(handle)[0]
        assert server.decode(plain, 7, *loop[: num_right + 1], policy=FULL).outputs == following.outputs


def test_sampled_drafts_are_exactly_what_decoding_with_the_seed_gives(server: RunningServer) -> None:
    """Token for token, whatever was drafted."""
    handle = server.prefill().kv_cache
    for seed in range(12):
        policy = sampled(seed, temperature=0.8, top_k=5)
        loop = _loop(server, handle, 7, 4, policy)
        drafts = loop[:3] if seed % 2 else [loop[0], (loop[1] + 1) % 256, 3]
        output = verify(server, verify_of(server.fork(handle)[0], 7, drafts=drafts, acceptance=EXACT, policy=policy))
        assert output.accepted_count == (3 if seed % 2 else 1)
        assert list(output.outputs.tokens) == loop[: output.accepted_count + 1]
        assert output.outputs.seed == seed


def test_a_verify_without_drafts_is_a_decode(server: RunningServer) -> None:
    """With a rule its token is the next one too."""
    handle = server.prefill().kv_cache
    (token,) = _loop(server, handle, 7, 1)
    output = verify(server, verify_of(handle, 7, acceptance=EXACT))
    assert (output.next_token, output.accepted_count, list(output.outputs.tokens)) == (token, 0, [token])
    assert output.kv_cache.length == handle.length + 1


@pytest.mark.parametrize("rule", [NONE, EXACT, REJECTION])
def test_a_repeated_verify_is_answered_from_its_record(server: RunningServer, rule: Any) -> None:
    """The same drafts hold, the same token follows, and nothing is appended twice."""
    handle = server.prefill().kv_cache
    message = verify_of(handle, 7, drafts=[8, 9], acceptance=rule, policy=sampled(3, temperature=3.0))
    first, again = verify(server, message), verify(server, message)
    assert again.replayed
    assert not first.replayed
    assert (again.kv_cache, again.accepted_count, again.next_token) == (
        first.kv_cache,
        first.accepted_count,
        first.next_token,
    )
    assert again.outputs == first.outputs
    assert server.info(handle).kv_cache == first.kv_cache


def test_another_verify_behind_the_tip_is_stale(server: RunningServer) -> None:
    """Other drafts are another question; going back is asked for."""
    handle = server.prefill().kv_cache
    verify(server, verify_of(handle, 7, drafts=[8, 9], acceptance=EXACT))
    with refused() as refusals:
        verify(server, verify_of(handle, 7, drafts=[8, 10], acceptance=EXACT))
    assert refusals[0].reason == "HANDLE_STALE"
    output = verify(server, verify_of(handle, 7, drafts=[8, 10], acceptance=EXACT, on_stale=REWIND))
    assert output.kv_cache.cache_id == handle.cache_id


def test_masks_penalties_and_bias_apply_inside_a_verify(server: RunningServer) -> None:
    """Row by row as in a decode loop; each row may have a mask of its own."""
    handle = server.prefill().kv_cache
    shaped = policy_pb2.LogitsReturnPolicy(
        sample=policy_pb2.Sample(
            temperature=0.0,
            repetition_penalty=3.0,
            presence_penalty=1.0,
            logit_bias={200: 0.5},
            token_mask=policy_pb2.TokenMask(allowed_ids=policy_pb2.TokenIdList(token_ids=[*range(0, 256, 3)])),
        )
    )
    loop = _loop(server, handle, 7, 4, shaped)
    message = verify_of(server.fork(handle)[0], 7, drafts=loop[:3], acceptance=EXACT, policy=shaped)
    assert list(verify(server, message).outputs.tokens) == loop
    only = [policy_pb2.TokenMask(allowed_ids=policy_pb2.TokenIdList(token_ids=[token])) for token in (50, 51, 52)]
    output = verify(server, verify_of(handle, 7, drafts=[50, 51], acceptance=EXACT, token_masks=only))
    assert (output.accepted_count, output.next_token) == (2, 52)


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


def test_a_bad_verify_says_what_is_wrong(server: RunningServer) -> None:
    """The path of the field, and nothing appended."""
    handle = server.prefill().kv_cache
    drawn, probs = sampled(1), executor_pb2.DraftProbs
    flat = np.full(256, 1 / 256, "<f4").tobytes()
    row = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[1, 256], data=flat)
    nothing = policy_pb2.TokenMask(inline_bits=bytes(32))
    sparse = executor_pb2.SparseProbs
    for message, field in (
        (verify_of(handle), "input.input_ids"),
        (executor_pb2.VerifyInput(input_ids=[7]), "input.kv_cache"),
        (verify_of(handle, 300), "input.input_ids[0]"),
        (verify_of(handle, 7, drafts=[1, 300]), "input.draft_ids[1]"),
        (verify_of(handle, 7, drafts=[1] * 1000), "input.draft_ids"),
        (verify_of(handle, 7, drafts=[1], parents=[0, 1]), "input.parents"),
        (verify_of(handle, 7, drafts=[1], acceptance=99), "input.acceptance"),
        (verify_of(handle, 7, drafts=[1], acceptance=EXACT, policy=FULL), "input.logits_policy"),
        (verify_of(handle, 7, drafts=[1], acceptance=REJECTION), "input.logits_policy"),
        (verify_of(handle, 7, drafts=[1], draft_probs=probs(dense=row)), "input.draft_probs"),
        (
            verify_of(handle, 7, drafts=[1, 2], acceptance=REJECTION, policy=drawn, draft_probs=probs(dense=row)),
            "input.draft_probs.dense.shape",
        ),
        (
            verify_of(
                handle,
                7,
                drafts=[1],
                acceptance=REJECTION,
                policy=drawn,
                draft_probs=probs(sparse=sparse(row_sizes=[2], token_ids=[1], probs=[1.0])),
            ),
            "input.draft_probs.sparse",
        ),
        (
            verify_of(handle, 7, drafts=[1], token_masks=[nothing]),
            "input.token_masks",
        ),
    ):
        with refused() as refusals:
            verify(server, message)
        assert refusals[0].code is grpc.StatusCode.INVALID_ARGUMENT
        assert refusals[0].fields[0].startswith(field), refusals[0]
    with refused() as refusals:
        verify(server, verify_of(handle, 7, drafts=[1, 2], parents=[0, 0]))
    assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNIMPLEMENTED, "FEATURE_UNSUPPORTED")
    assert verify(server, verify_of(handle, 7, drafts=[1, 2], parents=[0, 1])).kv_cache.length == handle.length + 3


def test_handles_that_name_nothing_say_so(server: RunningServer) -> None:
    """As every append does."""
    for cache_id, reason in (
        (f"{INSTANCE}.{EPOCH}.{'A' * 22}", "HANDLE_UNKNOWN"),
        (f"{INSTANCE}.0123456789ab.{'A' * 22}", "EPOCH_CHANGED"),
        (f"elsewhere.{EPOCH}.{'A' * 22}", "WRONG_INSTANCE"),
    ):
        with refused() as refusals:
            verify(server, verify_of(types_pb2.KvCacheHandle(cache_id=cache_id, length=3, lineage=bytes(16)), 7))
        assert refusals[0].reason == reason
    handle = server.prefill((1,) * 510).kv_cache
    with refused() as refusals:
        verify(server, verify_of(handle, 7, drafts=[1, 2]))
    assert refusals[0].reason == "CONTEXT_EXCEEDED"


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
