"""How tokens are chosen, as requests ask for it and as the sequential model works it out from the tokens alone.

Shares no code with the server but the draw itself (``select_rows``), which has proofs of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ferrule.v1 import executor_pb2, policy_pb2, types_pb2
from ferrule_server.executor.base import (
    DraftDistribution,
    DraftSpec,
    OutputSpec,
    RowOutput,
    SampleSpec,
    Shaping,
    TokenMask,
)
from ferrule_server.executor.sampling.selection import select_rows

Tokens = tuple[int, ...]

VOCAB_SIZE = 256
NUM_HEADS = 4
HEAD_DIM = 8

GREEDY, SEEDED, UNSEEDED, NOTHING = "greedy", "seeded", "unseeded", "nothing"
PLAIN, MASKED, SHAPED = "plain", "masked", "shaped"
INLINE, LISTED, NAMED = "inline", "listed", "named"
NONE, EXACT, REJECTION = (
    executor_pb2.ACCEPTANCE_RULE_NONE,
    executor_pb2.ACCEPTANCE_RULE_EXACT,
    executor_pb2.ACCEPTANCE_RULE_REJECTION,
)
MASKS: dict[str, Tokens] = {MASKED: (1, 2), SHAPED: (1, 2, 3)}
"""Few tokens, so that what is drawn is often what somebody else appends or drafts."""
PENALTY_START = 2


@dataclass(frozen=True)
class Policy:
    """What a request asks of its rows.

    Attributes:
        kind: One of GREEDY, SEEDED, UNSEEDED and NOTHING.
        seed: Of SEEDED.
        shape: PLAIN; MASKED: of two tokens; SHAPED: penalties, bias, mask and top-k or top-p. NOTHING is always PLAIN.
    """

    kind: str
    seed: int = 0
    shape: str = PLAIN

    def message(self, mask: policy_pb2.TokenMask | None = None) -> policy_pb2.LogitsReturnPolicy:
        """Return it as the contract writes it; its mask as ``mask``, or as a list of ids."""
        if self.kind == NOTHING:
            return policy_pb2.LogitsReturnPolicy()
        if self.shape != PLAIN and mask is None:
            mask = listed(MASKS[self.shape])
        if self.kind == GREEDY:
            greedy = policy_pb2.GreedyArgmax(token_mask=mask)
            if self.shape == SHAPED:
                greedy.repetition_penalty, greedy.penalty_start = 1.5, PENALTY_START
            return policy_pb2.LogitsReturnPolicy(greedy_argmax=greedy)
        sample = policy_pb2.Sample(seed=self.seed if self.kind == SEEDED else None, token_mask=mask)
        if self.shape == SHAPED:
            sample.MergeFrom(
                policy_pb2.Sample(
                    temperature=0.75,
                    top_k=2,
                    top_p=0.875,
                    repetition_penalty=1.5,
                    frequency_penalty=0.25,
                    presence_penalty=0.5,
                    penalty_start=PENALTY_START,
                    logit_bias={1: 0.5, 3: 0.25},
                )
            )
        return policy_pb2.LogitsReturnPolicy(sample=sample)

    @property
    def chooses(self) -> bool:
        """Whether a token is chosen."""
        return self.kind != NOTHING

    @property
    def draws(self) -> bool:
        """Whether it is drawn."""
        return self.kind in (SEEDED, UNSEEDED)

    def spec(self, seed: int | None, mask: Tokens = (), draft: DraftSpec | None = None) -> OutputSpec:
        """Return what an executor is asked; ``mask`` stands in place of the policy's own."""
        shaping = self._shaping(mask or MASKS.get(self.shape, ()))
        if seed is None:
            return OutputSpec(greedy=True, shaping=shaping)
        sample = SampleSpec(seed=seed)
        if self.shape == SHAPED:
            sample = SampleSpec(temperature=0.75, top_k=2, top_p=0.875, seed=seed)
        return OutputSpec(sample=sample, shaping=shaping, draft=draft)

    def _shaping(self, mask: Tokens) -> Shaping | None:
        token_mask = _bits(mask) if mask else None
        if self.shape != SHAPED:
            return None if token_mask is None else Shaping(mask=token_mask)
        if self.kind == GREEDY:
            return Shaping(repetition_penalty=1.5, penalty_start=PENALTY_START, mask=token_mask)
        return Shaping(1.5, 0.25, 0.5, PENALTY_START, ((1, 0.5), (3, 0.25)), token_mask)


@dataclass(frozen=True)
class Drafts:
    """What makes an append a verify.

    Attributes:
        draft_ids: A chain. acceptance: who decides which of them hold.
        probs: Of REJECTION, by draft: how likely tokens 1 and 2 were; empty: chosen with certainty.
        is_dense: How these are written.
        row_masks: Tokens that may follow each row; one per row, or none.
        wants_handles: A handle at each row is wanted.
    """

    draft_ids: Tokens
    acceptance: executor_pb2.AcceptanceRule
    probs: tuple[tuple[float, float], ...] = ()
    is_dense: bool = False
    row_masks: tuple[Tokens, ...] = ()
    wants_handles: bool = False

    def is_valid_with(self, policy: Policy) -> bool:
        """Whether the policy has what the rule and the masks work with."""
        if self.probs and self.acceptance != REJECTION:
            return False
        if self.acceptance == REJECTION and not policy.draws:
            return False
        return policy.chooses or (self.acceptance != EXACT and not self.row_masks)

    def message(self) -> executor_pb2.VerifyInput:
        """Return the part of a verify that is about drafts."""
        return executor_pb2.VerifyInput(
            draft_ids=self.draft_ids,
            acceptance=self.acceptance,
            draft_probs=self._probs_message() if self.probs else None,
            token_masks=[listed(mask) for mask in self.row_masks],
            return_row_handles=self.wants_handles,
        )

    def _probs_message(self) -> executor_pb2.DraftProbs:
        if not self.is_dense:
            distributions = [[(token, p) for token, p in ((2, row[1]), (1, row[0])) if p] for row in self.probs]
            entries = [entry for distribution in distributions for entry in distribution]
            sparse = executor_pb2.SparseProbs(
                row_sizes=[len(distribution) for distribution in distributions],
                token_ids=[token for token, _ in entries],
                probs=[p for _, p in entries],
            )
            return executor_pb2.DraftProbs(sparse=sparse)
        rows = np.zeros((len(self.probs), VOCAB_SIZE), "<f4")
        rows[:, 1:3] = self.probs
        dense = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=rows.shape, data=rows.tobytes())
        return executor_pb2.DraftProbs(dense=dense)

    def _distribution(self, index: int) -> DraftDistribution | None:
        if not self.probs:
            return None
        return DraftDistribution(b"", np.array([1, 2], np.int32), np.array(self.probs[index], np.float64))

    def verify(self, before: Tokens, policy: Policy, seed: int | None, window: int = 0) -> Verified:
        """Return what becomes of the drafts behind the tokens ``before``: one row after the other."""
        chosen: list[int] = []
        num_held, next_token = 0, None
        for row in range(len(self.draft_ids) + 1):
            draft_id = self.draft_ids[row] if row < len(self.draft_ids) else None
            mask = self.row_masks[row] if self.row_masks else ()
            draft = None
            if self.acceptance == REJECTION and draft_id is not None:
                draft = DraftSpec(draft_id, self._distribution(row))
            if policy.chooses:
                output = chosen_row(before + self.draft_ids[:row], policy, seed, mask, draft, window=window)
                assert output.token is not None
                chosen.append(output.token)
                holds = output.token == draft_id if draft is None else bool(output.is_accepted)
            if self.acceptance == NONE:
                continue
            if draft_id is None or not holds:
                next_token = chosen[-1]
                break
            num_held += 1
        return Verified(num_held, next_token, tuple(chosen))


@dataclass(frozen=True)
class Verified:
    """What becomes of drafts: those that hold, what follows, and the tokens chosen at each row that is answered."""

    num_held: int
    next_token: int | None
    chosen: Tokens


def reference_logits(tokens: SequenceOf[int], window: int = 0) -> npt.NDArray[np.float32]:
    """Return the paged reference's distribution, float32 [VOCAB_SIZE], from the tokens alone, without any cache."""
    tokens = tokens[-window:]
    width = NUM_HEADS * HEAD_DIM
    rows = np.zeros((len(tokens), width), np.float32)
    rows[np.arange(len(tokens)), np.array(tokens) % width] = 1
    logits = np.zeros(VOCAB_SIZE, np.float32)
    for head in range(NUM_HEADS):
        part = rows[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]
        scores = (part @ part[-1]) * np.float32(HEAD_DIM**-0.5)
        weights = np.exp(scores - scores.max()).astype(np.float64)
        logits[head * HEAD_DIM : (head + 1) * HEAD_DIM] = (weights @ part / weights.sum()).astype(np.float32)
    return logits


def chosen_row(
    tokens: Tokens,
    policy: Policy,
    seed: int | None,
    mask: Tokens = (),
    draft: DraftSpec | None = None,
    *,
    window: int = 0,
) -> RowOutput:
    """Return the row of the last of the tokens: which token follows, and whether that is the draft, accepted."""
    history = np.array(tokens[PENALTY_START:], np.int32)
    spec = policy.spec(seed, mask, draft)
    (row,) = select_rows(reference_logits(tokens, window)[None], [len(tokens) - 1], [spec], [history])
    return row


def drawn_token(tokens: Tokens, policy: Policy, seed: int | None, window: int = 0) -> int:
    """Return the token that follows: the likeliest where the seed is None, else the one drawn with it."""
    token = chosen_row(tokens, policy, seed, window=window).token
    assert token is not None
    return token


def listed(tokens: Tokens) -> policy_pb2.TokenMask:
    """Return a mask as the ids that are allowed."""
    return policy_pb2.TokenMask(allowed_ids=policy_pb2.TokenIdList(token_ids=tokens))


def packed(tokens: Tokens) -> bytes:
    """Return a mask as bits."""
    return np.packbits(np.isin(np.arange(VOCAB_SIZE), tokens), bitorder="little").tobytes()


def _bits(tokens: Tokens) -> TokenMask:
    return TokenMask(b"", np.frombuffer(packed(tokens), np.uint8))
