"""The assembly: makes the parts of an engine, each from parts that exist already."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ferrule_server.engine.appends.admission import Admission
from ferrule_server.engine.appends.cold import Cold
from ferrule_server.engine.appends.commits import Commits
from ferrule_server.engine.appends.creations import Creations
from ferrule_server.engine.appends.endings import Endings
from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.appends.records import ReplayRecords
from ferrule_server.engine.appends.running import Reports
from ferrule_server.engine.assembly.gauges import Gauges
from ferrule_server.engine.bridge.delivery import Delivery, Later
from ferrule_server.engine.bridge.gate import Gate, Inbox
from ferrule_server.engine.durable.confirmations import Confirmations, Direct, Outlet
from ferrule_server.engine.durable.opening import Durability
from ferrule_server.engine.faults.failpoints import Failing, NoFailpoints
from ferrule_server.engine.generation.drivers import Drivers, Outcomes
from ferrule_server.engine.host_calls import Host
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.engine.steps.stepper import GatherWindow, Stepper
from ferrule_server.engine.steps.warmup import Warmup
from ferrule_server.executor.base import Executor
from ferrule_server.fairness.turns import Shares
from ferrule_server.kv.sequence_store import SequenceStore
from ferrule_server.quotas import LimitsOf, unlimited


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is made from.

    Attributes:
        executor: Owned by the engine from now on; closed with it.
        store: Owned by the engine from now on.
        settings: Limits.
        post: Runs a callable on the event loop's thread, such as ``loop.call_soon_threadsafe``.
        on_failure: Called once, on the engine thread, when the engine cannot continue, such as after a lost device.
        later: Runs a callable on that thread after some seconds, such as ``loop.call_later``; None: frames of a
            Generate never wait for others.
        limits_of: The quotas of a principal.
        shares: Counts the work for each principal.
        durability: The journal of durable sequences and what it described at start; None: there are none.
        failpoints: Where to fail on purpose.
    """

    executor: Executor
    store: SequenceStore
    settings: EngineSettings
    post: Callable[[Callable[[], None]], object]
    on_failure: Callable[[], object] = lambda: None
    later: Later | None = None
    limits_of: LimitsOf = unlimited
    shares: Shares = field(default_factory=Shares)
    durability: Durability | None = None
    failpoints: Failing = field(default_factory=NoFailpoints)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine; the docstring of each says what it does."""

    inbox: Inbox
    gate: Gate
    delivery: Delivery
    outlet: Outlet
    outcomes: Outcomes
    lanes: Lanes
    endings: Endings
    drivers: Drivers
    gather: GatherWindow
    warmup: Warmup
    stepper: Stepper
    host: Host
    gauges: Gauges


def assemble(setup: Setup, counters: EngineCounters) -> Parts:
    """Return the parts of an engine, joined.

    Raises:
        OSError: The journal cannot be written.
    """
    store, settings, durability = setup.store, setup.settings, setup.durability
    inbox, outcomes, gather = Inbox(), Outcomes(counters), GatherWindow(settings)
    gate = Gate(settings.max_waiting_jobs, setup.limits_of)
    delivery = Delivery(setup.post, gate, setup.later)
    records = ReplayRecords(settings.retained_bytes, setup.limits_of)
    creations = Creations(store.clock)
    outlet: Outlet = Direct(delivery)
    if durability is not None:
        outlet = Confirmations(durability.journal, store, delivery)
        outlet.restore(durability, records, creations, partial(inbox.put, []))
    journal: Reports = outlet.journal
    admission = Admission(store, records, creations, counters, setup.executor.info.model.fingerprint)
    cold = Cold(store, counters, settings.restore_wait_tokens)
    lanes = Lanes(store, admission, creations, cold, counters, outcomes.collect, journal, setup.failpoints)
    endings = Endings(store, lanes, gather.forget, counters, journal, setup.failpoints)
    seed_key = secrets.token_bytes(16) if durability is None else durability.seed_key
    drivers = Drivers(store, lanes, counters, creations.check_loop, endings.release_one, outcomes, seed_key)
    warmup = Warmup(setup.executor, settings.max_step_rows, outcomes.collect)
    commits = Commits(store, records, creations, counters, journal, setup.failpoints)
    stepper = Stepper(
        setup.executor, store, settings, lanes, commits, warmup, gather, counters, setup.shares, setup.failpoints
    )
    endings.listeners = (records.forget, stepper.batcher.forget, creations.note_ended, drivers.note_ended)
    gauges = Gauges(store, counters, inbox, gate, outlet, lanes, drivers)
    bytes_per_block = setup.executor.info.bytes_per_block
    host = Host(store, bytes_per_block, lanes, endings, journal, gate, counters.own, gauges.snapshot)
    return Parts(
        inbox=inbox,
        gate=gate,
        delivery=delivery,
        outlet=outlet,
        outcomes=outcomes,
        lanes=lanes,
        endings=endings,
        drivers=drivers,
        gather=gather,
        warmup=warmup,
        stepper=stepper,
        host=host,
        gauges=gauges,
    )
