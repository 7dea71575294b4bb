"""Kernels are written once, as plain Python; this turns one into straight-line code for given compile-time constants.

The language of a kernel (see tools/kernels/README.md, "How a kernel is written"):

* Positional parameters are runtime values (``Address``, ``I32``, ``F32``); keyword-only parameters are compile-time
  constants. Module names in CAPITALS are constants too.
* ``for i in unrolled(n):`` is written out n times; all other loops are ``while`` loops.
* ``registers(*shape, init=x)`` declares an array of variables; its indices must be constants once loops are unrolled.
  ``init`` may be left out for values that are not numbers (tuples).
* ``if`` on a constant keeps one branch; ``assert`` on a constant is checked now.
* Intrinsics and functions are called by their names or as ``module.name``. A call of a function marked ``@device`` is
  written out in place; it may have one ``return``, as its last statement, and may change register arrays it is given.
* Integers are 64 bits wide and signed; ``i32(x)`` and ``u32(x)`` promise that a value fits 32 bits, which is what makes
  index arithmetic cheap (the simulator checks the promise). Floats are float32.

What comes out is a syntax tree: numba compiles it for the GPU, the simulator of the tests runs it as it is.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import operator
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

from ferrule_server.kernels.cuda.intrinsics import INTRINSICS

__all__ = ["CASTS", "KernelError", "Specialised", "i32", "registers", "specialise", "u32", "unrolled"]

Constant = bool | int | float | str | tuple[Any, ...]

CASTS = ("f32", "i32", "u32")
"""Names a specialised kernel uses besides intrinsics: f32 marks literals, the other two narrow integers."""

_PARAMETER_KINDS = ("Address", "I32", "F32")
_BUILTINS = {"min": min, "max": max, "abs": abs, "len": len, "range": range, "int": int, "bool": bool}
_NAMES = {"Add": "add", "Sub": "sub", "Mult": "mul", "FloorDiv": "floordiv", "Mod": "mod", "LShift": "lshift"}
_NAMES |= {"RShift": "rshift", "BitAnd": "and_", "BitOr": "or_", "BitXor": "xor"}
_OPERATIONS = {getattr(ast, name): getattr(operator, function) for name, function in _NAMES.items()}
"""The common ones: all others are left to ``eval``, which takes its time."""
_DIVISION = "write a shift, a mask or a product with reciprocal(...)"
_INSTEAD: dict[type[ast.operator], str] = {
    ast.Div: "write a product with reciprocal(...), or with a constant",
    ast.FloorDiv: _DIVISION,
    ast.Mod: _DIVISION,
    ast.Pow: "write a product, or exp2(y * log2(x))",
    ast.MatMult: "write fma(...) or mma_bf16(...)",
}
"""What to write for operators that have no instruction."""
_UNKNOWN = object()
_Node = TypeVar("_Node", bound=ast.AST)


class KernelError(Exception):
    """A kernel's source uses something outside the language; says where and what to write instead."""


def unrolled(*bounds: int) -> range:
    """Stand for a loop that is written out, with the bounds of ``range``."""
    return range(*bounds)


def registers(*shape: int, init: float | None = None) -> Any:
    """Stand for an array of variables, all ``init`` at first; without it each must be assigned before it is read."""
    raise KernelError(f"registers{shape} = {init} exists in a specialised kernel only")


def i32(value: int) -> int:
    """Promise that a value fits a signed 32-bit integer."""
    return value


def u32(value: int) -> int:
    """Promise that a value fits an unsigned 32-bit integer."""
    return value


@dataclass(frozen=True, slots=True)
class Specialised:
    """A kernel with its constants put in.

    Attributes:
        name: Of the function.
        tree: A module with this one function.
        parameters: Name and kind (``Address``, ``I32``, ``F32``) of the runtime parameters, in order.
        path: The file it came from.
    """

    name: str
    tree: ast.Module
    parameters: tuple[tuple[str, str], ...]
    path: str

    def source(self) -> str:
        """Return the code as text, to read."""
        return ast.unparse(self.tree)

    def function(self, names: Mapping[str, object]) -> Callable[..., None]:
        """Return the function, with ``names`` standing for intrinsics and casts."""
        scope: dict[str, Any] = dict(names)
        exec(compile(self.tree, self.path, "exec"), scope)  # noqa: S102  (our own kernels)
        made: Callable[..., None] = scope[self.name]
        return made


@dataclass(slots=True)
class _Scope:
    """What names mean inside one function."""

    function: FunctionType
    constants: dict[str, Any]
    prefix: str = ""
    arrays: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    locals: set[str] = field(default_factory=set)


def specialise(kernel: Callable[..., None], constants: Mapping[str, Constant]) -> Specialised:
    """Return a kernel with its keyword-only parameters fixed.

    Args:
        kernel: A function in the language above.
        constants: One value for every keyword-only parameter.

    Raises:
        KernelError: A constant is missing or unknown, or the source leaves the language.
    """
    definition, path = _parse(kernel)
    expected = {argument.arg for argument in definition.args.kwonlyargs}
    if expected != set(constants):
        raise KernelError(f"{kernel.__name__} takes the constants {sorted(expected)}, was given {sorted(constants)}")
    parameters = tuple((argument.arg, _kind(kernel, argument)) for argument in definition.args.args)
    assert isinstance(kernel, FunctionType)
    scope = _Scope(kernel, dict(constants), locals={name for name, _ in parameters})
    body = _Writer(path).statements(_without_docstring(definition.body), scope)
    function = ast.FunctionDef(
        name=kernel.__name__,
        args=ast.arguments(
            posonlyargs=[],
            args=[ast.arg(arg=name) for name, _ in parameters],
            kwonlyargs=[],
            kw_defaults=[],
            defaults=[],
        ),
        body=body or [ast.Pass()],
        decorator_list=[],
        lineno=definition.lineno,
        col_offset=0,
    )
    tree = _on_single_lines(ast.Module(body=[function], type_ignores=[]))
    return Specialised(kernel.__name__, tree, parameters, path)


@cache
def _parse(function: Callable[..., object]) -> tuple[ast.FunctionDef, str]:
    """Return a function's tree, which everybody leaves as it is, and its file."""
    lines, first = inspect.getsourcelines(function)
    definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise KernelError(f"{function!r} is not a plain function")
    ast.increment_lineno(definition, first - 1)
    path = inspect.getsourcefile(function) or "<kernel>"
    for node in ast.walk(definition):
        node.path = path  # type: ignore[attr-defined]
    return definition, path


def _kind(kernel: Callable[..., None], argument: ast.arg) -> str:
    kind = ast.unparse(argument.annotation) if argument.annotation else ""
    if kind not in _PARAMETER_KINDS:
        raise KernelError(f"{kernel.__name__}: parameter {argument.arg} is {kind!r}, not one of {_PARAMETER_KINDS}")
    return kind


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return body[1:] if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else body


class _Writer:
    """Writes statements out; numbers the functions it writes in place, so that no two share a variable."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers = itertools.count()

    def statements(self, body: list[ast.stmt], scope: _Scope) -> list[ast.stmt]:
        written: list[ast.stmt] = []
        for statement in body:
            written += self._statement(statement, scope)
        return written

    def _statement(self, node: ast.stmt, scope: _Scope) -> list[ast.stmt]:  # noqa: PLR0911  (one case each)
        match node:
            case ast.For():
                return self._unroll(node, scope)
            case ast.If():
                return self._branch(node, scope)
            case ast.While():
                test, before = self._expression(node.test, scope)
                if before:
                    raise self._error(node, "a @device call cannot stand in the condition of a while")
                return [_at(node, ast.While(test, self.statements(node.body, scope) or [ast.Pass()], []))]
            case ast.Assign(targets=[target]):
                return self._assign(node, target, node.value, scope)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                return self._assign(node, target, value, scope)
            case ast.AugAssign():
                self._check_operator(node)
                value, before = self._expression(node.value, scope)
                target = self._target(node.target, scope)
                assert isinstance(target, ast.Name), ast.unparse(node)
                return [*before, _at(node, ast.AugAssign(target, node.op, value))]
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                return []
            case ast.Expr():
                value, before = self._expression(node.value, scope)
                is_name = isinstance(value, ast.Name | ast.Tuple | ast.Constant)
                return before if is_name else [*before, _at(node, ast.Expr(value))]
            case ast.Assert():
                return self._check(node, scope)
            case ast.Return(value=None) if not scope.prefix:
                return [node]
            case ast.Break() | ast.Continue():
                return [node]
        raise self._error(node, f"{type(node).__name__} is not part of the language of kernels")

    def _unroll(self, node: ast.For, scope: _Scope) -> list[ast.stmt]:
        call = node.iter
        is_unrolled = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "unrolled"
        if not is_unrolled or not isinstance(node.target, ast.Name):
            raise self._error(node, "write `for i in unrolled(n)` or a while loop")
        assert isinstance(call, ast.Call)
        bounds = [self._constant(argument, scope) for argument in call.args]
        written: list[ast.stmt] = []
        for value in range(*bounds):
            scope.constants[node.target.id] = value
            written += self.statements(node.body, scope)
        scope.constants.pop(node.target.id, None)
        return written

    def _branch(self, node: ast.If, scope: _Scope) -> list[ast.stmt]:
        value = _evaluate(node.test, scope)
        if value is not _UNKNOWN:
            return self.statements(node.body if value else node.orelse, scope)
        test, before = self._expression(node.test, scope)
        body, other = self.statements(node.body, scope), self.statements(node.orelse, scope)
        if not body and not other:
            return before
        return [*before, _at(node, ast.If(test, body or [ast.Pass()], other))]

    def _check(self, node: ast.Assert, scope: _Scope) -> list[ast.stmt]:
        if not self._constant(node.test, scope):
            values = {name: value for name, value in scope.constants.items() if isinstance(value, int | str)}
            said = f": {ast.literal_eval(node.msg)}" if isinstance(node.msg, ast.Constant) else ""
            raise self._error(node, f"{ast.unparse(node.test)} is not so for {values}{said}")
        return []

    def _assign(self, node: ast.stmt, target: ast.expr, value: ast.expr, scope: _Scope) -> list[ast.stmt]:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "registers":
            return self._declare(node, target, value, scope)
        written, before = self._expression(value, scope)
        return [*before, _at(node, ast.Assign([self._target(target, scope)], written))]

    def _declare(self, node: ast.stmt, target: ast.expr, call: ast.Call, scope: _Scope) -> list[ast.stmt]:
        assert isinstance(target, ast.Name)
        shape = tuple(self._constant(argument, scope) for argument in call.args)
        scope.arrays[target.id] = (scope.prefix + target.id, shape)
        if not call.keywords:
            return []
        init, before = self._expression(call.keywords[0].value, scope)
        names = [_element(scope.prefix + target.id, index) for index in itertools.product(*map(range, shape))]
        return [*before, *(_at(node, ast.Assign([ast.Name(name, ast.Store())], init)) for name in names)]

    def _target(self, target: ast.expr, scope: _Scope) -> ast.expr:
        match target:
            case ast.Name():
                if target.id in scope.constants:
                    raise self._error(target, f"{target.id} is a compile-time constant")
                scope.locals.add(target.id)
                return ast.Name(scope.prefix + target.id, ast.Store())
            case ast.Tuple():
                return ast.Tuple([self._target(element, scope) for element in target.elts], ast.Store())
            case ast.Subscript(value=ast.Name(id=name)) if name in scope.arrays:
                return ast.Name(self._index(target, scope), ast.Store())
        raise self._error(target, f"cannot assign to {ast.unparse(target)}")

    def _index(self, node: ast.Subscript, scope: _Scope) -> str:
        assert isinstance(node.value, ast.Name)
        base, shape = scope.arrays[node.value.id]
        value = self._constant(node.slice, scope)
        index = value if isinstance(value, tuple) else (value,)
        if len(index) != len(shape) or not all(0 <= i < size for i, size in zip(index, shape, strict=True)):
            raise self._error(node, f"index {index} is outside registers{shape}")
        return _element(base, index)

    def _constant(self, node: ast.expr, scope: _Scope) -> Any:
        value = _evaluate(node, scope)
        if value is _UNKNOWN:
            raise self._error(node, f"{ast.unparse(node)} is not a compile-time constant")
        return value

    def _expression(self, node: ast.expr, scope: _Scope) -> tuple[ast.expr, list[ast.stmt]]:
        """Return an expression with names and constants put in, and the statements that must come before it."""
        before: list[ast.stmt] = []
        return self._write(node, scope, before), before

    def _write(self, node: ast.expr, scope: _Scope, before: list[ast.stmt]) -> ast.expr:  # noqa: PLR0911  (likewise)
        value = _evaluate(node, scope)
        if value is not _UNKNOWN and _is_literal(value):
            return _at(node, _literal(value))
        match node:
            case ast.Name():
                if node.id not in scope.locals:
                    raise self._error(node, f"{node.id} is neither a local name nor a compile-time constant")
                return _at(node, ast.Name(scope.prefix + node.id, ast.Load()))
            case ast.Subscript(value=ast.Name(id=name)) if name in scope.arrays:
                return _at(node, ast.Name(self._index(node, scope), ast.Load()))
            case ast.Subscript():
                index = _literal(self._constant(node.slice, scope))
                return _at(node, ast.Subscript(self._write(node.value, scope, before), index, ast.Load()))
            case ast.Call():
                return self._call(node, scope, before)
            case ast.IfExp():
                return self._choice(node, scope, before)
            case ast.BoolOp():
                first, *rest = node.values
                values = [self._write(first, scope, before)]
                values += [self._write_plain(part, scope) for part in rest]
                return _at(node, ast.BoolOp(node.op, values))
            case ast.Compare():
                others = [self._write(other, scope, before) for other in node.comparators]
                return _at(node, ast.Compare(self._write(node.left, scope, before), node.ops, others))
            case ast.BinOp():
                self._check_operator(node)
                left, right = self._write(node.left, scope, before), self._write(node.right, scope, before)
                return _at(node, ast.BinOp(left, node.op, right))
            case ast.UnaryOp():
                return _at(node, ast.UnaryOp(node.op, self._write(node.operand, scope, before)))
            case ast.Tuple():
                return _at(node, ast.Tuple([self._write(part, scope, before) for part in node.elts], ast.Load()))
        raise self._error(node, f"{ast.unparse(node)} is not part of the language of kernels")

    def _write_plain(self, node: ast.expr, scope: _Scope) -> ast.expr:
        """Write an expression that is evaluated on a condition: nothing of it may move in front."""
        before: list[ast.stmt] = []
        written = self._write(node, scope, before)
        if before:
            raise self._error(node, "a @device call cannot stand where it runs on a condition; give it its own line")
        return written

    def _check_operator(self, node: ast.BinOp | ast.AugAssign) -> None:
        if type(node.op) in _INSTEAD:
            raise self._error(node, f"{ast.unparse(node)}: {_INSTEAD[type(node.op)]}")

    def _choice(self, node: ast.IfExp, scope: _Scope, before: list[ast.stmt]) -> ast.expr:
        test = _evaluate(node.test, scope)
        if test is not _UNKNOWN:
            return self._write(node.body if test else node.orelse, scope, before)
        written = self._write(node.test, scope, before)
        return _at(node, ast.IfExp(written, self._write_plain(node.body, scope), self._write_plain(node.orelse, scope)))

    def _call(self, node: ast.Call, scope: _Scope, before: list[ast.stmt]) -> ast.expr:
        name = ast.unparse(node.func)
        callee = _called(node.func, scope.function.__globals__)
        if callee is not None and getattr(callee, "__ferrule_device__", False):
            return self._inline(node, callee, scope, before)
        called, given = getattr(callee, "__name__", name), node.args
        if called not in INTRINSICS and f"{called}_0" in INTRINSICS:  # one for each value of a constant
            called, given = f"{called}_{self._constant(given[0], scope)}", given[1:]
        if called not in INTRINSICS and called not in CASTS:
            raise self._error(node, f"{called} is neither an intrinsic nor marked @device")
        expected = len(INTRINSICS[called].arguments) if called in INTRINSICS else 1
        if node.keywords or len(given) != expected:
            raise self._error(node, f"{called} takes {expected} arguments, by position: {ast.unparse(node)}")
        arguments = [self._write(argument, scope, before) for argument in given]
        return _at(node, ast.Call(ast.Name(called, ast.Load()), arguments, []))

    def _inline(self, node: ast.Call, callee: FunctionType, scope: _Scope, before: list[ast.stmt]) -> ast.expr:
        definition, _ = _parse(callee)
        parameters = [argument.arg for argument in definition.args.args]
        constants = {str(keyword.arg): self._constant(keyword.value, scope) for keyword in node.keywords}
        expected = {argument.arg for argument in definition.args.kwonlyargs}
        if len(parameters) != len(node.args) or expected != set(constants):
            raise self._error(node, f"{callee.__name__} takes {parameters} and the constants {sorted(expected)}")
        inner = _Scope(callee, constants, prefix=f"{callee.__name__.lstrip('_')}_{next(self._numbers)}_")
        for parameter, argument in zip(parameters, node.args, strict=True):
            if isinstance(argument, ast.Name) and argument.id in scope.arrays:
                inner.arrays[parameter] = scope.arrays[argument.id]
                continue
            written = self._write(argument, scope, before)
            inner.locals.add(parameter)
            before.append(_at(node, ast.Assign([ast.Name(inner.prefix + parameter, ast.Store())], written)))
        body = _without_docstring(definition.body)
        last = body[-1]
        if not isinstance(last, ast.Return):
            before += self.statements(body, inner)
            return _at(node, ast.Constant(0))
        before += self.statements(body[:-1], inner)
        if last.value is None:
            raise self._error(last, "leave out a return without a value")
        result, rest = self._expression(last.value, inner)
        before += rest
        name = f"{inner.prefix}result"
        before.append(_at(node, ast.Assign([ast.Name(name, ast.Store())], result)))
        return _at(node, ast.Name(name, ast.Load()))

    def _error(self, node: ast.AST, message: str) -> KernelError:
        path = getattr(node, "path", self._path)
        return KernelError(f"{path}:{getattr(node, 'lineno', '?')}: {message}")


def _on_single_lines(tree: ast.Module) -> ast.Module:
    """Give every node a line, and end it there: parts of a statement may come from several files."""
    open_nodes: list[tuple[ast.AST, int, int]] = [(tree, 1, 0)]
    while open_nodes:
        node, line, column = open_nodes.pop()
        if isinstance(node, ast.stmt | ast.expr | ast.arg):
            line, column = getattr(node, "lineno", line), getattr(node, "col_offset", column)
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = column
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                open_nodes.append((value, line, column))
            elif isinstance(value, list):
                open_nodes += [(part, line, column) for part in value]
    return tree


def _element(name: str, index: tuple[int, ...]) -> str:
    return "__".join((name, *map(str, index)))


def _is_literal(value: object) -> bool:
    return all(map(_is_literal, value)) if isinstance(value, tuple) else isinstance(value, bool | int | float | str)


def _literal(value: object) -> ast.expr:
    if isinstance(value, tuple):
        return ast.Tuple([_literal(part) for part in value], ast.Load())
    if isinstance(value, float):
        return ast.Call(ast.Name("f32", ast.Load()), [ast.Constant(value)], [])
    assert isinstance(value, bool | int | str), value
    return ast.Constant(value)


def _at(origin: ast.AST, node: _Node) -> _Node:
    """Return ``node``, said to stand where ``origin`` stands, which may be another file than the kernel's."""
    node.path = getattr(origin, "path", "")  # type: ignore[attr-defined]
    return ast.copy_location(node, origin)


def _evaluate(node: ast.expr, scope: _Scope) -> Any:
    """Return the value of an expression made of constants alone, or ``_UNKNOWN``."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _look_up(name, scope)
        case ast.BinOp(op=operation) if type(operation) in _OPERATIONS:
            left = _evaluate(node.left, scope)
            right = _UNKNOWN if left is _UNKNOWN else _evaluate(node.right, scope)
            return _UNKNOWN if right is _UNKNOWN else _OPERATIONS[type(operation)](left, right)
        case ast.Call(func=function) if not (isinstance(function, ast.Name) and function.id in _BUILTINS):
            return _UNKNOWN
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr) and _evaluate(part, scope) is _UNKNOWN:
            return _UNKNOWN
    values = {part.id: _look_up(part.id, scope) for part in ast.walk(node) if isinstance(part, ast.Name)}
    code = compile(ast.fix_missing_locations(ast.Expression(body=node)), "<constant>", "eval")
    return eval(code, {"__builtins__": {}}, values)  # noqa: S307  (our own kernels)


def _called(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return what a name, or a name of a module, stands for; None where it is not known."""
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return getattr(names.get(module), name, None)
    return None


def _look_up(name: str, scope: _Scope) -> Any:
    if name in scope.constants:
        return scope.constants[name]
    if name in scope.locals or name in scope.arrays:
        return _UNKNOWN
    if name in _BUILTINS:
        return _BUILTINS[name]
    if name.lstrip("_").isupper():
        return scope.function.__globals__.get(name, _UNKNOWN)
    return _UNKNOWN
