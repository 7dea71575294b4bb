"""Float variables of a kernel hold float32: what is assigned to one is rounded first.

Python computes in float64. Inside one expression that stays so, as with fused instructions; from one statement to the
next a value overflows, underflows and loses bits as it does on a GPU.
"""

from __future__ import annotations

import ast

from ferrule_server.kernels.cuda.intrinsics import INTRINSICS

__all__ = ["ROUND", "round_assignments"]

ROUND = "f32"
"""Name of the function that rounds."""

_EXACT = (ast.Name, ast.Subscript, ast.Constant)
_FLOAT, _FLOATS, _OTHER = "float", "floats", "other"


def round_assignments(function: ast.FunctionDef, float_parameters: set[str]) -> None:
    """Wrap the values of all assignments to float variables, in place."""
    kinds = _Kinds(function, float_parameters)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            node.value = _rounded(node.value, kinds)
    _Unfolder(kinds).visit(function)


class _Kinds:
    """Tells float expressions from others; variables keep one kind throughout."""

    def __init__(self, function: ast.FunctionDef, float_parameters: set[str]) -> None:
        self._variables = dict.fromkeys(float_parameters, _FLOAT)
        assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        known = -1
        while known != len(self._variables):
            known = len(self._variables)
            for node in assigned:
                self._learn(node.targets[0], node.value)

    def of(self, node: ast.expr) -> str:  # noqa: PLR0911  (one case each)
        """Return the kind of an expression."""
        match node:
            case ast.Constant():
                return _FLOAT if isinstance(node.value, float) else _OTHER
            case ast.Name():
                return self._variables.get(node.id, _OTHER)
            case ast.Call(func=ast.Name(id=name)):
                return _kind_of_call(name)
            case ast.Tuple(elts=[first, *_]):
                return _FLOATS if self.of(first) == _FLOAT else _OTHER
            case ast.Subscript():
                return _FLOAT if self.of(node.value) == _FLOATS else _OTHER
            case ast.BinOp():
                return _FLOAT if _FLOAT in {self.of(node.left), self.of(node.right)} else _OTHER
            case ast.UnaryOp():
                return self.of(node.operand)
            case ast.IfExp():
                return self.of(node.body) if self.of(node.body) != _OTHER else self.of(node.orelse)
        return _OTHER

    def _learn(self, target: ast.expr, value: ast.expr) -> None:
        kind = self.of(value)
        if isinstance(target, ast.Name) and kind != _OTHER:
            self._variables[target.id] = kind
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._learn(one, other)
        elif isinstance(target, ast.Tuple) and kind == _FLOATS:
            self._variables.update((one.id, _FLOAT) for one in target.elts if isinstance(one, ast.Name))


def _kind_of_call(name: str) -> str:
    results = INTRINSICS[name].results if name in INTRINSICS else ("f",) if name == ROUND else ()
    if not results or results[0] != "f":
        return _OTHER
    return _FLOAT if len(results) == 1 else _FLOATS


def _rounded(value: ast.expr, kinds: _Kinds) -> ast.expr:
    if isinstance(value, _EXACT) or _is_exact_call(value):
        return value
    if isinstance(value, ast.Tuple):
        value.elts = [_rounded(part, kinds) for part in value.elts]
        return value
    if kinds.of(value) != _FLOAT:
        return value
    return ast.copy_location(ast.Call(ast.Name(ROUND, ast.Load()), [value], []), value)


def _is_exact_call(value: ast.expr) -> bool:
    """Return whether a call gives float32 already: everything but arithmetic does."""
    match value:
        case ast.Call(func=ast.Name(id=name)):
            return not (name in INTRINSICS and INTRINSICS[name].is_pure) or name.startswith(("bf16_", "bits_", "max_"))
    return False


class _Unfolder(ast.NodeTransformer):
    """Turns ``x += y`` of float variables into an assignment that rounds."""

    def __init__(self, kinds: _Kinds) -> None:
        self._kinds = kinds

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        assert isinstance(node.target, ast.Name)
        read = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
        if _FLOAT not in {self._kinds.of(read), self._kinds.of(node.value)}:
            return node
        total = ast.copy_location(ast.BinOp(read, node.op, node.value), node)
        return ast.copy_location(ast.Assign([node.target], _rounded(total, self._kinds)), node)
