"""Random requests through real gRPC, by unary calls, batches and streams, against a model that predicts each answer.

Every handle ever given out stays in play, those of ended sequences and of earlier runs of the server too. Replies are
dropped and requests sent again, sent twice at once, or cancelled under way; two principals work on one server; its
clock is moved and it is restarted. Code, reason, flags, length, lineage and drawn token of each answer must be those
of the model.

``FERRULE_HYPOTHESIS=long`` runs more than 10 000 steps on random seeds; a failure prints the steps that lead to it.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from ferrule.v1 import cache_pb2, types_pb2
from tests.api.harness import Refusal, read_status
from tests.chaos.figures import report
from tests.chaos.model_policies import GREEDY, Drafts, Policy, Tokens
from tests.chaos.protocol_base import (
    PRINCIPALS,
    Item,
    ask_st,
    choosing_st,
    drafts_st,
    duration,
    how_st,
    index_st,
    maybe_tokens_st,
    policy_st,
    principal_st,
    prompt_st,
    request_id_st,
    rpc_st,
    short_prompt_st,
    tokens_st,
    ttl_st,
)
from tests.chaos.protocol_batches import BatchRules
from tests.chaos.protocol_generate import GenerateRules
from tests.chaos.sequential_model import FAIL, FORK, REWIND, Answered, Ask, Forked, Issued, Refused

long_st = st.lists(st.integers(1, 2), min_size=14, max_size=20).map(tuple)
IS_LONG = os.environ.get("FERRULE_HYPOTHESIS") == "long"
MIN_STEPS = 10_000


class ProtocolMachine(BatchRules, GenerateRules):
    """One server, one model of it, and every request about sequences that the server has."""

    @initialize(prompt=short_prompt_st, policy=policy_st)
    def begin(self, prompt: Tokens, policy: Policy) -> None:
        """There is one sequence to begin with."""
        self.send("prefill", Item("prefill", None, Ask(prompt, policy)), PRINCIPALS[0], "once")

    @rule(
        principal=principal_st,
        tokens=st.one_of(short_prompt_st, short_prompt_st, prompt_st),
        policy=policy_st,
        ttl_s=ttl_st,
        request_id=request_id_st,
        how=how_st,
        kind=st.sampled_from(["prefill", "prefill", "unified"]),
        drops=st.sampled_from([True, True, False]),
    )
    def prefill(
        self,
        *,
        principal: str,
        tokens: Tokens,
        policy: Policy,
        ttl_s: float | None,
        request_id: str,
        how: str,
        kind: str,
        drops: bool,
    ) -> None:
        """Make a sequence, or hear of the one made before."""
        if self.is_full:
            return
        ask = Ask(tokens, policy, request_id=request_id, ttl_s=ttl_s, drops=drops)
        self.send(kind, Item(kind, None, ask), principal, how)

    @rule(
        prompt=short_prompt_st,
        tokens=long_st,
        policy=policy_st,
        on_stale=st.sampled_from([FAIL, FORK, REWIND]),
        how=how_st,
    )
    def outgrow_the_window(
        self, *, prompt: Tokens, tokens: Tokens, policy: Policy, on_stale: types_pb2.StalePolicy, how: str
    ) -> None:
        """Append so much to a sequence that drops that its first handle needs what is gone, then append behind that."""
        if self.is_full:
            return
        self.send("prefill", Item("prefill", None, Ask(prompt, policy, drops=True)), PRINCIPALS[0], "once")
        first = self.model.issued[-1]
        self.send("prefill", Item("prefill", first, Ask(tokens, policy)), PRINCIPALS[0], "once")
        self.send("decode", Item("decode", first, Ask((3,), policy, on_stale)), PRINCIPALS[0], how)

    @rule(principal=principal_st, index=index_st, ask=ask_st, ttl_s=ttl_st, rpc=rpc_st, how=how_st)
    def append(self, *, principal: str, index: int, ask: Ask, ttl_s: float | None, rpc: str, how: str) -> None:
        """Append behind any handle: append, query, replay, fork, rewind, or a refusal; by each call that can."""
        if self.is_full:
            return
        kind = "decode" if rpc == "stream" else rpc
        if kind in ("prefill", "unified"):
            ask = replace(ask, ttl_s=ttl_s)
        self.send(rpc, Item(kind, self.pick(index), ask), principal, how)

    @rule(
        principal=principal_st,
        index=index_st,
        ask=ask_st,
        drafts=drafts_st(),
        rpc=st.sampled_from(["verify", "verify", "stream"]),
        how=how_st,
    )
    def verify(self, *, principal: str, index: int, ask: Ask, drafts: Drafts, rpc: str, how: str) -> None:
        """Verify drafts behind any handle."""
        if self.is_full:
            return
        self.send(rpc, Item("verify", self.pick(index), replace(ask, drafts=drafts)), principal, how)

    @rule(index=index_st, policy=policy_st, rpc=rpc_st, how=how_st)
    def continue_as_drawn(self, index: int, policy: Policy, rpc: str, how: str) -> None:
        """Append what an honest client appends: the owner, one token, at the tip where there is one."""
        if self.is_full:
            return
        issued = self.newest(index)
        kind = "decode" if rpc == "stream" else rpc
        self.send(rpc, Item(kind, issued, Ask((1 + index % 2,), policy)), issued.owner.principal, how)

    @rule(index=index_st, policy=choosing_st, drafts=drafts_st(), how=how_st)
    def speculate_as_drawn(self, index: int, policy: Policy, drafts: Drafts, how: str) -> None:
        """Verify what an honest client verifies: the owner, at the tip where there is one."""
        if self.is_full:
            return
        issued = self.newest(index)
        ask = Ask((1 + index % 2,), policy, drafts=drafts)
        self.send("verify", Item("verify", issued, ask), issued.owner.principal, how)

    def newest(self, index: int) -> Issued:
        """Return a handle at the tip of some sequence, if one was ever given out."""
        issued = self.pick(index)
        newest = [each for each in self.model.issued if each.owner is issued.owner and each.tokens == each.owner.tokens]
        return newest[-1] if newest else issued

    @rule(index=index_st, tokens=maybe_tokens_st, policy=policy_st, on_stale=st.sampled_from([FAIL, REWIND]))
    def append_cancelled_and_sent_again(
        self, index: int, tokens: Tokens, policy: Policy, on_stale: types_pb2.StalePolicy
    ) -> None:
        """Hang up under way, so that nobody knows whether it happened, then send the same again."""
        self.cancel_and_send_again(Item("decode", self.pick(index), Ask(tokens, policy, on_stale)))

    @rule(index=index_st, tokens=tokens_st, seed=st.integers(0, 2), drafts=drafts_st(), is_rewind=st.booleans())
    def verify_cancelled_and_sent_again(
        self, index: int, tokens: Tokens, seed: int, drafts: Drafts, *, is_rewind: bool
    ) -> None:
        """The same with drafts: what holds is the same either way."""
        policy = Policy("seeded", seed, "masked")
        ask = Ask(tokens, policy, REWIND if is_rewind else FAIL, drafts=drafts)
        self.cancel_and_send_again(Item("verify", self.pick(index), ask))

    def cancel_and_send_again(self, item: Item) -> None:
        """Send an append, hang up at once, and send it again."""
        assert item.issued is not None
        principal = item.issued.owner.principal
        message = self.message(item, principal)
        self.future(message, principal).cancel()
        got = self.exchange(item.kind, message, principal)
        self.predict(item, principal, got)
        expected = self.predict(item, principal, got)
        if isinstance(expected, Answered):
            expected.replayed = None
        self.check(expected, got, item.ask.drafts)
        self.steps["cancelled"] += 1

    @rule(
        principal=principal_st,
        index=index_st,
        cut=st.sampled_from([0, 0, 1, 3]),
        num=st.integers(1, 3),
        ttl_s=ttl_st,
        request_id=request_id_st,
        is_lost=st.booleans(),
    )
    def fork(
        self, *, principal: str, index: int, cut: int, num: int, ttl_s: float | None, request_id: str, is_lost: bool
    ) -> None:
        """Branch, or hear of the branches made before."""
        if self.is_full:
            return
        issued = self.pick(index)
        length = max(1, len(issued.tokens) - cut)
        request = cache_pb2.ForkCacheRequest(
            kv_cache=issued.handle, length=length, count=num, ttl=duration(ttl_s), request_id=request_id
        )
        for is_checked in (not is_lost, True) if is_lost else (True,):
            expected = self.model.fork(principal, issued, length, num, ttl_s=ttl_s, request_id=request_id)
            got = self.attempt(self.server.stub.ForkCache, request, principal)
            if is_checked:
                self.check_fork(expected, got)
        self.steps["fork"] += 1

    def check_fork(self, expected: Forked | Refused, got: Any) -> None:  # a ForkCacheResponse or a Refusal
        """Compare the answer to a fork with the prediction, and take its handles."""
        if isinstance(expected, Refused) or isinstance(got, Refusal):
            self.check_refusal(expected, got)
            return
        assert (got.replayed, got.ttl.ToNanoseconds() / 1e9) == (expected.replayed, expected.ttl_s)
        for handle, branch in zip(got.kv_caches, expected.branches, strict=True):
            self.take(handle, branch, expected.tokens)
        self.answers["forked again" if got.replayed else "forked"] += 1

    @rule(principal=principal_st, index=index_st, cut=st.integers(-1, 4), is_lost=st.booleans())
    def truncate(self, principal: str, index: int, cut: int, is_lost: bool) -> None:
        """Shorten a sequence."""
        issued = self.pick(index)
        new_length = max(0, len(issued.tokens) - cut)
        request = cache_pb2.TruncateKvRequest(kv_cache=issued.handle, new_length=new_length)
        for is_checked in (False, True) if is_lost else (True,):
            expected = self.model.truncate(principal, issued, new_length)
            got = self.attempt(self.server.stub.TruncateKv, request, principal)
            if not is_checked:
                continue
            if isinstance(expected, Refused) or isinstance(got, Refusal):
                self.check_refusal(expected, got)
            else:
                self.take(got.kv_cache, issued.owner, expected)
                self.answers["truncated"] += 1
        self.steps["truncate"] += 1

    @rule(principal=principal_st, index=index_st, is_lost=st.booleans())
    def release(self, principal: str, index: int, is_lost: bool) -> None:
        """End a sequence; whoever cannot is told nothing."""
        issued = self.pick(index)
        request = cache_pb2.ReleaseCacheRequest(kv_caches=[issued.handle])
        for is_checked in (False, True) if is_lost else (True,):
            expected = self.model.release(principal, issued)
            got = self.call(self.server.stub.ReleaseCache, request, principal)
            assert not is_checked or got.results[0].released == expected
        self.steps["release"] += 1

    @rule(principal=principal_st, indices=st.lists(index_st, max_size=4), ttl_s=ttl_st)
    def keep_alive(self, principal: str, indices: list[int], ttl_s: float | None) -> None:
        """Renew leases, many at once."""
        chosen = [self.pick(index) for index in indices]
        request = cache_pb2.KeepAliveRequest(kv_caches=[each.handle for each in chosen], ttl=duration(ttl_s))
        results = self.call(self.server.stub.KeepAlive, request, principal).results
        for issued, result in zip(chosen, results, strict=True):
            expected = self.model.touch(principal, issued, ttl_s)
            if result.HasField("error") or expected is not None:
                self.check_refusal(expected, read_status(result.error))
            else:
                assert result.lease.ttl.ToNanoseconds() / 1e9 == issued.owner.ttl_s
        self.steps["keep alive"] += 1

    @rule(principal=principal_st, index=index_st)
    def info(self, principal: str, index: int) -> None:
        """Read a sequence back."""
        issued = self.pick(index)
        request = cache_pb2.GetCacheInfoRequest(kv_cache=issued.handle, include_token_ids=True)
        expected = self.model.touch(principal, issued)
        got = self.attempt(self.server.stub.GetCacheInfo, request, principal)
        if expected is not None or isinstance(got, Refusal):
            self.check_refusal(expected, got)
        else:
            assert tuple(got.info.token_ids) == issued.owner.tokens
            self.take(got.info.kv_cache, issued.owner, issued.owner.tokens)
        self.steps["info"] += 1

    # No sum of these is the length of a lease: what ends just now would be judged by the length of a call.
    @rule(seconds=st.sampled_from([0.7137, 0.7137, 3.1391, 3.1391, 6.3313, 31.9071]))
    def wait(self, seconds: float) -> None:
        """Let leases end."""
        self.pass_time(seconds)
        self.steps["wait"] += 1

    @rule(is_more=st.sampled_from([False, False, False, True]))
    def outlive_tombstones(self, is_more: bool) -> None:
        """Let so much time pass that who expired long ago is forgotten, sometimes."""
        if not any(each.died == "expired" for each in self.model.sequences):
            return
        self.pass_time(601.3317 if is_more else 31.9071)
        self.steps["tombstones"] += 1

    @precondition(lambda self: self.num_since_restart > 25)
    @rule()
    def restart(self) -> None:
        """Stop the server and start another run of it."""
        self.stop()
        self.model.restart()
        self.start()
        self.num_since_restart = 0
        self.steps["restart"] += 1
        self.send("prefill", Item("prefill", None, Ask((1, 2, 1), Policy(GREEDY))), PRINCIPALS[0], "once")

    @invariant()
    def nothing_was_made_that_nobody_asked_for(self) -> None:
        """There are as many sequences as there should be, once calls that were hung up on have ended: none lost."""
        self.num_since_restart += 1
        deadline = time.monotonic() + 5
        while self.server.engine.snapshot().num_sequences != len(self.model.live):
            assert time.monotonic() < deadline, "orphans, or sequences that were lost"
            time.sleep(0.001)


def _profile() -> dict[str, Any]:
    """Return the settings: the same runs each time, or many new ones where asked for."""
    if IS_LONG:
        return {"max_examples": 1000, "stateful_step_count": 50, "derandomize": False}
    return {"max_examples": 16, "stateful_step_count": 40, "derandomize": True}


EVERY_ANSWER = {
    "answered",
    "replayed",
    "forked",
    "forked again",
    "truncated",
    "HANDLE_UNKNOWN",
    "HANDLE_EXPIRED",
    "EPOCH_CHANGED",
    "HANDLE_STALE",
    "TRUNCATE_BEYOND",
    "CONTEXT_EXCEEDED",
    "KV_GIVEN_BACK",
    "REQUEST_ID_REUSED",
    "INVALID_FIELD",
    "drafts held",
    "no draft held",
    "prefix hit",
    "generated",
    "generated in branches",
    "generation resumed",
    "generation failed",
    "context full",
    "forwarded",
}
"""What a long run must have met, or it has tested less than it says."""


@pytest.mark.timeout(1800)
def test_every_answer_is_the_predicted_one() -> None:
    """And in a long run there are ten thousand of them, of every kind."""
    profile = settings(
        **_profile(),
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    started = time.monotonic()
    run_state_machine_as_test(ProtocolMachine, settings=profile)
    steps, answers = ProtocolMachine.steps, ProtocolMachine.answers
    report(
        "protocol state machine",
        steps=steps.total(),
        mismatches=0,
        seconds=round(time.monotonic() - started, 1),
        steps_by_kind=dict(steps),
        answers=dict(answers),
    )
    if IS_LONG:
        assert steps.total() >= MIN_STEPS
        assert set(answers) >= EVERY_ANSWER
