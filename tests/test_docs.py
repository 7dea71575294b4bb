"""The pages and examples keep their word: what they show runs, and what is not served yet says so."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ferrule import Client, Policy
from ferrule.admin import CacheMetrics
from ferrule.types import Status

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "127.0.0.1:50051"
README = (ROOT / "README.md").read_text()
HANDLES = (ROOT / "docs" / "handles.md").read_text()
OBSERVING = (ROOT / "docs" / "observing.md").read_text()
EXAMPLES = sorted(set((ROOT / "examples" / "python").glob("*.py")) - {ROOT / "examples" / "python" / "raw_stubs.py"})


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def _run(code: str, target: str, names: dict[str, Any]) -> str:
    """Return what a piece prints when it runs against a server."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code.replace(ADDRESS, target), "page", "exec", dont_inherit=True), names)
    return out.getvalue()


def _run_example(path: Path, target: str) -> str:
    """Return what an example prints; no cache may be forgotten on the way."""
    command = [sys.executable, "-W", "error", str(path), "--target", target]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout


def _import(path: Path) -> ModuleType:
    module = ModuleType(path.stem)
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), module.__dict__)
    finally:
        del sys.modules[path.stem]
    return module


def _num_caches(target: str) -> int:
    with Client(target) as client:
        return len(list(client.list_caches()))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_and_leave_nothing_behind(path: Path, shipped_target: str) -> None:
    """A few lines each, and every sequence is released."""
    assert 2 <= len(_run_example(path, shipped_target).splitlines()) <= 40
    assert _num_caches(shipped_target) == 0


def test_every_example_is_named_in_a_page() -> None:
    """And each takes ``--target`` with the server's own default."""
    assert len(EXAMPLES) >= 5
    for path in EXAMPLES:
        assert f"(../examples/python/{path.name})" in HANDLES
        assert f'"--target", default="{ADDRESS}"' in path.read_text()


def test_speculation_gives_the_text_of_plain_greedy_decoding(shipped_target: str) -> None:
    """With more than a token per call."""
    out = _run_example(ROOT / "examples" / "python" / "speculative.py", shipped_target)
    assert "same as plain greedy: True" in out
    rate = re.search(r"([\d.]+) tokens per call", out)
    assert rate is not None
    assert float(rate[1]) > 1


@pytest.mark.parametrize("name", ["best_of_n", "tree_search"])
def test_saved_tokens_are_those_that_the_server_did_not_run(name: str, shipped_target: str) -> None:
    """What an example says it ran, with handles and without, is what the server counts."""
    with Client(shipped_target) as client:
        before = client.status()
        out = _run_example(ROOT / "examples" / "python" / f"{name}.py", shipped_target)
        after = client.status()
    with_handles, without, saved = (int(found) for found in re.findall(r"(\d+) prompt tokens", out))
    assert without - with_handles == saved > 1000
    counted = after.num_prefill_tokens - before.num_prefill_tokens
    # Pending tokens of the trunks go in one by one: decodes to the server.
    num_runs, single = (5, 2) if name == "tree_search" else (1, 0)
    assert counted == num_runs * (with_handles - single + without)


def test_each_beam_is_as_likely_as_its_score_says(shipped_target: str) -> None:
    """Every one scored again in one go, behind the prompt."""
    search = _import(ROOT / "examples" / "python" / "beam_search.py")
    with Client(shipped_target) as client:
        prompt = client.tokenize(search.PROMPT)
        beams = search.beam_search(client, search.PROMPT)
        assert len({beam.tokens for beam in beams}) == search.WIDTH
        assert [beam.logprob for beam in beams] == sorted((beam.logprob for beam in beams), reverse=True)
        for beam in beams:
            ids = [*prompt, *beam.tokens]
            with client.prefill(ids, policy=Policy(target_logprobs=True), all_positions=True) as cache:
                total = float(cache.last.target_logprobs[len(prompt) - 1 :].sum())
            assert total == pytest.approx(beam.logprob, abs=0.2)


def test_a_forked_score_is_that_of_the_whole_text(shipped_target: str) -> None:
    """Token by token; bfloat16 may round differently in other shapes."""
    score = _import(ROOT / "examples" / "python" / "score.py")
    with Client(shipped_target) as client:
        prompt, completions = client.tokenize(score.PROMPT), [client.tokenize(text) for text in score.COMPLETIONS]
        forked = score.score_forked(client, prompt, completions)
        for completion, logprobs in zip(completions, forked, strict=True):
            assert len(logprobs) == len(completion)
            np.testing.assert_allclose(score.score_whole(client, prompt, completion), logprobs, atol=0.2)


def test_the_pieces_of_handles_run_one_after_another(shipped_target: str) -> None:
    """In the order of the page, in one namespace; nothing stays on the server."""
    names: dict[str, Any] = {}
    out = [_run(piece, shipped_target, names) for piece in _blocks(HANDLES, "python")]
    names["client"].close()
    assert any(one.startswith("1 recovery, ") for one in out)
    assert _num_caches(shipped_target) == 0


def test_contributing_names_every_target_once() -> None:
    """Those that ``make help`` lists, but for itself."""
    listed = re.findall(r"^\| `make ([a-z-]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(listed) == len(set(listed))
    assert {*listed, "help"} == targets


def test_counters_of_the_page_exist() -> None:
    """Every name in the list of counters is a field of what ``ferrule metrics`` prints."""
    section = OBSERVING[OBSERVING.index("## Counters") : OBSERVING.index("## What is logged")]
    items = re.findall(r"^\* (`.*?):\s", section, re.MULTILINE | re.DOTALL)
    named = {name for item in items for name in re.findall(r"`(\w+)`", item)}
    counters = {field.name for field in dataclasses.fields(CacheMetrics)}
    assert named <= counters | {field.name for field in dataclasses.fields(Status)}
    assert len(named & counters) > 5


@pytest.mark.parametrize("counters", [CacheMetrics, Status])
def test_every_counter_is_explained_where_the_page_says(counters: type) -> None:
    """By a line of the docstring for each field."""
    fields = [field.name for field in dataclasses.fields(counters)]
    assert re.findall(r"^ {8}(\w+): \S", counters.__doc__ or "", re.MULTILINE) == fields


def test_the_picture_of_other_engines_has_the_rates_of_the_table() -> None:
    """Each of our bars: the rows of the picture are those of the table, in its order."""
    page = (ROOT / "docs" / "performance.md").read_text()
    picture = (ROOT / "docs" / "images" / "peers.svg").read_text()
    bars = re.findall(r">Ferrule (bf16|int8|int4)</text>\n<rect.*\n<text[^>]*>([\d.]+)<", picture)
    table = page[page.index("## Beside other engines") : page.index("* The others are")]
    rows = [re.findall(r"\| ([\d.]+) \(", row) for row in re.findall(r"^\| (?:\d+ seq|prefill).*", table, re.MULTILINE)]
    drawn = [tuple(rate for _, rate in bars[place : place + 3]) for place in range(0, len(bars), 3)]
    assert [bits for bits, _ in bars] == ["bf16", "int8", "int4"] * len(rows)
    assert drawn == [(row[0], row[1], row[-1]) for row in rows]
