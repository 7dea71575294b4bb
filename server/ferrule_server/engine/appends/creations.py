"""Creations: the sequences created for each request_id, so that a repeated request gets the answer of the first one.

A request that creates sequences has no handle that could tell a retry from a new request. Its ``request_id`` does, per
principal: of a Prefill without a handle, a ForkCache, or an append that ``on_stale=FORK`` turns into a branch.

    begin ----> in flight ---- finish ----> done ---- the last sequence ends ----> dead ---- TOMBSTONE_S ----> forgotten
                    |                        |                                      |
                 abandon: the id is free     answered with the same handles         answered with why they are gone

A repeated request never creates anything, whatever has become of the sequences of the first one.

A Generate creates its sequences by several jobs: its first append (or a later one, by FORK), and a fork for its other
branches, under an id derived from its own (:func:`part_of`). All of these carry a digest of the whole request. So a job
of another request is refused, whichever came first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from typing import Final

from ferrule_server.engine.appends.records import ANY
from ferrule_server.engine.appends.running import Creation, RunningAppend
from ferrule_server.engine.jobs import AppendJob, Drafts, ForkJob, GenerateJob, LaneJob
from ferrule_server.errors import RequestIdReused
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.registry import TOMBSTONE_S

MAX_DEAD: Final = 100_000
"""Most creations that are kept after all their sequences have ended. Beyond it, the principal with the most of them
loses the one that ended first. So a principal that creates and ends thousands of sequences frees only request_ids of
its own."""

FORK: Final = "fork"
"""Names, in derived request_ids, the fork that creates all branches of a Generate except the first."""
_APART: Final = "\0" * 129
"""Separator in derived request_ids. It makes them longer than any that a client may choose (128 bytes)."""

CreatingJob = AppendJob | ForkJob


class Creations:
    """Creations by principal and request_id. Called from the engine thread only.

    Invariant: a creation is in flight (it has a run and no handle) or done (no run, at least one handle); every
    sequence of a creation is counted in its ``num_live`` until it ends; creations without a live sequence are kept by
    principal in the order in which they ended, and number at most MAX_DEAD in all.

    Args:
        clock: Seconds on the store's clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._creations: dict[tuple[str, str], Creation] = {}
        self._makers: dict[str, Creation] = {}  # by handle_id of each live sequence
        self._dead: dict[str, OrderedDict[tuple[str, str], Creation]] = {}
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._creations)

    def find(self, job: LaneJob[object]) -> Creation | None:
        """Return the creation that ``job`` repeats, or None if it repeats none.

        Raises:
            RequestIdReused: The request_id created something else. An append with a handle is let through instead,
                since it is not known yet whether it creates anything.
        """
        if not (isinstance(job, CreatingJob) and job.request_id and _may_create(job)):
            return None
        creation = self._known(job.principal, job.request_id)
        if creation is None and not self._is_taken(job):
            return None
        if creation is not None and creation.content in (ANY, _content_of(job)):
            return creation
        if isinstance(job, AppendJob) and job.handle is not None:
            return None
        raise RequestIdReused(_own(job.request_id))

    def check_free(self, job: CreatingJob) -> None:
        """Check that the job's request_id, with which the job is about to create a sequence, is unused.

        Raises:
            RequestIdReused: Something was created with it.
        """
        if job.request_id and (self._known(job.principal, job.request_id) is not None or self._is_taken(job)):
            raise RequestIdReused(_own(job.request_id))

    def check_loop(self, job: GenerateJob, loop: bytes) -> None:
        """Check that no other request has created anything with the request_id of a Generate.

        Args:
            job: The Generate.
            loop: Its digest, :func:`loop_of`.

        Raises:
            RequestIdReused: One has, or does so now: of another kind, ``num_branches`` or content.
        """
        if not job.request_id:
            return
        for request_id in (job.request_id, part_of(job.request_id, FORK)):
            creation = self._known(job.principal, request_id)
            if creation is not None and creation.content != ANY and creation.loop != loop:
                raise RequestIdReused(_own(job.request_id))

    def begin(self, job: CreatingJob, run: RunningAppend | None = None) -> Creation:
        """Record that ``run`` creates what ``job`` requests; its request_id must be free."""
        creation = Creation((job.principal, job.request_id), _content_of(job), job.loop, run)
        assert creation.key not in self._creations, "a request_id was used twice"
        self._creations[creation.key] = creation
        return creation

    def finish(self, creation: Creation, handles: tuple[Handle, ...]) -> None:
        """Record that the sequences exist: from now on ``handles`` answer the request."""
        creation.run, creation.handles, creation.num_live = None, handles, len(handles)
        self._makers.update((handle.handle_id, creation) for handle in handles)

    def abandon(self, creation: Creation) -> None:
        """Free the request_id of a creation in flight that failed or was given up. One that is done stays."""
        if creation.run is not None:
            creation.run = None
            del self._creations[creation.key]

    def note_ended(self, handle_id: str) -> None:
        """Record that a sequence has ended, whether or not a creation made it."""
        creation = self._makers.pop(handle_id, None)
        if creation is None:
            return
        creation.num_live -= 1
        if not creation.num_live:
            creation.handles = creation.handles[:1]
            self._bury(creation)

    def restore(self, creation: Creation, live_ids: Collection[str]) -> None:
        """Take over a creation of an earlier run that is done.

        Args:
            creation: With its handles; of a dead one only the first.
            live_ids: Which of its sequences, by handle_id, are live now.
        """
        self._creations[creation.key] = creation
        creation.num_live = len(live_ids)
        self._makers.update((handle_id, creation) for handle_id in live_ids)
        if not live_ids:
            self._bury(creation)

    def done(self) -> list[Creation]:
        """Return the creations that are done, those without live sequences last and in the order of their ends."""
        done = [each for each in self._creations.values() if each.handles]
        return sorted(done, key=lambda each: (not each.num_live, each.died_at))

    def is_kept(self, creation: Creation) -> bool:
        """Return whether a creation that was done is not forgotten; its request_id may have created others since."""
        return self._creations.get(creation.key) is creation

    def check_integrity(self, handle_ids: Collection[str]) -> None:
        """Raise AssertionError unless the invariant of the class holds.

        Args:
            handle_ids: Of the live sequences.
        """
        assert self._makers.keys() <= set(handle_ids), "a sequence has ended and still counts as made"
        num_live = Counter(maker.key for maker in self._makers.values())
        for key, creation in self._creations.items():
            assert creation.key == key, "a creation is listed under another request_id"
            assert (creation.run is None) == bool(creation.handles), "a creation is neither in flight nor done"
            assert creation.num_live == num_live[key], f"{creation.num_live} live, {num_live[key]} known"
            is_dead = creation.run is None and not creation.num_live
            assert is_dead == (key in self._dead.get(key[0], ())), "a creation without sequences is not listed so"
        for principal, dead in self._dead.items():
            ends = [creation.died_at for creation in dead.values()]
            assert ends == sorted(ends) != [], f"dead creations of {principal!r} are out of order"
        assert self._num_dead == sum(map(len, self._dead.values())) <= MAX_DEAD, "too many dead creations"

    def _known(self, principal: str, request_id: str) -> Creation | None:
        """Return the creation of that id, unless it has been kept for long enough."""
        dead = self._dead.get(principal)
        now = self._clock()
        while dead and next(iter(dead.values())).died_at + TOMBSTONE_S <= now:
            self._forget_first(dead)
        return self._creations.get((principal, request_id))

    def _is_taken(self, job: CreatingJob) -> bool:
        """Return whether a Generate to which the job does not belong has forked with the job's request_id."""
        branches = self._known(job.principal, part_of(job.request_id, FORK))
        return branches is not None and branches.content != ANY and branches.loop != job.loop

    def _bury(self, creation: Creation) -> None:
        """Keep a creation that is dead now, and explains why its sequences are gone; forget those kept long enough."""
        creation.died_at = self._clock()
        dead = self._dead.setdefault(creation.key[0], OrderedDict())
        dead[creation.key] = creation
        self._num_dead += 1
        while next(iter(dead.values())).died_at + TOMBSTONE_S <= creation.died_at:
            self._forget_first(dead)
        if self._num_dead > MAX_DEAD:
            self._forget_first(max(self._dead.values(), key=len))

    def _forget_first(self, dead: OrderedDict[tuple[str, str], Creation]) -> None:
        key, _ = dead.popitem(last=False)
        del self._creations[key]
        self._num_dead -= 1
        if not dead:
            del self._dead[key[0]]


def _may_create(job: CreatingJob) -> bool:
    """Return whether the job may create a sequence; for an append with a handle, only the append rule decides."""
    return isinstance(job, ForkJob) or job.handle is None or job.on_stale is StalePolicy.FORK


def part_of(request_id: str, what: str) -> str:
    """Return the request_id for a part of the request ``request_id``; empty if that is empty."""
    return f"{request_id}{_APART}{what}" if request_id else ""


def _own(request_id: str) -> str:
    """Return the request_id that the client sent, of one that may be derived from it."""
    return request_id.partition(_APART)[0]


def loop_of(job: GenerateJob) -> bytes:
    """Return a digest of what a Generate is to create: of everything except its request_id and its stop rules."""
    return _digest_of(b"", "generate", job, job.num_branches)


def _content_of(job: CreatingJob) -> bytes:
    """Return a digest of the request without its request_id: equal for a repeated request, and for no other."""
    if isinstance(job, AppendJob):
        return _digest_of(job.loop, "append", job, job.drafts)
    asked = ("fork", tuple(job.handle), job.length, job.count, job.ttl_s)
    return hashlib.blake2b(job.loop + repr(asked).encode(), digest_size=16).digest()


def _digest_of(loop: bytes, kind: str, job: AppendJob | GenerateJob, own: Drafts | int | None) -> bytes:
    """Return a digest of a request with a prompt; ``own``: what only this kind of request has."""
    handle, new = None if job.handle is None else tuple(job.handle), job.new
    kept = (job.ttl_s, new.reserved_length, new.attention_window, new.is_durable)
    asked = (kind, handle, job.output, job.on_stale, *kept, own, len(job.token_ids))
    digest = hashlib.blake2b(loop + repr(asked).encode(), digest_size=16)
    digest.update(array("I", job.token_ids).tobytes())
    return digest.digest()
