"""Float variables of a kernel hold float32: what is assigned to one is rounded first.

Python computes in float64. Inside one expression that stays so, as with fused instructions; from one statement to the
next a value overflows, underflows and loses bits as it does on a GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ferrule_server.kernels.cuda.intrinsics import INTRINSICS

__all__ = ["Kinds"]

_FLOAT, _FLOATS, _OTHER = "float", "floats", "other"


class Kinds:
    """Tells float expressions from others; a variable keeps one kind throughout.

    ``floats`` is the kind of a tuple of them.
    """

    def __init__(self, function: ast.FunctionDef, float_parameters: set[str]) -> None:
        self._variables = dict.fromkeys(float_parameters, _FLOAT)
        assigned = list(_assignments(function.body))
        known = -1
        while known != len(self._variables):
            known = len(self._variables)
            for node in assigned:
                self._learn(node.targets[0], node.value)

    def is_float(self, node: ast.AugAssign) -> bool:
        """Return whether ``x += y`` changes a float."""
        return _FLOAT in {self._of(node.target), self._of(node.value)}

    def needs_rounding(self, value: ast.expr) -> bool:
        """Return whether an expression is a float that may have more bits than float32."""
        match value:
            case ast.Name() | ast.Subscript() | ast.Constant():
                return False
            case ast.Call(func=ast.Name(id=name)) if not _is_arithmetic(name):
                return False
        return self._of(value) == _FLOAT

    def _of(self, node: ast.expr) -> str:  # noqa: PLR0911  (one case each)
        match node:
            case ast.Name():
                return self._variables.get(node.id, _OTHER)
            case ast.Constant():
                return _FLOAT if isinstance(node.value, float) else _OTHER
            case ast.Call(func=ast.Name(id=name)):
                return _kind_of_call(name)
            case ast.Tuple(elts=[first, *_]):
                return _FLOATS if self._of(first) == _FLOAT else _OTHER
            case ast.Subscript():
                return _FLOAT if self._of(node.value) == _FLOATS else _OTHER
            case ast.BinOp():
                return _FLOAT if _FLOAT in {self._of(node.left), self._of(node.right)} else _OTHER
            case ast.UnaryOp():
                return self._of(node.operand)
            case ast.IfExp():
                return self._of(node.body) if self._of(node.body) != _OTHER else self._of(node.orelse)
        return _OTHER

    def _learn(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            kind = self._variables.get(target.id) or self._of(value)
            if kind != _OTHER:
                self._variables[target.id] = kind
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._learn(one, other)
        elif isinstance(target, ast.Tuple) and self._of(value) == _FLOATS:
            self._variables.update((one.id, _FLOAT) for one in target.elts if isinstance(one, ast.Name))


def _assignments(body: list[ast.stmt]) -> Iterator[ast.Assign]:
    for node in body:
        if isinstance(node, ast.Assign):
            yield node
        elif isinstance(node, ast.If | ast.While):
            yield from _assignments(node.body)
            yield from _assignments(node.orelse)


def _kind_of_call(name: str) -> str:
    results = INTRINSICS[name].results if name in INTRINSICS else ("f",) if name == "f32" else ()
    if not results or results[0] != "f":
        return _OTHER
    return _FLOAT if len(results) == 1 else _FLOATS


def _is_arithmetic(name: str) -> bool:
    """Return whether a twin may give more bits than float32 has."""
    exact = ("bf16_", "bits_", "max_", "round_", "float_")
    return name in INTRINSICS and INTRINSICS[name].is_pure and not name.startswith(exact)
