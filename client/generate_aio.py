"""Writes the asyncio client, `ferrule_client.aio`, from the sources of the sync one, or checks that it is up to date.

The two clients have one text: what builds messages, judges retries, keeps doubts and explains arguments is written
once, in the sync modules, and this tool puts `async` and `await` where the other one needs them. Only what touches
the network or the clock is written twice, by hand: `_wire`, `_stream_call` and `_lease`.

How it knows: a call of one of the few functions in `SEEDS` waits; a function that holds such a call becomes
`async def`, and calls of it wait in turn. Names decide, not types; mypy finds a name that decided wrongly.

    python client/generate_aio.py            writes the modules
    python client/generate_aio.py --check    exits 1 with the names of the modules that differ from a fresh run
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from source_edits import Edits, Module, last_name

SOURCES = Path(__file__).resolve().parent / "ferrule_client"
TARGET = SOURCES / "aio"

GENERATED = (
    *("_batch", "_calls", "_connection", "_drawing", "_exchange"),
    *("admin", "cache", "client", "detokenizer", "forward", "generation", "stream"),
)
BY_HAND = ("_lease", "_stream_call", "_wire")

RENAMED = ("Admin", "Branch", "Cache", "Client", "Detokenizer", "ForwardPass", "Generation", "Stream", "TextGeneration")
# Classes that go by one name in both clients and are not the same.
TWINS = (*RENAMED, "Batch", "Course", "Exchange", "Leg", "ReplyCall", "StreamCall")
DUNDERS = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__next__": "__anext__"}

# Methods of the modules written by hand that wait, and a callback that does. Everything else follows from them.
SEEDS = frozenset({"call", "flush", "pause", "receive", "_decode"})
# Where a name that waits means something else: the last part of what it is called on.
NEVER_WAIT_ON = frozenset({"_in_use", "_log", "_prompt_log", "log", "text", "tip"})
# And the other way round: a name that waits and that much else has, too, with what ours is called on.
ONLY_WAIT_ON = {"append": ("self", "_stream", "stream")}

# Objects of the examples in docstrings; there, every `with` is about one of them.
ACTORS = frozenset({"branch", "cache", "client", "stream", "text"})

# What no rule can know. Each must be found at least once, so that none outlives the text it is about.
PHRASES = (
    (
        "Callable[[Sequence[Append], Sequence[Tip], Done, Attempts], None]",
        "Callable[[Sequence[Append], Sequence[Tip], Done, Attempts], Awaitable[None]]",
    ),
    ("Callable[[Sequence[int]], tuple[str, bool]]", "Callable[[Sequence[int]], Awaitable[tuple[str, bool]]]"),
    ("grpc.UnaryUnaryMultiCallable", "grpc.aio.UnaryUnaryMultiCallable"),
    ("grpc.UnaryStreamMultiCallable", "grpc.aio.UnaryStreamMultiCallable"),
    ("with contextlib.ExitStack", "with contextlib.AsyncExitStack"),
    ("stack.enter_context(", "await stack.enter_async_context("),
    ("a Cache cannot be", "an AsyncCache cannot be"),
    ("``with``", "``async with``"),
    ("use `with`", "use `async with`"),
    ("Ctrl-C and ``break`` leave", "Cancelling and ``break`` leave"),
    ("Ctrl-C", "a cancellation"),
    ("StopIteration", "StopAsyncIteration"),
)

_WIDTH = 120
_HEADER = "# Written by client/generate_aio.py from client/ferrule_client/{name}.py: change that, then run it again.\n"

_FUTURE = "from __future__ import annotations\n"
_SYNC = "<the sync client>"  # stands for its package until the imports of twins are turned to the new one


def waiting_names(modules: Iterable[Module]) -> frozenset[str]:
    """Return the names of all functions that wait: those that hold a call of one that does, and so on."""
    names = set(SEEDS) | {"close"}  # closing says good-bye over the network
    modules = list(modules)
    while True:
        found = {
            function.name
            for module in modules
            for call in ast.walk(module.tree)
            if isinstance(call, ast.Call) and is_waiting(call, names)
            if isinstance(function := module.function_of(call), ast.FunctionDef) and not _yields(function)
        } | {"close"}
        if found <= names:
            return frozenset(names - set(DUNDERS))
        names |= found


def is_waiting(call: ast.Call, names: Iterable[str]) -> bool:
    """Tell whether a call is one of a function that waits."""
    if isinstance(call.func, ast.Name):
        return call.func.id in names and call.func.id.startswith("_")
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in names:
        return False
    actor, name = last_name(call.func.value), call.func.attr
    return actor in ONLY_WAIT_ON[name] if name in ONLY_WAIT_ON else actor not in NEVER_WAIT_ON


def _yields(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(function))


def translate(module: Module, names: frozenset[str]) -> str:
    """Return the asyncio text of a module, without the finer points of format."""
    edits = Edits()
    waits: set[ast.FunctionDef] = set()
    for call in ast.walk(module.tree):
        if isinstance(call, ast.Call) and is_waiting(call, names):
            function = module.function_of(call)
            if not isinstance(function, ast.FunctionDef):
                raise ValueError(f"{module.name}.py:{call.lineno}: nothing can wait outside of a function")
            waits.add(function)
            _await(module, call, edits)
    waits |= {function for function in module.functions() if function.name in DUNDERS}
    for function in waits:
        _make_async(module, function, edits)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                _rename_iterator(module, base, edits)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            start, end = module.span(node)
            source = module.text.encode()[start:end].decode()
            edits.replace(start, end, _translate_prose(source, names))
    shared = list(_shared(module, waits))
    for node, _ in shared:
        edits.drop(*module.span(node))
    imports = f"from {_SYNC}.{module.name} import {', '.join(name for _, name in shared)}\n" if shared else ""
    return edits.apply(module.text).replace("\nfrom ferrule_client", f"\n{imports}from ferrule_client", 1)


def _shared(module: Module, waits: set[ast.FunctionDef]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield what stands at the top of a module and is the same for both clients, so that it is imported.

    These are functions, classes and public values that wait for nothing and name nothing that has a twin.
    """
    for node in module.tree.body:
        if isinstance(node, ast.AnnAssign | ast.Assign | ast.FunctionDef | ast.ClassDef):
            inside = set(ast.walk(node))
            if waits & inside or any(_has_twin(one) for one in inside):
                continue
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if not node.decorator_list:
                    yield node, node.name
            elif (name := last_name(_target(node))) in module.public:
                yield node, name


def _target(node: ast.Assign | ast.AnnAssign) -> ast.expr:
    return node.targets[0] if isinstance(node, ast.Assign) else node.target


def _has_twin(node: ast.AST) -> bool:
    words = [node.id] if isinstance(node, ast.Name) else []
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        words = re.findall(r"\w+", node.value)
    return any(word in (*TWINS, "threads") for word in words)


def _await(module: Module, call: ast.Call, edits: Edits) -> None:
    start, end = module.span(call)
    parent = module.parents[call]
    is_inner = isinstance(parent, (ast.Attribute, ast.Subscript)) and parent.value is call
    edits.replace(start, start, "(await " if is_inner else "await ")
    if is_inner:
        edits.replace(end, end, ")")


def _make_async(module: Module, function: ast.FunctionDef, edits: Edits) -> None:
    is_property = any(isinstance(one, ast.Name) and one.id == "property" for one in function.decorator_list)
    if is_property or (function.name.startswith("__") and function.name not in DUNDERS):
        raise ValueError(f"{module.name}.py:{function.lineno}: {function.name} cannot wait")
    parent = module.parents[function]
    opens = isinstance(parent, ast.ClassDef) and (parent.name, function.name) == ("Client", "prefill")
    start = module.offset(function.lineno, function.col_offset)
    edits.replace(start, start, ("@opening\n    " if opens else "") + "async ")
    if function.name in DUNDERS:
        at = start + len("def ")
        edits.replace(at, at + len(function.name), DUNDERS[function.name])
    if _yields(function):
        if function.returns is not None:
            _rename_iterator(module, function.returns, edits)
        for node in ast.walk(function):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.YieldFrom):
                begin, end = module.span(node)
                source = module.text.encode()[slice(*module.span(node.value.value))].decode()
                indent = " " * (node.col_offset + 4)
                edits.replace(begin, end, f"for one in {source}:\n{indent}yield one")


def _prefix_async(module: Module, node: ast.stmt, edits: Edits) -> None:
    start = module.offset(node.lineno, node.col_offset)
    edits.replace(start, start, "async ")


def _rename_iterator(module: Module, node: ast.expr, edits: Edits) -> None:
    if isinstance(node, ast.Subscript) and last_name(node.value) == "Iterator":
        start, end = module.span(node.value)
        edits.replace(start, end, "AsyncIterator")


def _translate_prose(source: str, names: frozenset[str]) -> str:
    """Translate the code in a docstring: what stands in double backticks, and indented blocks behind a `::`."""

    def inline(match: re.Match[str]) -> str:
        return f"``{translate_example(match[1], names)}``"

    def block(match: re.Match[str]) -> str:
        indent = re.match(" *", match[2])
        assert indent is not None
        code = translate_example(textwrap.dedent(match[2]), names)
        return match[1] + textwrap.indent(code, indent[0])

    source = re.sub(r"``([^`\n]+)``", inline, source)
    return re.sub(r"(::\n\n)((?: {8,}[^\n]*\n)+)", block, source)


def translate_example(code: str, names: frozenset[str]) -> str:
    """Return the asyncio form of an example; what is no code, or waits for nothing, stays as it is."""
    try:
        module = Module("example", code)
    except SyntaxError:
        return code
    edits = Edits()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.With) or (isinstance(node, ast.For) and _is_call_of_actor(node.iter)):
            _prefix_async(module, node, edits)
        elif isinstance(node, ast.Call) and is_waiting(node, names) and _is_call_of_actor(node):
            parent = module.parents[node]
            if not isinstance(parent, ast.withitem):
                _await(module, node, edits)
        elif isinstance(node, ast.Call) and _is_call_of_actor(node) and _last_attr(node).startswith("generate"):
            _collect(module, node, edits)
    return edits.apply(code)


def _is_call_of_actor(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ACTORS
    )


def _last_attr(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _collect(module: Module, call: ast.Call, edits: Edits) -> None:
    """Write `[one async for one in X]` where an iterator is handed to `list` or to `join`."""
    parent = module.parents[call]
    if not isinstance(parent, ast.Call):
        return
    start, end = module.span(call)
    if isinstance(parent.func, ast.Name) and parent.func.id == "list":
        first, last = module.span(parent)
        edits.replace(first, start, "[token async for token in ")
        edits.replace(end, last, "]")
    else:
        edits.replace(start, start, "[piece async for piece in ")
        edits.replace(end, end, "]")


def polish(name: str, text: str, used: set[str]) -> str:
    """Return the text with names, imports and wording of the asyncio client."""
    for old, new in PHRASES:
        if old in text:
            used.add(old)
            text = text.replace(old, new)
    for module in (*GENERATED, *BY_HAND):
        text = re.sub(rf"^(\s*from ferrule_client)\.{module} import", rf"\1.aio.{module} import", text, flags=re.M)
    text = text.replace(_SYNC, "ferrule_client")
    text = re.sub(rf"\b({'|'.join(RENAMED)})\b", r"Async\1", text)
    text = re.sub(r"\bthread(s?)\b", r"task\1", text)
    for word, line in _IMPORTS.items():
        if re.search(rf"(?<![\w.]){re.escape(word)}\b", text):
            text = text.replace(_FUTURE, f"{_FUTURE}\n{line}\n", 1)
    return _HEADER.format(name=name) + text


_IMPORTS = {
    "asyncio.": "import asyncio",
    "AsyncIterator": "from collections.abc import AsyncIterator",
    "Awaitable": "from collections.abc import Awaitable",
    "grpc.aio.": "import grpc.aio",
    "@opening": "from ferrule_client.aio._opening import opening",
}


def generate() -> dict[str, str]:
    """Return the text of every generated module by file name.

    Raises:
        ValueError: A source cannot be translated, or a phrase of `PHRASES` is in none of them any more.
    """
    modules = [Module(name, (SOURCES / f"{name}.py").read_text("utf-8")) for name in GENERATED]
    names = waiting_names(modules)
    used: set[str] = set()
    texts = {f"{module.name}.py": polish(module.name, translate(module, names), used) for module in modules}
    stale = [old for old, _ in PHRASES if old not in used]
    if stale:
        raise ValueError(f"these are in no source any more, see PHRASES: {stale}")
    return {name: _wrap(text) for name, text in _format(texts).items()}


def _wrap(text: str) -> str:
    """Break the lines of docstrings that the longer names have made too long."""
    lines = text.splitlines()
    place = 0
    while place < len(lines):
        line = lines[place]
        if len(line) > _WIDTH:
            start, _, rest = line[:_WIDTH].rpartition(" ")
            rest += line[_WIDTH:]
            indent = line[: len(line) - len(line.lstrip())]
            following = lines[place + 1] if place + 1 < len(lines) else ""
            lines[place] = start
            if following.strip() and following.startswith(indent) and not following.lstrip().startswith('"""'):
                deeper = following[: len(following) - len(following.lstrip())]
                lines[place + 1] = f"{deeper}{rest} {following.lstrip()}"
            else:
                lines.insert(place + 1, indent + rest)
        place += 1
    return "\n".join(lines) + "\n"


def _format(texts: dict[str, str]) -> dict[str, str]:
    """Return the modules as ruff writes them: imports sorted, without those that are not needed any more."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            Path(folder, name).write_text(text, "utf-8")
        options = ["--quiet", "--no-cache", "--config", "pyproject.toml", folder]
        for command in (["check", "--fix-only", "--select", "F401,I", "--exit-zero"], ["format"]):
            ruff = [sys.executable, "-m", "ruff", *command, *options]
            subprocess.run(ruff, cwd=SOURCES.parents[1], check=True)  # noqa: S603
        return {name: Path(folder, name).read_text("utf-8") for name in texts}


def drifted() -> list[str]:
    """Return the names of modules that are missing or differ from a fresh run, sorted."""
    fresh = generate()
    present = {name: path.read_text("utf-8") for name in fresh if (path := TARGET / name).exists()}
    return sorted(name for name in fresh if fresh[name] != present.get(name))


def main() -> int:
    """Write or check the modules.

    Returns:
        The exit code: 1 when `--check` finds drift, else 0.
    """
    parser = argparse.ArgumentParser(description="Writes the asyncio client from the sources of the sync one.")
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 with the names of what differs")
    if not parser.parse_args().check:
        for name, text in generate().items():
            (TARGET / name).write_text(text, "utf-8")
        return 0
    names = drifted()
    for name in names:
        sys.stderr.write(f"aio/{name} differs from its source; run `python client/generate_aio.py`\n")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
