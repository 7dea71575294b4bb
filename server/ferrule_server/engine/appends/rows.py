"""Rows of an append: what each of them returns, and which drafts of a verify are accepted once they have run.

Rows of a verify are numbered from the last certain token on, and each returns the token that follows it::

    tokens   t0   d1   d2   d3          d1 and d2 are accepted, d3 is not: row 2 chose x instead
    row       0    1    2    3
    chosen   d1   d2    x    -          committed: t0 d1 d2, answered: rows 0 to 2, next_token x
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any, Final

from ferrule_server.engine.jobs import SEED_BITS, Acceptance, Drafts, OutputRequest, Verified
from ferrule_server.executor.base import DraftSpec, OutputSpec, RowOutput, Shaping
from ferrule_server.kv.sequence import Sequence

_NUMBERS: Final = ("token", "model_logprob", "sampled_logprob", "target_logprob", "entropy", "is_accepted")


def verify(drafts: Drafts, draft_ids: SequenceOf[int], rows: SequenceOf[RowOutput]) -> Verified:
    """Return which of the drafts are accepted, by the rule of the request.

    A row that is not finite chooses nothing: no draft after it is accepted, and it is the last row of the answer.

    Args:
        drafts: Has the rule: EXACT or REJECTION.
        draft_ids: The drafts, a chain.
        rows: The outputs of row 0 and of each draft's row.
    """
    is_exact = drafts.acceptance is Acceptance.EXACT
    count = 0
    while count < len(draft_ids) and (rows[count].token == draft_ids[count] if is_exact else rows[count].is_accepted):
        count += 1
    return Verified(count, rows[count].token)


def with_row_handles(verified: Verified, drafts: Drafts, sequence: Sequence, length_after: int) -> Verified:
    """Return ``verified`` with the handles at row 0 and at each appended draft, if they are requested.

    Args:
        verified: The result of judging the drafts.
        drafts: Says whether handles are requested.
        sequence: Holds the committed tokens.
        length_after: Length after the last appended token.
    """
    if not drafts.wants_row_handles:
        return verified
    first = length_after - verified.num_appended(drafts.count)
    return replace(verified, row_handles=tuple(sequence.handle_at(n) for n in range(first, length_after + 1)))


def with_tokens(verified: Verified, draft_ids: SequenceOf[int], rows: SequenceOf[RowOutput]) -> list[RowOutput]:
    """Return the rows of a verify that were run again, with the tokens that were answered before.

    In another batch the last bits of a row's logits may differ; the committed tokens stay the same.

    Args:
        verified: The result that was answered.
        draft_ids: The drafts.
        rows: Those of row 0 and of the accepted drafts.
    """
    tokens = (*draft_ids[: verified.accepted_count], verified.next_token)
    pairs = zip(rows, tokens, strict=True)
    return [row if row.token == token or not row.is_finite else replace(row, token=token) for row, token in pairs]


def with_numbers(rows: SequenceOf[RowOutput], numbers: SequenceOf[RowOutput]) -> list[RowOutput]:
    """Return rows that were run again, with the tokens and numbers that were answered before, and their own arrays.

    Args:
        rows: The rows that were run again.
        numbers: Those answered before, without their arrays; other rows if none or not as many are known.
    """
    if len(rows) != len(numbers):
        return list(rows)
    pairs = zip(rows, numbers, strict=True)
    return [row if not row.is_finite else replace(row, **_numbers_of(answered)) for row, answered in pairs]


def without_arrays(row: RowOutput) -> RowOutput:
    """Return the row with its numbers alone."""
    return RowOutput(row.position, **_numbers_of(row))


def _numbers_of(row: RowOutput) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _NUMBERS}


def row_specs(
    output: OutputRequest, token_ids: tuple[int, ...], drafts: Drafts | None = None, known_seed: int | None = None
) -> Mapping[int, OutputSpec]:
    """Return what each row returns, in ascending order; rows without an entry return nothing. All draw with one seed.

    Args:
        output: The request.
        token_ids: The tokens of all rows, drafts included; at least one, and one more than there are drafts.
        drafts: Of a verify: row 0 and every draft then return something.
        known_seed: The seed that an unseeded draw used before; None: a new one is chosen.
    """
    spec = output.spec
    if spec is None:
        return {}
    if spec.sample is not None and not output.is_seeded:
        seed = secrets.randbits(SEED_BITS) if known_seed is None else known_seed
        spec = replace(spec, sample=replace(spec.sample, seed=seed))
    last = len(token_ids) - 1
    if last == 0 and drafts is None and not output.wants_targets:
        return {0: spec}
    if drafts is not None:
        first = last - drafts.count
        rows = range(first, last + 1)
        specs = {row: _verify_spec(spec, drafts, row - first, token_ids[row + 1 : row + 2]) for row in rows}
    else:
        rows = range(0 if output.all_positions else last, last + 1)
        specs = dict.fromkeys(rows, spec)
    if output.wants_targets:
        return TargetSpecs(specs, (*token_ids[1:], output.last_target))
    return specs


@dataclass(frozen=True, slots=True)
class TargetSpecs(Mapping[int, OutputSpec]):
    """Specs whose rows return the log-probability of the token that follows them.

    Each spec is made when its row is run: making those of a whole long prompt at once would take the engine thread 0.1
    s.

    Attributes:
        specs: By row, without their targets.
        targets: The token that follows each row, -1: unknown.
    """

    specs: Mapping[int, OutputSpec]
    targets: SequenceOf[int]

    def __getitem__(self, row: int) -> OutputSpec:
        """Return the spec of a row."""
        return replace(self.specs[row], target_id=self.targets[row])

    def __iter__(self) -> Iterator[int]:
        """Return the rows, ascending."""
        return iter(self.specs)

    def __len__(self) -> int:
        """Return how many rows return something."""
        return len(self.specs)

    def __contains__(self, row: object) -> bool:
        """Return whether the row returns something."""
        return row in self.specs


def _verify_spec(spec: OutputSpec, drafts: Drafts, row: int, next_ids: tuple[int, ...]) -> OutputSpec:
    """Return the spec of row 0 or of draft ``row``; ``next_ids`` has the draft that follows, or is empty."""
    if drafts.row_masks:
        spec = replace(spec, shaping=replace(spec.shaping or Shaping(), mask=drafts.row_masks[row]))
    if next_ids and drafts.acceptance is Acceptance.REJECTION:
        distribution = drafts.distributions[row] if drafts.distributions else None
        spec = replace(spec, draft=DraftSpec(next_ids[0], distribution))
    return spec
