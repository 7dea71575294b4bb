"""tools/kernels/README.md keeps its word: its kernel is right and compiles, its commands and intrinsics exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from ferrule_server.kernel_builder.compile import ARCHITECTURES
from ferrule_server.kernels.cuda.intrinsics import INTRINSICS
from tools.kernels import build

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "tools" / "kernels" / "README.md").read_text()
RECORDS = "python -m tests.kernels.cuda.toolchain.records"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_kernel_of_the_page_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its blocks, put into one file, simulate it, kill every mutant and find no breach in its machine code."""
    path = tmp_path / "kernels_page.py"
    path.write_text("\n\n".join(_blocks("python")))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" on ")[0] for line in printed[:4]] == ["grid_wait", "fence", "fence", "barrier"]
    assert [line.split("  ")[0] for line in printed[4:]] == list(ARCHITECTURES)
    assert all(line.endswith("  no breach") for line in printed[4:])


def test_commands_of_the_page_are_understood() -> None:
    """By the parser of the one command, whose options are all shown; the other one takes none."""
    lines = [line for block in _blocks("sh") for line in block.replace("\\\n", "").splitlines()]
    commands = [shlex.split(line) for line in lines if not line.startswith("make ")]
    assert commands
    for command in commands:
        assert command[:3] == ["python", "-m", "tools.kernels.build"]
        build._parse(command[3:])
    shown = {word for command in commands for word in command if word.startswith("--")}
    assert shown == {"--architecture", "--output", "--shape", "--wheel"}
    assert f"`{RECORDS}`" in PAGE


def test_the_families_name_every_intrinsic() -> None:
    """Either whole or as a prefix with the kinds it comes in; nothing that does not exist."""
    table = PAGE[PAGE.index("| family | names |") : PAGE.index("`i32`, `u32`, `registers`")]
    named: set[str] = set()
    for row in table.splitlines()[2:]:
        words = re.findall(r"`(\w+)`", row)
        prefixes = [word for word in words if word.endswith("_")]
        kinds = [word for word in words if f"{(prefixes or ['-'])[0]}{word}" in INTRINSICS]
        named.update(prefix + kind for prefix in prefixes for kind in kinds)
        stem = "load_relaxed" if "load_relaxed_u32" in words else ""
        named.update(stem + word if word.startswith("_") else word for word in words if word not in {*prefixes, *kinds})
    assert named == set(INTRINSICS)
