"""The table of machine_code.md: every shipped kernel, what it takes of a GPU and what its machine code has."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from ferrule_server.kernel_builder.compile import toolkit, versions
from tools.kernels.machine_code import Made
from tools.kernels.sass import INSTRUCTION_BYTES

SHOWN = ("sm_80", "sm_90a")
"""The architectures whose figures the page has."""
BEGIN = "<!-- generated: python -m tests.kernels.cuda.toolchain.records -->"
END = "<!-- end of what is generated -->"

_HEAD = (
    "| constants | threads | shared | registers | spilled | CTAs/SM | LDG.128 | HMMA | code bytes |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def table(made: Iterable[Made]) -> str:
    """Return the table: a part per kernel, a row per set of constants, one figure per architecture if they differ.

    Args:
        made: Early kernels for :data:`SHOWN`; those of one spec follow each other.
    """
    parts = [f"Made with {versions()} CUDA={'.'.join(map(str, toolkit()))}. Two figures: {', then '.join(SHOWN)}."]
    for name, of_kernel in groupby(made, key=lambda it: it.compiled.spec.kernel.__name__):
        rows = (_row(list(same)) for _, same in groupby(of_kernel, key=lambda it: it.compiled.spec))
        parts.append(f"### {name}\n\n" + "\n".join((_HEAD, *rows)))
    return "\n\n".join(parts)


def _row(made: list[Made]) -> str:
    spec = made[0].compiled.spec
    constants = f"`{', '.join(f'{key}={value}' for key, value in spec.constants)}`" if spec.constants else ""
    figures = [list(dict.fromkeys(figure)) for figure in zip(*map(_figures, made), strict=True)]
    cells = (constants, spec.num_threads, spec.shared_bytes, *(" ".join(map(str, it)) for it in figures))
    return f"| {' | '.join(map(str, cells))} |"


def _figures(made: Made) -> tuple[int, ...]:
    compiled, code = made.compiled, made.code
    size = len(code.instructions) * INSTRUCTION_BYTES
    registers, spilled = compiled.num_registers, compiled.num_spilled_bytes
    return registers, spilled, compiled.ctas_per_sm, made.num_vector_loads, len(code.of("HMMA")), size


def written_into(page: str, content: str) -> str:
    """Return a page with the table between its markers.

    Raises:
        ValueError: The page lacks a marker.
    """
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"
