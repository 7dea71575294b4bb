"""A specialised kernel becomes a Python generator: it hands over its turn where a thread of a GPU may lose it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ferrule_server.kernels.cuda.specialise import Specialised
from tools.cuda_simulator.numbers import BF16, PURE, f32
from tools.cuda_simulator.rounding import Kinds
from tools.cuda_simulator.shared import SHARED
from tools.cuda_simulator.twins import ATOMIC, GLOBAL, SITE_BITS

__all__ = ["BLOCKING", "Program", "Site", "translate"]

BLOCKING = (
    "barrier", "warp_barrier", "grid_wait", "shuffle_xor_f32", "shuffle_xor_u32", "shuffle_u32",
    "mma_bf16",
)  # fmt: skip
"""Instructions at which a thread waits for others."""


_LOAD = ast.Load()
_Node = TypeVar("_Node", bound=ast.AST)


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
    tree: ast.Module

    def place(self, line: int) -> str:
        """Return a line with its file, or with all files that have code of this kernel on that line."""
        nodes = [node for node in ast.walk(self.tree) if getattr(node, "lineno", 0) == line]
        names = {Path(path).name for node in nodes if (path := getattr(node, "path", ""))}
        return f"line {line} of {' or '.join(sorted(names)) or Path(self.path).name}"


def translate(specialised: Specialised) -> Program:
    """Return the program of a kernel; its own tree is left as it is."""
    function = specialised.tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    kinds = Kinds(function, {name for name, kind in specialised.parameters if kind == "F32"})
    writer = _Writer(kinds)
    never = ast.If(ast.Constant(False), [ast.Expr(ast.Yield())], [])
    made = writer.generic(function)
    made.args = ast.arguments([], [ast.arg("_t"), *function.args.args], None, [], [], None, [])
    made.body = [ast.fix_missing_locations(ast.copy_location(never, function)), *made.body]
    made.args = ast.fix_missing_locations(made.args)
    scope: dict[str, Any] = {**PURE, **SHARED, **GLOBAL, **ATOMIC, "_BF16": BF16}
    tree = ast.Module([made], [])
    exec(compile(tree, specialised.path, "exec"), scope)
    return Program(specialised.name, specialised.path, tuple(writer.sites), scope[specialised.name], specialised.tree)


class _Writer:
    """Copies a tree and puts in what twins need; the shortest twins are written in place."""

    def __init__(self, kinds: Kinds) -> None:
        self.sites: list[Site] = []
        self._index: dict[Site, int] = {}
        self._kinds = kinds

    def write(self, node: Any) -> Any:
        """Return what stands for a statement or an expression."""
        match node:
            case ast.Call():
                return self._call(node)
            case ast.Assign():
                return _at(node, ast.Assign, targets=node.targets, value=self._rounded(node.value))
            case ast.AugAssign() if self._kinds.is_float(node):
                return self.write(_unfolded(node))
            case ast.While():
                turn = _at(node, ast.Expr, value=_at(node, ast.Yield, value=None))
                return _at(node, ast.While, test=self.write(node.test), body=[turn, *self._all(node.body)], orelse=[])
        return self.generic(node)

    def generic(self, node: Any) -> Any:
        """Return a copy with everything below it written."""
        made = node.__class__.__new__(node.__class__)
        made.__dict__.update(node.__dict__)
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, ast.expr | ast.stmt):
                setattr(made, name, self.write(value))
            elif isinstance(value, list):
                setattr(made, name, self._all(value))
        return made

    def _all(self, nodes: list[Any]) -> list[Any]:
        return [self.write(node) if isinstance(node, ast.expr | ast.stmt) else node for node in nodes]

    def _rounded(self, value: ast.expr) -> ast.expr:
        if isinstance(value, ast.Tuple):
            return _at(value, ast.Tuple, elts=[self._rounded(part) for part in value.elts], ctx=value.ctx)
        if self._kinds.needs_rounding(value):
            return _call(value, "f32", self.write(value))
        written: ast.expr = self.write(value)
        return written

    def _call(self, node: ast.Call) -> ast.expr:
        assert isinstance(node.func, ast.Name)
        name, arguments = node.func.id, self._all(node.args)
        if name in PURE:
            return _computed(name, arguments, node)
        site = _constant(node, self._site(Site(getattr(node, "path", ""), node.lineno, name)))
        if name in BLOCKING:
            request = _at(node, ast.Tuple, elts=[_constant(node, name), site, *arguments], ctx=_LOAD)
            return _at(node, ast.Yield, value=request)
        if name in GLOBAL or name in ATOMIC:
            return _call(node, name, _at(node, ast.Yield, value=None), *arguments, site)
        assert name in SHARED, f"the simulator has no twin of {name}"
        return _call(node, name, _name(node, "_t"), *arguments, site)

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
            return _constant(call, f32(value))
        case "bf16_low", [word]:
            return _bf16(call, _binary(call, word, ast.BitAnd(), _constant(call, 0xFFFF)))
        case "bf16_high", [word]:
            return _bf16(call, _binary(call, word, ast.RShift(), _constant(call, 16)))
        case "fma", [a, b, c]:
            return _binary(call, _binary(call, a, ast.Mult(), b), ast.Add(), c)
    return _call(call, name, *arguments)


def _unfolded(node: ast.AugAssign) -> ast.Assign:
    """Return ``x = x + y`` for ``x += y``."""
    assert isinstance(node.target, ast.Name)
    total = _binary(node, _name(node, node.target.id), node.op, node.value)
    return _at(node, ast.Assign, targets=[node.target], value=total)


def _at(origin: ast.AST, kind: type[_Node], **fields: object) -> _Node:
    """Return a node that stands where another stands."""
    made = kind.__new__(kind)
    made.__dict__.update(fields, lineno=origin.lineno, col_offset=origin.col_offset)  # type: ignore[attr-defined]
    return made


def _name(origin: ast.AST, name: str) -> ast.expr:
    return _at(origin, ast.Name, id=name, ctx=_LOAD)


def _constant(origin: ast.AST, value: object) -> ast.expr:
    return _at(origin, ast.Constant, value=value)


def _call(origin: ast.AST, name: str, *arguments: ast.expr) -> ast.expr:
    return _at(origin, ast.Call, func=_name(origin, name), args=list(arguments), keywords=[])


def _binary(origin: ast.AST, left: ast.expr, operator: ast.operator, right: ast.expr) -> ast.expr:
    return _at(origin, ast.BinOp, left=left, op=operator, right=right)


def _bf16(origin: ast.AST, index: ast.expr) -> ast.expr:
    return _at(origin, ast.Subscript, value=_name(origin, "_BF16"), slice=index, ctx=_LOAD)
