"""A specialised kernel becomes a Python generator: it hands over its turn where a thread of a GPU may lose it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrule_server.kernels.cuda.specialise import Specialised
from tests.kernels.cuda.simulator.numbers import BF16, PURE, f32
from tests.kernels.cuda.simulator.rounding import round_assignments
from tests.kernels.cuda.simulator.shared import SHARED
from tests.kernels.cuda.simulator.twins import ATOMIC, GLOBAL, SITE_BITS

__all__ = ["BLOCKING", "Program", "Site", "translate"]

BLOCKING = (
    "barrier", "warp_barrier", "grid_wait", "shuffle_xor_f32", "shuffle_xor_u32", "shuffle_f32", "shuffle_u32",
    "ballot", "mma_bf16",
)  # fmt: skip
"""Instructions at which a thread waits for others."""


@dataclass(frozen=True, slots=True)
class Site:
    """A line of a kernel, or of a function it calls, and the instruction called there."""

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} on line {self.line} of {Path(self.path).name}"


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel to run: ``start(thread, *arguments)`` gives the generator; sites are named by their index."""

    name: str
    path: str
    sites: tuple[Site, ...]
    start: Callable[..., Generator[Any, Any, None]]


def translate(specialised: Specialised) -> Program:
    """Return the program of a kernel."""
    tree = copy.deepcopy(specialised.tree)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    round_assignments(function, {name for name, kind in specialised.parameters if kind == "F32"})
    writer = _Writer()
    writer.visit(tree)
    function.args.args.insert(0, ast.arg(arg="_t"))
    never = ast.If(ast.Constant(False), [ast.Expr(ast.Yield())], [])
    function.body.insert(0, ast.copy_location(never, function))
    scope: dict[str, Any] = {**PURE, **SHARED, **GLOBAL, **ATOMIC, "_BF16": BF16}
    exec(compile(ast.fix_missing_locations(tree), specialised.path, "exec"), scope)
    return Program(specialised.name, specialised.path, tuple(writer.sites), scope[specialised.name])


class _Writer(ast.NodeTransformer):
    """Puts in what twins need; the shortest ones are written in place."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._index: dict[Site, int] = {}

    def visit_While(self, node: ast.While) -> ast.stmt:
        """Let every round of a loop lose the turn, so that one without end is noticed."""
        self.generic_visit(node)
        node.body.insert(0, ast.copy_location(ast.Expr(ast.Yield()), node))
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        assert isinstance(node.func, ast.Name)
        name, arguments = node.func.id, node.args
        return ast.copy_location(self._written(name, arguments, node), node)

    def _written(self, name: str, arguments: list[ast.expr], node: ast.Call) -> ast.expr:
        if name in PURE:
            return _computed(name, arguments, node)
        site = ast.Constant(self._site(Site(getattr(node, "path", ""), node.lineno, name)))
        if name in BLOCKING:
            return ast.Yield(ast.Tuple([ast.Constant(name), site, *arguments], ast.Load()))
        if name in GLOBAL or name in ATOMIC:
            return ast.Call(node.func, [ast.Yield(), *arguments, site], [])
        assert name in SHARED, f"the simulator has no twin of {name}"
        return ast.Call(node.func, [ast.Name("_t", ast.Load()), *arguments, site], [])

    def _site(self, site: Site) -> int:
        if site not in self._index:
            self._index[site] = len(self.sites)
            self.sites.append(site)
            assert len(self.sites) <= 1 << SITE_BITS
        return self._index[site]


def _computed(name: str, arguments: list[ast.expr], call: ast.Call) -> ast.expr:
    """Return what stands for a call that needs no thread: the shortest twins are written in place."""
    match name, arguments:
        case "f32", [ast.Constant(value=float(value))]:
            return ast.Constant(f32(value))
        case "bf16_low", [word]:
            return _bf16(ast.BinOp(word, ast.BitAnd(), ast.Constant(0xFFFF)))
        case "bf16_high", [word]:
            return _bf16(ast.BinOp(word, ast.RShift(), ast.Constant(16)))
        case "fma", [a, b, c]:
            return ast.BinOp(ast.BinOp(a, ast.Mult(), b), ast.Add(), c)
    return call


def _bf16(index: ast.expr) -> ast.expr:
    return ast.Subscript(ast.Name("_BF16", ast.Load()), index, ast.Load())
