"""However often connections break, every wish for a new sequence makes as many as it asked for: no orphan.

A request that makes sequences has no handle that tells a retry from a new wish; its ``request_id`` does. Clients made
of the stubs alone prefill, fork and branch through the cutting proxy and send again whatever was not answered.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, types_pb2
from ferrule_server.executor.paged_reference import PagedReferenceExecutor
from tests.api.harness import GREEDY, RunningServer
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.figures import report, seed_of_run
from tests.chaos.raw_clients import LASTING, Breaks, open_channel

MIN_CUTS = 1000
_ATTEMPT_S = 1.0


@dataclass
class Maker:
    """A client that asks for sequences and counts what it asked for.

    Args:
        target: Where to connect to.
        name: Begins its request ids; empty sends none.
        seed: Of what it asks.

    Attributes:
        made: Every handle that was answered, and the tokens it must cover.
    """

    target: str
    name: str
    seed: int
    breaks: Breaks = field(default_factory=Breaks)
    made: list[tuple[types_pb2.KvCacheHandle, tuple[int, ...]]] = field(default_factory=list)
    failure: BaseException | None = None
    _number: int = 0

    def run(self, num_rounds: int) -> None:
        """Prefill, fork twice and branch, so many times."""
        chance = random.Random(self.seed)
        try:
            with open_channel(self.target) as channel:
                stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
                for _ in range(num_rounds):
                    self._make(stub, tuple(chance.randrange(256) for _ in range(chance.randint(2, 12))), chance)
        except BaseException as failure:  # noqa: BLE001 - raised again where the test sees it
            self.failure = failure

    def _make(
        self, stub: executor_pb2_grpc.ModelExecutorServiceStub, prompt: tuple[int, ...], chance: random.Random
    ) -> None:
        message = executor_pb2.PrefillInput(
            input_ids=prompt, logits_policy=GREEDY, request_id=self._new_id(), cache=LASTING
        )
        root = self._call(stub.Prefill, executor_pb2.PrefillRequest(input=message)).output.kv_cache
        fork = cache_pb2.ForkCacheRequest(kv_cache=root, count=2, request_id=self._new_id())
        branches = self._call(stub.ForkCache, fork).kv_caches
        token, other = chance.sample(range(256), 2)
        item = executor_pb2.DecodeInput(input_ids=[token], kv_cache=root, logits_policy=GREEDY)
        grown = self._call(stub.Decode, executor_pb2.DecodeRequest(input=item)).output.kv_cache
        item.MergeFrom(executor_pb2.DecodeInput(on_stale=types_pb2.STALE_POLICY_FORK, request_id=self._new_id()))
        item.input_ids[:] = [other]
        child = self._call(stub.Decode, executor_pb2.DecodeRequest(input=item)).output.kv_cache
        self.made += [(grown, (*prompt, token)), (child, (*prompt, other))]
        self.made += [(branch, prompt) for branch in branches]

    def _call(self, method: Callable[..., Any], request: object) -> Any:  # of the stubs
        deadline = time.monotonic() + 60
        while True:
            try:
                return method(request, timeout=_ATTEMPT_S)
            except grpc.RpcError as error:
                self.breaks.note(error)
                if time.monotonic() > deadline:
                    raise

    def _new_id(self) -> str:
        self._number += 1
        return f"{self.name}-{self._number}" if self.name else ""


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


def make_through_cuts(num_makers: int, num_rounds: int, *, has_ids: bool, seed: int) -> Made:
    """Let clients make sequences through the proxy and count them on the server."""
    with RunningServer(PagedReferenceExecutor(kv_memory_bytes=64 << 20)) as server:
        with CuttingProxy(server.address.port, seed=seed, mean_bytes=900) as proxy:
            makers = [
                Maker(proxy.target, f"maker{number}" if has_ids else "", seed + number) for number in range(num_makers)
            ]
            threads = [threading.Thread(target=maker.run, args=(num_rounds,)) for maker in makers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for maker in makers:
            if maker.failure is not None:
                raise maker.failure
        answered = [one for maker in makers for one in maker.made]
        held = [tuple(server.info(handle, include_token_ids=True).token_ids) for handle, _ in answered]
        return Made(
            asked=4 * num_makers * num_rounds,
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
    made = make_through_cuts(2, 8, has_ids=True, seed=3)
    check(made)
    assert made.cuts >= 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_cuts_make_no_orphan() -> None:
    """Prefills, forks of two and branches: alive is asked for, and every handle holds what its maker sent."""
    seed = seed_of_run()
    made = make_through_cuts(8, 70, has_ids=True, seed=seed)
    report("creations", clients="raw", seed=seed, orphans=made.orphans, **vars(made))
    check(made)
    assert made.cuts >= MIN_CUTS
    assert made.replayed >= MIN_CUTS // 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_cuts_without_request_ids_make_orphans() -> None:
    """The ablation: what the ids save the pool from."""
    seed = seed_of_run()
    made = make_through_cuts(8, 70, has_ids=False, seed=seed)
    report("ablation: no request_id", clients="raw", seed=seed, orphans=made.orphans, **vars(made))
    assert made.orphans > 0
