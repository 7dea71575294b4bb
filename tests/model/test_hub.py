"""Models by name, against a stand-in of the hub: what is fetched, what is kept, and what is said when it fails."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from ferrule_server.arguments import parse_config
from ferrule_server.errors import ModelError
from ferrule_server.loading import download
from ferrule_server.model import hub as hub_module
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.hub import fetch_model
from ferrule_server.model.hub_names import is_hub_name
from tests.model.hub_stand_in import TOKEN, Faults, Hub, serving

ROOT = Path(__file__).resolve().parents[2]
NAME = "tiny/model"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TEXTS = ("chat_template.jinja", "generation_config.json", "special_tokens_map.json", "tokenizer.json",
         "tokenizer_config.json", "additional_chat_templates/tool.jinja")  # fmt: skip
UNWANTED = ("README.md", "modeling.py", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx",
            "training_args.bin", "vocab.json", "unet/model.safetensors", ".gitattributes")  # fmt: skip
SHARD_BYTES = 3 << 18


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository as many are: shards, an index, and much that is of no use here."""
    folder = tmp_path / "repository"
    for path in (*TEXTS, *UNWANTED):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f'{{"of": "{path}"}}')
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for number, shard in enumerate(SHARDS):
        (folder / shard).write_bytes(bytes([number, 7, 9]) * (SHARD_BYTES // 3))
    weight_map = {"a": SHARDS[0], "b": SHARDS[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[Hub]:
    """A stand-in with that repository."""
    with serving(tiny__model=repository) as hub:
        yield hub


@pytest.fixture(autouse=True)
def cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the library reads its settings when it is imported, so they are set on it."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


@pytest.fixture(scope="module", autouse=True)
def _session() -> Iterator[None]:
    """One HTTP client for all; making one takes a while."""
    yield
    huggingface_hub.close_session()


@dataclass
class Place:
    """What a test may spoil."""

    hub: Hub
    cache: Path
    patch: pytest.MonkeyPatch

    def file(self, name: str) -> Path:
        """Return a file of the repository."""
        return self.hub.repositories[NAME] / name


Spoil = Callable[[Place], object]


def fetch(name: str = NAME, revision: str | None = None, **settings: Any) -> Path:
    """Fetch with what most tests do not care about."""
    settings = {"is_offline": False, "check": read_config, "on_share": lambda _: None, **settings}
    return fetch_model(name, revision, **settings)


def test_only_what_the_server_reads_is_fetched(hub: Hub, repository: Path) -> None:
    """No code, no pickles, no second copy of the weights; the bytes are the repository's."""
    model = fetch()
    wanted = {"config.json", "model.safetensors.index.json", *TEXTS, *SHARDS}
    assert set(hub.files_got()) == wanted
    assert {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()} == wanted
    assert all((model / path).read_bytes() == (repository / path).read_bytes() for path in wanted)
    assert model.name == hub.commit(NAME)
    assert [path.name for path in model.parents[1].joinpath("blobs").glob("*incomplete")] == []


def test_the_configuration_comes_first_and_the_weights_last(hub: Hub) -> None:
    """Whatever is complete in weights is complete altogether."""
    fetch()
    got = hub.files_got()
    assert set(got[:2]) == {"config.json", "generation_config.json"}
    assert set(got[-2:]) == set(SHARDS)


def test_a_single_file_of_weights_is_enough(hub: Hub, repository: Path) -> None:
    """And then the shards beside it are left alone, as they are when the model is read."""
    (repository / "model.safetensors").write_bytes(b"w" * 1000)
    fetch()
    assert [name for name in hub.files_got() if name.endswith(".safetensors")] == ["model.safetensors"]


def test_the_second_time_nothing_is_fetched(hub: Hub) -> None:
    """One question, which commit it is now, is all."""
    first = fetch()
    hub.seen.clear()
    assert fetch() == first
    assert [seen.path for seen in hub.seen] == [f"/api/models/{NAME}/revision/main?blobs=true"]


def test_a_commit_that_is_here_needs_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot change."""
    first = fetch(revision=hub.commit(NAME))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    hub.seen.clear()
    assert fetch(revision=first.name) == first
    assert hub.seen == []


def test_a_revision_pins_what_is_served(hub: Hub, repository: Path) -> None:
    """An old commit stays what it was when the branch goes on; the branch brings only what changed."""
    old = fetch()
    (repository / "tokenizer.json").write_text('{"new": 1}')
    hub.seen.clear()
    new = fetch()
    assert hub.files_got() == ["tokenizer.json"]
    assert (new / "tokenizer.json").read_text() == '{"new": 1}'
    assert "of" in (fetch(revision=old.name) / "tokenizer.json").read_text()
    assert fetch(is_offline=True) == new


@pytest.mark.parametrize("by_variable", [False, True])
def test_offline_serves_what_is_here(hub: Hub, by_variable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a single request, by the flag and by huggingface_hub's own variable."""
    hub.tags["v1"] = "main"
    first = fetch(revision="v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by_variable)
    hub.seen.clear()
    assert fetch(revision="v1", is_offline=not by_variable) == first
    assert hub.seen == []
    with pytest.raises(ModelError, match=r"--revision v2: it is not complete in the cache.*start once without that"):
        fetch(revision="v2", is_offline=not by_variable)


def test_what_another_tool_fetched_is_found_and_the_other_way_round(hub: Hub, cache: Path) -> None:
    """The cache is huggingface_hub's own."""
    folder = huggingface_hub.snapshot_download(NAME, endpoint=hub.endpoint, cache_dir=cache, max_workers=1)
    hub.seen.clear()
    assert str(fetch()) == folder
    assert hub.files_got() == []
    shutil.rmtree(cache)
    ours = fetch()
    shard = huggingface_hub.try_to_load_from_cache(NAME, SHARDS[0], cache_dir=cache)
    assert shard == str(ours / SHARDS[0])
    report = huggingface_hub.scan_cache_dir(cache)
    assert not report.warnings
    assert [(repo.repo_id, set(repo.refs)) for repo in report.repos] == [(NAME, {"main"})]


def test_a_disk_without_links_will_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files lie where the links would be."""

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", no_links)
    model = fetch()
    assert (model / SHARDS[0]).stat().st_size == SHARD_BYTES
    hub.seen.clear()
    assert fetch() == model
    assert hub.files_got() == []


def test_a_cut_connection_is_gone_on_with(hub: Hub, repository: Path) -> None:
    """In the same start."""
    hub.faults = Faults(cut_after_bytes=1 << 18, num_cuts=2)
    model = fetch()
    assert hub.faults.num_cuts == 0
    assert all((model / path).read_bytes() == (repository / path).read_bytes() for path in SHARDS)


def _fetch_and_die(endpoint: str, cache: Path) -> None:
    constants.ENDPOINT, constants.HF_HUB_CACHE = endpoint, str(cache)
    fetch()


def test_a_killed_start_does_no_harm(hub: Hub, cache: Path, repository: Path) -> None:
    """Killed in the middle of both shards, the next start fetches them again, and only them."""
    hub.faults = Faults(pause_s=0.02)
    process = multiprocessing.get_context("fork").Process(target=_fetch_and_die, args=(hub.endpoint, cache))
    process.start()
    while hub.sent_bytes < 3 << 18:
        assert process.is_alive()
        threading.Event().wait(0.01)
    process.kill()
    process.join()
    hub.faults = Faults()
    hub.seen.clear()
    shares: list[float] = []
    model = fetch(on_share=shares.append)
    assert set(hub.files_got()) == set(SHARDS)
    assert all((model / path).read_bytes() == (repository / path).read_bytes() for path in SHARDS)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_hub_without_ranges_sends_all_again(hub: Hub) -> None:
    """What had come is replaced, not doubled."""
    hub.faults = Faults(cut_after_bytes=1 << 18, num_cuts=1, has_ranges=False)
    shares: list[float] = []
    fetch(on_share=shares.append)
    assert shares[-1] == 1.0


def test_damaged_bytes_are_never_served(hub: Hub, repository: Path) -> None:
    """They are dropped; what was kept of another start and turns out to be damaged is fetched anew at once."""
    hub.faults = Faults(is_damaged=True)
    with pytest.raises(ModelError, match=r"model-0000.-of-00002.safetensors arrived damaged.*start again"):
        fetch()
    hub.faults = Faults(is_damaged=True, cut_after_bytes=1 << 18, num_cuts=100)
    with pytest.raises(ModelError):
        fetch()
    hub.faults = Faults()
    model = fetch()
    assert (model / SHARDS[0]).read_bytes() == (repository / SHARDS[0]).read_bytes()


def test_every_damaged_file_is_removed(hub: Hub, repository: Path) -> None:
    """Not only the first one that is found: the next start would serve the others."""
    hub.faults = Faults(is_damaged=True)
    with pytest.raises(ModelError, match="arrived damaged"):
        fetch()
    hub.faults = Faults()
    model = fetch()
    assert all((model / path).read_bytes() == (repository / path).read_bytes() for path in SHARDS)


@pytest.mark.parametrize("is_offline", [False, True])
def test_weights_of_a_killed_start_are_compared_by_the_next_one(
    hub: Hub, is_offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are there, but nobody has looked at them, also where the hub cannot be asked."""
    hub.faults = Faults(is_damaged=True)
    with monkeypatch.context() as patch:
        patch.setattr(hub_module, "_compare", lambda *_: None)
        model = fetch()
    with pytest.raises(ModelError, match="arrived damaged"):
        fetch(is_offline=is_offline)
    assert not [path for path in SHARDS if (model / path).exists()]


def test_weights_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later starts read no weights for that; a file that was written again is compared again."""
    compared: list[str] = []

    def is_whole(path: Path, _: str) -> bool:
        compared.append(path.name)
        return True

    monkeypatch.setattr(hub_module, "_is_whole", is_whole)
    model = fetch()
    assert compared == [*SHARDS]
    compared.clear()
    assert fetch() == fetch(revision=model.name) == fetch(is_offline=True) == model
    assert compared == []
    os.utime(model / SHARDS[1], (1, 1))
    fetch()
    assert compared == [SHARDS[1]]


def test_a_cache_that_cannot_be_written_serves(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are then compared at each start."""
    model = fetch()
    (cache / "models--tiny--model" / hub_module._MARK).unlink()
    monkeypatch.setattr(Path, "open", _no_writing)
    assert fetch() == fetch() == model


def test_two_starts_at_once_fetch_everything_once(hub: Hub) -> None:
    """The second waits for the first, file by file."""
    hub.faults = Faults(pause_s=0.005)
    models: list[Path] = []
    threads = [threading.Thread(target=lambda: models.append(fetch())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert models == [models[0]] * 3
    assert hub.sent_bytes == 2 * SHARD_BYTES


def test_the_token_stays_with_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stores the large files never sees it."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.faults = Faults(is_gated=True)
    fetch()
    asked = [seen for seen in hub.seen if seen.path != "/api/agent-harnesses"]  # the library's own, once a day
    from_hub = [seen for seen in asked if seen.has_token]
    without = [seen for seen in asked if not seen.has_token]
    assert without == [seen for seen in asked if seen.path.endswith(SHARDS) and seen not in from_hub]
    assert len(without) == 2


def _write(name: str, content: object) -> Spoil:
    return lambda it: it.file(name).write_text(json.dumps(content))


def _lack(pattern: str) -> Spoil:
    def spoil(it: Place) -> None:
        for path in it.hub.repositories[NAME].glob(pattern):
            path.unlink()

    return spoil


def _no_space(*_: object, **_settings: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


_open = Path.open


def _no_writing(path: Path, mode: str = "r", *args: Any, **settings: Any) -> Any:
    if mode.startswith(("w", "a")):
        raise OSError(errno.EROFS, "Read-only file system")
    return _open(path, mode, *args, **settings)


REFUSED: dict[str, tuple[Spoil, str]] = {
    "a family that is not supported": (
        _write("config.json", {**CONFIG, "architectures": ["GPT2LMHeadModel"]}),
        r"architectures is .'GPT2LMHeadModel'., which is not supported; docs/models.md lists what loads",
    ),
    "pickles alone": (_lack("*safetensors*"), r"has no safetensors, only pytorch_model.bin, which is not read"),
    "no configuration": (_lack("config.json"), r"the repository has no config.json"),
    "a shard too few": (_lack(SHARDS[1]), rf"index.json names {SHARDS[1]}, which the repository lacks"),
    "a text of absurd size": (
        lambda it: (
            it.patch.setattr(hub_module, "_MAX_TEXT_BYTES", 1 << 16),
            it.file("tokenizer.json").write_bytes(b" " * (1 << 17)),
        ),
        r"tokenizer.json has 0.1 MiB; is it a model\?",
    ),
    "no token": (
        lambda it: setattr(it.hub, "faults", Faults(is_gated=True)),
        rf"gated: accept its terms at http://\S+/{NAME}, and set HF_TOKEN",
    ),
    "another token": (
        lambda it: it.patch.setenv("HF_TOKEN", "hf_other"),
        "does not accept the token in HF_TOKEN",
    ),
    "no token at all": (
        lambda it: it.patch.setenv("HF_TOKEN", "hf_other\x0bx"),
        "HF_TOKEN holds characters that no token",
    ),
    "a small disk": (
        lambda it: it.patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 18)),
        r"1.5 MiB have to be fetched and .* has room for 0.2 MiB; .* HF_HOME",
    ),
    "a file for a cache": (lambda it: it.cache.write_text(""), rf"--model {NAME}: .* cannot be written"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_costs_no_weights(
    case: str, hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what is wrong, and never the token."""
    spoil, message = REFUSED[case]
    spoil(Place(hub, cache, monkeypatch))
    with pytest.raises(ModelError, match=message) as caught:
        fetch()
    assert "hf_other" not in str(caught.value)
    assert hub.sent_bytes == 0


def test_what_is_not_on_the_hub_is_named() -> None:
    """Whether a repository is private cannot be told from outside, so both are named; a revision is by itself."""
    with pytest.raises(ModelError, match=r"--model no/body: no such folder, and http.* has no such repository, or"):
        fetch("no/body")
    with pytest.raises(ModelError, match="--revision v9: tiny/model has no such branch, tag or commit"):
        fetch(revision="v9")


def test_a_disk_that_fills_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others write there too."""
    monkeypatch.setattr("huggingface_hub.file_download.http_get", _no_space)
    with pytest.raises(ModelError, match=rf"--model {NAME}: .*cache cannot be written: .*No space left on device"):
        fetch()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CAS service error: request to http://storage/x?signature=secret failed\nand more"),
        ValueError("invalid hash"),
        ImportError("hf_xet is missing"),
        PermissionError("Token refresh failed"),  # without a number, as hf_xet's XetAuthenticationError
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_library_for_xet_raises_is_said_in_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a fault of the disk, and without addresses that are signed."""

    def failing(*_: object, local_files_only: bool = False, **_settings: object) -> str:
        raise FileNotFoundError if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    message = rf"--model {NAME}: the transfer failed: {str(error).split('?')[0].splitlines()[0]}"
    with pytest.raises(ModelError, match=message) as caught:
        fetch()
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_network_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the library says, and where the cache is."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(ModelError, match=r"cannot be reached \(.+\); nor is it complete in the cache, ") as caught:
            fetch()
    assert "\n" not in str(caught.value)


def test_without_a_network_the_cache_serves(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """A restart must not depend on somebody else's server; one warning says which commit it is."""
    first = fetch()
    hub.faults = Faults(is_down=True)
    with caplog.at_level("WARNING"):
        assert fetch() == first
    assert f"event=hub_unused model={NAME} commit={first.name}" in caplog.text


def test_half_a_model_is_no_model(hub: Hub) -> None:
    """What was not finished is not taken from the cache."""
    model = fetch()
    (model / SHARDS[1]).resolve().unlink()
    hub.faults = Faults(is_down=True)
    with pytest.raises(ModelError, match="answers 503; nor is it complete in the cache"):
        fetch()
    hub.faults = Faults()
    assert fetch() == model
    assert (model / SHARDS[1]).stat().st_size == SHARD_BYTES


def test_the_commands_of_the_page_do_what_it_says(hub: Hub) -> None:
    """Each of them finds the model, the last one without the hub."""
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page[page.index("## Models by name") : page.index("## On a GPU")]
    commands = re.findall(r"^ferrule serve (.+?)(?: +#.*)?$", section, re.MULTILINE)
    assert len(commands) == 5
    for command in (command for command in commands if "GGUF" not in command):
        given = re.sub(r"[0-9a-f]{40}", hub.commit(NAME), command.replace("Qwen/Qwen3-0.6B", NAME)).split()
        assert download(parse_config(given, {}), lambda *_: None).name == hub.commit(NAME)


def test_weights_that_somebody_else_fetched_alone_get_their_tokenizer(hub: Hub, cache: Path) -> None:
    """Also for a commit, which is not asked about otherwise."""
    only = ["*.safetensors", "*.index.json", "config.json"]
    huggingface_hub.snapshot_download(
        NAME, endpoint=hub.endpoint, cache_dir=cache, max_workers=1, allow_patterns=only, revision=hub.commit(NAME)
    )
    assert (fetch(revision=hub.commit(NAME)) / "tokenizer.json").is_file()


def test_the_log_has_no_addresses_of_files(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the storage are signed: who has one may read."""
    with caplog.at_level("INFO"):
        fetch()
    assert f"downloading model={NAME} commit={hub.commit(NAME)} files=2" in caplog.text
    assert "http" not in caplog.text


@pytest.mark.parametrize("text", ["<html>sign in to the wireless network</html>", "[1]", '{"id": "x"}', "{}"])
def test_what_is_no_hub_is_not_believed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever answers at that address."""
    monkeypatch.setattr("tests.model.hub_stand_in.json.dumps", lambda _: text)
    with pytest.raises(ModelError, match=f"--model {NAME}: "):
        fetch()


@pytest.mark.parametrize("path", ["../../outside.safetensors", "/etc/outside.safetensors", "a/../../x.safetensors"])
def test_files_stay_in_the_cache(path: str, hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that lies about names writes nowhere else."""
    _write("model.safetensors.index.json", {"weight_map": {"a": path}})(Place(hub, cache, monkeypatch))
    with pytest.raises(ModelError, match="which is not a plain file name"):
        fetch()
    assert not list(cache.parent.glob("**/outside*"))
    assert not [seen for seen in hub.seen if ".." in seen.path]


def test_folders_that_may_not_be_read_are_not_counted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write to the same cache."""
    model = fetch()
    num_bytes = hub_module._disk_bytes(cache)
    stat = Path.stat

    def forbidding(path: Path, **settings: Any) -> os.stat_result:
        if path.name == model.name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **settings)

    monkeypatch.setattr(Path, "stat", forbidding)
    assert hub_module._disk_bytes(cache) == num_bytes


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("Qwen/Qwen3-0.6B", True), ("a/b", True), ("models/x.y_z", True), ("demo", False), ("/a/b", False),
        ("./a/b", False), ("~/a", False), ("a/b/c", False), ("../b", False), ("a/..", False), ("a/b ", False),
        ("a--b/c", False), ("", False), ("a/", False),
    ],
)  # fmt: skip
def test_names_of_the_hub(text: str, is_name: bool) -> None:
    """Exactly one slash, nothing that leads out of a folder."""
    assert is_hub_name(text) is is_name
