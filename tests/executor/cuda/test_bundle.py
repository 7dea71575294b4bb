"""Bundles: found where a server looks for them, refused as a whole if they do not fit, never read if damaged."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ferrule_server.errors import ConfigError
from ferrule_server.executor.cuda import bundle as module
from ferrule_server.executor.cuda.bundle import (
    PACKAGE,
    Bundle,
    BundleError,
    architectures_for,
    check_bundle_file,
    find_bundle,
    kernel_key,
    source_hash,
)
from ferrule_server.kernel_builder.bundles import write_bundle
from ferrule_server.kernels.cuda import add_norm, embed
from ferrule_server.kernels.cuda.intrinsics import Address
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec
from tools.kernels.build import write_wheel

SPEC, OTHER = embed.spec(), add_norm.spec(1024, ADD=False)
HOPPER, CUDA = (9, 0), (13, 0)


def write(path: Path, architecture: str = "sm_90a", **changes: Any) -> Path:
    """Write a bundle of two kernels that stand for compiled ones."""
    texts = {spec: f"{spec.name}\n".encode() * 9 for spec in (SPEC, OTHER)}
    cubins = {spec: Cubin(spec.kernel.__name__, b"early " + it, b"late " + it) for spec, it in texts.items()}
    write_bundle(path, **{"architecture": architecture, "cubins": cubins, "cuda": (12, 9), **changes})
    return path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the folder of the installed package and that of a checkout; both are empty."""
    package, checkout = tmp_path / PACKAGE, tmp_path / "checkout"
    package.mkdir()
    checkout.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    importlib.invalidate_caches()
    monkeypatch.setattr(module, "BUNDLES", checkout)
    return package, checkout


def test_both_codes_of_a_kernel_are_read(tmp_path: Path) -> None:
    """A kernel that the bundle lacks is left out."""
    found = Bundle.open(write(tmp_path / "kernels")).read([SPEC, embed.spec(X=2)])
    ((spec, cubin),) = found.items()
    assert (spec, cubin.name) == (SPEC, "embed")
    assert (cubin.code[:6], cubin.late.code[:5]) == (b"early ", b"late ")


def test_code_that_is_the_same_is_kept_once(tmp_path: Path) -> None:
    """Before sm_90 a kernel starts nothing early; and what two kernels share."""
    cubins = {SPEC: Cubin("embed", b"code"), OTHER: Cubin("add_norm", b"code")}
    path = write(tmp_path / "kernels", "sm_80", cubins=cubins)
    assert len(zipfile.ZipFile(path).namelist()) == 2
    found = Bundle.open(path).read([SPEC, OTHER])
    assert found == cubins
    assert found[SPEC].late == found[SPEC]


def test_bundle_is_the_same_for_the_same_kernels(tmp_path: Path) -> None:
    """No dates or paths in it."""
    assert write(tmp_path / "a").read_bytes() == write(tmp_path / "b").read_bytes()


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[200] ^= 255
    path.write_bytes(content)


def _swap(path: Path) -> None:
    """Store another content under a digest, with a right checksum of the zip file."""
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in contents.items():
            file.writestr(name, content if name == module.INDEX else b"else")


def _drop(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        index = file.read(module.INDEX)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(module.INDEX, index)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _index(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with zipfile.ZipFile(path) as file:
            index = {**json.loads(file.read(module.INDEX)), **changes}
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(module.INDEX, json.dumps(index))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_swap, "kernels is damaged: cubin .* holds something else"),
        (_drop, "kernels is damaged: .*no item named"),
        (_empty, "kernels is not a bundle of kernels: .*not a zip file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "is not a bundle of kernels"),
        (_index(format=1), "kernels is a bundle of format 1, not 2"),
        (_index(toolkit="12.9"), "is not a bundle of kernels"),
        (_index(kernels={"a": 3}), "is not a bundle of kernels"),
        (lambda path: path.unlink(), "is not a bundle of kernels: .*No such file"),
    ],
)
def test_damage_is_found(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    """When the bundle is opened or read; nothing of it is used then."""
    path = write(tmp_path / "kernels")
    damage(path)
    with pytest.raises(BundleError, match=message):
        Bundle.open(path).read([SPEC])


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    """Wherever it is."""
    path = write(tmp_path / "kernels")
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        try:
            found = Bundle.open(path).read([SPEC, OTHER])
        except BundleError:
            continue
        assert all(cubin.code.startswith(b"early") for cubin in found.values()), at


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_86"), ((9, 0), "sm_90a"), ((12, 1), "sm_120")],
)
def test_a_gpu_takes_its_own_kernels_or_those_of_a_lower_minor_version(
    places: tuple[Path, Path], capability: tuple[int, int], expected: str
) -> None:
    """The nearest."""
    for architecture in ("sm_80", "sm_86", "sm_90a", "sm_120"):
        write(places[1] / f"{architecture}.bundle", architecture)
    assert find_bundle(None, capability, CUDA).architecture == expected


@pytest.mark.parametrize("capability", [(7, 5), (9, 1), (10, 0), (11, 0)])
def test_a_gpu_that_nothing_serves_is_named(places: tuple[Path, Path], capability: tuple[int, int]) -> None:
    """With what there is; kernels of ``sm_90a`` run on 9.0 only."""
    for architecture in ("sm_80", "sm_90a"):
        write(places[1] / f"{architecture}.bundle", architecture)
    name = ".".join(map(str, capability))
    with pytest.raises(BundleError, match=rf"no kernels for compute capability {name} in .*has sm_80, sm_90a; install"):
        find_bundle(None, capability, CUDA)


def test_architectures_of_a_gpu() -> None:
    """The best first."""
    assert architectures_for((8, 2)) == ["sm_82a", "sm_82", "sm_81", "sm_80"]


def test_places_are_looked_at_in_order(places: tuple[Path, Path], tmp_path: Path) -> None:
    """The setting alone, a file or a folder; else the installed package, then the checkout."""
    package, checkout = places
    folder = tmp_path / "named"
    folder.mkdir()
    paths = [write(it / "sm_90a.bundle") for it in (folder, package, checkout)]
    assert find_bundle(folder, HOPPER, CUDA).path == paths[0]
    assert find_bundle(paths[0], HOPPER, CUDA).path == paths[0]
    assert find_bundle(None, HOPPER, CUDA).path == paths[1]
    paths[1].unlink()
    assert find_bundle(None, HOPPER, CUDA).path == paths[2]
    paths[0].unlink()
    with pytest.raises(BundleError, match="named, which has nothing"):
        find_bundle(folder, HOPPER, CUDA)


def test_nothing_is_installed(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is said what to install."""
    shutil.rmtree(places[1])
    shutil.rmtree(places[0])
    importlib.invalidate_caches()
    with pytest.raises(BundleError, match=r"^no compiled kernels are installed; install .* run `make kernels`"):
        find_bundle(None, HOPPER, CUDA)


def test_a_stale_package_is_passed_over_and_told_of(places: tuple[Path, Path]) -> None:
    """A checkout may be newer than what is installed; without one, each place says why it does not serve."""
    package, checkout = places
    write(package / "sm_90a.bundle", sources="0123456789ab")
    write(checkout / "sm_90a.bundle")
    assert find_bundle(None, HOPPER, CUDA).path.parent == checkout
    write(checkout / "sm_90a.bundle", sources="ba9876543210")
    with pytest.raises(BundleError) as raised:
        find_bundle(None, HOPPER, CUDA)
    assert str(raised.value) == (
        f"{package}/sm_90a.bundle is of other sources (0123456789ab, not {source_hash()}); "
        f"{checkout}/sm_90a.bundle is of other sources (ba9876543210, not {source_hash()}); "
        "install the ferrule-kernels of this version, or run `make kernels` in a checkout of it"
    )


@pytest.mark.parametrize(
    ("toolkit", "driver", "message"),
    [
        ((13, 0), (12, 8), r"is made with CUDA 13\.0, .* knows CUDA up to 12\.8; install driver 580 or newer"),
        ((12, 9), (11, 8), r"is made with CUDA 12\.9, .* up to 11\.8; install driver 525 or newer"),
        ((14, 1), (13, 2), r"install a driver for CUDA 14\.0 or newer"),
        ((13, 2), (13, 0), ""),
        ((12, 9), (12, 0), ""),
        ((12, 9), (13, 1), ""),
    ],
)
def test_the_bundle_says_which_drivers_load_it(
    tmp_path: Path, toolkit: tuple[int, int], driver: tuple[int, int], message: str
) -> None:
    """Within a major version of CUDA all drivers load its machine code, and newer ones do."""
    path = write(tmp_path / "kernels", cuda=toolkit)
    if not message:
        find_bundle(path, HOPPER, driver)
        return
    with pytest.raises(BundleError, match=message):
        find_bundle(path, HOPPER, driver)


def test_settings_may_name_a_bundle_or_a_folder(tmp_path: Path) -> None:
    """Anything else is an error, whether or not there is a GPU."""
    check_bundle_file(tmp_path)
    check_bundle_file(write(tmp_path / "kernels"))
    for path in (tmp_path / "none", Path(__file__)):
        with pytest.raises(ConfigError, match=rf"--kernel-bundle: .*{path.name} is not a bundle of kernels"):
            check_bundle_file(path)


def elsewhere(out: Address) -> None:
    """Stand for a kernel of a test."""


def test_a_kernel_is_named_by_all_that_shapes_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants, threads and CTAs; the sources of the package are those of the bundle, other files are named too."""
    assert kernel_key(SPEC) == f"{SPEC.name} 128x1"
    own = KernelSpec(elsewhere, (), 32, 0)
    before = kernel_key(own)
    assert before.startswith("elsewhere[] 32x1 ")
    monkeypatch.setattr(module, "_hash", lambda _: "changed")
    assert kernel_key(own) == "elsewhere[] 32x1 changed"


def test_every_file_of_the_kernels_is_in_the_hash_and_no_path_is(tmp_path: Path) -> None:
    """A bundle serves the same sources on another machine, and no others."""
    package = Path(module._KERNELS)
    copy = tmp_path / "server" / package.relative_to(package.parents[2])
    shutil.copytree(
        package.parents[2], tmp_path / "server", ignore=shutil.ignore_patterns("__pycache__", "demo_model", "bundles")
    )

    def hash_of_copy() -> str:
        code = "from ferrule_server.executor.cuda import bundle; print(bundle.source_hash())"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path / "server", capture_output=True, text=True, check=True, env={})
        return done.stdout.strip()

    assert hash_of_copy() == source_hash()
    with (copy / "gemv.py").open("a") as file:
        file.write("\n")
    assert hash_of_copy() != source_hash()


def test_a_wheel_brings_bundles_to_a_server(tmp_path: Path) -> None:
    """Its version says for which sources it is; pip takes it, and the server of that environment finds it."""
    wheel = write_wheel(tmp_path / "dist", [write(tmp_path / "sm_90a.bundle")])
    assert wheel.name == f"ferrule_kernels-0.1.0+k{source_hash()}-py3-none-any.whl"
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run([*command, str(wheel)], check=True)
    code = (
        "from ferrule_server.executor.cuda.bundle import find_bundle, source_hash; import ferrule_kernels;"
        "assert ferrule_kernels.__version__.endswith(source_hash());"
        "print(find_bundle(None, (9, 0), (12, 0)).path)"
    )
    server = str(Path(module.__file__).parents[3])
    environment = {"PYTHONPATH": f"{server}:{site}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == str(site / PACKAGE / "sm_90a.bundle")


def test_processes_that_write_the_same_bundle_do_not_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that start together compile the same; whoever is last puts a whole file in place."""
    written: set[str] = set()
    replace = Path.replace

    def noted(self: Path, target: Path) -> Path:
        written.add(self.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", noted)
    for pid in (1, 2):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        write_bundle(tmp_path / "kernels.bundle", "sm_80", {}, (12, 9))
    assert len(written) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.bundle"]
