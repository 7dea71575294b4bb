"""Count code lines: lines that hold anything besides blanks, comments and docstrings.

    python -m tools.code_lines                  the packages of the server, then the products
    python -m tools.code_lines PATH [PATH ...]  the files below these paths

``tests/test_architecture.py`` holds each product, and each file of the server, to a number of them.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = ROOT / "server" / "ferrule_server"
PRODUCTS = {"server": SERVER, "client": ROOT / "client", "tools": ROOT / "tools"}

_NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
    | {tokenize.ENDMARKER}
)


def numbers(source: str) -> set[int]:
    """Return the numbers of the code lines of a Python source, from 1."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - _docstring_lines(ast.parse(source))


def count_below(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the code lines of each Python file that is, or lies below, one of the paths."""
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}
    return {file: len(numbers(file.read_text(encoding="utf-8"))) for file in sorted(files)}


def server_packages() -> dict[str, int]:
    """Return the code lines of each folder of the server, two levels deep."""
    total: Counter[str] = Counter()
    for file, lines in count_below([SERVER]).items():
        total["/".join(file.relative_to(SERVER).parts[:-1][:2]) or "."] += lines
    return dict(total)


def product_lines() -> dict[str, int]:
    """Return the code lines of each product."""
    return {name: sum(count_below([folder]).values()) for name, folder in PRODUCTS.items()}


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all strings that stand as statements: docstrings, and those of attributes and constants."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def main() -> None:
    """Print a table."""
    rows = {str(path): lines for path, lines in count_below(map(Path, sys.argv[1:])).items()} or server_packages()
    sums = {"total": sum(rows.values())} if sys.argv[1:] else product_lines()
    for name, lines in (rows | sums).items():
        print(f"{lines:7,}  {name}")


if __name__ == "__main__":
    main()
