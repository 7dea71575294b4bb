"""GGUF files by name, against a stand-in of the hub: which file a name means, and what its header says of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from ferrule_server.config import ServerConfig
from ferrule_server.errors import ModelError
from ferrule_server.loading import create_executor
from ferrule_server.model import hub as hub_module
from ferrule_server.model.checkpoint import list_tensors
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.hub import cached_models, fetch_model
from ferrule_server.model.hub_names import is_hub_name, named_parts
from ferrule_server.model_check.report import check_model
from tests.model.conftest import CASES, Example, make_example
from tests.model.gguf.raw_file import TEXT, RawFile, RawTensor, key, text
from tests.model.gguf.writing import write_gguf
from tests.model.hub_stand_in import Hub, serving

NAME = "tiny/model"
HEADER_BYTES = 1 << 10
"""How much is fetched first; the headers here have about 3 KiB."""
PARTS = tuple(f"Q5_0/tiny-Q5_0-0000{number}-of-00003.gguf" for number in (1, 2, 3))
SIZES = {
    **CASES["llama-gqa-4to1-tied-llama3-rope"], "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """A model whose file has divisors of its frequencies, behind its largest tensors."""
    return make_example(SIZES, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def written(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as many are: files of several types, one in parts in a folder, and a projector for pictures."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("tiny-Q4_0.gguf", "tiny.Q8_0.gguf", "tiny-UD-Q8_0.gguf", "mmproj-Q4_0.gguf", "deep/tiny-F16.gguf"):
        (folder / name).parent.mkdir(exist_ok=True)
        write_gguf(folder / name, "llama", example.oracle, {}, dtype=name[:-5].replace(".", "-").split("-")[-1])
    (folder / "Q5_0").mkdir()
    write_gguf(folder / "Q5_0" / "tiny-Q5_0.gguf", "llama", example.oracle, {}, dtype="Q5_0", split=9)
    assert {str(path.relative_to(folder)) for path in (folder / "Q5_0").iterdir()} == set(PARTS)
    (folder / "README.md").write_text("about")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def hub(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in with that repository, and an empty cache."""
    with serving(tiny__model=written) as hub:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_module, "_FIRST_BYTES", HEADER_BYTES)
        yield hub
        huggingface_hub.close_session()


def fetch(name: str, revision: str | None = None, **settings: Any) -> Path:
    """Fetch with what most tests do not care about."""
    return fetch_model(
        name, revision, **{"is_offline": False, "check": read_config, "on_share": lambda _: None, **settings}
    )


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (":Q4_0", ["tiny-Q4_0.gguf"]),
        (":q4_0", ["tiny-Q4_0.gguf"]),
        (":UD-Q8_0", ["tiny-UD-Q8_0.gguf"]),
        (":F16", ["deep/tiny-F16.gguf"]),
        (":Q5_0", list(PARTS)),
        ("/tiny.Q8_0.gguf", ["tiny.Q8_0.gguf"]),
        ("/deep/tiny-F16.gguf", ["deep/tiny-F16.gguf"]),
        (f"/{PARTS[0]}", list(PARTS)),
        (f"/{PARTS[2]}", list(PARTS)),
    ],
)
def test_a_name_means_one_file(hub: Hub, written: Path, name: str, files: list[str]) -> None:
    """It and its other parts are all that is fetched, once, and it is read as the file in the repository is."""
    model = fetch(NAME + name)
    assert sorted(hub.files_got()) == files
    assert (model.parent / Path(files[0]).name, model.name) == (model, Path(files[0]).name)
    assert read_config(model) == read_config(written / files[0])
    ours, theirs = (list_tensors(path) for path in (model, written / files[0]))
    assert ours[0].keys() == theirs[0].keys()
    assert ours[1:] == theirs[1:] == (set(), [])
    hub.seen.clear()
    assert fetch(NAME + name) == fetch(NAME + name, is_offline=True) == model
    assert [seen.path for seen in hub.seen] == [f"/api/models/{NAME}/revision/main?blobs=true"]
    hub.seen.clear()
    assert fetch(NAME + name, hub.commit(NAME)) == model
    assert hub.seen == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (":Q6_K", "no such file; its GGUF files: Q5_0/tiny-Q5_0-00001-of-00003.gguf, "),
        (":Q8_0", "several such files; its GGUF files: "),
        ("/other.gguf", "no such file"),
        ("", "no safetensors; name one of its GGUF files: tiny/model/Q5_0/tiny-Q5_0-00001-of-00003.gguf, "),
    ],
)
def test_a_name_that_means_no_file_lists_those_that_are_there(hub: Hub, name: str, reason: str) -> None:
    """Nothing but the list has been asked for."""
    with pytest.raises(ModelError, match=r"--model tiny/model\S*: the repository has ") as caught:
        fetch(NAME + name)
    assert reason in str(caught.value)
    assert hub.files_got() == []


@pytest.mark.parametrize("missing", PARTS)
def test_a_part_that_is_missing_is_said(
    hub: Hub, written: Path, tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is."""
    folder = tmp_path / "less"
    (folder / "Q5_0").mkdir(parents=True)
    for path in set(PARTS) - {missing}:
        (folder / path).symlink_to(written / path)
    monkeypatch.setitem(hub.repositories, NAME, folder)
    with pytest.raises(ModelError, match="only a part of that"):
        fetch(f"{NAME}:Q5_0")


@pytest.mark.parametrize(
    "name", [":Q8_0.gguf/x", "/../other.gguf", "/a/../../b.gguf", "//a.gguf", ":", ":a/b", "/a.bin"]
)
def test_what_looks_like_no_file_is_no_name_of_the_hub(name: str) -> None:
    """No name leads out of the repository."""
    assert not is_hub_name(NAME + name)


@pytest.mark.parametrize("path", ["../tiny-Q3_K.gguf", "/tmp/tiny-Q3_K.gguf", "a/../../tiny-Q3_K.gguf"])
def test_a_path_out_of_the_repository_is_not_listed(path: str) -> None:
    """Whatever a hub says."""
    with pytest.raises(ModelError, match=r"no such file; its GGUF files: none"):
        named_parts(f"{NAME}:Q3_K", [path])


def test_what_cannot_run_is_refused_before_its_weights_are_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header says it."""
    folder = tmp_path / "other"
    folder.mkdir()
    keys = {"a": key("general.architecture", TEXT, text("mamba"))}
    (folder / "other-F32.gguf").write_bytes(RawFile(keys, [RawTensor("token_embd.weight", (64, 64))]).content())
    monkeypatch.setitem(hub.repositories, NAME, folder)
    with pytest.raises(ModelError, match="mamba"):
        fetch(f"{NAME}:F32")
    assert hub.sent_bytes < (folder / "other-F32.gguf").stat().st_size / 4
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_file_without_a_header_is_refused(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After as much of it as a header may have."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "a-F32.gguf").write_bytes(b"GGUF\3\0\0\0" + b"\1" * 100_000)
    monkeypatch.setitem(hub.repositories, NAME, folder)
    monkeypatch.setattr(hub_module, "MAX_HEADER_BYTES", 1 << 14)
    with pytest.raises(ModelError, match=r"file a-F32\.gguf has 72340172838076673 tensors"):
        fetch(f"{NAME}:F32")
    assert hub.sent_bytes == 1 << 14


def test_a_hub_without_ranges_is_said(hub: Hub) -> None:
    """Only the beginning of a file would be read from it."""
    hub.faults.has_ranges = False
    with pytest.raises(ModelError, match="the hub gives no ranges of files"):
        fetch(f"{NAME}:Q4_0")


def test_a_damaged_file_is_not_kept(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other weights."""
    hub.faults.is_damaged = True
    monkeypatch.setattr(hub_module._Repository, "outline", lambda _self, place: place)
    with pytest.raises(ModelError, match=r"tiny-Q4_0.gguf arrived damaged"):
        fetch(f"{NAME}:Q4_0", check=lambda _: None)
    hub.faults.is_damaged = False
    assert fetch(f"{NAME}:Q4_0", check=lambda _: None).exists()


@pytest.mark.parametrize(("name", "files"), [(":Q4_0", ["tiny-Q4_0.gguf"]), (":Q5_0", list(PARTS))])
def test_a_file_of_the_hub_is_checked_by_its_header(hub: Hub, written: Path, name: str, files: list[str]) -> None:
    """All that is said of the file itself, and how much is to be fetched; then that nothing is."""
    expected = check_model(ServerConfig(model=str(written / files[0]), device="cpu")).details
    details = check_model(ServerConfig(model=NAME + name, device="cpu")).details
    assert details is not None
    assert expected is not None
    num_bytes = sum((written / path).stat().st_size for path in files)
    assert (details.stored_bytes, details.download_bytes) == (num_bytes, num_bytes)
    assert details.commit == hub.commit(NAME)
    assert details.packed_types == (name[1:],)
    same = ("num_parameters", "weights_bytes", "weights_bytes_by_type", "packed_types", "warnings", "architecture")
    assert all(getattr(details, field) == getattr(expected, field) for field in same)
    assert hub.sent_bytes < num_bytes
    fetch(NAME + name)
    hub.sent_bytes = 0
    again = check_model(ServerConfig(model=NAME + name, device="cpu")).details
    assert again is not None
    assert (again.download_bytes, hub.sent_bytes) == (0, 0)


def test_files_in_the_cache_are_listed_each(hub: Hub) -> None:
    """By the name that loads them."""
    fetch(f"{NAME}:Q4_0")
    fetch(f"{NAME}:Q5_0")
    assert [(name, path is not None) for name, path, _ in cached_models()] == [
        (f"{NAME}/{PARTS[0]}", True),
        (f"{NAME}/tiny-Q4_0.gguf", True),
    ]


def test_it_is_loaded_as_the_model_of_that_name(hub: Hub) -> None:
    """A server says it by the name that was given."""
    config = ServerConfig(
        model=f"{NAME}:Q5_0", device="cpu", executor="torch", dtype="float32", kv_memory_bytes=1 << 20
    )
    loaded = create_executor(config, lambda _stage, _share: None)
    loaded.executor.close()
    assert loaded.executor.info.model.model_id == f"{NAME}:Q5_0"
    assert loaded.commit == hub.commit(NAME)
    assert (Path(constants.HF_HUB_CACHE) / "models--tiny--model" / "refs" / "main").read_text() == loaded.commit
