"""Every file of a model is opened below its folder or below the blobs of its repository."""

from __future__ import annotations

import ast
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from ferrule_server import model_files
from ferrule_server.config import ServerConfig
from ferrule_server.errors import ModelError
from ferrule_server.loading import create_executor
from ferrule_server.model_check.report import check_model
from ferrule_server.model_files import FileMissing, open_file, read_bytes, read_object, read_text
from tests.model.small_model import write_small_model

SECRET = "the environment of the server"
SERVER = Path(model_files.__file__).parent
NAME = "tiny/model"
COMMIT = "0" * 40
TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
SHARD = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
TEXTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
         "additional_chat_templates/tool.jinja")  # fmt: skip
FILES = ("config.json", "generation_config.json", "model.safetensors", INDEX, SHARD, *TEXTS)
SOME = (INDEX, "tokenizer.json")


def _folder(folder: Path, file: str) -> Path:
    """Write a model whose files are all read: of one file of weights, or of shards if ``file`` is one of theirs."""
    write_small_model(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    for name in ("generation_config.json", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    for name in ("chat_template.jinja", "additional_chat_templates/tool.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{{ messages[0].content }}")
    if file in (INDEX, SHARD):
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").rename(folder / SHARD)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        weight_map = {name: SHARD for name in header if name != "__metadata__"}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _in_the_cache(root: Path, folder: Path) -> Path:
    """Move the files of a folder into a cache of the hub, as blobs with links to them; return the snapshot."""
    cache = root / f"models--{NAME.replace('/', '--')}"
    (cache / "blobs").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    snapshot = cache / "snapshots" / COMMIT
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob, link = cache / "blobs" / f"{number:040x}", snapshot / path.relative_to(folder)
        shutil.move(path, blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def _link_outside(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to(outside / "secret")


def _link_to_a_link(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to("inside")
    (path.parent / "inside").symlink_to(os.path.relpath(outside / "secret", path.parent))


def _link_to_the_environment(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/environ")


def _link_to_a_device(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _pipe(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path, outside: Path) -> None:
    path.unlink()
    path.mkdir()


def _sparse(path: Path, outside: Path) -> None:
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)


LINKS = (_link_outside, _link_to_a_link, _link_to_the_environment, _link_to_a_device)
KINDS = [("folder", kind) for kind in (*LINKS, _pipe, _directory, _sparse)]
KINDS += [("snapshot", kind) for kind in (_link_outside, _link_to_the_environment)]


def _config(model: Path | str) -> ServerConfig:
    return ServerConfig(
        model=str(model), executor="torch", device="cpu", kv_memory_bytes=1 << 20, num_threads=1,
        is_offline=isinstance(model, str),
    )  # fmt: skip


def _served(model: Path | str) -> str:
    """Return why a server does not load a model; empty if it does."""
    try:
        create_executor(_config(model), lambda *_: None)
    except ModelError as error:
        return str(error)
    return ""


def _checked(model: Path | str) -> str:
    return check_model(_config(model)).reason


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the model that holds a secret."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text(SECRET)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def _model(layout: str, tmp_path: Path, file: str) -> Path:
    folder = _folder(tmp_path / "model", file)
    return folder if layout == "folder" else _in_the_cache(tmp_path / "cache", folder)


# Each takes a sixth of a second: one that leads out in the place of each file every time, the others in the long run.
@pytest.mark.parametrize(
    ("file", "layout", "kind"),
    [
        pytest.param(file, layout, kind, marks=[] if kind == _link_outside or file in SOME else pytest.mark.slow)
        for file in FILES
        for layout, kind in KINDS
    ],
)
def test_no_file_leads_out_of_its_folder(
    file: str, kind: Callable[[Path, Path], None], layout: str, outside: Path, tmp_path: Path
) -> None:
    """A server, ``ferrule check`` and a name of the hub refuse the model, and say which file leads where."""
    folder = _model(layout, tmp_path, file)
    kind(folder / file, outside)
    names: list[Path | str] = [folder] if layout == "folder" else [folder, NAME]
    for reason in [way(name) for way in (_served, _checked) for name in names]:
        assert reason
        assert SECRET not in reason
        if kind in LINKS and "not complete in the cache" not in reason:
            assert Path(file).name in reason
            assert "outside the model folder" in reason
            assert "copy or hard-link" in reason


@pytest.mark.parametrize(("file", "layout"), [("model.safetensors", "folder"), (SHARD, "snapshot")])
def test_a_sound_model_loads_from_either_place(file: str, layout: str, tmp_path: Path) -> None:
    """Blobs are outside the snapshot, but of its repository; the cache may be reached by a link."""
    folder = _model(layout, tmp_path, file)
    (tmp_path / "link").symlink_to(tmp_path)
    linked = tmp_path / "link" / folder.relative_to(tmp_path)
    assert [_served(folder), _checked(folder), _served(linked), _checked(linked)] == [""] * 4
    if layout == "snapshot":
        assert [_served(NAME), _checked(NAME)] == ["", ""]


def test_weights_that_lead_out_are_all_that_is_said(outside: Path, tmp_path: Path) -> None:
    """And not that each of their tensors is missing."""
    model = write_small_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(outside / "secret")
    with pytest.raises(ModelError, match="outside the model folder") as caught:
        create_executor(_config(model), lambda *_: None)
    assert "is missing" not in str(caught.value)


def test_blobs_of_another_repository_are_refused(tmp_path: Path) -> None:
    """Also if the folder of blobs is itself a link."""
    snapshot = _in_the_cache(tmp_path / "cache", _folder(tmp_path / "model", ""))
    other = _in_the_cache(tmp_path / "others", _folder(tmp_path / "second", ""))
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to((other / "config.json").resolve())
    assert "outside the model folder" in _served(snapshot)
    shutil.rmtree(snapshot.parents[1] / "blobs")
    (snapshot.parents[1] / "blobs").symlink_to(other.parents[1] / "blobs")
    with pytest.raises(ModelError, match="outside the model folder"):
        read_text(snapshot, "tokenizer.json", 1 << 20)


def test_a_folder_that_is_named_like_a_snapshot_has_no_blobs(tmp_path: Path) -> None:
    """Only ``models--X/snapshots/REV`` has."""
    for parent in ("models--a/other", "model/snapshots"):
        folder = tmp_path / parent / "rev"
        folder.mkdir(parents=True)
        (folder.parents[1] / "blobs").mkdir()
        (folder.parents[1] / "blobs" / "x").write_text(SECRET)
        (folder / "x").symlink_to(folder.parents[1] / "blobs" / "x")
        with pytest.raises(ModelError, match="outside the model folder"):
            open_file(folder, "x")


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: links to files of a folder that is a link."""
    (tmp_path / "..1").mkdir()
    (tmp_path / "..1" / "config.json").write_text("{}")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "config.json").symlink_to("..data/config.json")
    assert read_bytes(tmp_path, "config.json", 10) == b"{}"


@pytest.mark.parametrize("name", ["../outside/secret", "templates/x", "."])
def test_names_and_folders_that_lead_out_are_refused(name: str, outside: Path, tmp_path: Path) -> None:
    """By dots, and by a folder that is a link."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "templates").symlink_to(outside)
    (outside / "x").write_text(SECRET)
    with pytest.raises(ModelError, match="cannot be read"):
        open_file(folder, name)
    with pytest.raises(ModelError, match="outside the model folder"):
        open_file(folder, str(outside / "secret"))


@pytest.mark.parametrize("name", ["../outside/secret", "/etc/hostname", "..", "a/../b"])
def test_an_index_names_plain_files(name: str, outside: Path, tmp_path: Path) -> None:
    """No folders above, no absolute paths."""
    folder = _folder(tmp_path / "model", INDEX)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert "not a plain file name" in _served(folder) or "outside the model folder" in _served(folder)
    assert _checked(folder)


@pytest.mark.parametrize("swapped", ["file", "folder"])
def test_a_link_that_appears_meanwhile_is_not_followed(
    swapped: str, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment at which a path was found to be inside and that at which it is opened."""
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "secret").write_text("harmless")
    resolve = model_files._resolve

    def swap(*args: Path) -> tuple[Path, Path]:
        found = resolve(*args)
        monkeypatch.setattr(model_files, "_resolve", resolve)
        path = folder / "inner" if swapped == "folder" else folder / "inner" / "secret"
        path.rename(tmp_path / "gone")
        path.symlink_to(outside if swapped == "folder" else outside / "secret")
        return found

    monkeypatch.setattr(model_files, "_resolve", swap)
    with pytest.raises(ModelError, match="cannot be read"):
        read_text(folder, "inner/secret", 100)


def test_a_folder_that_may_be_entered_and_not_listed_is_enough() -> None:
    """As for every other program that opens a file by its name."""
    with tempfile.TemporaryDirectory() as name:
        folder, me = Path(name), os.geteuid()
        (folder / "config.json").write_text("{}")
        folder.chmod(0o311)
        try:
            if me == 0:
                os.seteuid(65534)  # root may list every folder
            assert read_object(folder, "config.json", 100) == {}
        finally:
            os.seteuid(me)
            folder.chmod(0o700)


def test_a_link_to_nothing_is_a_missing_file(tmp_path: Path) -> None:
    """As a blob that was removed from the cache."""
    (tmp_path / "config.json").symlink_to("../blobs/none")
    with pytest.raises(FileMissing):
        open_file(tmp_path, "config.json")


def test_descriptors_are_closed(outside: Path, tmp_path: Path) -> None:
    """Those of the folders on the way, and that of a file which is refused."""
    _pipe(outside / "secret", outside)
    (outside / "inner").mkdir()
    (outside / "inner" / "file").write_text("x")
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(8):
        assert read_bytes(outside, "inner/file", 10) == b"x"
        with pytest.raises(ModelError):
            open_file(outside, "secret")
    assert len([*Path("/proc/self/fd").iterdir()]) == before


READERS = frozenset({
    "open", "FileIO", "fdopen", "read_text", "read_bytes", "read_object", "from_file", "from_pretrained", "safe_open",
    "load_file", "fromfile", "memmap", "mmap", "torch.load", "np.load",
})  # fmt: skip
OTHERS = {
    "model/memory.py": {"mmap"},  # memory without a file
    "model/hub.py": {"open", "read_text"},  # the digest of a file just fetched; the cache's own refs
    "text/template_worker.py": {"read_text"},  # /proc/self/statm
}
"""Readers of what is not a file of a model, by module."""


def _readers(path: Path) -> set[str]:
    """Return what a module calls to read files, unless it is imported from model_files or model_folder."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        if node.module in ("ferrule_server.model_files", "ferrule_server.model_folder") for alias in node.names
    }  # fmt: skip
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {name for f in called if isinstance(f, ast.Attribute) for name in (f.attr, ast.unparse(f))}
    names |= {f.id for f in called if isinstance(f, ast.Name)} - imported
    return names & READERS


def test_nothing_else_reads_the_files_of_a_model() -> None:
    """A new reader uses ``model_files``, or stands in the table above with its reason."""
    modules = [*SERVER.glob("model/**/*.py"), *SERVER.glob("text/*.py"), *SERVER.glob("model_check/*.py")]
    found = {str(path.relative_to(SERVER)): _readers(path) for path in [*modules, SERVER / "loading.py"]}
    assert {module: readers for module, readers in found.items() if readers} == OTHERS
    assert len(modules) > 40
