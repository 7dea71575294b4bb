"""Layer 2: every shipped kernel compiles for every architecture and keeps every rule, as machine_code.md says.

What the record of checked kernels answers for is not compiled again (:mod:`tests.kernels.cuda.toolchain.records`). The
PTX of those that are is kept in pytest's cache folder, by what it is made from: a second run compiles nothing.
"""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ferrule_server.kernels.cuda import catalog, embed
from ferrule_server.kernels.cuda.catalog import OPS, Op, kernels_of
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec, ModelShape
from tests.kernels.cuda.toolchain import records
from tools.kernels.machine_code import Made
from tools.kernels.report import BEGIN, END

PAGE = (Path(__file__).resolve().parents[4] / "tools" / "kernels" / "machine_code.md").read_text()
SHIPPED = records.shipped_kernels()
KERNELS = sorted({spec.kernel for spec in SHIPPED}, key=lambda kernel: kernel.__name__)
ADVICE = "run python -m tests.kernels.cuda.toolchain.records"


RECORD = records.read()
ALL = bool(os.environ.get("FERRULE_ALL_KERNELS"))
CHOSEN = records.all_specs() if ALL else records.to_compile(records.all_specs(), RECORD)
"""What is compiled here: see :mod:`tests.kernels.cuda.toolchain.records`."""


@pytest.fixture(scope="module")
def ptx(request: pytest.FixtureRequest) -> dict[KernelSpec, str]:
    """Return every chosen kernel as numba writes it."""
    assert request.config.cache is not None
    return records.written(CHOSEN, request.config.cache.mkdir("ptx"))


@pytest.fixture(scope="module")
def made(ptx: dict[KernelSpec, str]) -> list[Made]:
    """Return every chosen kernel as it ships, taken apart."""
    return records.assembled(ptx, records.VARIANTS if ALL else records.SOME_VARIANTS)


@pytest.mark.parametrize("kernel", [kernel.__name__ for kernel in KERNELS])
def test_machine_code_keeps_every_rule(made: list[Made], kernel: str) -> None:
    """At the shapes of all models, for all architectures, early and late."""
    of_kernel = [it for it in made if it.compiled.spec.kernel.__name__ == kernel]
    assert of_kernel
    breaches = [line for it in of_kernel for line in it.lines()]
    assert not breaches, "\n".join(breaches)


def test_ptx_is_that_of_the_record(ptx: dict[KernelSpec, str]) -> None:
    """A change that alters the PTX of a kernel says so: the record is in the same commit."""
    specs = records.all_specs()
    assert list(RECORD.ptx) == list(RECORD.made_from) == [spec.name for spec in specs]
    if records.versions() != RECORD.versions:
        pytest.skip(f"the record is of {RECORD.versions}")
    changed = [name for name, text in records.ptx_hashes(ptx).items() if text != RECORD.ptx[name]]
    assert not changed, ADVICE


def test_the_record_answers_for_every_kernel() -> None:
    """A record that is behind the sources has every run compile every kernel."""
    if records.versions() != RECORD.versions:
        pytest.skip(f"the record is of {RECORD.versions}")
    assert [spec.name for spec in records.all_specs() if not RECORD.has_checked(spec)] == [], ADVICE


def test_what_differs_from_the_record_is_compiled() -> None:
    """A promise, a source, a rule, a version; and one of each kernel always."""
    specs = records.all_specs()
    whole = records.Record(records.versions(), {spec.name: records.made_from(spec) for spec in specs}, {})
    one_of_each = records.to_compile(specs, whole)
    assert [spec.kernel for spec in one_of_each] == list(dict.fromkeys(spec.kernel for spec in specs))
    last = specs[-1]
    assert last not in one_of_each
    promised = replace(last, prefetches=not last.prefetches)
    assert promised in records.to_compile([*specs[:-1], promised], whole)
    assert last in records.to_compile(specs, replace(whole, made_from={**whole.made_from, last.name: "other"}))
    assert records.to_compile(specs, replace(whole, versions="other")) == specs


def test_page_holds_the_table(made: list[Made]) -> None:
    """A row for each kernel that ships; every figure where the compiler is the one that made the page."""
    before, page = PAGE.split(BEGIN)[1].split(END)[0].strip(), records.shown(made)
    rows, expected = set(before.splitlines()), set(page.splitlines())
    if page.splitlines()[0] not in rows:
        rows, expected = (
            {re.sub(r"^Made with .*|( \| [\d ]+){6} \|$", "", row) for row in some} for some in (rows, expected)
        )
    assert expected <= rows, ADVICE
    assert len(re.findall(r"^\| `\w+=.* \|$|^\| {2}\| \d.* \|$", before, re.M)) == len(SHIPPED), ADVICE


def test_sources_of_a_kernel_are_all_that_it_is_made_of() -> None:
    """Device functions of other files and the language, not other kernels."""
    path = Path(inspect.getsourcefile(embed.embed) or "")
    names = {file.name for file in records.closure(path)}
    assert {"embed.py", "intrinsics.py", "specialise.py", "spec.py"} <= names
    assert "argmax.py" not in names


def test_every_module_with_kernels_is_in_the_catalog() -> None:
    """In the table of ops, under its name."""
    folder = Path(inspect.getsourcefile(catalog) or "").parent
    modules = {path.stem for path in folder.glob("*.py") if re.search(r"^def specs\(", path.read_text(), re.M)}
    assert {op.name for op in OPS} == modules
    assert all(inspect.getmodule(op.specs).__name__.endswith(f".{op.name}") for op in OPS)  # type: ignore[union-attr]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("shape", MODEL_SHAPES.values(), ids=MODEL_SHAPES)
def test_specs_are_of_the_kernels_they_name(op: Op, shape: ModelShape) -> None:
    """Every constant has a value, sorted by name, and the sizes are possible."""
    assert op.specs(shape)
    for spec in op.specs(shape):
        constants = [it for it in inspect.signature(spec.kernel).parameters.values() if it.kind is it.KEYWORD_ONLY]
        assert [name for name, _ in spec.constants] == sorted(it.name for it in constants), spec.name
        assert spec.num_threads % 32 == 0
        assert 32 <= spec.num_threads * spec.ctas_per_sm <= 1024
        assert 0 <= (spec.shared_bytes + 1024) * spec.ctas_per_sm <= 114 * 1024, spec.name


def test_shipped_kernels_are_those_of_all_shapes() -> None:
    """Each once, with the shared memory of the largest."""
    names = [spec.name for spec in SHIPPED]
    assert len(names) == len(set(names))
    assert set(names) == {spec.name for shape in MODEL_SHAPES.values() for spec in kernels_of(shape)}
    largest = {spec.name: spec.shared_bytes for spec in SHIPPED}
    assert all(spec.shared_bytes <= largest[spec.name] for shape in MODEL_SHAPES.values() for spec in kernels_of(shape))
