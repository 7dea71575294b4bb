"""The result of the last append of each sequence, kept so that a retry is answered without running it again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ferrule_server.engine.appends.rows import without_arrays
from ferrule_server.engine.jobs import AppendJob, AppendResult, Drafts, OutputRequest
from ferrule_server.executor.base import DraftDistribution, OutputSpec, RowOutput, Shaping, TokenMask
from ferrule_server.fairness.places import Places
from ferrule_server.quotas import LimitsOf, unlimited

_ROW_BYTES: Final = 200
"""Size of a row of Python objects without its arrays."""
_BIAS_BYTES: Final = 120
_ID_BYTES: Final = 36
_SMALL_REQUEST_BYTES: Final = 8192
"""Up to this size a request is not counted."""
DIGESTS: Final = "1"
"""The version of the digests of requests, which the journal keeps. It changes whenever a field of a request does."""
ANY: Final = bytes(16)
"""In place of a digest of another version: every request is taken for the one that was recorded."""
_MOST_NUMBERS: Final = 256
"""Most rows whose chosen tokens and numbers are kept without their arrays."""
_NO_BITS: Final = np.zeros(0, np.uint8)
_NO_PROBS: Final = np.zeros(0, np.float64)


@dataclass(eq=False, slots=True)
class AppendRecord:
    """One append and its result.

    Attributes:
        principal: The bytes count for it.
        start: Length before the append.
        output: The request as it came (an unseeded one matches an unseeded retry), with only the fingerprints of masks.
            If the request is long and the rows are dropped, or it was restored, its digest.
        result: The answer.
        is_whole: ``result`` has all that was answered. False: its rows were dropped but for their numbers, if they are
            few, so that a replay answers the same tokens; and so were its row handles.
        drafts: Of a verify: the request as it came, with only the digests of distributions and masks; if it was
            restored, its digest. draft_ids: the drafts.
    """

    principal: str
    start: int
    output: OutputRequest | bytes
    result: AppendResult
    is_whole: bool = True
    drafts: Drafts | bytes | None = None
    draft_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """How many tokens were appended."""
        return self.result.handle.length - self.start

    @property
    def num_certain(self) -> int:
        """Of a verify: its tokens before the drafts."""
        verified = self.result.verified
        assert verified is not None, "a verify has a result"
        return self.num_tokens - verified.num_appended(len(self.draft_ids))

    @property
    def num_bytes(self) -> int:
        """Bytes that it counts: those of its rows, except for a single row without arrays, and of a large request."""
        if not self.is_whole or isinstance(self.output, bytes):
            return 0
        return _bytes_answered(self.result.rows) + _bytes_asked(self.output)


class ReplayRecords:
    """The record of the last append of each sequence, by handle_id; their only owner.

    A record is valid as long as it is the sequence's last append. The append rule admits a replay only for tokens that
    are committed after ``start``, and other tokens can only get there by an append, which replaces the record. So
    truncates need not touch it.

    Small parts stay as long as the sequence: the seed, the result of drafts, and a single row of numbers. Bulky parts
    (arrays, several rows, a long request) are bounded in bytes. Beyond a bound, those of the least recent appends are
    dropped. A replay of such an append runs its rows again, with the recorded seed.

    Invariant: ``memory`` has the ``num_bytes`` of the records held, and is not exceeded; the bytes of a principal are
    at most its ``retained_bytes``.

    Args:
        limit_bytes: Most bytes of bulky rows of all principals together.
        limits_of: Returns the quotas of a principal, with its own bound.

    Attributes:
        memory: The bytes of bulky rows, by principal; read only.
    """

    def __init__(self, limit_bytes: int, limits_of: LimitsOf = unlimited) -> None:
        self._limits_of = limits_of
        self._records: dict[str, AppendRecord] = {}
        self._bulky: dict[str, AppendRecord] = {}  # the least recent append first
        self._bulky_of: dict[str, dict[str, AppendRecord]] = {}  # the same records, by principal
        self.memory = Places(limit_bytes)

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, handle_id: str, start: int, job: AppendJob, result: AppendResult) -> None:
        """Keep the answer to ``job``, appended after ``start``, in place of the sequence's previous record."""
        if self._keep_again(handle_id, start, job, result):
            return
        if handle_id in self._bulky:
            self._drop_rows(handle_id)
        spec = job.output.spec
        output, before = job.output, self._records.get(handle_id)
        if before is not None and before.output == output:
            output = before.output
        elif spec is not None and spec.shaping is not None:
            output = _without_mask(output, spec, spec.shaping)
        record = AppendRecord(job.principal, start, output, result)
        if job.drafts is not None:
            _add_drafts(record, job, job.drafts)
        self._records[handle_id] = record
        if num_bytes := record.num_bytes:
            self._hold_rows(handle_id, record, num_bytes)

    def _keep_again(self, handle_id: str, start: int, job: AppendJob, result: AppendResult) -> bool:
        """Write the answer to the same request into the existing record if both are small: one token after another.

        If a record counts no bytes and its request was kept as it came, that request is small.
        """
        record = self._records.get(handle_id)
        if record is None or record.output is not job.output or handle_id in self._bulky or record.drafts is not None:
            return False
        if job.drafts is not None or len(result.rows) != 1 or not _is_small(result.rows[0]):
            return False
        record.start, record.result, record.is_whole = start, result, True
        return True

    def find(self, handle_id: str, start: int, num_tokens: int, job: AppendJob) -> AppendRecord | None:
        """Return the record of the last append if it equals ``job`` and put ``num_tokens`` after ``start``.

        The caller has compared the tokens that were appended. Rejected drafts are recorded only here, so drafts are
        compared here, and how many tokens precede them.
        """
        record = self.find_verify(handle_id, start, job)
        return None if record is None or record.num_tokens != num_tokens else record

    def find_verify(self, handle_id: str, start: int, job: AppendJob) -> AppendRecord | None:
        """Return the record of the last append if it began at ``start`` and had the request and drafts of ``job``."""
        record = self._records.get(handle_id)
        if record is None or record.start != start or not _are_drafts_equal(record.drafts, job.drafts):
            return None
        if not _are_outputs_equal(record.output, job.output):
            return None
        if job.drafts is None:
            return record
        num_certain = len(job.token_ids) - job.drafts.count
        are_equal = record.num_certain == num_certain and record.draft_ids == job.token_ids[num_certain:]
        return record if are_equal else None

    def forget(self, handle_id: str) -> None:
        """Remove the record of a sequence that has ended."""
        if handle_id in self._bulky:
            self._drop_rows(handle_id)
        self._records.pop(handle_id, None)

    def restore(self, handle_id: str, record: AppendRecord) -> None:
        """Keep a record of an earlier run, which counts no bytes, as the one of a restored sequence."""
        assert not record.num_bytes, "a restored record has no arrays"
        self._records[handle_id] = record

    def get(self, handle_id: str) -> AppendRecord | None:
        """Return the record of a sequence, None if it has none."""
        return self._records.get(handle_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        used: dict[str, int] = {}
        for handle_id, record in self._records.items():
            num_bytes = record.num_bytes
            assert (handle_id in self._bulky) == bool(num_bytes), f"{handle_id} is bulky and not listed so"
            if num_bytes:
                used[record.principal] = used.get(record.principal, 0) + num_bytes
        assert used == self.memory.held, f"{used} bytes held, {self.memory.held} counted"
        assert self.memory.num_free >= 0, f"{self.memory.num_held} bytes counted in all"
        self.memory.check_integrity()
        for principal, num_bytes in used.items():
            limit = self._limits_of(principal).retained_bytes
            assert limit is None or num_bytes <= limit, f"{principal} holds {num_bytes} bytes of {limit}"

    def _hold_rows(self, handle_id: str, record: AppendRecord, num_bytes: int) -> None:
        """Count a bulky record, then drop the rows of older ones until every bound holds."""
        principal = record.principal
        own = self._bulky_of.setdefault(principal, {})
        self._bulky[handle_id] = own[handle_id] = record
        self.memory.take(principal, num_bytes)
        while self.memory.num_free < 0:
            self._make_small(next(iter(self._bulky)))
        limit = self._limits_of(principal).retained_bytes
        while limit is not None and self.memory.of(principal) > limit:
            self._make_small(next(iter(own)))

    def _make_small(self, handle_id: str) -> None:
        """Drop the bulky parts of a record, which itself stays."""
        record = self._drop_rows(handle_id)
        if isinstance(record.output, OutputRequest) and _bytes_asked(record.output):
            record.output = digest_of(record.output)

    def _drop_rows(self, handle_id: str) -> AppendRecord:
        """Stop counting the bytes of a bulky record, and return it without its rows."""
        record = self._bulky.pop(handle_id)
        own = self._bulky_of[record.principal]
        del own[handle_id]
        self.memory.give_back(record.principal, record.num_bytes)
        if not own:
            del self._bulky_of[record.principal]
        result = record.result
        verified = result.verified and replace(result.verified, row_handles=())
        record.result = replace(result, rows=numbers_of(result.rows), verified=verified)
        record.is_whole = False
        return record


def numbers_of(rows: tuple[RowOutput, ...]) -> tuple[RowOutput, ...]:
    """Return the rows without their arrays if they chose tokens and are few, else nothing: they can be run again."""
    is_worth = 0 < len(rows) <= _MOST_NUMBERS and rows[0].token is not None
    return tuple(map(without_arrays, rows)) if is_worth else ()


def has_arrays(rows: tuple[RowOutput, ...]) -> bool:
    """Return whether a row has more than numbers."""
    return not all(map(_is_small, rows))


def _are_outputs_equal(recorded: OutputRequest | bytes, asked: OutputRequest) -> bool:
    return recorded in (ANY, digest_of(asked)) if isinstance(recorded, bytes) else recorded == asked


def _are_drafts_equal(recorded: Drafts | bytes | None, asked: Drafts | None) -> bool:
    """Return whether a verify has the drafts of a record, apart from their tokens."""
    if isinstance(recorded, bytes):
        return asked is not None and recorded in (ANY, digest_of(asked))
    return recorded == asked


def _is_small(row: RowOutput) -> bool:
    """Return whether the row has no arrays."""
    return row.logits is None and row.top_ids is None and row.hidden_state is None and row.requested_logprobs is None


def _bytes_of(row: RowOutput) -> int:
    arrays = (row.logits, row.top_ids, row.top_logprobs, row.requested_logprobs, row.hidden_state)
    return _ROW_BYTES + sum(each.nbytes for each in arrays if each is not None)


def _bytes_answered(rows: tuple[RowOutput, ...]) -> int:
    """Return the size of the rows; 0 for a single row of numbers."""
    return 0 if not rows or (len(rows) == 1 and _is_small(rows[0])) else sum(map(_bytes_of, rows))


def _bytes_asked(output: OutputRequest) -> int:
    """Return the size of the request if it is large, else 0."""
    spec = output.spec
    if spec is None or (spec.shaping is None and not spec.logprob_ids):
        return 0
    num_biases = 0 if spec.shaping is None else len(spec.shaping.bias)
    num_bytes = num_biases * _BIAS_BYTES + len(spec.logprob_ids) * _ID_BYTES
    return num_bytes if num_bytes > _SMALL_REQUEST_BYTES else 0


def digest_of(asked: OutputRequest | Drafts) -> bytes:
    """Return 16 bytes that are equal for equal requests, in every run of this version."""
    return hashlib.blake2b(repr(asked).encode(), digest_size=16).digest()


def _add_drafts(record: AppendRecord, job: AppendJob, drafts: Drafts) -> None:
    """Add to the record of a verify its drafts."""
    distributions = tuple(DraftDistribution(each.digest, None, _NO_PROBS) for each in drafts.distributions)
    masks = tuple(TokenMask(mask.fingerprint, _NO_BITS) for mask in drafts.row_masks)
    record.drafts = replace(drafts, distributions=distributions, row_masks=masks)
    record.draft_ids = job.token_ids[len(job.token_ids) - drafts.count :]


def _without_mask(output: OutputRequest, spec: OutputSpec, shaping: Shaping) -> OutputRequest:
    """Return an equal request that keeps no mask alive: records live as long as sequences, masks need not."""
    if shaping.mask is None:
        return output
    mask = TokenMask(shaping.mask.fingerprint, _NO_BITS)
    return replace(output, spec=replace(spec, shaping=replace(shaping, mask=mask)))
