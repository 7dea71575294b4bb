"""The pictures of the README: made from what a server and a terminal show, legible anywhere, and small."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import film, hero
from ferrule import Client

ROOT = Path(__file__).resolve().parents[2]


def text_of(svg: str) -> str:
    """Return all the text of a picture."""
    return " ".join(ET.fromstring(svg).itertext())


def test_a_screen_holds_what_a_terminal_would_show() -> None:
    """Colours, lines that are written again, and the cursor that goes up."""
    screen = film.Screen()
    screen.write("one\r\n\x1b[1;36mtwo\x1b[0m!\r\nold\r\x1b[2K\x1b[1A\x1b[2Knew")
    assert ["".join(cell.text for cell in line) for line in screen.lines] == ["one", "new", ""]
    screen.write("\r\n\x1b[2;91mred\x1b[22m")
    assert screen.lines[2][0].style == film.Style(colour=film.Style().after([91]).colour, is_dim=True)


@pytest.mark.parametrize("text", ["\x1b[3J", "\x1b[38;5;1m", "\a"])
def test_what_a_screen_does_not_know_is_an_error(text: str) -> None:
    """A film with a gap would show what was never there."""
    with pytest.raises(ValueError, match=r"does not know|16 colours"):
        film.Screen().write(text)


def test_a_film_shows_every_line_and_reveals_panels() -> None:
    """Each line once, and the text in a panel from left to right."""
    screen = film.Screen()
    screen.write("1  Prefill\r\n╭ trunk ─╮\r\n│ def f( │\r\n╰────────╯\r\npool  7 used\r\n")
    svg = film.film(screen.lines)
    for text in ("$ ferrule demo", "Prefill", "def f(", "pool  7 used"):
        assert text_of(svg).count(text) == 1
    assert svg.count('type="scale"') == 1


def test_the_picture_at_the_top_counts_what_the_server_reports(shipped_target: str) -> None:
    """Blocks of the prompt are shared by all, and every block that is drawn as held is held by somebody."""
    with Client(shipped_target) as client:
        picture = hero.gather(client, hero.NOTE)
    assert len(picture.branches) == hero.NUM_BRANCHES
    assert sum(picture.holders.values()) == picture.blocks_without_sharing > 3 * len(picture.holders)
    num_shared = picture.prompt_tokens // 16
    assert list(picture.holders.values()).count(hero.NUM_BRANCHES + 1) == num_shared
    shown = text_of(hero.draw(picture))
    assert f"{num_shared} shared by all 17 handles" in shown
    assert f"{len(picture.holders)} blocks; without sharing {picture.blocks_without_sharing}" in shown


def test_forking_is_measured_against_prefilling_again(tmp_path: Path) -> None:
    """In small: three ways, a ratio, and a picture."""
    command = [sys.executable, "benchmarks/bench_fork.py", "--rounds", "1", "--lengths", "24", "40", "--picture"]
    done = subprocess.run(
        [*command, str(tmp_path / "fork.svg")], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert {(one["way"], one["tokens"]) for one in figures} == {
        (way, tokens) for way in ("fork", "prefix cache", "prefill again") for tokens in (24, 40)
    }
    assert all(0 < one["min"] <= one["ms"] <= one["max"] for one in figures)
    assert "prefill again" in text_of((tmp_path / "fork.svg").read_text("utf-8"))
