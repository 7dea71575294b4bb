"""The screen of ``ferrule top``: it fits every size, says everything without colour, and obeys nobody's text."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.text import Text

from ferrule.admin import BlockMap
from ferrule.types import Status
from ferrule_cli.top.figures import Figures, History, Look
from ferrule_cli.top.frame import Frame, map_cells
from ferrule_cli.top.parts import ASCII, UNICODE, bar, block_lines, clean, short, span, spark, write_svg
from tests.client.views import blank, histogram, look, principal, sequence


def _figures(*looks: Look) -> Figures:
    history = History()
    for each in looks[:-1]:
        history.add(each)
    return history.add(looks[-1])


def _busy(num_sequences: int = 5000, num_cells: int = 4000) -> Figures:
    """A large server under load."""
    rng = random.Random(7)
    cells = bytes(rng.choice((0, 1, 2, 2, 3, 4, 9, 30, 255)) for _ in range(num_cells))
    sequences = tuple(sequence(i, expires_in_s=float(i), num_pending=i % 2) for i in range(min(1024, num_sequences)))
    people = tuple(principal(f"user-{i}", num_appends=10, queue_ns=i * 10**6) for i in range(64))
    return _figures(
        look(100.0, cells=cells, principals=tuple(principal(one.principal) for one in people), known_principals=500),
        look(
            101.0,
            cells=cells,
            live_sequences=num_sequences,
            sequences=sequences,
            principals=people,
            known_principals=500,
            num_decode_tokens=123_456,
            num_steps=900,
            num_step_rows=90_000,
            step_ns=10**9,
            num_errors=12,
            num_refused={"QUEUE_FULL": 12},
            fallback_reason="the kernels do not compile: " + "x" * 300,
            step_seconds=histogram(10, 10, 10, 10, 1),
        ),
    )


def _durable(state: str, **given: Any) -> str:
    """Return what a screen says of a server with a journal in that state."""
    syncs = (histogram(10, 0, 0, 0), histogram(10, 0, 40, 10))
    first, second = (look(100.0 + i, journal_state=state, sync_seconds=one, **given) for i, one in enumerate(syncs))
    return "\n".join(line.plain for line in Frame(140, 40, ASCII).lines(_figures(first, second)))


def test_a_journal_has_a_line() -> None:
    """Its state, what is cold, and the pace and length of syncs; without a journal there is no such line."""
    shown = _durable("healthy", durable_sequences=12, cold_sequences=3, tokens_to_recompute=4500)
    line = next(line for line in shown.splitlines() if line.startswith("durable"))
    for text in ("journal healthy", "sequences 12", "cold 3", "to recompute 4500", "syncs/s 50", "ms p50/p99 3.3/7.8"):
        assert text in line, line
    assert "journal lost" in _durable("lost")
    for nothing in ("unspecified", ""):
        assert "journal" not in _durable(nothing)


def _guest() -> Figures:
    note = "without the admin role: status, cache metrics and your own handles"
    return _figures(look(100.0, note, cells=None, sequences=(sequence(1, principal=""),)))


def _starting() -> Figures:
    status = blank(Status, state="starting", instance="here", load_progress=0.42, load_stage="reading weights")
    return _figures(Look(1000.0, status))


def _empty() -> Figures:
    return _figures(look(0.0, cells=bytes(340), used_blocks=0, shared_blocks=0, cached_blocks=0, empty_blocks=0))


CASES = {"busy": _busy, "guest": _guest, "starting": _starting, "empty": _empty}


def _plain(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_a_frame_fits_every_size(case: str, glyphs: object) -> None:
    """No line is too long, there are never too many, and nothing fails, from one cell to a wall of screens."""
    figures = CASES[case]()
    for width in (1, 2, 13, 25, 40, 79, 80, 109, 110, 140, 300):
        for height in (1, 2, 3, 6, 10, 14, 24, 40, 100):
            frame = Frame(width, height, glyphs)  # type: ignore[arg-type]
            lines = frame.lines(figures, note="no answer for 3 s", hint="q ends")
            assert len(lines) <= height, (width, height)
            assert all(cell_len(line.plain) <= width for line in lines), (width, height)
            assert all("\n" not in line.plain for line in lines)


def test_80_by_24_shows_everything() -> None:
    """Tokens, steps, queue, times, pool, picture, leases and principals, with a hint at the bottom."""
    lines = Frame(80, 24, UNICODE).lines(_busy(), hint="q ends")
    text = _plain(lines)
    assert len(lines) == 24
    assert lines[-1].plain == "q ends"
    first = ("ferrule top  here  ● busy", "generated 123k", "per second 900", "rows each 100 of 512", "busy 100%")
    then = ("refused/s 12", "QUEUE_FULL 12", "used 40%", "shared 15", "── blocks", "5000 handles", "── principals")
    assert [words for words in (*first, *then) if words not in text] == []
    assert "0000000000000000   ! 0.0s" in text
    assert "in use" in text
    assert "user-63" in text


def test_a_server_that_is_away_has_no_state() -> None:
    """A green 'busy' beside 'no answer' would be believed."""
    figures = _figures(look(1.0), look(2.0))
    assert "● busy" in _plain(Frame(80, 24, UNICODE).lines(figures))
    text = _plain(Frame(80, 24, UNICODE).lines(figures, note="no answer for 3 s"))
    assert "● busy" not in text
    assert "● away" in text


def test_what_others_write_is_never_obeyed() -> None:
    """Escape sequences in names become question marks, on the screen and in the tables."""
    evil = "\x1b[2J\x1b]0;title\x07\u202e\r\nx"
    figures = _figures(
        look(1.0),
        look(
            2.0,
            instance=evil,
            model_id=evil,
            executor=evil,
            fallback_reason=evil,
            principals=(principal(evil),),
            sequences=(sequence(1, principal=evil, handle_id=evil),),
            num_refused={evil: 3},
        ),
    )
    for size in ((80, 24), (140, 40)):
        text = _plain(Frame(*size, UNICODE).lines(figures, note=evil))
        assert all(one.isprintable() for one in text.replace("\n", ""))
    assert clean("a\tb\x00") == "a?b?"


def test_a_simple_terminal_gets_ascii() -> None:
    """Pictures, rules and marks too."""
    assert _plain(Frame(120, 40, ASCII).lines(_busy(), hint="q ends")).isascii()


# ---- the picture of the pool ----------------------------------------------------------------------------------------


def _map(cells: bytes, cell_blocks: int = 1, fill: bytes | None = None) -> BlockMap:
    return BlockMap(cell_blocks=cell_blocks, cells=cells, fill=fill or bytes(255 * (cell > 1) for cell in cells))


def test_the_picture_is_read_without_colour() -> None:
    """Digits are owners, a plus is more than 9."""
    lines, cell_blocks = block_lines(_map(bytes([0, 1, 2, 3, 4, 10, 11, 255])), 80, 4, ASCII)
    assert [line.plain for line in lines] == [".:O239++"]
    assert cell_blocks == 1


def test_the_picture_is_merged_where_it_does_not_fit() -> None:
    """Each cell then shows the largest of its blocks, and whether they are all held."""
    cells, fill = bytes([0, 2, 2, 2, 0, 5, 1, 0]), bytes([0, 255, 255, 255, 0, 255, 0, 0])
    lines, cell_blocks = block_lines(_map(cells, 3, fill), 2, 2, ASCII)
    assert [line.plain for line in lines] == ["oO", "4:"]
    assert cell_blocks == 6


@pytest.mark.parametrize("num_cells", [0, 1, 5, 79, 80, 81, 1000])
def test_the_picture_has_room_for_what_is_asked_for(num_cells: int) -> None:
    """A server that gives more cells than were asked for is merged; nothing is cut off."""
    for width, height in ((80, 24), (20, 8), (200, 60)):
        room = map_cells(width, height)
        lines, size = block_lines(_map(bytes([2]) * num_cells), width, room // width, UNICODE)
        assert len(lines) <= room // width
        assert sum(len(line.plain) for line in lines) == -(-num_cells // size)


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_numbers_are_short() -> None:
    """Four characters or so, whatever their size."""
    values = (0, 0.04, 3.456, 12, 999.6, 1234, 9999, 10_000, 123_456, 1_500_000, 12_345_678, 10**10)
    expected = ["0", "0.0", "3.5", "12", "1000", "1234", "9999", "10k", "123k", "1.5M", "12M", "10G"]
    assert [short(value) for value in values] == expected
    assert [span(value) for value in (0, 4.21, 59, 90, 200, 7200, 10**6)] == [
        "0.0s",
        "4.2s",
        "59s",
        "90s",
        "3m",
        "2h",
        "12d",
    ]


def test_bars_and_sparklines_keep_their_width() -> None:
    """A share above 0 is always seen; more than all is all."""
    for shares in ((0.5, 0.5), (0.001, 0.999), (0.999, 0.001), (0.7, 0.7), (0.0, 0.0)):
        for width in (0, 1, 8, 40):
            drawn = bar([(shares[0], "a", ""), (shares[1], "b", "")], width).plain
            assert len(drawn) <= width
            assert width < 8 or all((share > 0) == (mark in drawn) for share, mark in zip(shares, "ab", strict=True))
    assert spark([0.0, 1.0, 2.0], 10, UNICODE) == "▁▅█"
    assert spark([0.0, 0.0], 10, ASCII) == "__"
    assert spark([1.0] * 50, 10, ASCII) == "#" * 10
    assert spark([5.0], 10, UNICODE) == spark([1.0, 2.0], 0, UNICODE) == ""


def test_a_picture_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    """It is XML, and refers to no other address than that of SVG itself."""
    path = tmp_path / "top.svg"
    write_svg(path, Frame(110, 32, UNICODE).lines(_busy()), 110)
    text = path.read_text("utf-8")
    ET.fromstring(text)
    assert text.count("http") == text.count("http://www.w3.org/2000/svg")
    assert "url(http" not in text
