"""``ferrule completion``: every command and option is in the script of every shell, and the shells complete by it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule_cli import app as cli
from ferrule_cli.commands.completion import Place, places


@pytest.fixture(scope="module")
def found() -> dict[str, Place]:
    """All places by their words."""
    return {place.words: place for place in places(cli.build_parser())}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the scripts."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-m", "ferrule_cli.app", "completion", shell]
        (folder / shell).write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300).stdout)
    return folder


def test_places_are_the_commands_with_their_options(found: dict[str, Place]) -> None:
    """Those of the server are what it says itself."""
    assert {"", "serve", "generate", "admin drain", "completion"} <= set(found)
    assert {"serve", "admin", "top"} <= {word for word, _ in found[""].words_after}
    options = {option.flag: option for option in found["serve"].options}
    assert options["--device"].values == ("auto", "cpu", "cuda")
    assert (options["--reflection"].values, options["--threads"].values) == (None, ())
    assert (options["--token-file"].takes_file, options["--kv-memory"].takes_file) == (True, False)
    assert options["--kernel-bundle"].help.startswith("bundle of compiled kernels")
    assert len(options) > 50
    assert [word for word, _ in found["completion"].words_after] == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_has_every_option(shell: str, scripts: Path, found: dict[str, Place]) -> None:
    """And every command."""
    text = (scripts / shell).read_text()
    dashes = "-l " if shell == "fish" else "--"
    for place in found.values():
        assert all(f"{dashes}{option.flag[2:]}" in text for option in place.options)
        assert all(word in text for word, _ in place.words_after)


def test_without_the_server_its_options_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself is still known."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert {place.words: place for place in places(cli.build_parser())}["serve"].options == ()


LINES = [
    (("hea",), {"health"}),
    (("adm", ""), {"admin", "health"}),  # no command yet
    (("admin", ""), {"warmup", "drain", "shutdown"}),
    (("admin", "drain", "--gr"), {"--grace"}),
    (("generate", "serve", "--max"), {"--max-tokens"}),  # a prompt is no command
    (("serve", "--kv"), {"--kv-memory"}),
    (("serve", "--device", ""), {"auto", "cpu", "cuda"}),
    (("serve", "--insecure", "--dev"), {"--device"}),
    (("bench", "--weights", "int"), {"int8", "int4"}),
    (("generate", "--max-tokens", "1"), set()),  # it takes a value that nobody can guess
    (("completion", "z"), {"zsh"}),
]


def _check(given: set[str], words: tuple[str, ...], expected: set[str]) -> None:
    """What is begun has these ends alone; an empty word can be an option as well."""
    assert {word for word in given if words[-1] or not word.startswith("-")} >= expected
    assert not words[-1] or given == expected


def _shell(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.mark.parametrize(("words", "expected"), LINES, ids=[" ".join(words) for words, _ in LINES])
def test_bash_completes(words: tuple[str, ...], expected: set[str], scripts: Path) -> None:
    """By the function that the script defines."""
    code = """
        source "$1"; shift
        COMP_WORDS=(ferrule "$@"); COMP_CWORD=$#
        _ferrule
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    command = [_shell("bash"), "-uc", code, "bash", str(scripts / "bash"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == ""
    _check(set(done.stdout.split()), words, expected)


@pytest.mark.parametrize(("words", "expected"), LINES, ids=[" ".join(words) for words, _ in LINES])
def test_fish_completes(words: tuple[str, ...], expected: set[str], scripts: Path, tmp_path: Path) -> None:
    """By its own ``complete -C``."""
    line = " ".join(("ferrule", *words))
    code = f"source {scripts / 'fish'}; complete -C {line!r}"
    command = [_shell("fish"), "--no-config", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=tmp_path)
    given = {row.partition("\t")[0] for row in done.stdout.splitlines()}
    assert done.stderr == ""
    _check(given, words, expected)


def test_zsh_reads_the_script(scripts: Path) -> None:
    """Its completion needs a terminal, so only the syntax is checked."""
    subprocess.run([_shell("zsh"), "-n", str(scripts / "zsh")], check=True, timeout=300)
