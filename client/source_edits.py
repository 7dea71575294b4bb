"""A module of Python as a text that can be changed in places of its syntax tree; for the tool that writes `aio`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["Edits", "Module", "last_name"]

_Functions = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """One source module: its text, its syntax tree, and who is whose parent in it."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.tree = ast.parse(text)
        self.public = _public_names(self.tree)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._starts = [0]
        for line in text.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Return the byte that a position of the tree stands for."""
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the bytes of a node, first and behind the last."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def function_of(self, node: ast.AST) -> _Functions | None:
        """Return the function that a node stands in, or None at the top."""
        while (parent := self.parents.get(node)) is not None:
            if isinstance(parent, _Functions):
                return parent
            if isinstance(parent, ast.Lambda):
                return None
            node = parent
        return None

    def functions(self) -> Iterator[ast.FunctionDef]:
        """Yield every function."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef))


def _public_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and last_name(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


class Edits:
    """Changes of a text, by byte; applied together, so that none moves another."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, int, str]] = []

    def replace(self, start: int, end: int, text: str) -> None:
        """Put a text in the place of some bytes; none of them: insert it."""
        self._changes.append((start, end, text))

    def drop(self, start: int, end: int) -> None:
        """Take some bytes out, with all changes within."""
        self._changes = [one for one in self._changes if not start <= one[0] <= one[1] <= end]
        self._changes.append((start, end, ""))

    def apply(self, text: str) -> str:
        """Return the changed text."""
        data = text.encode()
        for start, end, new in sorted(self._changes, reverse=True):
            data = data[:start] + new.encode() + data[end:]
        return data.decode()


def last_name(node: ast.expr) -> str:
    """Return the name that an expression ends in, such as `c` of `a.b.c`; empty: it has none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
