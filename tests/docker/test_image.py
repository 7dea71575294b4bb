"""The image of a processor: small, without what only builds need, closed by default, and complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docker.engine import Project, docker

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
IMAGE = "ferrule:0.1.0"
CONTAINED = ("--rm", "--init", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL")


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build it as compose does."""
    Project(tmp_path_factory.mktemp("build")).run("build", "ferrule")


def test_it_is_small() -> None:
    """At most 1.3 GB; it tells how large."""
    (found,) = json.loads(docker("image", "inspect", IMAGE).stdout)
    print(f"size of {IMAGE}: {found['Size'] / 1e9:.2f} GB")
    assert found["Size"] <= 1_300_000_000
    assert found["Config"]["User"] == "10001:10001"


def test_the_demo_runs_in_it_without_a_network() -> None:
    """On a read-only file system, as nobody; the kernels of this processor were compiled when it was built."""
    done = docker("run", *CONTAINED, "--entrypoint", "ferrule", IMAGE, "demo", "--json")
    figures = json.loads(done.stdout)
    assert figures["executor"] == "numba-cpu"
    assert figures["leaked_blocks"] == 0
    assert figures["load_s"] < 10, "kernels were compiled again"


def test_it_does_not_serve_everybody_by_default() -> None:
    """It listens on all addresses, so it wants credentials, or to be told that there are none."""
    done = docker("run", *CONTAINED, IMAGE, check=False)
    assert done.returncode == 2, done.stderr
    assert "insecure" in done.stderr.lower()


@pytest.mark.parametrize("program", ["pip", "cc", "nvcc"])
def test_what_builds_is_not_in_it(program: str) -> None:
    """No compiler; and no pip in the environment of the server."""
    found = docker(
        "run", *CONTAINED, "--entrypoint", "sh", IMAGE, "-c", f"ls /opt/ferrule/bin | grep -x {program}", check=False
    )
    assert found.returncode == 1, found.stdout


def test_it_takes_the_model_that_is_mounted(tmp_path: Path) -> None:
    """A folder that does not hold one ends the start with 2 and a sentence."""
    done = docker(
        "run",
        *CONTAINED,
        "-v",
        f"{tmp_path}:/models:ro",
        "-e",
        "FERRULE_INSECURE=1",
        IMAGE,
        "--model",
        "/models",
        check=False,
    )
    assert done.returncode == 2
    assert "config.json" in done.stderr
