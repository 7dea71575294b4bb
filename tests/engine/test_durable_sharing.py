"""Forks of a durable trunk share its blocks after a crash too, whether or not they are published."""

from __future__ import annotations

import threading
import time

import pytest

from ferrule_server.engine.jobs import AppendResult, ForkJob, ForkResult
from ferrule_server.errors import Restoring
from ferrule_server.kv.handle import Handle
from tests.engine.conftest import Servers
from tests.engine.harness import Harness, append
from tests.engine.test_durable import durable, plain
from tests.fakes import FakeExecutor, fake_next_token

BLOCK = FakeExecutor().info.block_size
VOCAB = 32
KINDS = ["published", "not published", "cache off"]


def executor(num_blocks: int = 400) -> FakeExecutor:
    """An executor with room for long sequences."""
    return FakeExecutor(num_blocks=num_blocks, max_context=1024)


def tokens(count: int, seed: int = 1) -> list[int]:
    """Return tokens without a period."""
    return [(seed + index * index) % VOCAB for index in range(count)]


def trunk(server: Harness, prompt: list[int], kind: str, principal: str = "me") -> Handle:
    """Make a durable sequence."""
    job = durable(*prompt, publish_prefix=kind == "published", principal=principal)
    return server.submit(job).result().handle


def fork(server: Harness, handle: Handle, count: int, length: int | None = None, principal: str = "me") -> list[Handle]:
    """Fork a sequence."""
    job = ForkJob(principal, handle, handle.length if length is None else length, count)
    return list(server.answer(ForkResult, job).handles)


def crash(servers: Servers, kind: str, num_blocks: int = 400, **settings: object) -> Harness:
    """Start the next server."""
    server = servers.crash(executor=executor(num_blocks), **settings)
    server.store._cache.is_on = kind != "cache off"
    return server


def until_served(server: Harness, handle: Handle, token: int, principal: str = "me") -> AppendResult:
    """Append, and ask again while a sequence is restored."""
    while isinstance(outcome := server.submit(append(handle, token, principal=principal)).outcome(), Restoring):
        pass
    assert isinstance(outcome, AppendResult), outcome
    return outcome


class Steps(threading.Event):
    """A gate of an executor that lets one step pass for each time that it is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a step that may pass."""
        return self._allowed.acquire(timeout=timeout)

    def allow(self) -> None:
        """Let one step pass."""
        self._allowed.release()

    def outcome(self, server: Harness, handle: Handle) -> object:
        """Append, with as few steps as it takes until that is answered."""
        pending = server.submit(append(handle, 4))
        while not pending.is_done:
            if server.executor.is_waiting.is_set():
                server.executor.is_waiting.clear()
                self.allow()
            time.sleep(0.001)
        return pending.outcome()

    def open(self, server: Harness) -> None:
        """Let all steps pass from now on."""
        server.executor.gate = None
        self.allow()


def all_served(server: Harness, handles: list[Handle], token: int = 4) -> list[Handle]:
    """Append to all of them at once, and again to those that are answered with RESTORING."""
    after: dict[int, Handle] = {}
    while missing := [index for index in range(len(handles)) if index not in after]:
        pending = server.submit_all(*(append(handles[index], token) for index in missing))
        for index, each in zip(missing, pending, strict=True):
            outcome = each.outcome()
            if not isinstance(outcome, Restoring):
                assert isinstance(outcome, AppendResult), outcome
                after[index] = outcome.handle
    return [after[index] for index in range(len(handles))]


def num_used(server: Harness) -> int:
    """Return the blocks that are held."""
    return server.store.pool.num_used


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [25 * BLOCK, 25 * BLOCK + 1], ids=["at a border", "in a block"])
def test_forks_answer_in_the_pool_that_was_enough_before(servers: Servers, kind: str, at: int) -> None:
    """A pool that is 60 % full before the crash, with all forks used at once after it."""
    num_blocks = round((25 + 8) / 0.6) + 1
    server = servers.start(executor=executor(num_blocks))
    server.store._cache.is_on = kind != "cache off"
    prompt = tokens(at)
    handles = [server.decode(each, 3).handle for each in fork(server, trunk(server, prompt, kind), 8)]
    server = crash(servers, kind, num_blocks)
    after = all_served(server, handles)
    assert [each.length for each in after] == [at + 2] * 8
    assert server.decode(after[5], 7).rows[0].token == fake_next_token([*prompt, 3, 4, 7], VOCAB)
    assert num_used(server) == 25 + 8
    assert server.engine.counters.restored_tokens <= at + 1 + 7 * BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_long_tails_do_not_unshare_a_short_trunk(servers: Servers, kind: str) -> None:
    """Each fork has more of its own than it shares; what is shared is still computed once."""
    server = servers.start(executor=executor(100))
    handles = fork(server, trunk(server, tokens(4 * BLOCK), kind), 5)
    handles = [server.decode(each, *tokens(9 * BLOCK, seed)).handle for seed, each in enumerate(handles, 3)]
    server = crash(servers, kind, 100, max_step_rows=8)
    all_served(server, handles)
    assert num_used(server) == 4 + 5 * 10
    assert server.engine.counters.restored_tokens == 4 * BLOCK + 5 * 9 * BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_nested_forks_share_at_every_level_also_without_their_parents(servers: Servers, kind: str) -> None:
    """The trunk and one branch end before the crash; what their forks share is found by its lineage."""
    server = servers.start(executor=executor())
    root = trunk(server, tokens(6 * BLOCK), kind)
    middle = [server.decode(each, *tokens(3 * BLOCK, seed)).handle for seed, each in enumerate(fork(server, root, 2))]
    leaves = [leaf for each in middle for leaf in fork(server, each, 2)]
    leaves += fork(server, middle[0], 1, 7 * BLOCK + 2)
    leaves = [server.decode(each, 5 + index).handle for index, each in enumerate(leaves)]
    server.release(root, *middle)
    before = num_used(server)
    server = crash(servers, kind)
    all_served(server, leaves)
    assert num_used(server) == before


@pytest.mark.parametrize("kind", KINDS)
def test_two_principals_never_share(servers: Servers, kind: str) -> None:
    """Their tokens are equal, and neither the time nor the blocks of one reveal it to the other."""
    server = servers.start(executor=executor())
    prompt = tokens(5 * BLOCK)
    mine, theirs = trunk(server, prompt, kind), trunk(server, prompt, kind, "other")
    server = crash(servers, kind)
    until_served(server, mine, 4)
    until_served(server, theirs, 4, "other")
    assert server.engine.counters.restored_tokens == 2 * 5 * BLOCK
    assert num_used(server) == 2 * 6


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_new_prompt_does_not_find_what_is_not_published(servers: Servers, kind: str) -> None:
    """Although restored sequences of the same principal do."""
    server = servers.start(executor=executor())
    prompt = tokens(5 * BLOCK)
    handle = trunk(server, prompt, kind)
    server = crash(servers, kind)
    until_served(server, handle, 4)
    assert server.submit(durable(*prompt)).result().cached_tokens == 0


def test_blocks_that_are_not_published_are_empty_when_their_last_owner_has_ended(servers: Servers) -> None:
    """Nothing of them is kept for later prompts."""
    server = servers.start(executor=executor())
    handles = fork(server, trunk(server, tokens(5 * BLOCK), "not published"), 2)
    server = crash(servers, "not published")
    all_served(server, handles)
    for each in list(server.store.registry):
        server.release(each.handle_at())
    assert (server.store.pool.num_used, server.store.pool.num_cached) == (0, 0)
    assert not server.store._cache._entries


def test_forks_share_what_is_computed_before_the_first_one_is_done(servers: Servers) -> None:
    """They wait for the trunk, not for the long tail of the first one."""
    server = servers.start(executor=executor())
    root = trunk(server, tokens(4 * BLOCK), "not published")
    short, long = fork(server, root, 2)
    long = server.decode(long, *tokens(60 * BLOCK, 5)).handle
    server = crash(servers, "not published", max_step_rows=BLOCK, restore_wait_tokens=4)
    server.executor.gate = steps = Steps()
    assert isinstance(steps.outcome(server, long), Restoring)
    while isinstance(outcome := steps.outcome(server, short), Restoring):
        pass
    assert isinstance(outcome, AppendResult)
    assert server.store.registry.sequences[long.cache_id].is_cold
    steps.open(server)
    assert until_served(server, long, 4).handle.length == long.length + 1
    assert server.engine.counters.restored_tokens == long.length + 1  # the last row of the short one again


def test_the_next_fork_computes_the_trunk_if_the_first_one_ends(servers: Servers) -> None:
    """What is computed goes with its only owner."""
    server = servers.start(executor=executor())
    first, second = fork(server, trunk(server, prompt := tokens(20 * BLOCK), "not published"), 2)
    server = crash(servers, "not published", max_step_rows=BLOCK, restore_wait_tokens=4)
    server.executor.gate = steps = Steps()
    assert isinstance(steps.outcome(server, first), Restoring)
    assert isinstance(steps.outcome(server, second), Restoring)
    steps.open(server)
    server.release(first)
    assert until_served(server, second, 4).rows[0].token == plain([*prompt, 4], 1)[0]
