"""Where the addresses of a kernel come from, read from its PTX: no product that can pass 4 Gi wraps at 32 bits.

A pool of KV blocks and a weight matrix may be larger than any test, so a product that wraps would show on a large
machine only. Two things are proven of the code itself, by following every address back to where it begins:

* An address in a pool (a parameter ``pool`` or ``*_pool``) contains a product of 64 bits with ``block_stride`` (or
  ``*_block_stride``). The block id in it comes as it was loaded: it is not scaled in 32 bits, there or in another part
  of the same address, unless a mask bounds it first (a slot gives block and place inside the block). No pool and no
  stride (``*_stride``) loses its upper half.
* An address of ``load_stream_v4``, or of the copy like it, contains no 32-bit product of two runtime values: row times
  row length.

        pool + block * block_stride + (kv_head * block_size + place) * 2 * head_dim
        ^ldp   ^ld     ^ldp            ^32 bits are enough inside a block: widened after the sum
               `- cvt.s64.s32, mul.lo.s64

PTX is in single assignment form but for loops, where one register is written on two paths; then both are followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ferrule_server.kernels.cuda.spec import parameters

_COMMENT = re.compile(r"//.*$", re.MULTILINE)
_BEFORE_OPCODE = re.compile(r"^[\s{}]*(\$\w+:\s*)*[\s{}]*(@!?%?\w+\s+)?")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_REGISTER = re.compile(r"%\w+")
_LOCAL = re.compile(r"(?<![\w%.$])(?!\w*_param_)[a-z]\w*(?=[,\s;\]}]|$)")
_SUMS = ("add", "sub", "mov", "selp", "min", "max")
_BOUNDS = ("and", "bfe", "rem")
_NO_RESULT = ("st", "red", "bra", "bar", "ret", "fence", "griddepcontrol", "cp", "membar", "trap", "prefetch")


@dataclass(frozen=True, slots=True, eq=False)
class _Statement:
    """One instruction: its opcode and operands as text, what it writes first."""

    opcode: str
    operands: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def is_wide(self) -> bool:
        """The result has 64 bits."""
        return self.opcode.endswith("64") or ".wide." in self.opcode or self.opcode.startswith(("cvt.s64", "cvt.u64"))

    @property
    def written(self) -> list[str]:
        return [] if self.base in _NO_RESULT else _registers(self.operands[:1])

    @property
    def read(self) -> list[str]:
        return _registers(self.operands if self.base in _NO_RESULT else self.operands[1:])

    @property
    def parameter(self) -> int | None:
        """Position of the kernel's parameter that is read, if any is."""
        found = re.search(r"_param_(\d+)", self.operands[1]) if self.opcode.startswith("ld.param") else None
        return int(found[1]) if found else None

    @property
    def is_cut(self) -> bool:
        """The result is a part of a value of 64 bits."""
        return self.opcode in ("cvt.u32.u64", "cvt.s32.s64", "and.b64") or (
            self.opcode == "mov.b64" and self.operands[0].startswith("{")
        )

    @property
    def is_memory(self) -> bool:
        return self.base in ("ld", "st", "red", "atom", "cp") and ".global" in self.opcode

    @property
    def address(self) -> list[str]:
        """Registers of the address in global memory; of a copy to shared memory the second one."""
        return _registers([part for part in self.operands if part.startswith("[")][-1:])

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}"


def mixed_loads(kernel: Callable[..., None], ptx: str) -> Iterator[str]:
    """Yield one message for every weak load of an array that other loads read strongly, as CTAs write it meanwhile.

    Args:
        kernel: Gives the names of the parameters.
        ptx: What it was compiled to.
    """
    flow = _Flow(kernel, ptx)
    loads = [access for access in flow.accesses if access.base == "ld"]
    strong = {name for it in loads if ".relaxed" in it.opcode for name in flow.arrays(it)}
    for load in loads:
        if ".relaxed" not in load.opcode and (mixed := strong & flow.arrays(load)):
            yield f"{' and '.join(sorted(mixed))} is read weakly here: {load}"


def narrow_addresses(kernel: Callable[..., None], ptx: str) -> Iterator[str]:
    """Yield one message for every address that 32 bits may wrap, and for every pool or stride that is cut to 32 bits.

    Args:
        kernel: Gives the names of the parameters.
        ptx: What it was compiled to.
    """
    flow = _Flow(kernel, ptx)
    found = [*flow.cut(), *(message for access in flow.accesses for message in flow.breaches(access))]
    yield from dict.fromkeys(found)


def _statements(ptx: str) -> list[_Statement]:
    body = ptx[ptx.index("{", ptx.index(".entry")) :]
    found = []
    scope = 0
    for text in _COMMENT.sub("", body).split(";"):
        scope += ".reg" in text  # opens an inline assembly; the next one uses the same names for other registers
        opcode, *rest = _BEFORE_OPCODE.sub("", text).split(maxsplit=1) or [""]
        if rest and not opcode.startswith("."):
            operands = _LOCAL.sub(rf"%local_\g<0>_{scope}", rest[0])
            found.append(_Statement(opcode, tuple(part.strip() for part in _OPERAND.findall(operands))))
    return found


class _Flow:
    """Which statements write a register, followed backwards."""

    def __init__(self, kernel: Callable[..., None], ptx: str) -> None:
        self._statements = _statements(ptx)
        self._names = [name for name, _ in parameters(kernel)]
        self._writers: dict[str, list[_Statement]] = {}
        for statement in self._statements:
            for register in statement.written:
                self._writers.setdefault(register, []).append(statement)
        self.accesses = [statement for statement in self._statements if statement.is_memory]

    def arrays(self, access: _Statement) -> set[str]:
        """Return the parameters that an address begins at."""
        return set(self._parameters(self._terms(access.address)))

    def cut(self) -> Iterator[str]:
        """Yield what loses the upper half of a pool or a stride."""
        for statement in self._statements:
            if statement.parameter is not None:
                origins = [] if statement.is_wide else [statement]
            else:
                origins = self._above(statement.read, lambda it: it.is_wide) if statement.is_cut else []
            for name in self._parameters(origins):
                if _is_pool(name) or name.endswith("stride"):
                    yield f"{name} is cut to 32 bits: {statement}"

    def breaches(self, access: _Statement) -> Iterator[str]:
        terms = self._terms(access.address)
        if not self._parameters(terms):
            yield f"no parameter is found that this address begins at: {access}"
        if any(_is_pool(name) for name in self._parameters(terms)):
            yield from self._pool_breaches(access, terms)
        if "no_allocate" in access.opcode or "L2::128B" in access.opcode:
            for product in self._narrow(terms, lambda it: len(_registers(it.operands[1:3])) == 2):
                yield f"a 32-bit product of two runtime values in the address of immutable data: {product}"

    def _pool_breaches(self, access: _Statement, terms: list[_Statement]) -> Iterator[str]:
        factors = [factor for term in terms for factor in self._block_factors(term)]
        if not factors:
            yield f"no 64-bit product with block_stride in the address of {access}"
        origins = self._above(factors, lambda it: it.is_wide)
        for scaled in self._narrow(origins, lambda _: True):
            yield f"the block id is scaled in 32 bits before it meets block_stride: {scaled}"
        ids = {register for it in self._above(factors, _is_not_load) if it.base == "ld" for register in it.written}
        for scaled in self._narrow(terms, lambda it: bool(ids & self._sources(it))):
            yield f"the block id is scaled in 32 bits in an address of the pool: {scaled}"

    def _block_factors(self, term: _Statement) -> list[str]:
        """Return the block id's side of a product with ``block_stride``, nothing if the term is none."""
        if term.base not in ("mul", "mad") or not term.is_wide:
            return []
        for stride, other in (term.operands[1:3], term.operands[2:0:-1]):
            names = self._parameters(self._above([stride], lambda it: it.is_wide))
            if any(name.endswith("block_stride") for name in names):
                return [other]
        return []

    def _terms(self, registers: Iterable[str]) -> list[_Statement]:
        """Return what is added up in registers: products, widened values, parameters."""
        reached = self._above(registers, lambda it: it.base in (*_SUMS, "mad"), through_products=False)
        return [it for it in reached if it.base not in _SUMS]

    def _narrow(self, terms: list[_Statement], counts: Callable[[_Statement], bool]) -> list[_Statement]:
        """Return the 32-bit multiplications and shifts to the left below widened terms, unless a mask bounds them."""
        starts = [it.operands[1] for it in terms if it.opcode.startswith(("cvt.s64.s32", "cvt.u64.u32"))]
        starts += [part for it in terms if ".wide." in it.opcode for part in it.operands[1:3]]
        reached = self._above(starts, lambda it: _is_not_load(it) and it.base not in _BOUNDS)
        scaled = [it for it in reached if it.base in ("mul", "mad", "shl") and ".f32" not in it.opcode]
        return [it for it in scaled if not it.is_wide and counts(it)]

    def _sources(self, statement: _Statement) -> set[str]:
        """Return the registers a statement depends on, up to loads and masks."""
        reached = self._above(statement.read, lambda it: _is_not_load(it) and it.base not in _BOUNDS)
        return {register for it in reached for register in it.written}

    def _parameters(self, statements: list[_Statement]) -> list[str]:
        return [self._names[it.parameter] for it in statements if it.parameter is not None]

    def _above(
        self, registers: Iterable[str], follows: Callable[[_Statement], bool], *, through_products: bool = True
    ) -> list[_Statement]:
        """Return the statements that registers come from; those that do not follow are the last on their path."""
        seen: dict[_Statement, None] = {}
        waiting = _registers(registers)
        while waiting:
            for statement in self._writers.get(waiting.pop(), []):
                if statement in seen:
                    continue
                seen[statement] = None
                if follows(statement):
                    skips = statement.base == "mad" and not through_products
                    waiting += _registers(statement.operands[3:]) if skips else statement.read
        return list(seen)


def _registers(parts: Iterable[str]) -> list[str]:
    return [register for part in parts for register in _REGISTER.findall(part)]


def _is_not_load(statement: _Statement) -> bool:
    return statement.base != "ld"


def _is_pool(name: str) -> bool:
    return name == "pool" or name.endswith("_pool")
