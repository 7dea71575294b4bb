"""The table of the machine code: every shipped kernel, what it takes of a GPU and what stands in it.

    python -m ferrule_server.kernels.cuda.toolchain.report --write docs/kernels.md

puts it between the markers of that page; without ``--write`` it is printed. Ends with 1, and one line for each breach,
where a kernel breaks a rule of ``machine_code.py``. Needs the compiler and nvdisasm, no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import KernelError
from ferrule_server.kernels.cuda.toolchain.bundle import BundleError, check_target
from ferrule_server.kernels.cuda.toolchain.catalog import shipped_kernels
from ferrule_server.kernels.cuda.toolchain.compile import ARCHITECTURES, CompileError, toolkit
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache, default_folder
from ferrule_server.kernels.cuda.toolchain.machine_code import Facts, Made, make_all
from ferrule_server.kernels.cuda.toolchain.progress import progress_bar

__all__ = ["BEGIN", "END", "main", "table", "written_into"]

BEGIN = "<!-- generated: python -m ferrule_server.kernels.cuda.toolchain.report --write docs/kernels.md -->"
END = "<!-- end of what is generated -->"

_DESCRIPTION = """\
The table of the machine code: every shipped kernel, what it takes of a GPU and what stands in it.

What the cache lacks is compiled first, which takes minutes; no GPU is needed. The exit status is 1, with a line on
stderr for each breach, where a kernel breaks a rule of docs/kernels.md, "Layer 2 in detail"."""

_HEAD = (
    "| constants | threads | shared | registers | spilled | CTAs/SM | LDG.128 | HMMA | code bytes |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def table(made: Iterable[Made]) -> str:
    """Return the table: a part per kernel, a row per set of constants, one figure per architecture where they differ.

    Args:
        made: For all architectures; those of one spec follow each other.
    """
    parts = [f"Made with {toolkit()}. Two figures: {', then '.join(ARCHITECTURES)}."]
    rows = [(spec, [it.facts() for it in of_spec]) for spec, of_spec in groupby(made, key=lambda it: it.spec)]
    for name, of_kernel in groupby(rows, key=lambda row: row[0].kernel.__name__):
        parts.append(f"### {name}\n\n" + "\n".join((_HEAD, *(_row(spec, facts) for spec, facts in of_kernel))))
    return "\n\n".join(parts)


def _row(spec: KernelSpec, facts: list[Facts]) -> str:
    constants = f"`{', '.join(f'{key}={value}' for key, value in spec.constants)}`" if spec.constants else ""
    names = ("num_registers", "num_spilled_bytes", "ctas_per_sm", "num_vector_loads", "num_mma", "code_bytes")
    figures = [_joined([getattr(it, name) for it in facts]) for name in names]
    return f"| {' | '.join((constants, str(spec.num_threads), str(spec.shared_bytes), *figures))} |"


def _joined(figures: list[int]) -> str:
    return " ".join(str(figure) for figure in (figures if len(set(figures)) > 1 else figures[:1]))


def written_into(page: str, content: str) -> str:
    """Return a page with the table between its markers.

    Raises:
        ValueError: The page lacks a marker.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page has no line {BEGIN!r}, or none {END!r} behind it")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{rest.partition(END)[2]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, check, print or write the table."""
    args = _parse(arguments)
    try:
        if args.write:
            written_into(args.write.read_text(), "")
            check_target(args.write)
        cache = CubinCache(args.cache)
        cache.check()
        with progress_bar() as show:
            made = make_all(shipped_kernels(), cache=cache, progress=show)
        if args.write:
            args.write.write_text(written_into(args.write.read_text(), table(made)))
        else:
            print(table(made))
    except (BundleError, CompileError, KernelError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    breaches = [breach for it in made for breach in it.breaches()]
    print("".join(f"{breach}\n" for breach in breaches), end="", file=sys.stderr)
    raise SystemExit(1 if breaches else 0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ferrule_server.kernels.cuda.toolchain.report",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put the table between the markers of this file, and print nothing"
    )
    parser.add_argument("--cache", type=Path, default=default_folder(), help="folder (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
