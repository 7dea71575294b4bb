"""Callers of every kind for a while: what a dashboard is looked at for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from ferrule import Client, HandleNotFoundError, sample
from ferrule.errors import HandleStaleError, InvalidRequestError, UnavailableError
from ferrule.types import Append


@contextlib.contextmanager
def traffic(target: str) -> Iterator[None]:
    """Have callers at work until the body is left; what they fail with is raised then."""
    ends = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with Client(target) as client:
                while not ends.is_set():
                    with contextlib.suppress(UnavailableError, HandleNotFoundError):  # a server died: go on
                        _round(client)
        except BaseException as error:  # noqa: BLE001  # raised again by the other thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join(30)
    if failures:
        raise failures[0]


def _round(client: Client) -> None:
    """Use everything once: a text, a loop of one's own, branches, drafts, and the mistakes that clients make."""
    tokens = client.tokenize("def read_file(path):\n    with open(path) as file:\n        return file.read() ")
    with client.prefill(tokens) as cache:
        cache.generate(max_tokens=8, policy=sample(temperature=0.7, seed=1)).read()
        with contextlib.ExitStack() as kept:
            branches = kept.enter_context(cache.fork(2))
            with client.stream() as stream:
                for _ in range(4):
                    stream.run([Append(one, 5 + place, sample(seed=1), "drop") for place, one in enumerate(branches)])
            branches[0].verify([7, 8], policy=sample(seed=2))
            branches[0].truncate(len(tokens))
        handle = cache.handle
        cache.append(5, pending="drop")
        old = client.adopt(handle, keep_alive=False)
        try:
            old.append(6)
        except HandleStaleError:
            pass
        finally:
            old.detach()
    with contextlib.suppress(InvalidRequestError):
        client.prefill([1 << 30])
    client.admin.cache_metrics()
    time.sleep(0.05)
