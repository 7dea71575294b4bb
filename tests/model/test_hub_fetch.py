"""Fetching one file into a cache that hosts share: whatever its locks do, only the right bytes are published."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.errors import ModelError
from ferrule_server.model.hub import cache as hub_cache
from ferrule_server.model.hub import fetch as hub_fetch
from ferrule_server.model.hub.cache import HubCache
from ferrule_server.model.hub.fetch import CutOff, Get, RemoteFile, Response, fetch_file

CONTENT = os.urandom(5000)
FILE = RemoteFile("model.safetensors", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
Step = Callable[[int], object]
"""Called with how many bytes an answer has sent."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_fetch, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(hub_fetch, "_LOCK_PAUSE_S", 0.01)


@pytest.fixture
def cache(tmp_path: Path) -> HubCache:
    """An empty cache."""
    return HubCache(tmp_path, "org/name")


@pytest.fixture(params=["none", "of one host", errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO])
def broken_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that do nothing, as if each fetch were on a host of its own, or that fail."""
    hosts = threading.local()

    def flock(*_: object) -> None:
        if isinstance(request.param, int):
            raise OSError(request.param, os.strerror(request.param))

    def host() -> str:
        if not hasattr(hosts, "name"):
            hosts.name = f"host{threading.get_ident()}"
        return str(hosts.name)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(hub_cache, "_host", host)


class _Answer:
    """The rest of the file in pieces."""

    def __init__(self, offset: int, content: bytes, step: Step, piece: int) -> None:
        self.status_code = 206 if offset else 200
        self._offset, self._content, self._step, self._piece = offset, content, step, piece

    def iter_bytes(self, chunk_size: int) -> Iterator[bytes]:
        for begin in range(self._offset, len(self._content), self._piece):
            self._step(begin)
            yield self._content[begin : begin + self._piece]


def sending(content: bytes = CONTENT, step: Step = lambda _: None, piece: int = 500) -> Get:
    """Return a hub that sends some content."""

    @contextmanager
    def get(offset: int) -> Iterator[Response]:
        yield _Answer(offset, content, step, piece)

    return get


def fetch(cache: HubCache, get: Get, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Fetch the file."""
    fetch_file(FILE, cache, get=get, on_bytes=on_bytes, stopping=threading.Event())


def published(cache: HubCache) -> bytes:
    """Return the bytes that everybody reads."""
    return cache.blob(FILE.etag).read_bytes()


@pytest.mark.usefixtures("broken_locks")
def test_writers_that_see_no_lock_of_each_other_publish_the_right_bytes(cache: HubCache) -> None:
    """Piece by piece by turns, all at once, and one of them ends earlier."""
    turns = threading.Barrier(3)

    def in_turn(sent: int) -> None:
        if sent < 4000:
            turns.wait(10)

    with ThreadPoolExecutor(3) as pool:
        fetches = [pool.submit(fetch, cache, sending(step=in_turn)) for _ in range(3)]
        for one in fetches:
            one.result()
    assert published(cache) == CONTENT
    assert cache.parts(FILE.etag) == []


@pytest.mark.usefixtures("broken_locks")
def test_a_late_writer_cannot_change_what_is_published(cache: HubCache) -> None:
    """It writes on after another one has published the file."""
    is_first_done, seen = threading.Event(), []

    def wait(sent: int) -> None:
        if sent == 1000:
            seen.append(is_first_done.wait(10))

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(fetch, cache, sending(step=wait))
        while not any(part.stat().st_size for part in cache.parts(FILE.etag)):
            time.sleep(0.001)
        fetch(cache, sending())
        assert published(cache) == CONTENT
        is_first_done.set()
        late.result()
    assert seen == [True]
    assert published(cache) == CONTENT


@given(
    pieces=st.lists(st.sampled_from([100, 333, 500, 5000]), min_size=2, max_size=3),
    order=st.lists(st.integers(0, 2), max_size=60),
)
@settings(max_examples=25)
def test_any_order_of_writers_publishes_the_right_bytes(
    pieces: list[int], order: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without locks, whichever writes next."""
    cache = HubCache(tmp_path_factory.mktemp("cache"), "org/name")
    turns = iter(order)
    lock = threading.Lock()

    def step_of(number: int) -> Step:
        def step(_: int) -> None:
            with lock:
                favoured = next(turns, number)
            if favoured != number:
                time.sleep(0.0005)

        return step

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(fcntl, "flock", lambda *_: None)
        patch.setattr(hub_cache, "_host", lambda: f"host{threading.get_ident()}")
        for one in [pool.submit(fetch, cache, sending(step=step_of(i), piece=piece)) for i, piece in enumerate(pieces)]:
            one.result()
    assert published(cache) == CONTENT


def test_what_lies_on_the_disk_is_checked(cache: HubCache) -> None:
    """A byte that changed there, behind the back of the fetch, is found before anybody reads it."""

    def spoil(sent: int) -> None:
        if sent == 3000:
            (part,) = cache.parts(FILE.etag)
            with part.open("r+b") as file:
                file.write(bytes([CONTENT[0] ^ 1]))

    with pytest.raises(ModelError, match="arrived damaged"):
        fetch(cache, sending(step=spoil))
    assert not cache.blob(FILE.etag).exists()
    fetch(cache, sending())
    assert published(cache) == CONTENT


HERE = f".{hub_cache._host()}.00"


@pytest.mark.parametrize(
    ("host", "age_s", "content", "has_locks", "asked"),
    [
        pytest.param(HERE, 0, CONTENT[:2000], True, [2000], id="of this host: the lock says that its fetch has ended"),
        pytest.param(HERE, 10, CONTENT[:2000], False, [0], id="of this host, without locks"),
        pytest.param(HERE, 0, bytes(3000), True, [3000, 0], id="wrong bytes are fetched again"),
        pytest.param(".elsewhere.00", 1000, CONTENT[:2000], True, [2000], id="of another host, old"),
        pytest.param(".elsewhere.00", 10, CONTENT[:2000], True, [0], id="of another host, which may go on"),
        pytest.param("", 1000, CONTENT[:2000], True, [2000], id="of an earlier version, without a host"),
    ],
)
def test_what_was_left_is_continued_once_nobody_writes_it(
    *,
    cache: HubCache,
    host: str,
    age_s: float,
    content: bytes,
    has_locks: bool,
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A partial file that is continued is gone afterwards; one that is not keeps its bytes."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", flock)
    part = cache.folder / "blobs" / f"{FILE.etag}{host}.ferrule.incomplete"
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    os.utime(part, (time.time() - age_s, time.time() - age_s))
    offsets: list[int] = []
    inner = sending()

    @contextmanager
    def get(offset: int) -> Iterator[Response]:
        offsets.append(offset)
        with inner(offset) as answer:
            yield answer

    counted: list[int] = []
    fetch(cache, get, counted.append)
    assert offsets == asked
    assert sum(counted) == len(CONTENT)
    assert published(cache) == CONTENT
    assert [left.read_bytes() for left in cache.parts(FILE.etag)] == ([] if asked[0] else [content])


def test_a_writer_whose_file_was_taken_over_begins_again(cache: HubCache) -> None:
    """It writes nothing more to a file that another server has renamed, and counts its bytes anew."""
    taken: list[Path] = []

    def take_over(sent: int) -> None:
        if sent == 2500 and not taken:
            (part,) = cache.parts(FILE.etag)
            taken.append(part.rename(part.with_name(f"{FILE.etag}.elsewhere.00.ferrule.incomplete")))

    counted: list[int] = []
    fetch(cache, sending(step=take_over), counted.append)
    assert published(cache) == CONTENT
    assert taken[0].read_bytes() == CONTENT[:2500]
    assert sum(counted) == len(CONTENT)


def test_a_writer_that_is_robbed_again_and_again_gives_up(cache: HubCache) -> None:
    """With an error that says what happens."""
    num = iter(range(100))

    def take_over(sent: int) -> None:
        if sent == 2500:
            part = next(part for part in cache.parts(FILE.etag) if "elsewhere" not in part.name)
            part.rename(part.with_name(f"{FILE.etag}.elsewhere.{next(num)}.ferrule.incomplete"))

    with pytest.raises(CutOff, match=r"took the partial file of model\.safetensors over"):
        fetch(cache, sending(step=take_over))


def test_a_fetch_that_brings_nothing_leaves_nothing(cache: HubCache) -> None:
    """No empty file for each attempt."""

    def cut_off(_: int) -> None:
        raise CutOff("nothing")

    with pytest.raises(CutOff, match="nothing"):
        fetch(cache, sending(step=cut_off))
    assert cache.parts(FILE.etag) == []
