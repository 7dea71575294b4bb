"""Count the functions of the server that one decoded token passes: a measure of how far a reader must follow it.

    python -m tools.trace_token [--tokens 200] [--calls | --order]

A server with the paged reference executor runs in this process, a client on a thread of it decodes one warm handle over
StreamDecode, one token for each frame, and a profile hook counts the calls of functions in ``server/ferrule_server``,
on the event loop and on the engine thread. The executor is left out: it is another one for each device. A coroutine
that is resumed is not called, and comprehensions are part of the function that they stand in. Each function is counted
by its median over the tokens, so that work that is done now and then (a check of leases) is left out.

``tests/test_trace_token.py`` bounds the totals.
"""

from __future__ import annotations

import argparse
import dis
import os
import queue
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import grpc

from ferrule.v1 import executor_pb2, executor_pb2_grpc, policy_pb2, types_pb2
from ferrule_server.__main__ import main as serve

ROOT = Path(__file__).resolve().parents[1]
SERVER = str(ROOT / "server" / "ferrule_server") + os.sep

EXECUTOR: Final = SERVER + "executor" + os.sep

_WARM_TOKENS: Final = 50
_INLINE: Final = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_NOT_OURS: Final = -2  # below every offset, also below -1, the one before the first instruction
_REPLY_TIMEOUT_S: Final = 60.0
_GREEDY: Final = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the server.

    Attributes:
        file: Its file below ``server/ferrule_server``.
        name: Its qualified name.
    """

    file: str
    name: str


class Tracer:
    """Counts calls of the server's functions; installed as the profile hook of each thread that is of interest."""

    def __init__(self) -> None:
        self._calls: Counter[CodeType] = Counter()
        self._starts: dict[CodeType, int] = {}
        self.is_counting = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Count one call; the signature is that of a profile hook."""
        if event != "call" or not self.is_counting:
            return
        code = frame.f_code
        start = self._starts.get(code)
        if start is None:
            start = self._starts[code] = _start(code)
        if frame.f_lasti <= start:
            self._calls[code] += 1

    def take(self) -> Counter[Function]:
        """Return what has been counted since the last time."""
        calls, self._calls = self._calls, Counter()
        return Counter(
            {
                Function(code.co_filename.removeprefix(SERVER), code.co_qualname): number
                for code, number in calls.items()
            }
        )


def _start(code: CodeType) -> int:
    """Return the offset in the bytecode where a function of the server begins, or _NOT_OURS for other code."""
    is_ours = code.co_filename.startswith(SERVER) and not code.co_filename.startswith(EXECUTOR)
    if not is_ours or code.co_name in _INLINE:
        return _NOT_OURS
    return next(each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")


def trace(num_tokens: int) -> Counter[Function]:
    """Return the calls that one warm token takes, the median over ``num_tokens`` of them, in the order of the last one.

    Raises:
        RuntimeError: The client of the trace failed.
    """
    tracer = Tracer()
    outcome: queue.SimpleQueue[list[Counter[Function]] | Exception] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/server.sock"
        client = threading.Thread(target=_decode, args=(address, num_tokens, tracer, outcome), daemon=True)
        client.start()
        threading.setprofile(tracer)
        sys.setprofile(tracer)
        try:
            settings = ["--executor", "paged-reference", "--listen", address, "--log-level", "error"]
            serve([*settings, "--drain-grace", "0s"])  # nobody gives the handle back
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # removes the hook
    samples = outcome.get(timeout=_REPLY_TIMEOUT_S)
    if isinstance(samples, Exception):
        raise RuntimeError("the client of the trace failed") from samples
    functions = dict.fromkeys(each for sample in reversed(samples) for each in sample)
    medians = {each: int(statistics.median(sample[each] for sample in samples)) for each in functions}
    return Counter({each: number for each, number in medians.items() if number})


def _decode(
    address: str, num_tokens: int, tracer: Tracer, outcome: queue.SimpleQueue[list[Counter[Function]] | Exception]
) -> None:
    """Decode one handle token by token, hand over a count for each, then end the server."""
    try:
        with grpc.insecure_channel(address) as channel:
            outcome.put(_samples(channel, num_tokens, tracer))
    except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
        outcome.put(error)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _samples(channel: grpc.Channel, num_tokens: int, tracer: Tracer) -> list[Counter[Function]]:
    stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
    prompt = executor_pb2.PrefillRequest(input=executor_pb2.PrefillInput(input_ids=[1, 2, 3]))
    handle = _prefill_when_loaded(stub, prompt).output.kv_cache
    requests: queue.SimpleQueue[executor_pb2.StreamDecodeRequest | None] = queue.SimpleQueue()
    replies = stub.StreamDecode(iter(requests.get, None))
    samples: list[Counter[Function]] = []
    for index in range(_WARM_TOKENS + num_tokens):
        tracer.take()
        tracer.is_counting = index >= _WARM_TOKENS
        requests.put(_frame(index, handle))
        handle = next(replies).results[0].decode.kv_cache
        tracer.is_counting = False
        if index >= _WARM_TOKENS:
            samples.append(tracer.take())
    requests.put(None)
    return samples


def _prefill_when_loaded(
    stub: executor_pb2_grpc.ModelExecutorServiceStub, prompt: executor_pb2.PrefillRequest
) -> executor_pb2.PrefillResponse:
    """Prefill; a server that is not up yet, or still loads, is asked again."""
    until = time.monotonic() + _REPLY_TIMEOUT_S
    while True:
        try:
            return stub.Prefill(prompt, wait_for_ready=True, timeout=_REPLY_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                raise
            time.sleep(0.05)


def _frame(index: int, handle: types_pb2.KvCacheHandle) -> executor_pb2.StreamDecodeRequest:
    token = executor_pb2.DecodeInput(input_ids=[7], kv_cache=handle, logits_policy=_GREEDY)
    return executor_pb2.StreamDecodeRequest(items=[executor_pb2.StreamItem(seq=index, decode=token)])


def main() -> None:
    """Print what one token passes: a line for each file, with ``--calls`` one for each function too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200, help="tokens to take the median of (default: %(default)s)")
    parser.add_argument("--calls", action="store_true", help="name each function")
    parser.add_argument("--order", action="store_true", help="name each function once, in the order of the calls")
    arguments = parser.parse_args()
    calls = trace(arguments.tokens)
    if arguments.order:
        print(*(f"{each.file} {each.name}" for each in calls), sep="\n")
    for line in _lines(calls, names_functions=arguments.calls):
        print(line)


def _lines(calls: Counter[Function], *, names_functions: bool) -> Iterator[str]:
    files: Counter[str] = Counter()
    for function, number in calls.items():
        files[function.file] += number
    for file, number in files.most_common():
        yield f"{number:5}  {file}"
        if names_functions:
            of_file = Counter({each: times for each, times in calls.items() if each.file == file})
            yield from (f"           {times:3}  {each.name}" for each, times in of_file.most_common())
    yield f"{calls.total():5}  calls of {len(calls)} functions in {len(files)} files for one token"


if __name__ == "__main__":
    main()
