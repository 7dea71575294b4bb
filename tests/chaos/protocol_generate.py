"""Generate and Forward: whole, cut short, gone on with, sent again and sent twice at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import hypothesis.strategies as st
from hypothesis.stateful import rule

from ferrule.v1 import cache_pb2, executor_pb2, types_pb2
from tests.api.harness import Refusal, read_status, refusal_of
from tests.chaos.model_generate import CONTEXT_FULL, Branch, Generated, Loop, generate
from tests.chaos.model_policies import GREEDY, SEEDED, UNSEEDED, Policy, Tokens, drawn_token
from tests.chaos.protocol_base import (
    WINDOW,
    ProtocolBase,
    as_principal,
    cache_options,
    choosing_st,
    index_st,
    maybe_tokens_st,
    principal_st,
    request_id_st,
    short_prompt_st,
    stale_st,
    tokens_st,
    ttl_st,
)
from tests.chaos.sequential_model import FAIL, FORK, REWIND, Ask, Issued, Refused

loop_st = st.builds(
    Loop,
    st.integers(1, 12),
    st.sampled_from([1, 1, 1, 2, 3]),
    st.sampled_from([(), (), (), (2,), (3,)]),
    st.sampled_from([(), (), ((1, 2, 1),), ((2, 2), (1, 1, 1))]),
)


@dataclass
class Heard:
    """What has come of one branch.

    Attributes:
        tokens: Drawn. handles: those of its frames, each with the number of tokens there were then.
        replayed: What the first frame says. seed: what it tells.
    """

    tokens: list[int] = field(default_factory=list)
    handles: list[tuple[int, types_pb2.KvCacheHandle]] = field(default_factory=list)
    seed: int | None = None
    replayed: bool = False
    finish: int = 0
    error: Refusal | None = None
    num_cached: int = 0

    def take(self, output: executor_pb2.GenerateOutput) -> None:
        """Add one output."""
        assert not self.finish, "it goes on after its end"
        is_first = not self.tokens
        assert is_first or not (output.outputs.HasField("seed") or output.replayed or output.cached_tokens)
        if is_first:
            self.replayed, self.num_cached = output.replayed, output.cached_tokens
            self.seed = output.outputs.seed if output.outputs.HasField("seed") else None
        self.tokens += output.outputs.tokens
        assert output.HasField("resume_from") == bool(output.outputs.tokens)
        if output.outputs.tokens:
            self.handles.append((len(self.tokens), output.resume_from))
        self.finish = output.finish_reason
        self.error = read_status(output.error) if output.HasField("error") else None


Answer = dict[int, Heard] | Refusal


def hear(
    call: Iterator[executor_pb2.GenerateResponse],
    request_id: str,
    is_enough: Callable[[dict[int, Heard]], bool] = lambda _: False,
) -> Answer:
    """Read a Generate to its end, or until it is enough."""
    heard: dict[int, Heard] = {}
    try:
        for frame in call:
            assert frame.request_id == request_id
            for output in frame.outputs:
                heard.setdefault(output.index, Heard()).take(output)
            if is_enough(heard):
                break
    except grpc.RpcError as error:
        if heard:
            raise
        return refusal_of(error)
    return heard


class GenerateRules(ProtocolBase):
    """Decode loops on the server, and rows without a cache."""

    @rule(
        principal=principal_st,
        index=index_st,
        tokens=maybe_tokens_st,
        policy=choosing_st,
        on_stale=stale_st,
        request_id=request_id_st,
        loop=loop_st,
        how=st.sampled_from(["once", "once", "again", "twice", "cancelled", "cancelled"]),
    )
    def go_on(
        self,
        *,
        principal: str,
        index: int,
        tokens: Tokens,
        policy: Policy,
        on_stale: types_pb2.StalePolicy,
        request_id: str,
        loop: Loop,
        how: str,
    ) -> None:
        """Generate behind any handle."""
        if self.is_full:
            return
        self.generate(principal, self.pick(index), Ask(tokens, policy, on_stale, request_id), loop, how)

    @rule(
        principal=principal_st,
        tokens=st.one_of(
            short_prompt_st, short_prompt_st, st.lists(st.integers(1, 2), min_size=17, max_size=40).map(tuple)
        ),
        policy=choosing_st,
        request_id=request_id_st,
        ttl_s=ttl_st,
        loop=loop_st,
        how=st.sampled_from(["once", "again", "twice", "cancelled"]),
        drops=st.sampled_from([True, True, False]),
    )
    def begin_and_go_on(
        self,
        *,
        principal: str,
        tokens: Tokens,
        policy: Policy,
        request_id: str,
        ttl_s: float | None,
        loop: Loop,
        how: str,
        drops: bool,
    ) -> None:
        """Generate from a prompt."""
        if self.is_full:
            return
        self.generate(principal, None, Ask(tokens, policy, FAIL, request_id, ttl_s, drops=drops), loop, how)

    @rule(
        principal=principal_st, tokens=tokens_st, times=st.integers(1, 8), seed=st.integers(0, 2), is_cut=st.booleans()
    )
    def forward(self, *, principal: str, tokens: Tokens, times: int, seed: int, is_cut: bool) -> None:
        """Rows of all positions; whatever becomes of the call, no sequence is left."""
        tokens *= times
        policy = Policy(SEEDED, seed, "masked") if seed else Policy(GREEDY)
        request = executor_pb2.ForwardRequest(input_ids=tokens, logits_policy=self.policy_message(policy, principal))
        call = self.server.stub.Forward(request, timeout=20, metadata=as_principal(principal))
        if is_cut:
            call.cancel()
        else:
            drawn = [token for frame in call for token in frame.outputs.tokens]
            rows = range(1, len(tokens) + 1)
            assert drawn == [drawn_token(tokens[:end], policy, seed if policy.draws else None, WINDOW) for end in rows]
            self.answers["forwarded"] += 1
        self.wait_for_streams()
        self.steps["forward"] += 1

    # ---- one Generate -----------------------------------------------------------------------------------------------

    def generate(self, principal: str, issued: Issued | None, ask: Ask, loop: Loop, how: str) -> None:
        """Send a Generate and compare what comes with the prediction."""
        if how == "twice" and ask.policy.kind == UNSEEDED:
            ask = replace(ask, policy=Policy(SEEDED, 0, ask.policy.shape))
        if how == "cancelled" and ask.on_stale == FORK:
            how = "once"
        if how == "twice" and (ask.drops if issued is None else issued.owner.drops):
            how = "again"  # of two loops at once, what the first gives back decides how far the second comes
        if how == "cancelled":
            self._cancel_and_resume(principal, issued, ask, loop)
        elif how == "twice":
            calls = [self._call_of(principal, issued, ask, loop) for _ in range(2)]
            answers = sorted((hear(call, ask.request_id) for call in calls), key=_is_replayed)
            for answer in answers:
                self._check_generated(principal, issued, ask, loop, answer)
        else:
            for _ in range(2 if how == "again" else 1):
                answer = hear(self._call_of(principal, issued, ask, loop), ask.request_id)
                self._check_generated(principal, issued, ask, loop, answer)
        self.steps[f"generate {how}"] += 1

    def _call_of(self, principal: str, issued: Issued | None, ask: Ask, loop: Loop) -> Any:  # of the stub
        request = executor_pb2.GenerateRequest(
            request_id=ask.request_id,
            input_ids=ask.tokens,
            kv_cache=None if issued is None else issued.handle,
            logits_policy=self.policy_message(ask.policy, principal),
            on_stale=ask.on_stale,
            cache=cache_options(ask),
            max_tokens=loop.max_tokens,
            n=loop.num_branches,
            stop_token_ids=loop.stop_ids,
            stop_sequences=[{"token_ids": run} for run in loop.stop_runs],
        )
        return self.server.stub.Generate(request, timeout=20, metadata=as_principal(principal))

    def _check_generated(
        self, principal: str, issued: Issued | None, ask: Ask, loop: Loop, answer: Answer, *, is_whole: bool = True
    ) -> Generated | None:
        """Follow a Generate on the model and compare; returns what should have come."""
        told = None if isinstance(answer, Refusal) or 0 not in answer else answer[0].seed
        expected = generate(self.model, principal, issued, ask, loop, told=told)
        if isinstance(expected, Refused) or isinstance(answer, Refusal):
            self.check_refusal(expected, answer)
            return None
        assert set(answer) == set(range(loop.num_branches))
        assert answer[0].replayed == expected.replayed
        num_tokens = len(ask.tokens) + (len(issued.tokens) if issued else 0)
        for index, branch in enumerate(expected.branches):
            self._check_branch(branch, answer[index], is_whole=is_whole)
            self.check_cached(answer[index].num_cached, num_tokens)
        self.answers["generated in branches" if loop.num_branches > 1 else "generated"] += 1
        return expected

    def _check_branch(self, branch: Branch, heard: Heard, *, is_whole: bool) -> None:
        """The tokens, the handles that came with them, the seed and the end are the branch's."""
        assert heard.tokens == branch.drawn[: None if is_whole else len(heard.tokens)]
        assert heard.seed == (branch.seed if heard.tokens else None)
        for num_tokens, handle in heard.handles:
            state = branch.states[num_tokens - 1]
            self.check_handle(handle, state.owner, state.tokens)
        if heard.handles:  # how many frames there are is chance, so the others are not kept
            self.take(handle, state.owner, state.tokens)
        if not (is_whole or heard.finish):
            return
        assert heard.finish == branch.finish
        assert (heard.error is None) == (branch.error is None)
        if branch.error is not None:
            self.check_refusal(branch.error, heard.error)
            self.answers["generation failed"] += 1
        self.answers["context full"] += heard.finish == CONTEXT_FULL

    # ---- cut short --------------------------------------------------------------------------------------------------

    def _cancel_and_resume(self, principal: str, issued: Issued | None, ask: Ask, loop: Loop) -> None:
        """Hang up once every branch has been heard of; then go on from what was read last, as if nothing had been."""
        call = self._call_of(principal, issued, ask, loop)
        answer = hear(call, ask.request_id, lambda heard: len(heard) == loop.num_branches)
        call.cancel()
        self.wait_for_streams()
        expected = self._check_generated(principal, issued, ask, loop, answer, is_whole=False)
        if expected is None or isinstance(answer, Refusal):
            return
        for index, branch in enumerate(expected.branches):
            self._settle(principal, branch, answer[index])
        for index, branch in enumerate(expected.branches):
            heard = answer[index]
            if heard.finish or not heard.tokens or len(heard.tokens) == loop.max_tokens:
                continue
            state = branch.states[len(heard.tokens) - 1]
            policy = ask.policy if branch.seed is None else Policy(SEEDED, branch.seed, ask.policy.shape)
            on_stale = REWIND if index % 2 or branch.drawn[-1] == 1 else FAIL
            rest = Ask((heard.tokens[-1],), policy, on_stale)
            last = Issued(heard.handles[-1][1], state.owner, state.tokens)
            self.generate(principal, last, rest, Loop(loop.max_tokens - len(heard.tokens)), "once")
            self.answers["generation resumed"] += 1

    def _settle(self, principal: str, branch: Branch, heard: Heard) -> None:
        """Find out how far a branch came before it was stopped: to a state that it had after what was read."""
        if not heard.handles:
            return
        request = cache_pb2.GetCacheInfoRequest(kv_cache=heard.handles[-1][1], include_token_ids=True)
        held = tuple(self.call(self.server.stub.GetCacheInfo, request, principal).info.token_ids)
        later = branch.states[len(heard.tokens) - 1 :]
        state = next((each for each in reversed(later) if each.held == held), None)
        if state is not None:
            state.restore()
            return
        # The tail that a rewind drops is gone even if its append was cancelled before it ran.
        state = next((each for each in reversed(later) if each.tokens == held), None)
        assert state is not None, f"{held} is there, not one of {[each.held for each in later]}"
        state.restore()
        state.owner.tokens, state.owner.last_truncate = held, None

    def wait_for_streams(self) -> None:
        """Wait until nothing goes on that was hung up on."""
        deadline = time.monotonic() + 60
        while self.server.engine.snapshot().num_streams:
            assert time.monotonic() < deadline, "a call that was cancelled goes on"
            time.sleep(0.001)


def _is_replayed(answer: Answer) -> bool:
    return not isinstance(answer, Refusal) and 0 in answer and answer[0].replayed
