"""Models by name, ``org/name``: fetch what the server reads into the cache of the Hugging Face hub.

Only files that the server reads are fetched: configuration, tokenizer, chat templates and safetensors, but never code,
pickles or other formats of the same weights; or one GGUF file with its parts, ``org/name/path/file.gguf``, in short
``org/name:Q4_K_M``. The configuration is first, so that a model that cannot run is refused before its weights are
fetched; that of a GGUF file is its header. The transfer is that of huggingface_hub, with its tokens, proxies,
HF_ENDPOINT, HF_HOME, Xet, and locks in the cache. What we add are the refusals before it, and the digest of each file
of weights after it. A file beside the blobs lists the weights that have been compared: a start that is killed leaves
others.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.checkpoint import INDEX_FILE, SINGLE_FILE, read_index
from ferrule_server.model.families.others import NotSupported, no_model
from ferrule_server.model.gguf.container import begins_with_header, part_names, read_gguf
from ferrule_server.model.gguf.header import MAX_HEADER_BYTES
from ferrule_server.model.gguf.network import DIVISORS
from ferrule_server.model.hub_names import is_hub_name, named_parts, repository_of
from ferrule_server.model_files import is_file, listed

OnShare = Callable[[float], None]
"""Called with the share of the weights that has arrived, from 0 to 1; from any thread."""

CONFIGS: Final = ("config.json", "generation_config.json")
"""Fetched first, because they decide whether a model can run."""
TEXTS: Final = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|chat_template\.jinja"
    r"|additional_chat_templates/[A-Za-z0-9][A-Za-z0-9._-]*\.jinja"
)
"""Matches the other files that are read besides the weights."""

_LOG = logging.getLogger(__name__)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MARK: Final = "ferrule-compared"
_PARTIAL_CONTENT: Final = 206
_NUM_CONNECTIONS: Final = 4
_TIMEOUT_S: Final = 10.0
_FIRST_BYTES: Final = 4 << 20
"""How much of a GGUF file is fetched first to read its header, which has about 6 MB; then four times as much."""
_LOOK_S: Final = 0.25
"""How often the progress of a download is read from the disk."""
_MAX_TEXT_BYTES: Final = 256 << 20
"""Largest file besides the weights; the largest tokenizers have 40 MB."""
_SPARE_BYTES: Final = 64 << 20
"""Space on the disk that must stay free."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known of a model before its weights are fetched or read.

    Attributes:
        folder: Has the configuration, and the index of the weights if there is one; or a GGUF file, of which there may
            be the header alone.
        commit: Of a model of the hub; None for any other folder.
        stored_bytes: Size of the weights, whether they are in the folder or not.
        missing_bytes: How many of them are still to be fetched.
        tensors: The names of the tensors, if weights may be missing and the repository has an index; else empty.
    """

    folder: Path
    commit: str | None = None
    stored_bytes: int = 0
    missing_bytes: int = 0
    tensors: frozenset[str] = frozenset()


def fetch_model(
    name: str, revision: str | None, *, is_offline: bool, check: Callable[[Path], object], on_share: OnShare
) -> Path:
    """Return the folder or the GGUF file of a model of the hub; fetch the files that the cache lacks.

    Args:
        name: ``org/name``, ``org/name:TAG`` or ``org/name/FILE.gguf``.
        revision: Branch, tag or commit; None: the main branch.
        is_offline: Use the cache alone, as HF_HUB_OFFLINE=1 does.
        check: Called with a folder or a GGUF file as soon as it has the configuration; an exception ends the fetch.
        on_share: Called with the progress of the weights.

    Raises:
        ModelError: There is no such model or revision, access is refused, it has no safetensors, or not one such GGUF
            file, it does not fit on the disk, the network fails, or the cache lacks files and requests are forbidden.
    """
    found = _looked_up(name, revision, is_offline=is_offline)
    if isinstance(found, _Repository):
        return found.fetch(check, on_share)
    folder = snapshot_of(found)
    links = {str(path.relative_to(folder)): path for path in weights_of(found) if path.is_symlink()}
    _compare(name, folder, {path: link.readlink().name for path, link in links.items()})  # blobs have their digests
    return found


def outline_model(
    name: str, revision: str | None, *, is_offline: bool, check: Callable[[Path], object], place: Path
) -> Outline:
    """Return what is known of a model of the hub without its weights; fetch its configuration and index alone.

    Args and errors are those of :func:`fetch_model`; the header of a GGUF file is written into the folder ``place``.
    """
    found = _looked_up(name, revision, is_offline=is_offline)
    if isinstance(found, Path):
        return outline_folder(found, snapshot_of(found).name)
    commit = found.folder.name
    if found.gguf:
        missing = found.missing(found.gguf)
        model = found.outline(place) if missing else found.folder / found.gguf[0]
        return Outline(model, commit, found.size(found.gguf), found.size(missing))
    weights = found.configuration(check)
    tensors = frozenset(_weight_map(found.folder))
    return Outline(found.folder, commit, found.size(weights), found.size(found.missing(weights)), tensors)


def outline_folder(folder: Path, commit: str | None = None) -> Outline:
    """Return what is known of a folder whose weights are those in it, or of a GGUF file."""
    return Outline(folder, commit, sum(path.stat().st_size for path in weights_of(folder) if path.exists()))


def cached_models() -> list[tuple[str, Path | None, int]]:
    """Return the models in the cache: the name, the folder of a complete commit, and the bytes of all commits.

    A GGUF file is a model of its own, whose size is that of all files of its repository.
    """
    from huggingface_hub import constants

    models = []
    for cached in sorted(path for path in Path(constants.HF_HUB_CACHE).glob("models--*") if path.is_dir()):
        repository = cached.name.removeprefix("models--").replace("--", "/", 1)
        files = {path.relative_to(cached).parts[2:] for path in cached.glob("snapshots/*/**/*.gguf")}
        heads = sorted(path for path in map("/".join, files) if part_names(path)[0] == path)
        names = [f"{repository}/{path}" for path in heads] or [repository]
        models += [(name, _newest(name, cached), _disk_bytes(cached)) for name in names if is_hub_name(name)]
    return models


def snapshot_of(model: Path) -> Path:
    """Return the folder in the cache, named by its commit, that is or has a model."""
    return next(path for path in (model, *model.parents) if path.parent.name == "snapshots")


def weights_of(model: Path) -> list[Path]:
    """Return the files with the weights: the parts of a GGUF file, the single file, or those of a readable index."""
    if is_file(model):
        return [model.with_name(name) for name in part_names(model.name)]
    names = [SINGLE_FILE] if is_file(model / SINGLE_FILE) else sorted(set(_weight_map(model).values()))
    return [model / name for name in names]


def has_weights(model: Path) -> bool:
    """Return whether all files with weights are there."""
    weights = weights_of(model)
    return bool(weights) and all(map(is_file, weights))


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a repository: its size, and SHA-256 of its bytes, 64 digits; that of a small one is its name in git."""

    num_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class _Repository:
    """The files of one commit of a model on the hub, and the folder in the cache where they belong.

    Attributes:
        name: As it was asked for.
        repository: ``org/name``.
        revision: Branch, tag or commit that was asked for.
        folder: Of the commit, ``.../models--org--name/snapshots/COMMIT``; need not exist.
        files: By path, those that the server may read.
        others: The paths of all other files.
        gguf: The paths of a GGUF file and its other parts; empty if the model is the folder.
    """

    name: str
    repository: str
    revision: str
    folder: Path
    files: dict[str, _File]
    others: tuple[str, ...]
    gguf: tuple[str, ...]

    def fetch(self, check: Callable[[Path], object], on_share: OnShare) -> Path:
        """Fetch the missing files: the configuration, the texts, then the weights. Return the model."""
        weights = self.configuration(check)
        self._download([path for path in self.files if TEXTS.fullmatch(path)])
        if missing := self.missing(weights):
            self._check_room(missing)
            what = "downloading model=%s commit=%s files=%d bytes=%d"
            _LOG.info(what, self.name, self.folder.name, len(missing), self.size(missing))
            with self._watching(missing, on_share):
                self._download(missing)
        _compare(self.name, self.folder, {path: self.files[path].etag for path in weights})
        self._remember()
        return self.folder / self.gguf[0] if self.gguf else self.folder

    def configuration(self, check: Callable[[Path], object]) -> list[str]:
        """Fetch the configuration and the index, or a header, and return the paths of the weights."""
        if self.gguf:
            with tempfile.TemporaryDirectory(prefix="ferrule-") as place:
                check(self.outline(Path(place)) if self.missing(self.gguf) else self.folder / self.gguf[0])
            return list(self.gguf)
        has_weights = SINGLE_FILE in self.files or INDEX_FILE in self.files
        if "config.json" not in self.files or not has_weights:
            raise self._no_model(has_weights)
        self._download([path for path in CONFIGS if path in self.files])
        check(self.folder)
        if SINGLE_FILE in self.files:
            return [SINGLE_FILE]
        self._download([INDEX_FILE])
        try:
            weights = sorted(set(read_index(self.folder).values()))
        except ModelError as error:
            raise ModelError(f"--model {self.name}: {error}") from error
        if lost := [path for path in weights if path not in self.files]:
            raise ModelError(f"--model {self.name}: {INDEX_FILE} names {lost[0]}, which the repository lacks")
        return weights

    def outline(self, place: Path) -> Path:
        """Write the GGUF file and its parts into a folder: headers and divisors of the rotation, all else is a hole."""
        for path in self.gguf:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            num_bytes, wanted = self.files[path].num_bytes, _FIRST_BYTES
            self._copy(path, place, 0, wanted)
            while wanted < min(num_bytes, MAX_HEADER_BYTES) and not begins_with_header(place / path, wanted):
                self._copy(path, place, wanted, 3 * wanted)
                wanted *= 4
            os.truncate(place / path, num_bytes)
        model, paths = place / self.gguf[0], {Path(path).name: path for path in self.gguf}
        for tensor in read_gguf(model).tensors.values():
            if tensor.name in DIVISORS:
                self._copy(paths[tensor.path.name], place, tensor.offset, min(tensor.num_bytes, _FIRST_BYTES))
        return model

    def _copy(self, path: str, place: Path, begin: int, num_bytes: int) -> None:
        """Fetch some bytes of a file, fewer if it ends, to where they are in a file of that path in another folder."""
        import huggingface_hub as hub

        utils: Any = hub.utils  # whose names are not declared as exported
        url = hub.hf_hub_url(self.repository, path, revision=self.folder.name)
        headers = {"Range": f"bytes={begin}-{begin + num_bytes - 1}", "Accept-Encoding": "identity"}
        headers |= utils.build_hf_headers(library_name="ferrule")
        with (
            (place / path).open("r+b" if begin else "wb") as file,
            _failing(self.name),
            hub.get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S) as answer,
        ):
            utils.hf_raise_for_status(answer)
            if begin and answer.status_code != _PARTIAL_CONTENT:
                raise ValueError("the hub gives no ranges of files")
            file.seek(begin)
            for chunk in answer.iter_bytes():
                file.write(chunk[:num_bytes])
                num_bytes -= len(chunk)
                if num_bytes <= 0:
                    break

    def missing(self, paths: Iterable[str]) -> list[str]:
        """Return the files that the folder lacks."""
        return [path for path in paths if not (self.folder / path).exists()]

    def size(self, paths: Iterable[str]) -> int:
        """Return the bytes of files."""
        return sum(self.files[path].num_bytes for path in paths)

    def _no_model(self, has_weights: bool) -> ModelError:
        missing = "config.json" if has_weights else "safetensors"
        found = [] if has_weights else [path for path in self.others if path.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        instead = f", only {found[0]}, which is not read" if found else ""
        text = f"--model {self.name}: the repository has no {missing}{instead}"
        if not has_weights and (files := [f"{self.name}/{path}" for path in self.others if path.endswith(".gguf")]):
            return NotSupported(f"{text}; name one of its GGUF files: {listed(files)}", f"--model {files[0]}")
        return no_model(text, (*self.files, *self.others), is_explained=bool(instead))

    def _download(self, paths: Iterable[str]) -> None:
        """Fetch files over a few connections."""
        missing = self.missing(paths)
        for path in missing:
            if not path.endswith((".safetensors", ".gguf")) and self.files[path].num_bytes > _MAX_TEXT_BYTES:
                raise ModelError(f"--model {self.name}: {path} has {_gib(self.files[path].num_bytes)}; is it a model?")
        if missing:
            import huggingface_hub

            with _failing(self.name):
                huggingface_hub.snapshot_download(
                    self.repository, revision=self.folder.name, allow_patterns=missing, max_workers=_NUM_CONNECTIONS
                )
            if lost := self.missing(missing):
                raise ModelError(f"--model {self.name}: {lost[0]} did not arrive; start again")

    def _check_room(self, paths: list[str]) -> None:
        """Refuse what does not fit on the disk."""
        blobs, root = self.folder.parents[1] / "blobs", self.folder.parents[2]
        with _failing(self.name):
            root.mkdir(parents=True, exist_ok=True)
        num_bytes = self.size(path for path in paths if not (blobs / self.files[path].etag).exists())
        if num_bytes and num_bytes + _SPARE_BYTES > (free := shutil.disk_usage(root).free):
            raise ModelError(
                f"--model {self.name}: {_gib(num_bytes)} have to be fetched and {root} has room for {_gib(free)}; make"
                " room, or name another disk with HF_HOME"
            )

    @contextmanager
    def _watching(self, paths: list[str], on_share: OnShare) -> Iterator[None]:
        """Report the share of the files on the disk while the body runs."""
        blobs, total = self.folder.parents[1] / "blobs", max(1, self.size(paths))
        before, done = _disk_bytes(blobs), threading.Event()

        def look() -> None:
            share = 0.0
            while not done.wait(_LOOK_S):
                share = max(share, min(1.0, (_disk_bytes(blobs) - before) / total))
                on_share(share)

        thread = threading.Thread(target=look, name="ferrule-hub", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        on_share(1.0)

    def _remember(self) -> None:
        """Store the commit of the revision, for a start without a network, if the cache can be written."""
        ref = self.folder.parents[1] / "refs" / self.revision
        if _COMMIT.fullmatch(self.revision) or (is_file(ref) and ref.read_text() == self.folder.name):
            return
        try:
            ref.parent.mkdir(parents=True, exist_ok=True)
            beside = ref.with_name(f"{ref.name}.{os.getpid()}")
            beside.write_text(self.folder.name)
            beside.replace(ref)
        except OSError as error:
            _LOG.warning("event=ref_not_written model=%s error=%r", self.name, str(error))


def _looked_up(name: str, revision: str | None, *, is_offline: bool) -> Path | _Repository:
    """Return the folder of a model in the cache if nothing has to be asked for, else the files of its repository."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import constants

    for library in ("httpx", "httpx2", "huggingface_hub"):  # they log addresses, which may be signed
        logging.getLogger(library).setLevel(logging.ERROR)
    wanted, root = revision or constants.DEFAULT_REVISION, Path(constants.HF_HUB_CACHE)
    here = _complete(name, wanted)
    is_forbidden = is_offline or bool(constants.HF_HUB_OFFLINE)
    if here is not None:
        is_whole = snapshot_of(here).name == wanted and (is_file(here) or is_file(here / "tokenizer.json"))
        if is_forbidden or is_whole:
            return here
    if is_forbidden:
        asked = f"--revision {revision}: " if revision else ""
        raise ModelError(
            f"--model {name}: {asked}it is not complete in the cache, {root}, and requests are forbidden"
            f" ({'--offline' if is_offline else 'HF_HUB_OFFLINE'}); start once without that"
        )
    try:
        return _listed(name, wanted, root)
    except _Unlisted as problem:
        if here is not None:
            commit = snapshot_of(here).name
            _LOG.warning("event=hub_unused model=%s commit=%s reason=%r", name, commit, str(problem))
            return here
        first, also = "", ""
        if problem.is_outage:
            first, also = "no such folder, and ", f"; nor is it complete in the cache, {root}"
        raise ModelError(f"--model {name}: {first}{problem}{also}") from problem


class _Unlisted(Exception):
    """The hub does not list a repository; the message says why.

    Attributes:
        is_outage: This was no word of a hub about the repository, so a later attempt may succeed.
    """

    def __init__(self, message: str, *, is_outage: bool) -> None:
        super().__init__(message)
        self.is_outage = is_outage


def _listed(name: str, revision: str, root: Path) -> _Repository:
    """Ask the hub for the files of a repository.

    Raises:
        ModelError: The repository has no such revision, or not one such GGUF file.
        _Unlisted: The hub does not list the repository for any other reason.
    """
    from huggingface_hub import HfApi, constants, errors

    repository = repository_of(name)
    try:
        api = HfApi(endpoint=constants.ENDPOINT, library_name="ferrule")
        info = api.model_info(repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"--revision {revision}: {repository} has no such branch, tag or commit") from error
    # A server that is not a hub may cause any of these.
    except (_http_failure(), OSError, ValueError, TypeError, KeyError) as error:
        raise _Unlisted(_reason(error, repository), is_outage=_is_outage(error)) from error
    if not _COMMIT.fullmatch(str(info.sha)):
        raise _Unlisted(f"{constants.ENDPOINT} names no commit; is it a hub?", is_outage=True)
    found = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    gguf = named_parts(name, found)
    files = {path: _file(it) for path, it in found.items() if path in gguf or (not gguf and _is_wanted(path))}
    folder = root / f"models--{repository.replace('/', '--')}" / "snapshots" / str(info.sha)
    others = tuple(path for path in found if path not in files)
    return _Repository(name, repository, revision, folder, files, others, gguf)


def _file(sibling: Any) -> _File:  # its fields differ between versions of the library
    """Return a file as the hub lists it."""
    if sibling.lfs is not None:
        return _File(int(sibling.lfs.size), str(sibling.lfs.sha256))
    return _File(int(sibling.size or 0), str(sibling.blob_id))


def _is_wanted(path: str) -> bool:
    """Return whether the server may read a file; the index decides which of the safetensors it reads."""
    is_weights = path == INDEX_FILE or (path.endswith(".safetensors") and re.fullmatch(r"[A-Za-z0-9][\w.-]*", path))
    return bool(path in CONFIGS or TEXTS.fullmatch(path) or is_weights)


def _complete(name: str, revision: str) -> Path | None:
    """Return the model in the stored commit of a revision; None if it lacks its configuration or weights."""
    import huggingface_hub

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repository_of(name), revision=revision, local_files_only=True, allow_patterns=[]
            )
        )
        gguf = named_parts(name, (str(path.relative_to(folder)) for path in folder.rglob("*.gguf")))
    except (OSError, ValueError, ModelError):
        return None
    model = folder / gguf[0] if gguf else folder
    return model if (gguf or is_file(folder / "config.json")) and has_weights(model) else None


def _newest(name: str, folder: Path) -> Path | None:
    """Return the folder of a commit with weights: that of the main branch, else any; None if there is none."""
    commits = sorted(path.name for path in (folder / "snapshots").glob("*"))
    return next((found for revision in ("main", *commits) if (found := _complete(name, revision)) is not None), None)


def _compare(name: str, folder: Path, digests: Mapping[str, str]) -> None:
    """Compare weights with their digests, once: the library compares sizes alone. Remove those that are damaged."""
    mark = folder.parents[1] / _MARK
    seen = set(mark.read_text(errors="replace").splitlines()) if is_file(mark) else set()
    lines = {path: _line(folder / path, digest) for path, digest in digests.items() if _SHA256.fullmatch(digest)}
    unseen = [path for path, line in lines.items() if line not in seen]
    damaged = [path for path in unseen if not _is_whole(folder / path, digests[path])]
    with contextlib.suppress(OSError):  # if the cache cannot be written, each start compares them
        for path in damaged:
            (folder / path).resolve().unlink()
            (folder / path).unlink(missing_ok=True)
        with mark.open("a") as file:
            file.writelines(f"{lines[path]}\n" for path in unseen if path not in damaged)
    if damaged:
        raise ModelError(f"--model {name}: {damaged[0]} arrived damaged and is not kept; start again")


def _line(path: Path, digest: str) -> str:
    """Return the line of a file that has been compared; a file that is written again has another one."""
    return f"{digest} {path.stat().st_size} {int(path.stat().st_mtime)}"


def _is_whole(path: Path, digest: str) -> bool:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """Raise a ModelError in place of what a transfer raises."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(f"--model {name}: {_reason(error.__cause__ or error, name)}; start again") from error
    except _http_failure() as error:
        raise ModelError(f"--model {name}: {_reason(error, name)}") from error
    except (OSError, RuntimeError, ValueError, ImportError) as error:  # those of Xet have no number
        is_local = getattr(error, "errno", None) is not None
        what = f"{constants.HF_HUB_CACHE} cannot be written" if is_local else "the transfer failed"
        raise ModelError(f"--model {name}: {what}: {_first_line(error)}") from error


def _reason(error: BaseException, name: str) -> str:
    """Return in one line why a request failed, and what to do about it."""
    from huggingface_hub import constants, errors, get_token

    status, endpoint = _status_of(error), constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"the repository is gated: accept its terms at {endpoint}/{name}, and set HF_TOKEN to its token"
    if isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and get_token() is None):
        return (
            f"no such folder, and {endpoint} has no such repository, or it is private and needs HF_TOKEN, a token that"
            " may read it"
        )
    if status == 401:
        return f"{endpoint} does not accept the token in HF_TOKEN, or of 'hf auth login'"
    if status is not None:
        return f"{endpoint} answers {status}"
    if "bearer" in str(error).lower():  # HTTP clients show a header that they refuse
        return f"{endpoint} cannot be reached (HF_TOKEN holds characters that no token has)"
    return f"{endpoint} cannot be reached ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    """Return the first line of a message without the queries of its addresses: some are signed."""
    return re.sub(r"\?\S+", "", (str(error).splitlines() or [type(error).__name__])[0])


def _http_failure() -> type[Exception]:
    """Return the root of all errors of the library's HTTP client, whichever client that is."""
    from huggingface_hub import errors

    failure: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    return failure


def _status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status of an error; None if there was no response, or no error."""
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def _is_outage(error: BaseException) -> bool:
    """Return whether a later request may succeed: nothing answered, or no hub, or a hub that cannot answer now."""
    status = _status_of(error)
    return status is None or status >= 500 or status in (408, 416, 429)


def _weight_map(folder: Path) -> dict[str, str]:
    with contextlib.suppress(ModelError):
        return read_index(folder)
    return {}


def _disk_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, links not counted."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a part that was completed meanwhile, a folder of another user
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / (1 << 20):.1f} MiB"
