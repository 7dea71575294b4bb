"""Row specs: what each row of an append returns, out of what was asked of all of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ferrule_server.engine.jobs import Acceptance, Drafts, OutputRequest
from ferrule_server.executor.base import DraftSpec, OutputSpec, Shaping


def row_specs(
    output: OutputRequest, token_ids: tuple[int, ...], drafts: Drafts | None = None, known_seed: int | None = None
) -> tuple[Mapping[int, OutputSpec], int | None]:
    """Return what each row returns (rows without an entry return nothing, the others ascend), and the seed.

    Args:
        output: What was asked for.
        token_ids: The tokens of all rows, drafts included; at least one, and one more than there are drafts.
        drafts: Of a verify: row 0 and every draft then return something.
        known_seed: What an unseeded draw used before; None: a new one is drawn for it.

    Returns:
        The specs by row, and the seed tokens are drawn with, None where none is drawn.
    """
    spec, seed = output.spec, None
    if spec is None:
        return {}, None
    if spec.sample is not None:
        seed = spec.sample.seed
        if not output.is_seeded:
            seed = secrets.randbits(64) if known_seed is None else known_seed
            spec = replace(spec, sample=replace(spec.sample, seed=seed))
    last = len(token_ids) - 1
    if last == 0 and drafts is None and not output.wants_targets:
        return {0: spec}, seed
    if drafts is not None:
        first = last - drafts.count
        rows = range(first, last + 1)
        specs = {row: _verify_spec(spec, drafts, row - first, token_ids[row + 1 : row + 2]) for row in rows}
    else:
        rows = range(0 if output.all_positions else last, last + 1)
        specs = dict.fromkeys(rows, spec)
    if output.wants_targets:
        return TargetSpecs(specs, (*token_ids[1:], output.last_target)), seed
    return specs, seed


@dataclass(frozen=True, slots=True)
class TargetSpecs(Mapping[int, OutputSpec]):
    """Specs whose rows return the log-probability of the token that follows them.

    Each is made when its row is run: those of a whole long prompt together would take the engine thread 0.1 s.

    Attributes:
        specs: By row, without their targets.
        targets: The token that follows each row, -1: none is known.
    """

    specs: Mapping[int, OutputSpec]
    targets: Sequence[int]

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
    """What row 0, or that of draft ``row``, returns; ``next_ids`` has the draft that follows, or nothing."""
    if drafts.row_masks:
        spec = replace(spec, shaping=replace(spec.shaping or Shaping(), mask=drafts.row_masks[row]))
    if next_ids and drafts.acceptance is Acceptance.REJECTION:
        law = drafts.laws[row] if drafts.laws else None
        spec = replace(spec, draft=DraftSpec(next_ids[0], law))
    return spec
