"""What a cubin must be before a GPU sees it: every rule is checked on the machine code itself.

Each rule is one function that names what breaks it, with the instruction. What machine code no longer shows, where an
address comes from, is read from the PTX (:mod:`ferrule_server.kernels.cuda.toolchain.addressing`).

Limits of a multiprocessor: "CUDA C++ Programming Guide", table of technical specifications per compute capability;
allocation granularity: the occupancy calculator of Nsight Compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.toolchain.addressing import mixed_loads, narrow_addresses
from ferrule_server.kernels.cuda.toolchain.build import Job, Progress, build
from ferrule_server.kernels.cuda.toolchain.compile import ARCHITECTURES, Cubin
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache
from ferrule_server.kernels.cuda.toolchain.sass import (
    INSTRUCTION_BYTES,
    Instruction,
    MachineCode,
    disassemble,
    disassemble_all,
)

__all__ = [
    "MULTIPROCESSORS",
    "RULES",
    "Facts",
    "Made",
    "Multiprocessor",
    "Violation",
    "check",
    "make_all",
]

_GLOBAL_STORES = frozenset({"STG", "ST", "ATOMG", "ATOM", "RED", "REDG", "UBLKRED", "UTMASTG", "UTMAREDG"})
_ATOMICS = frozenset({"ATOMG", "ATOM", "RED", "REDG"})
_GLOBAL_LOADS = frozenset({"LDG", "LD", "LDGSTS", "UBLKCP", "UTMALDG"})
_FLOAT64 = frozenset({"DADD", "DMUL", "DFMA", "DSETP", "DMNMX", "DMMA", "DSEL"})
_UNKNOWN_JUMPS = frozenset({"RET", "BRX", "BRXU", "JMX", "JMXU"})
_SHUFFLE_HELPER = re.compile(r"\$__internal_\d+_\$__cuda_sm70_(shfl|vote|match|warp)sync")
"""What ptxas calls on sm_80 where lanes that shuffle have diverged; it touches registers only."""


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """The resources of one multiprocessor.

    Attributes:
        num_registers: 32-bit registers.
        shared_bytes: Shared memory of all its CTAs together.
        max_shared_bytes_per_cta: What one CTA can have of it.
        num_threads: Resident at a time.
        num_ctas: Resident at a time, however small.
    """

    num_registers: int
    shared_bytes: int
    max_shared_bytes_per_cta: int
    num_threads: int
    num_ctas: int

    def ctas(self, num_threads: int, num_registers: int, shared_bytes: int) -> int:
        """Return how many CTAs fit together.

        Args:
            num_threads: Per CTA.
            num_registers: Per thread.
            shared_bytes: Dynamic shared memory per CTA; the system takes 1 KiB more.
        """
        if shared_bytes > self.max_shared_bytes_per_cta:
            return 0
        warps = -(-num_threads // 32)
        registers_of_warp = -(-num_registers * 32 // 256) * 256
        warps_by_registers = self.num_registers // registers_of_warp // 4 * 4
        shared_of_cta = -(-(shared_bytes + 1024) // 128) * 128
        by_shared, by_threads = self.shared_bytes // shared_of_cta, self.num_threads // (32 * warps)
        return min(warps_by_registers // warps, by_shared, by_threads, self.num_ctas)


MULTIPROCESSORS: dict[tuple[int, int], Multiprocessor] = {
    (8, 0): Multiprocessor(65536, 164 * 1024, 163 * 1024, 2048, 32),
    (8, 6): Multiprocessor(65536, 100 * 1024, 99 * 1024, 1536, 16),
    (8, 9): Multiprocessor(65536, 100 * 1024, 99 * 1024, 1536, 24),
    (9, 0): Multiprocessor(65536, 228 * 1024, 227 * 1024, 2048, 32),
}
"""By compute capability. A cubin also runs on a higher minor version than it was built for."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the table of docs/kernels.md says of one cubin.

    Attributes:
        num_registers: Per thread.
        num_spilled_bytes: Spill stores and loads.
        ctas_per_sm: CTAs that fit a multiprocessor.
        num_vector_loads: 16-byte loads of global memory that stand in the code.
        num_mma: Tensor-core instructions that stand in the code.
        code_bytes: Of machine code.
    """

    num_registers: int
    num_spilled_bytes: int
    ctas_per_sm: int
    num_vector_loads: int
    num_mma: int
    code_bytes: int


@dataclass(frozen=True, slots=True)
class Made:
    """What was promised and what came of it.

    Attributes:
        spec: The promise.
        cubin: What was compiled from it.
        code: What the cubin holds.
    """

    spec: KernelSpec
    cubin: Cubin
    code: MachineCode

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability that the cubin was built for."""
        major, minor, *_ = ARCHITECTURES[self.cubin.architecture]
        return major, minor

    def ctas_on(self, capability: tuple[int, int]) -> int:
        """Return how many CTAs fit one multiprocessor of a compute capability."""
        whole = MULTIPROCESSORS[capability]
        return whole.ctas(self.spec.num_threads, self.cubin.num_registers, self.spec.shared_bytes)

    def facts(self) -> Facts:
        """Return the figures of the cubin."""
        return Facts(
            num_registers=self.cubin.num_registers,
            num_spilled_bytes=self.cubin.num_spilled_bytes,
            ctas_per_sm=self.ctas_on(self.capability),
            num_vector_loads=sum("128" in load.modifiers for load in self.code.of("LDG", "LDGSTS")),
            num_mma=len(self.code.of("HMMA")),
            code_bytes=len(self.code.instructions) * INSTRUCTION_BYTES,
        )

    def breaches(self) -> list[Violation]:
        """Return every rule that is broken, nothing if the cubin may be shipped."""
        return [
            Violation(self.spec.name, self.cubin.architecture, rule, message)
            for rule, messages in RULES.items()
            for message in messages(self)
        ]


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule broken by one cubin.

    Attributes:
        kernel: Name of the spec.
        architecture: ``sm_80``, ``sm_90a``.
        rule: A key of :data:`RULES`.
        message: What is wrong, with the instruction.
    """

    kernel: str
    architecture: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.architecture}: {self.rule}: {self.message}"


def check(spec: KernelSpec, cubin: Cubin) -> list[Violation]:
    """Return every rule that a cubin breaks, nothing if it may be shipped.

    Args:
        spec: What is promised.
        cubin: What was compiled from it.

    Raises:
        CompileError: nvdisasm fails.
    """
    return Made(spec, cubin, disassemble(cubin)).breaches()


def make_all(
    specs: Iterable[KernelSpec],
    architectures: Iterable[str] = ARCHITECTURES,
    *,
    cache: CubinCache | None = None,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> list[Made]:
    """Return every spec compiled for every architecture and taken apart, spec by spec.

    Args:
        specs: Each once.
        architectures: Keys of :data:`ferrule_server.kernels.cuda.toolchain.compile.ARCHITECTURES`.
        cache: Where compiled kernels are looked for and kept.
        num_workers: Processes that compile; None: one per core.
        progress: Told of each kernel that is compiled.

    Raises:
        KernelError: A kernel's source leaves the language.
        CompileError: The toolkit is missing, or refuses one.
    """
    jobs = [(spec, architecture) for spec in specs for architecture in architectures]
    cubins = build(jobs, cache=cache, num_workers=num_workers, progress=progress)
    codes: dict[Job, MachineCode] = {}
    for architecture in {name for _, name in jobs}:
        same = [job for job in jobs if job[1] == architecture]
        codes.update(zip(same, disassemble_all([cubins[job] for job in same]), strict=True))
    return [Made(spec, cubin, codes[spec, name]) for (spec, name), cubin in cubins.items()]


def _no_local_memory(made: Made) -> Iterator[str]:
    """Nothing spills and nothing lives in local memory."""
    if made.cubin.num_spilled_bytes or made.cubin.num_stack_bytes:
        yield f"{made.cubin.num_spilled_bytes} bytes spilled, a stack frame of {made.cubin.num_stack_bytes} bytes"
    yield from (f"local memory: {instruction}" for instruction in made.code.of("LDL", "STL"))


def _no_float64(made: Made) -> Iterator[str]:
    """Nothing is computed in double precision, not even a constant."""
    for instruction in made.code.instructions:
        if instruction.base in _FLOAT64 or instruction.modifiers & {"F64", "RCP64H", "RSQ64H"}:
            yield str(instruction)
    if found := re.search(r"^.*\.f64\b.*$", made.cubin.ptx, re.MULTILINE):
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
    found = made.facts().num_vector_loads
    if found < made.spec.min_vector_loads:
        yield f"{found} loads of 16 bytes, {made.spec.min_vector_loads} are promised"


def _tensor_cores(made: Made) -> Iterator[str]:
    """Tensor cores are used where the spec says so and nowhere else."""
    found = len(made.code.of("HMMA"))
    if made.spec.has_mma != bool(found):
        yield f"{found} HMMA instructions, has_mma is {made.spec.has_mma}"


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
    """On sm_90 every path waits, once, and dependents are let in; before sm_90 there is nothing to wait for."""
    waits, releases = made.code.of("ACQBULK"), made.code.of("PREEXIT")
    if made.cubin.architecture == "sm_80":
        yield from (f"sm_80 has no {instruction}" for instruction in waits + releases)
        return
    if not releases:
        yield "no PREEXIT: the next kernel is never let in early; call grid_launch_dependents()"
    for instruction in made.code.reached([0], _is_wait):
        if instruction.base == "EXIT":
            yield f"ends without having waited: {instruction}"
    for wait in waits:
        if any(_is_wait(again) for again in made.code.reached(made.code.successors[wait.index], lambda _: False)):
            yield f"may wait again: {wait}"


def _above_wait(made: Made) -> Iterator[str]:
    """Above the wait nothing is stored to global memory and nothing is loaded but immutable data, if promised."""
    if made.cubin.architecture == "sm_80":
        return
    prefetches = 0
    for instruction in made.code.reached([0], _is_wait):
        if instruction.base in _GLOBAL_STORES:
            yield f"stores above the wait: {instruction}"
        elif instruction.base in _GLOBAL_LOADS and not _is_stream(instruction):
            yield f"loads what others may write above the wait: {instruction}"
        elif instruction.base in _GLOBAL_LOADS:
            prefetches += 1
    if bool(prefetches) != made.spec.prefetches:
        yield f"{prefetches} loads above the wait, prefetches is {made.spec.prefetches}"


def _is_stream(instruction: Instruction) -> bool:
    """Say whether it is ``load_stream_v4`` or the copy like it, the two that read data which nobody writes."""
    return {"LDG": "NA", "LDGSTS": "LTC128B"}.get(instruction.base) in instruction.modifiers


def _ticket(made: Made) -> Iterator[str]:
    """A fence stands on every path to a ticket and right behind it; what one load reads strongly, none reads weakly."""
    tickets = [instruction for instruction in made.code.of("ATOMG", "ATOM") if "INC" in instruction.modifiers]
    if bool(tickets) != made.spec.has_ticket:
        yield f"{len(tickets)} tickets, has_ticket is {made.spec.has_ticket}"
    for ticket in tickets:
        yield from _ticket_breaches(ticket, made.code)
    yield from mixed_loads(made.spec.kernel, made.cubin.ptx)


def _ticket_breaches(ticket: Instruction, code: MachineCode) -> Iterator[str]:
    def fences(it: Instruction) -> bool:
        is_fence = it.base == "MEMBAR" and bool(it.modifiers & {"GPU", "SYS"})
        return is_fence and (it.is_always or it.predicate == ticket.predicate)

    following = code.successors[ticket.index]
    if any(it.index == 0 or it.base in _GLOBAL_STORES for it in code.reaching([ticket.index], fences)):
        yield f"no fence before the ticket on some path: {ticket}"
    stops = _GLOBAL_STORES | _GLOBAL_LOADS | {"BAR", "EXIT"}
    if touched := [it for it in code.reached(following, fences) if it.base in stops]:
        yield f"no fence between the ticket and {touched[0]}"
    if not any(it.base == "LDG" and "STRONG" in it.modifiers for it in code.reached(following, lambda _: False)):
        yield f"nothing is read strongly behind the ticket: {ticket}"


def _resources(made: Made) -> Iterator[str]:
    """The planned CTAs fit, on 9.0 in half a multiprocessor as kernels overlap; one fits wherever the cubin runs."""
    spec, num_registers = made.spec, made.cubin.num_registers
    if spec.num_threads % 32:
        yield f"{spec.num_threads} threads are not whole warps"
    planned = spec.ctas_per_sm if made.capability < (9, 0) else 2 * spec.ctas_per_sm
    for capability in MULTIPROCESSORS:
        if capability[0] != made.capability[0]:
            continue
        fitting, needed = made.ctas_on(capability), planned if capability == made.capability else 1
        if fitting < needed:
            yield (
                f"{fitting} CTAs of {spec.num_threads} threads, {num_registers} registers and {spec.shared_bytes} "
                f"bytes of shared memory fit a multiprocessor of {'.'.join(map(str, capability))}, {needed} must "
                f"({spec.ctas_per_sm} planned)"
            )
    if found := re.search(r"^\s*\.shared\b.*$", made.cubin.ptx, re.MULTILINE):
        yield f"shared memory that the spec does not count: {found[0].strip()}"


def _addressing(made: Made) -> Iterator[str]:
    """Block ids, strides and weight rows are multiplied in 64 bits."""
    yield from narrow_addresses(made.spec.kernel, made.cubin.ptx)


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
