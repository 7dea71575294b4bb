"""Machine code is kept in a folder that can be written, and compiled again when its source has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ferrule_server.kernels.cpu import compiled
from ferrule_server.kernels.cpu.compiled import Wanted, compile_kernels, usable_cache
from ferrule_server.kernels.cpu.plan import Instructions, Plan
from ferrule_server.kernels.matrix_kinds import CODES4_OFFSET, FLOAT32, INT8, MatrixKind

PLAN = Plan("fma", is_emulated=False, is_bfloat16=False, head_dim=32)
WANTED = Wanted([FLOAT32], [FLOAT32], [], [32])


@pytest.mark.parametrize("instructions", ["fma", "avx512-bf16", "avx512-vnni", "amx-bf16"])
@pytest.mark.parametrize("is_bfloat16", [False, True])
@pytest.mark.parametrize("packed", [None, INT8, CODES4_OFFSET])
def test_attention_writes_what_linear_layers_read(
    instructions: Instructions, is_bfloat16: bool, packed: MatrixKind | None
) -> None:
    """Its code is shared by models whose linear layers read the same form of inputs, and by no others."""
    plan = Plan(instructions, is_emulated=False, is_bfloat16=is_bfloat16, head_dim=64, packed=packed)
    found = compiled._shared_plan(plan, 64)
    assert (found.has_wide_inputs, found.has_rounded_inputs) == (plan.has_wide_inputs, plan.has_rounded_inputs)
    assert found == compiled._shared_plan(replace(plan, packed=packed and INT8), 64)


def _ignore(*_counts: int) -> None:
    """Progress nobody looks at."""


def test_kernels_are_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time nothing is written (``test_restart`` runs what was kept); other sources have another folder."""
    cache = usable_cache(None)
    assert cache is not None
    compile_kernels(PLAN, cache, _ignore, WANTED)
    kept = {path: path.stat().st_mtime_ns for path in (cache / compiled._VERSION).rglob("*.nbc")}
    assert len(kept) >= 5
    seen: list[tuple[int, int, int]] = []
    compile_kernels(PLAN, cache, lambda *counts: seen.append(counts), WANTED)
    assert seen == [(i, 7, 0) for i in range(8)]
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(compiled, "_SOURCES", tmp_path / "kernels")
    assert compiled._version() != compiled._VERSION


def test_a_read_only_folder_serves_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image: its machine code is copied to memory, and nothing that it holds is compiled again."""
    user = usable_cache(None)
    assert user is not None
    compile_kernels(PLAN, user, _ignore, WANTED)
    kept = {path.name for path in (user / compiled._VERSION).rglob("*.nbc")}
    monkeypatch.setattr("os.access", lambda *_: False)
    copied = usable_cache(user.parent)
    assert copied is not None
    assert copied != user
    assert {path.name for path in (copied / compiled._VERSION).rglob("*.nbc")} == kept
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*.nb?")}
    compile_kernels(PLAN, copied, _ignore, WANTED)
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*.nb?")} == before


def test_a_folder_that_cannot_be_written_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file stands in its place. Then kernels are compiled into memory, without one at every start."""
    (tmp_path / "file").touch()
    assert usable_cache(tmp_path / "new") == tmp_path / "new" / "cpu"
    assert not caplog.messages
    memory = usable_cache(tmp_path / "file")
    assert memory is not None
    assert list(memory.iterdir()) == []
    monkeypatch.setattr(compiled, "_MEMORY", tmp_path / "file")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    assert usable_cache(tmp_path / "file") is None
    assert len(caplog.messages) == 2
    assert all("event=kernels_not_kept" in message for message in caplog.messages)


def test_each_version_of_the_sources_keeps_its_own_machine_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only the content of a file has changed; the same sources find theirs again."""
    monkeypatch.setattr(compiled, "_SOURCES", tmp_path)
    source = tmp_path / "linear.py"
    source.write_text("FACTOR = 1")
    version = compiled._version()
    source.write_text("FACTOR = 2")
    assert compiled._version() != version
    source.write_text("FACTOR = 1")
    assert compiled._version() == version
