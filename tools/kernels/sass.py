"""The machine code of a cubin: nvdisasm writes it as JSON, the jumps make it a graph.

The graph lets a rule say *on some path from the entry that has not waited yet* where a listing only has lines above and
below. It never has too few paths: where threads meet again (BSYNC) is any place that a BSSY of that barrier names.

The code is cut out of the ELF image here, because nvdisasm takes one file at a time and a fifth of a second to start.

Opcodes: NVIDIA, "CUDA Binary Utilities", instruction set references of Ampere to Blackwell.
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

from ferrule_server.kernel_builder.compile import Compiled, CompileError, tool

INSTRUCTION_BYTES = 16

_JUMPS = frozenset({"BRA", "JMP", "WARPSYNC", "BSYNC", "CALL"})
_TARGETS = ("BRA", "JMP", "CALL", "BSSY")
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
        return self.predicate in ("", "@PT", "@UPT")

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
        return self._walk(self.successors, starts, stop)

    def reaching(self, end: int, stop: Callable[[Instruction], bool]) -> list[Instruction]:
        """Return what can have run before ``end`` and after anything that stops; in the order of addresses."""
        predecessors: list[list[int]] = [[] for _ in self.instructions]
        for index, successors in enumerate(self.successors):
            for successor in successors:
                predecessors[successor].append(index)
        return self._walk(predecessors, predecessors[end], stop)

    def of(self, *bases: str) -> list[Instruction]:
        """Return all instructions with one of these opcodes."""
        return [instruction for instruction in self.instructions if instruction.base in bases]

    def _walk(
        self, edges: Sequence[Iterable[int]], starts: Iterable[int], stop: Callable[[Instruction], bool]
    ) -> list[Instruction]:
        seen: set[int] = set()
        waiting = list(starts)
        while waiting:
            index = waiting.pop()
            if index not in seen and not stop(self.instructions[index]):
                seen.add(index)
                waiting += edges[index]
        return [self.instructions[index] for index in sorted(seen)]


def disassemble_all(made: Sequence[Compiled]) -> list[MachineCode]:
    """Return the machine code of each kernel; one run of nvdisasm, which starts slowly, serves all of an architecture.

    Raises:
        CompileError: nvdisasm is not installed or refuses the code, or a cubin holds no kernel of its name.
    """
    codes: dict[int, MachineCode] = {}
    for architecture in {it.architecture for it in made}:
        places = [place for place, it in enumerate(made) if it.architecture == architecture]
        codes.update(zip(places, _disassembled([made[place] for place in places]), strict=True))
    return [codes[place] for place in range(len(made))]


def _disassembled(made: Sequence[Compiled]) -> Iterator[MachineCode]:
    """Yield the machine code of each of several kernels of one architecture."""
    texts = [_text(it) for it in made]
    with tempfile.NamedTemporaryFile(prefix="ferrule-", suffix=".bin") as file:
        Path(file.name).write_bytes(b"".join(content for content, _ in texts))
        command = [str(tool("nvdisasm")), "--binary", made[0].architecture.replace("sm_", "SM"), "-json", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"nvdisasm refuses {', '.join(it.cubin.name for it in made)}:\n{done.stderr}")
    listing = json.loads(done.stdout)[1][0]["sass-instructions"]
    start = 0
    for content, helpers in texts:
        count = len(content) // INSTRUCTION_BYTES
        yield _machine_code(listing[start : start + count], start * INSTRUCTION_BYTES, helpers)
        start += count


def _text(made: Compiled) -> tuple[bytes, dict[int, str]]:
    """Return the code of a cubin's kernel, and where in it functions of the assembler begin, by name."""
    image = made.cubin.code
    (begin,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    # Of each section header: name, kind, flags, address, offset, size, link.
    sections = [struct.unpack_from("<IIQQQQI", image, begin + i * size) for i in range(count)]
    for index, (name, _, _, _, offset, length, _) in enumerate(sections):
        if _string(image, sections[names][4] + name) == f".text.{made.cubin.name}":
            tables = [(it[4], it[5], sections[it[6]][4]) for it in sections if it[1] == _SYMBOL_TABLE]
            helpers = {
                value: name for table in tables for name, where, value in _functions(image, *table) if where == index
            }
            return image[offset : offset + length], helpers
    raise CompileError(f"the cubin of {made.cubin.name} for {made.architecture} holds no kernel of that name")


def _functions(image: bytes, begin: int, size: int, names: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, section and place of each function in a table of symbols."""
    for at in range(begin, begin + size, 24):
        name, kind, _, section, value = struct.unpack_from("<IBBHQ", image, at)
        if kind & 15 == _FUNCTION:
            yield _string(image, names + name), section, value


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
    return MachineCode(instructions, tuple(tuple(i for i in it if i < len(instructions)) for it in successors))


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
