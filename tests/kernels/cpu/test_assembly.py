"""Kernels for processors that these tests may not run on: compiled for them, and their instructions read."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import config

from ferrule_server.kernels.cpu import processor
from ferrule_server.kernels.cpu.processor import choose_instructions

ROOT = Path(__file__).resolve().parents[3]
AVX2 = "+fma,+avx,+avx2"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512bf16"
AMX = f"{AVX512},+amx-tile,+amx-bf16"


def _assembly(cpu: str, features: str, instructions: str, *kernels: str) -> dict[str, str]:
    """Return the assembly of some kernels for a processor that is named as LLVM names it."""
    environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.cpu.assembly", instructions, *kernels]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    parts = re.split(r"^== (\w+)\n", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _blocks(assembly: str, instruction: str) -> list[str]:
    """Return the parts between labels and jumps that hold an instruction: of a product, the bodies of its loops."""
    parts = re.split(r"^(?:\.LBB\w+:|\tj\w+\t).*\n", assembly, flags=re.MULTILINE)
    return [part for part in parts if instruction in part]


def test_amx() -> None:
    """Every product is one of tiles, whose sums stay where they are; threads configure the tiles once in a step."""
    code = _assembly("sapphirerapids", AMX, "amx-bf16", "product", "work")
    blocks = _blocks(code["product"], "tdpbf16ps")
    assert [block.count("tdpbf16ps") for block in blocks] == [4] * 3  # up to 16 rows, and both halves of up to 32
    assert [block.count("tileloadd") for block in sorted(blocks, key=len)] == [4, 4, 5]
    assert not any("tilestored" in block for block in blocks)
    assert "vdpbf16ps" not in code["product"]
    assert code["work"].count("ldtilecfg") == code["work"].count("tilerelease") == 1


def test_avx512_bf16() -> None:
    """The loops of all row counts multiply pairs of bfloat16 in whole registers, and keep every sum in one."""
    code = _assembly("sapphirerapids", AVX512, "avx512-bf16", "multiply")["multiply"]
    blocks = _blocks(code, "vdpbf16ps")
    assert len(blocks) >= 12
    assert max(block.count("vdpbf16ps") for block in blocks) == 48  # 2 pairs, 12 rows, 2 of the 4 tiles
    for block in blocks:
        assert not re.search(r"vmov\w+\s+%zmm\d+, .*\(%rsp\)", block)
        assert "ymm" not in block
    assert "tdpbf16ps" not in code


def test_avx2() -> None:
    """No instruction beyond AVX2 and FMA."""
    code = _assembly("haswell", AVX2, "fma", "multiply", "attend")
    assert len(_blocks(code["multiply"], "vfmadd231ps")) >= 5
    assert _blocks(code["attend"], "vfmadd231ps")
    for text in code.values():
        assert "zmm" not in text
        assert "vdpbf16ps" not in text


@pytest.mark.parametrize(
    ("features", "is_permitted", "expected"),
    [
        ("", True, (None, "the processor has no fused multiply-add (FMA)")),
        (AVX2, True, ("fma", "the processor has no AVX512-BF16")),
        (AVX512, True, ("avx512-bf16", "the processor has AVX512-BF16")),
        (AMX, True, ("amx-bf16", "the processor has AMX")),
        (AMX, False, ("avx512-bf16", "the processor has AMX, but the system does not permit it")),
    ],
)
def test_the_choice_of_instructions(
    features: str, is_permitted: bool, expected: tuple[str | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best that the processor has and that the system permits, asked before anything is compiled."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    monkeypatch.setattr(processor, "may_use_amx", lambda: is_permitted)
    assert choose_instructions("bfloat16") == expected
    if features:
        assert choose_instructions("float32") == ("fma", "the weights are float32")
