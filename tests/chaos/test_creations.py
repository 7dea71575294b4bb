"""However often connections break, every wish for a new sequence makes as many as it asked for: no orphan.

A request that makes sequences has no handle that tells a retry from a new wish; its ``request_id`` does. Clients made
of the stubs alone prefill, fork, branch and loop through the cutting proxy, alone and in batches, and send again
whatever was not answered.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, types_pb2
from ferrule_server.executor.reference import PagedReferenceExecutor
from tests.api.harness import GREEDY, RunningServer
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.figures import report, seed_of_run
from tests.chaos.raw_clients import LASTING, Breaks, call_until_answered, open_channel
from tests.chaos.side_by_side import run_side_by_side

MIN_CUTS = 1000
MADE_PER_ROUND = 11


@dataclass
class Maker:
    """A client that asks for sequences and counts what it asked for.

    Args:
        target: Where to connect to.
        name: Begins its request ids.
        seed: Of what it asks.

    Attributes:
        made: Every handle that was answered, and the tokens it must cover.
    """

    target: str
    name: str
    seed: int
    breaks: Breaks = field(default_factory=Breaks)
    made: list[tuple[types_pb2.KvCacheHandle, tuple[int, ...]]] = field(default_factory=list)
    _number: int = 0

    def run(self, num_rounds: int, breaks: Breaks) -> None:
        """Make sequences in every way there is, so many times."""
        chance, self.breaks = random.Random(self.seed), breaks
        with open_channel(self.target) as channel:
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            for _ in range(num_rounds):
                self._make(stub, _prompt(chance), chance)
                self._make_in_batches(stub, chance)
                self._make_by_loop(stub, _prompt(chance))

    def _make(
        self, stub: executor_pb2_grpc.ModelExecutorServiceStub, prompt: tuple[int, ...], chance: random.Random
    ) -> None:
        message = executor_pb2.PrefillInput(
            input_ids=prompt, logits_policy=GREEDY, request_id=self._new_id(), cache=LASTING
        )
        root = self._call(stub.Prefill, executor_pb2.PrefillRequest(input=message)).output.kv_cache
        fork = cache_pb2.ForkCacheRequest(kv_cache=root, count=2, request_id=self._new_id())
        branches = self._call(stub.ForkCache, fork).kv_caches
        token, other, third = chance.sample(range(256), 3)
        item = executor_pb2.DecodeInput(input_ids=[token], kv_cache=root, logits_policy=GREEDY)
        grown = self._call(stub.Decode, executor_pb2.DecodeRequest(input=item)).output.kv_cache
        item.MergeFrom(executor_pb2.DecodeInput(on_stale=types_pb2.STALE_POLICY_FORK, request_id=self._new_id()))
        item.input_ids[:] = [other]
        child = self._call(stub.Decode, executor_pb2.DecodeRequest(input=item)).output.kv_cache
        self.made += [(grown, (*prompt, token)), (child, (*prompt, other))]
        self.made += [(branch, prompt) for branch in branches]
        verify = executor_pb2.VerifyInput(
            input_ids=[third],
            draft_ids=[third % 32, third % 32],
            kv_cache=root,
            logits_policy=GREEDY,
            acceptance=executor_pb2.ACCEPTANCE_RULE_EXACT,
            on_stale=types_pb2.STALE_POLICY_FORK,
            request_id=self._new_id(),
        )
        output = self._call(stub.ForwardVerify, executor_pb2.ForwardVerifyRequest(input=verify)).output
        self.made.append((output.kv_cache, (*prompt, third, *verify.draft_ids[: output.accepted_count])))

    def _make_in_batches(self, stub: executor_pb2_grpc.ModelExecutorServiceStub, chance: random.Random) -> None:
        """Two prompts by each kind of batch; one of them is a chunk of which more is to follow."""
        prompts = [_prompt(chance) for _ in range(4)]
        inputs = [
            executor_pb2.PrefillInput(input_ids=prompt, logits_policy=GREEDY, request_id=self._new_id(), cache=LASTING)
            for prompt in prompts[:2]
        ]
        results = list(self._call(stub.BatchPrefill, executor_pb2.BatchPrefillRequest(inputs=inputs)).results)
        items = [
            executor_pb2.UnifiedBatchItem(
                q_tokens=prompt,
                pos_offset=0,
                is_final_chunk=is_final,
                logits_policy=GREEDY,
                request_id=self._new_id(),
                cache=LASTING,
            )
            for prompt, is_final in zip(prompts[2:], (True, False), strict=True)
        ]
        batch = executor_pb2.UnifiedBatch(items=items)
        results += self._call(stub.UnifiedDecode, executor_pb2.UnifiedDecodeRequest(batch=batch)).results
        for result, prompt in zip(results, prompts, strict=True):
            assert result.HasField("output"), result.error
            self.made.append((result.output.kv_cache, prompt))

    def _make_by_loop(self, stub: executor_pb2_grpc.ModelExecutorServiceStub, prompt: tuple[int, ...]) -> None:
        """A prompt that goes on in two branches; the whole of it again until it is heard to its end."""
        request = executor_pb2.GenerateRequest(
            input_ids=prompt, logits_policy=GREEDY, request_id=self._new_id(), cache=LASTING, max_tokens=4, n=2
        )
        drawn: dict[int, tuple[int, ...]] = {}
        handles: dict[int, types_pb2.KvCacheHandle] = {}
        for frame in self._call(lambda *args, **named: list(stub.Generate(*args, **named)), request):
            for output in frame.outputs:
                drawn[output.index] = drawn.get(output.index, ()) + tuple(output.outputs.tokens)
                handles[output.index] = output.resume_from
        self.made += [(handles[index], (*prompt, *tokens[:-1])) for index, tokens in drawn.items()]

    def _call(self, method: Callable[..., Any], request: object) -> Any:  # of the stubs
        return call_until_answered(method, request, self.breaks)

    def _new_id(self) -> str:
        self._number += 1
        return f"{self.name}-{self._number}"


def _prompt(chance: random.Random) -> tuple[int, ...]:
    return tuple(chance.randrange(256) for _ in range(chance.randint(2, 12)))


@dataclass(frozen=True)
class Made:
    """What came of it: sequences asked for, alive and answered, and of these the ones that hold other tokens."""

    asked: int
    alive: int
    answered: int
    wrong: int
    replayed: int
    cuts: int

    @property
    def orphans(self) -> int:
        """Sequences that nobody holds a handle to."""
        return self.alive - self.answered


def make_through_cuts(num_makers: int, num_rounds: int, *, seed: int) -> Made:
    """Let clients make sequences through the proxy and count them on the server."""
    with RunningServer(PagedReferenceExecutor(kv_memory_bytes=64 << 20)) as server:
        with CuttingProxy(server.address.port, seed=seed, mean_bytes=900) as proxy:
            makers = [Maker(proxy.target, f"maker{number}", seed + number) for number in range(num_makers)]
            run_side_by_side([partial(maker.run, num_rounds) for maker in makers])
        answered = [one for maker in makers for one in maker.made]
        held = [tuple(server.info(handle, include_token_ids=True).token_ids) for handle, _ in answered]
        return Made(
            asked=MADE_PER_ROUND * num_makers * num_rounds,
            alive=server.engine.snapshot().num_sequences,
            answered=len({handle.cache_id for handle, _ in answered}),
            wrong=sum(tokens != wanted for tokens, (_, wanted) in zip(held, answered, strict=True)),
            replayed=server.engine.counters.replays,
            cuts=proxy.num_cuts,
        )


def check(made: Made) -> None:
    """Raise AssertionError unless every wish was granted once."""
    assert made.alive == made.answered == made.asked
    assert made.wrong == 0


def test_a_few_cuts_make_no_orphan() -> None:
    """The campaign below in small, on every run."""
    made = make_through_cuts(2, 8, seed=3)
    check(made)
    assert made.cuts >= 5


@pytest.mark.slow
def test_a_thousand_cuts_make_no_orphan() -> None:
    """Prefills, forks, branches, batches, loops: alive is asked for, and every handle holds what its maker sent."""
    seed = seed_of_run()
    made = make_through_cuts(8, 40, seed=seed)
    report("creations", clients="raw", seed=seed, orphans=made.orphans, **vars(made))
    check(made)
    assert made.cuts >= MIN_CUTS
    assert made.replayed >= MIN_CUTS // 20
