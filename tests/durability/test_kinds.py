"""Files of another kind or size than a journal has: an error that names the file, at once, and no traceback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ferrule_server.durability import writer as writers
from ferrule_server.durability.__main__ import main
from ferrule_server.durability.files import MAX_FILE_BYTES, Files
from ferrule_server.durability.frames import MAX_PAYLOAD_BYTES, Previous, SegmentHeader, encode_frame, frame_bytes
from ferrule_server.engine.durable.opening import open_durability
from ferrule_server.errors import ConfigError
from tests.durability.journals import WANTED
from tests.durability.test_newest import journal_of, newest_of


def sparse(path: Path) -> None:
    """Make a file of 200 GB that takes no room."""
    path.touch()
    os.truncate(path, 200 << 30)


def link(path: Path) -> None:
    """Make a link to a file outside, which must not be read or written."""
    target = path.parent.parent / "outside"
    target.write_bytes(b"outside")
    path.symlink_to(target)


def bind(path: Path) -> None:
    """Make a socket."""
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "directory": Path.mkdir,
    "link out": link,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "socket": bind,
    "huge and sparse": sparse,
    "empty": Path.touch,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a journal, to be copied."""
    return journal_of(tmp_path_factory.mktemp("kinds") / "journal")


@pytest.fixture
def path(tmp_path: Path, written: Path) -> Path:
    """Return a journal of its own for each test."""
    return Path(shutil.copytree(written, tmp_path / "journal"))


FILES = ("identity.json", "newest", "lock", "identity.json.new")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_is_an_error(
    path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    """At the start, which reads and writes it, and for the commands, which only read."""
    file = newest_of(path) if name == "newest" else path / name
    file.unlink(missing_ok=True)
    KINDS[kind](file)
    is_read = name in FILES[:2]
    capsys.readouterr()
    for command in ("inspect", "verify"):
        code = main([command, "--json", str(path)])
        shown = capsys.readouterr()
        is_damage = (name, kind) == ("newest", "empty")
        assert code == (2 if is_read and not is_damage else int(is_damage and command == "verify")), shown
        assert code != 2 or (file.name in shown.err and json.loads(shown.err)["reason"] == "JOURNAL_UNREADABLE")
    may_start = (name == "lock" and kind in ("empty", "huge and sparse")) or (
        name == "identity.json.new" and kind != "directory"
    )
    if may_start:
        open_durability(path, WANTED, segment_bytes=4096).journal._writer.close()
    else:
        with pytest.raises(ConfigError):
            open_durability(path, WANTED)
    if (outside := path.parent / "outside").exists():
        assert outside.read_bytes() == b"outside"


@pytest.mark.parametrize("name", ["identity.json", "newest"])
def test_a_file_that_cannot_be_read_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Root reads everything, so the system is asked to refuse."""
    file = newest_of(path) if name == "newest" else path / name
    whole = os.open

    def refuse(target: Path, *rest: int) -> int:
        if target == file:
            raise PermissionError(13, "Permission denied", str(target))
        return whole(target, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert main(["verify", str(path)]) == 2
    with pytest.raises(ConfigError, match="Permission denied"):
        open_durability(path, WANTED)


def test_a_huge_file_is_not_read(path: Path) -> None:
    """The command works in little memory, and says what is wrong in one line."""
    newest = newest_of(path)
    os.truncate(newest, 200 << 30)
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "import sys; from ferrule_server.durability.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", limited, "verify", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert "more than any file of a journal" in ran.stderr
    assert str(newest) in ran.stderr


def test_no_segment_is_larger_than_a_file_may_be() -> None:
    """One frame of the largest payload after the longest header."""
    header = SegmentHeader((1 << 63) - 1, "0" * 12, (1 << 63) - 1, Previous((1 << 63) - 1, MAX_FILE_BYTES), "1")
    largest = frame_bytes(MAX_PAYLOAD_BYTES) + writers._HEADER_ROOM_BYTES
    assert len(encode_frame(header.encode(), header.segment, 0)) <= writers._HEADER_ROOM_BYTES
    assert max(largest, writers.SEGMENT_BYTES) <= MAX_FILE_BYTES


def test_a_file_that_grows_is_read_as_far_as_it_was(tmp_path: Path) -> None:
    """A segment beside a running server."""
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert Files().read_bytes(path) == b"12345"
