"""Settings from a TOML file: below flags and variables, above defaults, and each mistake is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest

from ferrule_server import __main__ as server
from ferrule_server.arguments import as_given, log_format_of, parse_config, settings_text, unknown_variables
from ferrule_server.config import ServerConfig
from ferrule_server.config_file import config_line
from ferrule_server.errors import ConfigError
from ferrule_server.settings import settings_of
from tests.server.test_arguments import BESIDE, Row, _flag, by_flag
from tests.server.test_main import REFERENCE, _end, _running

SETTINGS = {setting.flag: setting for setting in settings_of(ServerConfig)}


def _file(folder: Path, *lines: str) -> list[str]:
    """Return the arguments that name a file with these lines."""
    path = folder / "ferrule.toml"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return ["--config", str(path)]


def _line(row: Row, text: str) -> str:
    return config_line(SETTINGS[row.flag], ("a test", text))


@by_flag
def test_a_file_sets_every_setting_below_variables_and_flags(row: Row, tmp_path: Path) -> None:
    """Flags over the environment over the file over defaults."""
    value, beside = attrgetter(row.attribute), BESIDE.get(row.attribute, {})
    named = _file(tmp_path, _line(row, row.text))
    assert value(parse_config(named, beside)) == row.value
    assert value(parse_config([], {"FERRULE_CONFIG": named[1], **beside})) == row.value
    if row.is_switch:
        assert value(parse_config(named, {row.variable: "0"})) == row.default
        assert value(parse_config([*_file(tmp_path, _line(row, "0")), row.flag], beside)) == row.value
        assert value(parse_config(_file(tmp_path, _line(row, "0")), {row.variable: "1", **beside})) == row.value


@by_flag
def test_a_bad_value_in_a_file_is_an_error_that_names_it(row: Row, tmp_path: Path) -> None:
    """Unless a variable or a flag is read in its place."""
    if not row.bad or row.is_switch:
        return
    beside = BESIDE.get(row.attribute, {})
    is_number = SETTINGS[row.flag].kind.metavar in ("N", "SHARE")
    named = _file(tmp_path, f"{row.flag[2:]} = {'-1' if is_number else repr(row.bad)}")
    with pytest.raises(ConfigError) as caught:
        parse_config(named, {})
    assert as_given(str(caught.value), named, {}).startswith(f"{named[1]}: {row.flag[2:]} ")
    value = attrgetter(row.attribute)
    assert value(parse_config(named, {row.variable: row.text, **beside})) == row.value
    assert value(parse_config([*named, *_flag(row, row.text)], beside)) == row.value


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kv-memry = '4GiB'", "unknown setting 'kv-memry' (did you mean kv-memory?)"),
        ("kv_memory = '4GiB'", "unknown setting 'kv_memory' (did you mean kv-memory?)"),
        ("[memory]\nkv-memory = '4GiB'", "unknown setting 'memory'"),
        ("client = 1", "unknown setting 'client'"),
        ("max-context = '4096'", 'max-context must be a whole number, not "4096"'),
        ("max-context = true", "max-context must be a whole number, not true"),
        ("max-context = 4.5", "max-context '4.5': must be a whole number"),
        ("gpu-memory-fraction = '0.5'", 'gpu-memory-fraction must be a number, not "0.5"'),
        ("reflection = 1", "reflection must be true or false, not 1"),
        ("prefix-cache = 1", "prefix-cache must be a text in quotes, not 1"),
        ("kv-memory = 4", "kv-memory must be a text in quotes, not 4"),
        ("kv-memory = '4'", "kv-memory '4': must be a number with KiB, MiB, GiB or TiB, such as 512MiB; "),
        ("admins = [1]", "admins must be a list of texts, not [1]"),
        ("model = 2026-01-01", 'model must be a text in quotes, not "2026-01-01"'),
        ("token-file = ''", "token-file is empty: give the path of a file, or leave it out"),
        ("max-step-rows = ", "not TOML: "),
    ],
)
def test_a_mistake_is_one_line_that_names_file_and_key(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what was probably meant."""
    for name in [name for name in os.environ if name.startswith("FERRULE_")]:
        monkeypatch.delenv(name)
    named = _file(tmp_path, line)
    assert server.main(named) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"ferrule serve: {named[1]}: {said}")
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """By flag and by variable; an empty variable counts as unset."""
    with pytest.raises(ConfigError, match=r"/none\.toml: cannot be read: No such file or directory$"):
        parse_config(["--config", str(tmp_path / "none.toml")], {})
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory$"):
        parse_config([], {"FERRULE_CONFIG": str(tmp_path)})
    (tmp_path / "ferrule.toml").write_bytes(b"model = '\xff'\n")
    with pytest.raises(ConfigError, match="not TOML: 'utf-8' codec"):
        parse_config([], {"FERRULE_CONFIG": str(tmp_path / "ferrule.toml")})
    assert parse_config([], {"FERRULE_CONFIG": ""}) == parse_config([], {})
    assert unknown_variables(["FERRULE_CONFIG"]) == []


def test_the_flag_names_the_file_before_the_variable(tmp_path: Path) -> None:
    """Only one of them is read."""
    assert parse_config(_file(tmp_path, "threads = 3"), {"FERRULE_CONFIG": "/none"}).num_threads == 3


def test_types_of_toml_are_accepted_where_they_fit(tmp_path: Path) -> None:
    """Lists, booleans for on and off, whole numbers for shares; the table of the client is its own."""
    lines = ["admins = ['ops', 'spiffe://x/y']", "prefix-cache = false", "gpu-memory-fraction = 1"]
    lines += ["tls-cert = 'c'", "tls-key = 'k'", "tls-client-ca = 'a'", "[client]", "target = 'elsewhere:1'", "x = 1"]
    config = parse_config(_file(tmp_path, *lines), {})
    assert (config.admins, config.has_prefix_cache, config.gpu_memory_fraction) == (("ops", "spiffe://x/y"), False, 1.0)


def test_messages_about_several_settings_name_them_as_they_were_given(tmp_path: Path) -> None:
    """Those of the file with the file, those of flags as they are."""
    named = _file(tmp_path, "model = 'none'", "admins = 'ops'")
    said = as_given("--model none: no such folder; --admins goes with --ui on", [*named, "--ui", "on"], {})
    assert said == f"{named[1]}: model = none: no such folder; {named[1]}: admins goes with --ui on"
    assert as_given("--model x is wrong", named, {"FERRULE_MODEL": "x"}) == "FERRULE_MODEL=x is wrong"


def test_the_format_of_the_log_is_known_although_the_rest_is_wrong(tmp_path: Path) -> None:
    """So that the complaint is in it; a file that is wrong itself asks for nothing."""
    named = _file(tmp_path, "log-format = 'json'")
    assert log_format_of([*named, "--no-such-flag"], {}) == "json"
    assert log_format_of([*named, "--log-format", "text"], {}) == "text"
    assert log_format_of(named, {"FERRULE_LOG_FORMAT": "text"}) == "text"
    assert log_format_of(["--log-format"], {"FERRULE_CONFIG": named[1]}) == "json"
    assert log_format_of(_file(tmp_path, "log-format = 'json'", "x = 1"), {}) == "text"


def test_the_keys_of_the_server_may_be_in_a_table(tmp_path: Path) -> None:
    """Beside those above it; none may be in both, and an unknown one is refused there too."""
    config = parse_config(_file(tmp_path, "max-context = 64", "[serve]", "kv-memory = '5MiB'", "reflection = true"), {})
    assert (config.max_context, config.kv_memory_bytes, config.has_reflection) == (64, 5 << 20, True)
    with pytest.raises(ConfigError, match=r"set twice, in \[serve\] and above it: threads$"):
        parse_config(_file(tmp_path, "threads = 1", "[serve]", "threads = 2"), {})
    with pytest.raises(ConfigError, match=r"unknown setting 'thread' \(did you mean threads\?\)"):
        parse_config(_file(tmp_path, "[serve]", "thread = 2"), {})
    with pytest.raises(ConfigError, match=r"unknown setting 'serve'"):
        parse_config(_file(tmp_path, "serve = 2"), {})


def test_printed_settings_name_the_instance_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the host, unless another one is given."""
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-3.example.org")
    for given, line in (([], "# instance: gpu-3"), (["--instance", "east"], 'instance = "east"  # --instance')):
        arguments = [*given, "--print-config"]
        text = settings_text(arguments, {})
        assert text is not None
        assert line in text.splitlines()
        assert parse_config(arguments, {}).instance in line


def test_printed_settings_are_a_file_that_gives_them_again(tmp_path: Path) -> None:
    """Wherever they came from, which is said; what has its default is a comment."""
    named = _file(tmp_path, "threads = 2", "prefix-cache = 'off'", 'model = "a \\" b"')
    arguments = [*named, "--reflection", "--disable-cuda-graphs", "--print-config"]
    environment = {"FERRULE_KV_MEMORY": "5MiB", "FERRULE_UI": "off"}
    text = settings_text(arguments, environment)
    assert text is not None
    lines = text.splitlines()
    assert len(lines) == sum(bool(setting.group) for setting in SETTINGS.values())
    expected = {
        'kv-memory = "5MiB"  # FERRULE_KV_MEMORY',
        "reflection = true  # --reflection",
        f"threads = 2  # {named[1]}: threads",
        "# max-step-rows: 512",
        "# insecure: false",
        "# token-file: none",
    }
    assert expected <= set(lines)
    (tmp_path / "again.toml").write_text(text)
    assert parse_config(["--config", str(tmp_path / "again.toml")], {}) == parse_config(arguments, environment)
    assert settings_text(named, {}) is None


def test_a_server_starts_by_its_file(tmp_path: Path) -> None:
    """As a process; ``--print-config`` starts none."""
    named = _file(tmp_path, f"executor = '{REFERENCE[1]}'", "kv-memory = '4MiB'", "instance = 'by-file'")
    with _running(*named, "--listen", "127.0.0.1:0") as (process, values):
        assert (values["instance"], values["executor"]) == ("by-file", "paged-reference")
        _end(process)
    assert process.returncode == 0


def test_printing_settings_is_all_that_is_done(tmp_path: Path) -> None:
    """Exit code 0, the settings on standard output, misspelt ones on standard error; unusable ones are an error."""
    command = [sys.executable, "-m", "ferrule_server", "--print-config"]
    environment = os.environ | {"FERRULE_KV_MEMROY": "1GiB"}
    run = partial(subprocess.run, capture_output=True, text=True, env=environment, timeout=300, check=False)
    done = run([*command, *_file(tmp_path, "model = 'none'")])
    assert (done.returncode, done.stdout[:18]) == (0, 'model = "none"  # ')
    assert "unknown FERRULE_* variables are ignored variables=FERRULE_KV_MEMROY" in done.stderr
    assert run([*command, "--tls-cert", "c"]).returncode == 2
