"""Every flag with its variable, default and value, a value that is refused, and what ``--help`` has."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import pytest

from ferrule_server import __main__ as server
from ferrule_server import process
from ferrule_server.addresses import ListenAddress
from ferrule_server.arguments import build_parser, parse_config, unknown_variables
from ferrule_server.config import ServerConfig, instance_of_host
from ferrule_server.errors import ConfigError
from ferrule_server.quotas import QuotaLimits
from ferrule_server.settings import settings_of, texts_of


class Row(NamedTuple):
    """One setting.

    Attributes:
        flag: On the command line.
        attribute: Of ServerConfig.
        default: Value of the attribute if neither the flag nor the variable is given.
        text: A value as users write it.
        value: The value of the attribute then.
        bad: A value that is refused; empty if every value is accepted.
    """

    flag: str
    attribute: str
    default: object
    text: str
    value: object
    bad: str

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"FERRULE_{self.flag[2:].replace('-', '_').upper()}"

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return isinstance(self.default, bool) and self.text == "1"


ROWS = (
    Row("--model", "model", "demo", "org/name", "org/name", "~no-such-user/x"),
    Row("--ignore-config-key", "ignored_config_keys", (), "zeta, psi", ("zeta", "psi"), ""),
    Row("--revision", "revision", None, "v1.0", "v1.0", "../x"),
    Row("--offline", "is_offline", False, "1", True, "maybe"),
    Row("--download-only", "is_download_only", False, "1", True, "maybe"),
    Row("--executor", "executor", "auto", "torch", "torch", "cuda"),
    Row("--reference-vocab", "reference_vocab_size", 256, "1000", 1000, "1"),
    Row("--reference-layers", "reference_layers", 2, "3", 3, "0"),
    Row("--reference-heads", "reference_heads", 4, "8", 8, "0"),
    Row("--reference-block-size", "reference_block_size", 16, "4", 4, "12"),
    Row("--device", "device", "auto", "cuda:1", "cuda:1", "gpu"),
    Row("--dtype", "dtype", "auto", "float32", "float32", "float8"),
    Row("--weights", "weights", "float", "int8", "int8", "int3"),
    Row("--activations", "activations", "int16", "int8", "int8", "int4"),
    Row("--threads", "num_threads", None, "4", 4, "0"),
    Row("--gpu-memory-fraction", "gpu_memory_fraction", 0.9, "0.75", 0.75, "2"),
    Row("--deterministic", "is_deterministic", False, "1", True, "maybe"),
    Row("--disable-cuda-runner", "has_cuda_runner", True, "1", False, "maybe"),
    Row("--disable-cuda-graphs", "has_cuda_graphs", True, "1", False, "maybe"),
    Row("--early-launch", "early_launch", "auto", "off", "off", "maybe"),
    Row("--kernel-cache", "kernel_cache", None, "/kernels", Path("/kernels"), "~no-such-user/x"),
    Row("--kernel-bundle", "kernel_bundle", None, "/kernels.bundle", Path("/kernels.bundle"), "~no-such-user/x"),
    Row("--kv-memory", "kv_memory_bytes", None, "512MiB", 512 << 20, "1KiB"),
    Row("--max-context", "max_context", None, "4096", 4096, "0"),
    Row("--max-ttl", "max_ttl_s", 3600.0, "30m", 1800.0, "1s"),
    Row("--max-step-rows", "max_step_rows", 512, "128", 128, "1"),
    Row("--max-step-time", "max_step_time_s", None, "20ms", 0.02, "20"),
    Row("--max-connections", "max_connections", None, "99", 99, "65537"),
    Row("--max-waiting-jobs", "max_waiting_jobs", 4096, "77", 77, "0"),
    Row("--prefix-cache", "has_prefix_cache", True, "off", False, "maybe"),
    Row("--quota-handles", "quotas.handles", None, "1", 1, "0"),
    Row("--quota-kv-tokens", "quotas.kv_tokens", None, "2", 2, "-1"),
    Row("--quota-queued-rows", "quotas.queued_rows", None, "3", 3, "0"),
    Row("--quota-prefill-rate", "quotas.prefill_tokens_per_s", None, "4", 4, "0"),
    Row("--quota-retained", "quotas.retained_bytes", None, "5KiB", 5 << 10, "5"),
    Row("--quota-mask-bytes", "quotas.mask_bytes", 64 << 20, "none", None, "6"),
    Row("--quota-call-rate", "quotas.calls_per_s", None, "7", 7, "0"),
    Row("--quota-request-bytes", "quotas.request_bytes_per_s", None, "8KiB", 8 << 10, "0KiB"),
    Row("--quota-text-rate", "quotas.text_bytes_per_s", None, "9KiB", 9 << 10, "0KiB"),
    Row("--listen", "listen", ListenAddress("127.0.0.1", 50051), "[::1]:7000", ListenAddress("::1", 7000), "50051"),
    Row("--insecure", "is_insecure", False, "1", True, "maybe"),
    Row("--metrics-listen", "metrics_listen", None, "localhost:9464", ListenAddress("127.0.0.1", 9464), "9464"),
    Row("--ui", "ui", "auto", "off", "off", "yes"),
    Row("--reflection", "has_reflection", False, "1", True, "maybe"),
    Row("--instance", "instance", instance_of_host(socket.gethostname()), "gpu-3", "gpu-3", "a.b"),
    Row("--drain-grace", "drain_grace_s", 25.0, "3s", 3.0, "721h"),
    Row("--token-file", "token_file", None, "/tokens", Path("/tokens"), " "),
    Row("--tls-cert", "tls_cert", None, "/cert.pem", Path("/cert.pem"), " "),
    Row("--tls-key", "tls_key", None, "/key.pem", Path("/key.pem"), " "),
    Row("--tls-client-ca", "tls_client_ca", None, "/ca.pem", Path("/ca.pem"), " "),
    Row("--admins", "admins", (), "ops, spiffe://x/y", ("ops", "spiffe://x/y"), "ops"),
    Row("--failpoints", "failpoints", "", "x", "x", ""),
    Row("--log-level", "log_level", "info", "debug", "debug", "chatty"),
    Row("--log-format", "log_format", "text", "json", "json", "xml"),
    Row(
        "--otlp-endpoint",
        "otlp_endpoint",
        None,
        "https://collector.example",
        "https://collector.example:4317",
        "127.0.0.1:4317",
    ),
    Row("--durable", "durable", None, "/journal", Path("/journal"), "~no-such-user/x"),
    Row("--restore-wait", "restore_wait", 8192, "0", 0, "many"),
    Row("--debug-top-tokens", "logs_top_tokens", False, "1", True, "maybe"),
)
BESIDE = {
    "activations": {"FERRULE_WEIGHTS": "int8"},
    "revision": {"FERRULE_MODEL": "org/name"},
    "is_download_only": {"FERRULE_MODEL": "org/name"},
    "tls_cert": {"FERRULE_TLS_KEY": "/k"},
    "tls_key": {"FERRULE_TLS_CERT": "/c"},
    "tls_client_ca": {"FERRULE_TLS_CERT": "/c", "FERRULE_TLS_KEY": "/k"},
    "admins": {"FERRULE_TLS_CERT": "/c", "FERRULE_TLS_KEY": "/k", "FERRULE_TLS_CLIENT_CA": "/ca"},
}
"""Variables without which a setting is refused."""

by_flag = pytest.mark.parametrize("row", ROWS, ids=attrgetter("flag"))


def _flag(row: Row, text: str) -> list[str]:
    return [row.flag] if row.is_switch else [f"{row.flag}={text}"]


def test_the_help_says_what_the_pool_is() -> None:
    """What --kv-memory limits, its units and its default."""
    words = " ".join(build_parser().format_help().split())
    text = words[words.rindex("--kv-memory SIZE") : words.rindex("--max-context")]
    assert "the KV cache of all sequences together, in KiB, MiB, GiB or TiB" in text
    assert "weights and everything else come on top (default: 1GiB, less if less is free" in text


def test_the_table_is_complete() -> None:
    """Every flag and every field stands in it once."""
    flags = [action.option_strings[0] for action in build_parser()._actions]
    assert sorted({row.flag for row in ROWS} | {"-h", "--version", "--config", "--print-config"}) == sorted(flags)
    fields = {field.name for field in dataclasses.fields(ServerConfig)} - {"quotas"}
    fields |= {f"quotas.{field.name}" for field in dataclasses.fields(QuotaLimits)}
    assert sorted(row.attribute for row in ROWS) == sorted(fields)


@by_flag
def test_default_and_value(row: Row) -> None:
    """The flag, the variable and no variable give the values of the table; flags win over variables."""
    value = attrgetter(row.attribute)
    beside = BESIDE.get(row.attribute, {})
    assert value(parse_config([], {})) == row.default
    assert value(parse_config(_flag(row, row.text), beside)) == row.value
    assert value(parse_config([], {row.variable: row.text, **beside})) == row.value
    if row.is_switch:
        assert value(parse_config([], {row.variable: "off"})) == row.default
        assert value(parse_config([row.flag], {row.variable: "0", **beside})) == row.value
    elif row.bad:
        assert value(parse_config(_flag(row, row.text), {row.variable: row.bad, **beside})) == row.value


def test_a_flag_of_names_can_be_repeated() -> None:
    """Each adds names; other flags are those that come last."""
    flags = ["--ignore-config-key=a", "--ignore-config-key", "b,c", "--dtype=bfloat16", "--dtype=auto"]
    config = parse_config(flags, {})
    assert (config.ignored_config_keys, config.dtype) == (("a", "b", "c"), "auto")


@by_flag
def test_a_bad_value_is_one_line_and_exit_code_2(
    row: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line begins with the flag or the variable, whichever the value came from."""
    monkeypatch.setattr(process, "set_up", lambda _: None)
    for name in [name for name in os.environ if name.startswith("FERRULE_")]:
        monkeypatch.delenv(name)
    if row.bad and not row.is_switch:
        assert server.main(_flag(row, row.bad)) == 2
        _check_line(capsys.readouterr().err, row.flag)
    if row.bad:
        monkeypatch.setenv(row.variable, row.bad)
        assert server.main([]) == 2
        _check_line(capsys.readouterr().err, row.variable)


def _check_line(said: str, name: str) -> None:
    assert said.startswith(f"ferrule serve: {name} "), said
    assert said.count("\n") == 1


def test_switches_take_no_value() -> None:
    """By flag; a variable has one."""
    with pytest.raises(ConfigError, match="--insecure"):
        parse_config(["--insecure=1"], {})


def test_failpoints_are_not_shown() -> None:
    """They are for tests."""
    assert "failpoints" not in build_parser().format_help()
    assert any(action.help == argparse.SUPPRESS for action in build_parser()._actions)


def test_help_imports_no_large_library() -> None:
    """It is there at once, and where the libraries of the server are not installed."""
    code = (
        "import contextlib, sys\n"
        "from ferrule_server.__main__ import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "sys.exit(str({'torch', 'numpy', 'grpc', 'numba', 'rich', 'click'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == "set()\n"


def test_an_unknown_flag_is_one_line_with_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """Not the whole of the usage."""
    for arguments, said in (
        (["--kv-memry", "1GiB"], "unknown flag --kv-memry (did you mean --kv-memory?)"),
        (["--kv-memry=1GiB", "x"], "unknown flag --kv-memry (did you mean --kv-memory?)"),
        (["--zzz"], "unknown flag --zzz"),
        (["--kv-memory"], "argument --kv-memory: expected one argument"),
    ):
        assert server.main(arguments) == 2
        assert capsys.readouterr().err == f'ferrule serve: {said}; see "ferrule serve --help"\n'


def test_a_variable_that_nobody_reads_is_told_with_what_was_meant() -> None:
    """Those of flags, of the client's commands and of Kubernetes are known; what else there is in the world, too."""
    known = [setting.variable for setting in settings_of(ServerConfig)]
    known += ["FERRULE_TARGET", "FERRULE_TOKEN", "FERRULE_TLS_CA", "FERRULE_CLIENT_CERT", "PATH", "FERRUL_X"]
    known += ["FERRULE_PORT", "FERRULE_SERVICE_HOST", "FERRULE_SERVICE_PORT_GRPC", "FERRULE_PORT_50051_TCP_ADDR"]
    known += ["FERRULE_B_SERVICE_HOST", "FERRULE_B_PORT_50051_TCP"]
    assert unknown_variables(known) == []
    wrong = ["FERRULE_KV_MEMRY", "FERRULE_QUEUES", "FERRULE_TOKN_FILE"]
    meant = [
        "FERRULE_KV_MEMRY (did you mean FERRULE_KV_MEMORY?)",
        "FERRULE_QUEUES",
        "FERRULE_TOKN_FILE (did you mean FERRULE_TOKEN_FILE?)",
    ]
    assert unknown_variables([*wrong, *known]) == meant


def test_flags_cannot_be_shortened() -> None:
    """A shortened flag would change meaning when another one comes."""
    with pytest.raises(ConfigError, match="unknown flag --max "):
        parse_config(["--max", "5"], {})


def test_help_shows_units_variables_and_exit_codes() -> None:
    """Examples and defaults too; each setting has a text."""
    text = build_parser().format_help()
    for word in (
        "examples:",
        "FERRULE_KV_MEMORY",
        "default: 1GiB",
        "default: 0.9",
        "unix:",
        "ready",
        "Exit codes",
        "--insecure",
    ):
        assert word in text
    assert all(texts_of(ServerConfig).values())
