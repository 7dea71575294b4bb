"""The machine code of a cubin: nvdisasm writes it as JSON, the jumps make it a graph.

The graph lets a rule say *on some path from the entry that has not waited yet* where a listing only has lines above and
below. It never has too few paths: where threads meet again (BSYNC) is any place that a BSSY of that barrier names.

Opcodes: NVIDIA, "CUDA Binary Utilities", instruction set references of Ampere and Hopper.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ferrule_server.kernels.cuda.compile import CompileError, Cubin, tool

__all__ = ["INSTRUCTION_BYTES", "Instruction", "MachineCode", "disassemble"]

INSTRUCTION_BYTES = 16

_JUMPS = frozenset({"BRA", "JMP", "WARPSYNC", "BSYNC", "CALL"})
_ALWAYS = frozenset({"", "@PT", "@UPT"})


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction.

    Attributes:
        index: Position in the kernel; times 16 is its address.
        predicate: ``@P0``, ``@!P0`` or nothing.
        opcode: With its modifiers: ``LDG.E.128``.
        operands: As nvdisasm writes them.
    """

    index: int
    predicate: str
    opcode: str
    operands: str

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> frozenset[str]:
        """What follows the opcode."""
        return frozenset(self.opcode.split(".")[1:])

    @property
    def is_always(self) -> bool:
        """No predicate leaves it out."""
        return self.predicate in _ALWAYS

    def __str__(self) -> str:
        parts = (f"{self.index * INSTRUCTION_BYTES:#06x}:", self.predicate, self.opcode, self.operands)
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class MachineCode:
    """The instructions of one kernel and where each may go on.

    Attributes:
        instructions: In the order of their addresses.
        successors: Indices, one tuple per instruction; never too few: a jump whose target is unknown breaks the rule
            ``calls``.
    """

    instructions: tuple[Instruction, ...]
    successors: tuple[tuple[int, ...], ...]

    def reached(self, starts: Iterable[int], stop: Callable[[Instruction], bool]) -> list[Instruction]:
        """Return what can run from ``starts`` on before anything that stops; in the order of addresses."""
        return _walk(self.instructions, self.successors, starts, stop)

    def reaching(self, ends: Iterable[int], stop: Callable[[Instruction], bool]) -> list[Instruction]:
        """Return what can have run before ``ends`` and after anything that stops; in the order of addresses."""
        predecessors: list[list[int]] = [[] for _ in self.instructions]
        for index, successors in enumerate(self.successors):
            for successor in successors:
                predecessors[successor].append(index)
        starts = [predecessor for end in ends for predecessor in predecessors[end]]
        return _walk(self.instructions, predecessors, starts, stop)

    def of(self, *bases: str) -> list[Instruction]:
        """Return all instructions with one of these opcodes."""
        return [instruction for instruction in self.instructions if instruction.base in bases]


def _walk(
    instructions: tuple[Instruction, ...],
    edges: Iterable[Iterable[int]],
    starts: Iterable[int],
    stop: Callable[[Instruction], bool],
) -> list[Instruction]:
    edges = list(edges)
    seen: set[int] = set()
    waiting = list(starts)
    while waiting:
        index = waiting.pop()
        if index in seen or stop(instructions[index]):
            continue
        seen.add(index)
        waiting += edges[index]
    return [instructions[index] for index in sorted(seen)]


def disassemble(cubin: Cubin) -> MachineCode:
    """Return the machine code of a cubin.

    Raises:
        CompileError: nvdisasm is not installed, refuses the cubin, or finds no kernel of that name.
    """
    with tempfile.NamedTemporaryFile(prefix="ferrule-", suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin.code)
        command = [str(tool("nvdisasm")), "-json", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise CompileError(f"nvdisasm refuses {cubin.name} for {cubin.architecture}:\n{done.stderr}")
    for function in json.loads(done.stdout)[1]:
        if function["function-name"] == cubin.name:
            return _machine_code(function["sass-instructions"])
    raise CompileError(f"the cubin of {cubin.name} for {cubin.architecture} holds no kernel of that name")


def _machine_code(listing: list[dict[str, str]]) -> MachineCode:
    instructions = tuple(
        Instruction(index, line.get("predicate", ""), line["opcode"], line.get("operands", ""))
        for index, line in enumerate(listing)
    )
    meetings: dict[str, set[int]] = {}
    for instruction in instructions:
        if instruction.base == "BSSY":
            name, target = instruction.operands.split(",")[:2]
            meetings.setdefault(name, set()).add(int(target, 16) // INSTRUCTION_BYTES)
    successors = (_successors(instruction, meetings) for instruction in instructions)
    known = [tuple(index for index in indices if index < len(instructions)) for indices in successors]
    return MachineCode(instructions, tuple(known))


def _successors(instruction: Instruction, meetings: dict[str, set[int]]) -> set[int]:
    """Return where an instruction may go on: where threads meet again (BSYNC) is one of the places BSSY names."""
    following = {instruction.index + 1}
    if instruction.base == "EXIT":
        return set() if instruction.is_always else following
    if instruction.base not in _JUMPS:
        return following
    if instruction.base == "BSYNC":
        return following | meetings.get(instruction.operands, set())
    targets = {int(text, 16) // INSTRUCTION_BYTES for text in re.findall(r"0x[0-9a-f]+$", instruction.operands)}
    is_plain = instruction.is_always and instruction.operands.startswith("0x") and instruction.base in ("BRA", "JMP")
    return targets if is_plain else targets | following
