"""The attacker: ``python -m tests.hostile.flooder SPEC`` sends requests over many connections, many at a time.

It connects, prints ``up``, waits for a line on stdin, floods for the seconds given, prints one line of JSON, and exits
without closing anything. Requests are bytes and replies are not parsed, so that it needs little time for each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from tests.hostile.bodies import Body

NICENESS = 15
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
_CALL_S = 60.0
_PAUSE_S = 0.001
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Spec:
    """What to do.

    Attributes:
        target: Address of the server.
        token: Bearer token; empty for none.
        connections: Number of connections. depth: calls in flight on each.
        seconds: How long to flood. max_calls: and how often at most.
        holds: Keep each call open after its first reply.
    """

    target: str
    token: str
    connections: int
    depth: int
    seconds: float
    max_calls: int = 200_000
    holds: bool = False

    def save(self, path: Path, bodies: Sequence[Body]) -> None:
        """Write the spec, and the requests beside it."""
        entries = []
        for index, body in enumerate(bodies):
            file = path.with_suffix(f".{index}.bin")
            file.write_bytes(body.data)
            entries.append({"path": body.path, "file": str(file), "vary": body.vary})
        path.write_text(json.dumps({"spec": asdict(self), "bodies": entries}))


def load(path: Path) -> tuple[Spec, list[Body]]:
    """Return what :meth:`Spec.save` wrote."""
    saved = json.loads(path.read_text())
    bodies = [Body(each["path"], Path(each["file"]).read_bytes(), each["vary"]) for each in saved["bodies"]]
    return Spec(**saved["spec"]), bodies


class Flooder:
    """An attacker with connections of its own.

    Attributes:
        counts: Calls that ended, by status.
        num_bytes: What it sent.
    """

    def __init__(self, spec: Spec, bodies: Sequence[Body]) -> None:
        self._spec = spec
        self._bodies = itertools.cycle(random.sample(bodies, len(bodies)))  # each process in an order of its own
        self._metadata = (("authorization", f"Bearer {spec.token}"),) if spec.token else ()
        self._serial = int.from_bytes(os.urandom(5), "big") << 16
        self._ends_at = 0.0
        self._num_begun = 0
        self._num_held = 0
        self.counts: Counter[str] = Counter()
        self.num_bytes = 0

    async def run(self) -> dict[str, Any]:
        """Connect, wait for the word, and flood; returns what was done."""
        channels = [grpc.aio.insecure_channel(self._spec.target, _OPTIONS) for _ in range(self._spec.connections)]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        sys.stdout.write("up\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        self._ends_at = time.monotonic() + self._spec.seconds
        works = [self._work(channel) for channel in channels for _ in range(self._spec.depth)]
        tasks = [asyncio.create_task(work) for work in works]
        if self._spec.holds:
            await self._until_held(len(tasks))
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        self._ends_at = began_s + self._spec.seconds
        await asyncio.wait(tasks, timeout=self._spec.seconds)
        return {
            "span_s": (began_s, time.monotonic()),
            "cpu_s": time.process_time() - began_cpu_s,
            "num_bytes": self.num_bytes,
            "num_begun": self._num_begun,
            "num_held": self._num_held,
            "counts": dict(self.counts),
        }

    async def _work(self, channel: grpc.aio.Channel) -> None:
        while time.monotonic() < self._ends_at and self._num_begun < self._spec.max_calls:
            self._num_begun += 1
            status = await self._call(channel, next(self._bodies))
            self.counts[status] += 1
            if status not in ("OK", "INVALID_ARGUMENT", "NOT_FOUND"):
                await asyncio.sleep(_PAUSE_S)

    async def _call(self, channel: grpc.aio.Channel, body: Body) -> str:
        """Send one request to any kind of method and read all of the answer; returns the status."""
        method: Any = channel.stream_stream(body.path)  # no serializers: bytes in, bytes out
        call = method(metadata=self._metadata, timeout=_CALL_S)
        try:
            data = self._varied(body)
            await call.write(data)
            self.num_bytes += len(data)
            await (self._hold(call) if self._spec.holds else call.done_writing())
            async for _ in call:
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return (await call.code()).name  # type: ignore[no-any-return]
        return (await call.code()).name  # type: ignore[no-any-return]

    async def _hold(self, call: Any) -> None:
        """Read one reply and keep the call open."""
        await call.read()
        self._num_held += 1
        await asyncio.Event().wait()

    async def _until_held(self, count: int) -> None:
        """Wait until as many calls are open; what opening them costs is not part of the measurement."""
        give_up_s = time.monotonic() + _CALL_S
        while self._num_held < count and time.monotonic() < give_up_s:
            await asyncio.sleep(_POLL_S)

    def _varied(self, body: Body) -> bytes:
        if body.vary is None:
            return body.data
        first, stride, count = body.vary
        data = bytearray(body.data)
        for index in range(count):
            self._serial += 1
            at = first + index * stride
            data[at : at + 8] = self._serial.to_bytes(8, "little")
        return bytes(data)


def main() -> None:
    """Flood as the spec on the command line says."""
    os.nice(NICENESS)
    asyncio.run(_run(Path(sys.argv[1])))


async def _run(path: Path) -> None:
    done = await Flooder(*load(path)).run()
    print(json.dumps(done), flush=True)
    os._exit(0)  # no call is cancelled in order: connections break off, as those of a client that crashes


if __name__ == "__main__":
    main()
