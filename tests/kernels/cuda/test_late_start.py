"""Kernels that let the next one start late: the same code without the trigger computes the same, and still waits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ferrule_server.kernels.cuda.embed import embed
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import Specialised, specialise
from tests.kernels.cuda.toolchain.records import shipped_kernels
from tools.cuda_simulator import Launch, Memory, run

KERNELS = {spec.kernel.__name__: spec for spec in reversed(shipped_kernels())}
"""One set of constants for each kernel of the catalog."""


def _is_call(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=called))):
            return called == name
    return False


def _calls(tree: ast.AST, name: str) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name)


def _without_trigger(specialised: Specialised) -> Specialised:
    (function,) = specialised.tree.body
    assert isinstance(function, ast.FunctionDef)
    body = [node for node in function.body if not _is_call(node, "grid_launch_dependents")]
    late = ast.FunctionDef(**{**dict(ast.iter_fields(function)), "body": body})
    return replace(specialised, tree=ast.Module([ast.copy_location(late, function)], []))


@pytest.mark.parametrize("spec", KERNELS.values(), ids=KERNELS)
def test_every_kernel_triggers_and_waits_once_in_every_thread(spec: KernelSpec) -> None:
    """Both calls stand outside of all branches and loops and nothing returns before, so no thread goes round them.

    What is left without the trigger is the rest, statement by statement, with the wait in it.
    """
    specialised = specialise(spec.kernel, dict(spec.constants))
    (function,) = specialised.tree.body
    assert isinstance(function, ast.FunctionDef)
    for name in ("grid_launch_dependents", "grid_wait"):
        assert sum(_is_call(node, name) for node in function.body) == 1
        assert len(list(_calls(function, name))) == 1
    assert not [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    (late,) = _without_trigger(specialised).tree.body
    assert isinstance(late, ast.FunctionDef)
    rest = [ast.dump(node) for node in function.body if not _is_call(node, "grid_launch_dependents")]
    assert [ast.dump(node) for node in late.body] == rest
    assert len(late.body) == len(function.body) - 1


def test_a_chain_without_triggers_computes_the_same() -> None:
    """Rows of rows, with and without."""
    constants = {"WARPS": 1, "X": 2}
    late = _without_trigger(specialise(embed, constants))
    found = []
    for specialised in (None, late):
        memory = Memory()
        rows = memory.put("rows", np.arange(4 * 64, dtype=np.uint16), mutable=True)
        chain = []
        for name, tokens in (("first", [2, 0, 3, 1]), ("second", [3, 2, 1, 0])):
            token_ids = memory.put(f"{name} ids", np.array(tokens, np.int32), mutable=True)
            hidden = memory.empty(name, (4, 64), np.uint16)
            arguments = (token_ids, 0, rows, hidden, 4, 0, 4, 64)
            chain.append(Launch(embed, constants, arguments, 3, 32, specialised=specialised))
            rows = hidden
        run(memory, chain, seed=5)
        found.append(memory.get("second"))
    np.testing.assert_array_equal(found[0], np.arange(4 * 64).reshape(4, 64)[[1, 3, 0, 2]])
    np.testing.assert_array_equal(found[0], found[1])
