"""The part of ``ferrule bench`` that puts a load on a server: its levels in their order, and JSON."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any

from ferrule_cli import common
from ferrule_cli.load.interrupts import MOST_S, run_interruptible
from ferrule_cli.load.loops import Bounds, Refused, Run, prompt_lengths
from ferrule_cli.load.options import MODES, MOST_IN_FLIGHT, MOST_REQUESTS, NEW, OPTIONS, PROMPT
from ferrule_cli.load.records import Record, Summary, rounded, summarize
from ferrule_cli.load.requests import LEASE_S, Requests, Shape
from ferrule_cli.load.watch import Watch, watching
from ferrule_cli.waiting import Waiting
from ferrule_client.aio.client import AsyncClient
from ferrule_client.errors import FerruleError, ResourceExhaustedError
from ferrule_client.types import ModelInfo

__all__ = ["Level", "Result", "counts", "measure"]

_PROGRESS_S = 0.2


@dataclass(frozen=True, slots=True)
class Level:
    """The figures of one level of load.

    Attributes:
        loop: ``closed`` or ``open``.
        load: Requests at a time in a closed loop; requests per second in an open one.
        figures: What was measured.
        retries: Calls that were repeated, by reason.
        watch: What the generator took.
    """

    loop: str
    load: float
    figures: Summary
    retries: dict[str, int]
    watch: Watch

    @property
    def name(self) -> str:
        """What people call it."""
        return name_of(self.loop, self.load)

    def as_json(self) -> dict[str, Any]:  # Any: what JSON holds
        """Return it as plain values."""
        level = {"loop": self.loop, "concurrency" if self.loop == "closed" else "rate_per_s": self.load}
        generator = rounded(asdict(self.watch)) | {"limit": self.watch.limit}
        return {**level, **self.figures.as_json(), "retries": self.retries, "generator": generator}


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured.

    Attributes:
        shape: What each request was.
        prompt_tokens: The shortest and the longest prompt.
        levels: The levels of load, in the order in which they were measured.
        signal: The signal that ended it early, or None.
        num_unreleased: Handles that could not be released.
    """

    shape: Shape
    prompt_tokens: tuple[int, int]
    levels: list[Level]
    signal: int | None
    num_unreleased: int

    @property
    def exit_code(self) -> int:
        """0, or 128 + N after signal N."""
        return 0 if self.signal is None else 128 + self.signal

    def as_json(self) -> dict[str, Any]:  # Any: what JSON holds
        """Return it as plain values."""
        return {
            **{name: value for name, value in asdict(self.shape).items() if name != "vocab_size"},
            "prompt_tokens": self.prompt_tokens,
            "interrupted": self.signal is not None,
            "num_unreleased": self.num_unreleased,
            "levels": [level.as_json() for level in self.levels],
        }

    def check(self) -> None:
        """Raise CommandError if no request succeeded, unless a signal ended the load."""
        if self.signal is None and not any(level.figures.num_ok for level in self.levels):
            errors = sum((Counter(level.figures.errors) for level in self.levels), Counter[str]())
            reasons = counts(errors) or "none finished in time, raise --seconds or --patience"
            raise common.CommandError(f"no request succeeded: {reasons}", "NOTHING_MEASURED")


def name_of(loop: str, load: float) -> str:
    """Return what people call a level of load."""
    return f"{load:g} at once" if loop == "closed" else f"{load:g}/s"


def counts(reasons: dict[str, int]) -> str:
    """Return numbers by reason as text."""
    return ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))


def measure(args: argparse.Namespace, info: ModelInfo, connect: Callable[[int], AsyncClient]) -> Result:
    """Put the load that the options describe on a server and return the figures.

    Args:
        args: The options.
        info: The model of the server.
        connect: Makes a client that tries calls again so many times; called in an event loop.

    Raises:
        CommandError: The prompts and new tokens exceed the context of the model, or the load exceeds a connection or
            the number of requests that a level may have.
        FerruleError: The first request failed for another reason than that something was full.
    """
    given = {name: getattr(args, name) for name in OPTIONS}
    numbers: dict[str, Any] = {"fork": 1, "warm_up": 2.0, "patience": 10.0, "retries": 0, "seed": 1} | {
        name: value for name, value in given.items() if value is not None
    }
    context = info.max_sequence_length
    new = numbers.get("new_tokens", min(NEW, context // 4))
    low, high = numbers.get("prompt_tokens", (min(PROMPT, context // 2),) * 2)
    if high + new > context:
        text = f"{high} tokens of a prompt and {new} new ones exceed the context of the model, {context}"
        raise common.misuse(f"{text}: lower --prompt-tokens or --new-tokens", "CONTEXT_EXCEEDED")
    shape = Shape(numbers.get("mode", MODES[0]), new, numbers["fork"], info.vocab_size, numbers["seed"])
    most = MOST_IN_FLIGHT[shape.mode]
    if max(wanted := [*(args.concurrency or []), numbers.get("max_in_flight", 1)]) > most:
        raise common.misuse(f"--mode {shape.mode} is for at most {most} at a time, not {max(wanted)}", "USED_WRONGLY")
    bounds = Bounds(numbers["warm_up"], args.seconds or 10.0, numbers.get("requests"), numbers["patience"])
    _check_number(args.rate or [], bounds)
    waiting, levels = Waiting("the first request"), list[Level]()

    async def run() -> int:
        requests: Requests | None = None
        try:
            async with connect(numbers["retries"]) as client:
                requests = Requests(client, shape)
                with waiting:
                    await _probe(requests, high)
                    plan = _Plan(requests, (low, high), bounds, numbers.get("max_in_flight", most), waiting)
                    await plan.measure(args.concurrency or [], args.rate or [], levels)
                    return await requests.close()
        except asyncio.CancelledError:  # by a signal while handles were released: the rest is left to the leases
            if requests is None or not levels:
                raise
            return len(requests.left)

    num_left, came = run_interruptible(run, lambda: _tell_what_takes_long(waiting))
    return Result(shape, (low, high), levels, came, num_left)


def _tell_what_takes_long(waiting: Waiting) -> None:
    """Say on standard error what a load that was interrupted waits for."""
    waiting.end()
    text = f"releasing handles, at most {MOST_S:.0f} s; Ctrl-C again leaves them to their leases ({LEASE_S:.0f} s)"
    print(text, file=sys.stderr, flush=True)


def _check_number(rates: list[float], bounds: Bounds) -> None:
    """Raise CommandError if an open loop would make so many requests that their records fill the memory."""
    for rate in rates:
        num = rate * bounds.warm_up_s + min(rate * bounds.duration_s, bounds.max_requests or math.inf)
        if num > MOST_REQUESTS:
            text = f"{rate:g} requests per second for {bounds.warm_up_s + bounds.duration_s:g} s are more than"
            raise common.misuse(f"{text} {MOST_REQUESTS}: lower --rate, --seconds or --requests", "USED_WRONGLY")


async def _probe(requests: Requests, prompt_length: int) -> None:
    """Make one request, so that what cannot work is one error rather than thousands; it warms the server up."""
    record = Record(prompt_length, asyncio.get_running_loop().time())
    try:
        await requests.make(-1, record)
    except Refused as refused:
        cause = refused.__cause__
        if isinstance(cause, FerruleError) and not isinstance(cause, ResourceExhaustedError):
            raise cause from None
    finally:
        await requests.release_left()


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all levels have in common."""

    requests: Requests
    prompt_tokens: tuple[int, int]
    bounds: Bounds
    max_in_flight: int
    waiting: Waiting

    async def measure(self, concurrency: list[float], rates: list[float], levels: list[Level]) -> None:
        """Append the closed loops to ``levels``, then the open ones.

        If this is cancelled, which a signal does, the last level has what was measured until then.
        """
        try:
            for load in concurrency:
                await self._level("closed", load, levels)
            for load in rates:
                await self._level("open", load, levels)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None:
                task.uncancel()

    async def _level(self, loop: str, load: float, levels: list[Level]) -> None:
        seed = f"{self.requests.shape.seed}-{loop}-{load:g}"
        run = Run(self.requests.make, prompt_lengths(*self.prompt_tokens, seed), self.bounds)
        running = run.closed(int(load)) if loop == "closed" else run.open(load, seed, max_in_flight=self.max_in_flight)
        self.requests.retries.clear()
        try:
            async with watching() as watch, self._shown(run, name_of(loop, load)):
                await running
        finally:
            if run.end_s > run.begin_s:
                figures = summarize(run.records, run.begin_s, run.end_s)
                levels.append(Level(loop, load, figures, dict(sorted(self.requests.retries.items())), watch))

    @contextlib.asynccontextmanager
    async def _shown(self, run: Run, name: str) -> AsyncIterator[None]:
        """Show on a terminal how far a run is, as long as the body lasts."""

        async def show() -> None:
            loop = asyncio.get_running_loop()
            span_s = self.bounds.warm_up_s + self.bounds.duration_s
            while True:
                share = 1 - (run.begin_s + self.bounds.duration_s - loop.time()) / span_s
                if self.bounds.max_requests:
                    share = max(share, run.num_measured / self.bounds.max_requests)
                text = f"{name}, {run.num_under_way} of {len(run.records)} requests under way"
                self.waiting.show(text, min(1.0, max(0.0, share)))
                await asyncio.sleep(_PROGRESS_S)

        showing = asyncio.create_task(show())
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
