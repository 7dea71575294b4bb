"""What is run: parts that stand alone, each a process of its own with a limit below ten minutes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu import models

STAGES = {
    "a": "ceilings: reads, copies, what a launch and a node of a graph cost",
    "b": "correctness at full size, against float32",
    "c": "decode steps: in process, where their time goes, and through gRPC",
    "d": "peers on the same tensors, in turns with ours",
    "e": "verify, forks, prompts again, blocks to the host and back",
}
BATCHES = (1, 8, 32, 128)
CONTEXTS = (256, 2048, 8192)
LIMIT_S = 590.0
STEPS = 64
ROUNDS = 5

Cells = list[tuple[int, ...]]
_GRID: Cells = [(batch, context, STEPS) for context in CONTEXTS for batch in BATCHES]
_CHECKED: Cells = [(1, 256, 8, 1), (2, 250, 8, 1), (8, 128, 8, 1), (32, 128, 4, 1), (128, 64, 2, 1)]
_VERIFIED: Cells = [(1, 256, 2, 5), (4, 123, 2, 9), (1, 64, 1, 40)]
_SMALL_MODELS = ("Qwen3-0.6B", "Qwen3-1.7B")
_LARGE = "Qwen3-8B"
_CHECKED_MODELS = (*_SMALL_MODELS, _LARGE)


@dataclass(frozen=True, slots=True)
class Part:
    """One process.

    Attributes:
        name: ``decode:Qwen3-8B``.
        stage: A letter of :data:`STAGES`.
        task: What the worker does.
        model: Whose tensors.
        limit_s: It is killed then; what it has said until then counts.
        settings: More for the worker.
    """

    name: str
    stage: str
    task: str
    model: str
    limit_s: float = LIMIT_S
    settings: dict[str, Any] = field(default_factory=dict)


def all_parts() -> list[Part]:
    """Return every part of a run on a GPU, in order."""
    found = [Part("ceilings", "a", "ceilings", _LARGE, 120, {"shape": _LARGE})]
    found += [_part("b", "correct", model, 300, cells=_CHECKED + _VERIFIED) for model in _CHECKED_MODELS]
    found += [_part("c", "decode", model, cells=_GRID, rounds=ROUNDS) for model in _CHECKED_MODELS]
    llama: Cells = [(1, 32, 128), *((batch, 256, STEPS) for batch in BATCHES)]
    found.append(_part("c", "decode", "Llama-3.2-1B", 400, cells=llama, rounds=ROUNDS))
    found += [_part("c", "profile", model, 200, cells=[(1, 256, 8), (32, 2048, 8)]) for model in _CHECKED_MODELS]
    for model in _CHECKED_MODELS:
        for context in CONTEXTS:
            cells: Cells = [(batch, context, 2 * STEPS) for batch in BATCHES]
            found.append(Part(f"wire:{model}:{context}", "c", "wire", model, LIMIT_S, {"cells": cells, "rounds": 3}))
    found += _peers()
    operations = {"context": 8192, "verify_contexts": [256, 2048], "transfer_blocks": 256, "rounds": 3}
    found.append(Part(f"operations:{_LARGE}", "e", "operations", _LARGE, 400, operations))
    return found


def _peers() -> list[Part]:
    compiled: Cells = [(1, 256, STEPS), (32, 2048, STEPS), (8, 256, STEPS), (32, 256, STEPS), (128, 256, STEPS)]
    batched: Cells = [*((batch, 256, STEPS) for batch in BATCHES), (32, 2048, STEPS)]
    found = [_against("static", model, compiled) for model in _CHECKED_MODELS]
    found += [_against("compiled", model, compiled[:2]) for model in ("Qwen3-0.6B", _LARGE)]
    found += [_against("graph", model, [*compiled, (1, 2048, STEPS)]) for model in _CHECKED_MODELS]
    found += [_part("d", "batching", model, cells=batched, rounds=2) for model in ("Qwen3-0.6B", _LARGE)]
    found += [_part("d", "attention", model, 400) for model in ("Qwen3-0.6B", _LARGE)]
    return found


def dry_parts() -> list[Part]:
    """Return one part of each kind on the tiny model, for a machine without a GPU."""
    tiny = models.TINY
    cells: Cells = [(1, 40, 8), (3, 40, 8)]
    found = [Part("ceilings", "a", "ceilings", tiny, 300, {"shape": "Qwen3-0.6B"})]
    found.append(_part("b", "correct", tiny, 300, cells=[(1, 40, 4, 1), (3, 40, 4, 1), (2, 33, 2, 4)]))
    found.append(_part("c", "decode", tiny, 300, cells=cells, rounds=2))
    found.append(_part("c", "profile", tiny, 300, cells=cells[:1]))
    long: Cells = [(1, 40, 200), (3, 40, 200)]  # tokens of short steps come some at a time
    found.append(Part(f"wire:{tiny}:40", "c", "wire", tiny, 300, {"cells": long, "rounds": 2}))
    found += [_against(peer, tiny, cells) for peer in ("static", "compiled", "graph")]
    found.append(_part("d", "batching", tiny, 300, cells=cells[1:], rounds=1))
    found.append(_part("d", "attention", tiny, 300))
    operations = {"context": 128, "verify_contexts": [40], "transfer_blocks": 8, "rounds": 2}
    found.append(Part(f"operations:{tiny}", "e", "operations", tiny, 300, operations))
    return found


def _part(stage: str, task: str, model: str, limit_s: float = LIMIT_S, **settings: Any) -> Part:
    return Part(f"{task}:{model}", stage, task, model, limit_s, settings)


def _against(peer: str, model: str, cells: Cells) -> Part:
    settings = {"peer": peer, "cells": cells, "rounds": ROUNDS if model != models.TINY else 2}
    return Part(f"{peer}:{model}", "d", "against", model, LIMIT_S, settings)
