"""Gauges: the state of an engine as other threads may read it."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.bridge.gate import Gate, Inbox
from ferrule_server.engine.durable.confirmations import Outlet
from ferrule_server.engine.generation.drivers import Drivers
from ferrule_server.engine.metrics.counters import EngineCounters, EngineSnapshot, OwnFigures
from ferrule_server.kv.sequence_store import SequenceStore


@dataclass(eq=False, slots=True)
class Gauges:
    """Reads the state of an engine, from any thread.

    Attributes:
        is_failed: The engine cannot continue; written by the engine.
    """

    store: SequenceStore
    counters: EngineCounters
    inbox: Inbox
    gate: Gate
    outlet: Outlet
    lanes: Lanes
    drivers: Drivers
    is_failed: bool = False

    def snapshot(self) -> EngineSnapshot:
        """Return a copy of the engine's current state; takes some tens of us, at most one step old."""
        return EngineSnapshot(
            counters=self.counters.copy(),
            num_running=len(self.lanes.running),
            num_waiting=self.lanes.num_waiting,
            num_sequences=len(self.store.registry),
            num_durable=len(self.outlet.journal),
            total_blocks=self.store.pool.capacity,
            free_blocks=self.store.pool.num_free,
            is_failed=self.is_failed,
            refused_at_gate=self.gate.refused,
            num_streams=len(self.drivers.active),
            num_parked=len(self.drivers.parked),
            num_arrived=len(self.inbox),
        )

    def own_figures(self, principal: str) -> OwnFigures:
        """Return the figures of one principal; cheap, at most one step old."""
        return OwnFigures(
            self.store.registry.count(principal),
            self.counters.own.look(principal),
            self.store.ledger.own.look(principal),
            self.gate.refused_of(principal),
        )
