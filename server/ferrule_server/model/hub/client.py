"""Ask the hub for the files of a repository and for their bytes. Only this module imports huggingface_hub."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from ferrule_server.errors import ModelError
from ferrule_server.model.checkpoint import INDEX_FILE
from ferrule_server.model.hub.cache import HubCache
from ferrule_server.model.hub.fetch import CutOff, RemoteFile, Response

CONFIGS: Final = ("config.json", "generation_config.json")
"""Fetched first, because they decide whether a model can run."""
TEXTS: Final = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|chat_template\.jinja"
    r"|additional_chat_templates/[A-Za-z0-9][A-Za-z0-9._-]*\.jinja"
)
"""Matches the other files that are read besides the weights."""

_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit.

    Attributes:
        commit: The commit.
        files: The files that the server may read, by path.
        others: The paths of all other files.
    """

    commit: str
    files: dict[str, RemoteFile]
    others: tuple[str, ...]


class Unlisted(Exception):
    """The hub does not list a repository; the message says why. A later attempt may succeed."""

    def __init__(self, message: str, *, is_outage: bool) -> None:
        super().__init__(message)
        self.is_outage = is_outage


class HubClient:
    """One model on the hub. The first instance imports huggingface_hub, which reads its own settings.

    Args:
        name: ``org/name``.
        revision: Branch, tag or commit.

    Attributes:
        endpoint: Address of the hub.
        is_offline: HF_HUB_OFFLINE forbids requests.
        root: The cache of all models.
        cache: The cache of this model.
    """

    def __init__(self, name: str, revision: str) -> None:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        import huggingface_hub
        from huggingface_hub import constants, errors, utils

        for client in ("httpx", "httpx2"):  # at INFO the client logs every address, signed ones too
            logging.getLogger(client).setLevel(logging.WARNING)
        self._library, self._utils = huggingface_hub, cast("Any", utils)
        self._errors = errors
        # The root of all errors of its HTTP client, whichever client that is.
        self._failure: type[Exception] = errors.HfHubHTTPError.__bases__[0]
        self.name, self.revision = name, revision
        self.is_offline = bool(constants.HF_HUB_OFFLINE)
        self.endpoint = str(constants.ENDPOINT)
        self.root = Path(constants.HF_HUB_CACHE)
        self.cache = HubCache(self.root, name)
        self._headers = self._utils.build_hf_headers(library_name="ferrule")

    def listing(self) -> Listing:
        """Return the files of the repository.

        Raises:
            ModelError: The repository has no such revision.
            Unlisted: The hub does not list the repository for any other reason.
        """
        api = self._library.HfApi(endpoint=self.endpoint)
        try:
            info = api.model_info(self.name, revision=self.revision, files_metadata=True, timeout=_TIMEOUT_S)
        except self._errors.RevisionNotFoundError as error:
            raise ModelError(f"--revision {self.revision}: {self.name} has no such branch, tag or commit") from error
        # A server that is not a hub may cause any of these.
        except (self._failure, OSError, ValueError, TypeError, KeyError) as error:
            raise Unlisted(self._reason(error), is_outage=_is_outage(error)) from error
        found = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        files = {path: _remote_file(sibling) for path, sibling in found.items() if _is_wanted(path)}
        if not re.fullmatch(r"[0-9a-f]{40}", str(info.sha)):
            raise Unlisted(f"{self.endpoint} names no commit; is it a hub?", is_outage=True)
        return Listing(str(info.sha), files, tuple(path for path in found if path not in files))

    @contextmanager
    def get(self, path: str, commit: str, offset: int) -> Iterator[Response]:
        """Request a file from an offset on; the response is open while the body runs.

        Raises:
            CutOff: The request failed, but a later one may succeed.
            ModelError: The hub refuses it.
        """
        url = self._library.hf_hub_url(self.name, path, revision=commit, endpoint=self.endpoint)
        headers = {**self._headers, "accept-encoding": "identity"}
        if offset:
            headers["range"] = f"bytes={offset}-"
        try:
            session = self._library.get_session()
            with session.stream("GET", url, headers=headers, timeout=_TIMEOUT_S) as response:
                self._utils.hf_raise_for_status(response)
                yield response
        except self._failure as error:
            if _is_outage(error):
                raise CutOff(self._reason(error)) from error
            raise ModelError(f"--model {self.name}: {self._reason(error)}") from error

    def _reason(self, error: Exception) -> str:
        """Return in one line why a request failed, and what to do about it."""
        status = _status_of(error)
        if isinstance(error, self._errors.GatedRepoError):
            return (
                f"the repository is gated: accept its terms at {self.endpoint}/{self.name} and set HF_TOKEN to a token"
                " of that account"
            )
        is_anonymous = "authorization" not in self._headers
        if isinstance(error, self._errors.RepositoryNotFoundError) or (status == 401 and is_anonymous):
            return (
                f"no such folder, and {self.endpoint} has no such repository, or it is private and needs HF_TOKEN, a"
                " token that may read it"
            )
        if status == 401:
            return f"{self.endpoint} does not accept the token in HF_TOKEN, or of 'hf auth login'"
        if status is not None:
            return f"{self.endpoint} answers {status}"
        return f"{self.endpoint} cannot be reached ({_first_line(error)})"


def cache_root() -> Path:
    """Return the folder of the cache of all models; it need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _is_wanted(path: str) -> bool:
    """Return whether the server may read a file; the index decides which of the safetensors it reads."""
    is_weights = path == INDEX_FILE or (path.endswith(".safetensors") and re.fullmatch(r"[A-Za-z0-9][\w.-]*", path))
    return bool(path in CONFIGS or TEXTS.fullmatch(path) or is_weights)


def _remote_file(sibling: Any) -> RemoteFile:  # its fields differ between versions of the library
    """Return a file as the hub lists it."""
    large = sibling.lfs
    if large is not None:
        return RemoteFile(sibling.rfilename, int(large.size), str(large.sha256))
    return RemoteFile(sibling.rfilename, -1 if sibling.size is None else int(sibling.size), str(sibling.blob_id))


def _status_of(error: Exception) -> int | None:
    """Return the HTTP status of an error; None if there was no response."""
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def _is_outage(error: Exception) -> bool:
    """Return whether a later request may succeed."""
    status = _status_of(error)
    return status is None or status >= 500 or status in (408, 416, 429)


def _first_line(error: Exception) -> str:
    """Return the first line of an error, but never a token: HTTP clients show a header that they refuse."""
    if "bearer" in str(error).lower():
        return "HF_TOKEN holds characters that no token has"
    return (str(error).splitlines() or [type(error).__name__])[0]
