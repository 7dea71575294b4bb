"""The compose files: valid, contained, and settings that fit together, for each way that the documents name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import openai_gateway
import openai_options
import pytest

from ferrule_server.arguments import parse_config, unknown_variables
from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError
from tools.compose.compose_file import ON_TOP, PLAIN, ROOT, image_variables, load, started, variables_of

SERVERS = ("ferrule", "ferrule-gpu", "ferrule-a", "ferrule-b")
WAYS = [(), *((path,) for path in ON_TOP)]
"""What may lie on top of docker-compose.yml."""
NOWHERE = ROOT / "nowhere"
"""A folder without a file ferrule.env."""


def project(*on_top: Path, **environment: str) -> dict[str, Any]:
    """Return what the files say together."""
    return load([PLAIN, *on_top], environment)


def settings(service: dict[str, Any], folder: Path = NOWHERE, /, **shell: str) -> ServerConfig:
    """Return what the server of a service makes of its image, its environment and ferrule.env of a folder."""
    return parse_config(service.get("command", []), image_variables() | variables_of(service, folder, shell))


def named(name: str) -> Path:
    """Return one of the files on top."""
    return ROOT / "deploy" / f"compose.{name}.yml"


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The services of docker-compose.yml by itself."""
    services: dict[str, Any] = project()["services"]
    return services


@pytest.mark.parametrize("on_top", WAYS, ids=lambda paths: "+".join(path.stem for path in paths) or "plain")
def test_the_files_are_what_the_compose_specification_allows(on_top: tuple[Path, ...], tmp_path: Path) -> None:
    """Each, laid on top of the plain one, by the schema that compose itself checks with."""
    path = tmp_path / "compose.json"
    path.write_text(json.dumps(project(*on_top)))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("on_top", WAYS, ids=lambda paths: "+".join(path.stem for path in paths) or "plain")
def test_every_service_is_contained(on_top: tuple[Path, ...]) -> None:
    """No root, no capability, nothing written but where it is said, bounded memory, processes and logs."""
    for name, service in project(*on_top)["services"].items():
        user = re.match(r"(\d+):\d+$", service["user"])
        assert user, name
        assert int(user[1]) > 0, name
        assert service["read_only"] is True, name
        assert service["init"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert any(entry.startswith("/tmp:size=") for entry in service["tmpfs"]), name
        assert service["mem_limit"], name
        assert service["pids_limit"] > 0, name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
        assert not {"privileged", "network_mode", "pid", "ipc", "cap_add", "devices"} & set(service), name
        assert "docker.sock" not in json.dumps(service), name
        writable = {entry.split(":")[1] for entry in service.get("volumes", []) if ":ro" not in entry}
        assert writable <= {"/var/cache/ferrule", "/data", "/prometheus", "/var/lib/grafana"}, name
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped", name


def test_images_are_pinned(plain: dict[str, Any]) -> None:
    """To a release; ours to the version that the project has."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, service in plain.items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(@sha256:\w{64})?", service["image"]), name
        assert service["image"].endswith(f":{version}") == (name in (*SERVERS, "openai")), name
    recipe = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-\w+-\w+@sha256:\w{64}$", recipe, re.MULTILINE)
    assert set(re.findall(r"-t ferrule(?:-gpu)?:(\S+)", recipe)) == {version}


def test_every_image_of_ours_is_built_once(plain: dict[str, Any]) -> None:
    """Compose builds side by side, and two builds of one name fail on a machine that has neither."""
    built = [service["image"] for service in plain.values() if "build" in service]
    assert len(built) == len(set(built))
    whole = project()
    ways = [((), ()), (("gpu",), ("ferrule-gpu",)), (("scale",), ("envoy",)), (("scale",), ("ferrule-b",))]
    ways += [(("openai",), ("openai",))]
    for profiles, names in ways:
        here = [plain[name] for name in started(whole, profiles, names)]
        wanted = {service["image"] for service in here if service["image"].startswith("ferrule")}
        assert wanted == {service["image"] for service in here if "build" in service}


def test_ports_are_this_machines_unless_a_file_with_credentials_opens_them() -> None:
    """Nothing without credentials can be reached from elsewhere, and servers behind Envoy by nobody but it."""
    for on_top in WAYS:
        is_open = on_top in [(named("secured"),), (named("mtls"),)]
        for name, service in project(*on_top)["services"].items():
            ports = service.get("ports", [])
            if is_open and name in ("ferrule", "ferrule-gpu"):
                assert ports == ["50051:50051"]
                assert settings(service).has_authentication
                assert settings(service).tls_cert
                assert not settings(service).is_insecure
            elif on_top == (named("secured"),) and name == "envoy":
                assert ports == ["50051:50051"]
                assert "envoy.tls.yaml" in str(service["command"])
            else:
                assert all(port.startswith("127.0.0.1:") for port in ports), name
            if on_top == (named("secured"),) and name in ("ferrule-a", "ferrule-b"):
                assert settings(service).token_file
                assert not settings(service).is_insecure
            assert bool(ports) == ("outside" in service["networks"]) == (name not in ("ferrule-a", "ferrule-b"))
            assert not any(port.endswith(":9464") for port in ports), "metrics need no credentials"
    assert project()["networks"]["inside"] == {"internal": True}


def test_servers_listen_where_others_look(plain: dict[str, Any]) -> None:
    """The port that is published, the port that Prometheus asks; a page without credentials is not served there."""
    for name in SERVERS:
        config = settings(plain[name])
        assert (config.listen.target, config.is_insecure) == ("0.0.0.0:50051", True)
        assert config.metrics_listen is not None
        assert config.metrics_listen.target == "0.0.0.0:9464"
        assert not config.has_ui
        assert config.instance == name.removesuffix("-gpu")
    recipe = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "\nEXPOSE 50051 9464\n" in recipe


def test_files_on_top_let_in_whom_they_say() -> None:
    """Tokens alone, tokens with TLS, certificates alone; each for every server it speaks of."""
    for name in SERVERS:
        config = settings(project(named("tokens"))["services"][name])
        assert (config.token_file, config.tls_cert, config.is_insecure) == (Path("/run/ferrule/tokens"), None, False)
    for name in SERVERS[:2]:
        config = settings(project(named("secured"))["services"][name])
        assert (config.token_file, config.tls_client_ca) == (Path("/run/ferrule/tokens"), None)
        config = settings(project(named("mtls"))["services"][name])
        assert (config.token_file, config.tls_client_ca) == (None, Path("/run/ferrule/client-ca.pem"))
        assert config.admins == ("ops",)
    both = project(named("secured"), named("mtls"), ADMINS="")["services"]["ferrule"]
    assert settings(both).token_file
    assert settings(both).tls_client_ca
    assert both["volumes"].count("./secrets:/run/ferrule:ro,z") == 1


def test_a_server_outlives_what_is_asked_of_it(plain: dict[str, Any]) -> None:
    """Docker waits longer than the grace, and starts again what ended by itself; a wrong setting not for ever."""
    for name in SERVERS:
        seconds = int(plain[name]["stop_grace_period"].removesuffix("s"))
        assert seconds >= settings(plain[name]).drain_grace_s + 10
        graces = {"DRAIN_GRACE": "10m", "STOP_GRACE": "11m"}
        longer = project(**graces)["services"][name]
        assert (settings(longer, NOWHERE, **graces).drain_grace_s, longer["stop_grace_period"]) == (600, "11m")


def test_every_setting_can_be_set(plain: dict[str, Any], tmp_path: Path) -> None:
    """By a file beside the compose file; what that sets itself goes before it, and the file need not be there."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (piece,) = re.findall(r"^```ini\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "ferrule.env").write_text(f"# ours\n{piece}FERRULE_QUOTA_HANDLES=8\nFERRULE_INSTANCE=other\n")
    for name in SERVERS:
        config = settings(plain[name], tmp_path)
        assert (config.max_ttl_s, config.quotas.handles, config.instance) == (600, 8, name.removesuffix("-gpu"))
        assert settings(plain[name]).max_ttl_s == 3600


def test_a_file_of_yours_goes_before_the_variables(plain: dict[str, Any], tmp_path: Path) -> None:
    """Also for each setting that has a variable of its own; only what fits the rest of the compose file is fixed."""
    shell = {"MODEL": "/models/a", "KV_MEMORY": "2GiB", "DRAIN_GRACE": "5s", "LOG_FORMAT": "json", "DURABLE": "/data/a"}
    lines = ["MODEL=/models/b", "KV_MEMORY=3GiB", "DRAIN_GRACE=6s", "LOG_FORMAT=text", "DURABLE=/data/b"]
    (tmp_path / "ferrule.env").write_text("".join(f"FERRULE_{line}\n" for line in lines))
    for name in SERVERS:
        config = settings(plain[name], tmp_path, **shell)
        assert (config.model, config.kv_memory_bytes, config.drain_grace_s) == ("/models/b", 3 << 30, 6)
        assert (config.log_format, config.durable) == ("text", Path("/data/b"))
        assert settings(plain[name], NOWHERE, **shell).model == "/models/a"
    fixed = set.intersection(*(set(plain[name]["environment"]) for name in SERVERS))
    assert fixed == {"FERRULE_INSECURE", "FERRULE_METRICS_LISTEN", "FERRULE_INSTANCE", "HF_TOKEN_PATH"}
    page = (ROOT / "docs" / "operations.md").read_text()
    servers = [project(*on_top)["services"][name] for on_top in WAYS for name in SERVERS]
    names = set().union(*(one["environment"] for one in servers)) - {"NVIDIA_DRIVER_CAPABILITIES"}
    for name in {*names, "FERRULE_LISTEN"}:
        assert f"`{name}`" in page[page.index("## Containers") : page.index("### Credentials in containers")], name


@pytest.mark.parametrize("on_top", WAYS, ids=lambda paths: "+".join(path.stem for path in paths) or "plain")
def test_every_variable_is_read_by_somebody(on_top: tuple[Path, ...]) -> None:
    """The server would warn of one that is not."""
    for name in SERVERS:
        assert unknown_variables(project(*on_top)["services"][name]["environment"]) == []
    assert unknown_variables(image_variables()) == []


def test_an_image_that_is_run_by_itself_is_no_open_server() -> None:
    """It listens where a port can be published, with any flags behind it, and starts only if told who may come."""
    for arguments in ([], ["--model", "demo"]):
        with pytest.raises(ConfigError, match="--insecure"):
            parse_config(arguments, image_variables())
        config = parse_config(arguments, {**image_variables(), "FERRULE_INSECURE": "1"})
        assert config.listen.target == "0.0.0.0:50051"
    assert "\nCMD" not in (ROOT / "deploy" / "Dockerfile").read_text()


def test_what_is_made_once_is_kept(plain: dict[str, Any]) -> None:
    """Kernels and models lie in a volume, in a folder that the image gives to the server's user."""
    recipe = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "--owner=10001 --group=10001 /var/cache/ferrule\n" in recipe
    assert "HF_HOME=/var/cache/ferrule/huggingface " in recipe
    for name in SERVERS:
        assert "cache:/var/cache/ferrule" in plain[name]["volumes"]
        assert plain[name]["user"] == "10001:10001"
    assert settings(plain["ferrule-gpu"]).kernel_cache == Path("/var/cache/ferrule/kernels")


def test_each_server_has_a_journal_of_its_own() -> None:
    """In a volume, below a folder that the image gives to the server's user and to nobody else."""
    assert "--owner=10001 --group=10001 --mode=0700 /data " in (ROOT / "deploy" / "Dockerfile").read_text()
    whole, volumes = project(), set()
    for name in SERVERS:
        assert settings(project()["services"][name]).durable is None
        service = whole["services"][name]
        assert settings(service, DURABLE="/data/journal").durable == Path("/data/journal")
        (volume,) = {entry.split(":")[0] for entry in service["volumes"] if entry.split(":")[1] == "/data"}
        assert volume in whole["volumes"]
        volumes.add(volume)
    assert len(volumes) == len(SERVERS)


def test_the_gpu_is_reserved(plain: dict[str, Any]) -> None:
    """One of NVIDIA's, for the server that is told to use it and nobody else."""
    wants = {name for name, service in plain.items() if "deploy" in service}
    assert wants == {"ferrule-gpu"}
    (device,) = plain["ferrule-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert settings(plain["ferrule-gpu"]).device == "cuda"
    assert settings(plain["ferrule-gpu"]).kv_memory_bytes is None, "the pool takes what the memory of the GPU leaves"
    assert plain["ferrule-gpu"]["build"]["args"]["DEVICE"] == "cuda"


def test_a_model_of_yours_is_served_from_your_folder() -> None:
    """By three variables; without them the model that ships, and an empty volume."""
    service = project()["services"]["ferrule"]
    assert settings(service).model == "demo"
    assert "models:/models:ro" in service["volumes"]
    shell = {"MODELS": "/data", "MODEL": "/models/Q", "KV_MEMORY": "4GiB", "MEMORY": "8g"}
    service = project(**shell)["services"]["ferrule"]
    assert settings(service, NOWHERE, **shell).model == "/models/Q"
    assert settings(service, NOWHERE, **shell).kv_memory_bytes == 4 << 30
    assert "/data:/models:ro" in service["volumes"]
    assert service["mem_limit"] == "8g"


@pytest.mark.parametrize(
    ("profiles", "names", "services"),
    [
        ((), (), ["ferrule"]),
        (("gpu",), ("ferrule-gpu",), ["ferrule-gpu"]),
        (("scale",), ("envoy",), ["ferrule-a", "ferrule-b", "envoy"]),
        (("observe",), ("ferrule", "grafana"), ["ferrule", "prometheus", "grafana"]),
        (("openai",), ("openai",), ["ferrule", "openai"]),
        (("scale", "observe"), ("envoy", "grafana"), ["ferrule-a", "ferrule-b", "envoy", "prometheus", "grafana"]),
    ],
)
def test_profiles_start_what_the_documents_say(
    profiles: tuple[str, ...], names: tuple[str, ...], services: list[str]
) -> None:
    """And nothing beside it: ports would be taken twice."""
    whole = project()
    assert started(whole, profiles, names) == services
    ports = [port for name in services for port in whole["services"][name].get("ports", [])]
    assert len(ports) == len(set(ports))


def test_the_gateway_is_what_the_example_takes(plain: dict[str, Any]) -> None:
    """Its file is mounted, the options are its own, and it calls the server and listens where the ports are."""
    gateway = plain["openai"]
    (mounted,) = gateway["volumes"]
    source, place, _ = mounted.split(":")
    program, path = gateway["entrypoint"]
    assert program == "python"
    assert (ROOT / source / Path(path).relative_to(place)).read_text() == Path(openai_gateway.__file__).read_text()
    options = openai_options.parser().parse_args(gateway["command"])
    assert options.target == f"ferrule:{settings(plain['ferrule']).listen.port}"
    (port,) = gateway["ports"]
    assert port.startswith("127.0.0.1:8000:")
    assert options.listen == ("0.0.0.0", int(port.split(":")[2]))
    assert openai_options.api_keys(options) == set()
    assert gateway["build"]["target"] == "gateway"
    assert f":{port.split(':')[2]}/healthz" in gateway["healthcheck"]["test"][-1]


def test_the_image_is_made_of_wheels() -> None:
    """Ours is built first; nothing else is compiled, and the last stage installs nothing."""
    stages = (ROOT / "deploy" / "Dockerfile").read_text().split("\nFROM ")
    installs = re.findall(r"install -q(.*)", "".join(stages))
    assert installs == [" --only-binary=:all: -c constraints.txt \\"] * 3
    assert not re.search(r"pip|apt|gcc|build-essential", stages[-1])
    assert "\nUSER 10001:10001\n" in stages[-1]
    sources = set(re.findall(r"^COPY (?!--from)(.*) \S+$", "".join(stages), re.MULTILINE))
    kept = set(re.findall(r"^!(\S+)$", (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
    kept.remove("deploy")  # all of it but one file is left out again
    assert {word for line in sources for word in line.split()} == kept
