"""The commands that show what a journal contains."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ferrule_server.durability.__main__ import main
from ferrule_server.durability.records import Creation, Encoder, End
from tests.durability.stored import IDENTITY, Segments, store_parts
from tests.durability.test_replay import a_sequence

SECRETS = (bytes((1,)) * 16, bytes((2,)) * 16, bytes((7,)) * 16)


def groups() -> list[bytes]:
    """Return a journal of two sequences, a creation, a tombstone and a mask."""
    encoder = Encoder()
    creation = Creation("alice", "wish-17", b"c" * 16, b"", 0, 4, b"L" * 16, None, None, (1,))
    return [
        encoder.snapshot_begin() + encoder.snapshot_end(),
        encoder.sequence(a_sequence(1)) + encoder.creation(creation),
        encoder.sequence(a_sequence(2)),
        encoder.sequence(a_sequence(7)) + encoder.end(7, End.EXPIRED),
        encoder.mask("[b]ob", b"mm"),
        encoder.append(2, None, (4_000_000_001,), None, None),
    ]


def written(path: Path, segments: Segments) -> Path:
    """Write the files of a journal, and return its directory."""
    (path / "identity.json").write_bytes(IDENTITY.encode())
    for number, data in segments.items():
        (path / f"{number:020}.segment").write_bytes(data)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run a command in this process, and return its exit code and output."""
    code = main(list(map(str, arguments)))
    return code, capsys.readouterr().out


def facts(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """Run a command with ``--json``, and return its exit code and the object."""
    code, text = run(capsys, *arguments, "--json")
    return code, json.loads(text)


def test_a_whole_journal_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers by principal, and all places where records are."""
    code, found = facts(capsys, "inspect", written(tmp_path, store_parts([groups()])))
    assert code == 0
    assert found["identity"] == {
        "instance": "east-1",
        "epoch": "0123456789ab",
        "fingerprint": "0102",
        "dtype": "float32",
        "block_size": 16,
        "generation": 3,
    }
    counts = ("num_sequences", "num_tokens", "num_creations", "num_tombstones", "num_masks")
    assert [found[name] for name in counts] == [2, 9, 1, 1, 1]
    assert [found["principals"]["alice"][name] for name in counts] == [2, 9, 1, 1, 0]
    assert [found["principals"]["[b]ob"][name] for name in counts] == [0, 0, 0, 0, 1]
    (segment,) = found["segments"]
    assert (segment["role"], segment["num_frames"], segment["num_records"], segment["tail"]) == ("base", 7, 11, "clean")
    assert (found["torn"], found["damaged"]) == ([], [])


def test_a_table_is_shown_without_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are not read as markup."""
    code, text = run(capsys, "verify", written(tmp_path, store_parts([groups()])))
    assert code == 0
    for part in ("east-1", "alice", "[b]ob", "nothing is damaged"):
        assert part in text
    assert re.search(r"principal +. +num_sequences +. +num_tokens +. +num_creations +. +num_tombstones", text)


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("is_json", [False, True])
def test_no_secret_is_shown(command: str, is_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither secrets of handles nor tokens nor request ids, of a damaged journal neither."""
    segments = store_parts([groups()])
    data = segments[1]
    written(tmp_path, {1: data[:420] + b"?" + data[421:]})
    _, text = run(capsys, command, tmp_path, *(["--json"] if is_json else []))
    assert "touched" in text or not is_json
    shown = [secret.hex() for secret in SECRETS]
    shown += [base64.urlsafe_b64encode(secret).rstrip(b"=").decode() for secret in SECRETS]
    for part in (*shown, "4000000001", "wish-17", IDENTITY.seed_key.hex()):
        assert part not in text


def test_a_torn_journal_is_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The torn frame was never confirmed."""
    segments = store_parts([groups()])
    end = len(segments[1]) - 100
    code, found = facts(capsys, "verify", written(tmp_path, {1: segments[1][: end - 2] + bytes(100)}))
    assert (code, found["damaged"], found["num_tokens"]) == (0, [], 8)
    (torn,) = found["torn"]
    assert torn["segment"] == 1
    assert "torn: segment 1" in run(capsys, "verify", tmp_path)[1]


def test_damage_is_shown_with_what_would_be_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``verify`` reports it by its exit code; ``inspect`` only shows it."""
    parts = groups()
    segments = store_parts([parts])
    offset = len(segments[1]) - 100 - len(parts[-1]) - len(parts[-2]) - 18
    written(tmp_path, {1: segments[1][: offset + 10] + b"?" + segments[1][offset + 11 :]})
    code, found = facts(capsys, "verify", tmp_path)
    assert code == 1
    (damage,) = found["damaged"]
    assert (damage["segment"], damage["offset"], damage["num_frames_after"]) == (1, offset, 1)
    assert len(damage["touched"]) == 1
    code, text = run(capsys, "inspect", tmp_path)
    assert code == 0
    assert f"DAMAGED: segment 1, offset {offset}" in text
    assert damage["touched"][0] in text


def test_damage_that_does_not_matter_is_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a segment before the last snapshot."""
    segments = store_parts([groups(), groups()])
    data = segments[1]
    code, found = facts(capsys, "verify", written(tmp_path, segments | {1: data[:130] + b"?" + data[131:]}))
    assert code == 1
    assert [each["lost"] for each in found["damaged"]] == ["nothing, the segment is not needed"]
    assert found["num_sequences"] == 2


@pytest.mark.parametrize("identity", [None, b"{}", IDENTITY.encode().replace(b'"format": 1', b'"format": 2')])
def test_a_directory_that_is_no_journal_is_refused(
    identity: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or one of another format version."""
    if identity is not None:
        (tmp_path / "identity.json").write_bytes(identity)
    for path in (tmp_path, tmp_path / "missing"):
        assert main(["verify", str(path)]) == 2
        assert "is not a readable journal" in capsys.readouterr().err


def test_the_module_is_a_command(tmp_path: Path) -> None:
    """As the client's command line starts it; it writes nothing to the directory."""
    written(tmp_path, store_parts([groups()]))
    tmp_path.chmod(0o500)
    command = [sys.executable, "-m", "ferrule_server.durability", "verify", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing is damaged" in done.stdout
