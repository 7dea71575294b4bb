"""The machine code of a cubin: nvdisasm writes it as JSON, the jumps make it a graph.

The graph lets a rule say *on some path from the entry that has not waited yet* where a listing only has lines above and
below. It never has too few paths: where threads meet again (BSYNC) is any place that a BSSY of that barrier names.

The code is cut out of the ELF image here, because nvdisasm takes one file at a time and a fifth of a second to start.

Opcodes: NVIDIA, "CUDA Binary Utilities", instruction set references of Ampere and Hopper.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ferrule_server.kernels.cuda.toolchain.compile import CompileError, Cubin, tool

__all__ = ["INSTRUCTION_BYTES", "Instruction", "MachineCode", "disassemble", "disassemble_all"]

INSTRUCTION_BYTES = 16

_JUMPS = frozenset({"BRA", "JMP", "WARPSYNC", "BSYNC", "CALL"})
_TARGETS = ("BRA", "JMP", "CALL", "BSSY")
_ALWAYS = frozenset({"", "@PT", "@UPT"})

_SYMBOL_TABLE, _FUNCTION = 2, 2  # kinds of sections and of symbols in ELF


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
        CompileError: nvdisasm is not installed or refuses the code, or the cubin holds no kernel of its name.
    """
    (code,) = disassemble_all([cubin])
    return code


def disassemble_all(cubins: Sequence[Cubin]) -> list[MachineCode]:
    """Return the machine code of each cubin; one run of nvdisasm, which starts slowly, serves them all.

    Args:
        cubins: Of one architecture.

    Raises:
        CompileError: As for :func:`disassemble`.
    """
    texts = [_text(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(prefix="ferrule-", suffix=".bin") as file:
        Path(file.name).write_bytes(b"".join(content for content, _ in texts))
        machine = cubins[0].architecture.replace("sm_", "SM")
        command = [str(tool("nvdisasm")), "--binary", machine, "-json", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise CompileError(f"nvdisasm refuses {', '.join(cubin.name for cubin in cubins)}:\n{done.stderr}")
    listing = json.loads(done.stdout)[1][0]["sass-instructions"]
    found, start = [], 0
    for content, helpers in texts:
        count = len(content) // INSTRUCTION_BYTES
        found.append(_machine_code(listing[start : start + count], start * INSTRUCTION_BYTES, helpers))
        start += count
    return found


def _text(cubin: Cubin) -> tuple[bytes, dict[int, str]]:
    """Return the code of a cubin's kernel, and where in it functions of the assembler begin, by name."""
    image = cubin.code
    (begin,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", image, begin + i * size)) for i in range(count)]
    for index, section in enumerate(sections):
        if _string(image, sections[names].offset + section.name) == f".text.{cubin.name}":
            tables = [table for table in sections if table.kind == _SYMBOL_TABLE]
            symbols = (it for table in tables for it in _symbols(image, table, sections[table.link].offset))
            helpers = {value: name for name, kind, where, value in symbols if where == index and kind == _FUNCTION}
            return image[section.offset : section.offset + section.size], helpers
    raise CompileError(f"the cubin of {cubin.name} for {cubin.architecture} holds no kernel of that name")


class _Section(NamedTuple):
    """A section header of ELF64."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def _symbols(image: bytes, table: _Section, names: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, kind, section and place of each symbol."""
    for place in range(table.offset, table.offset + table.size, 24):
        name, kind, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, place)
        yield _string(image, names + name), kind & 15, section, value


def _string(image: bytes, start: int) -> str:
    return image[start : image.index(b"\0", start)].decode()


def _machine_code(listing: list[dict[str, str]], base: int, helpers: dict[int, str]) -> MachineCode:
    instructions = tuple(
        Instruction(index, line.get("predicate", ""), line["opcode"], _operands(line, base, helpers))
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


def _operands(line: dict[str, str], base: int, helpers: dict[int, str]) -> str:
    """Return the operands with the target of a jump counted from the start of the kernel, or by name."""
    operands = line.get("operands", "")
    found = re.search(r"0x[0-9a-f]+$", operands)
    has_target = line["opcode"].startswith(_TARGETS) or (line["opcode"].startswith("WARPSYNC") and "," in operands)
    if found is None or not has_target:
        return operands
    target = int(found[0], 16) - base
    name = helpers.get(target, "") if line["opcode"].startswith("CALL") and target else ""
    return operands[: found.start()] + (name or f"{target:#x}")


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
