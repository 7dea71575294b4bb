"""Lookahead: the next step of Generates is queued before the tokens of this one are read, and nobody can tell."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ferrule_server.engine.jobs import (
    AppendJob,
    Finish,
    ForkJob,
    ForkResult,
    GenerateJob,
    Job,
    OutputRequest,
    ReleaseJob,
    StopRules,
    TruncateJob,
    WarmupJob,
    Window,
)
from ferrule_server.executor.base import DeviceLost, OutputSpec, SampleSpec, Shaping
from ferrule_server.executor.paged_reference import PagedReferenceExecutor
from ferrule_server.kv.handle import StalePolicy
from tests.engine.deferred import DeferredHarness
from tests.engine.harness import GREEDY, Harness, append
from tests.engine.streams import Branch, drawn_with, generate, start
from tests.fakes import FakeExecutor


def test_a_long_generate_is_queued_ahead_and_draws_what_it_would_have_drawn() -> None:
    """All steps but the first ones come out of the queue; nothing is thrown away at max_tokens."""
    with Harness() as plain:
        expected = start(plain, generate(None, 1, 2, 3, output=GREEDY, max_tokens=40)).branch()
    with DeferredHarness() as harness:
        branch = start(harness, generate(None, 1, 2, 3, output=GREEDY, max_tokens=40)).branch()
        counters = harness.engine.counters
        assert branch.tokens == expected.tokens
        assert [handle.length for handle in branch.handles] == [handle.length for handle in expected.handles]
        assert [handle.lineage for handle in branch.handles] == [handle.lineage for handle in expected.handles]
        assert counters.steps == 40
        assert (counters.queued_steps, counters.discarded_rows) == (38, 0)
