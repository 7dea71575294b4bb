"""The language of kernels: what each construct becomes, and what is refused with which message."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address, device, load_f32, load_i32, store_f32, store_i32
from ferrule_server.kernels.cuda.specialise import KernelError, i32, registers, specialise, unrolled

STEP = 3
this = sys.modules[__name__]
table = (1, 2)


def result(kernel: Callable[..., None], *arguments: float, **constants: Any) -> dict[int, float]:
    """Run a kernel whose loads give 100 + address, and return what it stored, by address."""
    stored: dict[int, float] = {}
    names: dict[str, object] = dict.fromkeys(("store_f32", "store_i32"), stored.__setitem__)
    names.update(dict.fromkeys(("load_f32", "load_i32"), lambda address: 100 + address))
    names.update(f32=float, i32=int, u32=int)
    specialise(kernel, constants).function(names)(*arguments)
    return stored


def text(kernel: Callable[..., None], **constants: Any) -> str:
    """Return the code of a specialised kernel without its first line."""
    return specialise(kernel, constants).source().split("\n", 1)[1]


def copy_rows(x: Address, y: Address, *, ROWS: int, COLUMNS: int) -> None:  # noqa: N803
    """Two nested loops with constant indices."""
    kept = registers(ROWS, COLUMNS)
    for row in unrolled(ROWS):
        for column in unrolled(0, COLUMNS, 2):
            kept[row, column] = load_i32(x + row * COLUMNS + column)
    for row in unrolled(ROWS):
        store_i32(y + row, kept[row, 0] + STEP)


def test_loops_are_written_out_and_registers_become_variables() -> None:
    """No loop, no list, no index is left; constants of the module are numbers."""
    code = text(copy_rows, ROWS=2, COLUMNS=3)
    assert "for" not in code
    assert "[" not in code
    assert re.findall(r"(kept\w+) = ", code) == ["kept__0__0", "kept__0__2", "kept__1__0", "kept__1__2"]
    assert "kept__1__0 + 3" in code
    assert result(copy_rows, 0, 50, ROWS=2, COLUMNS=3) == {50: 103, 51: 106}


@device
def doubled(value: F32) -> F32:
    """A function to be written out."""
    return value + value


def names_of_modules(x: Address) -> None:
    """The same call by both kinds of names."""
    ptx.store_f32(x, this.doubled(ptx.load_f32(x)))
    store_f32(x + 1, doubled(load_f32(x)))


def test_names_of_modules_are_what_they_stand_for() -> None:
    """An intrinsic and a function, by the name of their module."""
    assert result(names_of_modules, 8) == {8: 216, 9: 216}
    assert "ptx" not in text(names_of_modules)


def waits(x: Address, *, STAGES: int) -> None:  # noqa: N803
    """A constant that is a part of the instruction."""
    ptx.copy_async_wait(STAGES - 1)


def test_an_instruction_with_a_number_is_named_by_it() -> None:
    """It must be a constant, and there must be such an instruction."""
    assert text(waits, STAGES=3) == "    copy_async_wait_2()"
    with pytest.raises(KernelError, match="copy_async_wait_8 is neither an intrinsic"):
        text(waits, STAGES=9)


def loop_of_zero(x: Address, *, TIMES: int) -> None:  # noqa: N803
    """A loop over a constant that may be 0."""
    total = registers(2, init=0.5)
    for i in unrolled(TIMES):
        total[i & 1] += load_f32(x + i)
    store_f32(x, total[0] + total[1])


@pytest.mark.parametrize(("times", "total"), [(0, 1.0), (1, 101.0), (3, 304.0)])
def test_registers_begin_with_their_value(times: int, total: float) -> None:
    """Also where no round of a loop touches them."""
    assert result(loop_of_zero, 0, TIMES=times) == {0: total}


def choose(x: Address, n: I32, *, MODE: str, LIMIT: int) -> None:  # noqa: N803
    """Branches on constants and on values."""
    if MODE == "one" and LIMIT > 2:
        store_i32(x, 1)
    elif MODE == "two":
        store_i32(x, 2)
    else:
        store_i32(x, LIMIT if MODE == "limit" else n if n > LIMIT else -n)
    if n > LIMIT:
        if MODE == "one":
            store_i32(x + 1, 1)
    else:
        store_i32(x + 2, 2)


def test_branches_on_constants_disappear() -> None:
    """One arm stays, without its condition; branches on values stay."""
    assert text(choose, MODE="two", LIMIT=1).startswith("    store_i32(x, 2)\n    if n > 1:")
    assert result(choose, 0, 5, MODE="one", LIMIT=3) == {0: 1, 1: 1}
    assert result(choose, 0, 5, MODE="one", LIMIT=2) == {0: 5, 1: 1}
    assert result(choose, 0, 1, MODE="other", LIMIT=2) == {0: -1, 2: 2}
    assert result(choose, 0, 1, MODE="limit", LIMIT=2) == {0: 2, 2: 2}


@device
def plus(value: int, *, MORE: int) -> int:  # noqa: N803
    """Return a sum by way of a local variable."""
    total = value
    total += MORE
    return total


@device
def add_all(kept: Any, value: int, *, COUNT: int) -> None:  # noqa: N803
    """Change the caller's registers."""
    total = 0
    for i in unrolled(COUNT):
        kept[i] += plus(value, MORE=i)
        total += 1
    kept[0] += total


@device
def twice(value: int) -> int:
    """Return a value by way of two calls in one expression."""
    return plus(value, MORE=1) + plus(value, MORE=-1)


def call(x: Address, *, COUNT: int) -> None:  # noqa: N803
    """Calls in calls, with names that the callee uses too."""
    total = 7
    kept = registers(COUNT, init=0)
    add_all(kept, load_i32(x), COUNT=COUNT)
    add_all(kept, twice(i32(total)), COUNT=COUNT)
    for i in unrolled(COUNT):
        store_i32(x + i, kept[i])
    store_i32(x + COUNT, total)


def test_calls_are_written_in_place_and_share_no_variable() -> None:
    """A callee's local `total` is neither the caller's nor that of the next call."""
    assert result(call, 0, COUNT=2) == {0: 100 + 2 + 14 + 2, 1: 101 + 15, 2: 7}
    code = text(call, COUNT=2)
    assert "plus(" not in code
    assert "add_all(" not in code
    assigned = re.findall(r"^ +(\w+) = ", code, re.MULTILINE)
    locals_of_calls = [name for name in assigned if name.startswith("plus_") and name.endswith("_total")]
    assert len(locals_of_calls) == len(set(locals_of_calls)) == 6


def search(x: Address, n: I32, scale: F32) -> None:
    """A loop that is left early, a tuple, a literal, a chain of comparisons."""
    i = 0
    low, high = (0, n)
    while True:
        i = i32(i + 1)
        if i & 1:
            continue
        if low < i <= high and i != 4:
            store_f32(x + i, scale * 0.1)
        if i > 6:
            break
    pair = (i, n)
    store_i32(x, pair[0] - pair[1])


def test_loops_at_run_time_tuples_and_literals() -> None:
    """Float literals carry their type; loops keep break and continue."""
    assert "scale * f32(0.1)" in text(search)
    assert result(search, 0, 6, 10.0) == {2: 1.0, 6: 1.0, 0: 2}


def test_parameters_keep_their_kinds_and_lines_their_numbers() -> None:
    """Numba gets a signature, messages and mutations the place in the source, also of what was written in place."""
    made = specialise(call, {"COUNT": 1})
    assert specialise(search, {}).parameters == (("x", "Address"), ("n", "I32"), ("scale", "F32"))
    first = add_all.__code__.co_firstlineno
    lines = {node.lineno for node in ast.walk(made.tree) if isinstance(node, ast.stmt)}
    assert {first + 6, call.__code__.co_firstlineno + 5} <= lines
    assert all(node.end_lineno == node.lineno for node in ast.walk(made.tree) if isinstance(node, ast.stmt))


@device
def returns_early(value: int) -> int:
    """Return from the middle."""
    if value > 1:
        return 1
    return value


def wrong(x: Address, n: I32, *, HOW: str) -> None:  # noqa: N803
    """One construct outside the language at a time."""
    kept = registers(2, init=0)
    if HOW == "loop":
        for i in range(n):
            store_i32(x, i)
    if HOW == "bound":
        for i in unrolled(n):
            store_i32(x, i)
    if HOW == "index":
        store_i32(x, kept[n])
    if HOW == "outside":
        store_i32(x, kept[2])
    if HOW == "rank":
        store_i32(x, kept[0, 0])
    if HOW == "call":
        print(n)
    if HOW == "method":
        n.bit_length()
    if HOW == "name":
        store_i32(x, missing)  # type: ignore[name-defined]  # noqa: F821
    if HOW == "module":
        store_i32(x, table[0])
    if HOW == "constant":
        HOW = "other"  # noqa: N806
    if HOW == "return":
        store_i32(x, returns_early(n))
    if HOW == "condition":
        while twice(n) > 1:
            n = n - 1
    if HOW == "choice":
        n = twice(n) if n > 1 else 0
    if HOW == "and":
        store_i32(x, n > 1 and twice(n))
    if HOW == "arguments":
        store_i32(x, plus(n))  # type: ignore[call-arg]
    if HOW == "assert":
        assert len(HOW) == 2, "two letters"
    if HOW == "list":
        store_i32(x, [n])  # type: ignore[arg-type]
    if HOW == "constant list":
        kept = [1, 2, 3]
    if HOW == "none":
        kept = None
    if HOW == "few":
        store_i32(x)  # type: ignore[call-arg]
    if HOW == "many":
        store_i32(x, i32(n, n))  # type: ignore[call-arg]
    if HOW == "keyword":
        store_i32(x, value=n)
    if HOW == "power":
        store_i32(x, n**2)
    if HOW == "quotient":
        store_f32(x, n / 3.0)
    if HOW == "in place":
        n //= 3
    if HOW == "try":
        try:
            store_i32(x, n)
        finally:
            store_i32(x, 0)
    if HOW == "divide":
        store_i32(x, n // 3)
    if HOW == "attribute":
        n.real = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("loop", r"write `for i in unrolled\(n\)` or a while loop"),
        ("bound", "n is not a compile-time constant"),
        ("index", "n is not a compile-time constant"),
        ("outside", r"index \(2,\) is outside registers\(2,\)"),
        ("rank", r"index \(0, 0\) is outside registers\(2,\)"),
        ("call", "print is neither an intrinsic nor marked @device"),
        ("method", "n.bit_length is neither an intrinsic nor marked @device"),
        ("name", "missing is neither a local name nor a compile-time constant"),
        ("module", "table is neither a local name nor a compile-time constant"),
        ("constant", "HOW is a compile-time constant"),
        ("return", "Return is not part of the language"),
        ("condition", "a @device call cannot stand in the condition of a while"),
        ("choice", "a @device call cannot stand where it runs on a condition"),
        ("and", "a @device call cannot stand where it runs on a condition"),
        ("arguments", r"plus takes \['value'\] and the constants \['MORE'\]"),
        ("assert", r"len\(HOW\) == 2 is not so for \{'HOW': 'assert'\}: two letters"),
        ("list", r"\[n\] is not part of the language"),
        ("constant list", r"\[1, 2, 3\] is not part of the language"),
        ("none", "None is not part of the language"),
        ("few", r"store_i32 takes 2 arguments, by position: store_i32\(x\)"),
        ("many", r"i32 takes 1 arguments, by position: i32\(n, n\)"),
        ("keyword", r"store_i32 takes 2 arguments, by position: store_i32\(x, value=n\)"),
        ("power", r"n \*\* 2: write a product, or exp2\(y \* log2\(x\)\)"),
        ("quotient", r"n / 3.0: write a product with reciprocal\(\.\.\.\), or with a constant"),
        ("in place", r"n //= 3: write a shift, a mask or a product with reciprocal\(\.\.\.\)"),
        ("try", "Try is not part of the language"),
        ("divide", r"n // 3: write a shift, a mask or a product with reciprocal\(\.\.\.\)"),
        ("attribute", "cannot assign to n.real"),
    ],
)
def test_what_is_not_the_language_is_refused_with_its_place(how: str, message: str) -> None:
    """The message says file, line, and what is wrong there."""
    with pytest.raises(KernelError, match=message) as caught:
        specialise(wrong, {"HOW": how})
    assert re.match(r".*test_specialise\.py:\d+: ", str(caught.value))


def test_constants_must_be_those_of_the_signature() -> None:
    """None missing, none unknown."""
    for constants in ({}, {"COUNT": 1, "OTHER": 2}):
        with pytest.raises(KernelError, match=r"call takes the constants \['COUNT'\], was given"):
            specialise(call, constants)


def untyped(x: int) -> None:
    """A parameter without a kind."""


def test_parameters_must_have_a_kind() -> None:
    """An int could be 32 or 64 bits wide."""
    with pytest.raises(KernelError, match=r"untyped: parameter x is 'int', not one of"):
        specialise(untyped, {})
