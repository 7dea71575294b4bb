"""What a cubin must be before a GPU sees it: every rule is checked on the machine code itself.

Each rule is one function that names what breaks it, with the instruction. What machine code no longer shows, where an
address comes from, is read from the PTX (:mod:`tools.kernels.addressing`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ferrule_server.kernel_builder.compile import Compiled, has_dependent_launch, has_room_for_two
from tools.kernels.addressing import mixed_loads, narrow_addresses
from tools.kernels.sass import Instruction, MachineCode, disassemble_all

_GLOBAL_STORES = frozenset({"STG", "ST", "ATOMG", "ATOM", "RED", "REDG", "UBLKRED", "UTMASTG", "UTMAREDG"})
_ATOMICS = frozenset({"ATOMG", "ATOM", "RED", "REDG"})
_GLOBAL_LOADS = frozenset({"LDG", "LD", "LDGSTS", "UBLKCP", "UTMALDG"})
_FLOAT64 = frozenset({"DADD", "DMUL", "DFMA", "DSETP", "DMNMX", "DMMA", "DSEL"})
_UNKNOWN_JUMPS = frozenset({"RET", "BRX", "BRXU", "JMX", "JMXU"})
_SHUFFLE_HELPER = re.compile(r"\$__internal_\d+_\$__cuda_sm70_(shfl|vote|match|warp)sync")
"""What ptxas calls before sm_90 where lanes that shuffle have diverged; it touches registers only."""


@dataclass(frozen=True, slots=True)
class Made:
    """A compiled kernel, taken apart.

    Attributes:
        compiled: The kernel; its spec says what is promised.
        code: What the cubin holds.
    """

    compiled: Compiled
    code: MachineCode

    @property
    def num_vector_loads(self) -> int:
        """16-byte loads of global memory that stand in the code."""
        return sum("128" in load.modifiers for load in self.code.of("LDG", "LDGSTS"))

    def breaches(self) -> dict[str, list[str]]:
        """Return what breaks each rule; nothing if the cubin may be shipped."""
        found = {rule: list(messages(self)) for rule, messages in RULES.items()}
        return {rule: messages for rule, messages in found.items() if messages}

    def lines(self) -> list[str]:
        """Return one line for each breach, with the names of kernel and architecture."""
        name = f"{self.compiled.spec.name} {self.compiled.architecture}"
        return [f"{name}: {rule}: {message}" for rule, found in self.breaches().items() for message in found]


def take_apart(compiled: Sequence[Compiled]) -> list[Made]:
    """Return compiled kernels with their machine code.

    Raises:
        CompileError: nvdisasm fails.
    """
    return [Made(*pair) for pair in zip(compiled, disassemble_all(compiled), strict=True)]


def check(compiled: Sequence[Compiled]) -> list[str]:
    """Return one line for every rule that a kernel breaks, nothing if all may be shipped.

    Raises:
        CompileError: nvdisasm fails.
    """
    return [line for made in take_apart(compiled) for line in made.lines()]


def _no_local_memory(made: Made) -> Iterator[str]:
    """Nothing spills and nothing lives in local memory."""
    spilled, stack = made.compiled.num_spilled_bytes, made.compiled.num_stack_bytes
    if spilled or stack:
        yield f"{spilled} bytes spilled, a stack frame of {stack} bytes"
    yield from (f"local memory: {instruction}" for instruction in made.code.of("LDL", "STL"))


def _no_float64(made: Made) -> Iterator[str]:
    """Nothing is computed in double precision, not even a constant."""
    for instruction in made.code.instructions:
        if instruction.base in _FLOAT64 or instruction.modifiers & {"F64", "RCP64H", "RSQ64H"}:
            yield str(instruction)
    if found := re.search(r"^.*\.f64\b.*$", made.compiled.ptx, re.MULTILINE):
        yield f"in the PTX: {found[0].strip()}"


def _no_calls(made: Made) -> Iterator[str]:
    """Nothing is called and no jump is computed, so every path is known. A division by a runtime value is a call."""
    for instruction in made.code.reached([0], lambda _: False):
        is_named_call = instruction.base == "CALL" and not instruction.operands.startswith("0x")
        if is_named_call and not _SHUFFLE_HELPER.match(instruction.operands):
            yield str(instruction)
        if instruction.base in _UNKNOWN_JUMPS:
            yield f"jump to an unknown place: {instruction}"


def _plain_loads(made: Made) -> Iterator[str]:
    """No load goes through the read-only cache (``.nc``), and none leaves open which memory it means."""
    for instruction in made.code.instructions:
        if instruction.base in _GLOBAL_LOADS and "CONSTANT" in instruction.modifiers:
            yield f"read-only cache: {instruction}"
        if instruction.base in ("LD", "ST", "ATOM"):
            yield f"generic address: {instruction}"


def _vector_loads(made: Made) -> Iterator[str]:
    """As many 16-byte loads stand in the code as the spec promises."""
    if made.num_vector_loads < made.compiled.spec.min_vector_loads:
        yield f"{made.num_vector_loads} loads of 16 bytes, {made.compiled.spec.min_vector_loads} are promised"


def _tensor_cores(made: Made) -> Iterator[str]:
    """Tensor cores are used where the spec says so and nowhere else."""
    found = len(made.code.of("HMMA"))
    if made.compiled.spec.has_mma != bool(found):
        yield f"{found} HMMA instructions, has_mma is {made.compiled.spec.has_mma}"


def _atomics(made: Made) -> Iterator[str]:
    """Global atomics are strong at gpu scope; none adds floats, whose sum would depend on the order of arrival."""
    for instruction in made.code.of(*_ATOMICS):
        if not {"STRONG", "GPU"} <= instruction.modifiers:
            yield f"not strong at gpu scope: {instruction}"
        if any(re.match(r"B?F\d", modifier) for modifier in instruction.modifiers):
            yield f"adds floats in the order of arrival: {instruction}"


def _is_wait(instruction: Instruction) -> bool:
    return instruction.base == "ACQBULK" and instruction.is_always


def _wait(made: Made) -> Iterator[str]:
    """From sm_90 on every path waits, once, and early code lets dependents in; before, there is nothing to wait for."""
    waits, releases = made.code.of("ACQBULK"), made.code.of("PREEXIT")
    if not has_dependent_launch(made.compiled.architecture):
        yield from (f"{made.compiled.architecture} has no {instruction}" for instruction in waits + releases)
        return
    if made.compiled.starts_early and not releases:
        yield "no PREEXIT: the next kernel is never let in early; call grid_launch_dependents()"
    if not made.compiled.starts_early:
        yield from (f"lets the next kernel in early: {release}" for release in releases)
    for instruction in made.code.reached([0], _is_wait):
        if instruction.base == "EXIT":
            yield f"ends without having waited: {instruction}"
    for wait in waits:
        if any(_is_wait(again) for again in made.code.reached(made.code.successors[wait.index], lambda _: False)):
            yield f"may wait again: {wait}"


def _above_wait(made: Made) -> Iterator[str]:
    """Above the wait nothing is stored to global memory and nothing is loaded but immutable data, if promised."""
    if not has_dependent_launch(made.compiled.architecture):
        return
    prefetches = 0
    for instruction in made.code.reached([0], _is_wait):
        if instruction.base in _GLOBAL_STORES:
            yield f"stores above the wait: {instruction}"
        elif instruction.base in _GLOBAL_LOADS and not _is_stream(instruction):
            yield f"loads what others may write above the wait: {instruction}"
        elif instruction.base in _GLOBAL_LOADS:
            prefetches += 1
    if bool(prefetches) != made.compiled.spec.prefetches:
        yield f"{prefetches} loads above the wait, prefetches is {made.compiled.spec.prefetches}"


def _is_stream(instruction: Instruction) -> bool:
    """Say whether it is ``load_stream_v4`` or the copy like it, the two that read data which nobody writes."""
    return {"LDG": "NA", "LDGSTS": "LTC128B"}.get(instruction.base) in instruction.modifiers


def _ticket(made: Made) -> Iterator[str]:
    """A fence stands on every path to a ticket and right behind it; what one load reads strongly, none reads weakly."""
    tickets = [instruction for instruction in made.code.of("ATOMG", "ATOM") if "INC" in instruction.modifiers]
    if bool(tickets) != made.compiled.spec.has_ticket:
        yield f"{len(tickets)} tickets, has_ticket is {made.compiled.spec.has_ticket}"
    for ticket in tickets:
        yield from _ticket_breaches(ticket, made.code)
    yield from mixed_loads(made.compiled.spec.kernel, made.compiled.ptx)


def _ticket_breaches(ticket: Instruction, code: MachineCode) -> Iterator[str]:
    def fences(it: Instruction) -> bool:
        is_fence = it.base == "MEMBAR" and bool(it.modifiers & {"GPU", "SYS"})
        return is_fence and (it.is_always or it.predicate == ticket.predicate)

    following = code.successors[ticket.index]
    if any(it.index == 0 or it.base in _GLOBAL_STORES for it in code.reaching(ticket.index, fences)):
        yield f"no fence before the ticket on some path: {ticket}"
    stops = _GLOBAL_STORES | _GLOBAL_LOADS | {"BAR", "EXIT"}
    if touched := [it for it in code.reached(following, fences) if it.base in stops]:
        yield f"no fence between the ticket and {touched[0]}"
    if not any(it.base == "LDG" and "STRONG" in it.modifiers for it in code.reached(following, lambda _: False)):
        yield f"nothing is read strongly behind the ticket: {ticket}"


def _resources(made: Made) -> Iterator[str]:
    """The planned CTAs fit, where kernels overlap in half a multiprocessor; all shared memory is counted."""
    yield from made.compiled.unfit(2 if has_room_for_two(made.compiled.architecture) else 1)
    if found := re.search(r"^\s*\.shared\b.*$", made.compiled.ptx, re.MULTILINE):
        yield f"shared memory that the spec does not count: {found[0].strip()}"


def _addressing(made: Made) -> Iterator[str]:
    """Block ids, strides and weight rows are multiplied in 64 bits."""
    yield from narrow_addresses(made.compiled.spec.kernel, made.compiled.ptx)


RULES: dict[str, Callable[[Made], Iterator[str]]] = {
    "local memory": _no_local_memory,
    "float64": _no_float64,
    "calls": _no_calls,
    "plain loads": _plain_loads,
    "vector loads": _vector_loads,
    "tensor cores": _tensor_cores,
    "atomics": _atomics,
    "wait": _wait,
    "above the wait": _above_wait,
    "ticket": _ticket,
    "resources": _resources,
    "addressing": _addressing,
}
"""What is checked; each function yields one message per breach."""
