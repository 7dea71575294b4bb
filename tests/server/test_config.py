"""Settings: flags over environment over defaults, and a helpful sentence for whatever cannot work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ferrule_server import __main__ as server
from ferrule_server import process
from ferrule_server.arguments import parse_config
from ferrule_server.config import CONNECTIONS_OF_STRANGERS, DEFAULT_CONNECTIONS, ServerConfig, instance_of_host
from ferrule_server.errors import ConfigError
from ferrule_server.loading import create_executor
from ferrule_server.settings import settings_of


@pytest.mark.parametrize(
    ("text", "size"),
    [("512KiB", 1 << 19), ("512MiB", 1 << 29), ("1.5 GiB", 3 << 29), ("2TiB", 1 << 41), ("0.5TiB", 1 << 39)],
)
def test_sizes_have_binary_units(text: str, size: int) -> None:
    """From KiB to TiB, with or without a fraction."""
    assert parse_config(["--kv-memory", text], {}).kv_memory_bytes == size


@pytest.mark.parametrize(
    "arguments",
    ["--executor torch", "--disable-cuda-runner", "--executor paged-reference"],
)
def test_determinism_needs_the_kernels(arguments: str) -> None:
    """What keeps them from running is named."""
    environment = {"FERRULE_MODEL": "demo"} if "paged" not in arguments else {}
    with pytest.raises(ConfigError, match=f"--deterministic needs kernels, not torch: no {arguments}$"):
        parse_config(["--deterministic", *arguments.split()], environment)


def test_bounds_belong_to_the_values() -> None:
    """The least and the most of a setting are accepted."""
    assert [parse_config(["--max-ttl", text], {}).max_ttl_s for text in ("5s", "720h")] == [5.0, 720 * 3600.0]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("localhost:50051", "127.0.0.1:50051"),
        ("[::1]:50051", "[::1]:50051"),
        ("127.8.8.8:1", "127.8.8.8:1"),
        ("unix:/tmp/f.sock", "unix:/tmp/f.sock"),
        ("unix:///tmp/f.sock", "unix:/tmp/f.sock"),
        ("unix:f.sock", "unix:f.sock"),
    ],
)
def test_local_addresses_need_no_switch(text: str, target: str) -> None:
    """Loopback and unix sockets, in the spellings people use."""
    assert parse_config(["--listen", text], {}).listen.target == target


@pytest.mark.parametrize("text", ["0.0.0.0:50051", "[::]:50051", "192.168.1.5:50051", "example.org:50051"])
def test_other_addresses_need_insecure(text: str) -> None:
    """There is no authentication yet."""
    with pytest.raises(ConfigError, match="--insecure"):
        parse_config(["--listen", text], {})
    assert parse_config(["--listen", text, "--insecure"], {}).is_insecure


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--listen", "50051"], "HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "HOST:PORT"),
        (["--listen", ":50051"], "HOST:PORT"),
        (["--listen", "unix:"], "unix:/tmp/ferrule.sock"),
        (["--listen", f"unix:/{'x' * 120}"], "107 bytes"),
        (["--kv-memory", "1GB"], "KiB, MiB, GiB or TiB"),
        (["--kv-memory", "4G"], "KiB, MiB, GiB or TiB.*1G is written 1GiB"),
        (["--kv-memory", "1024"], "KiB, MiB, GiB or TiB"),
        (["--kv-memory", "1KiB"], "64KiB"),
        (["--max-ttl", "60"], "30m"),
        (["--max-ttl", "1s"], "5s"),
        (["--max-context", "-1"], "whole number"),
        (["--threads", "two"], "whole number"),
        (["--revision", "main"], "--model org/name"),
        (["--download-only"], "--model org/name"),
        (["--revision", "../x", "--model", "a/b"], "a branch, a tag or a commit"),
        (["--instance", "a.b"], "A-Z a-z"),
        (["--prefix-cache", "maybe"], "on or off"),
        (["--instance", "x" * 65], "1 to 64"),
        (["--device", "cuda:-1"], "auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:01"], "auto, cpu, cuda or cuda:N"),
        (["--gpu-memory-fraction", "90%"], "such as 0.9"),
        (["--gpu-memory-fraction", "nan"], "such as 0.9"),
        (["--gpu-memory-fraction", "1e-1"], "such as 0.9"),
        (["--gpu-memory-fraction", "0.05"], "from 0.1 to 1"),
        (["--kernel-cache", ""], "a path"),
        (["--model", ""], "demo, smollm2, a folder, a GGUF file, or org/name"),
        (["--executor", "numba-cuda", "--device", "cpu"], "leave --device cpu out"),
        (["--executor", "numba-cuda", "--dtype", "float32"], "bfloat16; leave --dtype float32 out"),
        (["--executor", "paged-reference", "--device", "cuda"], "leave --device out"),
        (["--dtype", "float8"], "auto, bfloat16, float16, float32"),
        (["--dtype", "float16", "--executor", "numba-cpu"], "in torch only; leave --executor numba-cpu out"),
        (["--dtype", "float16", "--executor", "numba-cuda"], "in torch only; leave --executor numba-cuda out"),
        (["--dtype", "float16", "--weights", "int8"], "in torch only; leave --weights int8 out"),
        (["--dtype", "float16", "--deterministic"], "in torch only; leave --deterministic out"),
        (["--weights", "int4", "--executor", "torch"], "needs the kernels of the processor"),
        (["--weights", "int8", "--device", "cuda"], "needs the kernels of the processor"),
        (["--activations", "int8", "--executor", "torch"], "needs the kernels of the processor"),
        (["--activations", "int8", "--device", "cuda:0"], "needs the kernels of the processor"),
        (["--dtype", "float16", "--activations", "int8"], "in torch only; leave --activations int8 out"),
        (["--weights", "int4", "--activations", "int8"], "--activations int8 goes with --weights int8, or"),
        (["--executor", "paged-reference", "--model", "demo"], "leave --model out"),
        (["--executor", "paged-reference", "--dtype", "bfloat16"], "leave --dtype out"),
        (["--metrics-listen", "9464"], r"HOST:PORT, such as 127.0.0.1:9464 or \[::1\]:9464$"),
        (["--otlp-endpoint", "127.0.0.1:4317"], "must be http://HOST:PORT"),
        (["--otlp-endpoint", "http://:4317"], "must be http://HOST:PORT"),
        (["--otlp-endpoint", "http://127.0.0.1:x"], "must be http://HOST:PORT"),
        (["--otlp-endpoint", "http://127.0.0.1:4318/v1/traces"], "over gRPC has no path"),
        (["--otlp-endpoint", "http://me:secret@127.0.0.1:4317"], "OTEL_EXPORTER_OTLP_HEADERS"),
        (["--metrics-listen", "unix:/tmp/m.sock"], "HTTP clients do not know unix: paths"),
        (["--metrics-listen", "127.0.0.1:50051"], "cannot share 127.0.0.1:50051: choose another port"),
        (["--ui", "on"], "add --metrics-listen"),
    ],
)
def test_an_unusable_value_is_answered_with_what_would_do(arguments: list[str], hint: str) -> None:
    """The flag is named too."""
    with pytest.raises(ConfigError, match=hint) as caught:
        parse_config(arguments, {})
    assert arguments[0] in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("--listen 0.0.0.0:1", "no authentication; use 127.0.0.1, .* or --token-file or --tls-client-ca, or add --ins"),
        ("--listen 0.0.0.0:1 --tls-cert C --tls-key K", "there is no authentication"),
        ("--tls-cert C", "--tls-cert and --tls-key go together"),
        ("--tls-key K", "--tls-cert and --tls-key go together"),
        ("--tls-client-ca A", "--tls-client-ca needs --tls-cert and --tls-key"),
        ("--admins ops", "--admins names client certificates: add --tls-client-ca"),
        (
            "--admins ops,- --tls-cert C --tls-key K --tls-client-ca A",
            "--admins must not name -: it stands for callers without credentials",
        ),
        ("--admins ops --token-file T", "--admins names client certificates: add --tls-client-ca"),
        (
            "--admins ops --token-file T --tls-cert C --tls-key K --tls-client-ca A",
            "--admins has no effect with --token-file.* write admin on their lines",
        ),
        ("--quota-handles 0", "must be at least 1"),
    ],
)
def test_settings_of_access_must_fit_together(arguments: str, hint: str) -> None:
    """A server is never more open than its operator has said."""
    with pytest.raises(ConfigError, match=hint):
        parse_config(arguments.split(), {})


@pytest.mark.parametrize(
    "arguments",
    [
        "--listen 0.0.0.0:1 --insecure",
        "--listen 0.0.0.0:1 --token-file T",
        "--listen 0.0.0.0:1 --token-file T --tls-cert C --tls-key K",
        "--listen 0.0.0.0:1 --tls-cert C --tls-key K --tls-client-ca A --admins ops,spiffe://x/y",
        "--listen 127.0.0.1:1 --tls-cert C --tls-key K",
        "--listen unix:/tmp/f.sock --token-file T",
    ],
)
def test_what_is_authenticated_or_local_needs_no_insecure(arguments: str) -> None:
    """Files are looked at when the server starts, not here."""
    config = parse_config(arguments.split(), {})
    assert config.has_authentication is ("T" in arguments or "A" in arguments.split())


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        ("", DEFAULT_CONNECTIONS),
        ("--token-file T", DEFAULT_CONNECTIONS),
        ("--listen 0.0.0.0:1 --insecure", DEFAULT_CONNECTIONS),
        ("--listen 0.0.0.0:1 --token-file T", CONNECTIONS_OF_STRANGERS),
        ("--listen 0.0.0.0:1 --token-file T --max-connections 50", 50),
        ("--listen 0.0.0.0:1 --token-file T --tls-cert C --tls-key K", CONNECTIONS_OF_STRANGERS),
        ("--listen 0.0.0.0:1 --token-file T --tls-cert C --tls-key K --tls-client-ca A", DEFAULT_CONNECTIONS),
    ],
)
def test_strangers_get_few_connections(arguments: str, limit: int) -> None:
    """Each takes memory before its token is refused; a client certificate is checked in the handshake."""
    assert parse_config(arguments.split(), {}).connection_limit == limit


@pytest.mark.parametrize(
    ("arguments", "is_served"),
    [
        ("", False),
        ("--metrics-listen 127.0.0.1:1", True),
        ("--metrics-listen localhost:1", True),
        ("--metrics-listen [::1]:1", True),
        ("--metrics-listen 0.0.0.0:1", False),
        ("--metrics-listen 0.0.0.0:1 --ui on", True),
        ("--metrics-listen 127.0.0.1:1 --ui off", False),
        ("--metrics-listen 127.0.0.1:1 --token-file T", False),
        ("--metrics-listen 127.0.0.1:1 --tls-cert C --tls-key K --tls-client-ca A", False),
        ("--metrics-listen 127.0.0.1:1 --listen unix:/tmp/f.sock", False),
        ("--metrics-listen 127.0.0.1:1 --token-file T --ui on", True),
    ],
)
def test_the_page_is_served_by_itself_where_who_reaches_it_may_see_as_much(arguments: str, is_served: bool) -> None:
    """Metrics may be open to a network, as Prometheus needs them; the page not, nor where others must say who they are.

    It shows everybody's sequences, which takes the role admin elsewhere: a user of this machine without a token, or
    without a right to the socket's path, has it not.
    """
    assert parse_config(arguments.split(), {}).has_ui is is_served


@pytest.mark.parametrize(
    ("environment", "arguments", "said"),
    [
        ({"GPU_MEMORY_FRACTION": "2"}, "", "FERRULE_GPU_MEMORY_FRACTION '2': must be from 0.1 to 1"),
        ({"GPU_MEMORY_FRACTION": "2"}, "--gpu-memory-fraction 3", "--gpu-memory-fraction '3': must be from 0.1 to 1"),
        (
            {"DETERMINISTIC": "1"},
            "--executor torch",
            "FERRULE_DETERMINISTIC needs kernels, not torch: no --executor torch",
        ),
        (
            {"DEVICE": "cpu", "EXECUTOR": "numba-cuda"},
            "",
            "FERRULE_EXECUTOR=numba-cuda runs on a GPU; leave FERRULE_DEVICE=cpu out",
        ),
        ({"TLS_CERT": "C"}, "", "FERRULE_TLS_CERT and --tls-key go together"),
        ({"MODEL": "/none"}, "", "FERRULE_MODEL=/none: there is no such folder"),
        ({"KERNEL_BUNDLE": "/none"}, "", "FERRULE_KERNEL_BUNDLE: /none is not a bundle"),
        ({"TOKEN_FILE": ""}, "", "FERRULE_TOKEN_FILE is empty: give the path of a file, or leave it out"),
        ({"TLS_CLIENT_CA": " "}, "", "FERRULE_TLS_CLIENT_CA is empty"),
        ({"TOKEN_FILE": "/t"}, "--token-file=", "--token-file is empty"),
        ({"MAX_CONTEXT": ""}, "--max-context 0", "--max-context '0': must be at least 1"),
    ],
)
def test_a_setting_of_the_environment_bears_its_variable(
    environment: dict[str, str],
    arguments: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever is wrong with it, and when: nobody looks for a flag that was never typed."""
    for name, value in environment.items():
        monkeypatch.setenv(f"FERRULE_{name}", value)
    monkeypatch.setattr(server, "_serve", _create)
    monkeypatch.setattr(process, "set_up", lambda _: None)
    assert server.main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith(f"ferrule serve: {said}")


async def _create(config: ServerConfig) -> int:
    create_executor(config, lambda *_: None)
    return 0


SETTINGS = {setting.name: setting for setting in settings_of(ServerConfig)}
WHO_MAY_CONNECT = {"token_file", "tls_cert", "tls_key", "tls_client_ca"}
PATHS = {name for name, it in SETTINGS.items() if re.search("FILE|FOLDER|PATH", it.kind.metavar)}
SECURED = {f"FERRULE_{name.upper()}": f"/{name}" for name in WHO_MAY_CONNECT}


def test_no_setting_of_tokens_or_tls_is_forgotten() -> None:
    """A new one has a name of this kind, and then must be in the list of those that are never empty."""
    assert {name for name in SETTINGS if re.search(r"token_file|tls|cert", name)} == WHO_MAY_CONNECT
    assert {name for name, it in SETTINGS.items() if it.kind.is_never_empty} == WHO_MAY_CONNECT
    assert WHO_MAY_CONNECT < PATHS
    assert {"model", "listen", "kernel_cache", "kernel_bundle"} < PATHS


@pytest.mark.parametrize("empty", ["", " ", "\t"])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_an_empty_variable_counts_as_unset_or_is_refused(name: str, empty: str) -> None:
    """Refused where an unset one would leave the server open: a deployment whose secret is not there must not start."""
    variable = SETTINGS[name].variable
    if name in WHO_MAY_CONNECT:
        with pytest.raises(ConfigError, match=f"^{variable} is empty"):
            parse_config(["--insecure"], {**SECURED, variable: empty})
    else:
        assert parse_config([], {variable: empty}) == parse_config([], {})


@pytest.mark.parametrize("name", sorted(WHO_MAY_CONNECT))
def test_an_empty_flag_of_tokens_or_tls_is_refused(name: str) -> None:
    """Also beside a variable with a value, since flags win; a flag with a value wins over an empty variable."""
    with pytest.raises(ConfigError, match=f"^{SETTINGS[name].flag} is empty"):
        parse_config([f"{SETTINGS[name].flag}="], SECURED)
    config = parse_config([f"{SETTINGS[name].flag}=/f"], {**SECURED, SETTINGS[name].variable: ""})
    assert getattr(config, name) == Path("/f")


@pytest.mark.parametrize("name", sorted(PATHS))
def test_a_home_directory_is_expanded_in_every_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By flag and by variable alike, since no shell expands a variable's value or what follows ``unix:``."""
    monkeypatch.setenv("HOME", "/home/alice")
    prefix = "unix:" if name == "listen" else ""
    plain, given = f"{prefix}/home/alice/x", f"{prefix}~/x"
    expected = parse_config([f"{SETTINGS[name].flag}={plain}"], SECURED)
    assert "/home/alice/x" in repr(expected)
    assert parse_config([f"{SETTINGS[name].flag}={given}"], SECURED) == expected
    assert parse_config([], {**SECURED, SETTINGS[name].variable: given}) == expected
    with pytest.raises(ConfigError, match=f"^{SETTINGS[name].variable} .*home directory of this user is not known"):
        parse_config([], {**SECURED, SETTINGS[name].variable: f"{prefix}~no-such-user/x"})


@pytest.mark.parametrize(
    ("host_name", "instance"),
    [
        ("gpu-3.example.org", "gpu-3"),
        ("My Box!", "My-Box"),
        ("", "ferrule"),
        ("\u4e16\u754c", "ferrule"),
        ("x" * 99, "x" * 64),
    ],
)
def test_the_default_instance_is_made_of_the_host_name(host_name: str, instance: str) -> None:
    """Only what may stand in a handle."""
    assert instance_of_host(host_name) == instance
    assert ServerConfig(instance=instance).instance == instance
