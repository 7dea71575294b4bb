"""Launches that follow each other as in a captured step, each begun before the one before it has published."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ferrule_server.kernels.cuda.specialise import Constant, Specialised, specialise
from tools.cuda_simulator.grid import Grid
from tools.cuda_simulator.memory import Memory
from tools.cuda_simulator.numbers import f32
from tools.cuda_simulator.translate import Program, translate

__all__ = ["Launch", "run"]

_programs: dict[object, Program] = {}


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with what it is launched with.

    Attributes:
        kernel: In the language of :mod:`ferrule_server.kernels.cuda.specialise`.
        constants: Its keyword-only parameters.
        args: Its positional parameters.
        grid: Number of CTAs, or (x, y).
        num_threads: Of each CTA, a multiple of 32.
        shared_bytes: Dynamic shared memory of each CTA.
        specialised: What to run instead of the kernel as written: a mutant.
    """

    kernel: Callable[..., None]
    constants: Mapping[str, Constant]
    args: tuple[Any, ...]
    grid: int | tuple[int, int]
    num_threads: int
    shared_bytes: int = 0
    specialised: Specialised | None = None


def run(memory: Memory, launches: Sequence[Launch], *, seed: int = 0) -> None:
    """Run launches one after another, as kernels linked by programmatic dependent launch.

    Raises:
        SimulationError: A kernel did something wrong.
    """
    grids: list[Grid] = []
    with _without_collector():
        for index, launch in enumerate(launches):
            grids.append(_begin(memory, launch, seed * 1009 + index))
            if index:
                grids[index - 1].run_to_end()
        if grids:
            grids[-1].run_to_end()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the garbage collector away: it would look at every access of a launch again and again, and free nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _begin(memory: Memory, launch: Launch, seed: int) -> Grid:
    program = _program(launch)
    kinds = (launch.specialised or _specialised(launch)).parameters
    assert len(kinds) == len(launch.args), f"{program.name} takes {[name for name, _ in kinds]}"
    arguments = tuple(_argument(value, kind) for value, (_, kind) in zip(launch.args, kinds, strict=True))
    size = launch.grid if isinstance(launch.grid, tuple) else (launch.grid, 1)
    grid = Grid(
        memory,
        program,
        arguments,
        grid=size,
        num_threads=launch.num_threads,
        shared_bytes=launch.shared_bytes,
        seed=seed,
    )
    grid.run_to_wait()
    return grid


_made: dict[object, Specialised] = {}


def _key(launch: Launch) -> object:
    return launch.kernel, tuple(sorted(launch.constants.items()))


def _specialised(launch: Launch) -> Specialised:
    key = _key(launch)
    if key not in _made:
        _made[key] = specialise(launch.kernel, launch.constants)
    return _made[key]


def _program(launch: Launch) -> Program:
    if launch.specialised is not None:
        return translate(launch.specialised)
    key = _key(launch)
    if key not in _programs:
        _programs[key] = translate(_specialised(launch))
    return _programs[key]


def _argument(value: Any, kind: str) -> int | float:
    if kind == "F32":
        return f32(float(value))
    number = int(value)
    if kind == "I32":
        assert -(1 << 31) <= number < 1 << 31, number
    return number
