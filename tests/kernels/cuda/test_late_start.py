"""Kernels that let the next one start early or late: the trigger and the wait stand where every thread meets them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import specialise
from tests.kernels.cuda.toolchain.records import shipped_kernels

KERNELS = {spec.kernel.__name__: spec for spec in reversed(shipped_kernels())}
"""One set of constants for each kernel of the catalog."""


def _is_call(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=called))):
            return called == name
    return False


def _calls(tree: ast.AST, name: str) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name)


@pytest.mark.parametrize("spec", KERNELS.values(), ids=KERNELS)
def test_every_kernel_triggers_and_waits_once_in_every_thread(spec: KernelSpec) -> None:
    """Both calls stand outside of all branches and loops and nothing returns before, so no thread goes round them."""
    specialised = specialise(spec.kernel, dict(spec.constants))
    (function,) = specialised.tree.body
    assert isinstance(function, ast.FunctionDef)
    for name in ("grid_launch_dependents", "grid_wait"):
        assert sum(_is_call(node, name) for node in function.body) == 1
        assert len(list(_calls(function, name))) == 1
    assert not [node for node in ast.walk(function) if isinstance(node, ast.Return)]
