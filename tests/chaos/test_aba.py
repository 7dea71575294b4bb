"""The ABA case: a sequence that is as long as it was, and holds other tokens.

A handle that named a place only by its length would be taken for good, and its next token appended to a history that
its owner never saw. The lineage tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ferrule.v1 import types_pb2
from tests.api.harness import PROMPT, RunningServer, refused

Handle = types_pb2.KvCacheHandle
FAIL, FORK, REWIND = types_pb2.STALE_POLICY_FAIL, types_pb2.STALE_POLICY_FORK, types_pb2.STALE_POLICY_REWIND


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One server for all of them."""
    with RunningServer() as running:
        yield running


USES: dict[str, Callable[[RunningServer, Handle], object]] = {
    "append": lambda server, old: server.decode(old, 9),
    "append and fork": lambda server, old: server.decode(old, 9, on_stale=FORK),
    "append and rewind": lambda server, old: server.decode(old, 9, on_stale=REWIND),
    "query": lambda server, old: server.decode(old),
    "fork": lambda server, old: server.fork(old),
    "truncate": lambda server, old: server.truncate(old, 3),
}


@pytest.mark.parametrize("use", USES)
def test_aba_truncate_one_append_another_then_the_old_handle_is_stale(server: RunningServer, use: str) -> None:
    """Whatever the old handle is used for, and the sequence stays as it is."""
    old = server.decode(server.prefill().kv_cache, 7).kv_cache
    shorter = server.truncate(old, old.length - 1).kv_cache
    new = server.decode(shorter, 8).kv_cache
    assert (new.cache_id, new.length) == (old.cache_id, old.length)
    assert new.lineage != old.lineage
    with refused() as caught:
        USES[use](server, old)
    assert caught[0].reason == "HANDLE_STALE"
    assert caught[0].metadata["tip_length"] == str(new.length)
    assert list(server.info(new, include_token_ids=True).token_ids) == [*PROMPT, 8]
    server.release(new)


def test_aba_with_the_same_token_again_is_the_same_handle(server: RunningServer) -> None:
    """Truncate and append the very token: every handle to it is good, for it names the same tokens."""
    old = server.decode(server.prefill().kv_cache, 7).kv_cache
    again = server.decode(server.truncate(old, old.length - 1).kv_cache, 7).kv_cache
    assert again == old
    assert server.decode(old, 9).kv_cache.length == old.length + 1
    server.release(old)
