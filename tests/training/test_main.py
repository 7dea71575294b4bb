"""The command line trains, resumes, exports and explains itself."""

import functools
import json
from pathlib import Path

import pytest

from tools.training.__main__ import main
from tools.training.corpus import is_held_out
from tools.training.model import ModelShape


def test_help_teaches_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """--help shows examples and says why the budget must be right from the start."""
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--minutes 90" in shown
    assert "learning rate" in shown


def test_export_without_a_checkpoint_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exporting untrained weights would only look like a model."""
    with pytest.raises(SystemExit) as stop:
        main(["--out", str(tmp_path / "run"), "--corpus", str(source), "--export-only"])
    assert stop.value.code == 2
    assert "train first" in capsys.readouterr().err


def test_a_run_leaves_log_checkpoint_and_model_and_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call with a larger budget continues where the first stopped."""
    small = functools.partial(ModelShape, hidden_size=40, intermediate_size=56, num_layers=2, head_dim=12)
    monkeypatch.setattr("tools.training.__main__.ModelShape", small)
    out = tmp_path / "run"
    for steps in ("1", "2"):
        main(["--out", str(out), "--corpus", str(source), "--steps", steps])
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert sorted(path.name for path in (out / "model").iterdir()) == [
        "MODEL_CARD.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of Python source of which both halves fill a window."""
    root = tmp_path / "library"
    root.mkdir()
    names = [f"module_{n}.py" for n in range(200)]
    for name in (next(filter(is_held_out, names)), next(name for name in names if not is_held_out(name))):
        (root / name).write_text("".join(f"def add_{n}(x):\n    return x * {n}\n\n\n" for n in range(150)))
    return root
