"""Sequences that drop KV outside the window of a real model: the same tokens, bounded memory, and a price below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from ferrule import Cache, Client, greedy, logits
from ferrule.errors import BlocksExhaustedError, KvGivenBackError, UnsupportedError
from ferrule.types import Append, FloatArray, Prompt
from ferrule_server.executor.base import Executor
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.weights import load_model
from tests.api.harness import RunningServer
from tests.executor.cpu.models import opened
from tests.executor.cpu.test_families import case_of
from tests.model.conftest import make_example
from tests.model.dense_families import DENSE_CASES, dense_families_known

WINDOWS = {
    "mistral-window": 9, "phi3-longrope-partial": 30, "starcoder2-layernorm": 14, "llama4-chunks-everywhere": 10,
}  # fmt: skip
KINDS = [("torch", name) for name in WINDOWS] + [("cpu", "mistral-window")]
PROMPT = [(7 * i + i // 5) % 97 for i in range(70)]
BLOCK = 16

Connect = Callable[[str, str], Client]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Return the folder of a random model, made when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            case = DENSE_CASES.get(name) or case_of(name)
            made[name] = make_example(case, tmp_path_factory.mktemp("model")).folder
        return made[name]

    with dense_families_known():
        yield folder


def poison(executor: Executor) -> None:
    """Fill the pool with NaN from end to end, the null block too, so that any stray read shows."""
    blocks = np.arange(executor.info.num_blocks, dtype=np.int32)
    executor.write_blocks(blocks, np.full((len(blocks), executor.info.bytes_per_block), 0xFF, np.uint8))


@pytest.fixture
def connect(folders: Callable[[str], Path]) -> Iterator[Connect]:
    """Return a client of a server with a model on an executor; its context is longer than its pool."""
    with ExitStack() as stack:

        def connected(kind: str, name: str) -> Client:
            folder, kv_bytes = folders(name), 640 << 10
            executor: Executor
            if kind == "cpu":
                executor = opened(folder, "float32", max_step_rows=64, kv_memory_bytes=kv_bytes, max_context=1000)
            else:
                model = load_model(folder, dtype="float32")
                executor = TorchExecutor(model, kv_memory_bytes=kv_bytes, max_context=1000)
            poison(executor)
            server = stack.enter_context(RunningServer(executor))
            return stack.enter_context(Client(server.address.target, timeout=60))

        yield connected


def query(cache: Cache) -> FloatArray:
    """Return the logits of the last row, which is run again."""
    row: FloatArray = cache.append((), policy=logits()).logits[-1]
    return row


def rows_of(cache: Cache, count: int) -> list[FloatArray]:
    """Append the most likely token so many times, and return the logits of each row."""
    rows = [query(cache)]
    while len(rows) < count:
        rows.append(cache.append([int(rows[-1].argmax())], policy=logits()).logits[-1])
    return rows


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_the_logits_are_those_of_a_sequence_that_keeps_all(connect: Connect, kind: str, name: str) -> None:
    """Prompt, tokens, forks and truncates; what was given back is never read."""
    client, window = connect(kind, name), WINDOWS[name]
    assert client.model_info().attention_window == window
    with (
        client.prefill(PROMPT, publish_prefix=False) as whole,
        client.prefill(PROMPT, publish_prefix=False, drop_outside_window=True) as cache,
    ):
        for mine, theirs in zip(rows_of(cache, 40), rows_of(whole, 40), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        info = cache.info()
        assert info.num_blocks == len(cache.info(blocks=True).block_ids) < whole.info().num_blocks
        assert info.lowest_length == info.first_position + window
        back = cache.length - window
        with cache.fork(length=back) as mine_at, whole.fork(length=back) as theirs_at:
            for mine, theirs in zip(rows_of(mine_at, 20), rows_of(theirs_at, 20), strict=True):
                np.testing.assert_array_equal(mine, theirs)
        cache.truncate(back)
        whole.truncate(back)
        np.testing.assert_array_equal(query(cache), query(whole))


@pytest.mark.parametrize(("kind", "name"), [KINDS[0], KINDS[-1]])
def test_a_loop_runs_beyond_the_pool_in_bounded_memory(connect: Connect, kind: str, name: str) -> None:
    """A loop that keeps its blocks ends where the pool does; its tokens until then are the same."""
    client, window = connect(kind, name), WINDOWS[name]
    capacity = client.capabilities().total_blocks * BLOCK
    assert capacity < 700
    kept = client.generate(PROMPT, 800, policy=greedy(), ignore_eos=True)
    with pytest.raises(BlocksExhaustedError):
        kept.read()
    with client.generate(PROMPT, 800, policy=greedy(), ignore_eos=True, drop_outside_window=True, keep=True) as loop:
        tokens = loop.read().tokens
        (cache,) = loop.caches
        with cache:
            assert cache.info().num_blocks <= (2 * window + 1) // BLOCK + 3
    assert len(kept.tokens) < len(tokens) == 800
    assert tokens[: len(kept.tokens)] == kept.tokens
    assert client.admin.cache_metrics().num_given_back >= capacity // BLOCK


@pytest.mark.parametrize(("kind", "name"), [KINDS[0], KINDS[-1]])
def test_what_was_given_back_has_a_price_and_can_be_had_again(connect: Connect, kind: str, name: str) -> None:
    """After a prefill of so many tokens the continuation is what it would have been."""
    client = connect(kind, name)
    with client.prefill(PROMPT) as whole, whole.fork(length=40) as fork:
        expected = [row.argmax() for row in rows_of(fork, 10)]
    with client.prefill(PROMPT, drop_outside_window=True) as cache:
        length = cache.length
        with pytest.raises(KvGivenBackError) as caught:
            cache.fork(length=40)
        error = caught.value
        assert (error.tokens_to_recompute, error.lowest_length) == (40, cache.info().lowest_length)
        assert cache.length == length
        with pytest.raises(KvGivenBackError):
            cache.truncate(40)
        assert cache.length == length
        rows_of(cache, 1)
        with client.prefill(PROMPT[: error.tokens_to_recompute]) as again:
            assert [row.argmax() for row in rows_of(again, 10)] == expected


def test_a_stream_takes_the_option(connect: Connect) -> None:
    """As a prompt of a frame; appends of the stream then give blocks back."""
    client = connect("torch", "mistral-window")
    with client.stream() as stream:
        (cache,) = stream.run([Prompt(PROMPT, drop_outside_window=True)])
        with cache:
            for token in range(40):
                stream.run([Append(cache, [token])])
            (one,) = client.list_caches()
            assert (one.length, one.first_position, one.lowest_length) == (110, 64, 73)


def test_a_model_that_attends_to_everything_says_so(client: Client, target: str) -> None:
    """The field is named, whichever call has it."""
    assert client.model_info().attention_window == 0
    for refused in (
        lambda: client.prefill([1, 2], drop_outside_window=True),
        lambda: client.generate([1, 2], 3, drop_outside_window=True).read(),
    ):
        with pytest.raises(UnsupportedError, match="drop_outside_window") as caught:
            refused()
        assert caught.value.metadata["feature"] == "drop_outside_window"
