"""What a run of the GPU benchmark tells people: a row of a dry run is never taken for a figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import parts, process, report
from benchmarks.gpu.process import Workplace

MS = {"median": 2.0, "min": 1.9, "max": 2.2, "samples": 5}
ROW = {"kind": "wire", "arm": "Generate, calls", "batch": 3, "context": 40, "ms": MS, "tok_s": 1500.0, "gbs": 0.1}


def test_a_row_of_a_dry_run_says_so_by_itself() -> None:
    """Times of the processor, copies of the host: whoever copies a line copies that too."""
    for row in (ROW, {"kind": "copy", "gbs": 46.65, "status": "ok"}, {"status": "stopped at the driver"}):
        assert report.line_of({**row, "is_dry": True}).startswith("(dry) ")
        assert "dry" not in report.line_of({**row, "is_dry": False})


@pytest.mark.parametrize("dry", ["sm_90a", None])
def test_rows_carry_what_they_are_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry: str | None) -> None:
    """In results.json too, where somebody may take one out."""

    def write(_: object, out: Path, log: Path, *__: object) -> str:
        out.write_text('{"status": "ok"}\n')
        log.write_text("")
        return ""

    monkeypatch.setattr(process, "run_limited", write)
    result = Workplace(tmp_path, {"dry": dry}, {"commit": "a", "is_dry": dry is not None}).run(parts.dry_parts()[0])
    assert result["rows"] == [{"status": "ok", "part": "ceilings", "model": "tiny", "is_dry": dry is not None}]


def test_a_dry_run_has_no_plot_and_says_so(tmp_path: Path) -> None:
    """Nor does that of an earlier run stay beside its results."""
    (tmp_path / "share.svg").write_text("<svg/>")
    here = Workplace(tmp_path, {}, {"commit": "a", "is_dry": True, "device": None})
    made = report.make_report(here, None)
    assert report.save(here, made) == ["results.json"]
    assert not (tmp_path / "share.svg").exists()
    assert "so there is no plot" in "\n".join(report.lines_of(made))
