"""Durable sequences: what a server answers after a crash, as before it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.appends import creations, records
from ferrule_server.engine.durable import opening
from ferrule_server.engine.jobs import (
    Acceptance,
    AppendJob,
    AppendResult,
    CacheInfo,
    Drafts,
    ForkJob,
    ForkResult,
    OutputRequest,
    SlotsWanted,
    TruncateJob,
    TruncateResult,
)
from ferrule_server.engine.masks import MaskRegistry, make_mask
from ferrule_server.errors import (
    BlocksExhausted,
    EpochChanged,
    HandleExpired,
    HandleStale,
    HandleUnknown,
    RequestIdReused,
    Restoring,
)
from ferrule_server.executor.base import OutputSpec, RowOutput, SampleSpec, Shaping
from ferrule_server.kv.handle import Handle, StalePolicy
from tests.engine.conftest import Servers
from tests.engine.harness import GREEDY, NOTHING, Harness, append, wait_until
from tests.engine.streams import generate
from tests.fakes import FakeExecutor, fake_next_token

VOCAB = 32
UNSEEDED = OutputRequest(OutputSpec(sample=SampleSpec(), logprobs=True), is_seeded=False)
LOGITS = OutputRequest(OutputSpec(greedy=True, full_logits=True))


def durable(*token_ids: int, output: OutputRequest = GREEDY, request_id: str = "", **options: Any) -> AppendJob:
    """A prefill whose sequence survives."""
    return append(None, *token_ids, output=output, request_id=request_id, is_durable=True, **options)


def info(server: Harness, handle: Handle) -> CacheInfo:
    """Describe a sequence."""
    outcome = server.submit(host_calls.describe("me", handle, with_token_ids=True)).outcome()
    if not isinstance(outcome, CacheInfo):
        raise outcome  # type: ignore[misc]
    return outcome


def as_replied(row: RowOutput) -> RowOutput:
    """Return a row with its log-probabilities as replies have them."""
    assert row.model_logprob is not None
    assert row.sampled_logprob is not None
    singles = np.array([row.model_logprob, row.sampled_logprob], np.float32).tolist()
    return replace(row, model_logprob=singles[0], sampled_logprob=singles[1])


def decode(server: Harness, handle: Handle, count: int) -> tuple[Handle, list[int]]:
    """Append the best token again and again."""
    tokens: list[int] = []
    result = server.decode(handle)
    for _ in range(count):
        token = result.rows[0].token
        assert token is not None
        tokens.append(token)
        result = server.decode(result.handle, token)
    return result.handle, tokens


def plain(prompt: list[int], count: int) -> list[int]:
    """Return the best tokens after a prompt, without an engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def test_a_handle_continues_after_a_crash(servers: Servers) -> None:
    """Same handle, same tokens as without the crash; the price is visible before, and paid once."""
    prompt = [1, 2, 3, 4, 5, 6, 7]
    handle, first = decode(servers.start(), servers.now.submit(durable(*prompt)).result().handle, 5)  # type: ignore[union-attr]
    server = servers.crash()
    before = info(server, handle)
    assert (before.tokens_to_recompute, before.num_blocks, before.is_durable) == (12, 0, True)
    after, rest = decode(server, handle, 9)
    assert first + rest == plain(prompt, 14)
    assert info(server, after).tokens_to_recompute == 0
    assert server.engine.counters.restored_tokens == 12
    figures = server.engine.durability()
    assert figures is not None
    assert (figures.num_restored, figures.num_sequences, figures.num_cold) == (1, 1, 0)


def test_a_sequence_of_level_none_is_gone(servers: Servers) -> None:
    """It has another epoch in its name, and its owner is told so."""
    server = servers.start()
    handle = server.prefill(1, 2, 3).handle
    kept = server.submit(durable(1, 2, 3)).result().handle
    server = servers.crash()
    server.store.registry._epoch = "e2"
    with pytest.raises(EpochChanged):
        info(server, handle)
    assert info(server, kept).length == 3


def test_a_retry_of_the_last_append_is_answered_from_the_journal(servers: Servers) -> None:
    """The token, its log-probability and the seed are those that were answered, and nothing runs."""
    server = servers.start()
    start = server.submit(durable(1, 2, 3)).result().handle
    answered = server.decode(start, 4, output=UNSEEDED)
    server = servers.crash()
    again = server.decode(start, 4, output=UNSEEDED)
    assert again.replayed
    assert not again.recomputed
    assert (again.handle, again.seed) == (answered.handle, answered.seed)
    assert again.rows == tuple(map(as_replied, answered.rows))
    assert info(server, start).tokens_to_recompute == 4
    assert not server.executor.batches


def test_arrays_of_the_last_answer_are_computed_again(servers: Servers) -> None:
    """They are not in the journal; the tokens of their rows are."""
    server = servers.start()
    start = server.submit(durable(1, 2, 3)).result().handle
    answered = server.decode(start, 4, output=LOGITS)
    server = servers.crash()
    again = server.decode(start, 4, output=LOGITS)
    assert again.replayed
    assert again.recomputed
    assert again.rows[0].token == answered.rows[0].token
    assert again.rows[0].logits is not None
    assert answered.rows[0].logits is not None
    assert (again.rows[0].logits == answered.rows[0].logits).all()


def test_the_answer_that_was_given_wins_over_a_recomputed_one(servers: Servers) -> None:
    """If the executor rounds otherwise after the restart, the token that was answered stays."""
    server = servers.start()
    start = server.submit(durable(1, 2, 3)).result().handle
    answered = server.decode(start, 4, output=LOGITS)
    server = servers.crash()
    run = server.executor.run

    def other(*args: object, **kwargs: object) -> object:
        result = run(*args, **kwargs)  # type: ignore[arg-type]
        for row in result.rows:
            row.token = None if row.token is None else (row.token + 1) % VOCAB
        return result

    server.executor.run = other  # type: ignore[method-assign, assignment]
    again = server.decode(start, 4, output=LOGITS)
    assert again.recomputed
    assert again.rows[0].token == answered.rows[0].token


def test_creations_answer_with_the_same_handles(servers: Servers) -> None:
    """A prefill and a fork are repeated with their request_ids; other content is refused."""
    server = servers.start()
    made = server.submit(durable(1, 2, 3, request_id="a")).result().handle
    forked = server.answer(ForkResult, ForkJob("me", made, 3, 3, request_id="b"))
    server.release(forked.handles[1])
    server = servers.crash()
    assert server.submit(durable(1, 2, 3, request_id="a")).result().handle == made
    again = server.answer(ForkResult, ForkJob("me", made, 3, 3, request_id="b"))
    assert again.handles == forked.handles
    assert again.replayed
    assert isinstance(server.submit(durable(1, 2, 4, request_id="a")).error(), RequestIdReused)
    assert isinstance(server.submit(append(None, 1, 2, 3, request_id="a")).error(), RequestIdReused)
    assert len(server.store.registry) == 3


def test_a_creation_whose_sequences_have_ended_creates_nothing(servers: Servers) -> None:
    """A late retry must not bring a released sequence back."""
    server = servers.start()
    made = server.submit(durable(1, 2, 3, request_id="a")).result().handle
    server.release(made)
    server = servers.crash()
    assert isinstance(server.submit(durable(1, 2, 3, request_id="a")).error(), HandleUnknown)


def test_a_tombstone_survives(servers: Servers) -> None:
    """The owner of an expired sequence still hears that it expired, with the first answer that says so."""
    server = servers.start()
    now = server.store.clock()
    server.clock = lambda: now
    handle = server.submit(durable(1, 2, 3, ttl_s=5.0)).result().handle
    server.clock = lambda: now + 6
    with pytest.raises(HandleExpired):
        info(server, handle)
    server = servers.crash()
    with pytest.raises(HandleExpired):
        info(server, handle)


def test_truncates_and_their_answers_survive(servers: Servers) -> None:
    """An equal truncate succeeds with the answer of the first one, and the tail is gone."""
    server = servers.start()
    long = server.submit(durable(*range(1, 20))).result().handle
    cut = server.answer(TruncateResult, TruncateJob("me", long, 6))
    server = servers.crash()
    assert server.submit(TruncateJob("me", long, 6)).outcome() == cut
    assert info(server, long).token_ids == tuple(range(1, 7))
    assert isinstance(server.submit(append(long, 5)).error(), HandleStale)


def test_forks_of_a_cold_sequence_are_cold_and_share_the_trunk(servers: Servers) -> None:
    """The common blocks are computed once, whichever branch is used first; without a request_id they survive too."""
    server = servers.start()
    prompt = [*range(1, 17)]
    trunk = server.submit(durable(*prompt)).result().handle
    server = servers.crash()
    forked = server.answer(ForkResult, ForkJob("me", trunk, 16, 3))
    server = servers.crash()
    assert info(server, forked.handles[0]).tokens_to_recompute == 16
    for handle in forked.handles:
        assert decode(server, handle, 3)[1] == plain(prompt, 3)
    assert server.engine.counters.restored_tokens < 2 * 16


def test_a_cold_sequence_is_truncated_and_rewound(servers: Servers) -> None:
    """Both work on tokens alone; what follows is computed from what is left."""
    server = servers.start()
    prompt = [*range(1, 13)]
    handle = server.submit(durable(*prompt)).result().handle
    other = server.submit(durable(*prompt)).result().handle
    server = servers.crash()
    cut = server.answer(TruncateResult, TruncateJob("me", handle, 5))
    assert decode(server, cut.handle, 2)[1] == plain(prompt[:5], 2)
    early = Handle(other.cache_id, 4, server.store.registry.sequences[other.cache_id].chain.at(4))
    result = server.submit(append(early, 9, on_stale=StalePolicy.REWIND)).result()
    assert result.rows[0].token == fake_next_token([1, 2, 3, 4, 9], VOCAB)


def test_a_verify_is_replayed(servers: Servers) -> None:
    """With the decision that was made, its rows, and row handles if the retry asks for them."""
    server = servers.start()
    start = server.submit(durable(1, 2, 3)).result().handle
    good = plain([1, 2, 3, 4], 2)
    drafts = Drafts(3, Acceptance.EXACT, wants_row_handles=True)
    job = AppendJob("me", (4, *good, (good[1] + 1) % VOCAB), start, GREEDY, drafts=drafts)
    answered = server.submit(job).result()
    server = servers.crash()
    again = server.submit(replace(job, is_cancelled=False)).result()
    assert again.replayed
    assert (again.handle, again.rows, again.verified) == (answered.handle, answered.rows, answered.verified)
    assert not server.executor.batches


def test_reserved_room_is_taken_with_the_blocks(servers: Servers) -> None:
    """It is part of what a cold sequence needs, and a request for more of it has the sequence computed first."""
    server = servers.start()
    handle = server.submit(durable(1, 2, 3)).result().handle
    server.submit(host_calls.reserve("me", (SlotsWanted(handle, 30),))).outcome()
    server = servers.crash()
    assert info(server, handle).reserved_length == 30
    error = server.submit(host_calls.reserve("me", (SlotsWanted(handle, 40),))).error()
    assert isinstance(error, Restoring)
    server.decode(handle, 4)
    assert info(server, handle).num_blocks == server.store.pool.num_blocks_for(30)


def test_a_smaller_pool_refuses_and_loses_nothing(servers: Servers) -> None:
    """A sequence that does not fit now is there when others are gone."""
    server = servers.start(executor=FakeExecutor(num_blocks=32))
    handles = [server.submit(durable(*[seed] * 20)).result().handle for seed in (1, 2, 3)]
    server = servers.crash(executor=FakeExecutor(num_blocks=14))
    server.decode(handles[0], 4)
    server.decode(handles[1], 4)
    assert isinstance(server.submit(append(handles[2], 4)).error(), BlocksExhausted)
    server.release(handles[0])
    assert server.decode(handles[2], 4).rows[0].token == fake_next_token([3] * 20 + [4], VOCAB)


def test_above_the_bound_the_answer_is_restoring(servers: Servers) -> None:
    """The computation goes on, and the retry is served."""
    server = servers.start()
    handle = server.submit(durable(*range(1, 31))).result().handle
    server = servers.crash(restore_wait_tokens=8)
    error = server.submit(append(handle, 4)).error()
    assert isinstance(error, Restoring)
    assert error.metadata["tokens_to_recompute"] == "30"
    assert error.retry_after_s
    while isinstance(outcome := server.submit(append(handle, 4)).outcome(), Restoring):
        pass
    assert isinstance(outcome, AppendResult)
    assert not outcome.replayed


def test_jobs_on_a_cold_sequence_keep_their_order(servers: Servers) -> None:
    """An append, a fork and a truncate that arrive together are judged one after the other, after the computation."""
    server = servers.start()
    handle = server.submit(durable(1, 2, 3)).result().handle
    server = servers.crash()
    appended, forked, cut = server.submit_all(
        append(handle, 4), ForkJob("me", handle, 3, 1), TruncateJob("me", handle, 2)
    )
    assert appended.result().handle.length == 4
    assert isinstance(forked.outcome(), ForkResult)
    assert isinstance(cut.outcome(), TruncateResult)
    assert info(server, handle).length == 2


def test_a_release_ends_the_computation(servers: Servers) -> None:
    """What waits for it is told that the handle is gone."""
    server = servers.start()
    handle = server.submit(durable(*range(1, 31))).result().handle
    server = servers.crash(max_step_rows=2)
    waiting = server.submit(append(handle, 4))
    server.release(handle)
    assert isinstance(waiting.error(), HandleUnknown)


def test_leases_begin_anew_with_their_duration(servers: Servers) -> None:
    """The duration is what the owner set last; after a restart it lasts two minutes at least."""
    server = servers.start()
    handle = server.submit(durable(1, 2, 3, ttl_s=30.0)).result().handle
    server.submit(host_calls.keep_alive("me", (handle,), 45.0)).outcome()
    server = servers.crash()
    assert server.store.next_expiry() > 100  # type: ignore[operator]
    assert info(server, handle).lease.ttl_s == 45.0


def test_nothing_is_written_twice_over_many_restarts(servers: Servers) -> None:
    """Each start writes what is live into a segment of its own and deletes the ones before."""
    servers.start()
    prompt, tokens = [1, 2, 3], []
    assert servers.now is not None
    handle = servers.now.submit(durable(*prompt, output=NOTHING)).result().handle
    for _ in range(6):
        handle, more = decode(servers.now, handle, 3)
        tokens += more
        servers.crash()
        wait_until(lambda: len(list((servers._path / str(servers._count)).glob("*.segment"))) == 1)
    assert tokens == plain(prompt, 18)


def test_masks_survive(servers: Servers) -> None:
    """They are known by their fingerprints after any number of restarts."""
    server = servers.start()
    mask = make_mask(np.array([255, 1, 0, 0], np.uint8), VOCAB)
    assert mask is not None
    server.submit(host_calls.keep_masks("me", (mask,))).outcome()
    servers.crash()
    server = servers.crash()
    masks = MaskRegistry()
    masks.restore(server.engine.restored_masks)
    assert masks.find("me", mask.fingerprint).bits.tolist() == mask.bits.tolist()
    masks.check_integrity()


def test_after_an_upgrade_that_changes_requests_retries_are_still_answered(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of another version say nothing; tokens and request_ids do."""
    server = servers.start()
    made = server.submit(durable(1, 2, 3, request_id="a")).result().handle
    answered = server.decode(made, 4, output=UNSEEDED)
    good = plain([1, 2, 3, 4, 5], 1)
    verify = AppendJob("me", (5, *good), answered.handle, GREEDY, drafts=Drafts(1, Acceptance.EXACT))
    verified = server.submit(verify).result()
    monkeypatch.setattr(opening, "DIGESTS", "2")
    for module in (records, creations):
        monkeypatch.setattr(module, "hashlib", _OtherDigests)
    for _ in range(2):
        server = servers.crash()
        assert server.submit(durable(1, 2, 3, request_id="a")).result().handle == made
        again = server.submit(replace(verify, is_cancelled=False)).result()
        assert (again.replayed, again.recomputed, again.verified) == (True, False, verified.verified)


class _OtherDigests:
    """Other digests than those that were recorded."""

    @staticmethod
    def blake2b(data: bytes = b"", *, digest_size: int) -> object:
        """As hashlib does, of something else."""
        return hashlib.blake2b(b"another version" + data, digest_size=digest_size)


def test_the_version_of_digests_follows_the_fields_of_requests() -> None:
    """If this fails, a field of a request has changed: give DIGESTS another value, and these digests too."""
    asked = OutputRequest(OutputSpec(sample=SampleSpec(seed=7), logprobs=True, shaping=Shaping(repetition_penalty=1.5)))
    drafts = Drafts(2, Acceptance.EXACT)
    job = append(None, 1, 2, 3, output=asked)
    assert records.DIGESTS == "1"
    assert records.digest_of(asked).hex() == "d69c2035f888d5f4bf738d426f23ecc0"
    assert records.digest_of(drafts).hex() == "befd8c609151a54a1c3dd62cd5c7957e"
    assert creations._content_of(job).hex() == "dd913005c4df420ed0479ab8e7c70216"
    assert (
        creations._content_of(ForkJob("me", Handle("c", 3, b"l" * 16), 3, 2)).hex()
        == "d312defa00f88ef8c142b6fbaa72dd58"
    )
    assert creations.loop_of(generate(None, 1, 2, output=asked)).hex() == "15d67b7d887cef827c157e17ad632186"
