"""The command that builds bundles: every architecture from one compilation, and nothing that does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ferrule_server.executor.cuda.bundle import BUNDLES, Bundle, kernel_key, source_hash
from ferrule_server.kernel_builder.compile import ARCHITECTURES, compile_all, has_dependent_launch, toolkit
from ferrule_server.kernels.cuda import add_norm, catalog, embed, litmus
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec, ModelShape
from tools.kernels import build
from tools.kernels.build import main

SPECS = [add_norm.spec(1024, ADD=False), embed.spec()]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[ModelShape]:
    """Have every model need two kernels only; return the shapes that were asked for."""
    asked: list[ModelShape] = []

    def kernels_of(shape: ModelShape) -> list[KernelSpec]:
        asked.append(shape)
        return SPECS

    monkeypatch.setattr(catalog, "kernels_of", kernels_of)
    return asked


def test_every_architecture_gets_a_bundle(
    shapes: list[ModelShape], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all models unless some are named, and of the test of early launch; it holds what the compiler makes."""
    folder = tmp_path / "new" / "kernels"
    main(["--output", str(folder), "--workers", "1"])
    assert shapes == list(MODEL_SHAPES.values())
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.bundle" for name in ARCHITECTURES)
    for name in ARCHITECTURES:
        bundle = Bundle.open(folder / f"{name}.bundle")
        assert (bundle.architecture, bundle.toolkit, bundle.sources) == (name, toolkit(), source_hash())
        assert list(bundle.kernels) == [kernel_key(spec) for spec in (*SPECS, *litmus.SPECS)]
        assert all((it.late != it) == has_dependent_launch(name) for it in bundle.read(SPECS[:1]).values())
    assert Bundle.open(folder / "sm_90a.bundle").read(SPECS) == compile_all(SPECS, "sm_90a")
    said = capsys.readouterr().err
    assert said.startswith("compiling 4 kernels for sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120\n")
    assert f"{folder}/sm_80.bundle: 4 kernels, 0.0 MB\n" in said
    assert not set("\r\033") & set(said), "nobody looks at a bar in a pipe"


def test_models_are_named_or_folders_with_a_config(shapes: list[ModelShape], tmp_path: Path) -> None:
    """One that is in no list has kernels too."""
    config = json.loads((Path(build.__file__).parents[2] / "server/ferrule_server/demo_model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 1000}))
    arguments = ["--output", str(tmp_path), "--architecture", "sm_80", "--workers", "1"]
    main([*arguments, "--shape", "Qwen3-8B", str(tmp_path)])
    assert shapes[0] == MODEL_SHAPES["Qwen3-8B"]
    assert shapes[1].intermediate_size == 1000
    with pytest.raises(SystemExit, match=r"error: .*none/config\.json"):
        main([*arguments, "--shape", "none"])


def test_a_kernel_that_does_not_fit_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, shapes: list[ModelShape], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it does not fit; the others are there."""
    large = replace(SPECS[1], shared_bytes=(99 << 10) + 1)
    monkeypatch.setattr(catalog, "kernels_of", lambda _: [SPECS[0], large])
    main(["--output", str(tmp_path), "--architecture", "sm_86", "sm_90a", "--workers", "1"])
    said = f"sm_86 is without a kernel: {large.name} for sm_86: 101377 bytes of shared memory, a CTA has 101376"
    assert said in capsys.readouterr().err
    small, whole = (Bundle.open(tmp_path / f"{architecture}.bundle") for architecture in ("sm_86", "sm_90a"))
    assert set(whole.kernels) - set(small.kernels) == {kernel_key(large)}


def test_a_wheel_holds_what_was_built(
    shapes: list[ModelShape], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its path is printed."""
    arguments = ["--output", str(tmp_path), "--architecture", "sm_80", "--workers", "1"]
    main([*arguments, "--wheel", str(tmp_path / "dist")])
    (wheel,) = (tmp_path / "dist").iterdir()
    assert capsys.readouterr().out == f"{wheel}\n"
    assert source_hash() in wheel.name


def test_bundles_of_a_checkout_are_not_committed() -> None:
    """They are made by ``make kernels``, where a server looks for them."""
    root = Path(build.__file__).parents[2]
    assert f"/{BUNDLES.relative_to(root)}/" in (root / ".gitignore").read_text().splitlines()
    assert "tools.kernels.build" in (root / "Makefile").read_text()


@pytest.mark.parametrize(("arguments", "said"), [(["--architecture", "sm_70"], "sm_70"), (["--workers", "0"], "0")])
def test_arguments_without_a_meaning_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 2 and a line that names them."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err
