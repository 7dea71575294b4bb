"""Layer 2: every shipped kernel compiles for every architecture and keeps every rule; docs/kernels.md says what is so.

What the record of checked kernels answers for is not compiled again (:mod:`tests.kernels.cuda.toolchain.records`). The
compiled kernels are kept in pytest's cache folder, by what they are made from: a second run compiles nothing.
"""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, ModelShape
from ferrule_server.kernels.cuda.toolchain import catalog
from ferrule_server.kernels.cuda.toolchain.catalog import OPS, Op, kernels_of, shipped_kernels
from ferrule_server.kernels.cuda.toolchain.compile import ARCHITECTURES, toolkit
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache
from ferrule_server.kernels.cuda.toolchain.machine_code import Made, make_all
from ferrule_server.kernels.cuda.toolchain.report import BEGIN, END, table
from tests.kernels.cuda.toolchain import records

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "kernels.md").read_text()
SHIPPED = shipped_kernels()
KERNELS = sorted({spec.kernel for spec in SHIPPED}, key=lambda kernel: kernel.__name__)
SHAPE = MODEL_SHAPES["Qwen3-0.6B"]


OTHER_BLOCKS = records.other_blocks()
RECORD = records.read()
CHOSEN = (
    records.all_specs() if os.environ.get("FERRULE_ALL_KERNELS") else records.to_compile(records.all_specs(), RECORD)
)
"""What is compiled here: see :mod:`tests.kernels.cuda.toolchain.records`."""


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> list[Made]:
    """Return every chosen kernel for every architecture, taken apart."""
    assert request.config.cache is not None
    return make_all(CHOSEN, cache=CubinCache(request.config.cache.mkdir("cubins")), num_workers=2)


@pytest.mark.timeout(600)  # the first one compiles them all
@pytest.mark.parametrize("kernel", [kernel.__name__ for kernel in KERNELS])
def test_machine_code_keeps_every_rule(made: list[Made], kernel: str) -> None:
    """At the shapes of all models, for all architectures."""
    of_kernel = [it for it in made if it.spec.kernel.__name__ == kernel]
    assert {it.cubin.architecture for it in of_kernel} == set(ARCHITECTURES)
    breaches = [str(breach) for it in of_kernel for breach in it.breaches()]
    assert not breaches, "\n".join(breaches)


@pytest.mark.timeout(600)
def test_ptx_is_that_of_the_record(made: list[Made]) -> None:
    """A change that alters the PTX of a kernel says so: the record is in the same commit."""
    specs = records.all_specs()
    assert list(RECORD.ptx) == list(RECORD.made_from) == [spec.name for spec in specs]
    if records.versions() != RECORD.versions:
        pytest.skip(f"the record is of {RECORD.versions}")
    hashes = records.ptx_hashes(made)
    changed = [name for name, ptx in hashes.items() if ptx != RECORD.ptx[name]]
    assert not changed, "run python -m tests.kernels.cuda.toolchain.records"


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


@pytest.mark.timeout(600)
def test_page_holds_the_table(made: list[Made]) -> None:
    """A row for each kernel that ships; every figure where the compiler is the one that made the page."""
    written = PAGE[PAGE.index(BEGIN) + len(BEGIN) : PAGE.index(END)].strip()
    rows = set(written.splitlines())
    expected = set(table(it for it in made if it.spec not in OTHER_BLOCKS).splitlines())
    if toolkit() not in written:
        rows, expected = (
            {re.sub(r"^Made with .*|( \| [\d ]+){6} \|$", "", row) for row in some} for some in (rows, expected)
        )
    advice = "run python -m ferrule_server.kernels.cuda.toolchain.report --write docs/kernels.md"
    assert expected <= rows, advice
    assert len(re.findall(r"^\| `\w+=.* \|$|^\| {2}\| \d.* \|$", written, re.M)) == len(SHIPPED), advice


def test_every_module_with_kernels_is_in_the_catalog() -> None:
    """In the table of ops, under its name."""
    folder = Path(inspect.getsourcefile(catalog) or "").parents[1]
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
