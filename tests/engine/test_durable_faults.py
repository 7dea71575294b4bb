"""A journal whose disk fails: what is answered meanwhile, and that nothing false is ever answered.

The random test is a client that gives up on no request: after a crash, or DURABILITY_LOST, it sends the same request
again until it knows the answer, and then the tokens must be the ones that it sent, each once.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ferrule_server.engine import engine as engine_module
from ferrule_server.engine import host_calls
from ferrule_server.engine.durable import journal as journal_module
from ferrule_server.engine.durable.confirmations import Confirmations
from ferrule_server.engine.durable.journal import Journal
from ferrule_server.engine.jobs import (
    AppendResult,
    CacheInfo,
    ForkJob,
    ForkResult,
    GenerateFrame,
    Job,
    Outcome,
    TruncateJob,
    TruncateResult,
)
from ferrule_server.errors import DurabilityLost, HandleUnknown
from ferrule_server.kv.handle import Handle
from tests.durability.fault_files import FaultFiles, everything, nothing, some_sectors
from tests.engine.harness import Harness, append, wait_until
from tests.engine.streams import Stream, generate
from tests.engine.test_durable import durable
from tests.fakes import FakeExecutor, fake_next_token

VOCAB = 32
DIRECTORY = Path("/journal")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a failed disk again at once."""
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(journal_module, "_LONGEST_RETRY_S", 0.02)
    monkeypatch.setattr(engine_module, "_POLL_S", 0.002)


@pytest.fixture
def files() -> FaultFiles:
    """An empty disk."""
    return FaultFiles()


@pytest.fixture
def server(files: FaultFiles) -> Iterator[Harness]:
    """A server on it."""
    with Harness(FakeExecutor(num_blocks=400), durable=DIRECTORY, files=files) as harness:
        yield harness


def until_known(server: Harness, job: Callable[[], Job[object]]) -> Outcome:
    """Send a request again until its answer is not DURABILITY_LOST."""
    deadline = time.monotonic() + 60
    while isinstance(outcome := server.submit(job()).outcome(), DurabilityLost):
        assert time.monotonic() < deadline, "the journal stays lost"
        time.sleep(0.005)
    return outcome


@pytest.mark.parametrize(("call", "code"), [("sync", errno.EIO), ("write", errno.ENOSPC), ("write", errno.EIO)])
def test_a_failed_write_is_answered_with_durability_lost(
    server: Harness, files: FaultFiles, call: str, code: int
) -> None:
    """Not with success; the retry is exact once the disk works, and sequences of level NONE notice nothing."""
    handle = server.submit(durable(1, 2, 3)).result().handle
    plain = server.prefill(1, 2, 3).handle
    files.fail(call, code)
    assert isinstance(server.submit(append(handle, 4)).error(), DurabilityLost)
    assert server.decode(plain, 4).handle.length == 4
    result = until_known(server, lambda: append(handle, 4))
    assert isinstance(result, AppendResult)
    assert result.replayed
    assert result.handle.length == 4
    assert server.engine.durability().counters.num_failures == 1  # type: ignore[union-attr]
    restored = files.crash(nothing)
    with Harness(durable=DIRECTORY, files=restored) as after:
        assert after.decode(result.handle, 5).rows[0].token == fake_next_token([1, 2, 3, 4, 5], VOCAB)


def test_a_crash_while_lost_continues_from_what_was_confirmed(files: FaultFiles) -> None:
    """The append that was answered with DURABILITY_LOST has not happened, and its retry appends it once."""
    with Harness(durable=DIRECTORY, files=files) as server:
        handle = server.submit(durable(1, 2, 3)).result().handle
        files.fail("sync", errno.EIO)
        files.fail("open_new", errno.ENOSPC)
        assert isinstance(server.submit(append(handle, 4)).error(), DurabilityLost)
        restored = files.crash(nothing)
    with Harness(durable=DIRECTORY, files=restored) as after:
        result = after.decode(handle, 4)
        assert not result.replayed
        assert result.handle.length == 4


def test_a_full_disk_is_tried_again_and_again(server: Harness, files: FaultFiles) -> None:
    """Each failure keeps the journal lost; leases of durable sequences do not end meanwhile."""
    handle = server.submit(durable(1, 2, 3)).result().handle
    files.fail("write", errno.ENOSPC)
    for _ in range(4):
        files.fail("open_new", errno.ENOSPC)
    assert isinstance(server.submit(append(handle, 4)).error(), DurabilityLost)
    later = server.store.clock() + 3000
    server.clock = lambda: later
    result = until_known(server, lambda: append(handle, 4))
    assert isinstance(result, AppendResult)
    assert result.handle.length == 4


def test_a_snapshot_waits_for_the_disk(server: Harness, files: FaultFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice at a time, so replies do not wait behind all of it."""
    monkeypatch.setattr(journal_module, "_SLICE_NS", -1)
    for number in range(20):
        server.submit(durable(1, 2, number)).result()
    journal = server.engine._parts.endings.journal
    assert isinstance(journal, Journal)
    files.is_flowing.clear()
    monkeypatch.setattr(journal_module, "_LEAST_BYTES", 0)
    plain = server.prefill(1, 2, 3).handle
    for _ in range(60):
        plain = server.decode(plain, 4).handle
    assert journal._snapshot is not None
    files.is_flowing.set()
    wait_until(lambda: journal.num_snapshots >= 2)


def test_the_state_is_written_between_steps_when_the_disk_works_again(
    server: Harness, files: FaultFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece at a time, so others do not wait; what changes and ends meanwhile is right after a crash."""
    monkeypatch.setattr(journal_module, "_SLICE_NS", -1)
    first, *handles = [server.submit(durable(1, 2, number)).result().handle for number in range(20)]
    other = server.prefill(1, 2, 3).handle
    journal = server.engine._parts.endings.journal
    assert isinstance(journal, Journal)
    write_slice = journal._write_slice

    def slowly() -> None:
        time.sleep(0.005)
        write_slice()

    monkeypatch.setattr(journal, "_write_slice", slowly)
    files.fail("sync", errno.EIO)
    assert isinstance(server.submit(append(first, 4)).error(), DurabilityLost)
    seen = []
    while journal.is_lost:
        other = server.decode(other, 5).handle if other.length < 200 else server.prefill(1, 2, 3).handle
        if journal.health is journal_module.Health.WRITING and handles:
            seen.append(handles.pop())
            server.release(seen[-1])
    assert len(seen) > 2
    assert isinstance(until_known(server, lambda: append(first, 4)), AppendResult)
    with Harness(FakeExecutor(num_blocks=400), durable=DIRECTORY, files=files.crash(nothing)) as after:
        found = {sequence.cache_id for sequence in after.store.registry}
        assert found == {first.cache_id, *(handle.cache_id for handle in handles)}


def test_a_disk_that_does_not_answer_is_lost_until_it_does(
    server: Harness, files: FaultFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered, not held for ever."""
    monkeypatch.setattr(journal_module, "STALL_S", 0.2)
    handle = server.submit(durable(1, 2, 3)).result().handle
    files.is_flowing.clear()
    assert isinstance(server.submit(append(handle, 4)).error(), DurabilityLost)
    assert isinstance(server.submit(append(handle, 4)).error(), DurabilityLost)
    files.is_flowing.set()
    result = until_known(server, lambda: append(handle, 4))
    assert isinstance(result, AppendResult)
    assert (result.replayed, result.handle.length) == (True, 4)


def test_a_generate_ends_once_when_the_journal_is_lost(server: Harness, files: FaultFiles) -> None:
    """With DURABILITY_LOST, whatever frames were on their way, unless it had ended before."""
    num_lost = 0
    for number in range(8):
        job = generate(None, 1, 2, 3, max_tokens=50, is_durable=True)
        stream = Stream()
        server.engine.submit([(job, stream)])
        files.fail("sync", errno.EIO, after=number // 2)
        stream.wait()
        last = stream.outcomes[-1]
        num_lost += isinstance(last, DurabilityLost)
        assert isinstance(last, DurabilityLost) or (isinstance(last, GenerateFrame) and last.is_last)
        until_known(server, lambda: durable(1, 2, 3))
    assert num_lost


@pytest.mark.parametrize("max_tokens", [5, 400])
def test_a_stop_beside_a_disk_that_does_not_answer_ends_each_job_once(
    max_tokens: int, files: FaultFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many frames of a Generate wait for the disk, and whether it has ended: it leaves its place once."""
    monkeypatch.setattr(journal_module, "_CLOSE_S", 0.1)
    server = Harness(FakeExecutor(num_blocks=400), durable=DIRECTORY, files=files)
    server.engine.start()
    handle = server.submit(durable(1, 2, 3)).result().handle
    files.is_flowing.clear()
    stream, waiting = Stream(), server.submit(append(handle, 4))
    server.engine.submit([(generate(None, 1, 2, 3, max_tokens=max_tokens, is_durable=True), stream)])
    parts = server.engine._parts
    outlet = parts.outlet
    assert isinstance(outlet, Confirmations)
    wait_until(lambda: len(outlet._held) >= 4)
    server.engine.close()
    files.is_flowing.set()
    assert isinstance(waiting.error(), DurabilityLost)
    assert isinstance(stream.wait()[-1], DurabilityLost)
    assert parts.gate.num_jobs == 0
    parts.gate.check_integrity()


# ---- a client that gives up on no request ---------------------------------------------------------------------------


class Wrong(AssertionError):
    """The server has answered something false."""


@dataclass
class Client:
    """Sends random requests to servers that crash, and knows what their answers must be.

    Attributes:
        disk: Of the server.
        texts: The tokens behind each handle that was answered last.
    """

    random: random.Random
    disk: FaultFiles = field(default_factory=FaultFiles)
    texts: dict[Handle, list[int]] = field(default_factory=dict)
    gone: list[Handle] = field(default_factory=list)
    num_crashes: int = 0
    num_failures: int = 0
    num_requests: int = 0

    def __post_init__(self) -> None:
        self.server = self._start()

    def _start(self) -> Harness:
        harness = Harness(FakeExecutor(num_blocks=400), durable=DIRECTORY, files=self.disk)
        harness.engine.start()
        return harness

    def crash(self) -> None:
        """Lose power, or only the process, at any moment."""
        survival = self.random.choice([nothing, everything, some_sectors(self.random)])
        old = self.server
        if self.random.random() < 0.3:
            self.disk = self.disk.kill()
        else:
            self.disk = self.disk.crash(survival, keeps_names=self.random.random() < 0.5)
        old.engine.close()
        self.num_crashes += 1
        self.server = self._start()

    def ask(self, make: Callable[[], Job[object]]) -> Outcome:
        """Send a request until its answer is known; servers crash and disks fail meanwhile."""
        self.num_requests += 1
        while True:
            if self.random.random() < 0.15:
                name = self.random.choice(["sync", "write", "open_new"])
                self.disk.fail(name, self.random.choice([errno.EIO, errno.ENOSPC]), after=self.random.randrange(3))
            pending = self.server.submit(make())
            if self.random.random() < 0.12:
                if self.random.random() < 0.5:
                    pending.outcome()  # the reply is lost on the way
                self.crash()
                continue
            outcome = pending.outcome()
            if isinstance(outcome, DurabilityLost):
                self.num_failures += 1
                time.sleep(0.002)
                continue
            return outcome

    def step(self) -> None:
        """Send one request and compare."""
        actions = [self.create] if not self.texts else [self.create, *[self.append] * 6, self.fork, self.cut, self.end]
        self.random.choice(actions)()
        self.check()

    def create(self) -> None:
        """A new sequence, with a request_id."""
        tokens = [self.random.randrange(VOCAB) for _ in range(self.random.randrange(1, 9))]
        name = f"create{self.num_requests}"
        result = self.ask(lambda: durable(*tokens, request_id=name))
        self._appended([], tokens, result)

    def append(self) -> None:
        """One token or several after a handle."""
        handle = self.random.choice(list(self.texts))
        before = self.texts.pop(handle)
        tokens = [self.random.randrange(VOCAB) for _ in range(self.random.choice([1, 1, 1, 3]))]
        self._appended(before, tokens, self.ask(lambda: append(handle, *tokens)))

    def _appended(self, before: list[int], tokens: list[int], result: Outcome) -> None:
        text = before + tokens
        if not isinstance(result, AppendResult) or result.handle.length != len(text):
            raise Wrong(f"an append to {len(before)} tokens was answered with {result}")
        if result.rows[0].token != fake_next_token(text, VOCAB):
            raise Wrong("the token after the append is not that of its text")
        self.texts[result.handle] = text

    def fork(self) -> None:
        """A branch, with a request_id."""
        handle = self.random.choice(list(self.texts))
        name = f"fork{self.num_requests}"
        result = self.ask(lambda: ForkJob("me", handle, handle.length, 1, request_id=name))
        if not isinstance(result, ForkResult):
            raise Wrong(f"a fork was answered with {result}")
        self.texts[result.handles[0]] = self.texts[handle]

    def cut(self) -> None:
        """Drop the last tokens."""
        handle = self.random.choice(list(self.texts))
        before = self.texts.pop(handle)
        length = self.random.randrange(1, len(before) + 1)
        result = self.ask(lambda: TruncateJob("me", handle, length))
        if not isinstance(result, TruncateResult) or result.handle.length != length:
            raise Wrong(f"a truncate from {len(before)} to {length} was answered with {result}")
        self.texts[result.handle] = before[:length]

    def end(self) -> None:
        """Release a sequence; a repeated release finds nothing."""
        handle = self.random.choice(list(self.texts))
        del self.texts[handle]
        self.ask(lambda: host_calls.release("me", (handle,)))
        self.gone.append(handle)

    def check(self) -> None:
        """Compare one sequence with what was confirmed, and one that is gone."""
        if self.texts:
            handle = self.random.choice(list(self.texts))
            found = self.ask(lambda: host_calls.describe("me", handle, with_token_ids=True))
            if not isinstance(found, CacheInfo) or list(found.token_ids or ()) != self.texts[handle]:
                raise Wrong(f"{self.texts[handle]} is now {found}")
        if self.gone:
            handle = self.random.choice(self.gone)
            found = self.ask(lambda: host_calls.describe("me", handle))
            if not isinstance(found, HandleUnknown):
                raise Wrong(f"a released sequence is back: {found}")

    def run(self, num_steps: int) -> None:
        """Send requests, and compare everything at the end, also after a last crash."""
        try:
            for _ in range(num_steps):
                self.step()
            self.crash()
            live = {sequence.handle_id for sequence in self.server.store.registry}
            lost = [handle for handle in self.texts if handle.handle_id not in live]
            if lost:
                raise Wrong(f"{len(lost)} sequences are lost")
        finally:
            self.server.engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_false_is_answered_whatever_the_disk_does(seed: int) -> None:
    """Power losses with torn and lost writes, deaths of the process, EIO and ENOSPC at every call."""
    client = Client(random.Random(seed))
    client.run(60)
    assert client.num_crashes
    assert client.num_failures


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_false_is_answered_in_a_long_campaign() -> None:
    """The same for many requests; prints what happened."""
    total = [0, 0, 0]
    for seed in range(1000, 1100):
        client = Client(random.Random(seed))
        client.run(150)
        for index, count in enumerate((client.num_requests, client.num_crashes, client.num_failures)):
            total[index] += count
    print(f"\n{total[0]} requests, {total[1]} crashes, {total[2]} answers DURABILITY_LOST, 0 false")
