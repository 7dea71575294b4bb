"""The settings of a connection: flags over variables over the table ``[client]`` of a file over defaults."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ferrule_cli import app as cli
from ferrule_cli.connection import add_connection_options, connect
from tests.client.fake_server import FakeServer


def _file(folder: Path, *lines: str) -> str:
    path = folder / "ferrule.toml"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return str(path)


def _settings(*arguments: str) -> argparse.Namespace:
    """Return what a command would use."""
    parser = argparse.ArgumentParser()
    add_connection_options(parser)
    args = parser.parse_args(arguments)
    connect(args).close()
    return args


KEYS = {
    "target": ("FERRULE_TARGET", '"a:1"', "a:1", "b:2", "c:3"),
    "timeout": ("FERRULE_TIMEOUT", "5", 5.0, "6", "7"),
    "tls-ca": ("FERRULE_TLS_CA", '"{0}/a"', "{0}/a", "{0}/b", "{0}/c"),
    "tls-server-name": ("FERRULE_TLS_SERVER_NAME", '"a"', "a", "b", "c"),
}
"""By key: its variable, a value in the file as it is written and as it is used, those of a variable and of a flag."""


@pytest.mark.parametrize("key", KEYS)
def test_flags_win_over_variables_and_variables_over_the_file(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in its turn; the file is named by a flag or by a variable."""
    for name in "abc":
        (tmp_path / name).write_text("no certificate, but nothing connects")
    variable, *values = KEYS[key]
    written, used, by_variable, by_flag = (
        value.format(tmp_path) if isinstance(value, str) else value for value in values
    )
    path, name = _file(tmp_path, "[client]", f"{key} = {written}"), key.replace("-", "_")
    assert getattr(_settings("--config", path), name) == used
    monkeypatch.setenv("FERRULE_CONFIG", path)
    assert getattr(_settings(), name) == used
    monkeypatch.setenv(variable, str(by_variable))
    assert str(getattr(_settings(), name)).removesuffix(".0") == by_variable
    assert str(getattr(_settings(f"--{key}", str(by_flag)), name)).removesuffix(".0") == by_flag
    monkeypatch.setenv(variable, "")  # counts as unset
    assert getattr(_settings(), name) == used


def test_tls_is_a_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable can take it back, a flag can only set it."""
    path = _file(tmp_path, "[client]", "tls = true")
    assert _settings().tls is False
    assert _settings("--config", path).tls is True
    monkeypatch.setenv("FERRULE_TLS", "0")
    assert _settings("--config", path).tls is False
    assert _settings("--config", path, "--tls").tls is True


def test_a_command_reaches_the_server_of_its_file(fake: FakeServer, tmp_path: Path) -> None:
    """What else is in the file is for ``ferrule serve``; the instance is sent along."""
    path = _file(tmp_path, 'kv-memory = "4GiB"', "[client]", f'target = "{fake.target}"', 'instance = "box-1"')
    assert cli.main(["generate", "--config", path, "--max-tokens", "2", "the"]) == 0
    assert fake.routes[0] == ("GetStatus", "box-1")


def test_a_file_without_the_table_sets_nothing(tmp_path: Path) -> None:
    """Such as that of a server."""
    assert _settings("--config", _file(tmp_path, 'listen = "a:1"')).target == _settings().target == "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["[client]", "tagret = 'a:1'"], "unknown setting 'tagret' in [client], did you mean target?"),
        (["[client]", "zzz = 'a:1'"], "unknown setting 'zzz' in [client]"),
        (["[client]", "target = 1"], "target in [client] must be a text in quotes, not 1"),
        (["[client]", "timeout = '5'"], 'timeout in [client] must be a number of seconds, not "5"'),
        (["[client]", "timeout = true"], "timeout in [client] must be a number of seconds, not true"),
        (["[client]", "timeout = 0"], "timeout in [client]: 0 is out of range, it must be at least 0.001"),
        (["[client]", "tls = 'yes'"], 'tls in [client] must be true or false, not "yes"'),
        (["client = 1"], "client must be a table"),
        (["[client"], "not TOML: "),
    ],
)
def test_a_mistake_is_one_line_that_names_file_and_key(
    lines: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2."""
    path = _file(tmp_path, *lines)
    assert cli.main(["health", "--config", path]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {path}: {said}")
    assert err.endswith("(CONFIG_INVALID)\n")
    assert err.count("\n") == 1


def test_a_file_or_a_variable_that_is_unusable_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its name."""
    monkeypatch.setenv("FERRULE_CONFIG", f"{tmp_path}/none")
    assert cli.main(["health"]) == 2
    assert "/none: cannot be read: No such file or directory (CONFIG_INVALID)" in capsys.readouterr().err
    monkeypatch.setenv("FERRULE_CONFIG", "")
    monkeypatch.setenv("FERRULE_TIMEOUT", "soon")
    assert cli.main(["health"]) == 2
    assert capsys.readouterr().err == "error: FERRULE_TIMEOUT: 'soon' is not a number (USED_WRONGLY)\n"
