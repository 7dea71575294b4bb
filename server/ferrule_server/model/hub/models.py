"""Fetch a model by its name, ``org/name``, into a folder of the hub's cache that is complete and of one commit.

Only files that the server reads are fetched: configuration, tokenizer, chat templates and safetensors, but never code,
pickles or other formats of the same weights. The configuration is first, so that a model that cannot run is refused
before its weights are fetched. Requests go through huggingface_hub, with its tokens, proxies, HF_ENDPOINT and HF_HOME.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ferrule_server.errors import ModelError
from ferrule_server.model.checkpoint import INDEX_FILE, SINGLE_FILE, read_index
from ferrule_server.model.families.others import NotSupported, files_advice
from ferrule_server.model.hub.cache import (
    HubCache,
    free_bytes,
    has_tokenizer,
    size_of,
    tensors_of,
    weights_of,
)
from ferrule_server.model.hub.client import CONFIGS, TEXTS, HubClient, Listing, Unlisted, cache_root
from ferrule_server.model.hub.fetch import CutOff, RemoteFile, Stopped, fetch_file

OnShare = Callable[[float], None]
"""Called with the share of the weights that has arrived, from 0 to 1; from any thread."""

DEFAULT_REVISION: Final = "main"

_LOG = logging.getLogger(__name__)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_NAME_LENGTH: Final = 96  # the hub's own limit
_NUM_CONNECTIONS: Final = 4
_MOST_BYTES: Final = 50 * 10**9
"""The hub does not send larger files over HTTP."""
_LOG_EVERY_S: Final = 30.0
_MOST_TEXT_BYTES: Final = 256 << 20
"""Largest file besides the weights; the largest tokenizers have 40 MB."""
_SPARE_BYTES: Final = 64 << 20
"""Space on the disk that must stay free."""


def is_hub_name(text: str) -> bool:
    """Return whether a text looks like ``org/name``; a folder of that name may exist nevertheless."""
    is_short = len(text) <= _MAX_NAME_LENGTH
    return is_short and _NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def fetch_model(
    name: str, revision: str | None, *, is_offline: bool, check: Callable[[Path], object], on_share: OnShare
) -> Path:
    """Return the folder of a model of the hub, which is named by its commit; fetch the files that the cache lacks.

    Args:
        name: ``org/name``.
        revision: Branch, tag or commit; None: the main branch.
        is_offline: Use the cache alone, as HF_HUB_OFFLINE=1 does.
        check: Called with the folder as soon as it has the configuration; an exception ends the fetch.
        on_share: Called with the progress of the weights.

    Raises:
        ModelError: There is no such model or revision, access is refused, it has no safetensors, it does not fit on
            the disk, the network fails, or the cache lacks files and requests are forbidden.
    """
    hub, found = _looked_up(name, revision, is_offline=is_offline)
    return found if isinstance(found, Path) else _Fetch(hub, found, on_share).run(check)


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known of a model of the hub before its weights are fetched.

    Attributes:
        folder: Has the configuration, and the index of the weights if there is one.
        stored_bytes: Size of the weights.
        missing_bytes: How many of them are still to be fetched.
        tensors: The names of the tensors, if the repository has an index; else empty.
    """

    folder: Path
    stored_bytes: int
    missing_bytes: int
    tensors: frozenset[str] = frozenset()


def outline_model(name: str, revision: str | None, *, is_offline: bool, check: Callable[[Path], object]) -> Outline:
    """Return what is known of a model of the hub without its weights; fetch its configuration and index alone.

    Args:
        name: ``org/name``.
        revision: Branch, tag or commit; None: the main branch.
        is_offline: Use the cache alone.
        check: As for :func:`fetch_model`.

    Raises:
        ModelError: As for :func:`fetch_model`.
    """
    hub, found = _looked_up(name, revision, is_offline=is_offline)
    if isinstance(found, Listing):
        return _Fetch(hub, found, lambda _: None).outline(check)
    return Outline(found, sum(size_of(found / file) for file in weights_of(found)), 0)


def cached_models() -> list[tuple[str, HubCache]]:
    """Return the models in the cache of the hub by name, complete or not."""
    root = cache_root()
    folders = sorted(path.name for path in root.glob("models--*") if path.is_dir())
    names = [folder.removeprefix("models--").replace("--", "/", 1) for folder in folders]
    return [(name, HubCache(root, name)) for name in names if is_hub_name(name)]


def _looked_up(name: str, revision: str | None, *, is_offline: bool) -> tuple[HubClient, Path | Listing]:
    """Return the folder of a model in the cache if nothing has to be asked for, else the files of its repository."""
    hub = HubClient(name, revision or DEFAULT_REVISION)
    is_forbidden = is_offline or hub.is_offline
    here = hub.cache.complete(hub.revision)
    if here is not None and (is_forbidden or (here.name == hub.revision and has_tokenizer(here))):
        return hub, here
    if is_forbidden:
        asked = f"--revision {revision}: " if revision else ""
        raise ModelError(
            f"--model {name}: {asked}it is not complete in the cache, {hub.root}, and requests are forbidden"
            f" ({'--offline' if is_offline else 'HF_HUB_OFFLINE'}); start once without that"
        )
    try:
        return hub, hub.listing()
    except Unlisted as problem:
        if here is None:
            first, also = "", ""
            if problem.is_outage:
                first, also = "no such folder, and ", f"; nor is it complete in the cache, {hub.root}"
            raise ModelError(f"--model {name}: {first}{problem}{also}") from problem
        _LOG.warning("event=hub_unused model=%s commit=%s reason=%r", name, here.name, str(problem))
        return hub, here


class _Fetch:
    """Fetches one commit of a model into the cache."""

    def __init__(self, hub: HubClient, listing: Listing, on_share: OnShare) -> None:
        self._hub, self._listing, self._on_share = hub, listing, on_share
        self._cache = hub.cache
        self._folder = self._cache.snapshot(listing.commit)
        self._stopping = threading.Event()

    def run(self, check: Callable[[Path], object]) -> Path:
        """Fetch the missing files: the configuration, the texts, then the weights. Return the folder."""
        files = self._listing.files
        with self._failing():
            self._fetch_configuration()
            check(self._folder)
            self._fetch([file for name, file in files.items() if TEXTS.fullmatch(name)])
            self._fetch_weights(self._weights())
            self._remember()
        return self._folder

    def outline(self, check: Callable[[Path], object]) -> Outline:
        """Fetch the configuration and the index, and return what they and the list of files say."""
        with self._failing():
            self._fetch_configuration()
            check(self._folder)
            weights = self._weights()
        missing = self._cache.missing_bytes({file.etag: file.num_bytes for file in self._missing(weights)})
        has_index = SINGLE_FILE not in self._listing.files
        tensors = tensors_of(self._folder) if has_index else frozenset[str]()
        return Outline(self._folder, sum(file.num_bytes for file in weights), missing, tensors)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Raise a ModelError in place of what a fetch raises."""
        try:
            yield
        except CutOff as error:
            raise ModelError(f"--model {self._hub.name}: {error}; what has arrived is kept, start again") from error
        except OSError as error:
            raise ModelError(f"--model {self._hub.name}: {self._hub.root} cannot be written: {error}") from error

    def _fetch_configuration(self) -> None:
        files = self._listing.files
        has_weights = SINGLE_FILE in files or INDEX_FILE in files
        if "config.json" not in files or not has_weights:
            raise self._no_model(has_weights)
        self._fetch([files[name] for name in CONFIGS if name in files])

    def _no_model(self, has_weights: bool) -> ModelError:
        missing = "config.json" if has_weights else "safetensors"
        pickles = [name for name in self._listing.others if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf"))]
        instead = f", only {pickles[0]}, which is not read" if pickles and not has_weights else ""
        text = f"--model {self._hub.name}: the repository has no {missing}{instead}"
        advice = files_advice((*self._listing.files, *self._listing.others))
        if advice is None:
            return ModelError(text)
        return NotSupported(text if instead else f"{text}; {advice[0]}", advice[1])

    def _weights(self) -> list[RemoteFile]:
        """Return the files with weights: the single file, or exactly those that the index names, which is fetched."""
        files = self._listing.files
        names = [SINGLE_FILE]
        if SINGLE_FILE not in files:
            self._fetch([files[INDEX_FILE]])
            try:
                names = sorted(set(read_index(self._folder).values()))
            except ModelError as error:
                raise ModelError(f"--model {self._hub.name}: {error}") from error
        lost = [name for name in names if name not in files]
        if lost:
            raise ModelError(f"--model {self._hub.name}: {INDEX_FILE} names {lost[0]}, which the repository lacks")
        beyond = [name for name in names if files[name].num_bytes > _MOST_BYTES and self._missing([files[name]])]
        if beyond:
            raise ModelError(
                f"--model {self._hub.name}: {beyond[0]} is larger than the hub sends over HTTP; fetch it into the same"
                f" cache with: hf download {self._hub.name} --revision {self._listing.commit}"
            )
        return [files[name] for name in names]

    def _missing(self, files: Iterable[RemoteFile]) -> list[RemoteFile]:
        return [file for file in files if not (self._folder / file.path).exists()]

    def _fetch_weights(self, files: list[RemoteFile]) -> None:
        """Fetch the weights if they fit on the disk, and report the progress."""
        missing = self._missing(files)
        num_bytes = self._cache.missing_bytes({file.etag: file.num_bytes for file in missing})
        free = free_bytes(self._hub.root)
        if num_bytes and num_bytes + _SPARE_BYTES > free:
            raise ModelError(
                f"--model {self._hub.name}: {_gib(num_bytes)} have to be fetched and {self._hub.root} has room for"
                f" {_gib(free)}; make room, or name another disk with HF_HOME"
            )
        total_bytes = sum(file.num_bytes for file in missing)
        if missing:
            _LOG.info(
                "downloading model=%s commit=%s files=%d bytes=%d of_which_here=%d",
                self._hub.name, self._listing.commit, len(missing), total_bytes, total_bytes - num_bytes,
            )  # fmt: skip
            self._fetch(missing, _Tally(total_bytes, self._on_share))

    def _fetch(self, files: list[RemoteFile], tally: _Tally | None = None) -> None:
        """Fetch files over a few connections; the first failure ends the others."""
        on_bytes = (lambda _: None) if tally is None else tally.add
        missing = self._missing(files)
        for file in missing:
            if tally is None and file.num_bytes > _MOST_TEXT_BYTES:
                raise ModelError(f"--model {self._hub.name}: {file.path} has {_gib(file.num_bytes)}; is it a model?")
        with ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="ferrule-hub") as pool:
            futures = [pool.submit(self._fetch_one, file, on_bytes) for file in missing]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            if any(future.exception() for future in done):
                self._stopping.set()
        problems = [problem for future in futures if (problem := future.exception()) is not None]
        for problem in sorted(problems, key=lambda problem: isinstance(problem, Stopped)):
            raise problem

    def _fetch_one(self, file: RemoteFile, on_bytes: Callable[[int], None]) -> None:
        if self._stopping.is_set():
            raise Stopped
        commit = self._listing.commit
        get = functools.partial(self._hub.get, file.path, commit)
        fetch_file(file, self._cache, get=get, on_bytes=on_bytes, stopping=self._stopping)
        self._cache.link(commit, file.path, file.etag)

    def _remember(self) -> None:
        """Store the commit of the revision if the cache can be written."""
        try:
            self._cache.point(self._hub.revision, self._listing.commit)
        except OSError as error:
            _LOG.warning("event=ref_not_written model=%s error=%r", self._hub.name, str(error))


class _Tally:
    """Counts the bytes that have arrived for all files together, and reports them."""

    def __init__(self, total_bytes: int, on_share: OnShare) -> None:
        self._total_bytes, self._on_share = max(1, total_bytes), on_share
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._last_log_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes, and log the count from time to time."""
        with self._lock:
            self._done_bytes += num_bytes
            self._on_share(self._done_bytes / self._total_bytes)
            now_s = time.monotonic()
            if now_s - self._last_log_s > _LOG_EVERY_S:
                self._last_log_s = now_s
                _LOG.info("downloading done_bytes=%d total_bytes=%d", self._done_bytes, self._total_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / (1 << 20):.1f} MiB"
