"""Open the journal of a server: what it described, and the writer that continues it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ferrule_server.durability.directory import DurableDirectory, Wanted, cannot_write
from ferrule_server.durability.files import Files
from ferrule_server.durability.reader import OnProgress, read_directory
from ferrule_server.durability.replay import JournalState
from ferrule_server.durability.writer import SEGMENT_BYTES, JournalWriter
from ferrule_server.engine.appends.records import DIGESTS
from ferrule_server.engine.durable.journal import Journal
from ferrule_server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Durability:
    """A journal that was read and can be continued.

    Attributes:
        journal: Writes what happens from now on.
        state: What the journal described.
        root: Identifies the model that it is of: the root of every lineage.
        epoch: The epoch in the cache_ids of durable sequences.
        seed_key: 16 secret bytes from which seeds of Generate are derived.
        knows_digests: The digests of requests in the records can be compared with those of this version.
    """

    journal: Journal
    state: JournalState
    root: bytes
    epoch: str
    seed_key: bytes
    knows_digests: bool


def open_durability(
    path: Path,
    wanted: Wanted,
    files: Files | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    on_progress: OnProgress | None = None,
) -> Durability:
    """Lock the directory, read what it describes, and continue it.

    Args:
        path: The directory, created if it is missing.
        wanted: What it must belong to.
        files: The system calls; None: those of the operating system.
        segment_bytes: The size of a segment.
        on_progress: Called with the share that is read.

    Raises:
        ConfigError: Another process owns it, it belongs to another server or model, it is damaged, or it cannot be
            written.
    """
    directory = DurableDirectory.open(path, wanted, files)
    directory.digests = DIGESTS
    try:
        found = read_directory(path, directory.files, on_progress)
        writer = partial(JournalWriter, directory, last_frame=found.last_frame, segment_bytes=segment_bytes)
        journal = Journal(directory, lambda on_synced, on_failed: writer(on_synced=on_synced, on_failed=on_failed))
    except OSError as error:
        directory.close()
        raise ConfigError(cannot_write(path, error)) from error
    except ConfigError:
        directory.close()
        raise
    knows_digests, identity = found.digests <= {DIGESTS}, directory.identity
    return Durability(journal, found.state, identity.fingerprint, identity.epoch, identity.seed_key, knows_digests)
